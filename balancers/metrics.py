"""How even a load is: pure functions of integer counts.

`counts` is (..., E): assignments per expert, padding excluded; every function reduces the last dimension, to float64 unless
it says otherwise. The fair share is sum(counts) / E. Counts that are all zero have no balance: NaN.
"""

import math
from functools import lru_cache

import torch
from torch import Tensor


def max_vio(counts: Tensor) -> Tensor:
    """MaxVio = max_e c_e / fair share - 1 (arXiv 2408.15664). 0 is perfect; E / K - 1 is everything on K experts."""
    return lis(counts) - 1


def min_vio(counts: Tensor) -> Tensor:
    """min_e c_e / fair share - 1: 0 is perfect, -1 means a dead expert."""
    return counts.amin(dim=-1) / _fair(counts) - 1


def lis(counts: Tensor) -> Tensor:
    """Load-Imbalance Score = max_e c_e / fair share = MaxVio + 1 (Replicate-and-Quantize, arXiv 2602.19938)."""
    return counts.amax(dim=-1) / _fair(counts)


def coefficient_of_variation(counts: Tensor) -> Tensor:
    """Standard deviation of the load over experts, divided by its mean."""
    return counts.double().std(dim=-1, correction=0) / _fair(counts)


def load_entropy(counts: Tensor) -> Tensor:
    """Entropy of the load over experts, divided by log E: 1 is perfect, 0 is everything on one expert."""
    share = counts.double() / counts.sum(dim=-1, keepdim=True)
    most = math.log(counts.shape[-1]) or 1.0  # one expert: entropy 0, reported as perfect below
    entropy = torch.special.entr(share).sum(dim=-1) / most
    return entropy if counts.shape[-1] > 1 else entropy + 1


def top_share(counts: Tensor, fraction: float = 0.1) -> Tensor:
    """Share of all assignments that the busiest `fraction` of the experts receive (at least one expert)."""
    busiest = max(1, round(fraction * counts.shape[-1]))
    return counts.topk(busiest, dim=-1).values.sum(dim=-1).double() / counts.sum(dim=-1)


def dead_experts(counts: Tensor) -> Tensor:
    """How many experts received no token, int64."""
    return (counts == 0).sum(dim=-1)


def intervention_rate(agreed: Tensor, tokens: Tensor, top_k: int) -> Tensor:
    """1 - agreed / (T K), `agreed` = sum_t |TopK(Z_t) and I_t|: the share of choices in which the bias overruled the router.

    A router that chooses at random shows 1 - K / E: a bias that overrules that often looks balanced and is broken.
    """
    return 1 - agreed.double() / (tokens * top_k)


@lru_cache(maxsize=1024)
def sampling_floor(tokens: int, num_experts: int, top_k: int) -> float:
    """The MaxVio that a perfectly fair RANDOM router shows on `tokens` tokens, in expectation: what sampling alone gives.

    Estimated from 512 seeded draws; reproducible, and independent of the global generator. Up to 32 tokens the draws are
    random choices of K experts per token. Beyond, an expert's count is Binomial(T, K/E), and centring the counts puts back
    that they add up to T K.
    """
    if tokens == 0:
        return math.nan
    if top_k == num_experts or num_experts == 1:
        return 0.0
    generator = torch.Generator().manual_seed(0)
    if tokens <= 32:
        chosen = torch.rand(512, tokens, num_experts, generator=generator).topk(top_k, dim=-1).indices.flatten(1)
        drawn = torch.zeros(512, num_experts, dtype=torch.int64).scatter_add_(1, chosen, torch.ones_like(chosen))
        return float(max_vio(drawn).mean())
    trials = torch.full((512, num_experts), float(tokens), dtype=torch.float64)
    counts = torch.binomial(trials, torch.full_like(trials, top_k / num_experts), generator=generator)
    spread = (counts.amax(dim=1) - counts.mean(dim=1)) * math.sqrt(num_experts / (num_experts - 1))
    return float(spread.mean() * num_experts / (tokens * top_k))


def _fair(counts: Tensor) -> Tensor:
    return counts.sum(dim=-1).double() / counts.shape[-1]
