"""A routing decision is a value, and `route` makes it.

Shape suffixes: T tokens, E experts, K experts per token.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..kernels import expert_counts
from ..kernels import top_k as stable_top_k

Score = Literal["sigmoid", "softmax", "identity"]
Space = Literal["logits", "scores"]
NanPolicy = Literal["raise", "route"]

SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "softmax": lambda logits: torch.softmax(logits, dim=-1),
    "identity": lambda logits: logits.view_as(logits),  # a tensor of its own: dynamo refuses one tensor in two roles
}
SPACES = ("logits", "scores")
NAN_POLICIES = ("raise", "route")


@dataclass(frozen=True)
class Routing:
    """Which experts each token goes to, and with what weight.

    Attributes:
        indices: (T, K) int64, K distinct experts per token by descending selection value; in range on padding rows too.
        weights: (T, K) float32 combine weights, differentiable in the logits; exactly 0 on padding rows.
        scores: (T, E) float32, score(logits).
        counts: (E,) int64, real tokens per expert.
        cutoff: (T,) float32, the (K+1)-th largest selection value with its bias; -inf where every candidate is chosen.
        logits: (T, E) float32 raw router logits; 0 on padding rows and on NaN rows that were routed all the same.
        selection: (T, E) float32 without gradient: what the bias is added to, the logits or the scores.
        allowed: (T, E) bool, the experts of the groups that group-limited routing kept; None = all of them.
        mask: (T,) bool, True = real token; None = all are.
        nan_rows: 0-dim int64, real rows that held NaN (always 0 with nan="raise").
    """

    indices: Tensor
    weights: Tensor
    scores: Tensor
    counts: Tensor
    cutoff: Tensor
    logits: Tensor
    selection: Tensor
    allowed: Tensor | None
    mask: Tensor | None
    nan_rows: Tensor


def route(
    logits: Tensor,
    top_k: int,
    *,
    bias: Tensor | Callable[[Tensor, Tensor | None], Tensor] | None = None,
    score: Score = "sigmoid",
    normalize: bool = False,
    scale: float = 1.0,
    mask: Tensor | None = None,
    replay: Tensor | None = None,
    num_groups: int | None = None,
    group_top_k: int | None = None,
    nan: NanPolicy = "raise",
    space: Space = "logits",
) -> Routing:
    """Choose `top_k` experts per token: I_t = TopK(selection_t + bias), weights from the scores WITHOUT the bias.

    Args:
        logits: (..., E) router logits of any floating dtype; leading dimensions are flattened to T.
        top_k: K, experts per token, 1 <= K <= E.
        bias: (E,) or (T, E), ADDED to the selection values; it never touches the weights. Or a function that makes it
            from the selection values (T, E) and the flat mask.
        score: how logits become scores, in float32.
        normalize: divide a token's K weights by their sum.
        scale: multiply the weights at the end.
        mask: (...) bool, True = real token. Padding rows are not counted and get weight 0.
        replay: (..., K) integer indices to use instead of the top-k (routing replay); weights stay differentiable.
        num_groups, group_top_k: group-limited routing (DeepSeek-V3, arXiv 2412.19437): experts in `num_groups` equal
            groups, a group's value is the sum of its two largest biased selection values, experts outside the best
            `group_top_k` groups are ruled out.
        nan: "raise" refuses NaN in a real row; "route" routes such a row as if its logits were 0, without gradient,
            and counts it in `nan_rows`.
        space: what the bias is added to, "logits" (EQB) or "scores" (DeepSeek, Kimi K3). Without a bias the choice
            is the same, but for scores that saturate.

    Raises:
        ValueError: naming the offending value and what would be right. On a GPU and under torch.compile, value errors
            (NaN, replay out of range) surface as a device assertion instead, since raising would wait for the device.
    """
    num_experts = logits.shape[-1]
    check_options(num_experts, top_k, score, num_groups, group_top_k, nan, space)
    logits_TE = at_least_float32(logits.reshape(-1, num_experts))
    mask_T = flatten_mask(mask, logits.shape[:-1])
    logits_TE, nan_rows = _clean(logits_TE, mask_T, nan)

    scores_TE = SCORES[score](logits_TE)
    selection_TE = (logits_TE if space == "logits" else scores_TE).detach()
    if callable(bias):
        bias = bias(selection_TE, mask_T)
    biased_TE = selection_TE if bias is None else selection_TE + _checked_bias(bias, selection_TE)
    allowed_TE = best_groups(biased_TE, num_groups, group_top_k)
    if allowed_TE is not None:
        biased_TE = biased_TE.masked_fill(~allowed_TE, float("-inf"))  # not 0: biased values may all be negative

    indices_TK, cutoff_T = stable_top_k(biased_TE, top_k)
    if replay is not None:
        indices_TK = _checked_replay(replay, logits.shape[:-1], top_k, num_experts, mask_T)
    return Routing(
        indices=indices_TK,
        weights=combine_weights(scores_TE, indices_TK, mask_T, normalize, scale),
        scores=scores_TE,
        counts=expert_counts(indices_TK, num_experts, mask_T),
        cutoff=cutoff_T,
        logits=logits_TE,
        selection=selection_TE,
        allowed=allowed_TE,
        mask=mask_T,
        nan_rows=nan_rows,
    )


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


def at_least_float32(tensor: Tensor) -> Tensor:
    """Routing is computed in float32 whatever comes in; float64 stays, so that gradients can be checked."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def flatten_mask(mask: Tensor | None, leading: torch.Size) -> Tensor | None:
    """(T,) bool from a mask with the input's leading shape; refuses any other shape or dtype."""
    if mask is None:
        return None
    if mask.dtype != torch.bool:
        raise ValueError(f"mask has dtype {mask.dtype}; give a bool tensor, True = real token (mask.bool() if 1 = real)")
    if mask.shape != leading:
        raise ValueError(f"mask has shape {tuple(mask.shape)}; the input's leading shape is {tuple(leading)}")
    return mask.reshape(-1)


def require(ok: Tensor, message: Callable[[], str]) -> None:
    """Raise ValueError(message()) unless the 0-dim bool `ok` holds; without waiting for a GPU or breaking a graph."""
    if torch.compiler.is_compiling() or ok.device.type != "cpu":
        torch._assert_async(ok, "evenload: NaN in router logits, or replayed expert ids that are out of range or repeated")
    elif not ok:
        raise ValueError(message())


def check_options(
    num_experts: int, top_k: int, score: str, num_groups: int | None, group_top_k: int | None, nan: str, space: str
) -> None:
    """Refuse a choice of options that cannot route, naming the value and what would be right."""
    if not isinstance(top_k, int) or not 1 <= top_k <= num_experts:
        raise ValueError(
            f"top_k={top_k} with num_experts={num_experts}; top_k must be a whole number between 1 and num_experts"
        )
    for name, value, allowed in (("score", score, tuple(SCORES)), ("nan", nan, NAN_POLICIES), ("space", space, SPACES)):
        if value not in allowed:
            raise ValueError(f"{name}={value!r}; choose one of {', '.join(map(repr, allowed))}")
    if (num_groups is None) != (group_top_k is None):
        raise ValueError(f"num_groups={num_groups} and group_top_k={group_top_k}; give both or neither")
    if num_groups is None or group_top_k is None:
        return
    if num_groups < 1 or num_experts % num_groups:
        raise ValueError(f"num_groups={num_groups} does not divide num_experts={num_experts} into equal groups")
    if not 1 <= group_top_k <= num_groups:
        raise ValueError(f"group_top_k={group_top_k} with num_groups={num_groups}; it must be between 1 and num_groups")
    reachable = reachable_experts(num_experts, num_groups, group_top_k)
    if top_k > reachable:
        raise ValueError(f"top_k={top_k}, but {group_top_k} groups hold only {reachable} experts; raise group_top_k")


def reachable_experts(num_experts: int, num_groups: int | None, group_top_k: int | None) -> int:
    """How many experts a token can choose from."""
    return num_experts if num_groups is None or group_top_k is None else group_top_k * (num_experts // num_groups)


def _clean(logits_TE: Tensor, mask_T: Tensor | None, nan: NanPolicy) -> tuple[Tensor, Tensor]:
    """Zero the rows that must not speak: padding, and (nan="route") rows with NaN. Returns logits and the NaN row count."""
    # One pass finds all three: NaN and +inf anywhere in the row, and rows of nothing but -inf. (-inf alone rules one
    # expert out and is fine.)
    bad_T = ~logits_TE.detach().amax(dim=-1).isfinite()
    if mask_T is not None:
        bad_T = bad_T & mask_T
        logits_TE = logits_TE.masked_fill(~mask_T[:, None], 0.0)
    if nan == "raise":
        require(~bad_T.any(), lambda: _nan_message(bad_T))
    else:
        logits_TE = logits_TE.masked_fill(bad_T[:, None], 0.0)
    return logits_TE, bad_T.sum()


def _nan_message(bad_T: Tensor) -> str:
    return (
        f"{int(bad_T.sum())} of {bad_T.numel()} rows of router logits hold NaN, +inf or nothing but -inf (first: row "
        f"{int(bad_T.int().argmax())}); "
        'look for a diverged weight or input, or pass nan="route" to route such rows anyway and count them'
    )


def _checked_bias(bias: Tensor, selection_TE: Tensor) -> Tensor:
    if bias.shape not in (selection_TE.shape, selection_TE.shape[1:]):
        raise ValueError(f"bias has shape {tuple(bias.shape)}; give (E,) = {tuple(selection_TE.shape[1:])} or (T, E)")
    return bias.detach().float()


def best_groups(biased_TE: Tensor, num_groups: int | None, group_top_k: int | None) -> Tensor | None:
    """(T, E) bool: the experts of each token's best groups; None without groups."""
    if num_groups is None or group_top_k is None:
        return None
    grouped_TGM = biased_TE.unflatten(1, (num_groups, -1))
    best_two = min(2, grouped_TGM.shape[-1])
    value_TG = grouped_TGM.topk(best_two, dim=-1).values.sum(dim=-1)
    groups, _ = stable_top_k(value_TG, group_top_k)
    allowed_TG = torch.zeros_like(value_TG, dtype=torch.bool).scatter(1, groups, True)
    return allowed_TG[:, :, None].expand_as(grouped_TGM).flatten(1)


def _checked_replay(replay: Tensor, leading: torch.Size, top_k: int, num_experts: int, mask_T: Tensor | None) -> Tensor:
    """(T, K) int64 replayed indices; padding rows are replaced by 0..K-1, whatever they hold."""
    if replay.is_floating_point() or replay.dtype == torch.bool:
        raise ValueError(f"replay has dtype {replay.dtype}; give integer expert ids")
    if replay.shape != (*leading, top_k):
        raise ValueError(f"replay has shape {tuple(replay.shape)}; it must be {(*leading, top_k)}: one row of K ids per token")
    indices_TK = replay.reshape(-1, top_k).to(torch.int64)
    if mask_T is not None:
        first_K = torch.arange(top_k, device=indices_TK.device)
        indices_TK = torch.where(mask_T[:, None], indices_TK, first_K)
    ordered_TK = indices_TK.sort(dim=-1).values
    in_range = ((indices_TK >= 0) & (indices_TK < num_experts)).all()
    distinct = (ordered_TK[:, 1:] != ordered_TK[:, :-1]).all()
    require(
        in_range & distinct,
        lambda: (
            f"replay must hold {top_k} distinct expert ids in 0..{num_experts - 1} per real token; "
            + ("some token repeats an id" if in_range else f"found {int(indices_TK.min())}..{int(indices_TK.max())}")
        ),
    )
    return indices_TK
