"""Once per optimizer step: all balancers of a model, together."""

from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.optim import Optimizer

from .collective import Collective, run_lockstep
from .report import BalanceReport
from .router import routers


@torch.no_grad()
def balance_step(
    model: nn.Module, group: dist.ProcessGroup | None = None, *, collective: Collective = "all_reduce"
) -> BalanceReport:
    """Update every balancer of `model` from all tokens of the optimizer step, and report the step's balance.

    Call it once per optimizer step, after the step's last backward (activation checkpointing routes again in there, and must
    find the same bias), on every rank alike. All layers share one collective per
    round: two for EQB, one for the others, none on a single rank. A rank without tokens takes part; a step without any token
    changes no bias.

    Args:
        group: the ranks that hold DISTINCT tokens of the step (data parallel x context parallel; not tensor parallel, whose
            ranks see the same tokens). None = all ranks.
        collective: how sums travel, "all_reduce" or "all_gather". The result is the same to the bit: integers are exact
            either way, and floating-point sums are added in rank order either way. See docs/decisions/0002-collective.md.

    Raises:
        ValueError: if the model has no Router.
    """
    found = routers(model)
    if not found:
        raise ValueError(
            f"balance_step found no Router in this {type(model).__name__}; build the model with evenload.Router, "
            "or pass the module that holds it"
        )
    layers = list(found.values())
    updates = [update for layer in layers for b in layer.balancers if (update := b.update()) is not None]
    sums = run_lockstep([*(layer.ledger.sums() for layer in layers), *updates], group, collective)[: len(layers)]

    measured = {layer: layer.biasing for layer in layers if layer.measure_residual and layer.biasing is not None}
    again = [layer.ledger.residual_counts(biasing) for layer, biasing in measured.items()]
    counts = dict(zip(measured, run_lockstep(again, group, collective), strict=True))
    report = BalanceReport(
        names=tuple(found),
        sums=tuple(sums),
        extras=tuple({k: v.clone() for b in layer.balancers for k, v in b.report().items()} for layer in layers),
        residual_counts=tuple(counts.get(layer) for layer in layers),
    )
    for layer in layers:
        layer.never_balanced.silent = True
        layer.forget_step()
    return report


@torch.no_grad()
def discard_step(model: nn.Module) -> None:
    """Forget what the routers of `model` have observed since the last `balance_step`: for a step that is thrown away.

    After a skipped update (GradScaler found infinities) or an exception in the middle of a step. Biases and averages stay.
    """
    for layer in routers(model).values():
        layer.forget_step()


class Attachment:
    """What `attach` returns: `report` is the latest BalanceReport (None before the first step); `remove()` undoes it."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, group: dist.ProcessGroup | None, collective: Collective) -> None:
        self.report: BalanceReport | None = None
        self._arguments = (model, group, collective)
        self._hook = optimizer.register_step_pre_hook(self._before_step)

    def remove(self) -> None:
        self._hook.remove()

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        model, group, collective = self._arguments
        self.report = balance_step(model, group, collective=collective)


def attach(
    model: nn.Module, optimizer: Optimizer, group: dist.ProcessGroup | None = None, *, collective: Collective = "all_reduce"
) -> Attachment:
    """Call `balance_step(model, group)` before every `optimizer.step()`, for training loops that are not yours to change.

    A step that never reaches the optimizer (GradScaler skips it) is not balanced either: its tokens count in the next one,
    unless you call `discard_step(model)`.

    Raises:
        ValueError: if the model has no Router.
    """
    if not routers(model):
        raise ValueError(f"attach found no Router in this {type(model).__name__}; pass the module that holds it")
    return Attachment(model, optimizer, group, collective)
