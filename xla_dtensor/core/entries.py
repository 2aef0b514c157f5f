"""What a tensor dim is cut by: mesh axes, parts of axes, and gaps.

A layout lists, per tensor dim, its entries from the outermost cut to the innermost one. An entry is
the name of a mesh axis (all of it), an `AxisPart` (one digit of an axis's coordinate), or a `Gap`
(a cut that no axis has made, left outside another entry by PyTorch's `_StridedShard`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

from mesh_utils import Axis, Mesh
from xla_dtensor.core.errors import LayoutError


@dataclass(frozen=True, slots=True)
class Gap:
    """A cut into `size` pieces that no axis has taken: every device holds all the pieces."""

    size: int


@dataclass(frozen=True, slots=True)
class AxisPart:
    """The digit `(coordinate // inner) % size` of the coordinate on an axis."""

    axis: Axis
    size: int
    inner: int


Entry: TypeAlias = Axis | AxisPart | Gap
Dim: TypeAlias = tuple[Entry, ...]
AxisSizes: TypeAlias = Mapping[Axis, int]


def axis_sizes(mesh: Mesh) -> dict[Axis, int]:
    """The axes of a mesh with their sizes, in mesh order."""
    return dict(zip(mesh.axis_names, mesh.mesh_shape, strict=True))


def describe_axes(mesh: Mesh) -> str:
    """The axes for an error message: "dp=2, tp=4"."""
    return ", ".join(f"{axis}={size}" for axis, size in axis_sizes(mesh).items())


def entry_axis(entry: Entry) -> Axis | None:
    """The mesh axis that an entry belongs to; None for a gap."""
    if isinstance(entry, AxisPart):
        return entry.axis
    return None if isinstance(entry, Gap) else entry


def entry_size(entry: Entry, sizes: AxisSizes) -> int:
    """Into how many pieces an entry cuts."""
    return entry.size if isinstance(entry, (AxisPart, Gap)) else sizes[entry]


def normal_dim(entries: Iterable[Entry], sizes: AxisSizes) -> Dim:
    """The shortest spelling of a dim: neighbours joined where they are one cut, no idle gaps."""
    result: list[Entry] = []
    for entry in entries:
        if isinstance(entry, Gap) and entry.size == 1:
            continue
        joined = _joined(result[-1], entry) if result else None
        if joined is not None:
            result[-1] = joined
        else:
            result.append(entry)
    while result and isinstance(result[-1], Gap):
        result.pop()
    return tuple(_whole(entry, sizes) for entry in result)


def _joined(outer: Entry, inner: Entry) -> Entry | None:
    if isinstance(outer, Gap) and isinstance(inner, Gap):
        return Gap(outer.size * inner.size)
    if not (isinstance(outer, AxisPart) and isinstance(inner, AxisPart)):
        return None
    if outer.axis != inner.axis or outer.inner != inner.size * inner.inner:
        return None
    return AxisPart(outer.axis, outer.size * inner.size, inner.inner)


def _whole(entry: Entry, sizes: AxisSizes) -> Entry:
    """A part that is all of its axis, as the bare axis."""
    if isinstance(entry, AxisPart) and entry.inner == 1 and sizes.get(entry.axis) == entry.size:
        return entry.axis
    return entry


def cuts(dim: Iterable[Entry], sizes: AxisSizes) -> Dim:
    """The entries that cut: without axes of size 1, and without gaps that lie outside nothing."""
    return normal_dim((entry for entry in dim if entry_size(entry, sizes) > 1), sizes)


def check_entries(dims: Sequence[Dim], partial_axes: Sequence[Axis], mesh: Mesh) -> None:
    """Checks that every axis exists and is used once, and that its parts make it up.

    Args:
        dims: Entries per tensor dim.
        partial_axes: The axes with a pending reduction.
        mesh: The mesh.

    Raises:
        LayoutError: An unknown axis, an axis used twice, or parts that do not make up their axis.
    """
    sizes = axis_sizes(mesh)
    parts: dict[Axis, list[AxisPart]] = {}
    used: list[Axis] = list(partial_axes)
    for dim in dims:
        for entry in dim:
            if isinstance(entry, AxisPart):
                parts.setdefault(entry.axis, []).append(entry)
            elif not isinstance(entry, Gap):
                used.append(entry)
    used += parts
    for axis in used:
        if axis not in sizes:
            raise LayoutError(
                f"Axis {axis!r} was asked for on a mesh with axes {describe_axes(mesh)}. It is not "
                "one of them. "
                f"Pass one of {', '.join(map(repr, sizes))}."
            )
        if used.count(axis) > 1:
            raise LayoutError(
                f"Axis {axis!r} (size {sizes[axis]}) was asked for twice in one layout. "
                "A mesh axis cuts one tensor dim, or is reduced over, once. "
                "Pass each axis once."
            )
    for axis, pieces in parts.items():
        _check_parts(axis, pieces, dims, sizes)


def _check_parts(
    axis: Axis, pieces: Sequence[AxisPart], dims: Sequence[Dim], sizes: AxisSizes
) -> None:
    """The parts of an axis lie in one dim, outermost first, and multiply to the axis."""
    inner = prod(piece.size for piece in pieces)
    chained = inner == sizes[axis]
    for piece in pieces:
        chained = chained and piece.size > 1 and piece.inner * piece.size == inner
        inner = piece.inner
    together = any(all(piece in dim for piece in pieces) for dim in dims)
    if not (chained and inner == 1 and together):
        raise LayoutError(
            f"Parts {[(piece.size, piece.inner) for piece in pieces]} of axis {axis!r} (size "
            f"{sizes[axis]}) "
            "were asked for. They do not make up the axis, outermost first, on one tensor dim. "
            "Pass parts (size, inner) whose sizes multiply to the axis, down to inner=1."
        )


def with_whole_axes(dims: Sequence[Dim], mesh: Mesh) -> tuple[Mesh, tuple[Dim, ...]]:
    """The same cuts with every part of an axis as an axis, on a mesh factored for it.

    Returns:
        (mesh of the same device order, dims without parts).
    """
    parts: dict[Axis, list[AxisPart]] = {}
    for entry in (entry for entries in dims for entry in entries):
        if isinstance(entry, AxisPart):
            parts.setdefault(entry.axis, []).append(entry)
    names: dict[Entry, Axis] = {}
    taken = {str(axis) for axis in mesh.axis_names}
    for axis, pieces in parts.items():
        for index, piece in enumerate(pieces):
            name = f"{axis}_{index}"
            while name in taken:
                name += "_"
            taken.add(name)
            names[piece] = name
    factors = {axis: [(names[p], p.size) for p in pieces] for axis, pieces in parts.items()}
    whole = tuple(tuple(names.get(entry, entry) for entry in entries) for entries in dims)
    return (mesh.factored(factors) if factors else mesh), whole
