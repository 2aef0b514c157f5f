"""What the dims of a product mean, and how factors that disagree on an axis are made to agree.

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Generic, NamedTuple, TypeVar

__all__ = ["Factor", "Pairs", "ProductDims"]

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
        factors, result = equation.split("->")
        left, right = factors.split(",")
        both = [letter for letter in left if letter in right]
        pairs = [(left.index(letter), right.index(letter)) for letter in both]
        return cls(
            summed=[p for p, letter in zip(pairs, both, strict=True) if letter not in result],
            batch=[p for p, letter in zip(pairs, both, strict=True) if letter in result],
            result=[(0, left.index(x)) if x in left else (1, right.index(x)) for x in result],
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
        used = [piece for dim in factors[large].dims for piece in dim]
        dims: list[list[tuple[Piece, ...]]] = [[], []]
        dims[large] = list(factors[large].dims)
        dims[small] = [
            tuple(piece for piece in dim if not any(overlaps(piece, other) for other in used))
            for dim in factors[small].dims
        ]
        for pair in (*self.summed, *self.batch):
            first = dims[large][pair[large]]
            sizes = [factor.shape[dim] for factor, dim in zip(factors, pair, strict=True)]
            for both in ((*first, *dims[small][pair[small]]), first, ()):
                if not any(of_dim % prod(map(size, both)) for of_dim in sizes):
                    break
            dims[large][pair[large]] = dims[small][pair[small]] = both
        summed = [set(of_factor) for of_factor in zip(*self.summed, strict=True)] or [set(), set()]
        result = (() if dim in summed[f] else dims[f][dim] for f, dim in self.result)
        return tuple(dims[0]), tuple(dims[1]), tuple(result)
