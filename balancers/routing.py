"""A routing decision is a value, and `route` makes it.

Shape suffixes: T tokens, E experts, K experts per token.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels import SCORES, Bias, NanPolicy, Score, Space, require, route_rows

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
    bias: Bias = None,
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
    logits_TE = logits.reshape(-1, num_experts)
    mask_T = flatten_mask(mask, logits.shape[:-1])
    replay_TK = None
    if replay is not None:
        replay_TK = _checked_replay(replay, logits.shape[:-1], top_k, num_experts, mask_T)
    rows = route_rows(
        logits_TE,
        top_k,
        bias=bias,
        mask_T=mask_T,
        replay_TK=replay_TK,
        score=score,
        space=space,
        normalize=normalize,
        scale=scale,
        num_groups=num_groups,
        group_top_k=group_top_k,
        nan=nan,
    )
    return Routing(**rows._asdict(), mask=mask_T)


def flatten_mask(mask: Tensor | None, leading: torch.Size) -> Tensor | None:
    """(T,) bool from a mask with the input's leading shape; refuses any other shape or dtype."""
    if mask is None:
        return None
    if mask.dtype != torch.bool:
        raise ValueError(f"mask has dtype {mask.dtype}; give a bool tensor, True = real token (mask.bool() if 1 = real)")
    if mask.shape != leading:
        raise ValueError(f"mask has shape {tuple(mask.shape)}; the input's leading shape is {tuple(leading)}")
    return mask.reshape(-1)


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
