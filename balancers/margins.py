"""How far each expert is from taking each token: what every quantile estimator looks at.

Shape suffixes: T tokens, E experts.
"""

import torch
from torch import Tensor

from .. import kernels
from .routing import Routing


def margins(routing: Routing) -> Tensor:
    """(T, E) selection - cutoff: expert e takes token t exactly when its bias exceeds -margin. -inf where no bias would do:
    for experts that were ruled out for the token, and on padding rows."""
    return kernels.margins(routing.selection, routing.cutoff, routing.allowed, routing.mask)


def refuse_without_runner_up(balancer: str, top_k: int, reachable: int, num_experts: int) -> None:
    """Group-limited routing can leave a token exactly K candidates; then no cutoff exists, and no quantile of margins."""
    if top_k == reachable < num_experts:
        raise ValueError(
            f"{balancer}: the groups leave every token exactly top_k={top_k} experts, so no runner-up and no quantile exist; "
            "raise group_top_k, or use loss_free"
        )


def settled(bias_E: Tensor, new_bias_E: Tensor, tokens: Tensor) -> None:
    """bias <- new_bias - mean(new_bias), in place, unless the step had no tokens.

    Adding one number to every expert's bias changes no choice. An expert whose new bias is not finite (too few tokens could
    have chosen it at all) keeps its old one.
    """
    kept_E = torch.where(new_bias_E.isfinite(), new_bias_E.to(bias_E.dtype), bias_E)
    bias_E.copy_(torch.where(tokens > 0, kept_E - kept_E.mean(), bias_E))
