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
    idle = autograd_is_idle(routing.scores)
    if isinstance(idle, bool):
        return routing if idle else None
    real_T = idle.expand(routing.indices.shape[0]) if routing.mask is None else routing.mask & idle
    return dataclasses.replace(routing, mask=real_T, counts=routing.counts * idle, nan_rows=routing.nan_rows * idle)


def autograd_is_idle(like: Tensor) -> bool | Tensor:
    """Whether this forward is the first for its tokens; in compiled code a 0-dim bool tensor on the device of `like`."""
    if torch.compiler.is_compiling():
        return torch.ops.evenload.autograd_is_idle(like)
    return _idle_now()


def _idle_now() -> bool:
    return torch._C._current_graph_task_id() == -1


@torch.library.custom_op("evenload::autograd_is_idle", mutates_args=())
def _autograd_is_idle_op(like: Tensor) -> Tensor:
    return torch.full((), _idle_now(), device=like.device)


@_autograd_is_idle_op.register_fake
def _(like: Tensor) -> Tensor:
    return torch.empty((), dtype=torch.bool, device=like.device)
