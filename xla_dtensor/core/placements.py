"""How a tensor lies on one mesh axis: the core's own frozen records, and reading PyTorch's.

PyTorch's placement objects are never imported here. They are read by their attributes, because the
core must load without torch and because the classes differ between versions: `_StridedShard` is a
`Shard` in torch 2.9 and is not one (its `is_shard()` is False) in 2.13; in 2.9 it even compares
equal to a `Shard` with another hash. The records below have one meaning each, compare and hash by
value, and answer the same questions (`is_shard`, `is_replicate`, `is_partial`) as PyTorch's
objects.

Example:
    >>> read_placements([StridedShard(-1, split_factor=1)], 2, Mesh.arange((8,)))
    (Shard(dim=1),)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

from mesh_utils import Axis, Mesh
from mesh_utils.mesh import as_integer
from xla_dtensor.core.errors import LayoutError

__all__ = []


# --------------------------------------------------------------------- What a tensor dim is cut by
#
# Mesh axes, parts of axes, and gaps.
#
# A layout lists, per tensor dim, its entries from the outermost cut to the innermost one. An entry
# is the name of a mesh axis (all of it), an `AxisPart` (one digit of an axis's coordinate), or a
# `Gap` (a cut that no axis has made, left outside another entry by PyTorch's `_StridedShard`).


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
    normal: list[Entry] = []
    for entry in entries:
        if isinstance(entry, Gap) and entry.size == 1:
            continue
        joined = _joined(normal[-1], entry) if normal else None
        if joined is not None:
            normal[-1] = joined
        else:
            normal.append(entry)
    while normal and isinstance(normal[-1], Gap):
        normal.pop()
    for place, entry in enumerate(normal):
        # A part that is all of its axis is the bare axis.
        if isinstance(entry, AxisPart) and entry.inner == 1 and sizes.get(entry.axis) == entry.size:
            normal[place] = entry.axis
    return tuple(normal)


def _joined(outer: Entry, inner: Entry) -> Entry | None:
    if isinstance(outer, Gap) and isinstance(inner, Gap):
        return Gap(outer.size * inner.size)
    if not (isinstance(outer, AxisPart) and isinstance(inner, AxisPart)):
        return None
    if outer.axis != inner.axis or outer.inner != inner.size * inner.inner:
        return None
    return AxisPart(outer.axis, outer.size * inner.size, inner.inner)


def cuts(dim: Iterable[Entry], sizes: AxisSizes) -> Dim:
    """The entries that cut: without axes of size 1, and without gaps that lie outside nothing."""
    return normal_dim([entry for entry in dim if entry_size(entry, sizes) > 1], sizes)


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
    axes: list[Axis] = list(partial_axes)
    for dim in dims:
        for entry in dim:
            if isinstance(entry, AxisPart):
                parts.setdefault(entry.axis, []).append(entry)
            elif not isinstance(entry, Gap):
                axes.append(entry)
    axes += parts
    for axis in axes:
        if axis not in sizes:
            raise LayoutError(
                f"Axis {axis!r} was asked for on a mesh with axes {describe_axes(mesh)}. It is not "
                "one of them. "
                f"Pass one of {', '.join(map(repr, sizes))}."
            )
        if axes.count(axis) > 1:
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
    for entries in dims:
        for entry in entries:
            if isinstance(entry, AxisPart):
                parts.setdefault(entry.axis, []).append(entry)
    if not parts:
        return mesh, tuple(dims)
    names: dict[Entry, Axis] = {}
    axis_names = {str(axis) for axis in mesh.axis_names}
    for axis, pieces in parts.items():
        for index, piece in enumerate(pieces):
            name = f"{axis}_{index}"
            while name in axis_names:
                name += "_"
            axis_names.add(name)
            names[piece] = name
    factors = {axis: [(names[p], p.size) for p in pieces] for axis, pieces in parts.items()}
    new_dims = tuple(tuple(names.get(entry, entry) for entry in entries) for entries in dims)
    return mesh.factored(factors), new_dims


# -------------------------------------------------------------- How a tensor lies on one mesh axis


@dataclass(frozen=True, slots=True)
class Shard:
    """The axis cuts tensor dim `dim` into equal chunks, the outermost cut that is still free."""

    dim: int

    def is_shard(self, dim: int | None = None) -> bool:
        """Whether this shards a dim (or exactly `dim`)."""
        return dim is None or dim == self.dim

    def is_replicate(self) -> bool:
        """False."""
        return False

    def is_partial(self, reduce_op: str | None = None) -> bool:
        """False."""
        return False


@dataclass(frozen=True, slots=True)
class StridedShard:
    """As `Shard`, but inside the outermost free `split_factor`-fold cut (for a later axis)."""

    dim: int
    split_factor: int

    def is_shard(self, dim: int | None = None) -> bool:
        """Whether this shards a dim (or exactly `dim`)."""
        return dim is None or dim == self.dim

    def is_replicate(self) -> bool:
        """False."""
        return False

    def is_partial(self, reduce_op: str | None = None) -> bool:
        """False."""
        return False


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every device along the axis holds the same values."""

    def is_shard(self, dim: int | None = None) -> bool:
        """False."""
        return False

    def is_replicate(self) -> bool:
        """True."""
        return True

    def is_partial(self, reduce_op: str | None = None) -> bool:
        """False."""
        return False


@dataclass(frozen=True, slots=True)
class Partial:
    """The devices along the axis hold terms; the tensor is their reduction by `reduce_op`."""

    reduce_op: str = "sum"

    def is_shard(self, dim: int | None = None) -> bool:
        """False."""
        return False

    def is_replicate(self) -> bool:
        """False."""
        return False

    def is_partial(self, reduce_op: str | None = None) -> bool:
        """Whether this is a pending reduction (or exactly one by `reduce_op`)."""
        return reduce_op is None or reduce_op == self.reduce_op


PlacementRecord: TypeAlias = Shard | StridedShard | Replicate | Partial

_REPLICATE = Replicate()
_SHARDS = tuple(map(Shard, range(16)))


def read_placements(
    placements: Sequence[object], tensor_ndim: int, mesh: Mesh
) -> tuple[PlacementRecord, ...]:
    """Reads PyTorch's placement objects, or the records here, into records.

    Args:
        placements: One per mesh axis: torch's `Shard`, `_StridedShard`, `Replicate`, `Partial` (or
            a subclass), or records.
        tensor_ndim: Rank of the tensor; a negative dim counts from its end.
        mesh: The mesh.

    Returns:
        The records, with dims in [0, tensor_ndim); a split factor of 1 gives a plain `Shard`.

    Raises:
        LayoutError: Wrong number of placements, an unknown object, a dim out of range, or a split
            factor below 1.
    """
    if len(placements) != mesh.ndim:
        listed = ", ".join(map(repr, placements))
        raise LayoutError(
            f"placements=[{listed}] were asked for on a mesh with axes {describe_axes(mesh)}. "
            f"That is {len(placements)} placements for {mesh.ndim} axes. "
            "Pass one placement per mesh axis."
        )
    try:
        return tuple([_read_placement(placement, tensor_ndim) for placement in placements])
    except _RefusedError as refused:
        index = next(i for i, placement in enumerate(placements) if placement is refused.placement)
        axis, size = mesh.axis_names[index], mesh.mesh_shape[index]
        raise LayoutError(
            f"placements[{index}] = {refused.placement!r} was asked for on axis {axis!r} "
            f"(size {size}), for a tensor of rank {tensor_ndim}. {refused.reason}. "
            f"Pass {refused.instead}."
        ) from None


class _RefusedError(Exception):
    """A placement that cannot be read; the caller knows where it stands."""

    def __init__(self, placement: object, reason: str, instead: str) -> None:
        super().__init__(reason)
        self.placement = placement
        self.reason = reason
        self.instead = instead


def _read_placement(placement: object, tensor_ndim: int) -> PlacementRecord:
    kind = _kind_of_type.get(type(placement)) or _kind(placement)
    if kind is Replicate:
        return _REPLICATE
    if kind is Shard:
        return _shard(_read_dim(placement, tensor_ndim))
    if kind is StridedShard:
        dim = _read_dim(placement, tensor_ndim)
        split_factor = _read_split_factor(placement)
        return _shard(dim) if split_factor == 1 else StridedShard(dim, split_factor)
    reduce_op = getattr(placement, "reduce_op", None)
    if isinstance(reduce_op, str) and reduce_op.isidentifier():
        return Partial(reduce_op)
    raise _RefusedError(placement, f"Its reduce_op={reduce_op!r} is no word", "e.g. Partial('sum')")


_kind_of_type: dict[type, type] = {}
"""Which record a type of placements is read into: asked once per type, for speed."""


def _kind(placement: object) -> type:
    if hasattr(placement, "split_factor") and hasattr(placement, "dim"):
        kind = StridedShard
    elif _answers(placement, "is_replicate"):
        kind = Replicate
    elif _answers(placement, "is_shard"):
        kind = Shard
    elif _answers(placement, "is_partial"):
        kind = Partial
    else:
        raise _RefusedError(
            placement,
            f"An object of type {type(placement).__name__} is none of PyTorch's placements",
            "Shard(dim), Replicate() or Partial(reduce_op)",
        )
    _kind_of_type[type(placement)] = kind
    return kind


def _shard(dim: int) -> Shard:
    """A Shard; the usual ones are made once."""
    return _SHARDS[dim] if dim < len(_SHARDS) else Shard(dim)


def _answers(placement: object, question: str) -> bool:
    """Whether the placement has the method `question`, and it says True."""
    method = getattr(placement, question, None)
    return callable(method) and not isinstance(placement, type) and method() is True


def _read_dim(placement: object, tensor_ndim: int) -> int:
    attribute = getattr(placement, "dim", None)
    if type(attribute) is int and 0 <= attribute < tensor_ndim:  # the usual case, at once
        return attribute
    dim = as_integer(attribute)
    if dim is None:
        raise _RefusedError(placement, "Its dim is no integer", "the tensor dim as an int")
    if -tensor_ndim <= dim < tensor_ndim:
        return dim % tensor_ndim
    instead = f"a dim from {-tensor_ndim} to {tensor_ndim - 1}" if tensor_ndim else "Replicate()"
    raise _RefusedError(placement, f"Its dim={dim} is out of range", instead)


def _read_split_factor(placement: object) -> int:
    split_factor = as_integer(getattr(placement, "split_factor", None))
    if split_factor is not None and split_factor >= 1:
        return split_factor
    raise _RefusedError(
        placement,
        "Its split_factor is no positive integer",
        "the number of pieces that lie outside this axis, 1 or more",
    )


# ---------------------------------------------------------------------------------------- Cut order
#
# Placements, axis by axis <-> the cuts of each tensor dim, outermost to innermost.
#
# PyTorch applies placements from the first mesh axis to the last. Each one cuts what the axes
# before it have left, and what they have left need not be contiguous. Seen from the tensor, a dim
# is a row of cuts, some taken by an axis and some still free, with free room behind the last:
#
#   Shard(d) on an axis of size m                       takes the outermost free m-fold cut of dim d
#   _StridedShard(d, split_factor=s)                    leaves the outermost free s-fold cut, takes
#   m inside it
#
#     (dp=2, tp=4), [_StridedShard(0, 4), Shard(0)]
#         dp leaves a 4-fold cut, takes 2:    [free 4, dp]
#         tp takes 4, and finds it free:      [tp, dp]
#
# An axis can straddle what is free: m=4 over a free 2 takes it as the outer part of the axis and
# goes on inside. Where neither number divides the other there is no row of cuts, and so no tiling:
# an error.

_Take: TypeAlias = tuple[Axis, int, int]
"""(axis, its size, split factor): what one placement takes of a dim."""


class _MisfitError(Exception):
    """A cut into `pieces`, for `axis`, meets a free one of `free` pieces."""

    def __init__(self, pieces: int, free: int) -> None:
        super().__init__(pieces, free)
        self.pieces = pieces
        self.free = free
        self.axis: Axis = ""


def cuts_of_placements(
    placements: Sequence[PlacementRecord], tensor_ndim: int, mesh: Mesh
) -> tuple[tuple[Dim, ...], tuple[tuple[Axis, str], ...]]:
    """The dims and pending reductions that placements describe.

    Args:
        placements: One record per mesh axis, dims in [0, tensor_ndim).
        tensor_ndim: Rank of the tensor.
        mesh: The mesh.

    Returns:
        (entries per tensor dim, (axis, reduce op) pairs in mesh axis order).

    Raises:
        LayoutError: An axis would cut across what is left of a strided cut.
    """
    sizes = axis_sizes(mesh)
    takes: list[list[_Take]] = [[] for _ in range(tensor_ndim)]
    partial: list[tuple[Axis, str]] = []
    for placement, (axis, size) in zip(placements, sizes.items(), strict=True):
        if isinstance(placement, Partial):
            partial.append((axis, placement.reduce_op))
        elif isinstance(placement, Shard):
            takes[placement.dim].append((axis, size, 1))
        elif isinstance(placement, StridedShard):
            takes[placement.dim].append((axis, size, placement.split_factor))
    try:
        dims = tuple([normal_dim(_cuts(dim_takes), sizes) for dim_takes in takes])
    except _MisfitError as misfit:
        raise _misfit_error(placements, misfit, mesh) from None
    return dims, tuple(partial)


def _cuts(takes: Sequence[_Take]) -> list[Entry]:
    """The cuts of one dim.

    An axis of size 1 cuts nothing, so its split factor means nothing: where that does not fit the
    other axes, it is dropped.
    """
    try:
        return _cuts_exactly(takes)
    except _MisfitError:
        if not any(size == 1 < skip for _, size, skip in takes):
            raise
    return _cuts_exactly([(axis, size, 1 if size == 1 else skip) for axis, size, skip in takes])


def _cuts_exactly(takes: Sequence[_Take]) -> list[Entry]:
    entries: list[Entry] = []
    for axis, size, skip in takes:
        try:
            _take(entries, axis, size, skip)
        except _MisfitError as misfit:
            misfit.axis = axis
            raise
    return entries


def placements_of_cuts(
    dims: Sequence[Dim], partial: Sequence[tuple[Axis, str]], mesh: Mesh
) -> tuple[PlacementRecord, ...]:
    """The placements that describe dims: the inverse of `cuts_of_placements`.

    An axis's split factor is what lies outside its first cut and is still free at its turn: gaps,
    and the cuts of later axes.

    Raises:
        LayoutError: Parts of axes stand in an order that PyTorch cannot write.
    """
    sizes = axis_sizes(mesh)
    turn = {axis: index for index, axis in enumerate(sizes)}
    placements: list[PlacementRecord] = [Replicate()] * len(sizes)
    for axis, reduce_op in partial:
        placements[turn[axis]] = Partial(reduce_op)
    for dim, entries in enumerate(dims):
        placed: set[Axis] = set()
        for position, entry in enumerate(entries):
            axis = entry_axis(entry)
            if axis is None or axis in placed:
                continue
            placed.add(axis)
            skip = prod(
                entry_size(outer, sizes)
                for outer in entries[:position]
                if (owner := entry_axis(outer)) is None or turn[owner] > turn[axis]
            )
            placements[turn[axis]] = Shard(dim) if skip == 1 else StridedShard(dim, skip)
    _check_parts_come_back(placements, dims, mesh)
    return tuple(placements)


def _check_parts_come_back(
    placements: Sequence[PlacementRecord], dims: Sequence[Dim], mesh: Mesh
) -> None:
    """Parts of axes can stand in orders that no placements give."""
    parts = [entry for entries in dims for entry in entries if isinstance(entry, AxisPart)]
    if parts and cuts_of_placements(placements, len(dims), mesh)[0] != tuple(dims):
        raise LayoutError(
            f"The placements of a layout were asked for whose dims are cut by {tuple(dims)!r}. "
            "PyTorch's placements cannot put the parts of an axis in that order. "
            "Use the layout itself, or the placements of Layout.factored()."
        )


def _take(entries: list[Entry], axis: Axis, size: int, skip: int) -> None:
    """Cuts a dim by an axis, inside the outermost free `skip`-fold cut. Free cuts are the gaps."""
    position = 0
    while skip > 1:
        position = _next_free(entries, position, skip)
        if position == len(entries):
            entries.append(Gap(skip))
            position += 1
            break
        position, skip = _leave(entries, position, skip)
    remaining = size
    while True:
        position = _next_free(entries, position, remaining)
        free = _free_size(entries, position)
        if free is None or free % remaining == 0:
            gap = [] if free in (None, remaining) else [Gap(free // remaining)]
            entries[position : position + 1] = [_part(axis, remaining, 1, size), *gap]
            return
        remaining //= free
        entries[position] = _part(axis, free, remaining, size)
        position += 1


def _leave(entries: list[Entry], position: int, skip: int) -> tuple[int, int]:
    """Leaves the free cut at a position; returns (where to go on, what is still to be left)."""
    free = _free_size(entries, position) or 1
    if free % skip:
        return position + 1, skip // free
    if free > skip:
        entries[position : position + 1] = [Gap(skip), Gap(free // skip)]
    return position + 1, 1


def _part(axis: Axis, size: int, inner: int, axis_size: int) -> Entry:
    return axis if size == axis_size else AxisPart(axis, size, inner)


def _free_size(entries: Sequence[Entry], position: int) -> int | None:
    """Size of the free cut at a position; None behind the last entry, where any cut is free."""
    entry = entries[position] if position < len(entries) else None
    return entry.size if isinstance(entry, Gap) else None


def _next_free(entries: Sequence[Entry], position: int, pieces: int) -> int:
    """Position of the next free cut, which `pieces` must divide, or be divided by."""
    while position < len(entries) and not isinstance(entries[position], Gap):
        position += 1
    free = _free_size(entries, position)
    if free is None or free % pieces == 0 or pieces % free == 0:
        return position
    raise _MisfitError(pieces, free)


def _misfit_error(
    placements: Sequence[PlacementRecord], misfit: _MisfitError, mesh: Mesh
) -> LayoutError:
    listed = ", ".join(map(repr, placements))
    position = mesh.axis_index(misfit.axis)
    return LayoutError(
        f"placements=[{listed}] were asked for, with {placements[position]!r} on axis "
        f"{misfit.axis!r} (size {mesh.mesh_shape[position]}). "
        f"There it cuts {misfit.pieces} pieces across a cut into {misfit.free} that split_factor "
        "left free, and neither number divides the other. "
        "Pass a split_factor that is a product of the sizes of later axes on that dim."
    )
