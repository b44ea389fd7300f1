"""Forced uniform routing: token i goes to experts i K, i K + 1, ... modulo E. For benchmarks: nobody balances better.

Expert counts differ by at most one. The weights still come from the scores, and gradients flow as ever.
"""

from typing import ClassVar

import torch
from torch import Tensor

from .balancer import Balancer


class ForcedUniform(Balancer):
    """Token i goes to experts i K, i K + 1, ..., whatever its scores are: the reference for speed."""

    name: ClassVar[str] = "uniform"

    def build(self) -> None:
        if self.reachable < self.num_experts:
            raise ValueError("ForcedUniform with groups: a group limit would overrule the round-robin; leave num_groups out")

    def selection_bias(self, selection: Tensor, mask: Tensor | None) -> Tensor:
        rows = selection.shape[0]
        real_T = torch.ones(rows, dtype=torch.bool, device=selection.device) if mask is None else mask
        number_T = (real_T.cumsum(dim=0) - 1).clamp(min=0)  # padding takes no turn
        slots_K = torch.arange(self.top_k, device=selection.device)
        turn_TK = (number_T[:, None] * self.top_k + slots_K) % self.num_experts
        return torch.full_like(selection, float("-inf")).scatter(1, turn_TK, 0.0)
