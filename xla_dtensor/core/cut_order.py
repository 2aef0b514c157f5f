"""Placements, axis by axis <-> the cuts of each tensor dim, outermost to innermost.

PyTorch applies placements from the first mesh axis to the last. Each one cuts what the axes before
it have left, and what they have left need not be contiguous. Seen from the tensor, a dim is a row
of cuts, some taken by an axis and some still free, with free room behind the last:

    Shard(d) on an axis of size m                       takes the outermost free m-fold cut of dim d
    _StridedShard(d, split_factor=s)                    leaves the outermost free s-fold cut, takes
    m inside it

    (dp=2, tp=4), [_StridedShard(0, 4), Shard(0)]
        dp leaves a 4-fold cut, takes 2:    [free 4, dp]
        tp takes 4, and finds it free:      [tp, dp]

An axis can straddle what is free: m=4 over a free 2 takes it as the outer part of the axis and goes
on inside. Where neither number divides the other there is no row of cuts, and so no tiling: an
error.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TypeAlias

from mesh_utils import Axis, Mesh
from xla_dtensor.core.entries import (
    AxisPart,
    Dim,
    Entry,
    Gap,
    axis_sizes,
    entry_axis,
    entry_size,
    normal_dim,
)
from xla_dtensor.core.errors import LayoutError
from xla_dtensor.core.placements import Partial, PlacementRecord, Replicate, Shard, StridedShard

_Take: TypeAlias = tuple[Axis, int, int]
"""(axis, its size, split factor): what one placement takes of a dim."""


class _MisfitError(Exception):
    """A cut of `wanted` pieces, for `axis`, meets a free one of `free` pieces."""

    def __init__(self, wanted: int, free: int) -> None:
        super().__init__(wanted, free)
        self.wanted = wanted
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
        dims = tuple(normal_dim(_cuts(dim_takes), sizes) for dim_takes in takes)
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
        seen: set[Axis] = set()
        for position, entry in enumerate(entries):
            axis = entry_axis(entry)
            if axis is None or axis in seen:
                continue
            seen.add(axis)
            skip = prod(
                entry_size(other, sizes)
                for other in entries[:position]
                if (owner := entry_axis(other)) is None or turn[owner] > turn[axis]
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
            rest = [] if free in (None, remaining) else [Gap(free // remaining)]
            entries[position : position + 1] = [_part(axis, remaining, 1, size), *rest]
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


def _next_free(entries: Sequence[Entry], position: int, wanted: int) -> int:
    """Position of the next free cut, which `wanted` must divide, or be divided by."""
    while position < len(entries) and not isinstance(entries[position], Gap):
        position += 1
    free = _free_size(entries, position)
    if free is None or free % wanted == 0 or wanted % free == 0:
        return position
    raise _MisfitError(wanted, free)


def _misfit_error(
    placements: Sequence[PlacementRecord], misfit: _MisfitError, mesh: Mesh
) -> LayoutError:
    shown = ", ".join(map(repr, placements))
    position = mesh.axis_index(misfit.axis)
    return LayoutError(
        f"placements=[{shown}] were asked for, with {placements[position]!r} on axis "
        f"{misfit.axis!r} (size {mesh.mesh_shape[position]}). "
        f"There it cuts {misfit.wanted} pieces across a cut into {misfit.free} that split_factor "
        "left free, and neither number divides the other. "
        "Pass a split_factor that is a product of the sizes of later axes on that dim."
    )
