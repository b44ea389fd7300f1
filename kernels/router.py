"""From logits to a routing decision: the definition that the fused router kernel must equal.

Shape suffixes: T tokens, E experts, K experts per token, G groups, M experts of a group.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from .selection import expert_counts, top_k

Score = Literal["sigmoid", "softmax", "identity"]
"""How logits become scores."""
Space = Literal["logits", "scores"]
"""What a selection bias is added to."""
NanPolicy = Literal["raise", "route"]
"""What happens to a row with NaN: an error, or a choice as if its logits were 0."""
Bias = Tensor | Callable[[Tensor, Tensor | None], Tensor] | None
"""A selection bias, or a function that makes it from the selection values (T, E) and the mask."""

SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "softmax": lambda logits: torch.softmax(logits, dim=-1),
    "identity": lambda logits: logits.view_as(logits),  # a tensor of its own: dynamo refuses one tensor in two roles
}
"""The score functions by name."""


class RoutedRows(NamedTuple):
    """What `route_rows` finds; see `evenload.Routing`, whose fields these are."""

    indices: Tensor
    weights: Tensor
    scores: Tensor
    counts: Tensor
    cutoff: Tensor
    logits: Tensor
    selection: Tensor
    allowed: Tensor | None
    nan_rows: Tensor


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
    """Route the rows of (T, E) logits of any floating dtype; the options are those of `evenload.route`, checked by it.

    Args:
        replay_TK: (T, K) int64 valid indices to use instead of the top-k.
    """
    logits_TE, nan_rows = clean(at_least_float32(logits_TE), mask_T, nan)
    scores_TE = SCORES[score](logits_TE)
    selection_TE = (logits_TE if space == "logits" else scores_TE).detach()
    bias = evaluated(bias, selection_TE, mask_T)
    indices_TK, cutoff_T, allowed_TE = select(selection_TE, k, bias, num_groups, group_top_k)
    if replay_TK is not None:
        indices_TK = replay_TK
    return RoutedRows(
        indices=indices_TK,
        weights=combine_weights(scores_TE, indices_TK, mask_T, normalize, scale),
        scores=scores_TE,
        counts=expert_counts(indices_TK, logits_TE.shape[1], mask_T),
        cutoff=cutoff_T,
        logits=logits_TE,
        selection=selection_TE,
        allowed=allowed_TE,
        nan_rows=nan_rows,
    )


def select(
    selection_TE: Tensor, k: int, bias: Tensor | None, num_groups: int | None, group_top_k: int | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(T, K) indices, (T,) cutoff, and (T, E) bool of the experts in reach (None = all) of the biased selection values."""
    biased_TE = selection_TE if bias is None else selection_TE + bias
    allowed_TE = best_groups(biased_TE, num_groups, group_top_k)
    if allowed_TE is not None:
        biased_TE = biased_TE.masked_fill(~allowed_TE, float("-inf"))  # not 0: biased values may all be negative
    return *top_k(biased_TE, k), allowed_TE


def evaluated(bias: Bias, selection_TE: Tensor, mask_T: Tensor | None) -> Tensor | None:
    """The bias as an (E,) or (T, E) float32 tensor without gradient, made from the selection values if it is a function."""
    if callable(bias) and not isinstance(bias, Tensor):
        bias = bias(selection_TE, mask_T)
    if bias is None:
        return None
    if bias.shape not in (selection_TE.shape, selection_TE.shape[1:]):
        raise ValueError(f"bias has shape {tuple(bias.shape)}; give (E,) = {tuple(selection_TE.shape[1:])} or (T, E)")
    return bias.detach().float()


def combine_weights(scores_TE: Tensor, indices_TK: Tensor, mask_T: Tensor | None, normalize: bool, scale: float) -> Tensor:
    """(T, K) weights: the chosen scores, optionally normalised, then scaled; 0 on padding rows."""
    weights_TK = scores_TE.gather(1, indices_TK)
    if normalize:
        total_T1 = weights_TK.sum(dim=-1, keepdim=True)
        # A row whose scores all underflow to 0 keeps weights of 0 instead of 0/0.
        weights_TK = weights_TK / torch.where(total_T1 == 0, 1.0, total_T1)
    if scale != 1.0:
        weights_TK = weights_TK * scale
    return weights_TK if mask_T is None else weights_TK.masked_fill(~mask_T[:, None], 0.0)


def best_groups(biased_TE: Tensor, num_groups: int | None, group_top_k: int | None) -> Tensor | None:
    """(T, E) bool: the experts of each token's best groups; None without groups."""
    if num_groups is None or group_top_k is None:
        return None
    grouped_TGM = biased_TE.unflatten(1, (num_groups, -1))
    best_two = min(2, grouped_TGM.shape[-1])
    value_TG = grouped_TGM.topk(best_two, dim=-1).values.sum(dim=-1)
    groups, _ = top_k(value_TG, group_top_k)
    allowed_TG = torch.zeros_like(value_TG, dtype=torch.bool).scatter(1, groups, True)
    return allowed_TG[:, :, None].expand_as(grouped_TGM).flatten(1)


def at_least_float32(tensor: Tensor) -> Tensor:
    """Routing is computed in float32 whatever comes in; float64 stays, so that gradients can be checked."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def clean(logits_TE: Tensor, mask_T: Tensor | None, nan: NanPolicy) -> tuple[Tensor, Tensor]:
    """Zero the rows that must not speak: padding, and (nan="route") rows with NaN. Returns logits and the NaN row count."""
    # One pass finds all three: NaN and +inf anywhere in the row, and rows of nothing but -inf. (-inf alone rules one
    # expert out and is fine.)
    bad_T = ~logits_TE.detach().amax(dim=-1).isfinite()
    if mask_T is not None:
        bad_T = bad_T & mask_T
        logits_TE = logits_TE.masked_fill(~mask_T[:, None], 0.0)
    if nan == "raise":
        refuse_bad_rows(bad_T)
    else:
        logits_TE = logits_TE.masked_fill(bad_T[:, None], 0.0)
    return logits_TE, bad_T.sum()


def refuse_bad_rows(bad_T: Tensor) -> None:
    """Raise ValueError if any row is bad."""
    require(
        ~bad_T.any(),
        lambda: (
            f"{int(bad_T.sum())} of {bad_T.numel()} rows of router logits hold NaN, +inf or nothing but -inf (first: row "
            f"{int(bad_T.int().argmax())}); "
            'look for a diverged weight or input, or pass nan="route" to route such rows anyway and count them'
        ),
    )


def require(ok: Tensor, message: Callable[[], str]) -> None:
    """Raise ValueError(message()) unless the 0-dim bool `ok` holds; without waiting for a GPU or breaking a graph."""
    if torch.compiler.is_compiling() or ok.device.type != "cpu":
        torch._assert_async(ok, "evenload: NaN in router logits, or replayed expert ids that are out of range or repeated")
    elif not ok:
        raise ValueError(message())
