"""Parts of a tensor as one slice per dim: cut to a size in bytes, and cut against each other."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from math import prod

from xla_dtensor.dtensor.dcp import Index, extents_of

__all__ = ["WINDOW_BYTES", "intersection", "relative", "shifted", "whole", "windows"]

WINDOW_BYTES = 128 << 20
"""Most bytes of a tensor that are on the host at once where it is moved piece by piece.

A matrix of an 8B model's feed-forward part, 14336 x 4096 in bfloat16, is one piece of this size.
"""


def whole(shape: Sequence[int]) -> Index:
    """Return the part that is everything."""
    return tuple(slice(0, size) for size in shape)


def windows(shape: Sequence[int], itemsize: int, limit: int = WINDOW_BYTES) -> Iterator[Index]:
    """Cut a tensor into parts that follow one another in memory.

    Args:
        shape: Its shape. A tensor without elements has no parts.
        itemsize: Bytes of an element.
        limit: Most bytes of a part, unless one element is larger.

    Yields:
        One slice per dim, in row-major order.

    Example:
        >>> list(windows((3, 4), itemsize=2, limit=16))
        [(slice(0, 2, None), slice(0, 4, None)), (slice(2, 3, None), slice(0, 4, None))]
    """
    shape = tuple(shape)
    if not all(shape):
        return
    if prod(shape) * itemsize <= limit or not shape:
        yield whole(shape)
        return
    cut = 0
    while cut < len(shape) - 1 and prod(shape[cut + 1 :]) * itemsize > limit:
        cut += 1
    step = max(1, limit // (prod(shape[cut + 1 :]) * itemsize))
    for place in itertools.product(*map(range, shape[:cut])):
        for start in range(0, shape[cut], step):
            part = slice(start, min(start + step, shape[cut]))
            yield (*(slice(i, i + 1) for i in place), part, *whole(shape[cut + 1 :]))


def intersection(first: Index, second: Index) -> Index | None:
    """Return what two parts of a tensor have in common, if they do.

    Example:
        >>> intersection((slice(0, 4),), (slice(3, 9),))
        (slice(3, 4, None),)
    """
    common = tuple(
        slice(max(a.start, b.start), min(a.stop, b.stop))
        for a, b in zip(first, second, strict=True)
    )
    return common if all(extent > 0 for extent in extents_of(common)) else None


def relative(part: Index, base: Index) -> Index:
    """Return where `part` lies in `base`, which contains it.

    Example:
        >>> relative((slice(3, 4),), (slice(2, 9),))
        (slice(1, 2, None),)
    """
    return tuple(
        slice(p.start - b.start, p.stop - b.start) for p, b in zip(part, base, strict=True)
    )


def shifted(part: Index, base: Index) -> Index:
    """Return a part that is said relative to `base`, in the terms of the whole tensor.

    Example:
        >>> shifted((slice(1, 2),), (slice(2, 9),))
        (slice(3, 4, None),)
    """
    return tuple(
        slice(p.start + b.start, p.stop + b.start) for p, b in zip(part, base, strict=True)
    )
