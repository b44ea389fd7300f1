"""Sums over ranks: many small tensors of many layers, one collective.

Integers are summed exactly. Floating-point tensors, whose sum depends on the order, are brought to every rank one by one and
added in rank order, so that they too are the same on every rank and in every run.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch import distributed as dist

Collective = Literal["all_reduce", "all_gather"]
COLLECTIVES = ("all_reduce", "all_gather")


class GroupRef:
    """A process group that a module refers to: a deep copy of the module refers to the same group."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group

    def __deepcopy__(self, memo: Any) -> "GroupRef":
        return self

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum of `tensor` over the group, as a new tensor."""
        total = tensor.clone()
        dist.all_reduce(total, group=self.group)
        return total


@dataclass(frozen=True)
class PerRank:
    """A tensor whose values are wanted from every rank instead of summed: comes back stacked, (W, ...), in rank order."""

    local: Tensor


Sums = Tensor | PerRank | tuple[Tensor | PerRank, ...]


def run_lockstep(
    generators: Sequence[Generator[Sums, Any, Any]], group: dist.ProcessGroup | None, collective: Collective
) -> list[Any]:
    """Drive generators that yield local sums and receive global ones; each round of all of them is ONE collective.

    Returns what the generators return, in their order. Integer sums come back as int64, floating-point sums as float64.
    """
    if collective not in COLLECTIVES:
        raise ValueError(f"collective={collective!r}; choose one of {', '.join(map(repr, COLLECTIVES))}")
    results: list[Any] = [None] * len(generators)
    answers: dict[int, Any] = dict.fromkeys(range(len(generators)))
    while True:
        asked: dict[int, Sums] = {}
        for index, answer in answers.items():
            try:
                asked[index] = generators[index].send(answer)
            except StopIteration as stop:
                results[index] = stop.value
        if not asked:
            return results
        flat = [part for sums in asked.values() for part in (sums if isinstance(sums, tuple) else (sums,))]
        totals = iter(_combine(flat, group, collective))
        answers = {
            index: tuple(next(totals) for _ in sums) if isinstance(sums, tuple) else next(totals)
            for index, sums in asked.items()
        }


def _combine(parts: list[Tensor | PerRank], group: dist.ProcessGroup | None, collective: Collective) -> list[Tensor]:
    wide = [_widened(part.local if isinstance(part, PerRank) else part) for part in parts]
    world = dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1
    if world < 0:
        raise ValueError("this process is not a member of the group; only the group's own ranks may call")
    if world == 1:
        return [tensor[None] if isinstance(part, PerRank) else tensor for part, tensor in zip(parts, wide, strict=True)]
    # Integers that are to be summed can be added by the network; everything else has to arrive rank by rank.
    addable = [collective == "all_reduce" and isinstance(part, Tensor) and not part.is_floating_point() for part in parts]
    summed = [tensor.flatten() for tensor, add in zip(wide, addable, strict=True) if add]
    apart = [tensor.flatten().view(torch.int64) for tensor, add in zip(wide, addable, strict=True) if not add]
    empty = torch.empty(0, dtype=torch.int64, device=wide[0].device)
    summed_flat, apart_flat = torch.cat([empty, *summed]), torch.cat([empty, *apart])

    if collective == "all_reduce":
        # Each rank fills its own slot of an otherwise zero table: a sum of one number and zeros is a gather, to the bit.
        table = apart_flat.new_zeros(world, apart_flat.numel())
        table[dist.get_rank(group)] = apart_flat
        message = torch.cat([summed_flat, table.flatten()])
        dist.all_reduce(message, group=group)
        summed_flat, table = message[: summed_flat.numel()], message[summed_flat.numel() :].view(world, -1)
    else:
        message = apart_flat.new_empty(world * apart_flat.numel())
        # torch 2.13 renamed it, and warns about the old name.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(message, apart_flat, group=group)
        table = message.view(world, -1)

    totals = []
    summed_at = apart_at = 0
    for part, tensor, add in zip(parts, wide, addable, strict=True):
        size = tensor.numel()
        if add:
            totals.append(summed_flat[summed_at : summed_at + size].view(tensor.shape))
            summed_at += size
            continue
        per_rank = table[:, apart_at : apart_at + size].contiguous().view(tensor.dtype).view(world, *tensor.shape)
        apart_at += size
        totals.append(per_rank if isinstance(part, PerRank) else _sum_in_order(per_rank))
    return totals


def _widened(tensor: Tensor) -> Tensor:
    return tensor.detach().to(torch.float64 if tensor.is_floating_point() else torch.int64)


def _sum_in_order(per_rank: Tensor) -> Tensor:
    """((rank 0 + rank 1) + rank 2) + ...: torch.sum may associate as it likes."""
    total = per_rank[0].clone()
    for values in per_rank[1:]:
        total += values
    return total
