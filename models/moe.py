"""A mixture-of-experts layer: route, dispatch, compute, combine.

Shape suffixes: T tokens, K experts per token, E experts, R rows, D model.
"""

from typing import cast

import torch
from torch import Tensor, nn

from ..balancers.balancer import StatefulModule
from ..balancers.recompute import autograd_is_idle
from .dispatch import Dispatcher, LocalDispatcher
from .experts import Experts


class MoELayer(StatefulModule):
    """Feed-forward layer whose router sends every token to K of E experts.

    Args:
        router: any module whose forward(x, *, mask, document_ids) returns something with `indices` (T, K) and `weights`
            (T, K), such as `evenload.balancers.Router`. It is given `mask` and `document_ids` only where the layer is, so
            a router that takes x alone will do for unpadded batches.
        experts: maps rows (R, D) in expert-major order and counts (E,) to (R, D).
        shared: a module (..., D) -> (..., D) that every token passes through as well.
        capacity_factor: None = dropless; see `LocalDispatcher`. It applies in training only; what is dropped is counted, see
            `pop_dropped`.
    """

    dropped: Tensor

    def __init__(
        self, router: nn.Module, experts: Experts, shared: nn.Module | None = None, capacity_factor: float | None = None
    ) -> None:
        super().__init__()
        self.router = router
        self.experts = experts
        self.shared = shared
        self.dispatcher: Dispatcher = LocalDispatcher(experts.num_experts, capacity_factor)
        self.add_statistic("dropped")

    def reset_parameters(self) -> None:
        super().reset_parameters()
        for part in (self.router, self.experts, self.shared):
            if part is not None:
                cast(Experts, part).reset_parameters()

    def forward(self, x: Tensor, *, mask: Tensor | None = None, document_ids: Tensor | None = None) -> Tensor:
        """x (..., D) -> (..., D) in the same dtype.

        Args:
            mask: (...) bool, True = real token. Padding reaches no expert, and its output is exactly 0.
            document_ids: (...) integer, for routers that balance per document.

        Raises:
            ValueError: if the mask, or what the router returns, does not fit x.
        """
        x_TD = x.reshape(-1, x.shape[-1])
        mask_T = _flat_mask(mask, x)
        context = {"mask": mask, "document_ids": document_ids}
        routing = self.router(x, **{name: value for name, value in context.items() if value is not None})
        indices_TK, weights_TK = _checked(routing.indices, routing.weights, x_TD.shape[0])

        # In eval nothing is dropped: a token's output must not depend on who shares its batch.
        rows_RD, counts_E, plan = self.dispatcher.dispatch(x_TD, indices_TK, mask_T, limited=self.training)
        shared_TD = None if self.shared is None else self.shared(x_TD).to(x.dtype)  # while rows travel
        rows_RD = self.dispatcher.receive(rows_RD, plan)
        out_TD = self.dispatcher.combine(self.experts(rows_RD, counts_E), weights_TK, plan).to(x.dtype)
        if shared_TD is not None:
            out_TD = out_TD + (shared_TD if mask_T is None else shared_TD.masked_fill(~mask_T[:, None], 0.0))
        if self.dispatcher.capacity_factor is not None and self.training:
            with torch.no_grad():
                self.dropped.add_(plan.dropped * autograd_is_idle(x))  # once, also when checkpointing recomputes
        return out_TD.view_as(x)

    def pop_dropped(self) -> Tensor:
        """0-dim int64: assignments dropped in training forwards since the last call, on this rank. Starts anew."""
        dropped = self.dropped.clone()
        self.dropped.zero_()
        return dropped


def _flat_mask(mask: Tensor | None, x: Tensor) -> Tensor | None:
    if mask is None:
        return None
    if mask.dtype != torch.bool or mask.shape != x.shape[:-1]:
        raise ValueError(
            f"mask is {mask.dtype} of shape {tuple(mask.shape)}; give bool of shape {tuple(x.shape[:-1])}, True = real token"
        )
    return mask.reshape(-1)


def _checked(indices: Tensor, weights: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    if indices.shape != weights.shape or indices.dim() < 2:
        raise ValueError(
            f"the router returned indices {tuple(indices.shape)} and weights {tuple(weights.shape)}; both must be (T, K)"
        )
    indices_TK, weights_TK = indices.flatten(0, -2), weights.flatten(0, -2)
    if indices_TK.shape[0] != num_tokens:
        raise ValueError(f"the router returned {indices_TK.shape[0]} rows for {num_tokens} tokens")
    return indices_TK, weights_TK
