"""One optimizer step: microbatches forward and backward, the balancers, the update, or the refusal of a bad step."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ..balancers import BalanceReport, balance_step, discard_step, routers
from .mixture import Batch
from .optim import clip_gradients, gradient_norm, router_gradient_norm


@dataclass
class StepResult:
    """What a step did. Losses are in nats per target token, norms are before clipping."""

    loss: float  # what was minimised: with the head's z-loss
    nll: float  # the cross-entropy alone, comparable with validation
    grad_norm: float
    router_grad_norm: float
    targets: int  # target tokens of the step
    report: BalanceReport | None  # None in a bad step

    @property
    def good(self) -> bool:
        return self.report is not None


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[Batch],
    *,
    clip: float = 0.0,
    autocast: torch.dtype | None = None,
) -> StepResult:
    """Run one optimizer step over `batches`, its microbatches.

    Each microbatch's mean loss counts by its share of the step's targets, so the step is the mean over all of them
    however they are cut. A non-finite loss or gradient makes the step bad: parameters, optimizer and
    balancers stay as they were, and what the routers gathered in it is thrown away.
    """
    loss, nll = accumulate(model, batches, autocast=autocast)
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    norm, router_norm = gradient_norm(parameters), router_gradient_norm(model)
    report = None
    if bool(loss.isfinite() & norm.isfinite()):
        report = balance_step(model)
        clip_gradients(parameters, norm, clip)
        optimizer.step()
    else:
        discard_step(model)
    optimizer.zero_grad(set_to_none=True)
    targets = sum(batch.num_targets for batch in batches)
    return StepResult(loss.item(), nll.item(), norm.item(), router_norm.item(), targets, report)


def tolerate_nan(model: nn.Module) -> None:
    """Let routers route NaN rows and count them instead of raising: a diverged microbatch then ends as one bad step,
    decided after the last microbatch and alike on every rank, and not as an exception in the middle of a forward."""
    for router in routers(model).values():
        router.options["nan"] = "route"


def accumulate(
    model: nn.Module, batches: Sequence[Batch], *, autocast: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add the gradients of the mean loss over all targets of `batches`; return that loss, and it without z-loss, 0-dim."""
    device = next(model.parameters()).device
    counts = [batch.num_targets for batch in batches]
    total, total_nll = torch.zeros((2,), device=device).unbind()
    model.train()
    for batch, count in zip(batches, counts, strict=True):
        here = batch.to(device)
        context = torch.autocast(device.type, dtype=autocast) if autocast else contextlib.nullcontext()
        with context:
            output = model(here.tokens, here.targets, document_ids=here.document_ids)
        weight = count / max(1, sum(counts))
        share = output.loss * weight
        share.backward()
        total += share.detach()
        total_nll += output.nll_sum / output.num_targets.clamp(min=1) * weight
    return total, total_nll
