"""Device orders as mixed-radix digits.

An order of n devices is often "iota, reshaped and transposed": position i of the walk is a sum of
digits of i times strides. Such a walk is written as (size, stride) pairs, outer to inner, and takes
O(number of axes) space whatever n is. Walking 0 1 2 3 4 5 6 7 column by column over a 2 x 4 grid:

    0 4 1 5 2 6 3 7   =   outer digit (4, 1), inner digit (2, 4)

The inner digit makes steps of 4 and runs through 2 values; the outer one makes steps of 1 and runs
through 4. Digits nest: with the strides in ascending order, each is a multiple of the stride times
the size before it, so digit (size, stride) of a position p is (p // stride) % size.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from mesh_utils.argument_types import argument_types

Digit: TypeAlias = tuple[int, int]
"""(size, stride): `size` values, `stride` apart."""

IntArray: TypeAlias = NDArray[np.int64]


@argument_types
def mixed_radix(positions: NDArray[np.integer]) -> tuple[Digit, ...] | None:
    """Writes a walk as nested digits, where it is one.

    Args:
        positions: the walk, 1-D, [n] integers. A permutation of 0..n-1, or part of one.

    Returns:
        The fewest (size, stride) digits, outer to inner, that give `positions`; () for [0]; None
        when there are none (the walk starts elsewhere than at 0, repeats, goes backwards, ...).

    Example:
        >>> mixed_radix(np.array([0, 4, 1, 5, 2, 6, 3, 7]))
        ((4, 1), (2, 4))
        >>> mixed_radix(np.array([0, 2, 1])) is None
        True
    """
    if positions.ndim != 1 or positions.size == 0 or positions[0] != 0:
        return None
    inner_first: list[Digit] = []
    rest = positions.astype(np.int64, copy=False)
    while rest.size > 1:
        digit = _inner_digit(rest)
        if digit is None:
            return None
        inner_first.append(digit)
        rest = rest[:: digit[0]]
    digits = tuple(reversed(inner_first))
    return digits if are_nested(digits) else None


@argument_types
def mixed_radix_positions(digits: Iterable[Digit]) -> IntArray:
    """Walks digits: the inverse of `mixed_radix`.

    Args:
        digits: (size, stride) pairs, outer to inner.

    Returns:
        The positions, [product of the sizes].

    Example:
        >>> mixed_radix_positions(((4, 1), (2, 4))).tolist()
        [0, 4, 1, 5, 2, 6, 3, 7]
    """
    positions = np.zeros(1, np.int64)
    for size, stride in digits:
        steps = np.arange(size, dtype=np.int64) * stride
        positions = (positions[:, None] + steps).reshape(-1)
    return positions


def axis_digits(positions: IntArray) -> tuple[tuple[Digit, ...], ...] | None:
    """Writes an N-D array of positions as digits, axis by axis.

    Args:
        positions: integers of the mesh's shape; they may start anywhere.

    Returns:
        For each axis its digits, outer to inner, such that a position is the first one plus what
        each axis adds; None when the axes do not add up so, or do not nest.

    Example:
        >>> axis_digits(np.arange(8).reshape(2, 4).T)
        (((4, 1),), ((2, 4),))
    """
    first = positions[(0,) * positions.ndim]
    digits: list[tuple[Digit, ...]] = []
    expected = first
    for axis in range(positions.ndim):
        line = tuple(slice(None) if i == axis else 0 for i in range(positions.ndim))
        walk = positions[line] - first
        found = mixed_radix(walk)
        if found is None:
            return None
        digits.append(found)
        expected = expected[..., None] + walk
    nested = are_nested(digit for found in digits for digit in found)
    return tuple(digits) if nested and np.array_equal(expected, positions) else None


def are_nested(digits: Iterable[Digit]) -> bool:
    """Whether the digits, in any order, are digits of one number.

    Args:
        digits: (size, stride) pairs.

    Returns:
        True if no two of them overlap: each stride is a multiple of every smaller stride times its
        size.

    Example:
        >>> are_nested([(2, 4), (4, 1)]), are_nested([(2, 3), (2, 1)])
        (True, False)
    """
    span = 1
    for size, stride in sorted(digits, key=lambda digit: digit[1]):
        if stride <= 0 or stride % span:
            return False
        span = stride * size
    return True


def _inner_digit(walk: IntArray) -> Digit | None:
    """The innermost digit of a walk of two or more positions, or None."""
    stride = int(walk[1] - walk[0])
    if stride <= 0:
        return None
    breaks = np.diff(walk) != stride
    size = int(breaks.argmax()) + 1 if breaks.any() else walk.size
    if walk.size % size:
        return None
    # The greedy run is right for every mixed-radix walk; the other runs must now repeat it.
    steps = np.arange(size, dtype=np.int64) * stride
    runs = walk.reshape(-1, size)
    return (size, stride) if np.array_equal(runs, runs[:, :1] + steps) else None
