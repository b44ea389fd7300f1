"""The fused router in Triton: one read of the logits gives everything that `router.route_rows` does, one kernel its gradient.

A program holds BLOCK_T rows at a time, each row laid out as GP groups of MP experts (powers of two, padded; one group where
there are no groups), so that a row's slots are in expert order whatever E is. Selection runs on integers that sort as the
float32 numbers do, so that -0.0 ties with 0.0, and no float comparison ever decides.

Shape suffixes: T tokens, E experts, K experts per token, S slots of a row, G groups, M experts of a group.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import on_device, pow2, programs

ELEMENTS = 1024  # of a program's tile: 8 a thread with 4 warps; with 16, registers spill at E = 256
NO_BIAS, EXPERT_BIAS, TOKEN_BIAS = 0, 1, 2

TAKEN = tl.constexpr(-(2**31))  # below the key of -inf: slots that are padding or already chosen
MINUS_INF = tl.constexpr(-2139095041)  # the key of -inf


@triton.jit
def _sort_key(values):
    """int32 keys that sort as the float32 numbers do, both zeros alike."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _sort_value(keys):
    """The float32 numbers with these keys."""
    return tl.where(keys < 0, keys ^ 0x7FFFFFFF, keys).to(tl.float32, bitcast=True)


@triton.jit
def _first_at(keys, best, axis: tl.constexpr, place, count: tl.constexpr):
    """The lowest place along `axis` whose key is `best`."""
    return tl.min(tl.where(keys == tl.expand_dims(best, axis), place, count), axis=axis)


@triton.jit
def _groups_kept(keys, BLOCK_T: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, M: tl.constexpr, MP: tl.constexpr, GROUP_K):
    """(BLOCK_T, GP) whether each group is among the row's best: by the sum of its two largest values, ties to the lowest."""
    keys_TGM = tl.reshape(keys, [BLOCK_T, GP, MP])
    first = tl.max(keys_TGM, axis=2)
    value = _sort_value(first)
    if M > 1:
        member = tl.arange(0, MP)[None, None, :]
        at = _first_at(keys_TGM, first, 2, member, MP)
        value += _sort_value(tl.max(tl.where(member == at[:, :, None], TAKEN, keys_TGM), axis=2))
    group = tl.arange(0, GP)[None, :]
    left = tl.where(group < G, _sort_key(value), TAKEN)
    kept = tl.zeros([BLOCK_T, GP], tl.int32)
    for _ in range(GROUP_K):
        chosen = group == _first_at(left, tl.max(left, axis=1), 1, group, GP)[:, None]
        kept = tl.where(chosen, 1, kept)
        left = tl.where(chosen, TAKEN, left)
    return kept


@triton.jit
def router_forward_kernel(
    logits,
    bias,
    mask,
    indices,
    weights,
    scores,
    cutoff,
    clean,
    allowed,
    bad,
    partial_counts,
    num_tokens,
    scale,
    E: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    G: tl.constexpr,
    GP: tl.constexpr,
    MP: tl.constexpr,
    GROUP_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    SCORE: tl.constexpr,
    ON_SCORES: tl.constexpr,
    NORMALIZE: tl.constexpr,
    BIAS: tl.constexpr,
    MASKED: tl.constexpr,
    CLEAN: tl.constexpr,
):
    """GROUP_K = 0: no groups. Each program walks over tiles and counts in registers, so counts cost one row per program."""
    M: tl.constexpr = E // G
    EP: tl.constexpr = GP * MP
    slot = tl.arange(0, EP)
    expert = slot // MP * M + slot % MP
    real_S = (slot % MP < M) & (slot // MP < G)
    position = tl.arange(0, KP)[None, :]
    counts = tl.zeros([EP], tl.int32)
    for tile in range(tl.program_id(0), tl.cdiv(num_tokens, BLOCK_T), tl.num_programs(0)):
        row = tile * BLOCK_T + tl.arange(0, BLOCK_T)
        counted = row < num_tokens
        at = row.to(tl.int64)[:, None] * E + expert[None, :]
        here = counted[:, None] & real_S[None, :]
        x = tl.load(logits + at, mask=here, other=float("-inf")).to(tl.float32)

        has_nan = tl.max((x != x).to(tl.int32), axis=1) > 0
        largest = tl.max(tl.where(x == x, x, float("-inf")), axis=1)
        silent = has_nan | (largest == float("inf")) | (largest == float("-inf"))
        if MASKED:
            counted = counted & (tl.load(mask + row, mask=counted, other=0) != 0)
            tl.store(bad + row, (silent & counted).to(tl.uint8), mask=row < num_tokens)
            silent = silent | (counted == 0)
        else:
            tl.store(bad + row, silent.to(tl.uint8), mask=row < num_tokens)
        x = tl.where(silent[:, None] & real_S[None, :], 0.0, x)
        largest = tl.where(silent, 0.0, largest)
        if CLEAN:
            tl.store(clean + at, x, mask=here)

        if SCORE == "sigmoid":
            s = 1.0 / (1.0 + tl.exp(-x))
        elif SCORE == "softmax":
            s = tl.exp(x - largest[:, None])
            total = tl.sum(s, axis=1)
            s = s / total[:, None]
        else:
            s = x
        tl.store(scores + at, s, mask=here)

        value = x
        if ON_SCORES:
            value = s
        if BIAS == 1:
            value = value + tl.load(bias + expert, mask=real_S, other=0.0)[None, :]
        elif BIAS == 2:
            value = value + tl.load(bias + at, mask=here, other=0.0)
        left = tl.where(real_S[None, :], _sort_key(value), TAKEN)
        if GROUP_K > 0:
            kept = _groups_kept(left, BLOCK_T, G, GP, M, MP, GROUP_K)
            kept = tl.reshape(tl.broadcast_to(kept[:, :, None], [BLOCK_T, GP, MP]), [BLOCK_T, EP])
            tl.store(allowed + at, kept.to(tl.uint8), mask=here)
            left = tl.where((kept == 0) & real_S[None, :], MINUS_INF, left)

        chosen = tl.zeros([BLOCK_T, KP], tl.int32)
        for k in range(K):
            best = _first_at(left, tl.max(left, axis=1), 1, slot[None, :], EP)
            left = tl.where(slot[None, :] == best[:, None], TAKEN, left)
            chosen = tl.where(position == k, best[:, None], chosen)
        runner_up = tl.full([BLOCK_T], float("-inf"), tl.float32) if K == E else _sort_value(tl.max(left, axis=1))
        tl.store(cutoff + row, runner_up, mask=row < num_tokens)
        counts += tl.sum(((left == TAKEN) & real_S[None, :] & counted[:, None]).to(tl.int32), axis=0)

        # The chosen scores are computed again from the logits, which are still in the cache, not picked out of the tile.
        chosen = chosen // MP * M + chosen % MP
        listed = (row < num_tokens)[:, None] & (position < K)
        w = tl.load(logits + row.to(tl.int64)[:, None] * E + chosen, mask=listed, other=float("-inf")).to(tl.float32)
        w = tl.where(silent[:, None], 0.0, w)
        if SCORE == "sigmoid":
            w = 1.0 / (1.0 + tl.exp(-w))
        elif SCORE == "softmax":
            w = tl.exp(w - largest[:, None]) / total[:, None]
        if NORMALIZE:
            sum_T = tl.sum(tl.where(listed, w, 0.0), axis=1)
            w = w / tl.where(sum_T == 0.0, 1.0, sum_T)[:, None]
        w = w * scale
        if MASKED:
            w = tl.where(counted[:, None], w, 0.0)
        to = row.to(tl.int64)[:, None] * K + position
        tl.store(indices + to, chosen.to(tl.int64), mask=listed)
        tl.store(weights + to, w, mask=listed)
    tl.store(partial_counts + tl.program_id(0) * E + expert, counts, mask=real_S)


@triton.jit
def router_backward_kernel(
    grad_weights,
    grad_scores,
    grad_clean,
    scores,
    indices,
    mask,
    bad,
    grad_logits,
    num_tokens,
    scale,
    E: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    EP: tl.constexpr,
    BLOCK_T: tl.constexpr,
    SCORE: tl.constexpr,
    NORMALIZE: tl.constexpr,
    MASKED: tl.constexpr,
    OF_WEIGHTS: tl.constexpr,
    OF_SCORES: tl.constexpr,
    OF_CLEAN: tl.constexpr,
):
    """Every element of the gradient is written once, by the program that owns its row; nothing is scattered."""
    row = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    inside = row < num_tokens
    expert = tl.arange(0, EP)[None, :]
    at = row.to(tl.int64)[:, None] * E + expert
    here = inside[:, None] & (expert < E)
    s = tl.load(scores + at, mask=here, other=0.0)
    g = tl.load(grad_scores + at, mask=here, other=0.0) if OF_SCORES else tl.zeros([BLOCK_T, EP], tl.float32)
    if OF_WEIGHTS:
        position = tl.arange(0, KP)[None, :]
        to = row.to(tl.int64)[:, None] * K + position
        listed = inside[:, None] & (position < K)
        chosen = tl.load(indices + to, mask=listed, other=0).to(tl.int32)
        w = tl.load(grad_weights + to, mask=listed, other=0.0) * scale
        if NORMALIZE:
            s_TK = tl.load(scores + row.to(tl.int64)[:, None] * E + chosen, mask=listed, other=0.0)
            total = tl.sum(s_TK, axis=1)
            safe = tl.where(total == 0.0, 1.0, total)
            through_total = tl.where(total == 0.0, 0.0, tl.sum(w * s_TK, axis=1) / safe / safe)
            w = tl.where(listed, w / safe[:, None] - through_total[:, None], 0.0)
        for k in range(K):
            of_k = position == k
            expert_k = tl.sum(tl.where(of_k, chosen, 0), axis=1)
            grad_k = tl.sum(tl.where(of_k, w, 0.0), axis=1)
            g += tl.where(expert == expert_k[:, None], grad_k[:, None], 0.0)
    if SCORE == "sigmoid":
        d = g * s * (1.0 - s)
    elif SCORE == "softmax":
        d = s * (g - tl.sum(g * s, axis=1)[:, None])
    else:
        d = g
    if OF_CLEAN:
        d += tl.load(grad_clean + at, mask=here, other=0.0)
    silent = tl.load(bad + row, mask=inside, other=0) != 0
    if MASKED:
        silent = silent | (tl.load(mask + row, mask=inside, other=0) == 0)
    tl.store(grad_logits + at, tl.where(silent[:, None], 0.0, d), mask=here)


def layout(num_experts: int, top_k: int, num_groups: int) -> dict[str, int]:
    """The sizes that a forward is compiled for."""
    groups = max(1, num_groups)
    sizes = {"E": num_experts, "K": top_k, "KP": pow2(top_k), "G": groups, "GP": pow2(groups)}
    sizes["MP"] = pow2(num_experts // groups)
    return {**sizes, "BLOCK_T": max(1, ELEMENTS // (sizes["GP"] * sizes["MP"]))}


def router_forward(
    logits_TE: Tensor,
    bias: Tensor | None,
    mask_T: Tensor | None,
    top_k: int,
    score: str,
    space: str,
    normalize: bool,
    scale: float,
    num_groups: int,
    group_top_k: int,
    wants_clean: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """weights, scores, clean logits, cutoff, indices, counts, allowed, bad rows. `num_groups` 0: no groups."""
    num_tokens, num_experts = logits_TE.shape
    logits_TE = logits_TE.contiguous()
    new = logits_TE.new_empty
    sizes = layout(num_experts, top_k, num_groups)
    width = programs(triton.cdiv(num_tokens, sizes["BLOCK_T"]), logits_TE.device)
    indices_TK = new((num_tokens, top_k), dtype=torch.int64)
    weights_TK = new((num_tokens, top_k), dtype=torch.float32)
    scores_TE = new((num_tokens, num_experts), dtype=torch.float32)
    cutoff_T = new((num_tokens,), dtype=torch.float32)
    clean_TE = new((num_tokens if wants_clean else 0, num_experts), dtype=torch.float32)
    allowed_TE = new((num_tokens if num_groups else 0, num_experts), dtype=torch.bool)
    bad_T = new((num_tokens,), dtype=torch.bool)
    partial_PE = new((width, num_experts), dtype=torch.int32)
    outputs = (indices_TK, weights_TK, scores_TE, cutoff_T, clean_TE, allowed_TE.view(torch.uint8), bad_T.view(torch.uint8))
    with on_device(logits_TE):
        router_forward_kernel[(width,)](
            logits_TE,
            logits_TE if bias is None else bias.contiguous(),
            bad_T if mask_T is None else mask_T.contiguous().view(torch.uint8),
            *outputs,
            partial_PE,
            num_tokens,
            float(scale),
            **sizes,
            GROUP_K=group_top_k if num_groups else 0,
            SCORE=score,
            ON_SCORES=space == "scores",
            NORMALIZE=normalize,
            BIAS=NO_BIAS if bias is None else bias.dim(),
            MASKED=mask_T is not None,
            CLEAN=wants_clean,
        )
    counts_E = partial_PE.sum(dim=0, dtype=torch.int64)
    return weights_TK, scores_TE, clean_TE, cutoff_T, indices_TK, counts_E, allowed_TE, bad_T


def router_backward(
    grad_weights: Tensor | None,
    grad_scores: Tensor | None,
    grad_clean: Tensor | None,
    scores_TE: Tensor,
    indices_TK: Tensor,
    mask_T: Tensor | None,
    bad_T: Tensor,
    score: str,
    normalize: bool,
    scale: float,
    dtype: torch.dtype,
) -> Tensor:
    """(T, E) gradient of the logits, in their dtype."""
    num_tokens, num_experts = scores_TE.shape
    top_k = indices_TK.shape[1]
    grad_logits = torch.empty_like(scores_TE, dtype=dtype)
    width = pow2(num_experts)
    block = max(1, ELEMENTS // width)
    grads: list[Any] = [scores_TE if grad is None else grad.contiguous() for grad in (grad_weights, grad_scores, grad_clean)]
    if num_tokens == 0:
        return grad_logits
    with on_device(scores_TE):
        router_backward_kernel[(triton.cdiv(num_tokens, block),)](
            *grads,
            scores_TE,
            indices_TK,
            bad_T if mask_T is None else mask_T.contiguous().view(torch.uint8),
            bad_T.view(torch.uint8),
            grad_logits,
            num_tokens,
            float(scale),
            E=num_experts,
            K=top_k,
            KP=pow2(top_k),
            EP=width,
            BLOCK_T=block,
            SCORE=score,
            NORMALIZE=normalize,
            MASKED=mask_T is not None,
            OF_WEIGHTS=grad_weights is not None,
            OF_SCORES=grad_scores is not None,
            OF_CLEAN=grad_clean is not None,
        )
    return grad_logits
