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
from .world import World


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
    world: World = World(),  # noqa: B008  (frozen)
    replicas: int = 1,
) -> StepResult:
    """Run one optimizer step over `batches`, its microbatches on this rank; every rank has as many.

    Each microbatch's mean loss counts by its share of the step's targets, so the step is the mean over all of them
    however they are cut, into microbatches or over ranks. A non-finite loss or gradient makes the step bad: parameters,
    optimizer and balancers stay as they were, and what the routers gathered in it is thrown away.

    Args:
        replicas: how many ranks hold a copy of the same part of every gradient (dp_replicate).
    """
    device = next(model.parameters()).device
    targets = int(world.sum(torch.tensor(sum(batch.num_targets for batch in batches))))
    loss, nll = accumulate(model, batches, targets, autocast=autocast, ranks=world.size)
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    norms = torch.stack([gradient_norm(parameters).to(device), router_gradient_norm(model).to(device)])
    if world.size > 1:
        # Every rank has its share of the sums, and of the squares of the gradients' norms; a replica has them once more.
        sums = world.sum(torch.cat([torch.stack([loss, nll]), norms.double().square() / replicas]).double())
        (loss, nll), norms = sums[:2], sums[2:].sqrt().to(norms.dtype)
    norm, router_norm = norms
    report = None
    if bool(loss.isfinite() & norm.isfinite()):
        report = balance_step(model)
        clip_gradients(parameters, norm, clip)
        optimizer.step()
    else:
        discard_step(model)
    optimizer.zero_grad(set_to_none=True)
    return StepResult(loss.item(), nll.item(), norm.item(), router_norm.item(), targets, report)


def tolerate_nan(model: nn.Module) -> None:
    """Let routers route NaN rows and count them instead of raising: a diverged microbatch then ends as one bad step,
    decided after the last microbatch and alike on every rank, and not as an exception in the middle of a forward."""
    for router in routers(model).values():
        router.options["nan"] = "route"


def accumulate(
    model: nn.Module, batches: Sequence[Batch], targets: int, *, autocast: torch.dtype | None = None, ranks: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add the gradients of the mean loss over all `targets` of a step, of which `batches` are this rank's share.

    Returns this rank's share of that loss, and of it without z-loss, 0-dim. Gradients are `ranks` times this rank's share:
    whoever shards the model averages them over the ranks.
    """
    device = next(model.parameters()).device
    total, total_nll = torch.zeros((2,), device=device).unbind()
    model.train()
    for batch in batches:
        here = batch.to(device)
        context = torch.autocast(device.type, dtype=autocast) if autocast else contextlib.nullcontext()
        with context:
            output = model(here.tokens, here.targets, document_ids=here.document_ids)
        weight = batch.num_targets / max(1, targets)
        share = output.loss * weight
        (share if ranks == 1 else share * ranks).backward()
        total += share.detach()
        total_nll += output.nll_sum / output.num_targets.clamp(min=1) * weight
    return total, total_nll
