"""Arithmetic on digits: how an index walks through the devices of the root, in O(rank).

A digit is `(size, stride)`. A walk is a sequence of digits, outer to inner; index i of the walk is
written in the mixed radix of the sizes and the place reached is the sum of digit value times
stride. `((2, 4), (4, 1))` walks 0..7 in order, and so does its merged form `((8, 1),)`; `((4, 1),
(2, 4))` walks 0, 4, 1, 5, 2, 6, 3, 7.

The merged form of a walk is unique: the innermost digit is the longest run of constant stride.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import TypeAlias

from mesh_utils import Digit

Walk: TypeAlias = tuple[Digit, ...]


def walk_size(walk: Iterable[Digit]) -> int:
    """Number of places a walk visits."""
    return prod(size for size, _ in walk)


def merged(walk: Iterable[Digit]) -> Walk:
    """The same walk with the fewest digits.

    Example:
        >>> merged(((2, 4), (1, 7), (4, 1)))
        ((8, 1),)
    """
    result: list[Digit] = []
    for size, stride in walk:
        if size == 1:
            continue
        if result and result[-1][1] == size * stride:
            result[-1] = (result[-1][0] * size, stride)
        else:
            result.append((size, stride))
    return tuple(result)


def split_walk(walk: Sequence[Digit], inner_size: int) -> tuple[Walk, Walk] | None:
    """Cuts a walk into an outer and an inner one, the inner of `inner_size` places.

    Returns:
        (outer, inner), or None where the cut falls inside a digit that it does not divide.

    Example:
        >>> split_walk(((8, 1),), 4)
        (((2, 4),), ((4, 1),))
    """
    inner: list[Digit] = []
    needed = inner_size
    position = len(walk)
    while needed > 1 and position:
        position -= 1
        size, stride = walk[position]
        if needed % size == 0:
            inner.insert(0, (size, stride))
            needed //= size
        elif size % needed == 0:
            inner.insert(0, (needed, stride))
            outer = (*walk[:position], (size // needed, stride * needed))
            return outer, tuple(inner)
        else:
            return None
    return None if needed > 1 else (tuple(walk[:position]), tuple(inner))


def walk_part(walk: Sequence[Digit], size: int, inner: int) -> Walk | None:
    """The digits of `(index // inner) % size`, or None where they are no whole digits.

    Example:
        >>> walk_part(((4, 2),), size=2, inner=2)
        ((2, 4),)
    """
    cut = split_walk(walk, inner)
    cut = cut and split_walk(cut[0], size)
    return cut and cut[1]


def remaining_walk(walk: Iterable[Digit], total: int) -> Walk | None:
    """The digits of range(total) that a walk does not use, largest stride first.

    Returns:
        The rest, so that both together walk range(total) once, or None if there is no such rest.

    Example:
        >>> remaining_walk(((2, 2),), total=8)
        ((2, 4), (2, 1))
    """
    rest: list[Digit] = []
    free = total
    for size, stride in sorted(
        (digit for digit in walk if digit[0] > 1), key=_stride, reverse=True
    ):
        count, remainder = divmod(free, size * stride)
        if remainder or not count:
            return None
        if count > 1:
            rest.append((count, size * stride))
        free = stride
    if free > 1:
        rest.append((free, 1))
    return tuple(rest)


def iota_form(walk: Iterable[Digit]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """XLA's (reshape_dims, transpose_perm) of a walk over all of range(n), in the shortest form.

    Example:
        >>> iota_form(((4, 1), (2, 4)))
        ((2, 4), (1, 0))
    """
    digits = merged(walk) or ((1, 1),)
    order = sorted(range(len(digits)), key=lambda index: digits[index][1], reverse=True)
    perm = [0] * len(digits)
    for rank, index in enumerate(order):
        perm[index] = rank
    return tuple(digits[index][0] for index in order), tuple(perm)


def iota_walk(reshape_dims: Sequence[int], transpose_perm: Sequence[int]) -> Walk:
    """The walk of XLA's iota form; the inverse of `iota_form`, up to merging.

    Example:
        >>> iota_walk((2, 4), (1, 0))
        ((4, 1), (2, 4))
    """
    strides = [1] * len(reshape_dims)
    for index in range(len(reshape_dims) - 2, -1, -1):
        strides[index] = strides[index + 1] * reshape_dims[index + 1]
    return tuple((reshape_dims[index], strides[index]) for index in transpose_perm)


def place_in_walk(position: int, reshape_dims: Sequence[int], transpose_perm: Sequence[int]) -> int:
    """When the walk of an iota form comes to a position in range(n).

    Example:
        >>> place_in_walk(5, (2, 4), (1, 0))
        3
    """
    values: list[int] = []
    for size in reversed(reshape_dims):
        position, value = divmod(position, size)
        values.append(value)
    values.reverse()
    place = 0
    for index in transpose_perm:
        place = place * reshape_dims[index] + values[index]
    return place


def _stride(digit: Digit) -> int:
    return digit[1]
