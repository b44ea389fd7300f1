"""EQB, Exact Quantile Balancing (arXiv 2609.28053): the bias is the exact order statistic of the whole step's BF16 margins.

    v_te = bf16(selection_te - cutoff_t)          the cutoff under the old bias
    b_e  = -(floor(T K / E) + 1)-th largest of v_:e, T over all ranks and microbatches of the step; then centred

Rounding happens once, after the float32 subtraction; from there on every number is exact, so the bias is bit-identical for
any split of the step's tokens into ranks and microbatches.

Shape suffixes: T tokens, E experts.
"""

from typing import ClassVar

from torch import Tensor

from ..kernels import bf16_margins
from .balancer import Balancer, Update
from .distribution import real_tokens
from .margins import refuse_without_runner_up, settled
from .order_statistic import Bf16Columns, order_statistic_rounds
from .routing import SPACES, Routing, Space


class ExactQuantile(Balancer):
    """The selection bias is the exact quantile of the whole step's BF16 margins (EQB).

    Args:
        space: what the bias is added to. "logits" (default): bf16 costs nothing there. On "scores", bf16 stalls once sigmoid
            scores are far from 0.5.

    With groups so tight that an expert is within reach of fewer tokens than its fair share, its quantile does not exist and
    its bias stays: balance is then limited by the choice of groups (prefer group_top_k >= 2).
    """

    name: ClassVar[str] = "eqb"
    bias: Tensor
    tokens: Tensor

    def __init__(self, space: Space = "logits") -> None:
        super().__init__()
        if space not in SPACES:
            raise ValueError(f"ExactQuantile: space={space!r}; choose one of {', '.join(map(repr, SPACES))}")
        self.space = space
        self.margins = Bf16Columns()

    def build(self) -> None:
        refuse_without_runner_up("ExactQuantile", self.top_k, self.reachable, self.num_experts)
        self.add_state("bias", (self.num_experts,))
        self.add_statistic("tokens")

    def selection_bias(self, selection: Tensor, mask: Tensor | None) -> Tensor:
        return self.bias

    def observe(self, routing: Routing) -> None:
        if self.top_k == self.num_experts:  # every expert is always chosen: nothing to balance
            return
        # Padding is -inf there: it ranks below every real value, and `tokens` does not count it.
        self.margins.add(*bf16_margins(routing.selection, routing.cutoff, routing.allowed, routing.mask))
        self.tokens += real_tokens(routing)

    def update(self) -> Update:
        quantile_E, tokens = yield from order_statistic_rounds(
            self.margins, self.tokens, lambda total: total * self.top_k // self.num_experts, self.num_experts
        )
        settled(self.bias, -quantile_E.float(), tokens)

    def reset_statistics(self) -> None:
        super().reset_statistics()
        self.margins.clear()

    def report(self) -> dict[str, Tensor]:
        return {"bias_span": self.bias.max() - self.bias.min()}
