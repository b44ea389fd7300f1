"""Permutation in Triton: a stable counting sort instead of a comparison sort, and row copies that touch each byte once.

Assignment i goes to `start of its expert + how many earlier assignments chose that expert`. The second number is counted
in two parts: whole blocks before, from a small table of counts per block, and earlier places of the same block. Every
place is computed, none is claimed by an atomic, so the order is the same on every run.

Shape suffixes: T tokens, K experts per token, N = T * K assignments, R rows, B blocks of assignments, E experts, D model.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import on_device, pow2

BLOCK_N = 256
CHUNK = 16  # of a block's assignments, compared with all of them at a time
MAX_BLOCK_D = 1024


@triton.jit
def _expert_of(indices, mask, at, inside, E: tl.constexpr, K: tl.constexpr, MASKED: tl.constexpr):
    """The expert of each assignment; E, one behind the last, for padding."""
    expert = tl.load(indices + at, mask=inside, other=0).to(tl.int32)
    if MASKED:
        expert = tl.where(tl.load(mask + at // K, mask=inside, other=0) != 0, expert, E)
    return expert


@triton.jit
def count_block_kernel(
    indices,
    mask,
    counts,
    num_slots,
    E: tl.constexpr,
    K: tl.constexpr,
    EP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
):
    """(B, E + 1) int32: how many assignments of each block each expert has."""
    at = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = at < num_slots
    counted = tl.histogram(_expert_of(indices, mask, at, inside, E, K, MASKED), EP, mask=inside)
    expert = tl.arange(0, EP)
    tl.store(counts + tl.program_id(0).to(tl.int64) * (E + 1) + expert, counted, mask=expert <= E)


@triton.jit
def place_kernel(
    indices,
    mask,
    first,
    slots,
    num_slots,
    E: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr,
    MASKED: tl.constexpr,
):
    """slots[place of i] = i, with `first` (B, E + 1) the place of each block's first assignment to each expert."""
    place = tl.arange(0, BLOCK_N)
    block = tl.program_id(0).to(tl.int64)
    at = block * BLOCK_N + place
    inside = at < num_slots
    expert = _expert_of(indices, mask, at, inside, E, K, MASKED)
    to = tl.load(first + block * (E + 1) + expert, mask=inside, other=0)
    for start in range(0, BLOCK_N, CHUNK):
        other = start + tl.arange(0, CHUNK)
        other_at = block * BLOCK_N + other
        other_expert = _expert_of(indices, mask, other_at, other_at < num_slots, E, K, MASKED)
        earlier = (other_expert[None, :] == expert[:, None]) & (other[None, :] < place[:, None])
        to += tl.sum(earlier.to(tl.int32), axis=1)
    tl.store(slots + to, at, mask=inside)


@triton.jit
def take_tokens_kernel(x, slots, rows, D, K: tl.constexpr, BLOCK_D: tl.constexpr):
    """One program copies one row."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(slots + row) // K
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        tl.store(rows + row * D + d, tl.load(x + token * D + d, mask=d < D), mask=d < D)


@triton.jit
def sum_slots_kernel(rows, row_of, weights, out, D, K: tl.constexpr, BLOCK_D: tl.constexpr, WEIGHTED: tl.constexpr):
    """One program sums the rows of one token, in the order of its K experts, in float32."""
    token = tl.program_id(0).to(tl.int64)
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        total = tl.zeros([BLOCK_D], tl.float32)
        for k in range(K):
            row = tl.load(row_of + token * K + k)
            part = tl.load(rows + row * D + d, mask=(d < D) & (row >= 0), other=0.0).to(tl.float32)
            if WEIGHTED:
                part *= tl.load(weights + token * K + k).to(tl.float32)
            total += part
        tl.store(out + token * D + d, total, mask=d < D)


@triton.jit
def sum_slots_backward_kernel(grad, rows, row_of, weights, grad_rows, grad_weights, D, K: tl.constexpr, BLOCK_D: tl.constexpr):
    """One program per assignment: its row's gradient is its weight times the token's, its weight's their dot product."""
    slot = tl.program_id(0).to(tl.int64)
    token = slot // K
    row = tl.load(row_of + slot)
    weight = tl.load(weights + slot).to(tl.float32)
    dot = tl.zeros([BLOCK_D], tl.float32)
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        here = (d < D) & (row >= 0)
        g = tl.load(grad + token * D + d, mask=here, other=0.0).to(tl.float32)
        dot += g * tl.load(rows + row * D + d, mask=here, other=0.0).to(tl.float32)
        tl.store(grad_rows + row * D + d, g * weight, mask=here)
    tl.store(grad_weights + slot, tl.sum(dot, axis=0))


def expert_order(indices_TK: Tensor, num_experts: int, mask_T: Tensor | None) -> tuple[Tensor, Tensor]:
    indices_TK = indices_TK.contiguous()
    mask = indices_TK if mask_T is None else mask_T.contiguous().view(torch.uint8)
    num_slots, blocks = indices_TK.numel(), triton.cdiv(indices_TK.numel(), BLOCK_N)
    slots_N = indices_TK.new_empty(num_slots, dtype=torch.int64)
    if num_slots == 0:
        return slots_N, indices_TK.new_zeros(num_experts + 1, dtype=torch.int64)
    counts_BE = indices_TK.new_empty((blocks, num_experts + 1), dtype=torch.int32)
    sizes = {"E": num_experts, "K": indices_TK.shape[1], "BLOCK_N": BLOCK_N, "MASKED": mask_T is not None}
    with on_device(indices_TK):
        count_block_kernel[(blocks,)](indices_TK, mask, counts_BE, num_slots, EP=pow2(num_experts + 1), **sizes)
        through_BE = counts_BE.cumsum(dim=0, dtype=torch.int64)
        starts_E1 = through_BE[-1].cumsum(dim=0) - through_BE[-1]
        first_BE = through_BE - counts_BE + starts_E1
        place_kernel[(blocks,)](indices_TK, mask, first_BE, slots_N, num_slots, CHUNK=CHUNK, **sizes)
    return slots_N, starts_E1


def take_tokens(x_TD: Tensor, slots_R: Tensor, top_k: int) -> Tensor:
    x_TD = x_TD.contiguous()
    rows_RD = x_TD.new_empty((slots_R.shape[0], x_TD.shape[1]))
    if rows_RD.numel():
        with on_device(x_TD):
            take_tokens_kernel[(rows_RD.shape[0],)](x_TD, slots_R.contiguous(), rows_RD, **_width(x_TD), K=top_k)
    return rows_RD


def sum_slots(rows_RD: Tensor, slots_R: Tensor, weights_TK: Tensor | None, num_tokens: int, top_k: int) -> Tensor:
    rows_RD = rows_RD.contiguous()
    out_TD = rows_RD.new_empty((num_tokens, rows_RD.shape[1]))
    if out_TD.numel():
        weights = rows_RD if weights_TK is None else weights_TK.contiguous()
        with on_device(rows_RD):
            sum_slots_kernel[(num_tokens,)](
                rows_RD,
                _row_of(slots_R, num_tokens * top_k),
                weights,
                out_TD,
                **_width(rows_RD),
                K=top_k,
                WEIGHTED=weights_TK is not None,
            )
    return out_TD


def sum_slots_backward(grad_TD: Tensor, rows_RD: Tensor, slots_R: Tensor, weights_TK: Tensor) -> tuple[Tensor, Tensor]:
    rows_RD, weights_TK = rows_RD.contiguous(), weights_TK.contiguous()
    grad_rows, grad_weights = torch.empty_like(rows_RD), torch.empty_like(weights_TK)
    if weights_TK.numel():
        with on_device(rows_RD):
            sum_slots_backward_kernel[(weights_TK.numel(),)](
                grad_TD.contiguous(),
                rows_RD,
                _row_of(slots_R, weights_TK.numel()),
                weights_TK,
                grad_rows,
                grad_weights,
                **_width(rows_RD),
                K=weights_TK.shape[1],
            )
    return grad_rows, grad_weights


def _row_of(slots_R: Tensor, num_slots: int) -> Tensor:
    """(N,) the row of each assignment, -1 where it has none."""
    rows = torch.arange(slots_R.shape[0], device=slots_R.device)
    return slots_R.new_full((num_slots,), -1, dtype=torch.int64).scatter_(0, slots_R, rows)


def _width(tensor: Tensor) -> dict[str, int]:
    return {"D": tensor.shape[1], "BLOCK_D": min(MAX_BLOCK_D, pow2(tensor.shape[1]))}
