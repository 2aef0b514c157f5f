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

* On a mesh of two axes: a product without batch dims that are cut; one whose batch dims are cut
  alike in the factors and the result; one whose result no axis of the sum cuts.
* On more: one whose factors *agree*, which is that each axis means one thing in both, if no axis of
  the sum cuts the result, however it is cut. That is the way out for all others: the factors are
  made to agree, the product is told to lie as they say, and is cut further afterwards.
* One whose factors agree, if batch dims are cut alike in the result too, and the devices of each
  group come in one order in both factors and the result. (A gradient that is scattered.)
* One whose factors agree but for a sum that only one of them has cut, if each dim of the result is
  cut as the one that it comes from, or not. (FSDP's forward, whose weights are gathered.)

All others may be wrong.

Worked example
--------------
    >>> import numpy as np
    >>> left = np.array([[[0, 4], [1, 5]], [[2, 6], [3, 7]]])    # [b, c], copies over a
    >>> right = np.array([[[0], [1], [4], [5]], [[2], [3], [6], [7]]])    # [b, a.c]
    >>> product = {"summed": [(0, 0)], "batch": [], "sources": [(0, 1), (1, 1)]}
    >>> loses_order(left, right, right, **product)
    True
    >>> agreeing = np.array([[[0, 1, 4, 5]], [[2, 3, 6, 7]]])    # [b, -], copies over a and c
    >>> columns = np.array([[[0, 2], [1, 3], [4, 6], [5, 7]]])    # [-, a.c], copies over b
    >>> loses_order(agreeing, right, columns, **product)
    False

What the dims of a product mean, and how factors that disagree on an axis are made to agree.

    mn,nk->mk         summed=[(1, 0)]   batch=[]   result=[(0, 0), (1, 1)]

The sum runs over dim 1 of factor 0 and dim 0 of factor 1; the result's first dim is the first of
factor 0, its second one the second of factor 1. Cut as

    [c, a] x [b, c]         m by c, n by a; n by b, k by c

the factors disagree: c cuts the rows of one and the columns of the other, a and b the sum in one of
them each. :meth:`ProductDims.agreed` lets the larger one stay and changes the other by as little as
makes each axis mean one thing:

    [c, a.b] x [a.b, -] -> [c, -]

What cuts a dim is an axis or a part of one, of any kind.

Example:
    >>> product = ProductDims.of_equation("mn,nk->mk")
    >>> left, right = Factor((8, 8), (("c",), ("a",))), Factor((8, 8), (("b",), ("c",)))
    >>> product.agreed(left, right, size=lambda axis: 2)
    ((('c',), ('a', 'b')), (('a', 'b'), ()), (('c',), ()))
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from math import prod
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

__all__ = ["MIN_AXES", "Factor", "Pairs", "ProductDims", "Tiles", "loses_order"]


# ------------------------------------------------------------------------------------- Product dims

Piece = TypeVar("Piece")

Pairs = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Factor(Generic[Piece]):
    """The sizes of a factor's dims, and what cuts each, outermost first."""

    shape: Sequence[int]
    dims: tuple[tuple[Piece, ...], ...]


class ProductDims(NamedTuple):
    """What the dims of a product mean.

    Args:
        summed: The dims that the sum runs over, each as a dim of both factors.
        batch: The batch dims, likewise. They are the first dims of the result.
        result: For each dim of the result the number of the factor that it comes from, and its dim.
    """

    summed: Pairs
    batch: Pairs
    result: Pairs

    @classmethod
    def of_equation(cls, equation: str) -> ProductDims:
        """Read an einsum of two factors, with a letter for each dim and none twice in a factor."""
        factors, output = equation.split("->")
        left, right = factors.split(",")
        shared = [letter for letter in left if letter in right]
        pairs = [(left.index(letter), right.index(letter)) for letter in shared]
        return cls(
            summed=[p for p, letter in zip(pairs, shared, strict=True) if letter not in output],
            batch=[p for p, letter in zip(pairs, shared, strict=True) if letter in output],
            result=[(0, left.index(x)) if x in left else (1, right.index(x)) for x in output],
        )

    def agreed(
        self,
        left: Factor[Piece],
        right: Factor[Piece],
        size: Callable[[Piece], int],
        overlaps: Callable[[Piece, Piece], bool] = operator.eq,
    ) -> tuple[tuple[tuple[Piece, ...], ...], ...]:
        """Return cuts of both factors and of the result in which each axis means one thing.

        Args:
            left: The left factor.
            right: The right factor.
            size: The number of pieces that an axis, or a part of one, cuts into.
            overlaps: Whether two of them share devices' coordinates.

        Returns:
            What cuts the dims of left, right and result. The larger factor is cut as before, the
            left one of two alike, and along the dims that both have also as the other one was; the
            other factor loses what means something else in the larger. No axis of the sum cuts the
            result.
        """
        factors = (left, right)
        large = 1 if prod(right.shape) > prod(left.shape) else 0
        small = 1 - large
        cutting = [piece for dim in factors[large].dims for piece in dim]
        dims: list[list[tuple[Piece, ...]]] = [[], []]
        dims[large] = list(factors[large].dims)
        dims[small] = [
            tuple(piece for piece in dim if not any(overlaps(piece, cut) for cut in cutting))
            for dim in factors[small].dims
        ]
        for pair in (*self.summed, *self.batch):
            first = dims[large][pair[large]]
            sizes = [factor.shape[dim] for factor, dim in zip(factors, pair, strict=True)]
            for pieces in ((*first, *dims[small][pair[small]]), first, ()):
                if not any(of_dim % prod(map(size, pieces)) for of_dim in sizes):
                    break
            dims[large][pair[large]] = dims[small][pair[small]] = pieces
        summed = [set(of_factor) for of_factor in zip(*self.summed, strict=True)] or [set(), set()]
        output = (() if dim in summed[f] else dims[f][dim] for f, dim in self.result)
        return tuple(dims[0]), tuple(dims[1]), tuple(output)


# ------------------------------------------------------------------------------------ Product order

Tiles = NDArray[Any]
"""Device ids, one dim per dim of the tensor and a last one for the copies of a tile."""

MIN_AXES = 2
"""On a mesh with fewer axes larger than 1 no product is concerned."""

_MIN_AXES_OF_ORDERS = 3
"""With fewer, the devices of a group have one order only."""


def loses_order(
    left: Tiles,
    right: Tiles,
    output: Tiles,
    summed: Pairs,
    batch: Pairs,
    sources: Pairs,
    num_axes: int = _MIN_AXES_OF_ORDERS,
) -> bool:
    """Tell whether XLA may put the tiles of a product on the wrong devices.

    Args:
        left: How the left factor is cut.
        right: How the right factor is cut.
        output: How the product is to be cut.
        summed: The dims that the sum runs over, each as a dim of `left` and one of `right`.
        batch: The batch dims, likewise. They are the first dims of `output`.
        sources: For each dim of `output` the number of the factor that it comes from, and its dim.
        num_axes: Of how many axes, or parts of axes, larger than 1 the cuts are made.

    Returns:
        False where it cannot. True where it can: most of those are right, depending on the sizes.
    """
    if not summed:
        return False
    is_cut_by_sum = _sum_cuts(left, right, output, summed)
    if num_axes < _MIN_AXES_OF_ORDERS:
        is_cut = any(
            left.shape[left_dim] > 1 or right.shape[right_dim] > 1 for left_dim, right_dim in batch
        )
        return is_cut_by_sum and is_cut and not _batches_agree(left, right, output, batch)
    agree, is_sum_of_one = _agreement(left, right, summed, batch)
    if not agree and not is_sum_of_one:
        return True
    if not agree or not is_cut_by_sum:
        return not agree and not _is_as_factors_are((left, right), output, batch, sources)
    if batch:
        if not _batches_agree(left, right, output, batch):
            return True
        left, right, output = _of_one_batch_tile(left, right, output, batch)
    parts = (c for n in range(1, len(summed) + 1) for c in combinations(summed, n))
    return not all(_in_one_order(left, right, output, part) for part in parts)


def _is_as_factors_are(
    factors: tuple[Tiles, Tiles], output: Tiles, batch: Pairs, sources: Pairs
) -> bool:
    """Tell whether each dim of the result is cut as one that it comes from, or not cut."""
    for dim, source in enumerate(sources):
        origins = enumerate(batch[dim]) if dim < len(batch) else (source,)
        output_pieces = _rows(output, (dim,))
        if len(output_pieces) > 1 and not any(
            _same_pieces(output_pieces, _rows(factors[factor], (of_factor,)))
            for factor, of_factor in origins
        ):
            return False
    return True


def _agreement(left: Tiles, right: Tiles, summed: Pairs, batch: Pairs) -> tuple[bool, bool]:
    """Tell whether each axis means one thing, and whether but for sums that one factor has cut.

    Those may share axes with other dims of the other factor, which is not cut along the sum.
    """
    of_one = [
        (left_dim, right_dim)
        for left_dim, right_dim in summed
        if 1 in (left.shape[left_dim], right.shape[right_dim])
    ]
    agree = True
    for left_dim, right_dim in product(range(left.ndim - 1), range(right.ndim - 1)):
        left_pieces, right_pieces = _rows(left, (left_dim,)), _rows(right, (right_dim,))
        if (left_dim, right_dim) in of_one:
            agree = agree and len(left_pieces) == len(right_pieces)
        elif (left_dim, right_dim) in summed or (left_dim, right_dim) in batch:
            if not _same_pieces(left_pieces, right_pieces):
                return False, False
        elif not _are_independent(left_pieces, right_pieces):
            agree = False
            if not any(left_dim == pair[0] or right_dim == pair[1] for pair in of_one):
                return False, False
    return agree, True


def _are_independent(left_pieces: Tiles, right_pieces: Tiles) -> bool:
    """Tell whether any piece of the one meets any piece of the other on some device."""
    if 1 in (len(left_pieces), len(right_pieces)):
        return True
    pairs = _piece_of(left_pieces) * len(right_pieces) + _piece_of(right_pieces)
    return len(np.unique(pairs)) == len(left_pieces) * len(right_pieces)


def _piece_of(pieces: Tiles) -> NDArray[Any]:
    """Return the piece that each device has, in the order of their ids."""
    return np.argsort(pieces.ravel()) // pieces.shape[1]


def _same_pieces(pieces: Tiles, other_pieces: Tiles) -> bool:
    return np.array_equal(_sorted(pieces), _sorted(other_pieces))


def _sums(left: Tiles, right: Tiles, summed: Pairs) -> tuple[Tiles, Tiles]:
    """Return the devices of both factors, a row for each piece of the sum."""
    of_left, of_right = zip(*summed, strict=True)
    return _rows(left, of_left), _rows(right, of_right)


def _sum_cuts(left: Tiles, right: Tiles, output: Tiles, summed: Pairs) -> bool:
    """Tell whether devices that differ in nothing but the sum's piece have unequal pieces."""
    pieces = _rows(output, range(output.ndim - 1))
    ids, piece_of_id = np.sort(pieces.ravel()), _piece_of(pieces)
    sums = (piece_of_id[np.searchsorted(ids, rows)] for rows in _sums(left, right, summed))
    return any((of_sum != of_sum[0]).any() for of_sum in sums)


def _batches_agree(left: Tiles, right: Tiles, output: Tiles, batch: Pairs) -> bool:
    """Tell whether factors and result have the same devices at each piece of the batch dims."""
    of_left, of_right = zip(*batch, strict=True)
    shape, pieces = output.shape[: len(batch)], _rows(output, range(len(batch)))
    return all(
        tuple(factor.shape[dim] for dim in dims) == shape
        and _same_pieces(_rows(factor, dims), pieces)
        for factor, dims in ((left, of_left), (right, of_right))
    )


def _of_one_batch_tile(left: Tiles, right: Tiles, output: Tiles, batch: Pairs) -> Iterator[Tiles]:
    """Yield how factors and result are cut inside of the first piece of the batch dims."""
    of_left, of_right = zip(*batch, strict=True)
    for tiles, dims in ((left, of_left), (right, of_right), (output, range(len(batch)))):
        yield tiles[tuple(slice(1) if dim in dims else slice(None) for dim in range(tiles.ndim))]


def _in_one_order(left: Tiles, right: Tiles, output: Tiles, summed: Pairs) -> bool:
    """Tell whether both factors have the same groups, and the result's order in each is theirs."""
    left_rows, right_rows = _sums(left, right, summed)
    if not np.array_equal(left_rows, right_rows):
        return False
    ids = output.ravel()
    by_id = np.argsort(ids)
    places = by_id[np.searchsorted(ids, left_rows, sorter=by_id)]
    return bool((np.diff(places, axis=1) > 0).all())


def _rows(tiles: Tiles, dims: Sequence[int]) -> Tiles:
    """Return the devices as rows, one for each piece along `dims`, in the order of the others."""
    dims_first = np.moveaxis(tiles, dims, range(len(dims)))
    count = int(np.prod([tiles.shape[dim] for dim in dims], dtype=int))
    return dims_first.reshape(count, -1)


def _sorted(rows: Tiles) -> Tiles:
    return np.sort(rows, axis=1)
