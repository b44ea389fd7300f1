"""phi-balancing (arXiv 2605.15403): minimise a convex potential of the expected router distribution by mirror descent.

    p_b = mean over the step's tokens of the router's full distribution
    m   <- (1 - eta) m + eta p_b                        m_0 = 1/E, an EMA, float32, in the checkpoint
    loss += coeff * <p_b, stop_gradient(grad phi(m))>   not a selection bias

Every potential here has grad phi(m)_e = ln_q(E m_e), with the q-logarithm ln_q(x) = (x**(q-1) - 1) / (q - 1) and
ln_1 = log. The potentials of the paper, divided by their curvature at the uniform point, all come to this: negative entropy
is q = 1, quadratic q = 2, the p-th power of the lp norm q = p, Tsallis q = q. So one coefficient means one strength there,
and the loss at perfect balance is exactly 0.

Shape suffixes: T tokens, E experts.
"""

from typing import ClassVar, Literal

import torch
from torch import Tensor

from .balancer import Balancer, Injection, Update, require_nonnegative
from .distribution import inject_through_probabilities, probabilities, real_mean, real_tokens
from .routing import Routing

Potential = str | tuple[str, float]
TRACKS = ("probs", "counts")
UPDATES = ("step", "microbatch")
# E * m below this counts as this: the slope of log and of q < 1 is unbounded at 0.
_SMALLEST = 1e-6


class PhiBalancing(Balancer):
    """A gradient along the slope of a convex potential at m, the moving average of the router's mean distribution.

    Args:
        coeff: lambda, >= 0.
        eta: 0 < eta <= 1, the weight of the NEW batch in the moving average m.
        potential: "negentropy" (the paper's recommendation), "quadratic", ("lp", p) with p > 1, ("tsallis", q) with q > 0.
        track: what m follows, "probs" (the mean distribution) or "counts" (the share of assignments). Soft means can be
            balanced while hard counts are not; the report shows both.
        sync: average the batch mean over all ranks at the step. False: every rank keeps an m of its own.
        update: "step" uses the m left by earlier steps (causal; gradient accumulation cannot know the step's own mean before
            its first backward). "microbatch" first mixes in the microbatch's own mean, for this microbatch only.
    """

    name: ClassVar[str] = "phi"
    mean: Tensor
    share_sum: Tensor
    tokens: Tensor

    def __init__(
        self,
        coeff: float = 0.1,
        eta: float = 0.6,
        potential: Potential = "negentropy",
        track: Literal["probs", "counts"] = "probs",
        sync: bool = True,
        update: Literal["step", "microbatch"] = "step",
    ) -> None:
        super().__init__()
        require_nonnegative("PhiBalancing", coeff=coeff)
        if not 0 < eta <= 1:
            raise ValueError(f"PhiBalancing: eta={eta}; it must be in (0, 1]: the weight of the new batch")
        for option, value, allowed in (("track", track, TRACKS), ("update", update, UPDATES)):
            if value not in allowed:
                raise ValueError(f"PhiBalancing: {option}={value!r}; choose one of {', '.join(map(repr, allowed))}")
        self.coeff, self.eta, self.track, self.sync, self.mean_of = coeff, eta, track, sync, update
        self.q = potential_order(potential)

    def build(self) -> None:
        self.add_state("mean", (self.num_experts,), fill=1 / self.num_experts)
        self.add_statistic("share_sum", (self.num_experts,), dtype=torch.float64)
        self.add_statistic("tokens")

    def inject(self, routing: Routing, documents: Tensor) -> Injection:
        probs_TE = probabilities(routing, self.score)
        mean_E = self.mean
        if self.mean_of == "microbatch":
            mean_E = torch.where(real_tokens(routing) > 0, torch.lerp(mean_E, self._share(routing).float(), self.eta), mean_E)
        slope_E = q_logarithm(self.num_experts * mean_E, self.q).to(probs_TE.dtype)
        value = self.coeff * (real_mean(probs_TE, routing) * slope_E).sum()
        gradient_TE = (self.coeff * slope_E / real_tokens(routing).clamp(min=1)).expand_as(probs_TE)
        return inject_through_probabilities(value, gradient_TE, probs_TE, routing, self.score)

    def observe(self, routing: Routing) -> None:
        tokens = real_tokens(routing)
        self.share_sum += self._share(routing).double() * tokens
        self.tokens += tokens

    def update(self) -> Update:
        share_sum_E, tokens = self.share_sum, self.tokens
        if self.sync:
            share_sum_E, tokens = yield share_sum_E, tokens
        batch_E = (share_sum_E / tokens.clamp(min=1)).to(self.mean.dtype)
        self.mean.copy_(torch.where(tokens > 0, torch.lerp(self.mean, batch_E, self.eta), self.mean))

    def report(self) -> dict[str, Tensor]:
        return {"phi_soft_maxvio": self.num_experts * self.mean.max() - 1}

    def _share(self, routing: Routing) -> Tensor:
        """(E,) the microbatch's mean of what m follows; sums to 1."""
        if self.track == "counts":
            return routing.counts.to(routing.scores.dtype) / routing.counts.sum().clamp(min=1)
        return real_mean(probabilities(routing, self.score), routing)


def potential_order(potential: Potential) -> float:
    """The q of a potential's q-logarithm; refuses what is not strictly convex."""
    if isinstance(potential, str):
        fixed = {"negentropy": 1.0, "quadratic": 2.0}
        if potential in fixed:
            return fixed[potential]
    elif isinstance(potential, tuple | list) and len(potential) == 2:
        kind, order = potential
        convex_above = {"lp": 1.0, "tsallis": 0.0}
        if kind in convex_above and float(order) > convex_above[kind]:
            return float(order)
    raise ValueError(
        f"PhiBalancing: potential={potential!r}; choose 'negentropy', 'quadratic', ('lp', p) with p > 1, "
        "or ('tsallis', q) with q > 0"
    )


def q_logarithm(x: Tensor, q: float) -> Tensor:
    """ln_q(x) = (x**(q-1) - 1) / (q - 1), log(x) at q = 1; elementwise, 0 at x = 1, with slope 1 there."""
    x = x.clamp(min=_SMALLEST)
    return torch.log(x) if q == 1 else (x ** (q - 1) - 1) / (q - 1)
