"""A shuffle without a buffer: permutations that are computed at any index, from a key alone.

`permute(i, n, key)` is a bijection of range(n): a four-round Feistel network on the smallest even number of bits that
holds n, walked until it lands inside (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002).
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

ROUNDS = 4
Indices = NDArray[np.uint64]


def permute(indices: NDArray[np.integer], size: int, *key: int | str) -> NDArray[np.int64]:
    """Where each index of range(size) goes under the permutation that `key` names. Any shape, int64."""
    half = np.uint64(max(1, (max(size - 1, 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    keys = np.frombuffer(hashlib.sha256(repr(key).encode()).digest(), dtype="<u8")[:ROUNDS]
    values = np.asarray(indices).astype(np.uint64)
    if values.size and int(values.max()) >= size:
        raise ValueError(f"index {int(values.max())} outside a permutation of {size}")
    flat = values.ravel().copy()
    walking = np.arange(flat.size)
    while walking.size:
        moved = _feistel(flat[walking], half, mask, keys)
        flat[walking] = moved
        walking = walking[moved >= size]
    return flat.reshape(values.shape).astype(np.int64)


def _feistel(values: Indices, half: np.uint64, mask: np.uint64, keys: Indices) -> Indices:
    left, right = values >> half, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right + key) & mask)
    return (left << half) | right


def _mix(values: Indices) -> Indices:
    """The finaliser of splitmix64: every input bit reaches every output bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
