"""Tokens to expert-major rows and back: the definition that the permutation kernels must equal.

Shape suffixes: T tokens, K experts per token, N = T * K assignments in token order, R rows, E experts, D model.
"""

from typing import Any

import torch
from torch import Tensor


def expert_order(indices_TK: Tensor, num_experts: int, mask_T: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The assignments sorted by expert, stable: within an expert, tokens keep their order.

    Args:
        indices_TK: (T, K) integer expert ids in 0..E-1.
        mask_T: (T,) bool, True = real token; the assignments of padding come last, behind every expert's.

    Returns:
        slots_N: (N,) int64, `token * K + position` of each assignment in the new order.
        starts: (E + 1,) int64, where each expert's assignments begin, and where the last one's end.
    """
    experts_N = indices_TK.flatten()
    if mask_T is not None:
        experts_N = torch.where(mask_T[:, None], indices_TK, num_experts).flatten()
    sorted_N, slots_N = experts_N.sort(stable=True)
    experts = torch.arange(num_experts + 1, device=indices_TK.device, dtype=sorted_N.dtype)
    return slots_N, torch.searchsorted(sorted_N, experts)


def permute(x_TD: Tensor, slots_R: Tensor, top_k: int) -> Tensor:
    """rows[r] = x[slots[r] // K], (T, D) -> (R, D). `slots_R`: distinct integers in 0..T*K-1."""
    return _TakeTokens.apply(x_TD, slots_R, top_k)


def unpermute(rows_RD: Tensor, weights_TK: Tensor, slots_R: Tensor) -> Tensor:
    """out[t] = sum over k of weights[t, k] * (the row whose slot is t * K + k), (R, D) -> (T, D) in the rows' dtype.

    The sum is in float32 (float64 for float64 rows), in the order of k; a slot without a row adds exactly 0.
    """
    inside = torch.promote_types(rows_RD.dtype, torch.float32)
    rows_TKD = _to_slots(rows_RD, slots_R, *weights_TK.shape)
    return (rows_TKD.to(inside) * weights_TK.to(inside)[:, :, None]).sum(dim=1).to(rows_RD.dtype)


def _to_slots(rows_RD: Tensor, slots_R: Tensor, num_tokens: int, top_k: int) -> Tensor:
    """(R, D) -> (T, K, D), 0 where an assignment has no row. No slot is written twice, so the order of writes cannot matter."""
    width, num_slots = rows_RD.shape[1], num_tokens * top_k
    if rows_RD.shape[0] == num_slots:
        return _Reorder.apply(rows_RD, slots_R).view(num_tokens, top_k, width)
    return rows_RD.new_zeros(num_slots, width).index_copy_(0, slots_R, rows_RD).view(num_tokens, top_k, width)


class _Reorder(torch.autograd.Function):
    """out[slots[r]] = rows[r] for a permutation `slots`: both ways gather, which is faster than writing to scattered rows."""

    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, slots_R: Tensor) -> Tensor:
        ctx.save_for_backward(slots_R)
        places_R = torch.arange(slots_R.shape[0], device=slots_R.device)
        return rows_RD.index_select(0, torch.empty_like(slots_R).index_copy_(0, slots_R, places_R))

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, None]:
        (slots_R,) = ctx.saved_tensors
        return grad_RD.index_select(0, slots_R), None


class _TakeTokens(torch.autograd.Function):
    """rows[r] = x[slots[r] // K]. The backward sums a token's K slots in order; index_select's would add atomically."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, slots_R: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(slots_R)
        ctx.num_tokens, ctx.top_k = x_TD.shape[0], top_k
        return x_TD.index_select(0, slots_R // top_k)

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, None, None]:
        (slots_R,) = ctx.saved_tensors
        return _to_slots(grad_RD, slots_R, ctx.num_tokens, ctx.top_k).sum(dim=1), None, None
