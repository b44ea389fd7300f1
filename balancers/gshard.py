"""GShard / Switch auxiliary loss: coeff * E * sum_e f_e * P_e.

Sources: GShard (arXiv 2006.16668), Switch (2101.03961); per-document scope as DeepSeek-V3 (2412.19437); global scope
2501.11873. f_e = c_e / (T K) from the routing actually used, P_e = mean_t p_te, p the router's full distribution.
The value at perfect balance is exactly `coeff`, in every scope.

Shape suffixes: T tokens, E experts, K top-k, N documents (at most T).
"""

from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch import distributed as dist

from .balancer import Balancer, Injection, require_nonnegative
from .collective import GroupRef
from .distribution import inject_through_probabilities, probabilities, real_mean, real_tokens
from .routing import Routing

SCOPES = ("microbatch", "sequence", "global")


class GShardLoss(Balancer):
    """The auxiliary loss, injected as a gradient.

    Args:
        coeff: weight of the loss, >= 0.
        scope: whose load f is. "microbatch": this rank's microbatch. "sequence": each document of its own (packed
            sequences count per document), a document weighing as much as its tokens. "global": all ranks of `group`
            and the microbatches of the step so far; P stays local. One collective per training forward: every rank must
            run the same number of them.
        group: process group of the "global" scope; None = all ranks.
    """

    name: ClassVar[str] = "gshard"
    step_counts: Tensor

    def __init__(
        self,
        coeff: float = 0.01,
        scope: Literal["microbatch", "sequence", "global"] = "microbatch",
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        require_nonnegative("GShardLoss", coeff=coeff)
        if scope not in SCOPES:
            raise ValueError(f"GShardLoss: scope={scope!r}; choose one of {', '.join(map(repr, SCOPES))}")
        self.coeff, self.scope, self.group = coeff, scope, GroupRef(group)

    def build(self) -> None:
        self.add_statistic("step_counts", (self.num_experts,))

    def observe(self, routing: Routing) -> None:
        if self.scope != "global":
            return
        distributed = dist.is_available() and dist.is_initialized()
        self.step_counts += self.group.all_reduce(routing.counts) if distributed else routing.counts

    def inject(self, routing: Routing, documents: Tensor) -> Injection:
        probs_TE = probabilities(routing, self.score)
        if self.scope == "sequence":
            load_TE = self._document_load(routing, documents)
        else:
            counts_E = self.step_counts if self.scope == "global" else routing.counts
            load_TE = (counts_E.to(probs_TE.dtype) / counts_E.sum().clamp(min=1)).expand_as(probs_TE)
        strength = self.coeff * self.num_experts
        value = strength * real_mean((load_TE * probs_TE).sum(dim=-1), routing)
        gradient_TE = load_TE * (strength / real_tokens(routing).clamp(min=1))
        return inject_through_probabilities(value, gradient_TE, probs_TE, routing, self.score)

    def _document_load(self, routing: Routing, documents: Tensor) -> Tensor:
        """(T, E) for every token, the shares f of its own document's assignments."""
        tokens = routing.indices.shape[0]
        ones_TK = torch.ones_like(routing.indices, dtype=routing.scores.dtype)
        if routing.mask is not None:
            ones_TK = ones_TK * routing.mask[:, None]
        cells_TK = documents[:, None] * self.num_experts + routing.indices
        counts = torch.zeros(tokens * self.num_experts, dtype=ones_TK.dtype, device=ones_TK.device)
        counts_NE = counts.scatter_add_(0, cells_TK.flatten(), ones_TK.flatten()).view(tokens, self.num_experts)
        return (counts_NE / counts_NE.sum(dim=-1, keepdim=True).clamp(min=1))[documents]
