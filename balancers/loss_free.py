"""Auxiliary-loss-free balancing: a bias nudged by the sign of each expert's load error (arXiv 2408.15664, DeepSeek-V3).

b_e += rate * sign(c_mean - c_e), with c the counts of the whole optimizer step, added to the scores.
"""

from typing import ClassVar

import torch
from torch import Tensor

from .balancer import Balancer, Update, require_nonnegative
from .margins import settled
from .routing import Routing, Space


class LossFree(Balancer):
    """The selection bias takes one step of fixed size against the sign of the load error.

    Args:
        rate: size of one nudge, in units of the scores, >= 0.
        centred: subtract the mean of the bias after every update (changes no choice, stops drift); False as in the paper.
    """

    name: ClassVar[str] = "loss_free"
    space: Space = "scores"
    bias: Tensor
    counts: Tensor

    def __init__(self, rate: float = 1e-3, centred: bool = True) -> None:
        super().__init__()
        require_nonnegative("LossFree", rate=rate)
        self.rate, self.centred = rate, centred

    def build(self) -> None:
        self.add_state("bias", (self.num_experts,))
        self.add_statistic("counts", (self.num_experts,))

    def selection_bias(self, selection: Tensor, mask: Tensor | None) -> Tensor:
        return self.bias

    def observe(self, routing: Routing) -> None:
        self.counts += routing.counts

    def update(self) -> Update:
        counts_E = yield self.counts
        # E * c_e against sum(c): the fair share need not be an integer, the comparison stays one.
        nudged_E = self.bias + self.rate * torch.sign(counts_E.sum() - self.num_experts * counts_E)
        if self.centred:
            settled(self.bias, nudged_E, tokens=counts_E.sum())
        else:
            self.bias.copy_(nudged_E)
