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

from ..kernels import bf16_key, bf16_unkey, dense_histogram, high_byte_histogram, low_byte_histogram
from .collective import Collective, Sums, run_lockstep

# Past this many rows a dense histogram (256 KiB a column) takes less memory than the bf16 values (2 bytes a row).
_DENSE_ROWS = 131_072


class Bf16Columns:
    """Columns of bfloat16 numbers that arrive batch by batch; answers with histograms of their keys.

    Keeps the values, or their dense histogram once that is smaller. Same answers either way.
    """

    def __init__(self) -> None:
        self.batches: list[Tensor] = []
        self.dense: Tensor | None = None

    def add(self, values_TE: Tensor) -> None:
        """(T, E) bfloat16 without NaN."""
        self.batches.append(values_TE)
        if sum(batch.shape[0] for batch in self.batches) > _DENSE_ROWS:
            batches = dense_histogram(self._keys(values_TE.shape[1], values_TE.device))
            self.dense = batches if self.dense is None else self.dense + batches
            self.batches.clear()

    def clear(self) -> None:
        self.batches.clear()
        self.dense = None

    def coarse(self, num_columns: int, device: torch.device) -> Tensor:
        """(E, 256) int32 counts of the keys' high bytes."""
        counts = high_byte_histogram(self._keys(num_columns, device))
        return counts if self.dense is None else counts + self.dense.view(num_columns, 256, 256).sum(dim=2, dtype=torch.int32)

    def fine(self, high_E: Tensor) -> Tensor:
        """(E, 256) int32 counts of the low bytes of keys whose high byte is `high_E`."""
        counts = low_byte_histogram(self._keys(high_E.numel(), high_E.device), high_E)
        if self.dense is None:
            return counts
        slices = self.dense.view(-1, 256, 256).gather(1, high_E.long()[:, None, None].expand(-1, 1, 256))
        return counts + slices.squeeze(1)

    def _keys(self, num_columns: int, device: torch.device) -> Tensor:
        empty = torch.empty(0, num_columns, dtype=torch.bfloat16, device=device)
        return bf16_key(torch.cat([empty, *self.batches]))


def order_statistic_rounds(
    columns: Bf16Columns, local_tokens: Tensor, rank_of: Callable[[Tensor], Tensor], num_columns: int
) -> Generator[Sums, Any, tuple[Tensor, Tensor]]:
    """Two rounds of local sums in, global sums out (see Balancer.update).

    Args:
        local_tokens: 0-dim int64, how many rows of this rank count.
        rank_of: from the global number of rows to the rank from the top (0 = largest), a 0-dim or (E,) int64 tensor.

    Returns:
        (E,) bfloat16 statistic, and the 0-dim int64 global number of rows. Where the rank is past the last value the
        statistic is meaningless; the caller knows both numbers.
    """
    coarse_EB, tokens = yield columns.coarse(num_columns, local_tokens.device), local_tokens
    rank_E = rank_of(tokens).expand(num_columns)
    high_E, rank_inside_E = _descend(coarse_EB, rank_E)
    fine_EB = yield columns.fine(high_E)
    low_E, _ = _descend(fine_EB, rank_inside_E)
    return bf16_unkey((high_E << 8 | low_E).to(torch.int32)), tokens


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
        ValueError: on every rank alike if the rank is not below the global number of values; also for a wrong dtype or
            shape, and for NaN.
    """
    if values_bf16.dtype != torch.bfloat16:
        raise ValueError(f"values have dtype {values_bf16.dtype}; round them to bfloat16 first: the result is exact for bf16")
    if values_bf16.dim() not in (1, 2):
        raise ValueError(f"values have shape {tuple(values_bf16.shape)}; give (T,) or (T, E)")
    if values_bf16.isnan().any():
        raise ValueError("values hold NaN, which has no rank; drop those rows first")
    values_TE = values_bf16 if values_bf16.dim() == 2 else values_bf16[:, None]
    rows, num_columns = values_TE.shape
    rank = torch.as_tensor(rank_from_top, dtype=torch.int64, device=values_TE.device)
    columns = Bf16Columns()
    columns.add(values_TE)
    local_tokens = torch.tensor(rows, device=values_TE.device)
    rounds = order_statistic_rounds(columns, local_tokens, lambda _: rank, num_columns)
    [(statistic_E, tokens)] = run_lockstep([rounds], group, collective)
    if not ((rank >= 0) & (rank < tokens)).all():
        raise ValueError(f"rank_from_top={rank.tolist()} with {int(tokens)} values in all; it must be in 0..{int(tokens) - 1}")
    return statistic_E if values_bf16.dim() == 2 else statistic_E[0]


def _descend(histogram_EB: Tensor, rank_E: Tensor) -> tuple[Tensor, Tensor]:
    """From the top bin down: the first bin whose running count exceeds `rank_E`, and the rank left inside it."""
    from_top_EB = histogram_EB.flip(1).cumsum(dim=1)
    position_E1 = (from_top_EB <= rank_E[:, None]).sum(dim=1, keepdim=True).clamp(max=255)
    above_E1 = from_top_EB.gather(1, position_E1) - histogram_EB.flip(1).gather(1, position_E1)
    return 255 - position_E1.squeeze(1), rank_E - above_E1.squeeze(1)
