"""OpSharding back to Layout: which mesh axes did XLA cut each dim with?

XLA speaks of partitions and tiles, a layout of mesh axes. Each device's tile has a coordinate per
dim; walking along one mesh axis, that coordinate moves in one dim by a constant stride, or not at
all, if the tiling follows the mesh. The axes of a dim, by falling stride, are its cuts from the
outermost to the innermost:

    {devices=[4,2]<=[2,4]T(1,0)} on (dp=2, tp=4)
    along tp the row tile moves by 1, along dp the column tile by 1:   [tp, dp]

A tiling that does not follow the mesh (half an axis on one dim) has no such layout.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from mesh_utils import Axis, Mesh
from xla_dtensor.core.layout import Layout
from xla_dtensor.core.op_sharding import OpSharding
from xla_dtensor.core.placements import Entry

__all__ = ["layout_of_op_sharding"]


@lru_cache(maxsize=4096)
def layout_of_op_sharding(
    op_sharding: OpSharding, mesh: Mesh, tensor_ndim: int, root: Mesh | None = None
) -> Layout | None:
    """Return the layout on `mesh` that means `op_sharding`.

    Args:
        op_sharding: Replicated, or tiled with or without copies.
        mesh: The mesh to express it on.
        tensor_ndim: The tensor's number of dims.
        root: The mesh whose flat order the partition ids count; the mesh's own root when None.

    Returns:
        The layout; None when no whole axes of the mesh make this tiling.

    Example:
        >>> mesh = Mesh.arange((2, 4), ("dp", "tp"))
        >>> sharding = OpSharding.parse("{devices=[4,2]<=[2,4]T(1,0)}")
        >>> print(layout_of_op_sharding(sharding, mesh, 2))
        [tp, dp]
    """
    if op_sharding.canonical().kind == "replicated":
        return Layout.replicated(mesh, tensor_ndim)
    if not op_sharding.is_tiled or op_sharding.tensor_ndim != tensor_ndim:
        return None
    tiles = _tile_coordinates(op_sharding, mesh, root)
    if tiles is None:
        return None
    cuts: list[list[tuple[int, Axis]]] = [[] for _ in range(tensor_ndim)]
    for index, axis in enumerate(mesh.axis_names):
        if mesh.mesh_shape[index] == 1:
            continue
        step = (tiles.take(1, axis=index) - tiles.take(0, axis=index)).reshape(-1, tensor_ndim)[0]
        cut_dims = np.flatnonzero(step)
        if len(cut_dims) > 1:
            return None
        if len(cut_dims) == 1:
            cuts[int(cut_dims[0])].append((int(step[cut_dims[0]]), axis))
    dims: tuple[tuple[Entry, ...], ...] = tuple(
        tuple(axis for _, axis in sorted(dim, key=lambda cut: -cut[0])) for dim in cuts
    )
    layout = Layout(mesh, dims)
    return layout if layout.op_sharding(root) == op_sharding else None


def _tile_coordinates(
    op_sharding: OpSharding, mesh: Mesh, root: Mesh | None
) -> NDArray[np.int64] | None:
    """The tile of each device: int64 [*mesh_shape, tensor_ndim]."""
    assignment = op_sharding.tile_assignment
    if assignment.size != (mesh.root if root is None else root).size():
        return None
    ndim = op_sharding.tensor_ndim or 0
    place = np.empty(assignment.size, dtype=np.int64)
    place[assignment.reshape(-1)] = np.arange(assignment.size)
    coordinates = np.stack(np.unravel_index(place, assignment.shape)[:ndim], axis=-1)
    return coordinates[mesh.positions(root)]
