"""Quantile balancing from a uniform histogram of the required biases (Kimi K3, arXiv 2607.24653, section 2.3.3 and App. C-D).

The required bias of token t for expert e is r_te = cutoff_t - s_te: the expert takes the token exactly when b_e > r_te.
All r_te of the step are counted in B bins over [min(b) - 1, max(b) + 1], which holds them because sigmoid scores lie in
[0, 1]; b_e is the T K / E-th smallest, linear inside its bin.

Shape suffixes: E experts, B bins.
"""

from typing import ClassVar

import torch
from torch import Tensor

from ..kernels import uniform_histogram
from .balancer import Balancer, Update
from .distribution import real_tokens
from .margins import margins, refuse_without_runner_up, settled
from .routing import Routing, Space


class HistogramQuantile(Balancer):
    """The selection bias is the step's quantile as read from a histogram with uniform bins.

    Args:
        bins: number of bins B, >= 2. The bias is resolved to about (2 + max b - min b) / B before interpolation.

    Raises:
        ValueError: on a router whose score is not "sigmoid": values outside [0, 1] would be clipped into the outer bins.
    """

    name: ClassVar[str] = "qb_histogram"
    space: Space = "scores"
    bias: Tensor
    histogram: Tensor
    tokens: Tensor

    def __init__(self, bins: int = 1000) -> None:
        super().__init__()
        if bins < 2:
            raise ValueError(f"HistogramQuantile: bins={bins}; it must be at least 2 (1000 in the paper)")
        self.bins = bins

    def build(self) -> None:
        if self.score != "sigmoid":
            raise ValueError(
                f'HistogramQuantile on a router with score="{self.score}": its bins cover sigmoid scores only and would clip. '
                'Use score="sigmoid", or ExactQuantile (eqb), which has no range'
            )
        refuse_without_runner_up("HistogramQuantile", self.top_k, self.reachable, self.num_experts)
        self.add_state("bias", (self.num_experts,))
        self.add_statistic("histogram", (self.num_experts, self.bins))
        self.add_statistic("tokens")

    def bounds(self) -> tuple[Tensor, Tensor]:
        """(low, high), 0-dim float32: the range that holds every required bias under the current bias."""
        return self.bias.min() - 1, self.bias.max() + 1

    def selection_bias(self, selection: Tensor, mask: Tensor | None) -> Tensor:
        return self.bias

    def observe(self, routing: Routing) -> None:
        if self.top_k == self.num_experts:  # every expert is always chosen: nothing to balance
            return
        self.histogram += uniform_histogram(-margins(routing), *self.bounds(), self.bins, routing.mask)
        self.tokens += real_tokens(routing)

    def update(self) -> Update:
        histogram_EB, tokens = yield self.histogram, self.tokens
        wanted = tokens.double() * self.top_k / self.num_experts
        cumulative_EB = histogram_EB.cumsum(dim=1)
        # The first bin in which the running count reaches ceil(wanted).
        bin_E1 = (cumulative_EB < torch.ceil(wanted)).sum(dim=1, keepdim=True).clamp(max=self.bins - 1)
        inside_E1 = histogram_EB.gather(1, bin_E1)
        below_E1 = cumulative_EB.gather(1, bin_E1) - inside_E1
        fraction_E1 = ((wanted - below_E1) / inside_E1.clamp(min=1)).clamp(0, 1)
        low, high = self.bounds()
        new_E = low + (bin_E1 + fraction_E1).squeeze(1) * ((high - low) / self.bins)
        settled(self.bias, new_E, tokens)

    def report(self) -> dict[str, Tensor]:
        return {"bias_span": self.bias.max() - self.bias.min()}
