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
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from mesh_utils import Axis, Mesh
from mesh_utils.order import Digit
from xla_dtensor.core.errors import LayoutError
from xla_dtensor.core.layout import Layout
from xla_dtensor.core.manual_region import ManualRegion

__all__ = ["layout_on_span", "mesh_of_walks", "region_of", "spanning_mesh"]


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
    made = mesh_of_walks(root, mesh.axis_names, digits)
    assert made is not None  # the axes of one mesh are independent
    return made


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
    taken = sorted((digit for axis in digits for digit in axis), key=lambda digit: digit[1])
    rest: list[tuple[int, int]] = []
    covered = 1
    for size, stride in (*taken, (1, root.size())):
        if stride % covered:
            return None
        if stride > covered:
            rest.append((stride // covered, covered))
        covered = stride * size
    names = [f"rest{number}" for number in range(len(rest))]
    positions = np.zeros((), dtype=np.int64)
    for size, stride in (*reversed(rest), *(d for axis in digits for d in axis)):
        positions = np.add.outer(positions, np.arange(size) * stride)
    sizes = (math.prod(size for size, _ in axis) for axis in digits)
    shape = (*(size for size, _ in reversed(rest)), *sizes)
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
def layout_on_span(layout: Layout, known: tuple[tuple[object, int], ...] = ()) -> Layout:
    """Return a layout on a submesh as one over all devices.

    Args:
        layout: The layout.
        known: (axis, dim) pairs: what is known of the spanning mesh's other axes. They cut within
            the shards of `layout`, so that these stay what they are.

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
    for axis, dim in known:
        dims[dim] = (*dims[dim], span.axis_names[span.axis_index(axis)])  # pyright: ignore
    said = {*layout.mesh.axis_names, *(axis for axis, _ in known)}
    unknown = any(span.size(axis) > 1 for axis in span.axis_names if axis not in said)
    open_dims = {dim for dim, cuts in enumerate(dims) if unknown and not cuts}
    return Layout(span, tuple(dims), layout.partial, frozenset(open_dims))
