"""The exact order statistic of bfloat16 numbers spread over ranks, by a two-pass radix selection.

bf16 numbers have 65,536 values, so counting finds the m-th largest exactly: one histogram of the high byte of their keys
says in which of 256 bins it lies, one histogram of the low byte inside that bin says which number it is. Two sums of
256 integers per column, independent of how many numbers there are and of how they are spread over ranks.
Source: EQB, arXiv 2609.28053.

Shape suffixes: T tokens, E columns (experts).
"""

from collections.abc import Callable, Generator
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from ..kernels import bf16_unkey, canonical, dense_histogram, high_byte_histogram, low_byte_histogram
from .collective import Collective, Sums, run_lockstep

# Past this many rows a dense histogram (256 KiB a column) takes less memory than the bf16 values (2 bytes a row).
_DENSE_ROWS = 131_072


class Bf16Columns:
    """Columns of bfloat16 numbers that arrive batch by batch; answers with histograms of their keys.

    Keeps the values, or their dense histogram once that is smaller. Same answers either way. One growing tensor rather than
    a list of batches: torch.compile would compile anew for every length of a list.
    """

    def __init__(self) -> None:
        self.values: Tensor | None = None  # (rows, E)
        self.dense: Tensor | None = None  # (E, 65536)
        self.high: Tensor | None = None  # (E, 256)

    def add(self, values_TE: Tensor, high_EB: Tensor) -> None:
        """(T, E) canonical bfloat16 without NaN, and the (E, 256) counts of their keys' high bytes."""
        self.high = high_EB if self.high is None else self.high + high_EB
        values = values_TE if self.values is None else torch.cat([self.values, values_TE])
        if values.shape[0] > _DENSE_ROWS:
            counts = dense_histogram(values)
            self.dense = counts if self.dense is None else self.dense + counts
            values = values[:0]
        self.values = values

    def clear(self) -> None:
        self.values = self.dense = self.high = None

    def coarse(self, num_columns: int, device: torch.device) -> Tensor:
        """(E, 256) int32 counts of the keys' high bytes."""
        return torch.zeros(num_columns, 256, dtype=torch.int32, device=device) if self.high is None else self.high

    def fine(self, high_E: Tensor) -> Tensor:
        """(E, 256) int32 counts of the low bytes of keys whose high byte is `high_E`."""
        values = self.values
        if values is None:
            values = torch.empty(0, high_E.numel(), dtype=torch.bfloat16, device=high_E.device)
        counts = low_byte_histogram(values, high_E)
        if self.dense is None:
            return counts
        slices = self.dense.view(-1, 256, 256).gather(1, high_E.long()[:, None, None].expand(-1, 1, 256))
        return counts + slices.squeeze(1)


def order_statistic_rounds(
    columns: Bf16Columns, local: Tensor, rank_of: Callable[[Tensor], Tensor], num_columns: int
) -> Generator[Sums, Any, tuple[Tensor, Tensor]]:
    """Two rounds of local sums in, global sums out (see Balancer.update).

    Args:
        local: integers of this rank that are to be summed beside the first histogram, such as how many rows count.
        rank_of: from their global sum to the rank from the top (0 = largest), a 0-dim or (E,) int64 tensor.

    Returns:
        (E,) bfloat16 statistic, and the global sum of `local`. Where the rank is past the last value the statistic is
        meaningless; the caller knows both numbers.
    """
    coarse_EB, total = yield columns.coarse(num_columns, local.device), local
    rank_E = rank_of(total).expand(num_columns)
    high_E, rank_inside_E = _descend(coarse_EB, rank_E)
    fine_EB = yield columns.fine(high_E)
    low_E, _ = _descend(fine_EB, rank_inside_E)
    return bf16_unkey((high_E << 8 | low_E).to(torch.int32)), total


def global_order_statistic(
    values_bf16: Tensor,
    rank_from_top: int | Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    collective: Collective = "all_reduce",
) -> Tensor:
    """The (rank_from_top + 1)-th largest of the numbers that all ranks of `group` hold together, exactly, on every rank.

    Args:
        values_bf16: (T,) or (T, E) bfloat16 without NaN, one statistic per column; T may differ between ranks and be 0.
        rank_from_top: 0 = the largest; an int or, for one per column, an (E,) integer tensor. The same on every rank.
        group: process group; None = all ranks, or this process alone where torch.distributed is not initialised.
        collective: how counts are combined; the result is the same to the bit.

    Returns:
        0-dim or (E,) bfloat16; both zeros count as one number and come back as 0.0.

    Raises:
        ValueError: on every rank alike if the rank is not below the global number of values; also for NaN on any
            rank. For a wrong dtype or shape, on the rank that has it.
    """
    if values_bf16.dtype != torch.bfloat16:
        raise ValueError(f"values have dtype {values_bf16.dtype}; round them to bfloat16 first: the result is exact for bf16")
    if values_bf16.dim() not in (1, 2):
        raise ValueError(f"values have shape {tuple(values_bf16.shape)}; give (T,) or (T, E)")
    values_TE = values_bf16 if values_bf16.dim() == 2 else values_bf16[:, None]
    rows, num_columns = values_TE.shape
    rank = torch.as_tensor(rank_from_top, device=values_TE.device)
    if rank.is_floating_point() or rank.shape not in ((), (num_columns,)):
        raise ValueError(f"rank_from_top={rank_from_top!r}; give a whole number, or one per column ({num_columns}) as a tensor")
    columns = Bf16Columns()
    values_TE = canonical(values_TE)
    columns.add(values_TE, high_byte_histogram(values_TE))
    # Values that only one rank can judge are judged after the sum, so that all ranks raise and none is left waiting.
    local = torch.stack([torch.tensor(rows, device=values_TE.device), values_TE.isnan().sum()])
    rounds = order_statistic_rounds(columns, local, lambda _: rank, num_columns)
    [(statistic_E, (tokens, nans))] = run_lockstep([rounds], group, collective)
    if nans:
        raise ValueError(f"{int(nans)} of the values are NaN, which has no rank; drop those rows first")
    if not ((rank >= 0) & (rank < tokens)).all():
        raise ValueError(f"rank_from_top={rank.tolist()} with {int(tokens)} values in all; it must be in 0..{int(tokens) - 1}")
    return statistic_E if values_bf16.dim() == 2 else statistic_E[0]


def _descend(histogram_EB: Tensor, rank_E: Tensor) -> tuple[Tensor, Tensor]:
    """From the top bin down: the first bin whose running count exceeds `rank_E`, and the rank left inside it."""
    from_top_EB = histogram_EB.flip(1).cumsum(dim=1)
    position_E1 = (from_top_EB <= rank_E[:, None]).sum(dim=1, keepdim=True).clamp(max=255)
    above_E1 = from_top_EB.gather(1, position_E1) - histogram_EB.flip(1).gather(1, position_E1)
    return 255 - position_E1.squeeze(1), rank_E - above_E1.squeeze(1)
