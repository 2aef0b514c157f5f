"""Products whose tiles XLA's SPMD partitioner puts on the wrong devices, told from shardings alone.

The idea
--------
Where both factors are cut along the dims that are summed over, XLA takes a product apart by groups
of devices: those that have the same piece of the sum. Within a group it multiplies what is left,
then it adds up over the groups. If dims of the wanted result are cut by the very same groups, it
takes the result's tiles for those of the product without asking in which *order* the devices of a
group come. The order follows from how the rest of each tensor is cut, and may be another one:

    axes a, b, c of size 2; the sum runs over dim 0 of both factors

    left     [b, c]      groups by b; within a group  c first, then the copies over a
    right    [b, a.c]    groups by b; within a group  a first, then c
    result   [b, a.c]    groups by b; within a group  a first, then c

The left factor is the larger one, so the product is made in its order, c before a, and kept as if
it were in the result's: two of four tiles of each group change places. No error, no warning. (XLA
of jaxlib 0.10.2 and of torch_xla 2.9, under Shardy and GSPMD; docs/decisions/product_order.md.)

It takes a group of at least two axes that can differ in order, next to the axes of the sum: three
axes larger than 1. Two more faults were found by trying, and are told as well:

* batch dims that the factors are cut along, where the result is cut along them by an axis of the
  sum: the piece is taken out of the wrong tile. Two axes are enough: [y, -, x] x [y, x, -] ->
  [x, -, y].
* a sum over several dims that the factors are not cut alike along, where a dim of the result is cut
  by an axis of the sum and that of the factor by another: XLA adds up over too few devices.
  [a, b, c] x [a.c, b, -] -> [a, -].

A result that is not cut by the axes of the sum was never found wrong.

Worked example
--------------
    >>> import numpy as np
    >>> left = np.array([[[0, 4], [1, 5]], [[2, 6], [3, 7]]])    # [b, c], copies over a
    >>> right = np.array([[[0], [1], [4], [5]], [[2], [3], [6], [7]]])    # [b, a.c]
    >>> loses_order(left, right, right, summed=[(0, 0)])
    True
    >>> by_columns = np.array([[[0, 2], [4, 6]], [[1, 3], [5, 7]]])    # [c, a], copies over b
    >>> loses_order(left, right, by_columns, summed=[(0, 0)])
    False
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["MIN_AXES", "Pairs", "Tiles", "dot_sources", "loses_order"]

Tiles = NDArray[Any]
"""Device ids, one dim per dim of the tensor and a last one for the copies of a tile."""

MIN_AXES = 2
"""On a mesh with fewer axes larger than 1 no product is concerned."""

Pairs = Sequence[tuple[int, int]]


def loses_order(
    left: Tiles,
    right: Tiles,
    result: Tiles,
    summed: Pairs,
    batch: Pairs = (),
    sources: Pairs = (),
) -> bool:
    """Tell whether XLA may put the tiles of a product on the wrong devices.

    Args:
        left: How the left factor is cut.
        right: How the right factor is cut.
        result: How the product is to be cut.
        summed: The dims that the sum runs over, each as a dim of `left` and one of `right`.
        batch: The batch dims, likewise. They are the first dims of `result`.
        sources: For each dim of `result` the number of the factor that it comes from, and its dim;
            only asked for where the sum runs over several dims. See :func:`dot_sources`.

    Returns:
        False where it cannot. True where it can: whether the result is wrong then also depends on
        the sizes of the tiles.
    """
    if len(summed) > 1 and _lacks_a_sum(left, right, result, summed, sources):
        return True
    cut = {dim for dim, of in enumerate(batch) if _is_cut(left, right, of)}
    for number in range(1, len(summed) + 1):
        for picked in combinations(summed, number):
            dims = tuple(zip(*picked, strict=True))
            factors = (_rows(left, dims[0]), _rows(right, dims[1]))
            for groups in factors:
                same = [rows for rows in factors if _same_groups(rows, groups)]
                if _loses(groups, same, result, cut):
                    return True
    return False


def dot_sources(ndims: tuple[int, int], summed: Pairs, batch: Pairs = ()) -> Pairs:
    """Return which dim of which factor each dim of a dot comes from: batch, left's, right's.

    Args:
        ndims: The rank of both factors.
        summed: As in :func:`loses_order`.
        batch: As in :func:`loses_order`.
    """
    rest = [
        (factor, dim)
        for factor, ndim in enumerate(ndims)
        for dim in range(ndim)
        if all(pair[factor] != dim for pair in (*summed, *batch))
    ]
    return [*((0, dim) for dim, _ in batch), *rest]


def _lacks_a_sum(left: Tiles, right: Tiles, result: Tiles, summed: Pairs, sources: Pairs) -> bool:
    """Tell whether XLA may add up over too few devices.

    It was found to where the sum runs over several dims that the factors are cut differently along,
    and a dim of the result is cut by an axis of the sum, into as many pieces as the factor's dim
    that it comes from, which is cut by another.
    """
    dims = tuple(zip(*summed, strict=True))
    sums = (_rows(left, dims[0]), _rows(right, dims[1]))
    if all(left.shape[one] == right.shape[other] for one, other in summed) and _same_groups(*sums):
        return False
    for dim, (factor, of_factor) in enumerate(sources):
        wanted = _rows(result, (dim,))
        found = _rows((left, right)[factor], (of_factor,))
        alike = len(wanted) == len(found) > 1 and not _same_groups(wanted, found)
        if alike and any(_cuts(wanted, rows) for rows in sums):
            return True
    return False


def _cuts(pieces: Tiles, groups: Tiles) -> bool:
    """Tell whether devices at one place in `groups` have unequal pieces; both have a row each."""
    ids = np.sort(pieces.ravel())
    piece_of = np.empty(ids.size, dtype=int)
    piece_of[np.searchsorted(ids, pieces)] = np.arange(len(pieces))[:, None]
    found = piece_of[np.searchsorted(ids, groups)]
    return bool((found != found[0]).any())


def _is_cut(left: Tiles, right: Tiles, dims: tuple[int, int]) -> bool:
    return left.shape[dims[0]] > 1 or right.shape[dims[1]] > 1


def _loses(groups: Tiles, same: Sequence[Tiles], result: Tiles, batch: set[int]) -> bool:
    """Tell whether a result that is cut by `groups`, a row each, would be wrong.

    Args:
        groups: The groups of a factor.
        same: The factors of those groups, each with its order of their devices.
        result: How the product is to be cut.
        batch: The batch dims that a factor is cut along.
    """
    copies, count = result.shape[-1], len(groups)
    if count == 1 or (copies > 1 and copies % count == 0):
        return False
    for picked, rows in _in_groups(result, groups):
        if batch.intersection(picked):
            return True
        others = set(range(result.ndim - 1)).difference(picked)
        is_cut = any(result.shape[dim] > 1 for dim in others)
        if is_cut and any(not np.array_equal(_ordered(rows), _ordered(of)) for of in same):
            return True
    return False


def _in_groups(result: Tiles, groups: Tiles) -> Iterator[tuple[tuple[int, ...], Tiles]]:
    """Yield the dims of a result that are cut by just `groups`, with its devices, a row a group."""
    dims = [dim for dim, size in enumerate(result.shape) if size > 1]
    for number in range(1, len(dims) + 1):
        for picked in combinations(dims, number):
            if np.prod([result.shape[dim] for dim in picked]) == len(groups):
                rows = _rows(result, picked)
                if _same_groups(rows, groups):
                    yield picked, rows


def _rows(tiles: Tiles, dims: Sequence[int]) -> Tiles:
    """Return the devices as rows, one for each piece along `dims`, in the order of the others."""
    moved = np.moveaxis(tiles, dims, range(len(dims)))
    count = int(np.prod([tiles.shape[dim] for dim in dims], dtype=int))
    return moved.reshape(count, -1)


def _same_groups(one: Tiles, other: Tiles) -> bool:
    if one.shape != other.shape:
        return False
    return np.array_equal(_sorted(_ordered(one)), _sorted(_ordered(other)))


def _ordered(rows: Tiles) -> Tiles:
    """Return the groups sorted, their devices in the order they come."""
    return rows[np.argsort(rows.min(axis=1))]


def _sorted(rows: Tiles) -> Tiles:
    return np.sort(rows, axis=1)
