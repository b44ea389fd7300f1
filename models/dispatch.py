"""Where tokens go: a dispatcher brings tokens to experts in expert-major rows and their outputs back.

`LocalDispatcher` serves experts that all live here, `AllToAllDispatcher` (all_to_all.py) experts that are split among ranks.
Another way to move rows is another class with the three methods of `Dispatcher`; nothing else in an MoE layer knows.

Shape suffixes: T tokens, K experts per token, E experts, R rows (one per token and expert that meet), D model.
"""

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ..kernels import expert_order, permute, unpermute


class Dispatcher(Protocol):
    """What an MoE layer asks of a dispatcher, in this order."""

    @property
    def capacity_factor(self) -> float | None:
        """None = dropless; see `LocalDispatcher`."""

    def dispatch(
        self, x: Tensor, indices: Tensor, mask: Tensor | None = None, *, limited: bool = True
    ) -> tuple[Tensor, Tensor, Any]:
        """Send every real token of x (T, D) to its experts `indices` (T, K).

        Returns the rows, which may still be on their way; (e,) int64, how many each expert that lives here gets; and a plan
        for the other two methods, with `plan.dropped`, a 0-dim int64.
        """

    def receive(self, rows: Tensor, plan: Any) -> Tensor:
        """Wait for the rows, and bring them into expert-major order."""

    def combine(self, rows: Tensor, weights: Tensor, plan: Any) -> Tensor:
        """Return the experts' outputs to their tokens, summed with weights (T, K) in the order of the K experts: (T, D)."""


@dataclass(frozen=True)
class DispatchPlan:
    """What `combine` needs to know of a `dispatch`.

    Attributes:
        slots: (R,) int64, row r holds assignment `slots[r]` = token * K + position among the token's K experts.
        num_tokens: T.
        top_k: K.
        dropped: 0-dim int64, assignments of real tokens that found their expert full.
    """

    slots: Tensor
    num_tokens: int
    top_k: int
    dropped: Tensor


class LocalDispatcher:
    """Permutes the assignments of real tokens into expert-major order; within an expert, tokens keep their order.

    Without mask and capacity factor nothing waits for the device. With either, the number of rows depends on the data and is
    read back once.

    Args:
        num_experts: E.
        capacity_factor: None = dropless. Otherwise an expert takes its first ceil(capacity_factor * T * K / E) tokens (at most
            T; T counts real tokens), later ones are dropped: GShard, arXiv 2006.16668, section 3.2.

    Raises:
        ValueError: if capacity_factor is not above 0.
    """

    def __init__(self, num_experts: int, capacity_factor: float | None = None) -> None:
        if capacity_factor is not None and not capacity_factor > 0:
            raise ValueError(f"capacity_factor={capacity_factor}; it must be > 0, or None for dropless routing")
        self.num_experts = num_experts
        self.capacity_factor = capacity_factor

    def dispatch(
        self, x: Tensor, indices: Tensor, mask: Tensor | None = None, *, limited: bool = True
    ) -> tuple[Tensor, Tensor, DispatchPlan]:
        """Copy every real token to the rows of its experts.

        Args:
            x: (T, D).
            indices: (T, K) integer, distinct expert ids of each token.
            mask: (T,) bool, True = real token; padding gets no row.
            limited: whether the capacity factor applies.

        Returns:
            rows: (R, D) in x's dtype, experts in ascending order.
            counts: (E,) int64 rows per expert.
            plan: for `combine`.
        """
        num_tokens, top_k = indices.shape
        slots_N, starts_E1 = expert_order(indices, self.num_experts, mask)
        counts_E = starts_E1.diff()
        dropped = counts_E.new_zeros(())
        slots_R = slots_N
        if mask is not None:
            slots_R = slots_N[: int(starts_E1[-1])]
        if self.capacity_factor is not None and limited:
            capacity = self.capacity(num_tokens if mask is None else int(mask.sum()), top_k)
            place_R = torch.arange(slots_R.shape[0], device=x.device) - starts_E1[indices.flatten()[slots_R]]
            slots_R = slots_R[place_R < capacity]
            kept_E = counts_E.clamp(max=capacity)
            dropped = (counts_E - kept_E).sum()
            counts_E = kept_E
        rows_RD = permute(x, slots_R, top_k)
        return rows_RD, counts_E, DispatchPlan(slots_R, num_tokens, top_k, dropped)

    def receive(self, rows: Tensor, plan: DispatchPlan) -> Tensor:
        """The rows themselves: they never left."""
        return rows

    def combine(self, rows: Tensor, weights: Tensor, plan: DispatchPlan) -> Tensor:
        """Sum every token's expert outputs with its weights: rows (R, D), weights (T, K) -> (T, D) in rows' dtype.

        The sum is in float32 (float64 for float64 rows), in the order of the token's K experts; without rows it is exactly 0.
        """
        return unpermute(rows, weights, plan.slots)

    def capacity(self, num_tokens: int, top_k: int) -> int:
        """Most tokens that one expert takes out of `num_tokens` real ones."""
        if self.capacity_factor is None:
            return num_tokens
        # The tiny subtraction keeps 1.1 * 10 from becoming 12: the product is a rounding error above 11.
        share = self.capacity_factor * num_tokens * top_k / self.num_experts
        return min(num_tokens, math.ceil(share - 1e-9 * share))
