"""Uniform-bin histograms, column by column.

Shape suffixes: T tokens, E experts (one column each).
"""

import torch
from torch import Tensor


def uniform_histogram(values_TE: Tensor, low: Tensor, high: Tensor, num_bins: int, mask_T: Tensor | None = None) -> Tensor:
    """(E, num_bins) int64 counts of `values_TE` in equal bins over [low, high], which are 0-dim tensors.

    Values outside the range count in the first or last bin, so that every real row is counted once per column.
    Rows where `mask_T` is False are not counted.
    """
    num_columns = values_TE.shape[1]
    bins_TE = ((values_TE - low) * (num_bins / (high - low))).floor().clamp(0, num_bins - 1).to(torch.int64)
    flat = (bins_TE + torch.arange(num_columns, device=values_TE.device) * num_bins).flatten()
    ones = torch.ones_like(flat) if mask_T is None else mask_T[:, None].expand_as(bins_TE).to(torch.int64).flatten()
    counts = torch.zeros(num_columns * num_bins, dtype=torch.int64, device=values_TE.device)
    return counts.scatter_add_(0, flat, ones).view(num_columns, num_bins)
