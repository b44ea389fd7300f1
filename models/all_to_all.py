"""Expert parallelism: rows travel to the ranks that hold their experts, and back.

Shape suffixes: T tokens, K experts per token, E experts, e experts of one rank, S ranks of the group, R rows, D model.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd

from .dispatch import DispatchPlan, LocalDispatcher


@dataclass(frozen=True)
class ExchangePlan:
    """What `receive` and `combine` need to know of a `dispatch`.

    Attributes:
        local: the plan of the rows before they travelled.
        sent, received: rows to and from each rank of the group.
        order: (R,) int64, expert-major row r is the row `order[r]` of those that arrived.
    """

    local: DispatchPlan
    sent: list[int]
    received: list[int]
    order: Tensor

    @property
    def dropped(self) -> Tensor:
        """0-dim int64, assignments of this rank's tokens that found their expert full."""
        return self.local.dropped


class AllToAllDispatcher:
    """Splits the experts over the ranks of a group, E / S consecutive ones on each, and exchanges rows by all-to-all.

    An expert sees its rows by source rank and, within one, in the order of the tokens: as if the tokens of all ranks were one
    batch on one device. Every rank of the group takes part in every call, with any number of tokens, none included. The
    device waits once, for the numbers of rows. The exchange of rows goes on while the caller does something else until
    `receive`.

    Args:
        num_experts: E, a multiple of the group's size.
        group: the expert-parallel group.
        capacity_factor: see `LocalDispatcher`; T counts the tokens of the source rank (the groups of GShard, arXiv 2006.16668).

    Raises:
        ValueError: if the group does not divide the experts.
    """

    def __init__(self, num_experts: int, group: dist.ProcessGroup, capacity_factor: float | None = None) -> None:
        self.size = dist.get_world_size(group)
        if num_experts % self.size:
            raise ValueError(f"num_experts={num_experts} cannot be split evenly over the {self.size} ranks of the group")
        self.group = group
        self.local = LocalDispatcher(num_experts, capacity_factor)

    @property
    def capacity_factor(self) -> float | None:
        return self.local.capacity_factor

    # The numbers of rows are data, which compiled code cannot size anything by.
    @torch.compiler.disable
    def dispatch(
        self, x: Tensor, indices: Tensor, mask: Tensor | None = None, *, limited: bool = True
    ) -> tuple[Tensor, Tensor, ExchangePlan]:
        """Send every real token of x (T, D) to the ranks of its experts `indices` (T, K); see `LocalDispatcher.dispatch`.

        Returns:
            rows: (R, D), on their way.
            counts: (e,) int64 rows of each expert of this rank.
            plan: for `receive` and `combine`.
        """
        rows_RD, counts_E, plan = self.local.dispatch(x, indices, mask, limited=limited)
        counts_Se = counts_E.view(self.size, -1)
        arriving_Se = all_to_all_single(counts_E, None, None, self.group).view(self.size, -1)
        sent, received = torch.stack([counts_Se.sum(1), arriving_Se.sum(1)]).tolist()
        rows_RD = all_to_all_single_autograd(rows_RD, received, sent, self.group)
        order_R = expert_major(arriving_Se, sum(received))
        return rows_RD, arriving_Se.sum(0), ExchangePlan(plan, sent, received, order_R)

    @torch.compiler.disable
    def receive(self, rows: Tensor, plan: ExchangePlan) -> Tensor:
        """Wait for the rows (R, D) and order them by expert."""
        return _Reorder.apply(rows, plan.order)

    @torch.compiler.disable
    def combine(self, rows: Tensor, weights: Tensor, plan: ExchangePlan) -> Tensor:
        """Send the outputs back and sum them: see `LocalDispatcher.combine`."""
        arrived_R = torch.empty_like(plan.order)
        arrived_R[plan.order] = torch.arange(len(plan.order), device=plan.order.device)
        rows = all_to_all_single_autograd(_Reorder.apply(rows, arrived_R), plan.sent, plan.received, self.group)
        return self.local.combine(rows, weights, plan.local)


def expert_major(counts: Tensor, total: int) -> Tensor:
    """(R,) int64: where the rows of each expert in turn lie, when they arrived rank by rank.

    counts: (S, e) rows from each rank for each expert; total: their sum R, known to the caller without waiting.
    """
    starts_Se = (counts.flatten().cumsum(0) - counts.flatten()).view_as(counts)
    lengths_eS, starts_eS = counts.T.flatten(), starts_Se.T.flatten()
    places_eS = lengths_eS.cumsum(0) - lengths_eS
    shift_R = torch.repeat_interleave(starts_eS - places_eS, lengths_eS, output_size=total)
    return shift_R + torch.arange(total, device=counts.device)


class _Reorder(torch.autograd.Function):
    """rows[order], where `order` is a permutation: no row is read twice, so the backward only writes."""

    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, order_R: Tensor) -> Tensor:
        ctx.save_for_backward(order_R)
        return rows_RD.index_select(0, order_R)

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, None]:
        (order_R,) = ctx.saved_tensors
        return torch.empty_like(grad_RD).index_copy_(0, order_R, grad_RD), None
