"""The arithmetic of routing as plain functions on tensors, and the one door through which the rest of the library reaches it.

Each function has a torch definition, which fixes its result to the bit, ties included (weights, gradients and sums of rows up
to the tolerance that docs/kernels.md states). On a GPU with triton the functions below run a kernel that equals its
definition; see backend.py for how that is chosen, and how to overrule it.

Shape suffixes: T tokens, E experts, K experts per token, R rows, D model.
"""

from typing import Any

from torch import Tensor

from . import histogram, margin, ops, permutation, radix, router
from .backend import uses_triton
from .margin import margins
from .radix import bf16_key, bf16_unkey, canonical, dense_histogram
from .router import (
    SCORES,
    Bias,
    NanPolicy,
    RoutedRows,
    Score,
    Space,
    at_least_float32,
    best_groups,
    combine_weights,
    require,
)
from .selection import expert_counts, top_k

__all__ = [
    "SCORES",
    "Bias",
    "NanPolicy",
    "RoutedRows",
    "Score",
    "Space",
    "at_least_float32",
    "best_groups",
    "bf16_key",
    "bf16_margins",
    "bf16_unkey",
    "canonical",
    "combine_weights",
    "dense_histogram",
    "expert_counts",
    "expert_order",
    "high_byte_histogram",
    "low_byte_histogram",
    "margins",
    "permute",
    "require",
    "route_rows",
    "top_k",
    "uniform_histogram",
    "unpermute",
]


def route_rows(logits_TE: Tensor, k: int, **options: Any) -> RoutedRows:
    """Score, choose, weigh and count in one go: see `router.route_rows`."""
    return (ops if uses_triton(logits_TE) else router).route_rows(logits_TE, k, **options)


def bf16_margins(
    selection_TE: Tensor, cutoff_T: Tensor, allowed_TE: Tensor | None, mask_T: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The bf16 margins of a batch and their keys' high-byte counts: see `margin.bf16_margins`."""
    if uses_triton(selection_TE):
        return ops.margin_bytes(selection_TE, cutoff_T, allowed_TE, mask_T)
    return margin.bf16_margins(selection_TE, cutoff_T, allowed_TE, mask_T)


def high_byte_histogram(values_TE: Tensor) -> Tensor:
    """(E, 256) int32 counts of the keys' high bytes: see `radix.high_byte_histogram`."""
    return ops.byte_histogram(values_TE, None) if uses_triton(values_TE) else radix.high_byte_histogram(values_TE)


def low_byte_histogram(values_TE: Tensor, high_E: Tensor) -> Tensor:
    """(E, 256) int32 counts of the low bytes inside one bin: see `radix.low_byte_histogram`."""
    return ops.byte_histogram(values_TE, high_E) if uses_triton(values_TE) else radix.low_byte_histogram(values_TE, high_E)


def uniform_histogram(values_TE: Tensor, low: Tensor, high: Tensor, num_bins: int, mask_T: Tensor | None = None) -> Tensor:
    """(E, num_bins) int64 counts in equal bins over [low, high]: see `histogram.uniform_histogram`."""
    # A program of the kernel keeps all the bins of a column in registers.
    if uses_triton(values_TE) and num_bins <= 2048:
        return ops.uniform_histogram(values_TE, low, high, num_bins, mask_T)
    return histogram.uniform_histogram(values_TE, low, high, num_bins, mask_T)


def expert_order(indices_TK: Tensor, num_experts: int, mask_T: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Assignments in expert-major order, stable, and where each expert's begin: see `permutation.expert_order`."""
    if uses_triton(indices_TK):
        return ops.expert_order(indices_TK, num_experts, mask_T)
    return permutation.expert_order(indices_TK, num_experts, mask_T)


def permute(x_TD: Tensor, slots_R: Tensor, top_k: int) -> Tensor:
    """(R, D) the token of every slot: see `permutation.permute`."""
    if uses_triton(x_TD):
        return ops.take_tokens(x_TD, slots_R, top_k)
    return permutation.permute(x_TD, slots_R, top_k)


def unpermute(rows_RD: Tensor, weights_TK: Tensor, slots_R: Tensor) -> Tensor:
    """(T, D) every token's weighted sum of its rows: see `permutation.unpermute`."""
    if uses_triton(rows_RD, weights_TK):
        return ops.sum_slots(rows_RD, slots_R, weights_TK, *weights_TK.shape)
    return permutation.unpermute(rows_RD, weights_TK, slots_R)
