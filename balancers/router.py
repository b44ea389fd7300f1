"""The router: a float32 gate, a list of balancers, and a ledger of the step.

Shape suffixes: T tokens (all leading dimensions flattened), D model width, E experts, K experts per token.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..kernels import at_least_float32, combine_weights
from .balancer import Balancer, BalancerList, StatefulModule
from .documents import document_numbers
from .inject import InjectGradient
from .ledger import StepLedger
from .never_balanced import NeverBalanced
from .recompute import first_sight
from .registry import make_balancers
from .routing import (
    NanPolicy,
    Routing,
    Score,
    Space,
    check_options,
    flatten_mask,
    reachable_experts,
    route,
)


class Router(StatefulModule):
    """Chooses K of E experts for every token and keeps their load even.

    Args:
        d_model: width of the input, or None for a router without a gate, whose forward takes logits.
        num_experts: E.
        top_k: K, 1 <= K <= E.
        balancers: "eqb+lei", a list of names, {name: ..., option: ...} dicts, Balancer classes or instances, or nothing.
        score, normalize, scale, num_groups, group_top_k, nan: as in `route`.
        init_std: standard deviation of the gate's initial weights.
        measure_residual: keep the step's selection values (4 T E bytes) and report the same-batch residual: MaxVio of the
            step's own tokens under the bias that the step produced. Costs one more collective.

    The gate computes in float32 whatever the input's dtype, also under autocast. Balancer state keeps its dtype through
    `.to(bfloat16)`. In eval mode nothing is observed and no buffer changes.
    """

    balancers: BalancerList
    loss_grad: Tensor

    def __init__(
        self,
        d_model: int | None,
        num_experts: int,
        top_k: int,
        *,
        balancers: Any = (),
        score: Score = "sigmoid",
        normalize: bool = False,
        scale: float = 1.0,
        num_groups: int | None = None,
        group_top_k: int | None = None,
        nan: NanPolicy = "raise",
        init_std: float = 0.02,
        measure_residual: bool = False,
    ) -> None:
        super().__init__()
        self.num_experts, self.top_k, self.score = num_experts, top_k, score
        self.init_std, self.measure_residual = init_std, measure_residual
        self.weight = None if d_model is None else nn.Parameter(torch.empty(num_experts, d_model))
        built = make_balancers(balancers)
        self.space: Space = _space_of(built)
        self.options: dict[str, Any] = {
            "score": score,
            "normalize": normalize,
            "scale": scale,
            "num_groups": num_groups,
            "group_top_k": group_top_k,
            "nan": nan,
            "space": self.space,
        }
        check_options(num_experts, top_k, score, num_groups, group_top_k, nan, self.space)
        for balancer in built:
            balancer.bind(num_experts, top_k, score, reachable_experts(num_experts, num_groups, group_top_k))
        self.balancers = BalancerList(built)
        self.with_loss = [balancer for balancer in built if balancer.injects]

        self.add_statistic("loss_grad", fill=1, dtype=torch.float32)  # set by anchor_loss, see inject.py
        self.ledger = StepLedger(
            num_experts,
            top_k,
            self.options,
            biased=self.biasing is not None,
            loss_names=[balancer.name for balancer in self.with_loss],
            measure_residual=measure_residual,
        )
        self.never_balanced = NeverBalanced()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the gate and every buffer, those of the balancers too (also after `to_empty`)."""
        super().reset_parameters()
        with torch.no_grad():
            if self.weight is not None:
                self.weight.normal_(std=self.init_std)
            for module in (self.ledger, *self.balancers):
                module.reset_parameters()

    def forward(
        self, x: Tensor, *, mask: Tensor | None = None, replay: Tensor | None = None, document_ids: Tensor | None = None
    ) -> Routing:
        """Route `x` (..., D), or (..., E) logits where there is no gate.

        Args:
            mask: (...) bool, True = real token.
            replay: (..., K) expert ids to use instead of the top-k.
            document_ids: (...) integers; a document is a run of equal ids in a row. Default: each row is one document.

        Returns:
            Routing over T = all leading dimensions flattened.
        """
        if self.weight is not None and x.shape[-1] != self.weight.shape[1]:
            raise ValueError(f"input has width {x.shape[-1]}; this router was built with d_model={self.weight.shape[1]}")
        flatten_mask(mask, x.shape[:-1])  # refuses a wrong shape or dtype before the mask is used
        documents = document_numbers(document_ids, mask, x)
        logits = self._gate(x, mask)
        if logits.shape[-1] != self.num_experts:
            raise ValueError(f"logits have {logits.shape[-1]} columns; this router has num_experts={self.num_experts}")

        biasing = self.biasing
        bias = None if biasing is None else biasing.selection_bias
        routing = route(logits, self.top_k, bias=bias, mask=mask, replay=replay, **self.options)
        return self._train_step(routing, documents) if self.training else routing

    @property
    def counts(self) -> Tensor:
        """(E,) int64, assignments of the step so far on this rank."""
        return self.ledger.counts

    @property
    def biasing(self) -> Balancer | None:
        """The balancer that sets the selection bias, if there is one."""
        return next((balancer for balancer in self.balancers if balancer.sets_bias), None)

    def _gate(self, x: Tensor, mask: Tensor | None) -> Tensor:
        x = at_least_float32(x)
        if self.weight is None:
            return x
        # 0 times the NaN of a row that must not speak would still be NaN in the weight's gradient.
        if mask is not None:
            x = x.masked_fill(~mask[..., None], 0.0)
        bad = None
        if self.options["nan"] == "route":
            bad = ~x.detach().isfinite().all(dim=-1, keepdim=True)
            x = x.masked_fill(bad, 0.0)
        with torch.autocast(x.device.type, enabled=False):
            logits = F.linear(x, self.weight.to(x.dtype))
        return logits if bad is None else logits.masked_fill(bad, float("nan"))

    def _train_step(self, routing: Routing, documents: Tensor) -> Routing:
        """Observe, and inject the gradients of all balancers into the scores."""
        with torch.no_grad():
            if self.counts.device != routing.counts.device:
                for module in (self, self.ledger, *self.balancers):
                    module.statistics_to(routing.counts.device)
            seen = first_sight(routing)
            if seen is not None:
                self.never_balanced.check(self.weight, [balancer.name for balancer in self.balancers if balancer.updates])
                for observer in (self.ledger, *self.balancers):
                    observer.observe(seen)
            injections = [balancer.inject(routing, documents) for balancer in self.with_loss]
            if seen is not None and injections:
                self.ledger.add_losses(torch.stack([injection.value for injection in injections]), seen.counts)
        scores_grad = _sum(injection.scores for injection in injections)
        logits_grad = _sum(injection.logits for injection in injections)
        if scores_grad is None and logits_grad is None:
            return routing
        scores = InjectGradient.apply(routing.scores, routing.logits, scores_grad, logits_grad, self.loss_grad)
        weights = combine_weights(scores, routing.indices, routing.mask, self.options["normalize"], self.options["scale"])
        return dataclasses.replace(routing, scores=scores, weights=weights)

    def forget_step(self) -> None:
        """Start the step's statistics anew, here and in the balancers."""
        for module in (self, self.ledger, *self.balancers):
            module.reset_statistics()

    def extra_repr(self) -> str:
        width = "no gate" if self.weight is None else f"d_model={self.weight.shape[1]}"
        return f"{width}, num_experts={self.num_experts}, top_k={self.top_k}, score={self.score}"


def routers(model: nn.Module) -> dict[str, Router]:
    """Every router of a model by its qualified name, wherever it sits, in module order."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Router)}


def _space_of(balancers: Iterable[Balancer]) -> Space:
    """Where selection happens: what the balancer with the bias says, and on raw logits where there is none."""
    biased = [balancer for balancer in balancers if balancer.sets_bias]
    if len(biased) > 1:
        names = " and ".join(balancer.name for balancer in biased)
        raise ValueError(f"{names} both set the selection bias; keep one of them (gradient balancers such as lei can be added)")
    return biased[0].space if biased else "logits"


def _sum(tensors: Iterable[Tensor | None]) -> Tensor | None:
    present = [tensor for tensor in tensors if tensor is not None]
    return sum(present[1:], present[0]) if present else None
