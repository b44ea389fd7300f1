"""Activation checkpointing of a block: what is kept, and what is computed again in the backward."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

ACTIVATION_CHECKPOINTING = ("none", "selective", "full")
SELECTIVE_AND_COMPILED = (
    'activation_checkpointing="selective" works operator by operator, which compiled blocks hide; '
    'use "none", where the compiler itself recomputes what is cheap, or "full"'
)


def recomputed(function: Callable[..., Tensor], *args: Any, selective: bool) -> Tensor:
    """function(*args), whose activations are dropped after the forward and computed again in the backward.

    Selectively: dropped but for the results of `kept_operators`. Nothing in a block is random.
    """
    extra: dict[str, Any] = {}
    if selective:
        extra["context_fn"] = partial(create_selective_checkpoint_contexts, kept_operators())
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False, **extra)


def kept_operators() -> list[Any]:
    """What is dear to compute twice: matrix products, attention, the order of the experts, and communication."""
    aten, collectives = torch.ops.aten, torch.ops._c10d_functional
    return [
        aten.mm.default,
        aten.bmm.default,
        aten._grouped_mm.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        aten.sort.stable,
        collectives.all_to_all_single.default,
    ]
