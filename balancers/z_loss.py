"""Router z-loss (ST-MoE, arXiv 2202.08906): coeff * mean_t logsumexp_e(Z_t)**2 keeps logits small; it balances nothing."""

from typing import ClassVar

import torch
from torch import Tensor

from .balancer import Balancer, Injection, require_nonnegative
from .distribution import real_mean, real_tokens
from .routing import Routing


class ZLoss(Balancer):
    """The z-loss, `coeff * mean_t logsumexp_e(Z_t)**2`, injected as a gradient.

    Args:
        coeff: weight of the loss, >= 0 (1e-3 in the paper).
    """

    name: ClassVar[str] = "z_loss"

    def __init__(self, coeff: float = 1e-3) -> None:
        super().__init__()
        require_nonnegative("ZLoss", coeff=coeff)
        self.coeff = coeff

    def inject(self, routing: Routing, documents: Tensor) -> Injection:
        log_sum_T = torch.logsumexp(routing.logits, dim=-1)
        if routing.mask is not None:
            log_sum_T = log_sum_T.masked_fill(~routing.mask, 0.0)
        slope_T = 2 * self.coeff * log_sum_T / real_tokens(routing).clamp(min=1)
        value = self.coeff * real_mean(log_sum_T.square(), routing)
        return Injection(value, logits=slope_T[:, None] * torch.softmax(routing.logits, dim=-1))
