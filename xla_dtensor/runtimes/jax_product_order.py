"""Products that XLA would put on the wrong devices get a cut of their own, before compiling.

Which products those are, and why, see :mod:`xla_dtensor.core.product_order`. It depends on how XLA
is going to cut the factors and the result, which follows from the whole program. Shardy decides
that, and its passes can be run from Python: a copy of the lowered program is propagated here as XLA
will propagate it, its products are looked at, and those concerned are told how to lie:

    %2 = stablehlo.dot_general %0, %1                          [b, c] x [b, a.c] -> [b, a.c]
    ----
    %2 = stablehlo.dot_general %0, %1                          [b, c] x [b, a.c] -> [c, a]
    %3 = sdy.sharding_constraint %2 <@mesh, [{"c"}, {"a"}]>

The cut is the factors' own, without the axes of the sum: such a result is never concerned. What
used the product goes on from the constraint, and is cut as before.

A program on a mesh with fewer than two axes larger than 1 is not looked at. Others cost one run
of Shardy's propagation, a small part of compiling.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import sdy, stablehlo
from jaxlib.mlir.passmanager import PassManager

from xla_dtensor.core.product_order import MIN_AXES, Pairs, dot_sources, loses_order
from xla_dtensor.errors import CompileError
from xla_dtensor.runtimes.jax_shardy import Cut, MeshAxes, Piece, cut_of, meshes_of

__all__ = ["keep_product_orders"]

# What XLA runs up to and with propagation. Sinking the edges writes what was found onto the ops.
_PROPAGATION = (
    "symbol-dce,sdy-lift-inlined-meshes,sdy-remove-size-one-axes,"
    "sdy-propagate-sharding-from-func-to-call,sdy-constant-or-scalar-splitter,symbol-dce,"
    "sdy-manual-axes-cleanup,sdy-add-data-flow-edges,sdy-flatten-call-graph,symbol-dce,"
    "sdy-import-func-calls{add-data-flow-edges-on-named-computations=true},symbol-dce,"
    "sdy-apply-sharding-constraints,sdy-sharding-group-import,sdy-pre-order-funcs,"
    "sdy-user-priority-propagate,func.func(sdy-sink-data-flow-edges)"
)
_DOT, _CONVOLUTION = "stablehlo.dot_general", "stablehlo.convolution"
_NUMBER = "xla_dtensor.product"


@dataclass(frozen=True)
class _Summed:
    """A product that XLA would get wrong: what its sum is cut by, and how else it may lie."""

    pieces: frozenset[Piece]
    instead: Cut


def keep_product_orders(lowered: Any) -> int:
    """Tell the products of a lowered program that XLA would get wrong how to lie, in place.

    Args:
        lowered: ``jax.stages.Lowered``, not compiled yet.

    Returns:
        How many products were told.
    """
    module = lowered.compiler_ir("stablehlo").operation
    with module.context, ir.Location.unknown():
        meshes = meshes_of(module)
        if all(mesh.num_axes < MIN_AXES for mesh in meshes.values()):
            return 0
        products = _numbered(module)
        constraints: dict[int, Any] = {}
        cuts: dict[int, Cut] = {}
        while found := _concerned(module, meshes):
            for number, summed in found.items():
                before = cuts.get(number)
                cuts[number] = (before or summed.instead).without(summed.pieces)
                if cuts[number] == before:
                    raise _not_kept(products[number])
                constraints[number] = _tell(products[number], cuts[number], constraints.get(number))
        for product in products:
            del product.attributes[_NUMBER]
    return len(cuts)


def _not_kept(product: Any) -> CompileError:
    return CompileError(
        f"A product at {product.location} was about to be compiled. XLA would put its tiles on the "
        "wrong devices, and no cut was found that keeps their order. Redistribute what it is made "
        "of so that the dim that is summed over is not sharded."
    )


def _numbered(module: Any) -> list[Any]:
    """Return all products, each with its place in the list as an attribute, which copies keep."""
    products = [op for op in _operations(module) if op.name in (_DOT, _CONVOLUTION)]
    whole = ir.IntegerType.get_signless(64)
    for number, product in enumerate(products):
        product.attributes[_NUMBER] = ir.IntegerAttr.get(whole, number)
    return products


def _operations(op: Any) -> Iterator[Any]:
    """Yield all operations inside of one, those of its regions too."""
    for region in op.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield inner.operation
                yield from _operations(inner.operation)


def _concerned(module: Any, meshes: Mapping[str, MeshAxes]) -> dict[int, _Summed]:
    """Return the products that XLA would get wrong, by number."""
    copy = module.clone()
    PassManager.parse(f"builtin.module({_PROPAGATION})").run(copy)
    found: dict[int, _Summed] = {}
    for op in _operations(copy):
        if _NUMBER not in op.attributes:
            continue
        summed = _looked_at(op, meshes)
        if summed is not None:
            number = ir.IntegerAttr(op.attributes[_NUMBER]).value
            other = found.get(number, summed)  # of another call of the function that it is in
            found[number] = _Summed(other.pieces | summed.pieces, other.instead)
    return found


def _looked_at(product: Any, meshes: Mapping[str, MeshAxes]) -> _Summed | None:
    values = (*product.operands, product.result)
    cuts = [cut_of(value, meshes) for value in values]
    known = next((cut for cut in cuts if cut is not None), None)
    if known is None:
        return None
    left, right, result = (
        cut or Cut(known.mesh, ((),) * ir.RankedTensorType(value.type).rank, known.manual)
        for cut, value in zip(cuts, values, strict=True)
    )
    dims = _dims_of_dot(product) if product.name == _DOT else _dims_of_convolution(product, right)
    tiles = left.tiles(), right.tiles(), result.tiles()
    if not loses_order(*tiles, dims.summed, dims.batch, dims.result):
        return None
    summed = [
        p for of_left, of_right in dims.summed for p in (*left.dims[of_left], *right.dims[of_right])
    ]
    return _Summed(frozenset(summed), dims.own_cut(left, right))


class _Dims(NamedTuple):
    """What the dims of a product mean.

    Args:
        summed: The dims that the sum runs over, each as a dim of both factors.
        batch: The batch dims, likewise.
        result: For each dim of the result the number of the factor that it comes from, and its dim.
    """

    summed: Pairs
    batch: Pairs
    result: Pairs

    def own_cut(self, left: Cut, right: Cut) -> Cut:
        """Return the cut that the factors give the result, each axis used once, `left`'s first."""
        used = [piece for dim in left.dims for piece in dim]
        if right.mesh is not left.mesh:
            used = [piece for dim in right.dims for piece in dim]
        factors = left, right.without(used)
        return Cut(left.mesh, tuple(factors[f].dims[dim] for f, dim in self.result), left.manual)


def _dims_of_dot(product: Any) -> _Dims:
    numbers = stablehlo.DotDimensionNumbers(product.attributes["dot_dimension_numbers"])
    of_left, of_right = numbers.lhs_contracting_dimensions, numbers.rhs_contracting_dimensions
    left_batch, right_batch = numbers.lhs_batching_dimensions, numbers.rhs_batching_dimensions
    summed = list(zip(of_left, of_right, strict=True))
    batch = list(zip(left_batch, right_batch, strict=True))
    left, right = (ir.RankedTensorType(factor.type).rank for factor in product.operands)
    return _Dims(summed, batch, dot_sources((left, right), summed, batch))


def _dims_of_convolution(product: Any, kernel: Cut) -> _Dims:
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
    return _Dims(summed, [], [result[dim] for dim in sorted(result)])


def _tell(product: Any, cut: Cut, constraint: Any) -> Any:
    """Constrain the result of a product, or change the constraint that it has got before."""
    if constraint is not None:
        constraint.attributes["sharding"] = cut.attribute()
        return constraint
    with ir.InsertionPoint.after(product):
        constraint = sdy.ShardingConstraintOp(product.result, cut.attribute()).operation
    product.result.replace_all_uses_except(constraint.result, [constraint])
    return constraint
