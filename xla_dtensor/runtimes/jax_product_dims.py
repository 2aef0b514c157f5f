"""What the dims of a lowered product mean (:mod:`xla_dtensor.core.product_dims`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from xla_dtensor.core.product_dims import Factor, ProductDims
from xla_dtensor.runtimes.jax_shardy import Cut, Piece

__all__ = ["agreed_cuts", "dims_of_convolution", "dims_of_dot"]


def agreed_cuts(
    dims: ProductDims, left: Cut, right: Cut, shapes: Sequence[Sequence[int]]
) -> tuple[Cut, Cut, Cut]:
    """Return cuts of left, right and result that agree, all on one mesh.

    Args:
        dims: What their dims mean.
        left: How the left factor is cut.
        right: How the right factor is cut; it is gathered if it is on another mesh.
        shapes: The sizes of both.
    """
    of_right = right.dims if right.mesh is left.mesh else ((),) * len(right.dims)
    factors = Factor(shapes[0], left.dims), Factor(shapes[1], of_right)
    found = dims.agreed(*factors, size=lambda piece: piece.size, overlaps=Piece.overlaps)
    one, other, result = (Cut(left.mesh, each, left.manual) for each in found)
    return one, other, result


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
