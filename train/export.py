"""`evenload export RUN FORMAT`: a run's newest checkpoint as files that others read.

A format is one entry of `FORMATS`: a function that writes the model's whole state dict into a new folder.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from ..models import GPT, GPTConfig
from .checkpoint import CHECKPOINTS, MANIFEST, Checkpoint, Checkpointer, CheckpointError, read_model
from .errors import ConfigError, first_line
from .files import folder_atomic
from .hugging_face import write_hf

WEIGHTS, CONFIG, TOKENIZER = "model.safetensors", "config.json", "tokenizer.json"


def export(source: Path, form: str, out: Path | None = None, say: Callable[[str], None] = print) -> Path:
    """Write a checkpoint in another format and return the folder, which has the run's tokenizer beside the model.

    Args:
        source: a run's folder, whose newest whole checkpoint is taken, or one checkpoint.
        form: one of `FORMATS`.
        out: a folder that is not there yet; None = RUN/export/FORMAT-STEP.

    Raises ConfigError for what cannot be done, CheckpointError when there is no whole checkpoint.
    """
    if form not in FORMATS:
        raise ConfigError(f"export: unknown format {form!r}; formats: {', '.join(FORMATS)}")
    checkpoint = find_checkpoint(source, say, "export")
    run = run_folder(checkpoint)
    target = out or run / "export" / f"{form}-{checkpoint.path.name}"
    if target.exists():
        raise ConfigError(f"export: {target} exists; remove it or choose another out=PATH")
    try:
        with folder_atomic(target) as aside:
            FORMATS[form](read_model(checkpoint), checkpoint, aside)
            if (run / TOKENIZER).is_file():
                shutil.copyfile(run / TOKENIZER, aside / TOKENIZER)
    except OSError as error:
        raise ConfigError(f"export: {target} cannot be written: {first_line(error)}") from error
    return target


def load_exported(path: Path) -> GPT:
    """The model in a `safetensors` export, the folder or its `model.safetensors`, on the CPU. Raises ConfigError."""
    file = path / WEIGHTS if path.is_dir() else path
    try:
        from safetensors import safe_open

        with safe_open(file, "pt") as weights:
            model = GPT(GPTConfig(**json.loads(weights.metadata()["config"])["model"]))
            model.load_state_dict({name: weights.get_tensor(name) for name in weights.keys()})  # noqa: SIM118  (not a dict)
    except Exception as error:  # a damaged file makes the readers raise almost anything
        raise ConfigError(f"{file} is not a model of `evenload export RUN safetensors`: {first_line(error)}") from error
    return model


def _safetensors(state: dict[str, Tensor], checkpoint: Checkpoint, folder: Path) -> None:
    """Tensors as they are stored, by their names in GPT, with the step and the configuration; read back and compared."""
    try:
        from safetensors import safe_open
        from safetensors.torch import save_file
    except ImportError as error:
        raise ConfigError("export: safetensors is not installed; pip install 'evenload[train]'") from error

    config = checkpoint.extra["config"]
    about = {"format": "pt", "step": str(checkpoint.step), "config": json.dumps(config)}
    save_file({name: value.contiguous() for name, value in state.items()}, folder / WEIGHTS, about)
    (folder / WEIGHTS).chmod(0o644)  # safetensors makes it private
    with safe_open(folder / WEIGHTS, "pt") as written:
        same = set(written.keys()) == state.keys() and written.metadata() == about
        if not same or not all(_equal(written.get_tensor(name), value) for name, value in state.items()):
            raise OSError(f"{WEIGHTS} does not hold what was written to it")
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _hugging_face(state: dict[str, Tensor], checkpoint: Checkpoint, folder: Path) -> None:
    write_hf(folder, checkpoint.extra["config"]["model"], state, run_folder(checkpoint) / TOKENIZER)


FORMATS: dict[str, Callable[[dict[str, Tensor], Checkpoint, Path], None]] = {"safetensors": _safetensors, "hf": _hugging_face}


def find_checkpoint(source: Path, say: Callable[[str], None], command: str) -> Checkpoint:
    """The checkpoint `source`, or the newest whole one of the run `source`; `command` begins the message of what is raised.

    Raises CheckpointError.
    """
    inside = source / CHECKPOINTS if (source / CHECKPOINTS).is_dir() else source
    checkpoints = Checkpointer(inside)
    if (inside / MANIFEST).exists():
        return checkpoints.open(inside)
    newest = checkpoints.newest()
    if newest is None:
        raise CheckpointError(f"{command}: {source} holds no checkpoint; give a run's folder or one checkpoint of it")
    for error in newest[1]:
        say(f"refused {error}")
    return newest[0]


def run_folder(checkpoint: Checkpoint) -> Path:
    """The folder of the run that a checkpoint belongs to."""
    return checkpoint.path.resolve().parent.parent


def _equal(one: Tensor, other: Tensor) -> bool:
    """To the bit: also where both are NaN."""
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))
