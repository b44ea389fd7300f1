"""What the suite asks of a router: an adapter answers, and everything but `build` and `route` is optional.

Shape suffixes: T tokens, E experts, K experts per token, L layers.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist


class NotApplicable(Exception):
    """Raised by an adapter or a check where the router does not have what is asked for; the message is the reason."""


@dataclass(frozen=True)
class Decision:
    """What a router decided for T tokens.

    Attributes:
        indices: (T, K) integer expert ids.
        weights: (T, K) combine weights, differentiable.
        logits: (T, E) what the router returns as its logits, or None where it returns none.
        counts: (E,) real tokens per expert as the router counts them, or None where it does not.
    """

    indices: Tensor
    weights: Tensor
    logits: Tensor | None = None
    counts: Tensor | None = None


@dataclass(frozen=True)
class StepReport:
    """What is known at the end of an optimizer step. Everything is optional.

    Attributes:
        counts: one (E,) tensor per layer, the step's assignments summed over ranks and microbatches; None = not reported.
        losses: {name: (L,) per layer, or 0-dim where the framework pools its layers}, means over microbatches.
        keys: names of the metrics that are logged.
        nan_rows: rows that held NaN; None = not counted.
    """

    counts: list[Tensor] | None = None
    losses: dict[str, Tensor] = field(default_factory=dict)
    keys: tuple[str, ...] = ()
    nan_rows: int | None = None


class Adapter:
    """Subclass it: `build` and `route` are required; override what else your router can do, leave the rest.

    Keyword arguments are passed only to adapters that say they know them (`takes_mask`, `per_document`, `has_groups`,
    `estimator`), so `build(self, num_experts, top_k)` and `route(self, router, x)` will do for a plain router.
    Inputs have width E. The suite sets the gate to the identity, so that what goes in are the logits.

    Attributes:
        name: how tables call it.
        takes_mask: whether `route` heeds `mask`.
        updates: whether `step` changes state that later routing depends on.
        sums_over_ranks: whether `step` communicates, and heeds `group`.
        step_call: the word by which a warning names the forgotten step (row 20).
        scope: "step" where the update is defined on all tokens of the step, "microbatch" where by definition it is not.
        estimator: "quantile" (one quantile per microbatch or step), "histogram", or "" for anything else.
        per_document: whether a balancer works per document (sequence).
        has_groups: whether `build` knows group-limited routing.
        selects_by_score: False where the choice ignores the scores (forced round-robin).
        stated_in: where the values of `stated_losses` are stated.
    """

    name: str = "router"
    takes_mask: bool = False
    updates: bool = False
    sums_over_ranks: bool = True
    step_call: str = "balance_step"
    scope: str = "step"
    estimator: str = ""
    per_document: bool = False
    has_groups: bool = False
    selects_by_score: bool = True
    stated_in: str = "its documentation"

    def build(
        self,
        num_experts: int,
        top_k: int,
        *,
        num_groups: int | None = None,
        group_top_k: int | None = None,
        score: str | None = None,
    ) -> nn.Module:
        """A new router for inputs of width `num_experts`.

        Args:
            num_groups, group_top_k: group-limited routing (only where `has_groups`).
            score: "identity" asks an `estimator` to balance raw logits; raise NotApplicable where that cannot be chosen, and
                the router's own ValueError where it refuses.
        """
        raise NotImplementedError("an adapter needs build(num_experts, top_k, ...) -> nn.Module")

    def route(
        self, router: nn.Module, x: Tensor, *, mask: Tensor | None = None, document_ids: Tensor | None = None
    ) -> Decision:
        """Route x (T, E). `mask` (T,) bool, True = real token, goes to the router as it comes (row 2 sends wrong ones)."""
        raise NotImplementedError("an adapter needs route(router, x, ...) -> Decision")

    def gate(self, router: nn.Module) -> Tensor | None:
        """The gate's weight (E, E); None where the router takes logits. Default: the only 2-D parameter."""
        weights = [parameter for parameter in router.parameters() if parameter.dim() == 2]
        if len(weights) > 1:
            raise ValueError(f"{self.name} has {len(weights)} matrices; override Adapter.gate and return the (E, D) one")
        return weights[0] if weights else None

    def bias(self, router: nn.Module) -> Tensor | None:
        """The selection bias (E,), to be written in place; None where there is none."""
        return None

    def state(self, router: nn.Module) -> dict[str, Tensor]:
        """Every tensor that balancing carries from one forward to the next. Default: all buffers."""
        return dict(router.named_buffers())

    def backward(self, model: nn.Module, loss: Tensor, share: float = 1.0) -> None:
        """The backward of a microbatch whose mean loss is `loss` and which is `share` of the step, balance losses included."""
        (loss * share).backward()

    def step(self, model: nn.Module, group: dist.ProcessGroup | None = None) -> StepReport:
        """Once per optimizer step, for a router or a ModuleList of routers; `group` = the ranks with distinct tokens."""
        raise NotApplicable("nothing happens once per step, and nothing is reported")

    def stated_losses(self, logits: Tensor, top_k: int) -> dict[str, float]:
        """The value that each loss is documented to have on these raw logits, which are perfectly balanced."""
        return {}

    def reset(self, router: nn.Module) -> None:
        """Initialise everything after `to_empty`. Default: `router.reset_parameters()`."""
        reset: Any = getattr(router, "reset_parameters", None)
        if reset is None:
            raise AttributeError(f"{type(router).__name__} has no reset_parameters")
        reset()

    def gradient_of_copies(self, copies: int) -> Tensor:
        """The gate's gradient of one step that consists of `copies` equal microbatches, trained as the framework does."""
        router = prepared(self, 8, 2)
        gate = self.gate(router)
        x = torch.randn(24, 8, generator=torch.Generator().manual_seed(3)) + torch.linspace(0, 1, 8)
        x = x.requires_grad_()
        for _ in range(copies):
            decision = self.route(router, x)
            self.backward(router, (decision.weights * torch.linspace(0.5, 1, 2)).sum(dim=1).mean(), 1 / copies)
        gradient = x.grad if gate is None else gate.grad
        if gradient is None:
            raise NotApplicable("no gradient reaches the gate")
        return gradient.clone()

    def layer(self, num_experts: int, top_k: int, *, capacity_factor: float | None = None) -> nn.Module:
        """A whole MoE layer, x (T, E) -> (T, E); raise NotApplicable for capacity_factor where the layer has none."""
        raise NotApplicable("no MoE layer is offered, only a router")

    def layer_gate(self, layer: nn.Module) -> Tensor:
        """The weight (E, E) of the layer's gate."""
        raise NotApplicable("no MoE layer is offered, only a router")

    def expert_parameters(self, layer: nn.Module) -> dict[str, Tensor]:
        """Parameters of the layer's experts by name, each with the experts in dimension 0."""
        raise NotApplicable("no MoE layer is offered, only a router")


def prepared(adapter: Adapter, num_experts: int, top_k: int, **options: Any) -> nn.Module:
    """A router in training mode whose gate is the identity, so that its inputs are its logits."""
    router = adapter.build(num_experts, top_k, **options)
    set_identity(adapter.gate(router), num_experts)
    return router.train()


@torch.no_grad()
def set_identity(gate: Tensor | None, num_experts: int) -> None:
    if gate is None or gate.is_meta:
        return
    if gate.shape != (num_experts, num_experts):
        raise ValueError(
            f"the gate's weight is {tuple(gate.shape)}; build(num_experts={num_experts}) must make a router for inputs of "
            f"width {num_experts} (or override Adapter.gate)"
        )
    gate.copy_(torch.eye(num_experts))
