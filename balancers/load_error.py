"""LEI, Load-Error Injection (arXiv 2609.28053): local load errors enter the router's score gradients.

    rho_e = c_e / c_fair - 1,  xi = max_e |rho_e| / tau,  g = tanh(xi) / xi
    grad_S_te += lambda * g * rho_e          every token, every expert, chosen or not

It is the straight-through gradient of (c/2) * sum_e rho_e**2 with d[e chosen by t]/dS_te := 1, where lambda = c E / (K T):
experts with more than their share are pushed down, the others up, by at most lambda * tau.

Shape suffixes: T tokens, E experts, K top-k.
"""

from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch import distributed as dist

from .balancer import Balancer, Injection, require_nonnegative
from .collective import GroupRef
from .distribution import real_tokens
from .routing import Routing

SCALES = ("mean", "absolute")
SCOPES = ("rank", "ep")


class LoadErrorInjection(Balancer):
    """Every score's gradient gets the load error of its expert in this microbatch.

    Args:
        coeff: lambda, >= 0. With scale="mean" 0.01 to 0.1 is useful and 1 hurts; with "absolute" the paper used 1e-5.
        tau: bound of the tanh, > 0: |injection| < lambda * tau.
        scale: "mean" divides lambda by the microbatch's tokens, like the gradient of a loss that is their mean, so that one
            lambda means the same at any batch size, accumulation, number of ranks and loss scale. "absolute" adds lambda as
            it is (times the gradient that reaches the loss), and so depends on the size of a microbatch.
        group: sum the counts over this process group (the expert-parallel group, whose slowest member sets the step time).
            None = this rank's microbatch alone, without communication.
        scope: how a configuration asks for it: with "ep", `evenload train` sets the group to the expert-parallel one.
    """

    name: ClassVar[str] = "lei"

    def __init__(
        self,
        coeff: float = 0.03,
        tau: float = 1.0,
        scale: Literal["mean", "absolute"] = "mean",
        group: dist.ProcessGroup | None = None,
        scope: Literal["rank", "ep"] = "rank",
    ) -> None:
        super().__init__()
        require_nonnegative("LoadErrorInjection", coeff=coeff)
        if not tau > 0:
            raise ValueError(f"LoadErrorInjection: tau={tau}; it must be > 0 (1 in the paper)")
        if scale not in SCALES:
            raise ValueError(f"LoadErrorInjection: scale={scale!r}; choose one of {', '.join(map(repr, SCALES))}")
        if scope not in SCOPES:
            raise ValueError(f"LoadErrorInjection: scope={scope!r}; choose one of {', '.join(map(repr, SCOPES))}")
        self.coeff, self.tau, self.scale, self.scope = coeff, tau, scale, scope
        self.use_group(group)

    def use_group(self, group: dist.ProcessGroup | None) -> None:
        """Sum the counts over `group` from now on; None = no communication."""
        self.group = None if group is None else GroupRef(group)

    def inject(self, routing: Routing, documents: Tensor) -> Injection:
        counts_E = routing.counts if self.group is None else self.group.all_reduce(routing.counts)
        assigned = counts_E.sum()
        error_E = counts_E.to(routing.scores.dtype) * self.num_experts / assigned.clamp(min=1) - 1
        error_E = torch.where(assigned > 0, error_E, 0.0)
        excess = error_E.abs().max() / self.tau
        bounded_E = error_E * torch.where(excess > 0, torch.tanh(excess) / excess, 1.0)

        gradient_TE = (self.coeff * bounded_E).expand_as(routing.scores)
        tokens = real_tokens(routing).clamp(min=1)
        per_token = 1 if self.scale == "absolute" else tokens
        gradient_TE = gradient_TE / per_token
        if routing.mask is not None:
            gradient_TE = gradient_TE.masked_fill(~routing.mask[:, None], 0.0)
        # The quadratic whose straight-through gradient this is (without the tanh): c/2 sum rho^2, c = lambda K T / E.
        value = self.coeff * (tokens / per_token) * self.top_k / (2 * self.num_experts) * error_E.square().sum()
        return Injection(value, scores=gradient_TE)
