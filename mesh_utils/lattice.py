"""Shortest ways between chips of a mesh, a torus or a twisted torus.

Chips that differ by a period are the same chip. A dim of N chips that wraps has the period N along
it; in a twisted torus of k x k x 2k or k x 2k x 2k chips the period of a short dim is k along it
and k along each long dim. The shortest way to a chip is then the shortest of the differences that
lead to it; there may be several, which share the traffic.
"""

import itertools
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

IntArray: TypeAlias = NDArray[np.int64]
Box: TypeAlias = tuple[tuple[int, int, int], tuple[bool, bool, bool], bool]


def periods(box: Box) -> IntArray:
    """The periods of a box of chips.

    Args:
        box: its shape, which dims wrap, and whether it is a twisted torus.

    Returns:
        One row (x, y, z) per dim that wraps.

    Example:
        >>> periods(((4, 4, 8), (True, True, True), True)).tolist()
        [[4, 0, 4], [0, 4, 4], [0, 0, 8]]
    """
    shape, wrap, twist = box
    rows: list[list[int]] = []
    for dim in range(3):
        if not wrap[dim]:
            continue
        row = [shape[dim] if other == dim else 0 for other in range(3)]
        if twist and shape[dim] == min(shape):
            row = [
                shape[dim] if other == dim or shape[other] > shape[dim] else 0 for other in range(3)
            ]
        rows.append(row)
    return np.array(rows, np.int64).reshape(-1, 3)


def shortest_ways(box: Box, differences: IntArray) -> tuple[IntArray, NDArray[np.float64]]:
    """The shortest ways to go given differences.

    Args:
        box: its shape, which dims wrap, and whether it is a twisted torus.
        differences: target less source, x, y, z, [n, 3].

    Returns:
        Steps in x, y and z, signed, [ways, n, 3], and how much of the traffic takes each, [ways,
        n]: 0 for those that are not shortest, and equal for those that are.

    Example:
        >>> ring = ((4, 1, 1), (True, False, False), False)
        >>> steps, shares = shortest_ways(ring, np.array([[3, 0, 0]]))
        >>> steps[shares > 0].tolist()
        [[-1, 0, 0]]
    """
    rows = periods(box)
    # One period each way is not enough where those of a twisted torus are combined.
    most = 2 if box[2] else 1
    counts = itertools.product(range(-most, most + 1), repeat=len(rows))
    shifts = np.array([np.array(count) @ rows for count in counts], np.int64).reshape(-1, 3)
    steps = differences[None, :, :] + shifts[:, None, :]
    lengths = np.abs(steps).sum(axis=2)
    shortest = lengths == lengths.min(axis=0)
    return steps, shortest / shortest.sum(axis=0)


def canonical(box: Box, chips: IntArray) -> IntArray:
    """The chips of the box that coordinates outside of it mean.

    Args:
        box: its shape, which dims wrap, and whether it is a twisted torus.
        chips: x, y, z, [..., 3]; outside of the box only in dims that wrap.

    Returns:
        Their places in the box, [..., 3].

    Example:
        >>> canonical(((4, 4, 8), (True, True, True), True), np.array([4, 0, 1])).tolist()
        [0, 0, 5]
    """
    rows = periods(box)
    found = chips.copy()
    # The periods of short dims shift long ones too, so that those are set right last.
    for row in rows[np.argsort([-np.count_nonzero(row) for row in rows], kind="stable")]:
        dim = int(np.flatnonzero(row)[0]) if np.count_nonzero(row) == 1 else _own_dim(box, row)
        found = found - (found[..., dim] // box[0][dim])[..., None] * row
    return found


def _own_dim(box: Box, row: IntArray) -> int:
    """The short dim that a period belongs to: the one in which long dims do not share."""
    used = np.flatnonzero(row)
    return int(next(dim for dim in used if box[0][dim] == min(box[0])))
