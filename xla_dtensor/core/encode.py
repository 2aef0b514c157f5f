"""Layout -> OpSharding: from cuts by mesh axes to tiles of the root's partitions.

A mesh knows how each of its axes walks through the root's flat order (`Mesh.digits`). Where that
walk has digits, so has each dim, and the OpSharding is written from them in O(rank). Where the
mesh's order, or a part of an axis, has none, the tile assignment is worked out as an array and
listed.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
from numpy.typing import NDArray

from mesh_utils import Axis, Digit, Mesh, mixed_radix_positions
from xla_dtensor.core.digits import remaining_walk, walk_part
from xla_dtensor.core.entries import AxisPart, Dim, Gap, axis_sizes, cuts
from xla_dtensor.core.errors import LayoutError
from xla_dtensor.core.op_sharding import OpSharding


def op_sharding_of_dims(dims: Sequence[Dim], mesh: Mesh, root: Mesh) -> OpSharding:
    """The OpSharding of a layout's dims, relative to a root mesh.

    Args:
        dims: Entries per tensor dim.
        mesh: Their mesh.
        root: The mesh whose flat order numbers the partitions.

    Returns:
        The canonical OpSharding over all of `root`; axes of the root that cut nothing hold copies.

    Raises:
        LayoutError: A gap lies outside a cut, or the mesh has only some of the root's devices.
        MeshError: The mesh has devices that the root lacks.
    """
    sizes = axis_sizes(mesh)
    dims = tuple(cuts(dim, sizes) for dim in dims)
    _refuse_gaps(dims, mesh)
    if not any(dims):
        return OpSharding.replicated()
    walks = mesh.digits(root)
    if walks is not None:
        tiles = _dim_digits(dims, dict(zip(mesh.axis_names, walks, strict=True)))
        if tiles is not None:
            return OpSharding.from_digits(tiles, root.size())
    return _listed(dims, mesh, root)


def _refuse_gaps(dims: Sequence[Dim], mesh: Mesh) -> None:
    for dim, entries in enumerate(dims):
        for entry in entries:
            if isinstance(entry, Gap):
                raise LayoutError(
                    f"The OpSharding of a layout was asked for whose dim {dim} is cut by "
                    f"{entries!r} on {mesh!r}. "
                    f"No mesh axis makes the {entry.size}-fold cut outside, so its shards are no "
                    "tiles. "
                    "Pass a split_factor that is the product of the sizes of later axes on that "
                    "dim."
                )


def _dim_digits(
    dims: Sequence[Dim], walks: dict[Axis, tuple[Digit, ...]]
) -> list[list[Digit]] | None:
    """The root's digits that each dim takes; None where part of an axis is no whole digits."""
    result: list[list[Digit]] = []
    for entries in dims:
        taken: list[Digit] = []
        for entry in entries:
            if isinstance(entry, AxisPart):
                part = walk_part(walks[entry.axis], entry.size, entry.inner)
                if part is None:
                    return None
                taken += part
            elif not isinstance(entry, Gap):
                taken += walks[entry]
        result.append(taken)
    return result


def _listed(dims: Sequence[Dim], mesh: Mesh, root: Mesh) -> OpSharding:
    """The OpSharding with the tile assignment worked out, device by device."""
    finest, order = _finest_axes(dims, mesh)
    used = {place for places in order for place in places}
    copies = [place for place in range(len(finest)) if place not in used]
    positions = _positions_in_root(mesh, root)
    by_axis = positions.reshape(*finest, -1)
    walked = by_axis.transpose(
        *(place for places in order for place in places), *copies, len(finest)
    )
    tiles = tuple(prod(finest[place] for place in places) for places in order)
    return OpSharding.from_assignment(walked.reshape(*tiles, -1), ("replicated",))


def _finest_axes(dims: Sequence[Dim], mesh: Mesh) -> tuple[list[int], list[list[int]]]:
    """The mesh with each axis split where it is cut: (sizes, per dim the places of its cuts)."""
    sizes = axis_sizes(mesh)
    finest: list[int] = []
    first: dict[Axis, int] = {}
    parts = {
        axis: [e for entries in dims for e in entries if isinstance(e, AxisPart) and e.axis == axis]
        for axis in sizes
    }
    for axis, size in sizes.items():
        first[axis] = len(finest)
        finest += [part.size for part in parts[axis]] or [size]
    order: list[list[int]] = []
    for entries in dims:
        places: list[int] = []
        for entry in entries:
            if isinstance(entry, AxisPart):
                places.append(first[entry.axis] + parts[entry.axis].index(entry))
            elif not isinstance(entry, Gap):
                places.append(first[entry])
        order.append(places)
    return finest, order


def _positions_in_root(mesh: Mesh, root: Mesh) -> NDArray[np.int64]:
    """Positions in the root: shape (mesh shape..., copies), each of the root's once.

    A submesh stands for all the submeshes beside it: the copies are the rest of its own root.
    """
    if mesh.size() == root.size():
        return mesh.positions(root)[..., None]
    own = mesh.root
    walks = mesh.digits()
    if own.size() == root.size() and walks is not None:
        walk = [digit for walk in walks for digit in walk]
        rest = remaining_walk(walk, own.size())
        if rest is not None:
            places = mixed_radix_positions([*walk, *rest])
            return own.positions(root).reshape(-1)[places].reshape(*mesh.mesh_shape, -1)
    raise LayoutError(
        f"An OpSharding on {mesh!r} was asked for, in a program over {root!r}. "
        f"The mesh has {mesh.size()} of the program's {root.size()} devices, and is no submesh of "
        "all of them. "
        "Pass a mesh over all devices, or one cut out of it by axis names."
    )
