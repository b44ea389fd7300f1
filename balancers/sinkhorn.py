"""Sinkhorn routing (BASE layers; S-BASE, arXiv 2202.01169): choose from a balanced transport plan instead of raw logits.

The plan is exp(Z_te + u_t + v_e) with equal row sums and equal column sums. u_t is the same for all experts of a token, so
the choice TopK(plan_t) is TopK(Z_t + v): Sinkhorn routing IS a selection bias, one computed from the microbatch at hand.
It looks at other tokens, later ones included, so it is used in training only; eval routes by the raw logits.

Shape suffixes: T tokens, E experts.
"""

from typing import ClassVar

import torch
from torch import Tensor

from .balancer import Balancer


class Sinkhorn(Balancer):
    """The selection bias is that of the microbatch's balanced transport plan.

    Args:
        iterations: rounds of row and column normalisation, >= 1.
    """

    name: ClassVar[str] = "sinkhorn"

    def __init__(self, iterations: int = 20) -> None:
        super().__init__()
        if iterations < 1:
            raise ValueError(f"Sinkhorn: iterations={iterations}; it must be at least 1")
        self.iterations = iterations

    def selection_bias(self, selection: Tensor, mask: Tensor | None) -> Tensor:
        bias_E = selection.new_zeros(self.num_experts)
        if not self.training or selection.shape[0] == 0:
            return bias_E
        padding_T1 = None if mask is None else ~mask[:, None]
        for _ in range(self.iterations):
            plan_TE = selection - torch.logsumexp(selection + bias_E, dim=1, keepdim=True)
            if padding_T1 is not None:
                plan_TE = plan_TE.masked_fill(padding_T1, float("-inf"))
            bias_E = -torch.logsumexp(plan_TE, dim=0)
            finite_E = bias_E.isfinite()  # an expert that is ruled out for every token takes no part
            bias_E = bias_E.masked_fill(~finite_E, 0.0)
            bias_E = (bias_E - bias_E.sum() / finite_E.sum().clamp(min=1)).masked_fill(~finite_E, 0.0)
        return bias_E
