"""The named axes of a mesh: finding, splitting and merging them. No devices here."""

import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias, TypeVar, cast

from mesh_utils.errors import AxisError, MeshError
from mesh_utils.mesh_input import Axis, as_integer, read_axis_names

AxisSelection: TypeAlias = Axis | Sequence[Axis]
"""One axis, or a list or tuple of axes."""

_Value = TypeVar("_Value")
# The keys of a Mapping are invariant: a dict[str, int] is no Mapping[Axis, int].
AxisMapping: TypeAlias = Mapping[str, _Value] | Mapping[int, _Value] | Mapping[Axis, _Value]
"""Something for each of some axes."""


class NamedAxes:
    """Axes in order, each with a name and a size: what Mesh builds upon.

    Args:
        mesh_shape: the size of each axis.
        axis_names: the name of each axis, no two alike.

    Example:
        >>> axes = NamedAxes((2, 4), ("dp", "tp"))
        >>> axes.ndim, axes.size(), axes.axes_text()
        (2, 8, 'dp=2, tp=4')
    """

    __slots__ = ("_axis_names", "_mesh_shape")

    def __init__(self, mesh_shape: tuple[int, ...], axis_names: tuple[Axis, ...]) -> None:
        self._mesh_shape = mesh_shape
        self._axis_names = axis_names

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """The size of each axis."""
        return self._mesh_shape

    @property
    def axis_names(self) -> tuple[Axis, ...]:
        """The name of each axis."""
        return self._axis_names

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self._mesh_shape)

    def axes_text(self) -> str:
        """Writes the axes with their sizes.

        Returns:
            The text.

        Example:
            >>> NamedAxes((2, 4), ("dp", "tp")).axes_text()
            'dp=2, tp=4'
        """
        pairs = zip(self._axis_names, self._mesh_shape, strict=True)
        return ", ".join(f"{name}={size}" for name, size in pairs)

    def size(self, axis: Axis | None = None) -> int:
        """Counts the devices.

        Args:
            axis: one axis, or None for the whole mesh.

        Returns:
            The size of that axis, or the product of all sizes.

        Raises:
            AxisError: there is no such axis.

        Example:
            >>> NamedAxes((2, 4), ("dp", "tp")).size("tp")
            4
        """
        if axis is None:
            return math.prod(self._mesh_shape)
        return self._mesh_shape[self.axis_index(axis)]

    def axis_index(self, axis: Axis) -> int:
        """Finds one axis.

        Args:
            axis: its name, or, where no name is an integer, its position.

        Returns:
            Its position, from 0.

        Raises:
            AxisError: there is no such axis.

        Example:
            >>> NamedAxes((2, 4), ("dp", "tp")).axis_index("tp")
            1
        """
        key = axis if isinstance(axis, str) else as_integer(axis)
        if key is not None and key in self._axis_names:
            return self._axis_names.index(key)
        numbered = any(isinstance(name, int) for name in self._axis_names)
        if isinstance(key, int) and not numbered and 0 <= key < len(self._axis_names):
            return key
        choices = ", ".join(map(repr, self._axis_names))
        positions = "" if numbered else f", or a position from 0 to {len(self._axis_names) - 1}"
        raise AxisError(
            f"Axis {axis!r} was asked for. It is not among the axes {self.axes_text()}. "
            f"Pass one of {choices}{positions}."
        )

    def _axis_indices(self, axes: AxisSelection) -> list[int]:
        """The positions of one axis or several, in the order asked; AxisError if one is twice."""
        if isinstance(axes, str) or not isinstance(axes, Sequence):
            return [self.axis_index(axes)]
        indices = [self.axis_index(axis) for axis in axes]
        for place, index in enumerate(indices):
            if index in indices[:place]:
                raise AxisError(
                    f"Axes {axes!r} of {self.axes_text()} were asked for. "
                    f"Axis {self._axis_names[index]!r} is there twice. Pass each axis at most once."
                )
        return indices

    def _fixed_coordinates(self, at: Sequence[tuple[Axis, int]]) -> dict[int, int]:
        """Axis position to coordinate, from (axis, coordinate) pairs that leave some axis free."""
        indices = self._axis_indices([axis for axis, _ in at])
        for index, (_, value) in zip(indices, at, strict=True):
            coordinate, name, size = (
                as_integer(value),
                self._axis_names[index],
                self._mesh_shape[index],
            )
            if coordinate is None or not 0 <= coordinate < size:
                raise MeshError(
                    f"A slice at {name}={value!r} was asked for. Axis {name!r} has size {size}. "
                    f"Pass an integer from 0 to {size - 1}."
                )
        if len(indices) == len(self._axis_names):
            asked = ", ".join(f"{axis}={value}" for axis, value in at)
            raise MeshError(
                f"A slice at {asked} was asked for. It leaves none of the axes {self.axes_text()}. "
                "Leave one axis out, or index device_ids to get one device."
            )
        return {index: int(value) for index, (_, value) in zip(indices, at, strict=True)}

    def _factored_axes(
        self, factors: AxisMapping[Sequence[tuple[Axis, int]]]
    ) -> tuple[tuple[int, ...], tuple[Axis, ...]]:
        """The shape and names after splitting axes into (name, size) parts, outer to inner."""
        by_index = dict(zip(self._axis_indices(list(factors)), factors.values(), strict=True))
        names: list[Axis] = []
        sizes: list[int] = []
        for index, (name, size) in enumerate(zip(self._axis_names, self._mesh_shape, strict=True)):
            parts = by_index.get(index, ((name, size),))
            _refuse_unpaired(name, parts)
            part_sizes = tuple(part_size for _, part_size in parts)
            if not parts or not _multiply_up(part_sizes, size):
                raise MeshError(
                    f"Axis {name!r} of size {size} was to be factored into sizes {part_sizes}. "
                    f"These are not positive integers with a product of {size}. "
                    "Pass sizes that multiply up to the size of the axis."
                )
            names += [part_name for part_name, _ in parts]
            sizes += map(int, part_sizes)
        return tuple(sizes), read_axis_names(tuple(names), tuple(sizes))

    def _flattened_axes(
        self, axes: AxisSelection, name: Axis
    ) -> tuple[tuple[int, ...], tuple[Axis, ...]]:
        """The shape and names after merging adjacent axes."""
        indices = self._axis_indices(axes)
        if not indices or indices != list(range(indices[0], indices[-1] + 1)):
            raise AxisError(
                f"Axes {axes!r} were to be flattened into {name!r}. "
                f"They do not follow each other, in that order, in {self.axes_text()}. "
                "Pass adjacent axes, or permute the mesh first with mesh[axes]."
            )
        before, after = indices[0], indices[-1] + 1
        merged = math.prod(self._mesh_shape[before:after])
        shape = (*self._mesh_shape[:before], merged, *self._mesh_shape[after:])
        names = (*self._axis_names[:before], name, *self._axis_names[after:])
        return shape, read_axis_names(names, shape)


def _refuse_unpaired(name: Axis, parts: object) -> None:
    if not isinstance(parts, (list, tuple)) or not all(
        isinstance(part, (list, tuple)) and len(cast("tuple[object, ...]", part)) == 2
        for part in cast("Sequence[object]", parts)
    ):
        raise AxisError(
            f"Axis {name!r} was to be factored into {parts!r}. These are not (name, size) pairs. "
            "Pass a tuple of pairs, such as (('outer', 2), ('inner', 2))."
        )


def _multiply_up(part_sizes: Sequence[object], size: int) -> bool:
    sizes = [as_integer(part_size) or 0 for part_size in part_sizes]
    return min(sizes) > 0 and math.prod(sizes) == size
