"""Our balancers in Megatron-core's `TopKRouter` (megatron-core 0.19).

    model = megatron.balance(model, "eqb+lei")        # moe_router_load_balancing_type="none", no expert bias
    attach(model, optimizer, group)                   # or balance_step(model, group) before each optimizer step

`group` are the ranks whose routers see different tokens: data x context parallel, and tensor parallel with sequence
parallelism. Injected gradients follow Megatron's own scale of auxiliary losses (`MoEAuxLossAutoScaler`), so no other line is
needed. Megatron's routers call padding True.

Shape suffixes: S sequence, B batch, E experts, K top-k. Megatron's tokens run along the sequence first.
"""

import sys
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..behind import ROUTER, GateRouter

SERVED = "TopKRouter"


def balance(model: nn.Module, balancers: Any = "eqb+lei", **options: Any) -> nn.Module:
    """Put balancers behind the routers of a Megatron-core model, in place. Returns the model.

    Args:
        balancers, options: as in `evenload.Router`; scores, normalisation, scale and groups are the model's own.

    Raises:
        ValueError: no such router, one that is balanced already, or an option of Megatron's that does not go with it.
    """
    served: list[Any] = [module for module in model.modules() if any(base.__name__ == SERVED for base in type(module).__mro__)]
    if not served:
        raise ValueError(f"no {SERVED} in this {type(model).__name__}")
    if any(hasattr(module, ROUTER) for module in served):
        raise ValueError(f"this {type(model).__name__} is balanced already")
    routers = [_router(module, balancers, options) for module in served]
    for module, router in zip(served, routers, strict=True):
        module.add_module(ROUTER, router)
        module.routing = partial(_routing, module)
    return model


def _router(mega: Any, balancers: Any, options: dict[str, Any]) -> GateRouter:
    config = mega.config
    for option, right in (
        ("moe_router_load_balancing_type", "none"),
        ("moe_router_enable_expert_bias", False),
        ("moe_expert_capacity_factor", None),
        ("moe_enable_routing_replay", False),
    ):
        if getattr(config, option, right) != right:
            raise ValueError(f"{option}={getattr(config, option)!r}: a router that we balance needs {right!r}")
    if mega.score_function not in ("sigmoid", "softmax"):
        raise ValueError(f"moe_router_score_function={mega.score_function!r}; sigmoid and softmax can be balanced")
    # Megatron divides sigmoid scores by their sum where there is more than one, and takes the softmax of the chosen logits,
    # which is the softmax over all of them divided by its chosen part, unless it comes before the choice.
    normalize = mega.topk > 1 if mega.score_function == "sigmoid" else not config.moe_router_pre_softmax
    grouped = bool(config.moe_router_group_topk)
    if grouped and (best := mega.topk // config.moe_router_group_topk) != 2:
        raise ValueError(
            f"moe_router_topk={mega.topk} with moe_router_group_topk={config.moe_router_group_topk}: Megatron ranks groups by "
            f"the sum of their best {best} scores, we by their best 2, as DeepSeek-V3 does; choose options whose quotient is 2"
        )
    router = GateRouter(
        None,
        config.num_moe_experts,
        mega.topk,
        balancers=balancers,
        score=mega.score_function,
        normalize=normalize,
        scale=config.moe_router_topk_scaling_factor or 1.0,
        num_groups=config.moe_router_num_groups if grouped else None,
        group_top_k=config.moe_router_group_topk if grouped else None,
        **options,
    )
    return router.to(mega.weight.device).train(mega.training)


def _routing(mega: Any, logits_SBE: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """In place of `TopKRouter.routing`: (S * B, E) probabilities and bool map, both 0 where an expert is not chosen."""
    shape = logits_SBE.shape
    flat_mask = None if padding_mask is None else padding_mask.reshape(-1)
    logits_SBE = mega.apply_z_loss(logits_SBE.reshape(-1, shape[-1]), padding_mask=flat_mask).view(shape)
    mask_BS = None if padding_mask is None else ~padding_mask.reshape(shape[:2]).transpose(0, 1)
    router = mega.get_submodule(ROUTER)
    routing = router(logits_SBE.transpose(0, 1), mask=mask_BS)
    if routing.weights.requires_grad:
        routing.weights.register_hook(partial(_follow_loss_scale, router))

    weights_TK = routing.weights.to(logits_SBE.dtype)
    probs_TE = logits_SBE.new_zeros(weights_TK.shape[0], shape[-1]).scatter(1, routing.indices, weights_TK)
    map_TE = torch.zeros_like(probs_TE, dtype=torch.bool).scatter(1, routing.indices, True)
    return _sequence_first(probs_TE, shape), _sequence_first(map_TE, shape)


def _sequence_first(rows_TE: Tensor, shape: torch.Size) -> Tensor:
    """(B * S, E) -> (S * B, E)."""
    return rows_TE.view(shape[1], shape[0], -1).transpose(0, 1).reshape(-1, shape[2])


def _follow_loss_scale(router: Any, grad: Tensor) -> None:
    """Runs in the backward before the injection: what Megatron multiplies its auxiliary losses with is the loss's scale."""
    module = sys.modules.get("megatron.core.transformer.moe.moe_utils")
    scale = None if module is None else module.MoEAuxLossAutoScaler.main_loss_backward_scale
    if scale is not None:
        router.loss_grad.copy_(scale)
