"""The router's full distribution over experts, and how a gradient with respect to it goes back to the scores or logits.

Shape suffixes: T tokens, E experts.
"""

import torch
from torch import Tensor

from .balancer import Injection
from .routing import Routing


def probabilities(routing: Routing, score: str) -> Tensor:
    """(T, E) non-negative rows that sum to 1: softmax of the logits, or sigmoid scores divided by their sum."""
    if score == "sigmoid":
        return routing.scores / _positive_sum(routing.scores)
    return routing.scores if score == "softmax" else torch.softmax(routing.logits, dim=-1)


def inject_through_probabilities(value: Tensor, grad_TE: Tensor, probs_TE: Tensor, routing: Routing, score: str) -> Injection:
    """The injection of a loss whose gradient with respect to `probs_TE` is `grad_TE`; padding rows get 0."""
    if routing.mask is not None:
        grad_TE = grad_TE.masked_fill(~routing.mask[:, None], 0.0)
    if score == "softmax":
        return Injection(value, scores=grad_TE)
    centred_TE = grad_TE - (probs_TE * grad_TE).sum(dim=-1, keepdim=True)
    if score == "sigmoid":
        return Injection(value, scores=centred_TE / _positive_sum(routing.scores))
    return Injection(value, logits=probs_TE * centred_TE)


def real_tokens(routing: Routing) -> Tensor:
    """0-dim int64: tokens that are not padding."""
    if routing.mask is None:
        return torch.full((), routing.indices.shape[0], device=routing.indices.device)
    return routing.mask.sum()


def real_mean(values_TE: Tensor, routing: Routing) -> Tensor:
    """Mean over real tokens: (E,) from (T, E), or 0-dim from (T,); 0 where there are none."""
    if routing.mask is not None:
        keep = routing.mask if values_TE.dim() == 1 else routing.mask[:, None]
        values_TE = values_TE.masked_fill(~keep, 0.0)
    return values_TE.sum(dim=0) / real_tokens(routing).clamp(min=1)


def _positive_sum(scores_TE: Tensor) -> Tensor:
    return scores_TE.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(scores_TE.dtype).tiny)
