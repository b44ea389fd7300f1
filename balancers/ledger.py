"""What a router notes of one optimizer step, for the report: sums of integers, and two of floats.

Shape suffixes: T tokens, E experts, K experts per token.
"""

from collections.abc import Generator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..kernels import best_groups
from . import metrics
from .balancer import Balancer, StatefulModule
from .collective import PerRank, Sums
from .distribution import real_tokens
from .report import LayerSums
from .routing import Routing, route


class StepLedger(StatefulModule):
    """The step so far, on this rank.

    Args:
        num_experts, top_k: E and K.
        options: the router's options for `route`.
        biased: whether a bias takes part in the choice, so that it can overrule the router.
        loss_names: the balancers whose losses are added up.
        measure_residual: keep the selection values of the step.
    """

    counts: Tensor  # (E,) assignments
    tokens: Tensor
    microbatches: Tensor  # those with at least one real token
    agreed: Tensor  # choices that the router would have made without a bias
    nan_rows: Tensor
    local_maxvio_sum: Tensor
    local_maxvio_worst: Tensor
    loss_sums: Tensor  # (losses,)

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        options: dict[str, Any],
        *,
        biased: bool,
        loss_names: Sequence[str],
        measure_residual: bool,
    ) -> None:
        super().__init__()
        self.num_experts, self.top_k, self.options = num_experts, top_k, options
        self.biased, self.loss_names, self.measure_residual = biased, tuple(loss_names), measure_residual
        self.add_statistic("counts", (num_experts,))
        for name in ("tokens", "microbatches", "agreed", "nan_rows"):
            self.add_statistic(name)
        for name in ("local_maxvio_sum", "local_maxvio_worst"):
            self.add_statistic(name, dtype=torch.float64)
        self.add_statistic("loss_sums", (len(loss_names),), dtype=torch.float64)
        self.seen: tuple[Tensor, Tensor] | None = None  # selection (rows, E) and mask (rows,) of the step

    def observe(self, routing: Routing) -> None:
        """Note one microbatch."""
        tokens = real_tokens(routing)
        some = tokens > 0
        local = torch.where(some, metrics.max_vio(routing.counts), 0.0)
        self.counts += routing.counts
        self.tokens += tokens
        self.microbatches += some.long()
        self.nan_rows += routing.nan_rows
        self.local_maxvio_sum += local
        self.local_maxvio_worst.copy_(torch.maximum(self.local_maxvio_worst, local))  # MaxVio is never below 0
        if self.biased:
            self.agreed += self._agreed(routing)
            if self.measure_residual:
                self._remember(routing)

    def add_losses(self, values: Tensor, counts: Tensor) -> None:
        """Add a microbatch's losses, in the order of `loss_names`; one without tokens has none."""
        self.loss_sums += torch.where(counts.sum() > 0, values, 0.0)

    def sums(self) -> Generator[Sums, Any, LayerSums]:
        """One round: everything noted, summed over ranks."""
        integers, floats, worst = yield (
            torch.cat([self.counts, torch.stack([self.tokens, self.microbatches, self.agreed, self.nan_rows])]),
            torch.cat([self.local_maxvio_sum[None], self.loss_sums]),
            PerRank(self.local_maxvio_worst),
        )
        return LayerSums(
            num_experts=self.num_experts,
            top_k=self.top_k,
            biased=self.biased,
            counts=integers[: self.num_experts],
            tokens=integers[-4],
            microbatches=integers[-3],
            agreed=integers[-2],
            nan_rows=integers[-1],
            local_maxvio_sum=floats[0],
            local_maxvio_worst=worst.max(),
            loss_names=self.loss_names,
            loss_sums=floats[1:],
        )

    def residual_counts(self, biasing: Balancer) -> Generator[Sums, Any, Tensor]:
        """One round: (E,) counts of the step's own tokens, routed again with the bias that the step has just produced."""
        counts = torch.zeros_like(self.counts)
        if self.seen is not None:
            selection, mask = self.seen
            options = self.options | {"score": "identity", "space": "logits"}  # the selection values are final
            counts = route(selection, self.top_k, bias=biasing.selection_bias, mask=mask, **options).counts
        total = yield counts
        return total

    def reset_statistics(self) -> None:
        super().reset_statistics()
        self.seen = None

    def _agreed(self, routing: Routing) -> Tensor:
        """0-dim int64: chosen experts that are among the K largest values without a bias, too."""
        allowed_TE = best_groups(routing.selection, self.options["num_groups"], self.options["group_top_k"])
        own_TE = routing.selection if allowed_TE is None else routing.selection.masked_fill(~allowed_TE, float("-inf"))
        chosen_TK = own_TE.gather(1, routing.indices)
        agreed_TK = (chosen_TK >= own_TE.topk(self.top_k, dim=-1).values[:, -1:]) & (chosen_TK > float("-inf"))
        if routing.mask is not None:
            agreed_TK = agreed_TK & routing.mask[:, None]
        return agreed_TK.sum()

    def _remember(self, routing: Routing) -> None:
        """Keep what the residual needs: one growing pair of tensors (a list would make torch.compile start anew)."""
        mask = torch.ones_like(routing.selection[:, 0], dtype=torch.bool) if routing.mask is None else routing.mask
        if self.seen is None:
            self.seen = (routing.selection, mask)
        else:
            self.seen = (torch.cat([self.seen[0], routing.selection]), torch.cat([self.seen[1], mask]))
