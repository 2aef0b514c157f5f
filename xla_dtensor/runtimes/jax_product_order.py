"""Products that XLA might put on the wrong devices are told how to lie, before compiling.

Which products those are, and why, see :mod:`xla_dtensor.core.product_order`. It depends on how XLA
is going to cut the factors and the result, which follows from the whole program. Shardy decides
that, and its passes can be run from Python: a copy of the lowered program is propagated here as XLA
will propagate it, its products are looked at, and those concerned are told how to lie:

    %2 = stablehlo.dot_general %0, %1                          [b, c] x [b, a.c] -> [b, a.c]
    ----
    %3 = sdy.sharding_constraint %0 <@mesh, [{"b"}, {}]>
    %4 = sdy.sharding_constraint %1 <@mesh, [{"b"}, {"a", "c"}]>
    %5 = stablehlo.dot_general %3, %4                          [b, -] x [b, a.c] -> [-, a.c]
    %6 = sdy.sharding_constraint %5 <@mesh, [{}, {"a", "c"}]>

Factors that agree (:mod:`xla_dtensor.core.product_dims`) leave XLA one way to make the product,
without the sum's axes in its cut: such a product is never concerned. Where they did not agree XLA
has the same choice to make, and the smaller factor to gather. What used the product goes on from
the last constraint, and is cut as before.

A program on a mesh with fewer than two axes larger than 1 is not looked at. Others cost one run
of Shardy's propagation, a small part of compiling.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import sdy
from jax.extend.mlir.passmanager import PassManager

from xla_dtensor.core.product_order import MIN_AXES, loses_order
from xla_dtensor.errors import CompileError
from xla_dtensor.runtimes.jax_product_dims import agreed_cuts, dims_of_convolution, dims_of_dot
from xla_dtensor.runtimes.jax_shardy import Cut, MeshAxes, cut_of, meshes_of, num_parts

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
        told: set[int] = set()
        while found := _concerned(module, meshes):
            for number, cuts in found.items():
                if number in told:
                    raise _not_kept(products[number])
                _tell(products[number], cuts)
            told.update(found)
        for product in products:
            del product.attributes[_NUMBER]
    return len(told)


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


def _concerned(module: Any, meshes: Mapping[str, MeshAxes]) -> dict[int, tuple[Cut, Cut, Cut]]:
    """Return how the products that XLA might get wrong are to lie instead, by number.

    One in a function that is called several times is told as the first of its calls needs it.
    """
    copy = module.clone()
    PassManager.parse(f"builtin.module({_PROPAGATION})").run(copy)
    found: dict[int, tuple[Cut, Cut, Cut]] = {}
    for op in _operations(copy):
        if _NUMBER in op.attributes:
            instead = _looked_at(op, meshes)
            if instead is not None:
                found.setdefault(ir.IntegerAttr(op.attributes[_NUMBER]).value, instead)
    return found


def _looked_at(product: Any, meshes: Mapping[str, MeshAxes]) -> tuple[Cut, Cut, Cut] | None:
    values = (*product.operands, product.result)
    found = [cut_of(value, meshes) for value in values]
    known = next((cut for cut in found if cut is not None), None)
    if known is None:
        return None
    cuts = [
        cut or Cut(known.mesh, ((),) * len(_shape(value)), known.manual)
        for cut, value in zip(found, values, strict=True)
    ]
    left, right = cuts[:2]
    dims = dims_of_dot(product) if product.name == _DOT else dims_of_convolution(product, right)
    tiles = left.tiles(), right.tiles(), cuts[2].tiles()
    if not loses_order(*tiles, *dims, num_parts(cuts)):
        return None
    return agreed_cuts(dims, left, right, [_shape(factor) for factor in product.operands])


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(ir.RankedTensorType(value.type).shape)


def _tell(product: Any, cuts: tuple[Cut, Cut, Cut]) -> None:
    """Constrain the factors of a product and its result."""
    with ir.InsertionPoint(product):
        for number, cut in enumerate(cuts[:2]):
            factor = sdy.ShardingConstraintOp(product.operands[number], cut.attribute())
            product.operands[number] = factor.result
    with ir.InsertionPoint.after(product):
        constraint = sdy.ShardingConstraintOp(product.result, cuts[2].attribute()).operation
    product.result.replace_all_uses_except(constraint.result, [constraint])
