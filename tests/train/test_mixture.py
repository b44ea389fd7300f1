from collections import Counter

import numpy as np
import pytest
import torch

from evenload.train import ConfigError, Mixture
from evenload.train.mixture import shares_per_period
from evenload.train.shuffle import permute
from evenload.train.store import TokenStore

SEQ = 4


def store(name: str, sequences: int, offset: int) -> TokenStore:
    """Sequences that are told apart by their first token."""
    tokens = np.arange(sequences * SEQ + 1) + offset
    return TokenStore(name, tokens.astype(np.uint32), np.array([0, len(tokens)]), 0)


def mixture(mode: str = "mixed", seed: int = 0) -> Mixture:
    return Mixture([store("a", 30, 0), store("b", 7, 1000)], [0.75, 0.25], SEQ, seed, mode)


def drawn(batches: list[torch.Tensor]) -> list[int]:
    return torch.cat(batches)[:, 0].tolist()


@pytest.mark.parametrize("size", [1, 2, 3, 5, 16, 17, 1000, 4097])
def test_permute_is_a_permutation(size: int) -> None:
    moved = permute(np.arange(size), size, 0, "a", 3)
    assert sorted(moved.tolist()) == list(range(size))
    assert (permute(np.arange(size)[::-1], size, 0, "a", 3) == moved[::-1]).all(), "each index is moved by itself"


def test_permutations_of_other_keys_differ_and_mix() -> None:
    keys = [permute(np.arange(1000), 1000, 0, "a", epoch) for epoch in range(50)]
    assert len({tuple(key) for key in keys}) == 50
    first = np.array([key[0] for key in keys])
    assert abs(first.mean() - 500) < 150
    pairs = Counter(int(permute(np.array([0]), 2, seed)[0]) for seed in range(400))
    assert 150 < pairs[0] < 250


def test_permute_refuses_an_index_outside() -> None:
    with pytest.raises(ValueError, match="index 5 outside a permutation of 5"):
        permute(np.array([5]), 5, 0)


def test_each_sequence_comes_once_per_epoch() -> None:
    mixed = mixture()
    first = drawn([mixed.batch(position, 4).tokens for position in range(0, 40, 4)])  # 30 of a, 10 of b
    of_a = [token for token in first if token < 1000]
    of_b = [token for token in first if token >= 1000]
    assert sorted(of_a) == [SEQ * i for i in range(30)]
    assert sorted(of_b[:7]) == [1000 + SEQ * i for i in range(7)], "the first epoch of b"
    assert len(set(of_b[7:])) == 3, "its second epoch"
    second = [t for t in drawn([mixed.batch(position, 4).tokens for position in range(40, 80, 4)]) if t < 1000]
    assert sorted(second) == sorted(of_a)
    assert second != of_a


def test_a_position_says_it_all() -> None:
    """Other sizes of microbatch, other orders of asking, a new object: the same sequences at the same position."""
    whole = drawn([mixture().batch(0, 64).tokens])
    assert drawn([mixture().batch(position, 1).tokens for position in range(64)]) == whole
    assert drawn([mixture().batch(48, 16).tokens]) == whole[48:]
    assert drawn([mixture(seed=1).batch(0, 64).tokens]) != whole


def test_weights_hold_in_every_period() -> None:
    mixed = mixture()
    assert mixed.shares == [3, 1]
    for period in range(20):
        assert Counter(mixed.batch(4 * period, 4).domains) == {0: 3, 1: 1}


def test_in_domain_mode_a_microbatch_has_one_domain() -> None:
    mixed = mixture("domain")
    batches = [mixed.batch(position, 5) for position in range(0, 400, 5)]
    assert all(len(set(batch.domains)) == 1 for batch in batches)
    assert Counter(batch.domains[0] for batch in batches) == {0: 60, 1: 20}
    firsts = drawn([batch.tokens for batch in batches if batch.domains[0] == 0])
    assert sorted(firsts[:30]) == [SEQ * i for i in range(30)]
    assert (mixture("domain").batch(200, 5).tokens == batches[40].tokens).all()
    with pytest.raises(ValueError, match="position 3 is not a multiple of the microbatch size 5"):
        mixed.batch(3, 5)


@pytest.mark.parametrize(
    ("weights", "shares"),
    [([1], [1]), ([0.5, 0.5], [1, 1]), ([0.7, 0.3], [7, 3]), ([2, 1, 1], [2, 1, 1]), ([1, 1, 1], [1, 1, 1]), ([9, 3], [3, 1])],
)
def test_shares_are_the_smallest_whole_numbers(weights: list[float], shares: list[int]) -> None:
    assert shares_per_period(weights) == shares


def test_odd_shares_are_rounded_to_a_thousandth() -> None:
    shares = shares_per_period([np.pi, 1, 0.01])
    assert sum(shares) == 1000
    assert shares == [757, 241, 2]
    with pytest.raises(ConfigError, match="below a thousandth"):
        shares_per_period([1, 1e-5])


def test_a_store_without_a_sequence_is_refused() -> None:
    with pytest.raises(ConfigError, match="a: 1 training tokens do not fill one sequence of 4"):
        Mixture([store("a", 0, 0)], [1], SEQ, 0)
