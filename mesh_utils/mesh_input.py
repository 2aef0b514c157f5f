"""Reads the shape and the axis names of a mesh, and refuses what cannot be."""

import operator
from collections.abc import Iterable
from typing import SupportsIndex, TypeAlias, cast

import numpy as np

from mesh_utils.errors import AxisError, MeshError

Axis: TypeAlias = str | int
"""The name of a mesh axis; the axes of an unnamed mesh are named 0, 1, ..."""


def as_integer(value: object) -> int | None:
    """Reads a Python or numpy integer.

    Args:
        value: anything.

    Returns:
        The int; None for what is not an integer. True and False are not.

    Example:
        >>> as_integer(np.int32(3)), as_integer(3.0), as_integer(True)
        (3, None, None)
    """
    if isinstance(value, (bool, np.bool_)):
        return None
    try:
        return operator.index(value)  # pyright: ignore[reportArgumentType]
    except TypeError:
        return None


def read_mesh_shape(mesh_shape: Iterable[SupportsIndex]) -> tuple[int, ...]:
    """Reads the sizes of the axes.

    Args:
        mesh_shape: one positive integer per axis.

    Returns:
        The sizes as Python ints.

    Raises:
        MeshError: no axis, or a size that is no positive integer.

    Example:
        >>> read_mesh_shape(np.array([2, 4]))
        (2, 4)
    """
    asked = f"Mesh was given mesh_shape={mesh_shape!r}."
    try:
        given: tuple[object, ...] = tuple(mesh_shape)
    except TypeError:
        raise MeshError(
            f"{asked} A mesh shape is a sequence with one size per axis. "
            "Pass a tuple of integers, such as (2, 4)."
        ) from None
    if not given:
        raise MeshError(
            f"{asked} A mesh has at least one axis. Pass (1,) for a mesh of one device."
        )
    shape = [as_integer(size) for size in given]
    for axis, size in enumerate(shape):
        if size is None or size < 1:
            raise MeshError(
                f"{asked} The size of axis {axis} is {given[axis]!r}, not a positive integer. "
                "Pass a size of 1 or more for each axis."
            )
    return cast("tuple[int, ...]", tuple(shape))


def read_axis_names(
    axis_names: Iterable[Axis] | None, mesh_shape: tuple[int, ...]
) -> tuple[Axis, ...]:
    """Reads the names of the axes.

    Args:
        axis_names: a different name for each axis (a non-empty str, or an int of 0 or more), or
            None to number the axes.
        mesh_shape: the sizes of the axes.

    Returns:
        The names.

    Raises:
        AxisError: a name twice, a wrong number of names, or what cannot be a name.

    Example:
        >>> read_axis_names(None, (2, 4))
        (0, 1)
    """
    count = len(mesh_shape)
    if axis_names is None:
        return tuple(range(count))
    asked = f"Mesh was given axis_names={axis_names!r} for mesh_shape={mesh_shape}."
    if isinstance(axis_names, (str, int)):
        raise AxisError(
            f"{asked} One name is not a sequence of names. Pass a tuple, such as ({axis_names!r},)."
        )
    names = tuple(_read_axis_name(name, asked) for name in axis_names)
    if len(names) != count:
        raise AxisError(
            f"{asked} The number of names is {len(names)}, the number of axes {count}. "
            f"Pass {count} names, or None to number the axes."
        )
    for position, name in enumerate(names):
        if name in names[:position]:
            raise AxisError(
                f"{asked} The name {name!r} is there twice. Pass a different name for each axis."
            )
    return names


def _read_axis_name(name: object, asked: str) -> Axis:
    if isinstance(name, str) and name:
        return str(name)
    number = as_integer(name)
    if number is None or number < 0:
        raise AxisError(
            f"{asked} {name!r} is not the name of an axis. "
            "Pass non-empty strings, or integers of 0 or more."
        )
    return number
