"""The order of a data set in an epoch: a permutation that is computed, not stored.

The position of every sample follows from (length, seed, epoch) by integer arithmetic of our own: it
is the same on every process, machine and version of the libraries, so that a resumed job goes on in
the order in which it began. Small data sets are sorted by a hash. Large ones go through a Feistel
network of six rounds, which permutes the numbers below the next power of four; a number that falls
outside of the data set goes through again. A billion samples need no table of 8 GB.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

__all__ = ["shuffled"]

_SORTED_UP_TO = 1 << 16
_ROUNDS = 6


def shuffled(positions: NDArray[np.int64], length: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return which samples stand at some positions of an epoch.

    Args:
        positions: Positions, each from 0 to `length` - 1.
        length: How many samples there are.
        seed: Any integer.
        epoch: Which epoch; each has an order of its own.

    Returns:
        The samples' numbers.

    Example:
        >>> sorted(shuffled(np.arange(5), 5, seed=1, epoch=0).tolist())
        [0, 1, 2, 3, 4]
    """
    key = _key(seed, epoch)
    if length <= _SORTED_UP_TO:
        return _sorted_order(length, key)[positions]
    half_bits = (int(length - 1).bit_length() + 1) // 2
    values = positions.astype(np.uint64)
    outside = np.ones(len(values), dtype=bool)
    while outside.any():
        values[outside] = _feistel(values[outside], half_bits, key)
        outside = values >= length
    return values.astype(np.int64)


@lru_cache(maxsize=4)
def _sorted_order(length: int, key: int) -> NDArray[np.int64]:
    hashed = _mixed(np.arange(length, dtype=np.uint64) + np.uint64(key))
    return np.argsort(hashed, kind="stable").astype(np.int64)


def _key(seed: int, epoch: int) -> int:
    first = _mixed(np.array([seed % 2**64], dtype=np.uint64))
    return int(_mixed(first + np.uint64(epoch % 2**64))[0])


def _feistel(values: NDArray[np.uint64], half_bits: int, key: int) -> NDArray[np.uint64]:
    mask, shift = np.uint64((1 << half_bits) - 1), np.uint64(half_bits)
    left, right = values >> shift, values & mask
    for turn in range(_ROUNDS):
        salt = _mixed(np.array([(key + turn) % 2**64], dtype=np.uint64))[0]
        left, right = right, left ^ (_mixed(right + salt) & mask)
    return (left << shift) | right


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return a hash of each number: splitmix64."""
    with np.errstate(over="ignore"):
        z = values + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))
