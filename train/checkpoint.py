"""Checkpoints that are whole or absent.

A checkpoint is a folder ``step-00000100`` with the state and a manifest that holds its SHA-256. It is written aside,
flushed to the disk and renamed, so a kill at any moment leaves the older ones untouched. Loading never runs code
(``weights_only=True``).
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .errors import first_line
from .files import folder_atomic, put_back_replaced, remove_folder

STATE = "state.pt"
MANIFEST = "manifest.json"
FORMAT = 1


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be used; the message names it and says what is wrong with it."""


def save_checkpoint(folder: Path, step: int, state: dict[str, Any], keep_last: int) -> Path:
    """Write `state` (tensors and plain values) as the checkpoint of `step`, then drop all but the newest `keep_last`.

    Raises CheckpointError when it cannot be written (a full disk); the older ones are still there then.
    """
    remove_leftovers(folder)
    path = folder / f"step-{step:08d}"
    try:
        with folder_atomic(path, replace=True) as aside:
            torch.save(state, aside / STATE)
            manifest = {"format": FORMAT, "step": step, "sha256": _sha256(aside / STATE)}
            (aside / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
    except (OSError, RuntimeError) as error:  # torch's writer hides the system's reason behind a RuntimeError
        reason = error if isinstance(error, OSError) else error.__context__ or error
        raise CheckpointError(f"checkpoint {path}: cannot be written: {first_line(reason)}") from error
    older = [other for other in list_checkpoints(folder) if step_of(other) < step]
    for other in older[: max(0, len(older) + 1 - keep_last)]:
        remove_folder(other)
    return path


def list_checkpoints(folder: Path) -> list[Path]:
    """Checkpoint folders, oldest first; whether they are whole is only known after loading."""
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if re.fullmatch(r"step-\d{8,}", path.name)), key=step_of)


def step_of(path: Path) -> int:
    """The step that a checkpoint folder's name says."""
    return int(path.name.removeprefix("step-"))


def load_checkpoint(path: Path) -> dict[str, Any]:
    """The state of one checkpoint, on the CPU. Raises CheckpointError when it is missing, damaged or of another format."""
    if not path.is_dir():
        raise CheckpointError(f"checkpoint {path}: no such folder")
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT:
            raise CheckpointError(f"checkpoint {path}: format {manifest['format']}, this version reads {FORMAT}")
        if manifest["sha256"] != _sha256(path / STATE):
            raise CheckpointError(f"checkpoint {path}: {STATE} is damaged (its SHA-256 differs from the manifest)")
        return torch.load(path / STATE, map_location="cpu", weights_only=True)
    except CheckpointError:
        raise
    except Exception as error:  # a damaged file makes the readers raise almost anything
        raise CheckpointError(f"checkpoint {path}: cannot be read: {first_line(error)}") from error


def load_newest(folder: Path) -> tuple[dict[str, Any], Path, list[CheckpointError]] | None:
    """(state, its path, what was refused on the way) of the newest checkpoint that is whole; None when there is none at all.

    Raises CheckpointError when there are checkpoints and every one of them is damaged.
    """
    put_back_replaced(folder)
    refused: list[CheckpointError] = []
    for path in reversed(list_checkpoints(folder)):
        try:
            return load_checkpoint(path), path, refused
        except CheckpointError as error:
            refused.append(error)
    if refused:
        raise CheckpointError(f"no usable checkpoint in {folder}: " + "; ".join(map(str, refused)))
    return None


def remove_leftovers(folder: Path) -> None:
    """Delete what a killed save left half-written or half-deleted."""
    put_back_replaced(folder)
    for path in folder.glob(".step-*"):
        shutil.rmtree(path, ignore_errors=True)


def rng_state() -> dict[str, Any]:
    """The state of every random generator of this process, in types that load without running code."""
    name, keys, position, has_gauss, gauss = np.random.get_state()  # noqa: NPY002  (the global generator is the point)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "python": random.getstate(),
        "numpy": (str(name), torch.from_numpy(np.asarray(keys).astype(np.int64)), int(position), int(has_gauss), float(gauss)),
    }


def restore_rng(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))  # noqa: NPY002


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
