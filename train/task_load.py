"""How evenly a task's tokens fall on the experts.

Shape suffixes: L MoE layers, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..balancers.metrics import dead_experts, lis, max_vio, sampling_floor


@dataclass
class TaskLoad:
    """What the routers did while a task was scored. Every forward counts, padding never does.

    Attributes:
        counts: (L, E) int64, tokens per layer and expert.
        top_k: K.
    """

    counts: Tensor
    top_k: int

    @property
    def tokens(self) -> int:
        """Tokens that went through the model."""
        return int(self.counts[0].sum()) // self.top_k

    def summary(self) -> dict[str, Any]:
        """MaxVio and LIS, mean over layers and worst layer; a fair random router's MaxVio; dead experts of all layers."""
        experts = self.counts.shape[1]
        return {
            "tokens": self.tokens,
            "maxvio": float(max_vio(self.counts).mean()),
            "maxvio_worst": float(max_vio(self.counts).max()),
            "maxvio_floor": sampling_floor(self.tokens, experts, self.top_k),
            "lis": float(lis(self.counts).mean()),
            "lis_worst": float(lis(self.counts).max()),
            "dead": int(dead_experts(self.counts).sum()),
            "experts": self.counts.numel(),
        }
