"""Adapter for this library's own routers."""

import copy
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch import distributed as dist

from ..anchor import anchor_loss
from ..balancer import Balancer, StatefulModule
from ..router import Router
from ..step import balance_step
from .adapter import Adapter, Decision, StepReport

_ESTIMATORS = {"eqb": "quantile", "qb": "quantile", "qb_histogram": "histogram"}


class RouterAdapter(Adapter):
    """`evenload.Router`, or a subclass, with these balancers: what `Router(balancers=...)` takes.

    Args:
        balancers: a specification such as "eqb+lei"; instances in it are copied for every router that is built.
        router_class: the class to build.
        options: further arguments of the class.

    Raises:
        ValueError: where no router can be built from them.
    """

    takes_mask = True
    router_class: type[Router] = Router

    def __init__(self, balancers: Any = (), *, router_class: type[Router] | None = None, **options: Any) -> None:
        self.balancers, self.options = balancers, options
        self.router_class = router_class or self.router_class
        built: list[Balancer] = list(self.build(8, 2).balancers)
        self.name = f"evenload:{balancers if isinstance(balancers, str) else '+'.join(b.name for b in built) or 'none'}"
        names = {balancer.name for balancer in built}
        self.updates = any(balancer.updates for balancer in built)
        self.scope = "microbatch" if "qb" in names else "step"
        self.estimator = next((_ESTIMATORS[name] for name in names if name in _ESTIMATORS), "")
        self.per_document = any(getattr(balancer, "scope", "") == "sequence" for balancer in built)
        self.selects_by_score = self.has_groups = "uniform" not in names

    def build(
        self,
        num_experts: int,
        top_k: int,
        *,
        num_groups: int | None = None,
        group_top_k: int | None = None,
        score: str | None = None,
    ) -> Router:
        options = self.options | {"num_groups": num_groups, "group_top_k": group_top_k}
        if score is not None:
            options["score"] = score
        return self.router_class(num_experts, num_experts, top_k, balancers=copy.deepcopy(self.balancers), **options)

    def route(
        self, router: nn.Module, x: Tensor, *, mask: Tensor | None = None, document_ids: Tensor | None = None
    ) -> Decision:
        routing = router(x, mask=mask, document_ids=document_ids)
        return Decision(routing.indices, routing.weights, routing.logits, routing.counts)

    def bias(self, router: nn.Module) -> Tensor | None:
        return getattr(cast(Router, router).biasing, "bias", None)

    def state(self, router: nn.Module) -> dict[str, Tensor]:
        tensors = dict(router.named_buffers())
        for path, module in router.named_modules():
            if isinstance(module, StatefulModule):
                tensors |= {f"{path}.{name}".lstrip("."): value for name, value in module.statistics().items()}
        return tensors

    def backward(self, model: nn.Module, loss: Tensor, share: float = 1.0) -> None:
        (anchor_loss(loss, model) * share).backward()

    def step(self, model: nn.Module, group: dist.ProcessGroup | None = None) -> StepReport:
        report = balance_step(model, group)
        return StepReport(
            counts=report.counts,
            losses=report.losses,
            keys=(*report.layers, *(f"loss {name}" for name in report.losses)),
            nan_rows=int(report.layers["nan_rows"].sum()),
        )

    def stated_losses(self, logits: Tensor, top_k: int) -> dict[str, float]:
        """gshard: its coefficient; lei, phi: 0; z_loss: its coefficient times the mean squared log-sum-exp."""
        log_sum = float(torch.logsumexp(logits.double(), dim=1).square().mean())
        balancers = {b.name: b for b in self.build(logits.shape[1], top_k).balancers}
        stated = {name: getattr(balancer, "coeff", 0.0) for name, balancer in balancers.items()}
        factors = {"gshard": 1.0, "lei": 0.0, "phi": 0.0, "z_loss": log_sum}
        return {name: stated[name] * factor for name, factor in factors.items() if name in stated}
