"""Cross-entropy of a language-model head without the logits of all tokens.

Shape suffixes: T tokens, C tokens of a chunk, V vocabulary, D model.
"""

from typing import Any

import torch
from torch import Tensor

IGNORE = -100


def chunked_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, z_loss: float = 0.0, chunk: int = 512
) -> tuple[Tensor, Tensor, Tensor]:
    """Sums of the loss over tokens, for logits = hidden @ weight.T, of which one chunk exists at a time.

    Per token: -log softmax(logits)[target] + z_loss * logsumexp(logits)^2. Tokens whose target is -100 count nothing.
    The gradients are computed beside the values while a chunk's logits exist, so nothing is recomputed in the backward;
    softmax and sums are in float32 (float64 for float64 inputs), matrix products in the inputs' dtype or autocast's.

    Args:
        hidden: (T, D) floating point.
        weight: (V, D) of the same dtype.
        targets: (T,) int64 in 0..V-1, or -100.
        z_loss: coefficient of the squared log-partition (PaLM, arXiv 2204.02311, section 5).
        chunk: C, at least 1.

    Returns:
        loss_sum: 0-dim, differentiable once.
        nll_sum: 0-dim, without z-loss and without gradient.
        num_targets: 0-dim int64.

    Raises:
        ValueError: if targets are not (T,) or chunk is below 1.
    """
    if targets.shape != hidden.shape[:1]:
        raise ValueError(f"targets have shape {tuple(targets.shape)}; give one per row of hidden, {tuple(hidden.shape[:1])}")
    if chunk < 1:
        raise ValueError(f"chunk={chunk}; it must be at least 1 token")
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    with torch.autocast(device, enabled=False):
        with_grad = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
        loss_sum, nll_sum = _ChunkedCrossEntropy.apply(hidden, weight, targets, z_loss, chunk, with_grad)
    return loss_sum, nll_sum, (targets != IGNORE).sum()


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, z_loss: float, chunk: int, with_grad: bool
    ) -> tuple[Tensor, Tensor]:
        accumulate = torch.promote_types(hidden_TD.dtype, torch.float32)
        loss_sum, nll_sum = hidden_TD.new_zeros((2,), dtype=accumulate).unbind()
        # One pair of buffers serves every chunk: fresh ones would be paged in anew each time, at more than the softmax costs.
        most = min(chunk, hidden_TD.shape[0])
        logits_buffer = hidden_TD.new_empty(most, weight_VD.shape[0])
        probs_buffer = torch.empty_like(logits_buffer, dtype=accumulate)
        if with_grad:
            grad_hidden_TD = torch.empty_like(hidden_TD)
            grad_weight_VD = torch.zeros_like(weight_VD, dtype=accumulate)
        for start in range(0, hidden_TD.shape[0], chunk):
            hidden_CD = hidden_TD[start : start + chunk]
            size = hidden_CD.shape[0]
            counted_C = targets_T[start : start + chunk] != IGNORE
            target_C1 = targets_T[start : start + chunk].masked_fill(~counted_C, 0)[:, None]
            logits_CV = torch.mm(hidden_CD, weight_VD.T, out=logits_buffer[:size]).to(accumulate)
            probs_CV = torch.softmax(logits_CV, dim=-1, out=probs_buffer[:size])
            # The largest probability is at least 1/V, so its logarithm gives logsumexp without another pass of exponentials.
            lse_C = logits_CV.amax(dim=-1) - probs_CV.amax(dim=-1).log()
            nll_C = (lse_C - logits_CV.gather(1, target_C1)[:, 0]).masked_fill(~counted_C, 0.0)
            nll_sum += nll_C.sum()
            loss_sum += (nll_C + z_loss * lse_C.square().masked_fill(~counted_C, 0.0)).sum()
            if with_grad:
                # d loss / d logits = softmax * (1 + 2 z lse) - onehot(target), and 0 for tokens that do not count.
                strength_C = torch.where(counted_C, 1 + 2 * z_loss * lse_C, 0.0)
                grad_CV = probs_CV.mul_(strength_C[:, None])
                grad_CV.scatter_add_(1, target_C1, -counted_C.to(accumulate)[:, None])
                grad_CV = grad_CV.to(hidden_TD.dtype)
                torch.mm(grad_CV, weight_VD, out=grad_hidden_TD[start : start + chunk])
                if accumulate == hidden_TD.dtype:
                    grad_weight_VD.addmm_(grad_CV.T, hidden_CD)
                else:
                    grad_weight_VD += grad_CV.T @ hidden_CD
        if with_grad:
            ctx.save_for_backward(grad_hidden_TD, grad_weight_VD)
        ctx.weight_dtype = weight_VD.dtype
        ctx.mark_non_differentiable(nll_sum)
        return loss_sum, nll_sum

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden_TD, grad_weight_VD = ctx.saved_tensors
        return (
            (grad_hidden_TD * grad_loss).to(grad_hidden_TD.dtype),
            (grad_weight_VD * grad_loss).to(ctx.weight_dtype),
            None,
            None,
            None,
            None,
        )
