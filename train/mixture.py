"""Which sequence comes when: domains mixed by weight, each shuffled once per epoch, all of it a function of a position.

The position is the number of training sequences consumed so far. Nothing else is remembered, so a run resumes exactly,
and any rank of a later data-parallel run can read its own share by arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from ..models.loss import IGNORE
from .errors import ConfigError
from .shuffle import permute
from .store import TokenStore

LONGEST_PERIOD = 1000


@dataclass(frozen=True)
class Batch:
    """One microbatch: B sequences of S tokens."""

    tokens: torch.Tensor  # (B, S) int64
    targets: torch.Tensor  # (B, S) int64, IGNORE where there is none
    document_ids: torch.Tensor  # (B, S) int64, counted within each sequence
    domains: tuple[int, ...]  # the source of each sequence

    @property
    def num_targets(self) -> int:
        return int((self.targets != IGNORE).sum())

    def to(self, device: torch.device) -> Batch:
        return Batch(self.tokens.to(device), self.targets.to(device), self.document_ids.to(device), self.domains)


class Mixture:
    """Training sequences of several domains.

    Draws run in periods: the shortest number of draws (at most 1000) in which every domain's share is a whole number.
    Each period holds exactly these shares, in an order that the seed shuffles. A draw is a sequence in ``mixed`` mode
    and a whole microbatch in ``domain`` mode.
    """

    def __init__(self, stores: Sequence[TokenStore], weights: Sequence[float], seq_len: int, seed: int, mode: str = "mixed"):
        self.stores = list(stores)
        self.seq_len = seq_len
        self.seed = seed
        self.mode = mode
        self.shares = shares_per_period(weights)
        self._domain_of_slot = np.repeat(np.arange(len(weights)), self.shares)
        self._slot_in_domain = np.concatenate([np.arange(share) for share in self.shares])
        for store in self.stores:
            if not store.sequences(seq_len):
                raise ConfigError(
                    f"data.sources: {store.name}: {len(store.tokens)} training tokens do not fill one sequence of {seq_len}"
                )

    def batch(self, position: int, size: int) -> Batch:
        """The `size` sequences at `position`. In ``domain`` mode `position` must be a multiple of `size`."""
        if self.mode == "domain":
            if position % size:
                raise ValueError(f"position {position} is not a multiple of the microbatch size {size}")
            domain, draw = self._draw(np.array([position // size]))
            domains, numbers = np.repeat(domain, size), draw * size + np.arange(size)
        else:
            domains, numbers = self._draw(position + np.arange(size))
        parts = torch.empty(3, size, self.seq_len, dtype=torch.int64)
        for domain in np.unique(domains):
            rows = torch.from_numpy(np.flatnonzero(domains == domain))
            indices = self._shuffled(int(domain), numbers[domains == domain])
            parts[:, rows] = torch.stack(self.stores[domain].read(indices, self.seq_len))
        return Batch(parts[0], parts[1], parts[2], tuple(int(domain) for domain in domains))

    def _draw(self, draws: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(domain, number of the draw within its domain) of each draw."""
        period = len(self._domain_of_slot)
        rounds, places = draws // period, draws % period
        slots = np.concatenate(
            [permute(places[rounds == r], period, self.seed, "mixture", int(r)) for r in np.unique(rounds)]
        )  # draws are consecutive, hence already sorted by round
        domains = self._domain_of_slot[slots]
        return domains, rounds * np.array(self.shares)[domains] + self._slot_in_domain[slots]

    def _shuffled(self, domain: int, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        size = self.stores[domain].sequences(self.seq_len)
        epochs, places = numbers // size, numbers % size
        indices = np.empty_like(numbers)
        for epoch in np.unique(epochs):
            now = epochs == epoch
            indices[now] = permute(places[now], size, self.seed, self.stores[domain].name, int(epoch))
        return indices


def shares_per_period(weights: Sequence[float]) -> list[int]:
    """Whole numbers in the ratio of `weights`, with the smallest sum; rounded to a sum of 1000 when none is exact.

    Raises ConfigError when a weight would round to nothing.
    """
    wanted = np.asarray(weights, dtype=np.float64) / np.sum(weights)
    for period in range(1, LONGEST_PERIOD + 1):
        exact = wanted * period
        if np.abs(exact - exact.round()).max() < 1e-6:
            break
    floors = np.floor(exact + 1e-6).astype(int)
    for late in np.argsort(floors - exact, kind="stable")[: period - floors.sum()]:  # largest remainders get the rest
        floors[late] += 1
    if floors.min() < 1:
        raise ConfigError(f"data.sources: weight {weights[int(floors.argmin())]} is below a thousandth of the mixture")
    return [int(share) for share in floors]
