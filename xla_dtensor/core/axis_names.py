"""Partition specs and alias tuples: the axis names of each tensor dim.

    partition spec    ("dp", None, ("ep", "tp"))    torch_xla also takes axis positions: (0, None,
    (1, 2)) aliases           ("dp", "None", ("ep", "tp"))  names only

Both list axes from the outermost cut to the innermost one. A spec may leave a dim open (JAX's
UNCONSTRAINED): the compiler then chooses.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, TypeAlias, cast

from mesh_utils import Axis, AxisError, Mesh
from xla_dtensor.core.entries import AxisPart, Dim, Gap, describe_axes
from xla_dtensor.core.errors import LayoutError


class _Open:
    """Marks a dim that the compiler may cut as it likes; one object, prints as JAX's does."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "UNCONSTRAINED"

    def __reduce__(self) -> str:
        return "OPEN"


OPEN: Final = _Open()

SpecEntry: TypeAlias = Axis | tuple[Axis, ...] | _Open | None
AliasEntry: TypeAlias = str | int | tuple[Axis, ...]


def read_partition_spec(
    spec: Iterable[object], mesh: Mesh, tensor_ndim: int | None
) -> tuple[tuple[Dim, ...], frozenset[int]]:
    """Reads a partition spec.

    Args:
        spec: Per dim None, an axis, a tuple of axes, or a marker that prints as UNCONSTRAINED.
        mesh: The mesh; its axes may be given by name or position.
        tensor_ndim: Rank of the tensor, or None: the spec's length. Missing trailing dims are not
            cut.

    Returns:
        (entries per dim, open dims).

    Raises:
        LayoutError: An entry of another kind, an unknown axis, or more entries than dims.
    """
    if isinstance(spec, str):
        raise _spec_error(
            spec, "A string is one entry, not a spec", "a tuple with one entry per dim"
        )
    if getattr(spec, "unreduced", None):
        raise _spec_error(spec, "Its unreduced axes are pending sums", "placements with Partial")
    entries = tuple(spec)
    if tensor_ndim is not None and len(entries) > tensor_ndim:
        raise _spec_error(
            spec,
            f"It has {len(entries)} entries for a tensor of rank {tensor_ndim}",
            "at most one entry per dim",
        )
    dims = [_read_spec_entry(entry, dim, spec, mesh) for dim, entry in enumerate(entries)]
    missing = 0 if tensor_ndim is None else tensor_ndim - len(entries)
    open_dims = frozenset(
        dim for dim, entry in enumerate(entries) if repr(entry) == "UNCONSTRAINED"
    )
    return (*dims, *((),) * missing), open_dims


def _read_spec_entry(entry: object, dim: int, spec: object, mesh: Mesh) -> Dim:
    if entry is None or repr(entry) == "UNCONSTRAINED":
        return ()
    axes = cast(Sequence[object], entry) if isinstance(entry, (tuple, list)) else (entry,)
    return tuple([_read_axis(axis, dim, spec, mesh) for axis in axes])


def _read_axis(axis: object, dim: int, spec: object, mesh: Mesh) -> Axis:
    try:
        return mesh.axis_names[mesh.axis_index(cast(Axis, axis))]
    except AxisError:
        raise _spec_error(
            spec,
            f"Entry {axis!r} for dim {dim} is no axis of the mesh with {describe_axes(mesh)}",
            f"None, one of {', '.join(map(repr, mesh.axis_names))}, or a tuple of them",
        ) from None


def _spec_error(spec: object, reason: str, instead: str) -> LayoutError:
    return LayoutError(f"partition_spec={spec!r} was asked for. {reason}. Pass {instead}.")


def spec_of_dims(dims: Sequence[Dim], open_dims: frozenset[int]) -> tuple[SpecEntry, ...]:
    """The partition spec of a layout's dims.

    Raises:
        LayoutError: A dim is cut by part of an axis or has a gap, or is cut and open.
    """
    return tuple(_spec_entry(dim, entries, dim in open_dims) for dim, entries in enumerate(dims))


def _spec_entry(dim: int, entries: Dim, is_open: bool) -> SpecEntry:
    if is_open and entries:
        raise LayoutError(
            f"The partition spec of a layout was asked for whose dim {dim} is cut by {entries!r} "
            "and open. "
            "A spec leaves a whole dim open or none of it. Read dims and open_dims instead."
        )
    if is_open:
        return OPEN
    axes = _axes(dim, entries, "The partition spec")
    return None if axes == () else axes  # axis number 0 is false


def _axes(dim: int, entries: Dim, asked: str) -> Axis | tuple[Axis, ...]:
    """The axes of a dim: one bare, several as a tuple."""
    axes: list[Axis] = []
    for entry in entries:
        if isinstance(entry, (AxisPart, Gap)):
            raise LayoutError(
                f"{asked} of a layout was asked for whose dim {dim} is cut by {entries!r}. "
                "It can name whole axes only. Use placements, or Layout.factored() where only "
                "parts are in the way."
            )
        axes.append(entry)
    return axes[0] if len(axes) == 1 else tuple(axes)


def read_aliases(aliases: Sequence[object], mesh: Mesh, tensor_ndim: int | None) -> tuple[Dim, ...]:
    """Reads alias placements: per tensor dim "None", None, an axis name, or a tuple of names.

    Raises:
        LayoutError: Not a tuple, one entry per dim, of names of axes.
    """
    if not isinstance(aliases, tuple):
        raise _alias_error(aliases, f"A {type(aliases).__name__} is not read as aliases", mesh)
    if tensor_ndim is not None and len(aliases) != tensor_ndim:
        raise _alias_error(
            aliases, f"It has {len(aliases)} entries for a tensor of rank {tensor_ndim}", mesh
        )
    return tuple(_read_alias(entry, aliases, mesh) for entry in aliases)


def _read_alias(entry: object, aliases: object, mesh: Mesh) -> Dim:
    if entry is None or entry == "None":
        return ()
    names = cast(tuple[object, ...], entry) if isinstance(entry, tuple) else (entry,)
    for name in names:
        if not isinstance(name, str):
            raise _alias_error(
                aliases,
                f"{name!r}, of type {type(name).__name__}, is not the name of an axis",
                mesh,
            )
        if name not in mesh.axis_names:
            raise _alias_error(
                aliases, f"{name!r} is no axis of the mesh with {describe_axes(mesh)}", mesh
            )
    return tuple(name for name in names if isinstance(name, str))


def _alias_error(aliases: object, reason: str, mesh: Mesh) -> LayoutError:
    names = ", ".join(map(repr, mesh.axis_names))
    return LayoutError(
        f"placements={aliases!r} were asked for as aliases. {reason}. "
        f'Pass a tuple with one entry per tensor dim: "None", one of {names}, or a tuple of them.'
    )


def aliases_of_dims(dims: Sequence[Dim]) -> tuple[AliasEntry, ...]:
    """The aliases of a layout's dims.

    Raises:
        LayoutError: A dim is cut by part of an axis, or has a gap.
    """
    found = (_axes(dim, entries, "The alias tuple") for dim, entries in enumerate(dims))
    return tuple("None" if axes == () else axes for axes in found)
