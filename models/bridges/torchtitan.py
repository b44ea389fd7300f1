"""Our balancers behind torchtitan's `TokenChoiceTopKRouter` (torchtitan 0.3).

    model = torchtitan.balance(model, "eqb+lei")      # before it is parallelised; MoE.Config.load_balance_coeff=None
    attach(model, optimizer, group)                   # or balance_step(model, group) before each optimizer step
    loss = anchor_loss(loss, model, share=local_valid_tokens / global_valid_tokens)     # torchtitan's loss is such a sum

Not for tensor parallelism, where the router works on DTensors.
"""

from typing import Any

from torch import Tensor, nn

from ..behind import ROUTER, Batch, GateRouter

SERVED = "TokenChoiceTopKRouter"


def balance(model: nn.Module, balancers: Any = "eqb+lei", **options: Any) -> nn.Module:
    """Put balancers behind the routers of a torchtitan model, in place. Returns the model.

    Args:
        balancers, options: as in `evenload.Router`; scores, normalisation, scale and groups are the model's own.

    Raises:
        ValueError: no such router, one that is balanced already, or torchtitan's own bias is on.
    """
    for name, module in model.named_modules():
        if getattr(module, "expert_bias_E", None) is not None:
            raise ValueError(f"{name} has a bias of its own; build the model with MoE.Config.load_balance_coeff=None")
    served = [module for module in model.modules() if any(base.__name__ == SERVED for base in type(module).__mro__)]
    if not served:
        raise ValueError(f"no {SERVED} in this {type(model).__name__}")
    if any(hasattr(module, ROUTER) for module in served):
        raise ValueError(f"this {type(model).__name__} is balanced already")
    for module in served:
        module.add_module(ROUTER, _router(module, balancers, options))
        module.register_forward_hook(_route)
        module.get_submodule("gate").register_forward_hook(_Keep(module.get_submodule(ROUTER)))
    return model


def _router(titan: Any, balancers: Any, options: dict[str, Any]) -> GateRouter:
    router = GateRouter(
        None,
        titan.num_experts,
        titan.top_k,
        balancers=balancers,
        score=titan.score_func,
        normalize=titan.route_norm,
        scale=titan.route_scale,
        num_groups=titan.num_expert_groups,
        group_top_k=titan.num_limited_groups,
        **options,
    )
    return router.to(titan.gate.weight.device).train(titan.training)


class _Keep:
    """A forward hook of the gate that leaves its logits (B, S, E) with the router, which is not told them otherwise."""

    def __init__(self, router: Any) -> None:
        self.router = router

    def __call__(self, gate: nn.Module, args: Any, logits_BSE: Tensor) -> None:
        self.router.logits = logits_BSE


def _route(titan: Any, args: Any, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor] | None:
    weights_BSK, indices_BSK, scores_BSE = output
    router = titan.get_submodule(ROUTER)
    logits_BSE, router.logits = router.logits, None
    router.batch = Batch(logits_BSE.shape[:2])
    routing = router.choose(logits_BSE.flatten(0, 1), indices_BSK.flatten(0, 1))
    if routing is None:
        return None
    shape = weights_BSK.shape
    return routing.weights.view(shape).to(weights_BSK.dtype), routing.indices.view(shape), scores_BSE
