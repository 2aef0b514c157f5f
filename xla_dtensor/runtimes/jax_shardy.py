"""How the values of a lowered program are cut, read from Shardy's attributes.

    #sdy.sharding<@mesh, [{"b"}, {"a", "c":(1)2}]>       dim 0 by axis b; dim 1 by a, then by the
                                                         outer half of c

is the `Cut` ``((b,), (a, c[1:2]))`` on the mesh of that name. Inside of a manual computation the
manual axes are no axes any more: a device sees those that share its place on them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import sdy

from xla_dtensor.core.product_order import Tiles

__all__ = ["Cut", "MeshAxes", "Piece", "cut_of", "meshes_of", "num_parts"]

_PER_VALUE = "sdy.sharding"
_REGION_IN, _REGION_OUT = "in_shardings", "out_shardings"
_COMPUTATIONS = frozenset({"sdy.named_computation", "sdy.manual_computation"})
_CONSTRAINTS = frozenset({"sdy.sharding_constraint", "sdy.reshard"})


class Piece(NamedTuple):
    """An axis, or a part of one: its digit of `size` values with `pre` outside of it."""

    axis: str
    pre: int
    size: int

    def overlaps(self, other: Piece) -> bool:
        if self.axis != other.axis:
            return False
        return self.pre < other.pre * other.size and other.pre < self.pre * self.size


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
        moved = grid.transpose([*manual, *used, *copies])[(0,) * len(manual)]
        return moved.reshape([*(math.prod(p.size for p in dim) for dim in self.dims), -1])

    def _digits(self, axis: str, size: int) -> list[Piece]:
        """Return the parts that `dims` take an axis in, and those between them."""
        parts, found, pre = sorted(p for dim in self.dims for p in dim if p.axis == axis), [], 1
        for part in parts:
            if part.pre > pre:
                found.append(Piece(axis, pre, part.pre // pre))
            found.append(part)
            pre = part.pre * part.size
        return [*found, Piece(axis, pre, size // pre)] if pre < size or not found else found

    def without(self, pieces: Iterable[Piece]) -> Cut:
        """Return the cut without whatever shares a digit with one of `pieces`."""
        taken = list(pieces)
        dims = tuple(tuple(p for p in dim if not any(map(p.overlaps, taken))) for dim in self.dims)
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
        for axis, found in bounds.items()
        for pre, end in pairwise(sorted(found))
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
        for piece, after in zip(dim, (*dim, None)[1:], strict=True):
            if not piece.overlaps(part):
                continue
            if piece.overlaps(following):
                return True
            ends_alike = piece.pre * piece.size == part.pre * part.size
            return ends_alike and after is not None and after[:2] == following[:2]
    return not any(piece.overlaps(following) for dim in cut.dims for piece in dim)


def meshes_of(module: Any) -> dict[str, MeshAxes]:
    """Return the meshes of a module by name; none where Shardy does not cut it.

    Args:
        module: The operation of an MLIR module.
    """
    found: dict[str, MeshAxes] = {}
    for op in module.regions[0].blocks[0].operations:
        if op.operation.name == "sdy.mesh":
            name = ir.StringAttr(op.attributes["sym_name"]).value
            mesh = sdy.MeshAttr(op.attributes["mesh"])
            axes: list[Any] = [sdy.MeshAxisAttr(axis) for axis in mesh.axes]
            sizes = {axis.name: axis.size for axis in axes}
            ids = np.array(list(mesh.device_ids) or range(math.prod(sizes.values())))
            found[name] = MeshAxes(name, sizes, ids.reshape(list(sizes.values())))
    return found


def cut_of(value: Any, meshes: Mapping[str, MeshAxes]) -> Cut | None:
    """Return how a value of a propagated module is cut; None where nothing was found of it.

    Args:
        value: An MLIR value of a ranked tensor type.
        meshes: From :func:`meshes_of`.
    """
    found = _sharding(value)
    if found is None:
        return None
    sharding = sdy.TensorShardingAttr(found)
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
        return _at(op, name, number)
    op = value.owner.operation  # the view of a named computation has another `name`
    if op.name in _CONSTRAINTS:
        return op.attributes["sharding"]
    name = _REGION_OUT if op.name in _COMPUTATIONS else _PER_VALUE
    return _at(op, name, ir.OpResult(value).result_number)


def _of_function(function: Any, number: int) -> Any:
    if "arg_attrs" not in function.attributes:
        return None
    given = ir.DictAttr(ir.ArrayAttr(function.attributes["arg_attrs"])[number])
    return given[_PER_VALUE] if _PER_VALUE in given else None  # noqa: SIM401 - it has no get


def _at(op: Any, name: str, number: int) -> Any:
    if name not in op.attributes:
        return None
    shardings: Sequence[Any] = sdy.TensorShardingPerValueAttr(op.attributes[name]).shardings
    return shardings[number] if number < len(shardings) else None


def _manual_axes(value: Any) -> frozenset[str]:
    """Return the axes that are manual where a value is made."""
    of_block = isinstance(value.owner, ir.Block)
    op = value.owner.owner.operation if of_block else value.owner.parent
    found: set[str] = set()
    while op is not None:
        if op.name == "sdy.manual_computation":
            manual: Any = sdy.ManualAxesAttr(op.attributes["manual_axes"])
            found.update(map(str, manual))
        op = op.parent
    return frozenset(found)
