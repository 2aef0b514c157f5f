"""Products whose tiles XLA's SPMD partitioner may put on the wrong devices, told from shardings.

The idea
--------
Where both factors are cut along the dims that are summed over, XLA takes a product apart by groups
of devices: those that have the same piece of the sum. Within a group it multiplies what is left,
then it adds up over the groups. If the wanted result is cut by an axis of the sum as well, it looks
for groups in the result that fit, without asking in which *order* the devices of a group come. The
order follows from how the rest of each tensor is cut, and may be another one:

    axes a, b, c of size 2; the sum runs over dim 0 of both factors

    left     [b, c]      groups by b; within a group  c first, then the copies over a
    right    [b, a.c]    groups by b; within a group  a first, then c
    result   [b, a.c]    groups by b; within a group  a first, then c

The left factor is the larger one, so the product is made in its order, c before a, and kept as if
it were in the result's: two of four tiles of each group change places. No error, no warning. (XLA
of jaxlib 0.10.2 and of torch_xla 2.9, under Shardy and GSPMD; docs/decisions/product_order.md.)

Several faults of this kind were found by trying, each by a case that a narrower rule had missed. So
the rule here does not follow them one by one. It says which products are surely safe:

* None of the sum's axes cuts the result. Never found wrong, and the way out for all others: a
  product that is told to lie so, and is cut further afterwards, is right.
* Factors and result are cut alike along the batch dims, and beside that
  - the mesh has two axes, so that a group is one axis, or
  - both factors are cut along the sum, by the same groups, whose devices come in one order in both
    factors and in the result, or
  - one of them is, and each dim of the result is cut as the factor's that it comes from, or not.

Whatever else cuts a result by an axis of the sum may be wrong.

Worked example
--------------
    >>> import numpy as np
    >>> left = np.array([[[0, 4], [1, 5]], [[2, 6], [3, 7]]])    # [b, c], copies over a
    >>> right = np.array([[[0], [1], [4], [5]], [[2], [3], [6], [7]]])    # [b, a.c]
    >>> product = {"summed": [(0, 0)], "batch": [], "sources": [(0, 1), (1, 1)]}
    >>> loses_order(left, right, right, **product)
    True
    >>> by_columns = np.array([[[0, 2], [4, 6]], [[1, 3], [5, 7]]])    # [c, a], copies over b
    >>> loses_order(left, right, by_columns, **product)
    False
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["MIN_AXES", "Pairs", "Tiles", "loses_order"]

Tiles = NDArray[Any]
"""Device ids, one dim per dim of the tensor and a last one for the copies of a tile."""

MIN_AXES = 2
"""On a mesh with fewer axes larger than 1 no product is concerned."""

_MIN_AXES_OF_ORDERS = 3
"""With fewer, the devices of a group have one order only."""

Pairs = Sequence[tuple[int, int]]


def loses_order(
    left: Tiles,
    right: Tiles,
    result: Tiles,
    summed: Pairs,
    batch: Pairs,
    sources: Pairs,
    num_axes: int = _MIN_AXES_OF_ORDERS,
) -> bool:
    """Tell whether XLA may put the tiles of a product on the wrong devices.

    Args:
        left: How the left factor is cut.
        right: How the right factor is cut.
        result: How the product is to be cut.
        summed: The dims that the sum runs over, each as a dim of `left` and one of `right`.
        batch: The batch dims, likewise. They are the first dims of `result`.
        sources: For each dim of `result` the number of the factor that it comes from, and its dim.
        num_axes: Of how many axes, or parts of axes, larger than 1 the cuts are made.

    Returns:
        False where it cannot. True where it can: most of those are right, depending on the sizes.
    """
    if not summed or not _sum_cuts(left, right, result, summed):
        return False
    if any(left.shape[one] > 1 or right.shape[other] > 1 for one, other in batch):
        if not _batches_agree(left, right, result, batch):
            return True
        left, right, result = _of_one_batch_tile(left, right, result, batch)
    if num_axes < _MIN_AXES_OF_ORDERS:
        return False
    if any(len(rows) == 1 for rows in _sums(left, right, summed)):
        return not _is_as_factors_are((left, right), result, sources)
    parts = (c for n in range(1, len(summed) + 1) for c in combinations(summed, n))
    return not all(_in_one_order(left, right, result, part) for part in parts)


def _is_as_factors_are(factors: tuple[Tiles, Tiles], result: Tiles, sources: Pairs) -> bool:
    """Tell whether each dim of the result is cut as the one that it comes from, or not cut."""
    for dim, (factor, of_factor) in enumerate(sources):
        wanted, found = _rows(result, (dim,)), _rows(factors[factor], (of_factor,))
        if len(wanted) > 1 and not np.array_equal(_sorted(wanted), _sorted(found)):
            return False
    return True


def _sums(left: Tiles, right: Tiles, summed: Pairs) -> tuple[Tiles, Tiles]:
    """Return the devices of both factors, a row for each piece of the sum."""
    of_left, of_right = zip(*summed, strict=True)
    return _rows(left, of_left), _rows(right, of_right)


def _sum_cuts(left: Tiles, right: Tiles, result: Tiles, summed: Pairs) -> bool:
    """Tell whether devices that differ in nothing but the sum's piece have unequal pieces."""
    pieces = _rows(result, range(result.ndim - 1))
    return any(_cuts(pieces, rows) for rows in _sums(left, right, summed))


def _cuts(pieces: Tiles, groups: Tiles) -> bool:
    """Tell whether devices at one place in `groups` have unequal pieces; both have a row each."""
    ids = np.sort(pieces.ravel())
    piece_of = np.empty(ids.size, dtype=int)
    piece_of[np.searchsorted(ids, pieces)] = np.arange(len(pieces))[:, None]
    found = piece_of[np.searchsorted(ids, groups)]
    return bool((found != found[0]).any())


def _batches_agree(left: Tiles, right: Tiles, result: Tiles, batch: Pairs) -> bool:
    """Tell whether factors and result have the same devices at each piece of the batch dims."""
    of_left, of_right = zip(*batch, strict=True)
    shape, wanted = result.shape[: len(batch)], _sorted(_rows(result, range(len(batch))))
    return all(
        tuple(factor.shape[dim] for dim in dims) == shape
        and np.array_equal(_sorted(_rows(factor, dims)), wanted)
        for factor, dims in ((left, of_left), (right, of_right))
    )


def _of_one_batch_tile(left: Tiles, right: Tiles, result: Tiles, batch: Pairs) -> Iterator[Tiles]:
    """Yield how factors and result are cut inside of the first piece of the batch dims."""
    of_left, of_right = zip(*batch, strict=True)
    for tiles, dims in ((left, of_left), (right, of_right), (result, range(len(batch)))):
        yield tiles[tuple(slice(1) if dim in dims else slice(None) for dim in range(tiles.ndim))]


def _in_one_order(left: Tiles, right: Tiles, result: Tiles, summed: Pairs) -> bool:
    """Tell whether both factors have the same groups, and the result's order in each is theirs."""
    rows, others = _sums(left, right, summed)
    if not np.array_equal(rows, others):
        return False
    ids = result.ravel()
    by_id = np.argsort(ids)
    places = by_id[np.searchsorted(ids, rows, sorter=by_id)]
    return bool((np.diff(places, axis=1) > 0).all())


def _rows(tiles: Tiles, dims: Sequence[int]) -> Tiles:
    """Return the devices as rows, one for each piece along `dims`, in the order of the others."""
    moved = np.moveaxis(tiles, dims, range(len(dims)))
    count = int(np.prod([tiles.shape[dim] for dim in dims], dtype=int))
    return moved.reshape(count, -1)


def _sorted(rows: Tiles) -> Tiles:
    return np.sort(rows, axis=1)
