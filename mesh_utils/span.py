"""Span: where one mesh axis lies on the chips.

In each physical dim of a slice an axis takes some chips, a fixed stride apart. A group of the axis
is the product of those rows, and the groups tile the box:

    a dim of 8 chips, size 2, stride 2:     0 2 | 1 3 | 4 6 | 5 7

Which device of a group follows which is the order; only `permute` depends on it. It counts through
the dims of `order` from outer to inner, and in a snake turns around at the end of each row.
"""

import math
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mesh_utils.errors import TopologyError
from mesh_utils.hardware import Shape3
from mesh_utils.mesh import PositionTable
from mesh_utils.topology import Topology

IntArray: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Span:
    """Where one axis lies.

    Attributes:
        sizes: chips that it takes in x, y and z.
        strides: chips from one of them to the next, in x, y and z.
        cores: devices that it takes on each chip.
        slices: slices that it takes, all or 1: the DCN part, which is the outer one.
        order: the dims from outer to inner.
        snake: whether it turns around at the end of each row.

    Example:
        >>> Span((2, 4, 1), (1, 2, 1)).num_devices
        8
    """

    sizes: Shape3
    strides: Shape3 = (1, 1, 1)
    cores: int = 1
    slices: int = 1
    order: Shape3 = (2, 1, 0)
    snake: bool = False

    @property
    def num_chips(self) -> int:
        """Chips of one group in one slice."""
        return math.prod(self.sizes)

    @property
    def num_devices(self) -> int:
        """Devices of one group, over all its slices: the size of the axis."""
        return self.num_chips * self.cores * self.slices

    def __str__(self) -> str:
        dims = [
            f"{name}{size}" + (f"@{stride}" if stride > 1 else "")
            for name, size, stride in zip("xyz", self.sizes, self.strides, strict=True)
            if size > 1
        ]
        cores = ["core"] if self.cores > 1 else []
        slices = [f"slice{self.slices}"] if self.slices > 1 else []
        return f"Span({' '.join([*slices, *dims, *cores]) or '1'})"


def span_members(span: Span) -> IntArray:
    """The chips of the group that begins at the first chip, in the order of the axis.

    Args:
        span: where the axis lies.

    Returns:
        x, y, z of each, [chips, 3].

    Example:
        >>> span_members(Span((2, 2, 1), snake=True)).tolist()
        [[0, 0, 0], [1, 0, 0], [1, 1, 0], [0, 1, 0]]
    """
    outer_first = tuple(span.sizes[dim] for dim in span.order)
    digits = np.indices(outer_first).reshape(3, -1)
    if span.snake:
        row_digits = digits.copy()
        for place in (1, 2):
            # A row is walked backwards where its number, counted through all outer dims, is odd.
            number = np.ravel_multi_index(tuple(row_digits[:place]), outer_first[:place])
            flipped = outer_first[place] - 1 - row_digits[place]
            digits[place] = np.where(number % 2 == 1, flipped, row_digits[place])
    members = np.zeros((digits.shape[1], 3), np.int64)
    for place, dim in enumerate(span.order):
        members[:, dim] = digits[place] * span.strides[dim]
    return members


def span_groups(span: Span, shape: Shape3) -> IntArray:
    """All groups of an axis in one slice.

    Args:
        span: where the axis lies; its sizes times strides divide the shape.
        shape: the chips of the slice.

    Returns:
        x, y, z of each member, [groups, chips, 3].

    Example:
        >>> span_groups(Span((2, 1, 1), (2, 1, 1)), (4, 1, 1))[:, :, 0].tolist()
        [[0, 2], [1, 3]]
    """
    starts = [
        [block + offset for block in range(0, length, size * stride) for offset in range(stride)]
        for size, stride, length in zip(span.sizes, span.strides, shape, strict=True)
    ]
    grid = np.stack(np.meshgrid(*starts, indexing="ij"), axis=-1).reshape(-1, 1, 3)
    return np.asarray(grid, np.int64) + span_members(span)


# ---------------------------------------------- Where the axes of a mesh lie: from devices to Spans
#
# Meshes that lay axes along physical dims, split by mixed radix, in any order, have spans: JAX's,
# HybridMesh's, those of a search. Others (random ones, say) have none, and are counted link by
# link.


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
    axis_last = np.moveaxis(places, axis, -2)
    return axis_last.reshape(-1, places.shape[axis], 5)


def first_slice(groups: IntArray) -> IntArray:
    """The chips of the first slice: every slice has links of its own, and all are alike.

    Args:
        groups: the places of the members of each group, [groups, members, 5].

    Returns:
        x, y and z of the members there, [groups that touch it, members, 3].
    """
    there = groups[..., 0] == groups[..., 0].min()
    touching = there.any(axis=1)
    return groups[touching][there[touching]].reshape(int(touching.sum()), -1, 5)[..., 1:4]


def find_span(shape: Shape3, groups: IntArray) -> Span | None:
    """Where an axis lies, if its groups are alike and lie in rows.

    Args:
        shape: the chips of a slice.
        groups: the places of the members of each group, [groups, members, 5].

    Returns:
        The span, with the default order; None if there is none.

    Raises:
        TopologyError: groups that have more members in one slice than in another: XLA cannot make
            of such an axis one part per slice and one between slices.

    Example:
        >>> topology = Topology.parse("v5e:4x4")
        >>> places = mesh_places(topology, np.arange(16).reshape(4, 4))
        >>> str(find_span(topology.shape, axis_groups(places, 1)))
        'Span(x4)'
    """
    members = groups.shape[1]
    top = groups.reshape(-1, 5).max(axis=0) + 1
    keys = np.ravel_multi_index(tuple(np.moveaxis(groups, -1, 0)), tuple(top.tolist()))
    ordered = np.take_along_axis(groups, np.argsort(keys, axis=1)[:, :, None], axis=1)
    slices = len(np.unique(ordered[0, :, 0]))
    if members % slices:
        _refuse_ragged(ordered)
    parts = ordered.reshape(len(groups), slices, members // slices, 5)
    in_one_slice = (parts[..., 0] == parts[..., :1, 0]).all()
    if not in_one_slice or (np.diff(parts[:, :, 0, 0], axis=1) <= 0).any():
        _refuse_ragged(ordered)
    inside = parts[..., 1:].reshape(len(groups) * slices, members // slices, 4)
    starts = inside.min(axis=1, keepdims=True)
    steps = inside - starts
    if (steps != steps[0]).any():
        return None
    return _span_of(shape, steps[0], starts[:, 0, :3], slices)


def _span_of(shape: Shape3, members: IntArray, starts: IntArray, slices: int) -> Span | None:
    """The span of a group's chips, counted from its first; it tiles the box from `starts`."""
    columns = [np.unique(column) for column in members.T]
    x, y, z, cores = map(len, columns)
    steps = [int(column[1]) if len(column) > 1 else 1 for column in columns[:3]]
    sizes: Shape3 = (x, y, z)
    strides: Shape3 = (steps[0], steps[1], steps[2])
    rows = [np.arange(size) * stride for size, stride in zip(sizes, strides, strict=True)]
    grid = np.stack(np.meshgrid(*rows, np.arange(cores), indexing="ij"), axis=-1).reshape(-1, 4)
    if grid.shape != members.shape or (grid != members).any():
        return None
    block = np.array(sizes) * np.array(strides)
    tiles = (starts % block < np.array(strides)).all()
    if not tiles or (np.array(shape) % block).any():
        return None
    return Span(sizes, strides, cores, slices)


def _refuse_ragged(ordered: IntArray) -> None:
    for group in ordered:
        numbers, counts = np.unique(group[:, 0], return_counts=True)
        if len(set(counts.tolist())) > 1 or len(numbers) != len(np.unique(ordered[0, :, 0])):
            break
    else:
        numbers, counts = np.unique(ordered[0, :, 0], return_counts=True)
    parts = ", ".join(f"{c} in slice {n}" for n, c in zip(numbers, counts, strict=True))
    raise TopologyError(
        f"The bandwidth of an axis over slices was asked for, a group of which has {parts}. "
        "XLA makes of an axis one part in each slice and one between them, so that groups have "
        "equally many members in each slice that they touch. Make the mesh with HybridMesh."
    )
