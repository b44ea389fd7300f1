"""The tensors of a checkpoint, written and read by torch.distributed.checkpoint (DCP): every rank its own part, in one file.

DCP plans what each rank writes and reads, so that any layout of ranks loads what any other has saved. Its own index is a
pickle; ours is JSON, so that nothing in a checkpoint can run code: tensors are read with `weights_only=True`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from .errors import first_line
from .ranks import RankError, Ranks

INDEX = "index.json"


def stage(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A copy in this process's own memory; of a DTensor, of its local part."""
    return dcp.staging.BlockingAsyncStager().stage(dict(tensors))


def write_shards(folder: Path, tensors: Mapping[str, Tensor], ranks: Ranks) -> None:
    """Write `tensors`, CPU tensors or DTensors by name, as this rank's file; rank 0 adds the index. All ranks have to call.

    What several ranks have under one name is one tensor and written once. Raises RankError.
    """
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    _expect_single_process()
    try:
        dcp.save(
            dict(tensors),
            storage_writer=_Writer(folder),
            planner=planner,
            process_group=ranks.group,
            no_dist=ranks.group is None,
        )
    except dcp.CheckpointException as failed:
        raise _rank_error(failed, ranks) from failed


def shard_files(folder: Path, ranks: Ranks) -> Iterator[Path]:
    """The files of `folder` that this rank has written."""
    yield from folder.glob(f"__{ranks.rank}_*")
    if ranks.rank == 0:
        yield folder / INDEX


def read_index(folder: Path) -> dict[str, TensorStorageMetadata]:
    """Shape, dtype and chunks of every tensor in `folder`, by name. Raises ValueError."""
    return _read_metadata(folder).state_dict_metadata  # type: ignore[return-value]


def read_shards(folder: Path, tensors: Mapping[str, Tensor], ranks: Ranks | None) -> None:
    """Fill `tensors` in place, whatever layout they were written in. All ranks have to call; None = this process alone.

    Raises RankError.
    """
    planner = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    group = ranks.group if ranks else None
    _expect_single_process()
    try:
        dcp.load(dict(tensors), storage_reader=_Reader(folder), planner=planner, process_group=group, no_dist=group is None)
    except dcp.CheckpointException as failed:
        raise _rank_error(failed, ranks) from failed


class _Chunk(NamedTuple):
    """Where one rectangle of a tensor is; the first three names are those that DCP's reader looks for."""

    relative_path: str
    offset: int
    length: int
    start: list[int]
    shape: list[int]
    transform_descriptors: tuple[str, ...] = ()


class _Writer(dcp.FileSystemWriter):
    """DCP's writer, with a JSON index."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, sync_files=True, per_thread_copy_ahead=0)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            # torch's serialisation hides the system's reason (a full disk) behind an error of its own.
            raise _system_error(error) or error from error

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        index: dict[str, dict[str, Any]] = {}
        shapes: dict[tuple[str, torch.Size | None], torch.Size] = {}
        tensors = cast(dict[str, TensorStorageMetadata], metadata.state_dict_metadata)
        for name, tensor in tensors.items():
            dtype = str(tensor.properties.dtype).removeprefix("torch.")
            index[name] = {"dtype": dtype, "shape": list(tensor.size), "chunks": []}
            shapes |= {(name, chunk.offsets): chunk.sizes for chunk in tensor.chunks}
        for result in (result for of_rank in results for result in of_rank):
            name, start, where = result.index.fqn, result.index.offset, result.storage_data
            chunk = [where.relative_path, where.offset, where.length, list(start or ()), list(shapes[name, start])]
            index[name]["chunks"].append(chunk)
        with (Path(self.path) / INDEX).open("w", encoding="utf-8") as file:
            json.dump(index, file)
            file.flush()
            os.fsync(file.fileno())


class _Reader(dcp.FileSystemReader):
    """DCP's reader, with a JSON index and errors that name the file."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return _read_metadata(Path(self.path))

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        for name, items in by_file.items():
            try:
                super().read_data(dataclasses.replace(plan, items=items), planner)
            except pickle.UnpicklingError as error:
                raise ValueError(f"{name} holds something other than tensors, which was not loaded") from error
            except Exception as error:
                raise ValueError(f"{name} cannot be read: {first_line(error)}") from error
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _read_metadata(folder: Path) -> Metadata:
    try:
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        places: dict[MetadataIndex, _Chunk] = {}
        for name, entry in index.items():
            chunks = [_Chunk(*chunk) for chunk in entry["chunks"]]
            tensors[name] = TensorStorageMetadata(
                TensorProperties(dtype=_dtype(entry["dtype"])),
                torch.Size(entry["shape"]),
                [ChunkStorageMetadata(torch.Size(chunk.start), torch.Size(chunk.shape)) for chunk in chunks],
            )
            places |= {MetadataIndex(name, chunk.start): chunk for chunk in chunks}
        outside = {chunk.relative_path for chunk in places.values() if Path(chunk.relative_path).name != chunk.relative_path}
        if outside:
            raise ValueError(f"it names files elsewhere: {', '.join(sorted(outside))}")
    except Exception as error:  # a damaged index raises almost anything
        raise ValueError(f"{INDEX} cannot be read: {first_line(error)}") from error
    return Metadata(tensors, storage_data=places)


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a dtype")
    return dtype


def _system_error(error: BaseException | None) -> OSError | None:
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


def _rank_error(failed: dcp.CheckpointException, ranks: Ranks | None) -> RankError:
    rank, (error, _) = min(failed.failures.items(), key=lambda failure: failure[0])
    several = ranks is not None and ranks.size > 1
    return RankError(f"rank {rank}: {first_line(error)}" if several else first_line(error))


def _expect_single_process() -> None:
    """DCP warns whenever it runs without torch.distributed, which is no mistake here."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
