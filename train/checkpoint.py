"""Checkpoints that are whole or absent, of any number of ranks.

A checkpoint is a folder ``step-00000100``: the tensors (see shards.py) and a manifest with the size and SHA-256 of every file.
It is written aside, flushed to the disk and renamed once all ranks are done, so that a kill at any moment leaves the older
ones untouched. Loading never runs code.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict, set_model_state_dict

from .errors import first_line
from .files import publish_folder, put_back_replaced, remove_folder
from .ranks import Ranks
from .rng import restore_rng, rng_state
from .shards import read_index, read_shards, shard_files, stage, write_shards

CHECKPOINTS = "checkpoints"  # the folder of a run that they are in
MANIFEST = "manifest.json"
FORMAT = 2
MODEL, OPTIMIZER, RNG = "model.", "optimizer.", "rng."  # how names begin: model.NAME, optimizer.NAME.MOMENT, rng.RANK.GENERATOR


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be used or written; the message names it and says what is wrong with it."""


@dataclass(frozen=True)
class Checkpoint:
    """What the manifest says.

    Attributes:
        world_size: how many ranks wrote it.
        extra: the small things that came with it, as JSON knows them.
        files: size in bytes and SHA-256 of every file, by name.
    """

    path: Path
    step: int
    world_size: int
    extra: dict[str, Any]
    files: dict[str, tuple[int, str]]

    def verify(self, part: int = 0, parts: int = 1) -> None:
        """Compare the files (of `parts` equal shares, the one numbered `part`) with the manifest. Raises CheckpointError."""
        with _named(self.path):
            for name in sorted(self.files)[part::parts]:
                file, (size, sha256) = self.path / name, self.files[name]
                if not file.is_file():
                    raise ValueError(f"{name} is missing")
                if file.stat().st_size != size:
                    raise ValueError(f"{name} has {file.stat().st_size} bytes instead of {size}")
                if _sha256(file) != sha256:
                    raise ValueError(f"{name} is damaged (its SHA-256 differs from the manifest)")


def list_checkpoints(folder: Path) -> list[Path]:
    """Checkpoint folders, oldest first; whether they are whole is only known after `Checkpoint.verify`."""
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if re.fullmatch(r"step-\d{8,}", path.name)), key=step_of)


def step_of(path: Path) -> int:
    """The step that a checkpoint folder's name says."""
    return int(path.name.removeprefix("step-"))


def read_manifest(path: Path) -> Checkpoint:
    """Raises CheckpointError when there is none, or it is damaged or of another format."""
    with _named(path):
        if not path.is_dir():
            raise ValueError("no such folder")
        try:
            content = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
            if content["format"] == FORMAT and content.pop("sha256") != _seal(content):
                raise ValueError("it is damaged (its own SHA-256 differs)")
        except Exception as error:  # a damaged file makes the readers raise almost anything
            raise ValueError(f"{MANIFEST} cannot be read: {first_line(error)}") from error
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']}, this version reads {FORMAT}")
        files = {name: (size, sha256) for name, (size, sha256) in content["files"].items()}
        return Checkpoint(path, content["step"], content["world_size"], content["extra"], files)


def read_model(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """The model's whole state dict on the CPU, in this process alone, whatever layout it was saved from.

    Raises CheckpointError.
    """
    with _named(checkpoint.path):
        stored = {name: about for name, about in read_index(checkpoint.path).items() if name.startswith(MODEL)}
        tensors = {name: _empty(about) for name, about in stored.items()}
        read_shards(checkpoint.path, tensors, None)
        return {name.removeprefix(MODEL): tensor for name, tensor in tensors.items()}


class Checkpointer:
    """The checkpoints inside `folder`, saved and loaded by all ranks together.

    Plain tensors, DTensors of FSDP2 and experts sharded over other ranks go to one format, by their fully qualified names;
    what one layout saved, any other loads. Every method but `wait` and `close` is to be called by all ranks, at the same
    point; what fails on one rank raises CheckpointError with the same message on all.

    Args:
        keep_last: how many checkpoints stay after a save.
        group: a gloo group of the ranks that share the folder, used by nothing else while a save is under way. None = one
            that is made here, over all ranks (a single process needs none).
        timeout: of the group made here; longer than the slowest write.
    """

    def __init__(
        self,
        folder: Path,
        keep_last: int = 2,
        group: dist.ProcessGroup | None = None,
        timeout: datetime.timedelta | None = None,
    ) -> None:
        self.folder, self.keep_last = folder, keep_last
        self.ranks = Ranks(group, timeout)
        self._writing: _Background | None = None

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            return self.close()
        with suppress(CheckpointError):  # what ended the work is the better message
            self.close()

    def newest(self, folder: Path | None = None) -> tuple[Checkpoint, list[CheckpointError]] | None:
        """The newest whole checkpoint and what was refused on the way; None if there is none at all.

        Args:
            folder: where to look, if not in its own.

        Raises CheckpointError when there are checkpoints and every one of them is damaged.
        """
        inside = folder or self.folder
        refused: list[CheckpointError] = []
        for path in reversed(self._lead(inside, lambda: _listed(inside))):
            try:
                return self.open(path), refused
            except CheckpointError as error:
                refused.append(error)
        if refused:
            raise CheckpointError(f"no usable checkpoint in {inside}: " + "; ".join(map(str, refused)))
        return None

    def open(self, path: Path) -> Checkpoint:
        """The checkpoint `path`, with every file checked, each rank a part of them. Raises CheckpointError."""
        checkpoint = self._lead(path, lambda: read_manifest(path))
        with _named(path):
            self.ranks.together(lambda: checkpoint.verify(self.ranks.rank, self.ranks.size))
        return checkpoint

    def load(self, checkpoint: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Put the checkpoint's state into `model` and `optimizer`, in place.

        The optimizer keeps its own options (learning rate, weight decay, ...). The random generators continue where as many
        ranks load as have saved, and are left alone otherwise. Raises CheckpointError, also when the names or shapes differ;
        the model is not to be used then.
        """
        self.wait()
        with _named(checkpoint.path):
            loading = self.ranks.together(lambda: _Loading(checkpoint, model, optimizer, self.ranks))
            read_shards(checkpoint.path, loading.tensors, self.ranks)
            self.ranks.together(loading.finish)

    def save(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, extra: dict[str, Any]) -> None:
        """Copy everything to the CPU's memory and return; it is written meanwhile, and older checkpoints are dropped then.

        `extra` is kept as JSON. Waits for the save before this one, and raises its error.
        """
        self.wait()
        path = self.folder / f"step-{step:08d}"
        state = {RNG + f"{self.ranks.rank}.{name}": value for name, value in rng_state().items()}
        state |= _model_state(model) | _optimizer_state(model, optimizer)
        tensors = stage(state)
        manifest = {"format": FORMAT, "step": step, "world_size": self.ranks.size, "extra": extra}
        manifest = json.loads(json.dumps(manifest))
        self._writing = _Background(lambda: self._write(path, tensors, manifest))

    def wait(self) -> None:
        """Return when the last save is on the disk. Raises CheckpointError if it failed; older checkpoints are untouched."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.finish()

    def close(self) -> None:
        """Same as `wait`; the end of the work."""
        self.wait()

    def _write(self, path: Path, tensors: dict[str, Tensor], manifest: dict[str, Any]) -> None:
        aside = path.with_name(f".{path.name}.part")
        try:
            self.ranks.lead(lambda: _make_aside(aside))
            write_shards(aside, tensors, self.ranks)
            files = self.ranks.gather(lambda: _summaries(aside, self.ranks))
            manifest["files"] = {name: summary for of_rank in files for name, summary in of_rank.items()}
            self.ranks.lead(lambda: self._commit(aside, path, manifest))
        except Exception as error:
            if self.ranks.rank == 0:
                shutil.rmtree(aside, ignore_errors=True)
            older = [other for other in list_checkpoints(self.folder) if other != path]
            newest = f"the newest checkpoint is {older[-1]}" if older else "there is no older checkpoint"
            raise CheckpointError(f"checkpoint {path}: cannot be written: {first_line(error)}; {newest}") from error

    def _commit(self, aside: Path, path: Path, manifest: dict[str, Any]) -> None:
        sealed = {"sha256": _seal(manifest), **manifest}
        (aside / MANIFEST).write_text(json.dumps(sealed, indent=1), encoding="utf-8")
        publish_folder(aside, path, replace=True)
        older = [other for other in list_checkpoints(self.folder) if step_of(other) < manifest["step"]]
        for other in older[: max(0, len(older) + 1 - self.keep_last)]:
            remove_folder(other)

    def _lead(self, path: Path, work: Callable[[], Any]) -> Any:
        self.wait()  # for the group, which one thing at a time can use
        with _named(path):
            return self.ranks.lead(work)


class _Loading:
    """What to read from a checkpoint into a model and its optimizer, and what to do with it then."""

    def __init__(self, checkpoint: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer | None, ranks: Ranks) -> None:
        self.model, self.optimizer = model, optimizer
        index = read_index(checkpoint.path)
        if unknown := {name for name in index if not name.startswith((MODEL, OPTIMIZER, RNG))}:
            raise ValueError(f"{_few(unknown)}: neither of a model nor of an optimizer")
        self.tensors = _model_state(model)
        stored = {name for name in index if name.startswith(MODEL)}
        if missing := self.tensors.keys() - stored:
            raise ValueError(f"it lacks {_few(missing)}")
        if unknown := stored - self.tensors.keys():
            raise ValueError(f"the model has no {_few(unknown)}")
        for name, tensor in self.tensors.items():
            if index[name].size != tensor.shape:
                raise ValueError(f"{name} is {tuple(index[name].size)} there and {tuple(tensor.shape)} in the model")
        if optimizer is not None:
            self.tensors |= _moments(model, optimizer, index)
        self.rng = f"{RNG}{ranks.rank}."
        if checkpoint.world_size == ranks.size:
            self.tensors |= {name: _empty(about) for name, about in index.items() if name.startswith(self.rng)}

    def finish(self) -> None:
        # The model's tensors are filled already. This tells its modules: what they gathered for the old state is void.
        set_model_state_dict(self.model, cast(dict[str, Any], self._part(MODEL)))
        if self.optimizer is not None:
            state: dict[int, dict[str, Tensor]] = {}
            places = {name: place for place, name in enumerate(_parameters(self.model, self.optimizer))}
            for name, value in self._part(OPTIMIZER).items():
                parameter, _, moment = name.rpartition(".")
                state.setdefault(places[parameter], {})[moment] = value
            self.optimizer.load_state_dict({"state": state, "param_groups": self.optimizer.state_dict()["param_groups"]})
        if rng := self._part(self.rng):
            restore_rng(rng)

    def _part(self, beginning: str) -> dict[str, Tensor]:
        return {name.removeprefix(beginning): value for name, value in self.tensors.items() if name.startswith(beginning)}


def _model_state(model: nn.Module) -> dict[str, Tensor]:
    return {MODEL + name: cast(Tensor, value) for name, value in get_model_state_dict(model).items()}


def _optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    state = _by_name(model, optimizer)["state"]
    return {f"{OPTIMIZER}{name}.{moment}": value for name, moments in state.items() for moment, value in moments.items()}


def _parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, nn.Parameter]:
    """The optimizer's parameters by name, in its order."""
    names = [name for group in _by_name(model, optimizer)["param_groups"] for name in group["params"]]
    return dict(zip(names, (each for group in optimizer.param_groups for each in group["params"]), strict=True))


def _by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    # Where an optimizer has no state yet, torch makes one by taking a step, which runs the hooks and counts as a step.
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter]  # a defaultdict: now it has one, which is empty
    return get_optimizer_state_dict(model, optimizer)


def _moments(model: nn.Module, optimizer: torch.optim.Optimizer, index: dict[str, TensorStorageMetadata]) -> dict[str, Tensor]:
    """Room for the optimizer's tensors: sharded as the parameter where they have its shape."""
    parameters, room = _parameters(model, optimizer), {}
    for name, about in index.items():
        if not name.startswith(OPTIMIZER):
            continue
        parameter = parameters.get(name.removeprefix(OPTIMIZER).rpartition(".")[0])
        if parameter is None:
            raise ValueError(f"the optimizer has no {name}")
        alike = about.size == parameter.shape
        room[name] = torch.empty_like(parameter.detach(), dtype=about.properties.dtype) if alike else _empty(about)
    return room


def _empty(about: TensorStorageMetadata) -> Tensor:
    return torch.empty(about.size, dtype=about.properties.dtype)


def _few(names: set[str]) -> str:
    first, *others = sorted(names)
    return f"{first} and {len(others)} more" if others else first


def _listed(folder: Path) -> list[Path]:
    put_back_replaced(folder)
    return list_checkpoints(folder)


def _make_aside(aside: Path) -> None:
    """An empty folder, and nothing left of what a killed save has half written or half deleted."""
    put_back_replaced(aside.parent)
    for leftover in aside.parent.glob(".step-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    aside.mkdir(parents=True)


def _summaries(folder: Path, ranks: Ranks) -> dict[str, tuple[int, str]]:
    return {file.name: (file.stat().st_size, _sha256(file)) for file in shard_files(folder, ranks)}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _seal(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


class _Background:
    """A thread that does `work`; it does not keep a process alive that has failed elsewhere."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(work,), name="checkpoint", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Return when the thread has ended, not only its work: a process that ends under a thread of torch's aborts."""
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self._error = error


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Context whose errors are CheckpointErrors that begin with the checkpoint they are about."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        beginning = f"checkpoint {path}: "
        raise CheckpointError(beginning + first_line(error).replace(beginning, "")) from error
