"""The small parts: linear map, RMSNorm, SwiGLU, dense feed-forward. Each initialises itself through `reset_parameters`.

Shape suffixes: D model, F feed-forward hidden. "..." is any leading shape.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .recompute import cheaply_recomputed


class Linear(nn.Linear):
    """A linear map without bias whose weight is normal(0, std); (..., in) -> (..., out)."""

    def __init__(self, in_features: int, out_features: int, std: float) -> None:
        # nn.Linear calls reset_parameters at the end of its own constructor, and that needs std.
        self.std = std
        super().__init__(in_features, out_features, bias=False)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (arXiv 1910.07467); float32 inside, x's dtype outside."""

    def __init__(self, dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        inside = torch.promote_types(x.dtype, torch.float32)
        return F.rms_norm(x.to(inside), self.weight.shape, self.weight.to(inside), self.eps).to(x.dtype)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up (arXiv 2002.05202) of (..., 2F), gate first; returns (..., F)."""
    if torch.compiler.is_compiling():
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up
    return _SwiGLU.apply(gate_up)


class _SwiGLU(torch.autograd.Function):
    """Saves its input alone, and writes both halves of the gradient into one buffer."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        grad_gate_up = torch.empty_like(gate_up)
        grad_gate, grad_up = grad_gate_up.chunk(2, dim=-1)
        torch.ops.aten.silu.out(gate, out=grad_up)
        grad_up.mul_(grad)
        torch.mul(grad, up, out=grad_gate)
        torch.ops.aten.silu_backward.grad_input(grad_gate, gate, grad_input=grad_gate)
        return grad_gate_up


class DenseFFN(nn.Module):
    """SwiGLU feed-forward, (..., D) -> (..., D); also the shared expert of an MoE layer.

    Args:
        d_model: D.
        hidden: F.
        init_std, out_std: standard deviations of the first map and of the one back to D (None = init_std).
    """

    activation_checkpointing = "none"  # set by GPT.set_activation_checkpointing

    def __init__(self, d_model: int, hidden: int, *, init_std: float = 0.02, out_std: float | None = None) -> None:
        super().__init__()
        self.gate_up = Linear(d_model, 2 * hidden, init_std)
        self.down = Linear(hidden, d_model, init_std if out_std is None else out_std)

    def reset_parameters(self) -> None:
        self.gate_up.reset_parameters()
        self.down.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        return cheaply_recomputed(self._run, x) if self.activation_checkpointing == "selective" else self._run(x)

    def _run(self, x: Tensor) -> Tensor:
        return self.down(swiglu(self.gate_up(x)))
