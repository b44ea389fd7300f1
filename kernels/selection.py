"""Deterministic top-k and expert counts.

Shape suffixes: T tokens, E experts, K top-k.
"""

import torch
from torch import Tensor


def top_k(values_TE: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest entries of every row, ties to the LOWEST index, and the runner-up's value.

    Args:
        values_TE: (T, E) floating point without NaN. -inf is allowed and counts as the smallest value.
        k: 1 <= k <= E.

    Returns:
        indices_TK: (T, K) int64, by descending value; equal values by ascending index.
        cutoff_T: (T,) the (k+1)-th largest value, -inf where k == E (there is no runner-up).
    """
    # torch.topk leaves the order of ties open and devices differ; a stable sort does not. -0.0 == 0.0 is a tie, which
    # a sort on bit patterns would miss.
    ordered_TE, indices_TE = torch.sort(values_TE.masked_fill(values_TE == 0, 0.0), dim=-1, descending=True, stable=True)
    no_runner_up = k == values_TE.shape[-1]
    cutoff_T = values_TE.new_full(values_TE.shape[:1], float("-inf")) if no_runner_up else ordered_TE[:, k]
    return indices_TE[:, :k], cutoff_T


def expert_counts(indices_TK: Tensor, num_experts: int, mask_T: Tensor | None = None) -> Tensor:
    """How many tokens each expert received: (E,) int64; rows where `mask_T` is False are not counted.

    A scatter-add rather than bincount: bincount waits for the device to learn its output size and breaks graphs.
    """
    ones_TK = torch.ones_like(indices_TK) if mask_T is None else mask_T[:, None].expand_as(indices_TK).to(torch.int64)
    counts_E = torch.zeros(num_experts, dtype=torch.int64, device=indices_TK.device)
    return counts_E.scatter_add_(0, indices_TK.flatten(), ones_TK.flatten())
