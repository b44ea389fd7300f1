"""Quantile balancing with every shard's own quantile, averaged: the baseline that EQB improves on.

Sources: QB by Jianlin Su (kexue.fm 11619, 11626); the averaging as in Megatron-LM #5349. An average of quantiles is not
the quantile of the union, unless all shards look alike.

Shape suffixes: T tokens, E experts.
"""

from typing import ClassVar

import torch
from torch import Tensor

from .balancer import Balancer, Update
from .distribution import real_tokens
from .margins import margins, refuse_without_runner_up, settled
from .routing import Routing


class ShardQuantile(Balancer):
    """b_e = -mean over microbatches and ranks of Q_r(selection_:e - cutoff), r = floor(T K / E), T the shard's tokens.

    Args:
        ema: 0 <= ema < 1, the share of the old bias that is kept at each update.
    """

    name: ClassVar[str] = "qb"
    bias: Tensor
    quantile_sum: Tensor
    shards: Tensor

    def __init__(self, ema: float = 0.0) -> None:
        super().__init__()
        if not 0 <= ema < 1:
            raise ValueError(f"ShardQuantile: ema={ema}; it must be in [0, 1): the share of the old bias that is kept")
        self.ema = ema

    def build(self) -> None:
        refuse_without_runner_up("ShardQuantile", self.top_k, self.reachable, self.num_experts)
        self.add_state("bias", (self.num_experts,))
        self.add_statistic("quantile_sum", (self.num_experts,), dtype=torch.float64)
        self.add_statistic("shards")

    def selection_bias(self, selection: Tensor, mask: Tensor | None) -> Tensor:
        return self.bias

    def observe(self, routing: Routing) -> None:
        rows = routing.selection.shape[0]
        if rows == 0 or self.top_k == self.num_experts:  # every expert is always chosen: nothing to balance
            return
        tokens = real_tokens(routing)
        rank = tokens * self.top_k // self.num_experts
        largest = margins(routing).topk(rows * self.top_k // self.num_experts + 1, dim=0).values
        quantile_E = largest.gather(0, rank.expand(1, self.num_experts))[0]
        self.quantile_sum += torch.where(tokens > 0, quantile_E.double(), 0.0)
        self.shards += (tokens > 0).long()

    def update(self) -> Update:
        quantile_sum_E, shards = yield self.quantile_sum, self.shards
        estimate_E = -quantile_sum_E / shards.clamp(min=1)
        settled(self.bias, self.ema * self.bias + (1 - self.ema) * estimate_E, tokens=shards)
