"""Tokens are counted once, also when activation checkpointing computes them again.

A forward that runs while autograd runs is a recomputation. Eager code can ask and skip; compiled code was traced before it
could know, so there the question is an operator, answered when the graph runs, and the answer masks every token out.
"""

import dataclasses

import torch
from torch import Tensor

from .routing import Routing


def first_sight(routing: Routing) -> Routing | None:
    """What a router should observe of `routing`: all of it, or nothing (None, or no real token) in a recomputation."""
    if not torch.compiler.is_compiling():
        return routing if _autograd_is_idle() else None
    idle = torch.ops.evenload.autograd_is_idle(routing.scores)
    real_T = idle.expand(routing.indices.shape[0]) if routing.mask is None else routing.mask & idle
    return dataclasses.replace(routing, mask=real_T, counts=routing.counts * idle, nan_rows=routing.nan_rows * idle)


def _autograd_is_idle() -> bool:
    return torch._C._current_graph_task_id() == -1


@torch.library.custom_op("evenload::autograd_is_idle", mutates_args=())
def _autograd_is_idle_op(like: Tensor) -> Tensor:
    return torch.full((), _autograd_is_idle(), device=like.device)


@_autograd_is_idle_op.register_fake
def _(like: Tensor) -> Tensor:
    return torch.empty((), dtype=torch.bool, device=like.device)
