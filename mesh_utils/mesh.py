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

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, SupportsIndex, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mesh_utils.argument_types import argument_types
from mesh_utils.axes import AxisMapping, AxisSelection, NamedAxes
from mesh_utils.device_ids import describe_device_ids, read_asked_ids, read_device_ids
from mesh_utils.errors import AxisError, MeshError
from mesh_utils.mesh_input import Axis, read_axis_names, read_mesh_shape
from mesh_utils.order import Digit, axis_digits
from mesh_utils.position_table import PositionTable


@argument_types
class Mesh(NamedAxes):
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

    __slots__ = ("__weakref__", "_device_ids", "_digits", "_root", "_table", "_to_hash")

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

    def _set(self, ids: NDArray[np.int64], names: tuple[Axis, ...], root: "Mesh | None") -> None:
        super().__init__(ids.shape, names)
        self._device_ids = ids
        self._root = root
        self._digits: dict[Mesh | None, tuple[tuple[Digit, ...], ...] | None] = {}
        self._table = PositionTable(ids.reshape(-1))
        self._to_hash: str | None = None

    @staticmethod
    def arange(
        mesh_shape: Iterable[SupportsIndex], axis_names: Iterable[Axis] | None = None
    ) -> "Mesh":
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
        ids = np.arange(math.prod(shape), dtype=np.int64).reshape(shape)
        return _derived(ids, read_axis_names(axis_names, shape), None)

    @property
    def device_ids(self) -> NDArray[np.int64]:
        """The device ids: read-only int64 of shape `mesh_shape`."""
        return self._device_ids

    @property
    def root(self) -> "Mesh":
        """The mesh that this one was cut out of; itself if none."""
        return self if self._root is None else self._root

    @property
    def is_root(self) -> bool:
        """Whether this mesh was cut out of no other."""
        return self._root is None

    def __getitem__(self, axes: AxisSelection) -> "Mesh":
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
        kept = self._axis_indices(axes)
        if not kept:
            raise AxisError(
                "A submesh of no axes was asked for. A mesh has at least one axis. "
                f"Pass some of {self.axes_text()}."
            )
        return self._cut(kept, dict.fromkeys(set(range(self.ndim)) - set(kept), 0))

    def slice(self, at: AxisMapping[int] | None = None, /, **at_names: int) -> "Mesh":
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
        fixed = self._fixed_coordinates([*(at or {}).items(), *at_names.items()])
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
        given = read_asked_ids(device_id)
        found = self._table.find_all(given, self)
        coordinates = np.stack(np.unravel_index(found, self.mesh_shape), axis=-1)
        return coordinates if given.ndim else tuple(coordinates.tolist())

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
        others = [index for index in range(self.ndim) if index not in members]
        group_size = math.prod(self.mesh_shape[index] for index in members)
        groups = self._device_ids.transpose(*others, *members).reshape(-1, group_size)
        groups.flags.writeable = False
        return groups

    def factored(self, factors: AxisMapping[Sequence[tuple[Axis, int]]]) -> "Mesh":
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
        return self._rearranged(*self._factored_axes(factors))

    def flattened(self, axes: AxisSelection, name: Axis) -> "Mesh":
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
        return self._rearranged(*self._flattened_axes(axes, name))

    def digits(self, root: "Mesh | None" = None) -> tuple[tuple[Digit, ...], ...] | None:
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
            self._digits[key] = self._find_digits(self.root if root is None else root)
        return self._digits[key]

    def positions(self, root: "Mesh | None" = None) -> NDArray[np.int64]:
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
        ids = self._device_ids
        stored = ids.dtype == np.int64 and ids.flags.c_contiguous and not ids.flags.writeable
        if ids.shape != self.mesh_shape or not stored or not self.root.is_root:
            raise MeshError(
                f"{self!r} was checked. Its ids are not read-only int64 of its shape, or its root "
                "has a root. Make meshes with Mesh and its methods only."
            )
        read_device_ids(ids, self.mesh_shape)
        self.positions()

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Mesh):
            return NotImplemented
        if self._to_hash is not None and other._to_hash is not None:
            return self._to_hash == other._to_hash
        return (
            self.mesh_shape == other.mesh_shape
            and self.axis_names == other.axis_names
            and np.array_equal(self._device_ids, other._device_ids)
            and self._root == other._root
        )

    def __hash__(self) -> int:
        return hash(self.to_hash())

    def __repr__(self) -> str:
        return f"Mesh({self.axes_text()}, devices={describe_device_ids(self._device_ids)})"

    def __deepcopy__(self, memo: object) -> "Mesh":
        return self

    def __reduce__(self) -> tuple[object, ...]:
        # Not the slots: what is cached in them need not travel.
        return _derived, (self._device_ids, self.axis_names, self._root)

    def _cut(self, kept: Sequence[int], fixed: Mapping[int, int]) -> "Mesh":
        """The submesh of the axes `kept`, in that order, at the coordinates `fixed`."""
        if list(kept) == list(range(self.ndim)):
            return self
        index = tuple(fixed.get(axis, slice(None)) for axis in range(self.ndim))
        in_mesh_order = sorted(kept)
        ids = self._device_ids[index].transpose([in_mesh_order.index(axis) for axis in kept])
        return _derived(ids, tuple(self.axis_names[axis] for axis in kept), self.root)

    def _rearranged(self, shape: tuple[int, ...], axis_names: tuple[Axis, ...]) -> "Mesh":
        """The same devices in the same order under other axes."""
        return _derived(self._device_ids.reshape(shape), axis_names, self._root)

    def _find_digits(self, root: "Mesh") -> tuple[tuple[Digit, ...], ...] | None:
        positions = self.positions(root)
        if self.size() < root.size():
            # The walk of an axis is the same at every coordinate only if that of `whole` is digits.
            whole = self.root
            spans = whole.size() == root.size() and (
                whole is root or root._table.has_all(whole.device_ids)
            )
            if not spans or whole.digits(root) is None:
                return None
        return axis_digits(positions)


def _derived(ids: NDArray[np.int64], axis_names: tuple[Axis, ...], root: Mesh | None) -> Mesh:
    """A mesh of parts that are known to be good, or are those of a pickled mesh."""
    mesh = object.__new__(Mesh)
    ids = np.ascontiguousarray(ids)
    ids.flags.writeable = False
    mesh._set(ids, axis_names, root)  # pyright: ignore[reportPrivateUsage]
    return mesh
