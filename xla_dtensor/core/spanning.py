"""The mesh over all devices that a submesh is part of, with the submesh's axes among its own.

A tensor on a submesh is a tensor of the whole root: on ``mesh["tp"]`` of (dp=2, tp=4) it has four
shards, and each lies on two devices, or on one of two that share it along dp. So what is said of it
to XLA is said on a mesh over all devices::

    (dp=2, tp=4)["tp"]                    spans (dp=2, tp=4)
    (pp=2, dp=2, tp=2) flattened dp_tp    spans (pp=2, dp_tp=4)
    a submesh of axes cut anew            spans (rest..., its axes), in a mixed-radix order

Invariants: each axis of the submesh is an axis of the spanning mesh, of the same name and size, and
walks the devices alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import numpy as np

from mesh_utils import Axis, Mesh
from mesh_utils.mesh import Digit
from xla_dtensor.core.errors import LayoutError
from xla_dtensor.core.layout import Layout
from xla_dtensor.core.placements import entry_axis

__all__ = ["ManualRegion", "joint_mesh", "layout_on_span", "region_of", "spanning_mesh"]


# ------------------------------------------------------------------------------------ ManualRegion
#
# The mesh axes along which a program is written per device.
#
# Outside a manual region a tensor is global and XLA decides what each device does. Inside one, a
# tensor is what ONE device has: shapes are those of its tile, and nothing is communicated but by
# the collectives that the program calls. A region may cover all axes of the mesh or some of them;
# along the others its tensors stay global.
#
#     mesh (dp=2, tp=4), x of shape (16, 8) as [dp, tp]
#     region over (dp, tp): a tensor of shape (8, 2), one per device
#     region over (tp,):    a tensor of shape (16, 2), one per coordinate of tp; dp is XLA's
#
# Invariants: the axes are whole axes of the mesh, in its order, at least one.


@dataclass(frozen=True)
class ManualRegion:
    """Axes of a mesh along which tensors are per device.

    Args:
        mesh: The mesh.
        axes: Some of its axes, by name, in mesh order; :meth:`over` makes them so.

    Example:
        >>> region = ManualRegion.over(Mesh.arange((2, 4), ("dp", "tp")), ["tp"])
        >>> region.axes, region.sizes
        (('tp',), (4,))
    """

    mesh: Mesh
    axes: tuple[Axis, ...]

    @classmethod
    def over(cls, mesh: Mesh, axes: Iterable[Axis] | None = None) -> ManualRegion:
        """Make the region over some axes of a mesh, or over all.

        Args:
            mesh: The mesh.
            axes: Names or positions, in any order; None for all.

        Raises:
            LayoutError: No axis, or one twice.
            AxisError: An unknown axis.
        """
        if axes is None:
            return cls(mesh, tuple(mesh.axis_names))
        manual_axes = tuple(axes)
        indices = sorted({mesh.axis_index(axis) for axis in manual_axes})
        if len(indices) != len(manual_axes) or not manual_axes:
            raise LayoutError(
                f"A manual region over axes={manual_axes} was asked for on a mesh "
                f"({mesh.axes_text()}). It needs at least one axis, and each only once. "
                "Pass some of the mesh's axes, or None for all."
            )
        return cls(mesh, tuple(mesh.axis_names[index] for index in indices))

    @property
    def sizes(self) -> tuple[int, ...]:
        """The size of each manual axis."""
        return tuple(self.mesh.size(axis) for axis in self.axes)

    @property
    def is_whole(self) -> bool:
        """Whether every axis of the mesh is manual; axes of size 1 do not count."""
        return prod(self.sizes) == self.mesh.size()

    def check_layout(self, layout: Layout) -> None:
        """Raise when tensors of this layout cannot cross the border of the region.

        Raises:
            LayoutError: The layout shards over an axis that is not manual, or is no tiling.
        """
        cutting = {entry_axis(entry) for dim in layout.dims for entry in dim}
        foreign = [axis for axis in cutting if axis is not None and axis not in self.axes]
        if layout.mesh != self.mesh or foreign:
            raise LayoutError(
                f"The layout {layout} was given for a manual region over the axes {self.axes}. At "
                "its border only manual axes may be named, on the region's own mesh. Leave "
                f"{foreign or 'the other mesh'} out of the partition spec."
            )
        layout.op_sharding()

    def copied_axes(self, layout: Layout) -> tuple[Axis, ...]:
        """Return the manual axes along which a tensor of this layout is copied."""
        cutting = {entry_axis(entry) for dim in layout.dims for entry in dim}
        return tuple(axis for axis in self.axes if axis not in cutting)

    def tile_shape(self, layout: Layout, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape inside the region of a global `shape`, padding included.

        Example:
            >>> mesh = Mesh.arange((2, 4), ("dp", "tp"))
            >>> region = ManualRegion.over(mesh)
            >>> region.tile_shape(Layout.from_partition_spec(("tp", None), mesh), (10, 6))
            (3, 6)
        """
        return layout.op_sharding().shape_per_tile(shape)


# ----------------------------------------------------------------------------------------- Spanning


@lru_cache(maxsize=1024)
def spanning_mesh(mesh: Mesh) -> Mesh:
    """Return the mesh over all devices of the root that has the axes of `mesh`.

    Args:
        mesh: A root or a submesh.

    Returns:
        `mesh` itself where it has all devices, its root where that has its axes, else a new one.

    Raises:
        LayoutError: The axes do not walk the root's order in digits.

    Example:
        >>> mesh = Mesh.arange((2, 4), ("dp", "tp"))
        >>> spanning_mesh(mesh["tp"]) == mesh
        True
    """
    root = mesh.root
    if mesh.size() == root.size():
        return mesh
    digits = mesh.digits()
    if digits is None:
        raise LayoutError(
            f"A tensor on the submesh ({mesh.axes_text()}) was asked for. Its axes are no "
            f"mixed-radix part of the root ({root.axes_text()}). Cut the submesh out of the root "
            "by axis names."
        )
    of_root = dict(zip(root.axis_names, root.digits() or (), strict=False))
    if all(of_root.get(a) == d for a, d in zip(mesh.axis_names, digits, strict=True)):
        return root
    span = mesh_of_walks(root, mesh.axis_names, digits)
    assert span is not None  # the axes of one mesh are independent
    return span


def mesh_of_walks(
    root: Mesh, axis_names: Sequence[Axis], digits: Sequence[Sequence[Digit]]
) -> Mesh | None:
    """Return a mesh over all devices of a root, with axes that walk through it as said.

    Args:
        root: The mesh whose order of devices is walked.
        axis_names: The names of the axes.
        digits: For each of them its (size, stride) digits, outer to inner.

    Returns:
        The mesh: axes for the rest, named rest0 and so on, then those. None where two axes
        take the same steps.

    Example:
        >>> mesh_of_walks(Mesh.arange((8,)), ("tp",), [[(2, 2)]])
        Mesh(rest0=2, rest1=2, tp=2, devices=[0, 2, ...] (8))
    """
    by_stride = sorted((digit for axis in digits for digit in axis), key=lambda digit: digit[1])
    gaps: list[tuple[int, int]] = []
    covered = 1
    for size, stride in (*by_stride, (1, root.size())):
        if stride % covered:
            return None
        if stride > covered:
            gaps.append((stride // covered, covered))
        covered = stride * size
    names = [f"rest{number}" for number in range(len(gaps))]
    positions = np.zeros((), dtype=np.int64)
    for size, stride in (*reversed(gaps), *(d for axis in digits for d in axis)):
        positions = np.add.outer(positions, np.arange(size) * stride)
    sizes = (math.prod(size for size, _ in axis) for axis in digits)
    shape = (*(size for size, _ in reversed(gaps)), *sizes)
    ids = root.device_ids.reshape(-1)[positions.reshape(-1)]
    return Mesh(ids, shape, (*names, *axis_names))


@lru_cache(maxsize=1024)
def region_of(mesh: Mesh) -> ManualRegion:
    """Return the region in which each device has what it has along the axes of `mesh`.

    Example:
        >>> region_of(Mesh.arange((2, 4), ("dp", "tp"))["tp"]).axes
        ('tp',)
    """
    return ManualRegion.over(spanning_mesh(mesh), mesh.axis_names)


@lru_cache(maxsize=4096)
def layout_on_span(layout: Layout, cut_axes: tuple[tuple[object, int], ...] = ()) -> Layout:
    """Return a layout on a submesh as one over all devices.

    Args:
        layout: The layout.
        cut_axes: (axis, dim) pairs: what is known of the spanning mesh's other axes. They cut
            within the shards of `layout`, so that these stay what they are.

    Returns:
        The layout on the spanning mesh. While something is unknown of its other axes, every dim
        that nothing cuts is open.

    Example:
        >>> mesh = Mesh.arange((2, 4), ("dp", "tp"))
        >>> print(layout_on_span(Layout.parse("[-, tp]", mesh["tp"])))
        [-?, tp]
        >>> print(layout_on_span(Layout.parse("[-, tp]", mesh["tp"]), (("dp", 0),)))
        [dp, tp]
    """
    span = spanning_mesh(layout.mesh)
    if span is layout.mesh or span == layout.mesh:
        return layout
    dims = list(layout.dims)
    for axis, dim in cut_axes:
        dims[dim] = (*dims[dim], span.axis_names[span.axis_index(axis)])  # pyright: ignore
    named = {*layout.mesh.axis_names, *(axis for axis, _ in cut_axes)}
    unknown = any(span.size(axis) > 1 for axis in span.axis_names if axis not in named)
    open_dims = {dim for dim, cuts in enumerate(dims) if unknown and not cuts}
    return Layout(span, tuple(dims), layout.partial, frozenset(open_dims))


# --------------------------------------------------------------------------------------- Joint mesh
#
# One mesh of the axes of two, where these were cut out of the same devices in different ways.
#
# A program may split one row of devices twice, and take an axis from each::
#
#     world (8)  ->  (batch=2, tp=4)["tp"]             splits the inner four
#                ->  (replicate=1, fsdp=2, tp=4)["fsdp"]    splits the outer two
#     joint_mesh of both                               (fsdp=2, tp=4)
#
# The axes must walk through the devices independently of each other.


@lru_cache(maxsize=1024)
def joint_mesh(outer: Mesh, inner: Mesh) -> Mesh | None:
    """Return the mesh with the axes of both.

    Args:
        outer: A mesh.
        inner: Another one over the same devices.

    Returns:
        A mesh with the axes of `outer`, then those of `inner`. Where one mesh has all of them it is
        that one's submesh, in its order. None where there is none: an axis of the same name, axes
        that are not independent, or other devices.

    Example:
        >>> world = Mesh.arange((8,), ("world",))
        >>> batch = world.factored({"world": (("batch", 2), ("tp", 4))})
        >>> dense = world.factored({"world": (("fsdp", 2), ("tp", 4))})
        >>> joint_mesh(dense["fsdp"], batch["tp"])
        Mesh(fsdp=2, tp=4, devices=0..7)
        >>> joint_mesh(dense["fsdp"], batch["batch"]) is None
        True
    """
    names = {*outer.axis_names, *inner.axis_names}
    if len(names) < outer.ndim + inner.ndim:
        return None
    span = spanning_mesh(outer)
    if spanning_mesh(inner) == span:
        return span[tuple(axis for axis in span.axis_names if axis in names)]
    if {*span.device_ids.flat} != {*inner.root.device_ids.flat}:
        return None
    walks = (outer.digits(span), inner.digits(span))
    if walks[0] is None or walks[1] is None:
        return None
    joint = mesh_of_walks(span, (*outer.axis_names, *inner.axis_names), (*walks[0], *walks[1]))
    return None if joint is None else joint[(*outer.axis_names, *inner.axis_names)]
