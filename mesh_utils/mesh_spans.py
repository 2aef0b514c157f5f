"""Finds where the axes of a mesh lie: from devices in mesh order to Spans.

Meshes that lay axes along physical dims, split by mixed radix, in any order, have spans: JAX's,
HybridMesh's, those of a search. Others (random ones, say) have none, and are counted link by link.
"""

from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mesh_utils.errors import TopologyError
from mesh_utils.network import Network
from mesh_utils.position_table import PositionTable
from mesh_utils.span import Shape3, Span
from mesh_utils.topology import Topology

IntArray: TypeAlias = NDArray[np.int64]


def mesh_places(topology: Topology, device_ids: ArrayLike) -> IntArray:
    """Looks up where the devices of a mesh are.

    Args:
        topology: the chips.
        device_ids: the ids of the mesh, in its shape.

    Returns:
        Slice, x, y, z and core of each, [*mesh_shape, 5].

    Raises:
        MeshError: ids that are not in the topology.

    Example:
        >>> mesh_places(Topology.parse("v5e:2x2"), [[0, 1], [2, 3]])[1, 1].tolist()
        [0, 1, 1, 0, 0]
    """
    ids = np.asarray(device_ids, np.int64)
    table = PositionTable(topology.device_ids)
    at = table.find_all(ids, topology)
    columns = [topology.slice_index, *topology.coords.T, topology.core_on_chip]
    return np.stack([np.asarray(column, np.int64)[at] for column in columns], axis=-1)


def axis_groups(places: IntArray, axis: int) -> IntArray:
    """The groups of an axis.

    Args:
        places: slice, x, y, z and core of each device of the mesh, [*mesh_shape, 5].
        axis: which axis, counted from 0.

    Returns:
        The places of the members of each group, in the order of the axis, [groups, members, 5].

    Example:
        >>> places = mesh_places(Topology.parse("v5e:2x2"), [[0, 1], [2, 3]])
        >>> axis_groups(places, 0)[:, :, 2].tolist()
        [[0, 1], [0, 1]]
    """
    moved = np.moveaxis(places, axis, -2)
    return moved.reshape(-1, places.shape[axis], 5)


def find_span(network: Network, groups: IntArray) -> Span | None:
    """Where an axis lies, if its groups are alike and lie in rows.

    Args:
        network: the links.
        groups: the places of the members of each group, [groups, members, 5].

    Returns:
        The span, with the default order; None if there is none.

    Raises:
        TopologyError: groups that have more members in one slice than in another: XLA cannot make
            of such an axis one part per slice and one between slices.

    Example:
        >>> topology = Topology.parse("v5e:4x4")
        >>> places = mesh_places(topology, np.arange(16).reshape(4, 4))
        >>> str(find_span(Network.of(topology), axis_groups(places, 1)))
        'Span(x4)'
    """
    members = groups.shape[1]
    ordered = _sorted_members(groups)
    slices = len(np.unique(ordered[0, :, 0]))
    if members % slices:
        _refuse_ragged(ordered)
    parts = ordered.reshape(len(groups), slices, members // slices, 5)
    if (parts[..., 0] != parts[..., :1, 0]).any() or (
        np.diff(parts[:, :, 0, 0], axis=1) <= 0
    ).any():
        _refuse_ragged(ordered)
    inside = parts[..., 1:].reshape(len(groups) * slices, members // slices, 4)
    starts = inside.min(axis=1, keepdims=True)
    shape = inside - starts
    if (shape != shape[0]).any():
        return None
    return _span_of(network, shape[0], starts[:, 0, :3], slices)


def _span_of(network: Network, members: IntArray, starts: IntArray, slices: int) -> Span | None:
    """The span of a group's chips, counted from its first; it tiles the box from `starts`."""
    sizes, strides = [1, 1, 1], [1, 1, 1]
    for dim in range(3):
        values = np.unique(members[:, dim])
        sizes[dim] = len(values)
        if len(values) > 1:
            strides[dim] = int(values[1])
    cores = len(np.unique(members[:, 3]))
    chips: Shape3 = (sizes[0], sizes[1], sizes[2])
    steps: Shape3 = (strides[0], strides[1], strides[2])
    rows = [np.arange(size) * stride for size, stride in zip(sizes, strides, strict=True)]
    grid = np.stack(np.meshgrid(*rows, np.arange(cores), indexing="ij"), axis=-1).reshape(-1, 4)
    if grid.shape != members.shape or (grid != members).any():
        return None
    block = np.array(sizes) * np.array(strides)
    tiles = (starts % block < np.array(strides)).all()
    if not tiles or (np.array(network.shape) % block).any():
        return None
    return Span(chips, steps, cores, slices)


def _sorted_members(groups: IntArray) -> IntArray:
    """The members of each group by slice, x, y, z, core."""
    top = groups.reshape(-1, 5).max(axis=0) + 1
    keys = np.ravel_multi_index(tuple(np.moveaxis(groups, -1, 0)), tuple(top.tolist()))
    order = np.argsort(keys, axis=1)
    return np.take_along_axis(groups, order[:, :, None], axis=1)


def _refuse_ragged(ordered: IntArray) -> None:
    for group in ordered:
        numbers, counts = np.unique(group[:, 0], return_counts=True)
        if len(set(counts.tolist())) > 1 or len(numbers) != len(np.unique(ordered[0, :, 0])):
            break
    else:
        numbers, counts = np.unique(ordered[0, :, 0], return_counts=True)
    held = ", ".join(f"{c} in slice {n}" for n, c in zip(numbers, counts, strict=True))
    raise TopologyError(
        f"The bandwidth of an axis over slices was asked for, a group of which has {held}. "
        "XLA makes of an axis one part in each slice and one between them, so that groups have "
        "equally many members in each slice that they touch. Make the mesh with HybridMesh."
    )
