"""What the dims of a lowered product mean, and how factors that disagree are made to agree.

    stablehlo.dot_general contracting_dims = [1] x [0]         [m, n] x [n, k] -> [m, k]

has the dims ``summed=[(1, 0)]``, ``batch=[]``, ``result=[(0, 0), (1, 1)]``: the result's first dim
is the first of factor 0, its second one the second of factor 1. Cut as

    [c, a] x [b, c]         m by c, n by a; n by b, k by c

the factors disagree: c cuts the rows of one and the columns of the other, a and b the sum in one of
them each. :meth:`ProductDims.agreed` lets the larger one stay and changes the other by as little as
makes each axis mean one thing:

    [c, a.b] x [a.b, -] -> [c, -]
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from xla_dtensor.core.product_order import Pairs
from xla_dtensor.runtimes.jax_shardy import Cut, Piece

__all__ = ["ProductDims", "dims_of_convolution", "dims_of_dot"]

Dims = tuple[tuple[Piece, ...], ...]


class ProductDims(NamedTuple):
    """What the dims of a product mean.

    Args:
        summed: The dims that the sum runs over, each as a dim of both factors.
        batch: The batch dims, likewise.
        result: For each dim of the result the number of the factor that it comes from, and its dim.
    """

    summed: Pairs
    batch: Pairs
    result: Pairs

    def agreed(
        self, left: Cut, right: Cut, left_shape: Sequence[int], right_shape: Sequence[int]
    ) -> tuple[Cut, Cut, Cut]:
        """Return cuts of both factors and of the result in which each axis means one thing.

        Args:
            left: How the left factor is cut.
            right: How the right factor is cut.
            left_shape: Its sizes.
            right_shape: The right one's.

        Returns:
            The cuts of left, right and result. The larger factor is cut as before, the left one of
            two alike, and along the dims that both have also as the other one was; the other factor
            loses what means something else in the larger. No axis of the sum cuts the result.
        """
        shapes = (left_shape, right_shape)
        large = 1 if math.prod(right_shape) > math.prod(left_shape) else 0
        small = 1 - large
        cuts = (left, right)
        mesh, manual = cuts[large].mesh, cuts[large].manual
        dims: list[list[tuple[Piece, ...]]] = [[], []]
        dims[large] = list(cuts[large].dims)
        used = [piece for dim in dims[large] for piece in dim]
        if cuts[small].mesh is mesh:
            dims[small] = list(cuts[small].without(used).dims)
        else:
            dims[small] = [()] * len(shapes[small])
        for pair in (*self.summed, *self.batch):
            of_large, of_small = pair[large], pair[small]
            first = dims[large][of_large]
            sizes = shapes[large][of_large], shapes[small][of_small]
            for both in ((*first, *dims[small][of_small]), first, ()):
                if not any(size % math.prod(p.size for p in both) for size in sizes):
                    break
            dims[large][of_large] = dims[small][of_small] = both
        summed = [set(of_factor) for of_factor in zip(*self.summed, strict=True)] or [set(), set()]
        found = tuple(() if dim in summed[f] else dims[f][dim] for f, dim in self.result)
        factors = [Cut(mesh, tuple(of_factor), manual) for of_factor in dims]
        return factors[0], factors[1], Cut(mesh, found, manual)


def dims_of_dot(product: Any) -> ProductDims:
    """Return what the dims of a ``stablehlo.dot_general`` mean."""
    numbers = stablehlo.DotDimensionNumbers(product.attributes["dot_dimension_numbers"])
    of_left, of_right = numbers.lhs_contracting_dimensions, numbers.rhs_contracting_dimensions
    left_batch, right_batch = numbers.lhs_batching_dimensions, numbers.rhs_batching_dimensions
    summed = list(zip(of_left, of_right, strict=True))
    batch = list(zip(left_batch, right_batch, strict=True))
    rest = [
        (number, dim)
        for number, factor in enumerate(product.operands)
        for dim in range(ir.RankedTensorType(factor.type).rank)
        if all(pair[number] != dim for pair in (*summed, *batch))
    ]
    return ProductDims(summed, batch, [*((0, dim) for dim, _ in batch), *rest])


def dims_of_convolution(product: Any, kernel: Cut) -> ProductDims:
    """Return what the dims of a ``stablehlo.convolution`` mean, whose kernel is cut in a way."""
    numbers = stablehlo.ConvDimensionNumbers(product.attributes["dimension_numbers"])
    summed = [(numbers.input_feature_dimension, numbers.kernel_input_feature_dimension)]
    result = {
        numbers.output_batch_dimension: (0, numbers.input_batch_dimension),
        numbers.output_feature_dimension: (1, numbers.kernel_output_feature_dimension),
    }
    spatial = zip(
        numbers.input_spatial_dimensions,
        numbers.kernel_spatial_dimensions,
        numbers.output_spatial_dimensions,
        strict=True,
    )
    for of_input, of_kernel, of_output in spatial:
        result[of_output] = (0, of_input)
        if kernel.dims[of_kernel]:  # a gradient, whose kernel is as large as its input
            summed.append((of_input, of_kernel))
    return ProductDims(summed, [], [result[dim] for dim in sorted(result)])
