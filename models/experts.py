"""SwiGLU experts as stacked weights: one grouped matrix product for all experts, and the loop that defines it.

Shape suffixes: R rows in expert-major order, E experts, D model, F expert hidden, N output width, M input width.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import EXPERT_COMPUTE
from .layers import swiglu
from .recompute import cheaply_recomputed

GROUPED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Experts(nn.Module):
    """E SwiGLU feed-forward networks without biases; row r goes through the expert that `counts` assigns it to.

    Parameters: `w_gate_up` (E, 2F, D), the gate's F rows before the up projection's, and `w_down` (E, D, F).
    An expert without rows gets a gradient of exactly 0.

    Attributes:
        read: what turns a parameter into the weights to compute with, or None. Sharding sets it: a parameter may be a
            DTensor of which this rank's experts are a part.

    Args:
        num_experts, d_model, hidden: E, D, F.
        compute: "loop" = one matrix product per expert; "grouped" = F.grouped_mm, ValueError where that is not legal;
            "auto" = grouped where legal, else loop. Both give the same numbers up to rounding.
        init_std, out_std: standard deviations of w_gate_up and w_down (None = init_std).
    """

    activation_checkpointing = "none"  # set by GPT.set_activation_checkpointing

    def __init__(
        self,
        num_experts: int,
        d_model: int,
        hidden: int,
        *,
        compute: str = "auto",
        init_std: float = 0.02,
        out_std: float | None = None,
    ) -> None:
        super().__init__()
        if compute not in EXPERT_COMPUTE:
            raise ValueError(f"compute={compute!r}; choose one of {', '.join(map(repr, EXPERT_COMPUTE))}")
        self.num_experts = num_experts
        self.compute = compute
        self.init_std = init_std
        self.out_std = init_std if out_std is None else out_std
        self.w_gate_up = nn.Parameter(torch.empty(num_experts, 2 * hidden, d_model))
        self.w_down = nn.Parameter(torch.empty(num_experts, d_model, hidden))
        self.read: Callable[[Tensor], Tensor] | None = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.w_gate_up, std=self.init_std)
        nn.init.normal_(self.w_down, std=self.out_std)

    def extra_repr(self) -> str:
        num_experts, d_model, hidden = self.w_down.shape
        return f"num_experts={num_experts}, d_model={d_model}, hidden={hidden}, compute={self.compute!r}"

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """rows (R, D) in expert-major order, counts (E,) int64 summing to R -> (R, D) in rows' dtype (or autocast's)."""
        device = rows.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else rows.dtype
        w_gate_up, w_down = (w if self.read is None else self.read(w) for w in (self.w_gate_up, self.w_down))
        rows, w_gate_up, w_down = rows.to(dtype), w_gate_up.to(dtype), w_down.to(dtype)
        obstacle = None if self.compute == "loop" else grouped_obstacle(rows, w_gate_up, w_down)
        if self.compute == "grouped" and obstacle is not None:
            raise ValueError(f'compute="grouped" is not possible here: {obstacle}; use "auto" or "loop"')
        grouped = self.compute != "loop" and obstacle is None
        # The compiler knows grouped_mm for bfloat16 alone, and would specialise the loop on every new set of counts.
        if torch.compiler.is_compiling() and not (grouped and dtype == torch.bfloat16):
            return _uncompiled_experts(rows, counts, w_gate_up, w_down, grouped)
        if self.activation_checkpointing == "selective":
            return cheaply_recomputed(_run_experts, rows, counts, w_gate_up, w_down, grouped)
        return _run_experts(rows, counts, w_gate_up, w_down, grouped)


def _run_experts(rows_RD: Tensor, counts_E: Tensor, w_gate_up: Tensor, w_down: Tensor, grouped: bool) -> Tensor:
    if not grouped:
        counts = counts_E.tolist()
        return loop_linear(swiglu(loop_linear(rows_RD, w_gate_up, counts)), w_down, counts)
    ends_E = counts_E.cumsum(0, dtype=torch.int32)
    return grouped_linear(swiglu(grouped_linear(rows_RD, w_gate_up, ends_E)), w_down, ends_E)


_uncompiled_experts = torch.compiler.disable(_run_experts)


def loop_linear(rows: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
    """rows (R, M), weight (E, N, M), counts of length E -> (R, N): the definition of `grouped_linear`."""
    return torch.cat([F.linear(part, w) for part, w in zip(rows.split(counts), weight.unbind(), strict=True)])


def grouped_linear(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """rows (R, M), weight (E, N, M), ends (E,) int32 = the row after each expert's last -> (R, N), by F.grouped_mm."""
    return _GroupedLinear.apply(rows, weight, ends)


def grouped_obstacle(rows: Tensor, *weights: Tensor) -> str | None:
    """Why F.grouped_mm cannot run on these rows and stacked weights, or None if it can."""
    if rows.dtype not in GROUPED_DTYPES:
        return f"dtype {rows.dtype} is not float32, bfloat16 or float16"
    if any(width * rows.element_size() % 16 for weight in weights for width in weight.shape[1:]):
        return f"rows must be multiples of 16 bytes, the stacked weights are {[tuple(w.shape) for w in weights]} {rows.dtype}"
    if rows.shape[0] == 0:
        return "there are no rows"
    if rows.device.type == "cuda" and (rows.dtype != torch.bfloat16 or torch.cuda.get_device_capability(rows.device) < (8, 0)):
        return "on a GPU it needs bfloat16 and compute capability 8.0"
    if rows.device.type not in ("cpu", "cuda"):
        return f"device {rows.device.type} is neither cpu nor cuda"
    return None


class _GroupedLinear(torch.autograd.Function):
    """grouped_mm with what its own backward lacks: it takes any layout of the gradient, and empty experts get exactly 0."""

    @staticmethod
    def forward(ctx: Any, rows_RM: Tensor, weight_ENM: Tensor, ends_E: Tensor) -> Tensor:
        ctx.save_for_backward(rows_RM, weight_ENM, ends_E)
        return F.grouped_mm(rows_RM, weight_ENM.transpose(1, 2), offs=ends_E)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_RN: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        rows_RM, weight_ENM, ends_E = ctx.saved_tensors
        grad_RN = grad_RN.contiguous()
        grad_rows = F.grouped_mm(grad_RN, weight_ENM, offs=ends_E) if ctx.needs_input_grad[0] else None
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = F.grouped_mm(grad_RN.T, rows_RM, offs=ends_E)
            if grad_weight.device.type != "cpu":
                zero_empty_experts(grad_weight, ends_E)
        return grad_rows, grad_weight, None


def zero_empty_experts(grad_weight: Tensor, ends: Tensor) -> None:
    """Set the gradient (E, N, M) of experts without rows to 0, in place, whatever it holds.

    GPU kernels may leave an empty group's block of the output unwritten (pytorch#172439); the CPU's write zeros.
    """
    empty_E = ends.diff(prepend=ends.new_zeros(1)) == 0
    grad_weight.masked_fill_(empty_E[:, None, None], 0.0)
