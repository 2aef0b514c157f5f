"""Which axes of a mesh the groups of a collective span.

A group's members are places in the program's device order, that is, in `mesh.device_ids.flat`. On a
mesh (dp=2, tp=4):

    {0,1,2,3} {4,5,6,7}        ("tp",)
    {0,4} {1,5} {2,6} {3,7}    ("dp",)
    {0,1,2,3,4,5,6,7}          ("dp", "tp")
    {0,1} {2,3} {4,5} {6,7}    ("tp:(2)2",)     a part of tp: of size 2, with a size of 2 outside it
    {0,2} {1,3} {4,6} {5,7}    ("tp:(1)2",)     the outer part of tp
    {0} {1} ... {7}            ()               nobody to talk to
    {0,5} {1,4} {2,7} {3,6}    None             along no axes

Parts are written as XLA and Shardy do. The order of the members does not matter; axes come in the
order of the mesh.
"""

import math
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from mesh_utils import Axis, Mesh, mixed_radix

AxisNames: TypeAlias = tuple[Axis, ...]


def group_axes(groups: NDArray[np.integer], mesh: Mesh) -> AxisNames | None:
    """Names the axes that groups span.

    Args:
        groups: [number of groups, group size] places in `mesh.device_ids.flat`.
        mesh: the mesh.

    Returns:
        The axes and parts of axes of which these are exactly the groups; None if there are none.

    Example:
        >>> mesh = Mesh.arange((2, 4), ("dp", "tp"))
        >>> group_axes(np.arange(8).reshape(2, 4), mesh)
        ('tp',)
    """
    if not np.array_equal(np.sort(groups, axis=None), np.arange(mesh.size())):
        return None
    coordinates = np.unravel_index(groups, mesh.mesh_shape)
    names: list[Axis] = []
    span = 1
    for axis, size, along in zip(mesh.axis_names, mesh.mesh_shape, coordinates, strict=True):
        digits = _digits(along)
        if digits is None:
            return None
        names += [_name(axis, size, *digit) for digit in digits]
        span *= math.prod(digit_size for digit_size, _ in digits)
    # As many members as coordinates, no two alike: they are all the coordinates there are.
    return tuple(names) if span == groups.shape[1] else None


def pair_axes(pairs: NDArray[np.integer], mesh: Mesh) -> AxisNames:
    """Names the axes along which something moves.

    Args:
        pairs: [number of pairs, 2] places in `mesh.device_ids.flat`, from and to.
        mesh: the mesh.

    Returns:
        The axes on which the coordinates of a pair differ, for any pair; whole axes.

    Example:
        >>> pair_axes(np.array([[0, 1], [1, 0]]), Mesh.arange((2, 4), ("dp", "tp")))
        ('tp',)
    """
    coordinates = np.unravel_index(pairs.reshape(-1, 2), mesh.mesh_shape)
    return tuple(
        axis
        for axis, along in zip(mesh.axis_names, coordinates, strict=True)
        if (along[:, 0] != along[:, 1]).any()
    )


def _digits(along: NDArray[np.integer]) -> tuple[tuple[int, int], ...] | None:
    """The (size, stride) digits of an axis that vary within the groups, the same in all of them."""
    values = np.unique(along[0])
    digits = mixed_radix(values - values[0])
    if digits is None:
        return None
    fixed = along.copy()
    for digit_size, stride in digits:
        fixed -= (along // stride) % digit_size * stride
    return digits if (fixed == fixed[:, :1]).all() else None


def _name(axis: Axis, axis_size: int, size: int, stride: int) -> Axis:
    return axis if size == axis_size else f"{axis}:({axis_size // (size * stride)}){size}"
