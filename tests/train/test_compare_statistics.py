"""Means, standard errors, paired differences and Pareto fronts."""

import math
import random

import pytest

from evenload.train.compare.statistics import estimate, paired, pareto


def test_mean_and_standard_error() -> None:
    found = estimate([1.0, 2.0, 6.0])
    assert (found.mean, found.n) == (3.0, 3)
    assert found.error == pytest.approx(math.sqrt((4 + 1 + 9) / 2 / 3))
    assert estimate([5.0]).mean == 5
    assert math.isnan(estimate([5.0]).error)
    assert estimate([math.nan, 2.0]).n == 1
    assert estimate([]).n == 0


def test_a_shift_of_every_seed_is_certain_however_far_the_seeds_lie_apart() -> None:
    baseline = {0: 1.0, 1: 5.0, 2: 100.0, 3: 7.0}
    found = paired({0: 1.5, 1: 5.5, 2: 100.5, 9: 0.0}, baseline)
    assert (found.mean, found.error, found.n) == (pytest.approx(0.5), pytest.approx(0, abs=1e-12), 3)


@pytest.mark.parametrize("seed", range(20))
def test_the_front_is_what_nothing_beats(seed: int) -> None:
    chooser = random.Random(seed)
    points = [(chooser.randint(0, 6), chooser.randint(0, 6)) for _ in range(15)]
    front = pareto(points)
    assert [points[i][0] for i in front] == sorted(points[i][0] for i in front)
    for i, (x, y) in enumerate(points):
        beaten = any(a <= x and b <= y and (a, b) != (x, y) for a, b in points)
        assert (i in front) is not beaten


def test_what_is_not_finite_is_on_no_front() -> None:
    assert pareto([(math.nan, 0.0), (1.0, 1.0), (0.0, math.inf)]) == [1]
