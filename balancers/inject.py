"""Gradient injection is an identity: the one autograd Function through which every balancing gradient enters.

How the strength stays the same under gradient accumulation, any number of ranks, and loss scaling: an injected gradient
is that of a mean over the tokens of its microbatch, times the gradient that reached the microbatch's loss. If the loss is
multiplied by 2**16 (loss scaling), by 1/n (accumulation), or by its share of the step's tokens (uneven microbatches or
ranks), so is every injected gradient, and ranks average both alike. `anchor_loss` (anchor.py) carries that number.
"""

from typing import Any

import torch
from torch import Tensor


class InjectGradient(torch.autograd.Function):
    """scores -> scores; the backward adds `loss_grad * scores_grad` to the scores' gradient and `loss_grad * logits_grad` to
    the logits'.

    Shapes: scores, logits and both gradients (T, E), float32 (or float64); `loss_grad` 0-dim. Either gradient may be None.
    """

    @staticmethod
    def forward(
        ctx: Any, scores: Tensor, logits: Tensor, scores_grad: Tensor | None, logits_grad: Tensor | None, loss_grad: Tensor
    ) -> Tensor:
        ctx.save_for_backward(scores_grad, logits_grad)  # so that activation checkpointing can drop them
        # Read in the backward, where anchor_loss has just filled it; saving it as a tensor for backward would make
        # that in-place update an error.
        ctx.loss_grad = loss_grad
        return scores.view_as(scores)

    @staticmethod
    def backward(ctx: Any, grad_scores: Tensor) -> tuple[Tensor | None, ...]:
        scores_grad, logits_grad = ctx.saved_tensors
        strength = ctx.loss_grad.to(grad_scores.dtype)
        if scores_grad is not None:
            grad_scores = grad_scores + strength * scores_grad
        grad_logits = None if logits_grad is None else strength * logits_grad
        return grad_scores, grad_logits, None, None, None
