"""Products that XLA might put on the wrong devices are told how to lie, before compiling.

Which products those are, and why, see :mod:`xla_dtensor.core.product_order`. It depends on how XLA
is going to cut the factors and the result, which follows from the whole program. So a copy of the
lowered program is propagated (:mod:`xla_dtensor.runtimes.jax_propagation`), its products are looked
at, and those concerned are told how to lie:

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

from collections.abc import Mapping, Sequence
from typing import Any

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import sdy

from xla_dtensor.core.product_order import MIN_AXES, loses_order
from xla_dtensor.errors import CompileError
from xla_dtensor.runtimes.jax_product_dims import agreed_cuts, dims_of_convolution, dims_of_dot
from xla_dtensor.runtimes.jax_propagation import (
    number_of,
    numbered,
    operations,
    propagated,
    unnumber,
)
from xla_dtensor.runtimes.jax_shardy import Cut, MeshAxes, cut_of, meshes_of, num_parts

__all__ = ["keep_product_orders"]

_DOT, _CONVOLUTION = "stablehlo.dot_general", "stablehlo.convolution"


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
        products = numbered(module, (_DOT, _CONVOLUTION))
        told: set[int] = set()
        while found := _concerned(products, propagated(module), meshes):
            for number, cuts in found.items():
                if number in told:
                    raise _not_kept(products[number])
                _tell(products[number], cuts)
            told.update(found)
        unnumber(products)
    return len(told)


def _not_kept(product: Any) -> CompileError:
    return CompileError(
        f"A product at {product.location} was about to be compiled. XLA would put its tiles on the "
        "wrong devices, and no cut was found that keeps their order. Redistribute what it is made "
        "of so that the dim that is summed over is not sharded."
    )


def _concerned(
    products: Sequence[Any], propagated_copy: Any, meshes: Mapping[str, MeshAxes]
) -> dict[int, tuple[Cut, Cut, Cut]]:
    """Return how the products that XLA might get wrong are to lie instead, by number.

    One in a function that is called several times is told as the first of its calls needs it.
    """
    found: dict[int, tuple[Cut, Cut, Cut]] = {}
    for op in operations(propagated_copy):
        number = number_of(op)
        if number is None:
            continue
        cuts = _cuts_of(op, meshes)
        instead = None if cuts is None else _instead(products[number], cuts)
        if instead is not None:
            found.setdefault(number, instead)
    return found


def _cuts_of(product: Any, meshes: Mapping[str, MeshAxes]) -> tuple[Cut, Cut, Cut] | None:
    """Return how the factors and the result of a product lie; None where nothing says so."""
    values = (*product.operands, product.result)
    found = [cut_of(value, meshes) for value in values]
    known = next((cut for cut in found if cut is not None), None)
    if known is None:
        return None
    left, right, result = (
        cut or Cut(known.mesh, ((),) * len(_shape(value)), known.manual)
        for cut, value in zip(found, values, strict=True)
    )
    return left, right, result


def _instead(product: Any, cuts: tuple[Cut, Cut, Cut]) -> tuple[Cut, Cut, Cut] | None:
    """Return how a product is to lie instead; None where XLA cannot get it wrong."""
    left, right, result = cuts
    dims = dims_of_dot(product) if product.name == _DOT else dims_of_convolution(product, right)
    tiles = left.tiles(), right.tiles(), result.tiles()
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
