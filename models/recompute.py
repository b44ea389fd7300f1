"""Activation checkpointing: what is kept for the backward, and what is computed again in it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

ACTIVATION_CHECKPOINTING = ("none", "selective", "full")
"""What can be recomputed in the backward pass: nothing, cheap operators, or whole blocks."""
SELECTIVE_AND_COMPILED = (
    'activation_checkpointing="selective" works operator by operator, which compiled blocks hide; '
    'use "none", where the compiler itself recomputes what is cheap, or "full"'
)


def recomputed(function: Callable[..., Tensor], *args: Any) -> Tensor:
    """function(*args), of which the backward finds the arguments alone, and computes the rest again."""
    return _checkpoint(function, *args)


def cheaply_recomputed(function: Callable[..., Tensor], *args: Any) -> Tensor:
    """function(*args), of which the backward finds the arguments and the results of `kept_operators`.

    For functions that read no sharded module inside: gathering its parameters would be taken for a part of the computation.
    """
    return _checkpoint(function, *args, context_fn=partial(create_selective_checkpoint_contexts, kept_operators()))


def _checkpoint(function: Callable[..., Tensor], *args: Any, **options: Any) -> Tensor:
    if not torch.is_grad_enabled():
        return function(*args)
    # Nothing in a block is random.
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False, **options)


def kept_operators() -> list[Any]:
    """What is dear to compute twice: matrix products and attention."""
    aten = torch.ops.aten
    return [
        aten.mm.default,
        aten.bmm.default,
        aten._grouped_mm.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
    ]
