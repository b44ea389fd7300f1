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
    # torch.topk leaves the order of ties open and devices differ. -0.0 == 0.0 is a tie, which bit patterns would miss; the
    # cutoff is then 0.0.
    values_TE = values_TE.detach()
    num_experts = values_TE.shape[-1]
    listed = min(k + 1, num_experts)
    if values_TE.dtype == torch.float32:
        # Value and index in one integer: no two are equal, so torch.topk has no choice, and need not sort the whole row.
        chosen = _packed(values_TE).topk(listed, dim=-1).values
        indices_TK = num_experts - 1 - (chosen[:, :k] & 0xFFFFFFFF)
        cutoff_T = values_TE.gather(1, num_experts - 1 - (chosen[:, -1:] & 0xFFFFFFFF))[:, 0]
    else:
        ordered, indices = torch.sort(values_TE.masked_fill(values_TE == 0, 0.0), dim=-1, descending=True, stable=True)
        indices_TK, cutoff_T = indices[:, :k], ordered[:, listed - 1]
    if k == num_experts:  # no runner-up
        return indices_TK, torch.full_like(cutoff_T, float("-inf"))
    return indices_TK, cutoff_T.masked_fill(cutoff_T == 0, 0.0)


def _packed(values_TE: Tensor) -> Tensor:
    """int64 that sort as the float32 values do, and among equal ones put the lowest index on top."""
    bits_TE = values_TE.view(torch.int32)
    sign_TE = bits_TE >> 31  # -1 where negative: there the order of the bits is reversed, and -0.0 becomes 0
    keys_TE = (sign_TE & 0x7FFFFFFF).bitwise_xor_(bits_TE).sub_(sign_TE)
    lowest_on_top_E = torch.arange(values_TE.shape[1] - 1, -1, -1, device=values_TE.device)
    return keys_TE.to(torch.int64).bitwise_left_shift_(32).add_(lowest_on_top_E)


def expert_counts(indices_TK: Tensor, num_experts: int, mask_T: Tensor | None = None) -> Tensor:
    """How many tokens each expert received: (E,) int64; rows where `mask_T` is False are not counted.

    A scatter-add rather than bincount: bincount waits for the device to learn its output size and breaks graphs.
    """
    ones_TK = torch.ones_like(indices_TK) if mask_T is None else mask_T[:, None].expand_as(indices_TK).to(torch.int64)
    counts_E = torch.zeros(num_experts, dtype=torch.int64, device=indices_TK.device)
    return counts_E.scatter_add_(0, indices_TK.flatten(), ones_TK.flatten())
