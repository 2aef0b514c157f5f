"""Mesh: named axes over device ids.

A mesh is a plain value: an array of device ids, a name for each axis of it, and, if it was cut out
of another mesh, that mesh as its root.

    mesh = Mesh.arange((2, 4), ("dp", "tp"))        0 1 2 3
                                                    4 5 6 7
    mesh["tp"]           0 1 2 3                    its root is mesh
    mesh.slice(dp=1)     4 5 6 7                    its root is mesh
    mesh["tp", "dp"]     the same devices, walked column by column; its root is mesh

The root fixes one flat order of the devices. `digits()` says how each axis walks through that
order: mesh["tp", "dp"].digits() is (((4, 1),), ((2, 4),)), that is, "tp" takes 4 steps of 1 and
"dp" 2 steps of 4. This is what XLA's compact sharding form is written from.

Splitting and merging axes keep the order, so a factored or flattened root is a root itself.
"""

from __future__ import annotations

import hashlib
import json
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, SupportsIndex, TypeAlias, TypeVar, cast, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mesh_utils.argument_types import argument_types
from mesh_utils.errors import AxisError, MeshError

__all__ = []


# ---------------------------------------------------------------------------- Arrays of device ids
#
# Nothing here is per-device in Python: the ids of 262,144 devices are read in a few milliseconds.


def read_device_ids(
    device_ids: ArrayLike | range, mesh_shape: tuple[int, ...]
) -> NDArray[np.int64]:
    """Reads the device ids of a mesh.

    Args:
        device_ids: unique non-negative integers, flat or in any shape; read in row-major order.
        mesh_shape: the sizes of the axes.

    Returns:
        A read-only int64 copy of shape `mesh_shape`.

    Raises:
        MeshError: too few, too many, repeated, negative or non-integer ids.

    Example:
        >>> read_device_ids([3, 1, 2, 0], (2, 2)).tolist()
        [[3, 1], [2, 0]]
    """
    numbers = _as_array(device_ids)
    count = math.prod(mesh_shape)
    if numbers.size == 0:
        raise MeshError(
            f"Mesh was given no device ids for mesh_shape={mesh_shape}. "
            f"A mesh of that shape has {count} devices. Pass {count} device ids."
        )
    if numbers.size != count:
        raise MeshError(
            f"Mesh was given {numbers.size} device ids for mesh_shape={mesh_shape}. "
            f"A mesh of that shape has {count} devices. "
            f"Pass {count} device ids, or a mesh_shape with a product of {numbers.size}."
        )
    if numbers.dtype.kind not in "iu":
        raise MeshError(
            f"Mesh was given device_ids of dtype {numbers.dtype}. Device ids are integers. "
            f"Pass {count} integers, such as range({count})."
        )
    lowest, highest = int(numbers.min()), int(numbers.max())
    if lowest < 0 or highest > np.iinfo(np.int64).max:
        raise MeshError(
            f"Mesh was given device_ids with the id {lowest if lowest < 0 else highest}. "
            "Device ids are 0 or more and fit in 64 bits with a sign. "
            "Pass the ids by which the runtime knows its devices."
        )
    ids = np.array(numbers, np.int64, order="C").reshape(mesh_shape)
    _refuse_repeated(ids.reshape(-1))
    ids.flags.writeable = False
    return ids


def _as_array(device_ids: ArrayLike | range) -> NDArray[np.integer]:
    if isinstance(device_ids, range):  # numpy would read it number by number
        return np.arange(device_ids.start, device_ids.stop, device_ids.step, dtype=np.int64)
    try:
        return np.asarray(device_ids)
    except (TypeError, ValueError):
        raise MeshError(
            f"Mesh was given device_ids of type {type(device_ids).__name__}. "
            "numpy cannot read them as one array. "
            "Pass a flat sequence or an array of integers."
        ) from None


def _refuse_repeated(ids: NDArray[np.int64]) -> None:
    if int(ids.max()) < 16 * ids.size:  # dense ids: counting is faster than sorting
        counts = np.bincount(ids)
        repeated = int(counts.argmax()) if counts.max() > 1 else None
    else:
        ordered = np.sort(ids)
        twice = ordered[1:][ordered[1:] == ordered[:-1]]
        repeated = int(twice[0]) if twice.size else None
    if repeated is not None:
        raise MeshError(
            f"Mesh was given device_ids with the id {repeated} more than once. "
            "A device has one place in a mesh. "
            f"Pass {ids.size} different ids."
        )


def describe_device_ids(device_ids: NDArray[np.int64]) -> str:
    """Writes device ids in a few characters.

    Args:
        device_ids: at least one id, in any shape.

    Returns:
        A range, a short list, or the first two and the count.

    Example:
        >>> describe_device_ids(np.arange(8)), describe_device_ids(np.array([3, 1, 2, 0, 4]))
        ('0..7', '[3, 1, ...] (5)')
    """
    ids = device_ids.reshape(-1)
    first, count = int(ids[0]), ids.size
    if count > 1 and np.array_equal(ids, np.arange(first, first + count)):
        return f"{first}..{first + count - 1}"
    return str(ids.tolist()) if count <= 4 else f"[{first}, {ids[1]}, ...] ({count})"


# ------------------------ Reads the shape and the axis names of a mesh, and refuses what cannot be

Axis: TypeAlias = str | int
"""The name of a mesh axis; the axes of an unnamed mesh are named 0, 1, ..."""

AxisSelection: TypeAlias = Axis | Sequence[Axis]
"""One axis, or a list or tuple of axes."""

_Value = TypeVar("_Value")
# The keys of a Mapping are invariant: a dict[str, int] is no Mapping[Axis, int].
AxisMapping: TypeAlias = Mapping[str, _Value] | Mapping[int, _Value] | Mapping[Axis, _Value]
"""Something for each of some axes."""


def as_integer(number: object) -> int | None:
    """Reads a Python or numpy integer.

    Args:
        number: anything.

    Returns:
        The int; None for what is not an integer. True and False are not.

    Example:
        >>> as_integer(np.int32(3)), as_integer(3.0), as_integer(True)
        (3, None, None)
    """
    if isinstance(number, (bool, np.bool_)):
        return None
    try:
        return operator.index(number)  # pyright: ignore[reportArgumentType]
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
    request = f"Mesh was given mesh_shape={mesh_shape!r}."
    try:
        sizes: tuple[object, ...] = tuple(mesh_shape)
    except TypeError:
        raise MeshError(
            f"{request} A mesh shape is a sequence with one size per axis. "
            "Pass a tuple of integers, such as (2, 4)."
        ) from None
    if not sizes:
        raise MeshError(
            f"{request} A mesh has at least one axis. Pass (1,) for a mesh of one device."
        )
    shape = [as_integer(size) for size in sizes]
    for axis, size in enumerate(shape):
        if size is None or size < 1:
            raise MeshError(
                f"{request} The size of axis {axis} is {sizes[axis]!r}, not a positive integer. "
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
    request = f"Mesh was given axis_names={axis_names!r} for mesh_shape={mesh_shape}."
    if isinstance(axis_names, (str, int)):
        raise AxisError(
            f"{request} One name is not a sequence of names. "
            f"Pass a tuple, such as ({axis_names!r},)."
        )
    names: list[Axis] = []
    for name in axis_names:
        number = None if isinstance(name, str) else as_integer(name)
        if not name if isinstance(name, str) else number is None or number < 0:
            raise AxisError(
                f"{request} {name!r} is not the name of an axis. "
                "Pass non-empty strings, or integers of 0 or more."
            )
        names.append(str(name) if number is None else number)
    if len(names) != count:
        raise AxisError(
            f"{request} The number of names is {len(names)}, the number of axes {count}. "
            f"Pass {count} names, or None to number the axes."
        )
    for position, name in enumerate(names):
        if name in names[:position]:
            raise AxisError(
                f"{request} The name {name!r} is there twice. Pass a different name for each axis."
            )
    return tuple(names)


# ------------------------------------------------------------- Device orders as mixed-radix digits
#
# An order of n devices is often "iota, reshaped and transposed": position i of the walk is a sum of
# digits of i times strides. Such a walk is written as (size, stride) pairs, outer to inner, and
# takes O(number of axes) space whatever n is. Walking 0 1 2 3 4 5 6 7 column by column over a 2 x 4
# grid:
#
#     0 4 1 5 2 6 3 7   =   outer digit (4, 1), inner digit (2, 4)
#
# The inner digit makes steps of 4 and runs through 2 values; the outer one makes steps of 1 and
# runs through 4. Digits nest: with the strides in ascending order, each is a multiple of the stride
# times the size before it, so digit (size, stride) of a position p is (p // stride) % size.

Digit: TypeAlias = tuple[int, int]
"""(size, stride): `size` values, `stride` apart."""

IntArray: TypeAlias = NDArray[np.int64]


@argument_types
def mixed_radix(positions: NDArray[np.integer]) -> tuple[Digit, ...] | None:
    """Writes a walk as nested digits, where it is one.

    Args:
        positions: the walk, 1-D, [n] integers. A permutation of 0..n-1, or part of one.

    Returns:
        The fewest (size, stride) digits, outer to inner, that give `positions`; () for [0]; None
        when there are none (the walk starts elsewhere than at 0, repeats, goes backwards, ...).

    Example:
        >>> mixed_radix(np.array([0, 4, 1, 5, 2, 6, 3, 7]))
        ((4, 1), (2, 4))
        >>> mixed_radix(np.array([0, 2, 1])) is None
        True
    """
    if positions.ndim != 1 or positions.size == 0 or positions[0] != 0:
        return None
    inner_first: list[Digit] = []
    outer_walk = positions.astype(np.int64, copy=False)
    while outer_walk.size > 1:
        digit = _inner_digit(outer_walk)
        if digit is None:
            return None
        inner_first.append(digit)
        outer_walk = outer_walk[:: digit[0]]
    digits = tuple(reversed(inner_first))
    return digits if are_nested(digits) else None


@argument_types
def mixed_radix_positions(digits: Iterable[Digit]) -> IntArray:
    """Walks digits: the inverse of `mixed_radix`.

    Args:
        digits: (size, stride) pairs, outer to inner.

    Returns:
        The positions, [product of the sizes].

    Example:
        >>> mixed_radix_positions(((4, 1), (2, 4))).tolist()
        [0, 4, 1, 5, 2, 6, 3, 7]
    """
    positions = np.zeros(1, np.int64)
    for size, stride in digits:
        steps = np.arange(size, dtype=np.int64) * stride
        positions = (positions[:, None] + steps).reshape(-1)
    return positions


def axis_digits(positions: IntArray) -> tuple[tuple[Digit, ...], ...] | None:
    """Writes an N-D array of positions as digits, axis by axis.

    Args:
        positions: integers of the mesh's shape; they may start anywhere.

    Returns:
        For each axis its digits, outer to inner, such that a position is the first one plus what
        each axis adds; None when the axes do not add up so, or do not nest.

    Example:
        >>> axis_digits(np.arange(8).reshape(2, 4).T)
        (((4, 1),), ((2, 4),))
    """
    first = positions[(0,) * positions.ndim]
    digits: list[tuple[Digit, ...]] = []
    expected = first
    for axis in range(positions.ndim):
        line = tuple(slice(None) if i == axis else 0 for i in range(positions.ndim))
        walk = positions[line] - first
        axis_walk = mixed_radix(walk)
        if axis_walk is None:
            return None
        digits.append(axis_walk)
        expected = expected[..., None] + walk
    nested = are_nested(digit for axis_walk in digits for digit in axis_walk)
    return tuple(digits) if nested and np.array_equal(expected, positions) else None


def are_nested(digits: Iterable[Digit]) -> bool:
    """Whether the digits, in any order, are digits of one number.

    Args:
        digits: (size, stride) pairs.

    Returns:
        True if no two of them overlap: each stride is a multiple of every smaller stride times its
        size.

    Example:
        >>> are_nested([(2, 4), (4, 1)]), are_nested([(2, 3), (2, 1)])
        (True, False)
    """
    span = 1
    for size, stride in sorted(digits, key=lambda digit: digit[1]):
        if stride <= 0 or stride % span:
            return False
        span = stride * size
    return True


def _inner_digit(walk: IntArray) -> Digit | None:
    """The innermost digit of a walk of two or more positions, or None."""
    stride = int(walk[1] - walk[0])
    if stride <= 0:
        return None
    breaks = np.diff(walk) != stride
    size = int(breaks.argmax()) + 1 if breaks.any() else walk.size
    if walk.size % size:
        return None
    # The greedy run is right for every mixed-radix walk; the other runs must now repeat it.
    steps = np.arange(size, dtype=np.int64) * stride
    runs = walk.reshape(-1, size)
    return (size, stride) if np.array_equal(runs, runs[:, :1] + steps) else None


# ------------------------------------------------- Finds the place of device ids in a device order

_DENSE = 16
"""A table may be this many times longer than the ids in it."""


class PositionTable:
    """The position of each device id in one order. Built when it is first asked.

    Ids are looked up in a table indexed by id where they are dense (every runtime's are), and by
    bisection of the sorted ids otherwise.

    Args:
        ordered_ids: unique non-negative ids, [n], in their order.

    Example:
        >>> PositionTable(np.array([30, 10, 20])).find(np.array([10, 30, 99])).tolist()
        [1, 0, -1]
    """

    __slots__ = ("_keys", "_ordered_ids", "_positions")

    def __init__(self, ordered_ids: NDArray[np.int64]) -> None:
        self._ordered_ids = ordered_ids
        self._keys: NDArray[np.int64] | None = None  # the sorted ids, when they are not dense
        self._positions: NDArray[np.int64] | None = None

    def find(self, device_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Looks ids up.

        Args:
            device_ids: integers of any shape.

        Returns:
            Their positions, int64 of the same shape; -1 where an id is not in the order.
        """
        positions = self._positions
        if positions is None:
            ids = self._ordered_ids
            top = int(ids.max())
            if top < _DENSE * ids.size:
                # One place more than the top id: it stays -1 and answers for all ids beyond.
                positions = np.full(top + 2, -1, np.int64)
                positions[ids] = np.arange(ids.size)
            else:
                positions = np.argsort(ids)
                self._keys = ids[positions]
            self._positions = positions  # last: another thread may be asking at the same time
        if self._keys is None:
            beyond = positions.size - 1
            outside = (device_ids < 0) | (device_ids > beyond)
            return positions[np.where(outside, beyond, device_ids)]
        places = np.minimum(np.searchsorted(self._keys, device_ids), self._keys.size - 1)
        return np.where(self._keys[places] == device_ids, positions[places], -1)

    def has_all(self, device_ids: NDArray[np.int64]) -> bool:
        """Whether all ids are in the order.

        Args:
            device_ids: integers of any shape.

        Returns:
            True if none is missing.
        """
        return bool((self.find(device_ids) >= 0).all())

    def find_all(self, device_ids: NDArray[np.int64], mesh: object) -> NDArray[np.int64]:
        """Looks ids up that must be there.

        Args:
            device_ids: integers of any shape.
            mesh: whose order this is; for the message.

        Returns:
            Their positions, int64 of the same shape.

        Raises:
            MeshError: some are not in the order.
        """
        positions = self.find(device_ids)
        absent = device_ids[positions < 0]
        if absent.size:
            raise MeshError(
                f"Device ids {describe_device_ids(device_ids)} were looked up in {mesh!r}. "
                f"The first that it does not have is {absent[0]}. "
                "Pass ids of its devices, or ask a mesh that has them."
            )
        return positions


# -------------------------------------------------------------------------------------------- Mesh


@argument_types
class Mesh:
    """Devices arranged along named axes; an immutable, hashable value.

    Args:
        device_ids: unique non-negative integers, as many as the product of `mesh_shape`, flat or
            shaped; read in row-major order.
        mesh_shape: the size of each axis.
        axis_names: a name for each axis; None names them 0, 1, ...

    Raises:
        MeshError: what cannot be a mesh, with the values and what to pass instead.

    Where an axis is asked for, its name or its position will do; if some names are integers, an
    integer is always a name.

    Example:
        >>> mesh = Mesh(range(8), (2, 4), ("dp", "tp"))
        >>> mesh
        Mesh(dp=2, tp=4, devices=0..7)
        >>> mesh.size("tp"), mesh.coordinates(6)
        (4, (1, 2))
    """

    __slots__ = (
        "__weakref__",
        "_axis_names",
        "_device_ids",
        "_digits",
        "_root",
        "_table",
        "_to_hash",
    )

    # A mesh is not a sequence of its axes: without this, indexing by integers would make it one.
    if not TYPE_CHECKING:
        __iter__ = None

    def __init__(
        self,
        device_ids: ArrayLike | range,
        mesh_shape: Iterable[SupportsIndex],
        axis_names: Iterable[Axis] | None = None,
    ) -> None:
        shape = read_mesh_shape(mesh_shape)
        names = read_axis_names(axis_names, shape)
        self._set(read_device_ids(device_ids, shape), names, None)

    def _set(self, ids: NDArray[np.int64], names: tuple[Axis, ...], root: Mesh | None) -> None:
        self._device_ids = ids
        self._axis_names = names
        self._root = root
        self._digits: dict[Mesh | None, tuple[tuple[Digit, ...], ...] | None] = {}
        self._table = PositionTable(ids.reshape(-1))
        self._to_hash: str | None = None

    @staticmethod
    def arange(
        mesh_shape: Iterable[SupportsIndex], axis_names: Iterable[Axis] | None = None
    ) -> Mesh:
        """Makes the mesh of the devices 0, 1, 2, ... in row-major order.

        Args:
            mesh_shape: the size of each axis.
            axis_names: a name for each axis; None names them 0, 1, ...

        Returns:
            The mesh.

        Raises:
            MeshError: as for Mesh.

        Example:
            >>> Mesh.arange((2, 2)).device_ids.tolist()
            [[0, 1], [2, 3]]
        """
        shape = read_mesh_shape(mesh_shape)
        return Mesh(range(math.prod(shape)), shape, axis_names)

    @property
    def device_ids(self) -> NDArray[np.int64]:
        """The device ids: read-only int64 of shape `mesh_shape`."""
        return self._device_ids

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """The size of each axis."""
        return self._device_ids.shape

    @property
    def axis_names(self) -> tuple[Axis, ...]:
        """The name of each axis."""
        return self._axis_names

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return self._device_ids.ndim

    def axes_text(self) -> str:
        """Writes the axes with their sizes.

        Returns:
            The text.

        Example:
            >>> Mesh.arange((2, 4), ("dp", "tp")).axes_text()
            'dp=2, tp=4'
        """
        pairs = zip(self._axis_names, self.mesh_shape, strict=True)
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
            >>> Mesh.arange((2, 4), ("dp", "tp")).size("tp")
            4
        """
        if axis is None:
            return self._device_ids.size
        return self._device_ids.shape[self.axis_index(axis)]

    def axis_index(self, axis: Axis) -> int:
        """Finds one axis.

        Args:
            axis: its name, or, where no name is an integer, its position.

        Returns:
            Its position, from 0.

        Raises:
            AxisError: there is no such axis.

        Example:
            >>> Mesh.arange((2, 4), ("dp", "tp")).axis_index("tp")
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

    @property
    def root(self) -> Mesh:
        """The mesh that this one was cut out of; itself if none."""
        return self if self._root is None else self._root

    @property
    def is_root(self) -> bool:
        """Whether this mesh was cut out of no other."""
        return self._root is None

    def __getitem__(self, axes: AxisSelection) -> Mesh:
        """Cuts out the submesh of some axes, at coordinate 0 of all others.

        Args:
            axes: one axis or several.

        Returns:
            The submesh, its axes in the order asked; its root is this mesh's root.

        Raises:
            AxisError: an unknown axis, an axis twice, or no axis.

        Example:
            >>> Mesh.arange((2, 4), ("dp", "tp"))["tp", "dp"]
            Mesh(tp=4, dp=2, devices=[0, 4, ...] (8))
        """
        indices = self._axis_indices(axes)
        if not indices:
            raise AxisError(
                "A submesh of no axes was asked for. A mesh has at least one axis. "
                f"Pass some of {self.axes_text()}."
            )
        return self._cut(indices, dict.fromkeys(set(range(self.ndim)) - set(indices), 0))

    def slice(self, at: AxisMapping[int] | None = None, /, **at_names: int) -> Mesh:
        """Cuts out the submesh at a coordinate of some axes.

        Args:
            at: axis to coordinate.
            **at_names: the same, for axes whose names are Python names.

        Returns:
            The submesh of the remaining axes; its root is this mesh's root.

        Raises:
            AxisError: an unknown axis, or an axis twice.
            MeshError: a coordinate out of range, or no axis left.

        Example:
            >>> Mesh.arange((2, 4), ("dp", "tp")).slice(dp=1)
            Mesh(tp=4, devices=4..7)
        """
        pairs = [*(at or {}).items(), *at_names.items()]
        indices = self._axis_indices([axis for axis, _ in pairs])
        for index, (_, position) in zip(indices, pairs, strict=True):
            name, size = self.axis_names[index], self.mesh_shape[index]
            if as_integer(position) not in range(size):
                raise MeshError(
                    f"A slice at {name}={position!r} was asked for. Axis {name!r} has size {size}. "
                    f"Pass an integer from 0 to {size - 1}."
                )
        if len(indices) == self.ndim:
            text = ", ".join(f"{axis}={coordinate}" for axis, coordinate in pairs)
            raise MeshError(
                f"A slice at {text} was asked for. It leaves none of the axes {self.axes_text()}. "
                "Leave one axis out, or index device_ids to get one device."
            )
        fixed = {index: int(place) for index, (_, place) in zip(indices, pairs, strict=True)}
        return self._cut([index for index in range(self.ndim) if index not in fixed], fixed)

    @overload
    def coordinates(self, device_id: int) -> tuple[int, ...]: ...
    @overload
    def coordinates(self, device_id: NDArray[np.integer] | Sequence[int]) -> NDArray[np.int64]: ...

    def coordinates(
        self, device_id: int | NDArray[np.integer] | Sequence[int]
    ) -> tuple[int, ...] | NDArray[np.int64]:
        """Finds devices in the mesh.

        Args:
            device_id: one id, or an array of ids of any shape.

        Returns:
            The coordinate on each axis; for an array int64 [*its shape, ndim].

        Raises:
            MeshError: an id that is not in the mesh.

        Example:
            >>> Mesh.arange((2, 4)).coordinates(np.array([0, 6])).tolist()
            [[0, 0], [1, 2]]
        """
        ids = _as_array(device_id)
        if ids.dtype.kind not in "iu" and ids.size:
            raise MeshError(
                f"Devices were looked up with ids of dtype {ids.dtype}. Device ids are integers. "
                "Pass an integer or an array of integers."
            )
        positions = self._table.find_all(ids.astype(np.int64), self)
        coordinates = np.stack(np.unravel_index(positions, self.mesh_shape), axis=-1)
        return coordinates if ids.ndim else tuple(coordinates.tolist())

    def groups(self, axes: AxisSelection) -> NDArray[np.int64]:
        """Lists the groups of devices that communicate along some axes.

        Args:
            axes: one axis or several; none at all makes each device a group.

        Returns:
            Device ids [number of groups, group size], read-only. Members are in row-major order of
            `axes` as given, groups in row-major order of the other axes. Only devices of this mesh
            are in it: ask the root for the groups of all.

        Raises:
            AxisError: an unknown axis, or an axis twice.

        Example:
            >>> Mesh.arange((2, 2), ("dp", "tp")).groups("dp").tolist()
            [[0, 2], [1, 3]]
        """
        members = self._axis_indices(axes)
        outer_axes = [index for index in range(self.ndim) if index not in members]
        group_size = math.prod(self.mesh_shape[index] for index in members)
        groups = self._device_ids.transpose(*outer_axes, *members).reshape(-1, group_size)
        groups.flags.writeable = False
        return groups

    def factored(self, factors: AxisMapping[Sequence[tuple[Axis, int]]]) -> Mesh:
        """Splits axes into finer ones; the order of the devices stays.

        Args:
            factors: axis to its (name, size) parts, outer to inner.

        Returns:
            The mesh with the parts in the place of each axis.

        Raises:
            AxisError: an unknown axis, or a name twice.
            MeshError: sizes that do not multiply to the size of the axis.

        Example:
            >>> mesh = Mesh.arange((2, 4), ("dp", "tp"))
            >>> mesh.factored({"tp": (("outer", 2), ("inner", 2))})
            Mesh(dp=2, outer=2, inner=2, devices=0..7)
        """
        by_index = dict(zip(self._axis_indices(list(factors)), factors.values(), strict=True))
        names: list[Axis] = []
        sizes: list[int] = []
        for index, (name, size) in enumerate(zip(self._axis_names, self.mesh_shape, strict=True)):
            parts = by_index.get(index, ((name, size),))
            _refuse_unpaired(name, parts)
            part_sizes = tuple(part_size for _, part_size in parts)
            numbers = [as_integer(part_size) or 0 for part_size in part_sizes]
            if min(numbers, default=0) < 1 or math.prod(numbers) != size:
                raise MeshError(
                    f"Axis {name!r} of size {size} was to be factored into sizes {part_sizes}. "
                    f"These are not positive integers with a product of {size}. "
                    "Pass sizes that multiply up to the size of the axis."
                )
            names += [part_name for part_name, _ in parts]
            sizes += numbers
        axis_names = read_axis_names(tuple(names), tuple(sizes))
        return _derived(self._device_ids.reshape(sizes), axis_names, self._root)

    def flattened(self, axes: AxisSelection, name: Axis) -> Mesh:
        """Merges adjacent axes into one; the order of the devices stays.

        Args:
            axes: the axes, outer to inner, as they follow each other in the mesh.
            name: the name of the merged axis.

        Returns:
            The mesh with the merged axis in their place.

        Raises:
            AxisError: an unknown axis, an axis or a name twice, or axes that are not adjacent.

        Example:
            >>> Mesh.arange((2, 2, 2), ("pp", "dp", "tp")).flattened(("dp", "tp"), "dp_tp")
            Mesh(pp=2, dp_tp=4, devices=0..7)
        """
        indices = self._axis_indices(axes)
        if not indices or indices != list(range(indices[0], indices[-1] + 1)):
            raise AxisError(
                f"Axes {axes!r} were to be flattened into {name!r}. "
                f"They do not follow each other, in that order, in {self.axes_text()}. "
                "Pass adjacent axes, or permute the mesh first with mesh[axes]."
            )
        start, stop = indices[0], indices[-1] + 1
        merged = math.prod(self.mesh_shape[start:stop])
        shape = (*self.mesh_shape[:start], merged, *self.mesh_shape[stop:])
        names = read_axis_names((*self.axis_names[:start], name, *self.axis_names[stop:]), shape)
        return _derived(self._device_ids.reshape(shape), names, self._root)

    def digits(self, root: Mesh | None = None) -> tuple[tuple[Digit, ...], ...] | None:
        """Writes how each axis walks through the flat order of a root. Cached.

        Args:
            root: the mesh whose `device_ids.flat` is the order; None for this mesh's own root.

        Returns:
            For each axis its (size, stride) digits, outer to inner; () for an axis of size 1. None
            when an axis does not walk by digits (the order is no mixed-radix permutation, or not
            along the axes), and when the mesh has only some devices of `root` and was not cut out
            of a mesh over all of them. For a submesh the digits are those of its axes, whatever
            the coordinates at which it was cut.

        Raises:
            MeshError: a device that is not in `root`.

        Example:
            >>> mesh = Mesh(range(8), (2, 4), ("dp", "tp"))
            >>> mesh.digits()
            (((2, 4),), ((4, 1),))
            >>> mesh["tp"].digits()
            (((4, 1),),)
        """
        key = None if root is None or root is self.root else root
        if key not in self._digits:
            order, own_root = self.root if root is None else root, self.root
            positions = self.positions(order)
            # The walk of an axis is the same at every coordinate only if its root walks by digits.
            walks_alike = self.size() == order.size() or (
                own_root.size() == order.size()
                and (own_root is order or order._table.has_all(own_root.device_ids))
                and own_root.digits(order) is not None
            )
            self._digits[key] = axis_digits(positions) if walks_alike else None
        return self._digits[key]

    def positions(self, root: Mesh | None = None) -> NDArray[np.int64]:
        """Finds the devices in the flat order of a root.

        Args:
            root: the mesh whose `device_ids.flat` is the order; None for this mesh's own root.

        Returns:
            int64 of shape `mesh_shape`.

        Raises:
            MeshError: a device that is not in `root`.

        Example:
            >>> Mesh.arange((2, 2), ("dp", "tp"))["tp", "dp"].positions().tolist()
            [[0, 2], [1, 3]]
        """
        root = self.root if root is None else root
        return root._table.find_all(self._device_ids, root)

    def to_hash(self) -> str:
        """Names the value of the mesh: the same in every process and Python version.

        Returns:
            64 hexadecimal digits. Equal meshes have the same, different ones do not.

        Example:
            >>> Mesh.arange((2, 4)).to_hash() == Mesh(range(8), (2, 4)).to_hash()
            True
        """
        if self._to_hash is None:
            digest = hashlib.sha256(b"mesh_utils.Mesh 1\n")
            root = None if self._root is None else self._root.to_hash()
            digest.update(json.dumps([self.mesh_shape, self.axis_names, root]).encode())
            digest.update(self._device_ids.astype("<i8", copy=False).tobytes())
            self._to_hash = digest.hexdigest()
        return self._to_hash

    def check_valid(self) -> None:
        """States the invariants of a mesh.

        Raises:
            MeshError: one of them does not hold, which only a bug in mesh_utils can bring about.
        """
        read_axis_names(self.axis_names, read_mesh_shape(self.mesh_shape))
        ids = self.device_ids
        stored = ids.dtype == np.int64 and ids.flags.c_contiguous and not ids.flags.writeable
        if not stored or not self.root.is_root:
            raise MeshError(
                f"{self!r} was checked. Its ids are not read-only int64 of its shape, or its root "
                "has a root. Make meshes with Mesh and its methods only."
            )
        read_device_ids(ids, self.mesh_shape)
        self.positions()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mesh):
            return NotImplemented
        return self is other or self.to_hash() == other.to_hash()

    def __hash__(self) -> int:
        return hash(self._to_hash or self.to_hash())

    def __repr__(self) -> str:
        return f"Mesh({self.axes_text()}, devices={describe_device_ids(self._device_ids)})"

    def __deepcopy__(self, memo: object) -> Mesh:
        return self

    def __reduce__(self) -> tuple[object, ...]:
        # Not the slots: what is cached in them need not travel.
        return _derived, (self._device_ids, self.axis_names, self._root)

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

    def _cut(self, axes: Sequence[int], fixed: Mapping[int, int]) -> Mesh:
        """The submesh of `axes`, in that order, at the coordinates `fixed`."""
        if list(axes) == list(range(self.ndim)):
            return self
        index = tuple(fixed.get(axis, slice(None)) for axis in range(self.ndim))
        in_mesh_order = sorted(axes)
        ids = self._device_ids[index].transpose([in_mesh_order.index(axis) for axis in axes])
        return _derived(ids, tuple(self.axis_names[axis] for axis in axes), self.root)


def _derived(ids: NDArray[np.int64], axis_names: tuple[Axis, ...], root: Mesh | None) -> Mesh:
    """A mesh of parts that are known to be good, or are those of a pickled mesh."""
    mesh = object.__new__(Mesh)
    ids = np.ascontiguousarray(ids)
    ids.flags.writeable = False
    mesh._set(ids, axis_names, root)  # pyright: ignore[reportPrivateUsage]
    return mesh


def _refuse_unpaired(name: Axis, parts: object) -> None:
    if not isinstance(parts, (list, tuple)) or not all(
        isinstance(part, (list, tuple)) and len(cast("tuple[object, ...]", part)) == 2
        for part in cast("Sequence[object]", parts)
    ):
        raise AxisError(
            f"Axis {name!r} was to be factored into {parts!r}. These are not (name, size) pairs. "
            "Pass a tuple of pairs, such as (('outer', 2), ('inner', 2))."
        )
