"""Adapter of the conformance suite for this library's routers inside its MoE layer (rows 13 and 14 look at the layer)."""

from typing import cast

from torch import Tensor, nn

from ..balancers.conformance import RouterAdapter
from .experts import Experts
from .moe import MoELayer


class LayerAdapter(RouterAdapter):
    """As `RouterAdapter`, and offers an `MoELayer` around the router."""

    def layer(self, num_experts: int, top_k: int, *, capacity_factor: float | None = None) -> nn.Module:
        experts = Experts(num_experts, num_experts, 2 * num_experts, init_std=0.5)
        return MoELayer(self.build(num_experts, top_k), experts, capacity_factor=capacity_factor)

    def layer_gate(self, layer: nn.Module) -> Tensor:
        return cast(Tensor, cast(MoELayer, layer).router.weight)

    def expert_parameters(self, layer: nn.Module) -> dict[str, Tensor]:
        return dict(cast(MoELayer, layer).experts.named_parameters())
