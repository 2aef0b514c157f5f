"""Products of a lowered program: how they are cut, and how they are told to lie.

    #sdy.sharding<@mesh, [{"b"}, {"a", "c":(1)2}]>       dim 0 by axis b; dim 1 by a, then by the
                                                         outer half of c

is the `Cut` ``((b,), (a, c[1:2]))`` on the mesh of that name. Inside of a manual computation the
manual axes are no axes any more: a device sees those that share its place on them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import sdy, stablehlo
from jax.extend.mlir.passmanager import PassManager

from xla_dtensor.core.errors import CompileError
from xla_dtensor.core.product_order import MIN_AXES, Factor, ProductDims, Tiles, loses_order
from xla_dtensor.runtimes.jax.arrays.private import through_hlo

__all__ = [
    "Cut",
    "MeshAxes",
    "OrderedProgram",
    "Piece",
    "agreed_cuts",
    "cut_of",
    "keep_product_orders",
    "meshes_of",
    "num_parts",
    "number_of",
    "numbered",
    "operations",
    "propagated",
    "unnumber",
]


# -------------------------------------------------------------------------------------- Propagation
#
# How XLA will cut the values of a lowered program, found before it is compiled.
#
# Shardy decides it, and its passes can be run from Python. But XLA does not run them on the program
# that JAX has lowered: it translates that to HLO first, and back to StableHLO. The operations come
# in another order then, some are reshapes that were broadcasts, some are gone; and where two cuts
# are equally good, the order decides. So a copy takes the same way here::
#
#     lowered module --> HLO --> StableHLO --> Shardy's propagation --> the cuts that XLA will find
#
# What is looked for is found again by a number, which travels as an attribute of the frontend. In
# the programs of the tests no product is cut otherwise than in what XLA says of itself
# (``tests/xla_dtensor/runtimes/jax/test_jax_propagation.py``; docs/decisions/product_order.md).
#
# A program with a manual computation (``shard_map``) goes into propagation as it is, since its way
# back is not open to Python: there the cuts are those of a program that means the same. Another one
# that cannot be read back is refused, since its products could be put on the wrong devices.

# What XLA runs up to and with propagation. Sinking the edges writes what was found onto the ops.
_PROPAGATION = (
    "symbol-dce,sdy-lift-inlined-meshes,sdy-remove-size-one-axes,"
    "sdy-propagate-sharding-from-func-to-call,sdy-constant-or-scalar-splitter,symbol-dce,"
    "sdy-manual-axes-cleanup,sdy-add-data-flow-edges,sdy-flatten-call-graph,symbol-dce,"
    "sdy-import-func-calls{add-data-flow-edges-on-named-computations=true},symbol-dce,"
    "sdy-apply-sharding-constraints,sdy-sharding-group-import,sdy-pre-order-funcs,"
    "sdy-user-priority-propagate,func.func(sdy-sink-data-flow-edges)"
)
_FRONTEND = "mhlo.frontend_attributes"
_NUMBER = "xla_dtensor.number"
_CALL = "stablehlo.custom_call"


def operations(op: Any) -> Iterator[Any]:
    """Yield all operations inside of one, those of its regions too."""
    for region in op.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield inner.operation
                yield from operations(inner.operation)


def numbered(module: Any, names: Sequence[str]) -> list[Any]:
    """Return all operations of some names, each marked with its place in the list."""
    ops = [op for op in operations(module) if op.name in names]
    for number, op in enumerate(ops):
        _set_frontend(op, {**_frontend(op), _NUMBER: ir.StringAttr.get(str(number))})
    return ops


def number_of(op: Any) -> int | None:
    """Return the number of an operation of a propagated copy; None for one without."""
    mark = _frontend(op).get(_NUMBER)
    return None if mark is None else int(ir.StringAttr(mark).value)


def unnumber(ops: Sequence[Any]) -> None:
    """Take the numbers away again."""
    for op in ops:
        attributes = {
            name: attribute for name, attribute in _frontend(op).items() if name != _NUMBER
        }
        if attributes:
            _set_frontend(op, attributes)
        else:
            del op.attributes[_FRONTEND]


def propagated(module: Any) -> Any:
    """Return a copy of a lowered program in which Shardy has cut everything, as XLA will.

    Args:
        module: The operation of an MLIR module; its context is the current one. It is not changed.

    Raises:
        CompileError: Shardy cannot read what came back from HLO.
    """
    has_manual = any(op.name == "sdy.manual_computation" for op in operations(module))
    try:
        copy = module.clone() if has_manual else _as_xla_reads(module)
        propagation = PassManager.parse(f"builtin.module({_PROPAGATION})")
        propagation.enable_verifier(False)
        propagation.run(copy)
    except ir.MLIRError as error:
        raise CompileError(
            "A program for a mesh of several axes was about to be compiled. How XLA will cut its "
            f"products could not be found, since Shardy cannot read it: {error} Compile what is "
            "named there in a step of its own, or on a mesh of one axis."
        ) from error
    return copy


def _as_xla_reads(module: Any) -> Any:
    """Return the program after HLO, with Shardy's attributes and constraints as they were."""
    # Only what is replaced is held while operations are erased: the name of an erased one is read
    # from memory that is no longer its own.
    copy = ir.Module.parse(through_hlo(module)).operation
    for call in [op for op in operations(copy) if op.name == _CALL and _gives_tuple(op)]:
        _with_results(call)
    PassManager.parse("builtin.module(xla-sdy-round-trip-import-shardy-attrs)").run(copy)
    for call in [op for op in operations(copy) if op.name == _CALL and _target(op) == "Sharding"]:
        shardings: Sequence[Any] = sdy.TensorShardingPerValueAttr(
            call.attributes["sdy.sharding"]
        ).shardings
        with ir.InsertionPoint(call):
            constraint = sdy.ShardingConstraintOp(call.operands[0], shardings[0])
        call.result.replace_all_uses_with(constraint.result)
        call.erase()
    return copy


def _gives_tuple(call: Any) -> bool:
    return len(call.results) == 1 and str(call.result.type).startswith("tuple<")


def _with_results(call: Any) -> None:
    """Give a call of a library its results back in place of one tuple, which Shardy refuses."""
    kind = ir.TupleType(call.result.type)
    types = [kind.get_type(i) for i in range(kind.num_types)]
    attributes = {name: call.attributes[name] for name in call.attributes}
    with ir.InsertionPoint(call):
        copy = ir.Operation.create(
            _CALL, results=types, operands=list(call.operands), attributes=attributes
        )
    for use in list(call.result.uses):
        element = use.owner.operation
        number = ir.IntegerAttr(element.attributes["index"]).value
        element.result.replace_all_uses_with(copy.results[number])
        element.erase()
    call.erase()


def _target(custom_call: Any) -> str:
    return ir.StringAttr(custom_call.attributes["call_target_name"]).value


def _frontend(op: Any) -> dict[str, Any]:
    if _FRONTEND not in op.attributes:
        return {}
    return {entry.name: entry.attr for entry in ir.DictAttr(op.attributes[_FRONTEND])}


def _set_frontend(op: Any, attributes: dict[str, Any]) -> None:
    op.attributes[_FRONTEND] = ir.DictAttr.get(attributes)


# ------------------------------------------------------------------------------------------- Shardy

_PER_VALUE = "sdy.sharding"
_REGION_IN, _REGION_OUT = "in_shardings", "out_shardings"
_COMPUTATIONS = frozenset({"sdy.named_computation", "sdy.manual_computation"})
_CONSTRAINTS = frozenset({"sdy.sharding_constraint", "sdy.reshard"})


class Piece(NamedTuple):
    """An axis, or a part of one: its digit of `size` values with `pre` outside of it."""

    axis: str
    pre: int
    size: int

    def overlaps(self, piece: Piece) -> bool:
        if self.axis != piece.axis:
            return False
        return self.pre < piece.pre * piece.size and piece.pre < self.pre * self.size


@dataclass(frozen=True)
class MeshAxes:
    """A mesh of a program: its name, the sizes of its axes in their order, and its devices."""

    name: str
    sizes: Mapping[str, int]
    devices: Tiles = field(repr=False)

    @property
    def num_axes(self) -> int:
        """The number of axes that are larger than 1."""
        return sum(size > 1 for size in self.sizes.values())


@dataclass(frozen=True)
class Cut:
    """How a value is cut: for each of its dims the pieces of axes, outermost first."""

    mesh: MeshAxes
    dims: tuple[tuple[Piece, ...], ...]
    manual: frozenset[str] = frozenset()

    def tiles(self) -> Tiles:
        """Return the devices, one dim per dim of the value and one for the copies."""
        digits = {name: self._digits(name, size) for name, size in self.mesh.sizes.items()}
        place = {digit: i for i, digit in enumerate(d for of in digits.values() for d in of)}
        grid = self.mesh.devices.reshape([digit.size for digit in place])
        used = [place[piece] for dim in self.dims for piece in dim]
        manual = [place[d] for name in self.manual for d in digits[name]]
        copies = [i for i in place.values() if i not in used and i not in manual]
        ordered = grid.transpose([*manual, *used, *copies])[(0,) * len(manual)]
        return ordered.reshape([*(math.prod(p.size for p in dim) for dim in self.dims), -1])

    def _digits(self, axis: str, size: int) -> list[Piece]:
        """Return the parts that `dims` take an axis in, and those between them."""
        parts, digits, pre = sorted(p for dim in self.dims for p in dim if p.axis == axis), [], 1
        for part in parts:
            if part.pre > pre:
                digits.append(Piece(axis, pre, part.pre // pre))
            digits.append(part)
            pre = part.pre * part.size
        return [*digits, Piece(axis, pre, size // pre)] if pre < size or not digits else digits

    def without(self, pieces: Iterable[Piece]) -> Cut:
        """Return the cut without whatever shares a digit with one of `pieces`."""
        excluded = list(pieces)
        dims = tuple(
            tuple(p for p in dim if not any(map(p.overlaps, excluded))) for dim in self.dims
        )
        return Cut(self.mesh, dims, self.manual)

    def attribute(self) -> Any:
        """Return the attribute that says so, with no dim left open."""
        return sdy.TensorShardingAttr.get(
            self.mesh.name,
            [sdy.DimensionShardingAttr.get([self._axis(p) for p in d], True) for d in self.dims],
        )

    def _axis(self, piece: Piece) -> Any:
        if piece.size == self.mesh.sizes[piece.axis]:
            return sdy.AxisRefAttr.get(piece.axis)
        part = sdy.SubAxisInfoAttr.get(piece.pre, piece.size)
        return sdy.AxisRefAttr.get(piece.axis, part)


def num_parts(cuts: Sequence[Cut]) -> int:
    """Return of how many axes larger than 1, or parts of axes, some cuts are made, at most.

    Neighbours in the mesh that always cut together, one right after the other, count as one: an
    axis of 4 may be two axes of 2 in the program.
    """
    mesh = cuts[0].mesh
    bounds = {axis: {1, size} for axis, size in mesh.sizes.items() if axis not in cuts[0].manual}
    for piece in (piece for cut in cuts for dim in cut.dims for piece in dim):
        bounds.setdefault(piece.axis, {1}).update((piece.pre, piece.pre * piece.size))
    parts = [
        Piece(axis, pre, end // pre)
        for axis, borders in bounds.items()
        for pre, end in pairwise(sorted(borders))
    ]
    if any(cut.mesh is not mesh for cut in cuts):
        return len(parts)
    return len(parts) - sum(
        all(_cut_together(cut, part, following) for cut in cuts)
        for part, following in pairwise(parts)
    )


def _cut_together(cut: Cut, part: Piece, following: Piece) -> bool:
    """Tell whether neither of two parts cuts a dim, or one does right after the other."""
    for dim in cut.dims:
        for piece, next_piece in zip(dim, (*dim, None)[1:], strict=True):
            if not piece.overlaps(part):
                continue
            if piece.overlaps(following):
                return True
            ends_alike = piece.pre * piece.size == part.pre * part.size
            return ends_alike and next_piece is not None and next_piece[:2] == following[:2]
    return not any(piece.overlaps(following) for dim in cut.dims for piece in dim)


def meshes_of(module: Any) -> dict[str, MeshAxes]:
    """Return the meshes of a module by name; none where Shardy does not cut it.

    Args:
        module: The operation of an MLIR module.
    """
    meshes: dict[str, MeshAxes] = {}
    for op in module.regions[0].blocks[0].operations:
        if op.operation.name == "sdy.mesh":
            name = ir.StringAttr(op.attributes["sym_name"]).value
            mesh = sdy.MeshAttr(op.attributes["mesh"])
            axes: list[Any] = [sdy.MeshAxisAttr(axis) for axis in mesh.axes]
            sizes = {axis.name: axis.size for axis in axes}
            ids = np.array(list(mesh.device_ids) or range(math.prod(sizes.values())))
            meshes[name] = MeshAxes(name, sizes, ids.reshape(list(sizes.values())))
    return meshes


def cut_of(value: Any, meshes: Mapping[str, MeshAxes]) -> Cut | None:
    """Return how a value of a propagated module is cut; None where nothing was found of it.

    Args:
        value: An MLIR value of a ranked tensor type.
        meshes: From :func:`meshes_of`.
    """
    attribute = _sharding(value)
    if attribute is None:
        return None
    sharding = sdy.TensorShardingAttr(attribute)
    mesh = meshes[ir.FlatSymbolRefAttr(sharding.mesh_or_ref).value]
    manual = _manual_axes(value).intersection(mesh.sizes)
    dims = [sdy.DimensionShardingAttr(dim).axes for dim in sharding.dimension_shardings]
    pieces = (tuple(_piece(sdy.AxisRefAttr(axis), mesh) for axis in dim) for dim in dims)
    cut = tuple(tuple(p for p in dim if p.axis not in manual) for dim in pieces)
    return Cut(mesh, cut, manual)


def _piece(axis: Any, mesh: MeshAxes) -> Piece:
    if axis.sub_axis_info is None:
        return Piece(axis.name, 1, mesh.sizes[axis.name])
    part = sdy.SubAxisInfoAttr(axis.sub_axis_info)
    return Piece(axis.name, part.pre_size, part.size)


def _sharding(value: Any) -> Any:
    """Return the attribute of a value; None where there is none."""
    if isinstance(value.owner, ir.Block):
        number, op = ir.BlockArgument(value).arg_number, value.owner.owner
        if op.operation.name == "func.func":
            return _of_function(op, number)
        name = _REGION_IN if op.operation.name in _COMPUTATIONS else _PER_VALUE
        return _sharding_at(op, name, number)
    op = value.owner.operation  # the view of a named computation has another `name`
    if op.name in _CONSTRAINTS:
        return op.attributes["sharding"]
    name = _REGION_OUT if op.name in _COMPUTATIONS else _PER_VALUE
    return _sharding_at(op, name, ir.OpResult(value).result_number)


def _of_function(function: Any, number: int) -> Any:
    if "arg_attrs" not in function.attributes:
        return None
    attributes = ir.DictAttr(ir.ArrayAttr(function.attributes["arg_attrs"])[number])
    return attributes[_PER_VALUE] if _PER_VALUE in attributes else None  # noqa: SIM401 - it has no get


def _sharding_at(op: Any, name: str, number: int) -> Any:
    if name not in op.attributes:
        return None
    shardings: Sequence[Any] = sdy.TensorShardingPerValueAttr(op.attributes[name]).shardings
    return shardings[number] if number < len(shardings) else None


def _manual_axes(value: Any) -> frozenset[str]:
    """Return the axes that are manual where a value is made."""
    of_block = isinstance(value.owner, ir.Block)
    op = value.owner.owner.operation if of_block else value.owner.parent
    axes: set[str] = set()
    while op is not None:
        if op.name == "sdy.manual_computation":
            manual: Any = sdy.ManualAxesAttr(op.attributes["manual_axes"])
            axes.update(map(str, manual))
        op = op.parent
    return frozenset(axes)


# ------------------------------------------------------------------------------------- Product dims
#
# What the dims of a lowered product mean (:mod:`xla_dtensor.core.product_order`).


def agreed_cuts(
    dims: ProductDims, lhs: Cut, rhs: Cut, shapes: Sequence[Sequence[int]]
) -> tuple[Cut, Cut, Cut]:
    """Return cuts of left, right and result that agree, all on one mesh.

    Args:
        dims: What their dims mean.
        lhs: How the left factor is cut.
        rhs: How the right factor is cut; it is gathered if it is on another mesh.
        shapes: The sizes of both.
    """
    rhs_dims = rhs.dims if rhs.mesh is lhs.mesh else ((),) * len(rhs.dims)
    factors = Factor(shapes[0], lhs.dims), Factor(shapes[1], rhs_dims)
    agreed = dims.agreed(*factors, size=lambda piece: piece.size, overlaps=Piece.overlaps)
    lhs_cut, rhs_cut, output_cut = (Cut(lhs.mesh, cut_dims, lhs.manual) for cut_dims in agreed)
    return lhs_cut, rhs_cut, output_cut


def dims_of_dot(product: Any) -> ProductDims:
    """Return what the dims of a ``stablehlo.dot_general`` mean."""
    numbers = stablehlo.DotDimensionNumbers(product.attributes["dot_dimension_numbers"])
    lhs_contracted, rhs_contracted = (
        numbers.lhs_contracting_dimensions,
        numbers.rhs_contracting_dimensions,
    )
    lhs_batch, rhs_batch = numbers.lhs_batching_dimensions, numbers.rhs_batching_dimensions
    summed = list(zip(lhs_contracted, rhs_contracted, strict=True))
    batch = list(zip(lhs_batch, rhs_batch, strict=True))
    free = [
        (number, dim)
        for number, factor in enumerate(product.operands)
        for dim in range(ir.RankedTensorType(factor.type).rank)
        if all(pair[number] != dim for pair in (*summed, *batch))
    ]
    return ProductDims(summed, batch, [*((0, dim) for dim, _ in batch), *free])


def dims_of_convolution(product: Any, kernel: Cut) -> ProductDims:
    """Return what the dims of a ``stablehlo.convolution`` mean, whose kernel is cut in a way."""
    numbers = stablehlo.ConvDimensionNumbers(product.attributes["dimension_numbers"])
    summed = [(numbers.input_feature_dimension, numbers.kernel_input_feature_dimension)]
    output_dims = {
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
        output_dims[of_output] = (0, of_input)
        if kernel.dims[of_kernel]:  # a gradient, whose kernel is as large as its input
            summed.append((of_input, of_kernel))
    return ProductDims(summed, [], [output_dims[dim] for dim in sorted(output_dims)])


# ------------------------------------------------------------------------------------ Product order
#
# Products that XLA might put on the wrong devices are told how to lie, before compiling.
#
# Which products those are, and why, see :mod:`xla_dtensor.core.product_order`. It depends on how
# XLA is going to cut the factors and the result, which follows from the whole program. So a copy of
# the lowered program is propagated, its products are looked at, and those concerned are told how to
# lie:
#
#     %2 = stablehlo.dot_general %0, %1                          [b, c] x [b, a.c] -> [b, a.c]
#     ----
#     %3 = sdy.sharding_constraint %0 <@mesh, [{"b"}, {}]>
#     %4 = sdy.sharding_constraint %1 <@mesh, [{"b"}, {"a", "c"}]>
#     %5 = stablehlo.dot_general %3, %4                          [b, -] x [b, a.c] -> [-, a.c]
#     %6 = sdy.sharding_constraint %5 <@mesh, [{}, {"a", "c"}]>
#
# Factors that agree (:mod:`xla_dtensor.core.product_order`) leave XLA one way to make the product,
# without the sum's axes in its cut: such a product is never concerned. Where they did not agree XLA
# has the same choice to make, and the smaller factor to gather. What used the product goes on from
# the last constraint, and is cut as before.
#
# A program on a mesh with fewer than two axes larger than 1 is not looked at. Others cost one run
# of Shardy's propagation, a small part of compiling.

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
        if not products:
            return 0
        constrained: set[int] = set()
        while cuts_by_number := _cuts_to_constrain(products, propagated(module), meshes):
            for number, cuts in cuts_by_number.items():
                if number in constrained:
                    raise _order_error(products[number])
                _constrain(products[number], cuts)
            constrained.update(cuts_by_number)
        unnumber(products)
    return len(constrained)


def _order_error(product: Any) -> CompileError:
    return CompileError(
        f"A product at {product.location} was about to be compiled. XLA would put its tiles on the "
        "wrong devices, and no cut was found that keeps their order. Redistribute what it is made "
        "of so that the dim that is summed over is not sharded."
    )


def _cuts_to_constrain(
    products: Sequence[Any], propagated_copy: Any, meshes: Mapping[str, MeshAxes]
) -> dict[int, tuple[Cut, Cut, Cut]]:
    """Return how the products that XLA might get wrong are to lie instead, by number.

    One in a function that is called several times is told as the first of its calls needs it.
    """
    cuts_by_number: dict[int, tuple[Cut, Cut, Cut]] = {}
    for op in operations(propagated_copy):
        number = number_of(op)
        if number is None:
            continue
        cuts = _cuts_of(op, meshes)
        instead = None if cuts is None else _order_keeping_cuts(products[number], cuts)
        if instead is not None:
            cuts_by_number.setdefault(number, instead)
    return cuts_by_number


def _cuts_of(product: Any, meshes: Mapping[str, MeshAxes]) -> tuple[Cut, Cut, Cut] | None:
    """Return how the factors and the result of a product lie; None where nothing says so."""
    values = (*product.operands, product.result)
    cuts = [cut_of(value, meshes) for value in values]
    known_cut = next((cut for cut in cuts if cut is not None), None)
    if known_cut is None:
        return None
    lhs, rhs, output = (
        cut or Cut(known_cut.mesh, ((),) * len(_shape(value)), known_cut.manual)
        for cut, value in zip(cuts, values, strict=True)
    )
    return lhs, rhs, output


def _order_keeping_cuts(product: Any, cuts: tuple[Cut, Cut, Cut]) -> tuple[Cut, Cut, Cut] | None:
    """Return how a product is to lie instead; None where XLA cannot get it wrong."""
    lhs, rhs, output = cuts
    dims = dims_of_dot(product) if product.name == _DOT else dims_of_convolution(product, rhs)
    tiles = lhs.tiles(), rhs.tiles(), output.tiles()
    if not loses_order(*tiles, *dims, num_parts(cuts)):
        return None
    return agreed_cuts(dims, lhs, rhs, [_shape(factor) for factor in product.operands])


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(ir.RankedTensorType(value.type).shape)


def _constrain(product: Any, cuts: tuple[Cut, Cut, Cut]) -> None:
    """Constrain the factors of a product and its result."""
    with ir.InsertionPoint(product):
        for number, cut in enumerate(cuts[:2]):
            factor = sdy.ShardingConstraintOp(product.operands[number], cut.attribute())
            product.operands[number] = factor.result
    with ir.InsertionPoint.after(product):
        constraint = sdy.ShardingConstraintOp(product.result, cuts[2].attribute()).operation
    product.result.replace_all_uses_except(constraint.result, [constraint])


# ------------------------------------------------------------------------------------------ Ordered
#
# A function that JAX compiles outside of a step, whose products are looked at first.
#
# ``jax.jit`` gives no chance to between lowering and compiling. This one is called like what it
# returns: for each kind of arguments, their shardings included, the function is lowered, its
# products are told how to lie (:mod:`xla_dtensor.runtimes.jax.arrays.products`), and the program is
# kept.


class OrderedProgram:
    """A jitted function without products whose tiles lie on the wrong devices.

    Args:
        function: Takes and returns trees of arrays.

    Example:
        >>> program = OrderedProgram(lambda x, y: x @ y)
        >>> program(jax.numpy.ones((2, 3)), jax.numpy.ones((3, 2))).shape
        (2, 2)
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._programs: dict[Hashable, Callable[..., Any]] = {}

    def __call__(self, *args: Any) -> Any:
        leaves, tree = jax.tree.flatten(args)
        key = (tree, tuple((jax.typeof(v), getattr(v, "sharding", None)) for v in leaves))
        program = self._programs.get(key)
        if program is None:
            lowered = jax.jit(self._function).lower(*args)
            keep_product_orders(lowered)
            program = self._programs[key] = lowered.compile()
        return program(*args)
