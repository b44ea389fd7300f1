"""The Triton kernels as torch operators, with the shapes that the compiler needs and the gradients that autograd needs.

An operator imports its kernels when it first runs, so importing evenload does not import triton.

Shape suffixes: T tokens, E experts, K experts per token, R rows, D model.
"""

from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from .router import (
    SCORES,
    Bias,
    NanPolicy,
    RoutedRows,
    Score,
    Space,
    at_least_float32,
    clean,
    combine_weights,
    evaluated,
    refuse_bad_rows,
)
from .selection import expert_counts


def route_rows(
    logits_TE: Tensor,
    k: int,
    *,
    bias: Bias,
    mask_T: Tensor | None,
    replay_TK: Tensor | None,
    score: Score,
    space: Space,
    normalize: bool,
    scale: float,
    num_groups: int | None,
    group_top_k: int | None,
    nan: NanPolicy,
) -> RoutedRows:
    """As `router.route_rows`, by the fused kernel."""
    bias_TE = evaluated(bias, _selection(logits_TE, mask_T, score, space, nan) if callable(bias) else logits_TE, mask_T)
    wants_clean = mask_T is not None or nan == "route" or logits_TE.dtype != torch.float32
    groups = num_groups or 0
    weights_TK, scores_TE, clean_TE, cutoff_T, indices_TK, counts_E, allowed_TE, bad_T = router_forward(
        logits_TE, bias_TE, mask_T, k, score, space, normalize, scale, groups, group_top_k or 0, wants_clean
    )
    if nan == "raise":
        refuse_bad_rows(bad_T)
    if replay_TK is not None:
        indices_TK = replay_TK
        weights_TK = combine_weights(scores_TE, indices_TK, mask_T, normalize, scale)
        counts_E = expert_counts(indices_TK, logits_TE.shape[1], mask_T)
    logits_TE = clean_TE if wants_clean else logits_TE
    return RoutedRows(
        indices=indices_TK,
        weights=weights_TK,
        scores=scores_TE,
        counts=counts_E,
        cutoff=cutoff_T,
        logits=logits_TE,
        selection=(logits_TE if space == "logits" else scores_TE).detach(),
        allowed=allowed_TE if groups else None,
        nan_rows=bad_T.sum(),
    )


def _selection(logits_TE: Tensor, mask_T: Tensor | None, score: Score, space: Space, nan: NanPolicy) -> Tensor:
    """What a bias that depends on the selection values is made from; on the logits of a batch without padding, for free."""
    logits_TE = at_least_float32(logits_TE.detach())
    if mask_T is not None or nan == "route":
        logits_TE, _ = clean(logits_TE, mask_T, "route")
    return logits_TE if space == "logits" else SCORES[score](logits_TE)


@custom_op("evenload::router_forward", mutates_args=())
def router_forward(
    logits: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    top_k: int,
    score: str,
    space: str,
    normalize: bool,
    scale: float,
    num_groups: int,
    group_top_k: int,
    wants_clean: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    from .router_triton import router_forward as kernel

    return kernel(logits, bias, mask, top_k, score, space, normalize, scale, num_groups, group_top_k, wants_clean)


@router_forward.register_fake
def _(
    logits: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    top_k: int,
    score: str,
    space: str,
    normalize: bool,
    scale: float,
    num_groups: int,
    group_top_k: int,
    wants_clean: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    num_tokens, num_experts = logits.shape
    new = logits.new_empty
    return (
        new((num_tokens, top_k), dtype=torch.float32),
        new((num_tokens, num_experts), dtype=torch.float32),
        new((num_tokens if wants_clean else 0, num_experts), dtype=torch.float32),
        new((num_tokens,), dtype=torch.float32),
        new((num_tokens, top_k), dtype=torch.int64),
        new((num_experts,), dtype=torch.int64),
        new((num_tokens if num_groups else 0, num_experts), dtype=torch.bool),
        new((num_tokens,), dtype=torch.bool),
    )


@custom_op("evenload::router_backward", mutates_args=())
def router_backward(
    grad_weights: Tensor | None,
    grad_scores: Tensor | None,
    grad_clean: Tensor | None,
    scores: Tensor,
    indices: Tensor,
    mask: Tensor | None,
    bad: Tensor,
    score: str,
    normalize: bool,
    scale: float,
    dtype: torch.dtype,
) -> Tensor:
    from .router_triton import router_backward as kernel

    return kernel(grad_weights, grad_scores, grad_clean, scores, indices, mask, bad, score, normalize, scale, dtype)


@router_backward.register_fake
def _(
    grad_weights: Tensor | None,
    grad_scores: Tensor | None,
    grad_clean: Tensor | None,
    scores: Tensor,
    indices: Tensor,
    mask: Tensor | None,
    bad: Tensor,
    score: str,
    normalize: bool,
    scale: float,
    dtype: torch.dtype,
) -> Tensor:
    return torch.empty_like(scores, dtype=dtype)


def _router_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, _, mask, _, score, _, normalize, scale, _, _, wants_clean = inputs
    _, scores, _, cutoff, indices, counts, allowed, bad = output
    ctx.mark_non_differentiable(cutoff, indices, counts, allowed, bad)
    ctx.save_for_backward(scores, indices, mask, bad)
    ctx.options = score, normalize, scale, logits.dtype
    ctx.wants_clean = wants_clean
    ctx.set_materialize_grads(False)


def _router_gradient(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    grad_weights, grad_scores, grad_clean, *_ = grads
    scores, indices, mask, bad = ctx.saved_tensors
    grad_clean = grad_clean if ctx.wants_clean else None
    return router_backward(grad_weights, grad_scores, grad_clean, scores, indices, mask, bad, *ctx.options), *[None] * 10


router_forward.register_autograd(_router_gradient, setup_context=_router_context)


@custom_op("evenload::margin_bytes", mutates_args=())
def margin_bytes(selection: Tensor, cutoff: Tensor, allowed: Tensor | None, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    from .histogram_triton import margin_bytes as kernel

    return kernel(selection, cutoff, allowed, mask)


@margin_bytes.register_fake
def _(selection: Tensor, cutoff: Tensor, allowed: Tensor | None, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    counts = selection.new_empty((selection.shape[1], 256), dtype=torch.int32)
    return selection.new_empty(selection.shape, dtype=torch.bfloat16), counts


@custom_op("evenload::byte_histogram", mutates_args=())
def byte_histogram(values: Tensor, high: Tensor | None) -> Tensor:
    from .histogram_triton import byte_histogram as kernel

    return kernel(values, high)


@byte_histogram.register_fake
def _(values: Tensor, high: Tensor | None) -> Tensor:
    return values.new_empty((values.shape[1], 256), dtype=torch.int32)


@custom_op("evenload::uniform_histogram", mutates_args=())
def uniform_histogram(values: Tensor, low: Tensor, high: Tensor, num_bins: int, mask: Tensor | None) -> Tensor:
    from .histogram_triton import uniform_histogram as kernel

    return kernel(values, low, high, num_bins, mask)


@uniform_histogram.register_fake
def _(values: Tensor, low: Tensor, high: Tensor, num_bins: int, mask: Tensor | None) -> Tensor:
    return values.new_empty((values.shape[1], num_bins), dtype=torch.int64)


@custom_op("evenload::expert_order", mutates_args=())
def expert_order(indices: Tensor, num_experts: int, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    from .permutation_triton import expert_order as kernel

    return kernel(indices, num_experts, mask)


@expert_order.register_fake
def _(indices: Tensor, num_experts: int, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    slots = indices.new_empty((indices.numel(),), dtype=torch.int64)
    return slots, indices.new_empty((num_experts + 1,), dtype=torch.int64)


@custom_op("evenload::take_tokens", mutates_args=())
def take_tokens(x: Tensor, slots: Tensor, top_k: int) -> Tensor:
    from .permutation_triton import take_tokens as kernel

    return kernel(x, slots, top_k)


@take_tokens.register_fake
def _(x: Tensor, slots: Tensor, top_k: int) -> Tensor:
    return x.new_empty((slots.shape[0], x.shape[1]))


@custom_op("evenload::sum_slots", mutates_args=())
def sum_slots(rows: Tensor, slots: Tensor, weights: Tensor | None, num_tokens: int, top_k: int) -> Tensor:
    from .permutation_triton import sum_slots as kernel

    return kernel(rows, slots, weights, num_tokens, top_k)


@sum_slots.register_fake
def _(rows: Tensor, slots: Tensor, weights: Tensor | None, num_tokens: int, top_k: int) -> Tensor:
    return rows.new_empty((num_tokens, rows.shape[1]))


@custom_op("evenload::sum_slots_backward", mutates_args=())
def sum_slots_backward(grad: Tensor, rows: Tensor, slots: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    from .permutation_triton import sum_slots_backward as kernel

    return kernel(grad, rows, slots, weights)


@sum_slots_backward.register_fake
def _(grad: Tensor, rows: Tensor, slots: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(rows), torch.empty_like(weights)


def _take_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, slots, ctx.top_k = inputs
    ctx.num_tokens = x.shape[0]
    ctx.save_for_backward(slots)


def _take_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    (slots,) = ctx.saved_tensors
    return sum_slots(grad, slots, None, ctx.num_tokens, ctx.top_k), None, None


def _sum_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, slots, weights, _, ctx.top_k = inputs
    ctx.save_for_backward(rows if weights is not None else None, slots, weights)


def _sum_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor | None, None, None]:
    rows, slots, weights = ctx.saved_tensors
    if weights is None:
        return take_tokens(grad, slots, ctx.top_k), None, None, None, None
    grad_rows, grad_weights = sum_slots_backward(grad, rows, slots, weights)
    return grad_rows, None, grad_weights, None, None


take_tokens.register_autograd(_take_gradient, setup_context=_take_context)
sum_slots.register_autograd(_sum_gradient, setup_context=_sum_context)
