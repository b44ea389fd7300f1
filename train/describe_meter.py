"""Counts what runs inside it: bytes alive by kind, with their peaks, and bytes sent by every collective.

It reads shapes only, so it counts real tensors and pretended ones (FakeTensorMode) alike.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# What a live storage is. Anything that nobody named is an activation: saved for the backward, or on its way.
PARAMETERS, GRADIENTS, OPTIMIZER, GATHERED, ACTIVATIONS = "parameters", "gradients", "optimizer", "gathered", "activations"


class Sent(NamedTuple):
    """One collective of this rank."""

    operation: str  # all_gather | reduce_scatter | all_reduce | all_to_all | broadcast
    group: str  # name of the process group
    ranks: int
    payload: int  # bytes of the whole tensor: gathered, to be scattered, reduced, or exchanged
    dtype: torch.dtype

    @property
    def bytes(self) -> float:
        """Bytes that leave a rank, as the usual bandwidth-optimal algorithms need (nccl-tests, doc/PERFORMANCE.md).

        (n - 1) / n of the payload; twice that for an all-reduce, which is a reduce-scatter and an all-gather. An all-to-all
        keeps 1 / n where the exchange is even.
        """
        return self.payload * (self.ranks - 1) / self.ranks * (2 if self.operation == "all_reduce" else 1)


# operator -> (operation, which arguments hold the payload, which argument names the group)
_COLLECTIVES = {
    "c10d::_allgather_base_": ("all_gather", 0, 2),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", 1, 2),
    "c10d::allreduce_": ("all_reduce", 0, 1),
    "c10d::alltoall_base_": ("all_to_all", 1, 2),
    "c10d::broadcast_": ("broadcast", 0, 1),
    "_c10d_functional::all_reduce": ("all_reduce", 0, 2),
    "_c10d_functional::all_reduce_": ("all_reduce", 0, 2),
    "_c10d_functional::all_to_all_single": ("all_to_all", 0, 3),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", 0, 3),
}


class Meter(TorchDispatchMode):
    """While active: `live` bytes by kind, `sent` collectives, and the highest `live` since the last `mark`.

    Storages are counted from the first operator that returns them to their end; FSDP's, which stay and are emptied, by their
    size. What an operator needs inside is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        self.sent: list[Sent] = []
        self._storages: dict[int, tuple[str, int, Any]] = {}
        self._total = self._peak_total = 0

    def mark(self) -> Counter[str]:
        """The bytes by kind when most were alive since the last mark; starts the next stretch."""
        peak = self.peak
        self.peak, self._peak_total = self.live.copy(), self._total
        return peak

    def tag(self, tensors: Iterable[Tensor | None], kind: str) -> int:
        """Say what these tensors' storages are; returns their bytes, shared storages once."""
        storages = {_storage(tensor)._cdata: _storage(tensor) for tensor in tensors if tensor is not None}
        for storage in storages.values():
            self._count(storage, storage.nbytes(), kind)
        return sum(storage.nbytes() for storage in storages.values())

    def __enter__(self) -> Meter:
        resize = torch.UntypedStorage.resize_

        def resize_and_count(storage: torch.UntypedStorage, size: int) -> Any:
            self._count(storage, int(size), GATHERED)
            return resize(storage, size)

        self._resize = resize
        torch.UntypedStorage.resize_ = resize_and_count  # type: ignore[method-assign,assignment]
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        known = _COLLECTIVES.get(func._schema.name)
        if known is not None:
            self._collective(*known, args)
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and _storage(leaf)._cdata not in self._storages:
                self._count(_storage(leaf), _storage(leaf).nbytes(), ACTIVATIONS)
        return out

    def _collective(self, operation: str, payload_at: int, group_at: int, args: Any) -> None:
        tensors = [leaf for leaf in tree_leaves(args[payload_at]) if isinstance(leaf, Tensor)]
        group = args[group_at]
        if isinstance(group, str):
            group = dist.distributed_c10d._resolve_process_group(cast(Any, group))
        elif not isinstance(group, dist.ProcessGroup):
            group = dist.ProcessGroup.unbox(group)
        self.sent.append(Sent(operation, group.group_name, group.size(), sum(t.nbytes for t in tensors), tensors[0].dtype))
        if operation == "all_gather":
            self.tag(tensors, GATHERED)
        elif operation == "reduce_scatter" and payload_at == 1:  # FSDP's: (sharded gradients, whole gradients, ...)
            self.tag(tensors, GATHERED)
            self.tag([args[0]], GRADIENTS)

    def _count(self, storage: torch.UntypedStorage, size: int, kind: str) -> None:
        key = storage._cdata
        self._forget(key)
        self._storages[key] = kind, size, weakref.ref(storage, lambda _: self._forget(key))
        self.live[kind] += size
        self._total += size
        if self._total > self._peak_total:
            self.peak, self._peak_total = self.live.copy(), self._total

    def _forget(self, key: int) -> None:
        if known := self._storages.pop(key, None):
            kind, size, _ = known
            self.live[kind] -= size
            self._total -= size


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).untyped_storage()
