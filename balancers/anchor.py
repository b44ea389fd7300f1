"""`anchor_loss`: how injected gradients learn the strength of the loss they accompany (see inject.py)."""

from typing import Any

import torch
from torch import Tensor, nn

from .router import routers


class _AnchorLoss(torch.autograd.Function):
    """loss -> loss; the backward hands the incoming gradient, times `share`, to `loss_grads` and passes it on."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, loss_grads: list[Tensor], share: Tensor | float) -> Tensor:
        ctx.loss_grads, ctx.share = loss_grads, share
        return loss.clone()  # not a view: `loss /= n` is legal

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor, None, None]:
        with torch.no_grad():
            strength = grad_loss * ctx.share
            for loss_grad in ctx.loss_grads:
                loss_grad.copy_(strength)
        return grad_loss, None, None


def anchor_loss(loss: Tensor, model: nn.Module, share: Tensor | float = 1.0) -> Tensor:
    """Return `loss` unchanged, and let its backward tell the routers of `model` how strongly the loss counts.

    Call it on the loss of one microbatch, a MEAN over that microbatch's tokens, before dividing by the number of
    microbatches, weighting or scaling it: `scaler.scale(anchor_loss(loss, model) / n).backward()`. Without it the routers
    assume plain `loss.backward()`. One anchored loss per backward: two of them would overwrite each other's strength.

    Args:
        loss: 0-dim floating point tensor.
        share: where the loss is not the microbatch's mean but its sum over the tokens of the WHOLE step (as
            transformers' Trainer has it), the microbatch's tokens over the step's: loss = share * mean.

    Raises:
        ValueError: if the loss is not a scalar.
    """
    if loss.dim() != 0:
        raise ValueError(f"loss has shape {tuple(loss.shape)}; anchor_loss needs the scalar mean over the microbatch's tokens")
    return _AnchorLoss.apply(loss, [router.loss_grad for router in routers(model).values()], share)
