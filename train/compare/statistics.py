"""Means over seeds, differences within seeds, and what nothing else beats."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Estimate:
    """A mean and its standard error, s / sqrt(n); NaN where one value alone tells nothing of the spread."""

    mean: float
    error: float
    n: int


def estimate(values: Sequence[float]) -> Estimate:
    """Mean of the finite `values` and its standard error."""
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return Estimate(math.nan, math.nan, 0)
    error = statistics.stdev(known) / math.sqrt(len(known)) if len(known) > 1 else math.nan
    return Estimate(statistics.fmean(known), error, len(known))


def paired(values: Mapping[int, float], baseline: Mapping[int, float]) -> Estimate:
    """Estimate of value - baseline over the seeds that both have. What a seed does to both alike cancels."""
    return estimate([values[seed] - baseline[seed] for seed in values if seed in baseline])


def pareto(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices, by the first coordinate, of the points that no other beats: none is as low in both and lower in one."""

    def beaten(index: int) -> bool:
        x, y = points[index]
        return any(a <= x and b <= y and (a < x or b < y) for a, b in points)

    finite = [i for i, point in enumerate(points) if all(map(math.isfinite, point))]
    return sorted((i for i in finite if not beaten(i)), key=lambda i: points[i])
