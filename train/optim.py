"""AdamW with decay groups, learning-rate schedules as functions of the step, and gradient norms."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..balancers import routers
from .config import OptimConfig, ScheduleConfig


def learning_rate(step: int, steps: int, peak: float, schedule: ScheduleConfig) -> float:
    """Learning rate of the update number `step`, counted from 0, in a run of `steps`.

    It rises linearly over `schedule.warmup` steps to `peak` and ends at `peak * schedule.min_ratio` in the last one:
    along a cosine, or (wsd) flat and then linear over the last share `schedule.decay` of the steps.
    """
    warmup = min(schedule.warmup, steps - 1)
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    first = max(warmup, steps - round(steps * schedule.decay)) if schedule.kind == "wsd" else warmup
    progress = min(1.0, max(0, step - first) / max(1, steps - 1 - first))
    shape = {
        "cosine": 0.5 * (1 + math.cos(math.pi * progress)),
        "wsd": 1 - progress,
        "constant": 1.0,
    }[schedule.kind]
    return peak * (schedule.min_ratio + (1 - schedule.min_ratio) * shape)


def decay_groups(model: nn.Module, weight_decay: float, decay_embeddings: bool = False) -> list[dict[str, Any]]:
    """Parameter groups: weight decay on matrices; none on norms, biases and router gates, on embeddings by choice.

    Embeddings are known by their name (a part that contains "embed"); a head tied to one is the embedding.
    """
    gates = {id(parameter) for router in routers(model).values() for parameter in router.parameters()}
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        is_matrix = parameter.ndim >= 2 and not name.endswith("bias")
        spared = id(parameter) in gates or ("embed" in name.lower() and not decay_embeddings)
        (decayed if is_matrix and not spared else plain).append(parameter)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def make_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """AdamW over `decay_groups`; fused, which is one pass over the memory on GPU and CPU alike."""
    groups = decay_groups(model, config.weight_decay, config.decay_embeddings)
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Euclidean norm of all gradients together, 0-dim; 0 where there are none. Of sharded ones, this rank's part alone."""
    gradients = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    return torch.nn.utils.get_total_norm(gradients) if gradients else torch.zeros(())


def router_gradient_norm(model: nn.Module) -> Tensor:
    """Norm of the gates' gradients: injected losses show up here first when they are too strong."""
    return gradient_norm(parameter for router in routers(model).values() for parameter in router.parameters())


def clip_gradients(parameters: Iterable[nn.Parameter], norm: Tensor, limit: float) -> None:
    """Scale all gradients so that their `norm` is at most `limit`; a limit of 0 leaves them alone."""
    gradients = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if limit > 0 and gradients:
        # As torch's clip_grads_with_norm_, which cannot mix parameters of several meshes.
        torch._foreach_mul_(gradients, (limit / (norm + 1e-6)).clamp(max=1.0).to(gradients[0].device))


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor; any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
