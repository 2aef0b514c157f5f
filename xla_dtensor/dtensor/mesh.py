"""torch's DeviceMesh over the runtime's devices, backed by a :class:`mesh_utils.Mesh`.

Stock torch leaves a mesh of device type "xla" half built: no coordinate, no submesh by name. The
subclass here answers those from the plain mesh value it carries (``.value``), and so needs no
process group. A submesh keeps its root on the object, because a tensor on ``mesh["tp"]`` is a
tensor of the whole root mesh.

One process may reach many devices. Where torch asks for "my" coordinate or rank, the answer is
that of the first addressable device of the mesh.
"""

from __future__ import annotations

import logging
import math
import operator
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NoReturn

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh as TorchDeviceMesh
from torch.utils._python_dispatch import _disable_current_modes

from mesh_utils import Axis, Mesh
from mesh_utils.mesh import read_mesh_shape
from xla_dtensor.core.argument_types import argument_types
from xla_dtensor.core.errors import (
    ArgumentTypeError,
    DistributeError,
    LocalViewError,
    MeshRankError,
    ProcessGroupError,
    UnsupportedOpError,
)
from xla_dtensor.runtimes.nested import leaves, map_nested
from xla_dtensor.runtimes.registry import get_runtime

__all__ = [
    "BY_NAME",
    "AxisGroup",
    "DeviceMesh",
    "MemberNumber",
    "Merged",
    "allow_groups",
    "as_device_mesh",
    "current_mesh",
    "devices_of_ranks",
    "empty_local",
    "flattened",
    "init_device_mesh",
    "is_off_mesh",
    "mesh_text",
    "off_mesh_result",
    "ranks_of_devices",
    "refuse_collective",
    "submesh",
    "unflattened",
    "warn_of_one_rank",
]


# ----------------------------------------------------------------------------------- Mesh reshaping
#
# Merging and splitting the axes of a DeviceMesh, as PyTorch's _flatten and _unflatten do.
#
# A merged axis has a name of its own, which the root mesh remembers::
#
#     mesh = init_device_mesh("xla", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
#     mesh["dp", "tp"]._flatten()        (dp_tp=4), a submesh of mesh
#     mesh["dp_tp"]                      the same
#     mesh["pp", "dp_tp"]                (pp=2, dp_tp=4)

Merged = dict[str, tuple[Axis, ...]]
"""Names of merged axes, with the axes of the root that each is made of."""


def flattened(mesh: Mesh, name: str | None, merged: Merged) -> Mesh:
    """Merge all axes of a mesh into one, and remember its name.

    Args:
        mesh: A mesh with named axes.
        name: The name of the merged axis; the names of its parts joined by "_" when None.
        merged: What was merged before under the same root; the new name is added.

    Returns:
        A mesh of one axis, over the same devices in the same order.

    Raises:
        DistributeError: Unnamed axes, or a name that stands for other axes already.

    Example:
        >>> flattened(Mesh.arange((2, 4), ("dp", "tp")), None, {})
        Mesh(dp_tp=8, devices=0..7)
    """
    names = mesh.axis_names
    if not all(isinstance(axis, str) for axis in names):
        raise DistributeError(
            f"_flatten() was called on a mesh ({mesh.axes_text()}). Its axes have no names, so the "
            "merged one would have none. Pass mesh_dim_names= where the mesh is made."
        )
    name = "_".join(str(axis) for axis in names) if name is None else name
    if names == (name,):
        return mesh
    axes = (name,) if name in mesh.root.axis_names else merged.get(name, names)
    if axes != names:
        raise DistributeError(
            f"_flatten({name!r}) was called on a mesh ({mesh.axes_text()}). The name stands for "
            f"{axes} of ({mesh.root.axes_text()}) already. Pass another name."
        )
    merged[name] = names
    return _merge(mesh, names, name)


def _merge(mesh: Mesh, axes: tuple[Axis, ...], name: str) -> Mesh:
    first, *inner = axes
    if inner:
        return mesh.flattened(axes, name)
    return mesh.factored({first: ((name, mesh.size(first)),)})  # it only gets another name


def submesh(mesh: Mesh, names: Sequence[str], merged: Mapping[str, tuple[Axis, ...]]) -> Mesh:
    """Cut out axes, those that were merged among them.

    Args:
        mesh: The mesh.
        names: The axes, in the order of the result.
        merged: The merged axes of its root.

    Returns:
        The submesh.

    Raises:
        AxisError: An unknown axis, or one twice.

    Example:
        >>> submesh(Mesh.arange((2, 2, 2), ("a", "b", "c")), ("a", "b_c"), {"b_c": ("b", "c")})
        Mesh(a=2, b_c=4, devices=0..7)
    """
    axis_names = mesh.axis_names
    parts = {
        n: merged[n]
        for n in names
        if n not in axis_names and set(merged.get(n, "?")) <= set(axis_names)
    }
    mesh_cut = mesh[tuple(axis for name in names for axis in parts.get(name, (name,)))]
    for name, axes in parts.items():
        mesh_cut = _merge(mesh_cut, axes, name)
    return mesh_cut


def unflattened(mesh: Mesh, axis: Any, sizes: Sequence[int], names: Sequence[str]) -> Mesh:
    """Split one axis into several.

    Args:
        mesh: The mesh.
        axis: The axis, by name or number.
        sizes: Sizes of its parts, outer to inner.
        names: Their names.

    Returns:
        The mesh with the parts in the axis's place, over the same devices in the same order.

    Raises:
        DistributeError: Not as many names as sizes.
        AxisError: An unknown axis, or a name twice.
        MeshError: Sizes that do not multiply to the size of the axis.

    Example:
        >>> unflattened(Mesh.arange((8,), ("all",)), "all", (2, 4), ("dp", "tp"))
        Mesh(dp=2, tp=4, devices=0..7)
    """
    if len(sizes) != len(names):
        raise DistributeError(
            f"_unflatten was called with mesh_sizes={tuple(sizes)} and "
            f"mesh_dim_names={tuple(names)}. Each part of the axis has a size and a name. Pass as "
            "many names as sizes."
        )
    where = mesh.axis_names[mesh.axis_index(axis)]
    return mesh.factored({where: tuple(zip(names, sizes, strict=True))})


# --------------------------------------------------------------------- There are no process groups
#
# What asks for one is told so, and what to use in its place.

# c10d has the collectives of torch.distributed, the others those of its functional collectives.
_NAMESPACES = frozenset({"c10d", "c10d_functional", "_c10d_functional"})


class NoGroups(list[str]):
    """The names of the process groups of a mesh's axes: none, and to look one up is refused.

    PyTorch looks them up by axis number, in a DeviceMesh's ``_dim_group_names``.

    Args:
        mesh: The mesh, for the message.
    """

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self._mesh = mesh

    def __getitem__(self, index: Any) -> NoReturn:
        refuse_group(self._mesh)


def refuse_group(mesh: Mesh) -> NoReturn:
    """Refuse to name the process group of an axis."""
    raise ProcessGroupError(
        f"The process group of an axis of the mesh ({mesh.axes_text()}) was asked for. One program "
        "runs on all its devices, and XLA makes their communication, so no axis has a group. Use "
        "redistribute, fully_shard in place of DistributedDataParallel, and collectives on "
        "x.to_local()."
    )


def refuse_collective(func: Any) -> None:
    """Refuse torch.distributed's collectives on DTensors; let all other ops pass.

    Args:
        func: An ``OpOverload``, called on a DTensor.

    Raises:
        ProcessGroupError: It is a collective among processes.
    """
    if func.namespace in _NAMESPACES and not func.__name__.startswith("wait_tensor"):
        raise ProcessGroupError(
            f"The collective {func} was called on a DTensor. Its value is whole, and processes "
            "have no parts of it to exchange. Call functional collectives on x.to_local(), or "
            "redistribute it."
        )


# ------------------------------------------------- What stands for a process group after install()
#
# The members along one mesh axis.
#
# ``mesh.get_group("tp")`` returns an :class:`AxisGroup`. torch's functional collectives on
# LocalViews take it, and ``torch.distributed.get_world_size(group)`` is the axis's size. There is
# one program for all members, so ``torch.distributed.get_rank(group)`` is no one number: it is a
# :class:`MemberNumber`, with which the program computes as with an int::
#
#     start = dist.get_rank(group) * 512          0 on the first member, 512 on the next, ...
#     mask = (ids >= start) & (ids < start + 512) a LocalView, each device with its own bounds
#
# It becomes a tensor where it meets a LocalView. Python that would need one value for all members,
# such as a branch or an index, gets it where they agree, and an error where they do not.

_allowed: list[bool] = []


def allow_groups(allowed: bool) -> None:
    """Let meshes name groups, or not: torch's functions take ours after install() only."""
    _allowed[:] = [True] if allowed else []


def axis_group(mesh: Mesh, axis: int | str | None) -> AxisGroup:
    """Return the members along an axis, None for the only one; refused before install()."""
    if not _allowed:
        refuse_group(mesh)
    if axis is None and mesh.ndim > 1:
        raise MeshRankError(
            f"get_group() was called on a mesh with axes ({mesh.axes_text()}). It has {mesh.ndim} "
            f"axes, and each has members of its own. Pass mesh_dim, an axis name or number."
        )
    name = mesh.axis_names[mesh.axis_index(0 if axis is None else axis)]
    return AxisGroup(mesh[name], name)


@dataclass(frozen=True)
class AxisGroup:
    """The members along one axis of a mesh.

    Args:
        mesh: A mesh of that axis.
        axis: The axis.

    Example:
        >>> group = AxisGroup(Mesh.arange((4,), ("tp",)), "tp")
        >>> group.size(), group.rank() * 2
        (4, MemberNumber(tp: 0, 2, 4, 6))
    """

    mesh: Mesh
    axis: Axis

    def size(self) -> int:
        """Return how many members there are."""
        return self.mesh.size(self.axis)

    def rank(self) -> MemberNumber:
        """Return each member's number."""
        return MemberNumber(self.axis, tuple(range(self.size())))

    def __getattr__(self, name: str) -> NoReturn:
        if not name.startswith("_") and hasattr(torch.distributed.ProcessGroup, name):
            raise ProcessGroupError(
                f"The {name} of the members along {self.axis!r} was asked for, as of a process "
                "group. XLA makes their communication, and no back end has them. Use functional "
                "collectives on x.to_local(), and fully_shard in place of DistributedDataParallel."
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


class MemberNumber:
    """An integer of which each member along an axis has its own.

    Args:
        axis: The axis.
        values: Each member's number, in the members' order.
    """

    __slots__ = ("axis", "values")

    def __init__(self, axis: Axis, values: Iterable[int]) -> None:
        self.axis, self.values = axis, tuple(values)

    def __repr__(self) -> str:
        return f"MemberNumber({self.axis}: {', '.join(map(str, self.values))})"

    def _with(self, operand: Any, op: Callable[[int, int], Any]) -> Any:
        if isinstance(operand, MemberNumber):
            if operand.axis != self.axis:
                raise LocalViewError(
                    f"{self!r} and {operand!r} were combined. They count members along different "
                    "axes. Take both from one group, or compute with tensors."
                )
            return [op(a, b) for a, b in zip(self.values, operand.values, strict=True)]
        return [op(a, operand) for a in self.values] if isinstance(operand, int) else None

    def _number(self, operand: Any, op: Callable[[int, int], int]) -> Any:
        values = self._with(operand, op)
        return NotImplemented if values is None else MemberNumber(self.axis, values)

    def _answer(self, operand: Any, op: Callable[[int, int], bool], sign: str) -> Any:
        values = self._with(operand, op)
        what = f"{self!r} {sign} {operand}"
        return NotImplemented if values is None else self._common(values, what)

    def _common(self, values: Iterable[Any], what: str) -> Any:
        distinct = set(values)
        if len(distinct) > 1:
            raise LocalViewError(
                f"{what} was asked for, as one value for all members along {self.axis!r}. Python "
                "runs once for all of them, and it is not the same on each. Compute it with "
                "tensors, such as torch.where; mesh.get_local_rank() is this process's number."
            )
        return distinct.pop()

    def __add__(self, operand: Any) -> Any:
        return self._number(operand, operator.add)

    def __sub__(self, operand: Any) -> Any:
        return self._number(operand, operator.sub)

    def __rsub__(self, operand: Any) -> Any:
        return self._number(operand, lambda a, b: b - a)

    def __mul__(self, operand: Any) -> Any:
        return self._number(operand, operator.mul)

    def __floordiv__(self, operand: Any) -> Any:
        return self._number(operand, operator.floordiv)

    def __mod__(self, operand: Any) -> Any:
        return self._number(operand, operator.mod)

    def __neg__(self) -> MemberNumber:
        return MemberNumber(self.axis, [-number for number in self.values])

    __radd__, __rmul__ = __add__, __mul__

    def __eq__(self, operand: object) -> bool:
        return self._answer(operand, operator.eq, "==")

    def __ne__(self, operand: object) -> bool:
        return self._answer(operand, operator.ne, "!=")

    def __lt__(self, operand: Any) -> bool:
        return self._answer(operand, operator.lt, "<")

    def __le__(self, operand: Any) -> bool:
        return self._answer(operand, operator.le, "<=")

    def __gt__(self, operand: Any) -> bool:
        return self._answer(operand, operator.gt, ">")

    def __ge__(self, operand: Any) -> bool:
        return self._answer(operand, operator.ge, ">=")

    def __bool__(self) -> bool:
        return self._common([bool(number) for number in self.values], f"bool({self!r})")

    def __index__(self) -> int:
        return self._common(self.values, f"int({self!r})")

    __int__ = __index__
    __hash__ = None  # pyright: ignore[reportAssignmentType]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of torch's, with each number as a scalar on the devices."""
        arguments = (tuple(args), kwargs or {})
        view = next((v for v in leaves(arguments) if getattr(v, "_is_per_device", False)), None)
        if view is None:
            number = next(v for v in leaves(arguments) if isinstance(v, cls))
            raise LocalViewError(
                f"{func.__name__} was called with {number!r}, but no local view. Each member has "
                "its own value, and only local views have one value per device. Call it on "
                "x.to_local(), inside local_map for example."
            )
        args, kwargs = map_nested(
            lambda v: _scalar(v, view) if isinstance(v, cls) else v, arguments
        )
        return func(*args, **kwargs)


def _scalar(number: MemberNumber, view: Any) -> torch.Tensor:
    """Return the number as a view of shape (), each device with its member's."""
    from xla_dtensor.dtensor.collectives import axis_index
    from xla_dtensor.dtensor.local_border import same_on_all

    index = axis_index(view, number.axis)
    if number.values == tuple(range(len(number.values))):
        return index
    every = same_on_all(torch.tensor(number.values), view.region)
    return every.index_select(0, index.reshape(1)).reshape(())


BY_NAME: dict[str, Callable[[AxisGroup], Any]] = {
    "get_process_group_ranks": lambda group: refuse_group(group.mesh),
    "get_rank": AxisGroup.rank,
    "get_world_size": AxisGroup.size,
}
"""torch.distributed's function names and what they do with an AxisGroup."""


# ---------------------------------------------------------------------- Devices as PyTorch's ranks
#
# Numbered from 0 without gaps, over all processes of the job.
#
# JAX gives each device an id. On TPUs and GPUs the ids of a job are 0 to N - 1. CPU devices of
# process k begin at 2048 k, and code written for PyTorch, where a rank is below the world size,
# fails on such numbers. So what torch's own interface names by rank (``mesh.mesh``,
# ``mesh.get_rank()``, a saved tensor's mesh) is the device's place among all ids in order, on every
# platform:
#
#     ids of the job      0  1  2  3  2048  2049  2050  2051
#     ranks               0  1  2  3     4     5     6     7
#
# A tensor on ``mesh["tp"]`` is one of the whole mesh, in every process. So a process has a place in
# a submesh if it has one in its root: that of its first device, along the submesh's axes.


@lru_cache(maxsize=4)
def _in_order(ids: tuple[int, ...]) -> np.ndarray[Any, Any]:
    return np.array(sorted(ids), dtype=np.int64)


def ranks_of_devices(device_ids: Any) -> np.ndarray[Any, Any]:
    """Return the ranks of devices, in an array of the same shape.

    Ids that the runtime does not have stay as they are: its own check names them.

    Example:
        >>> ranks_of_devices([[0, 1], [2, 3]]).tolist()
        [[0, 1], [2, 3]]
    """
    ids, ordered = np.asarray(device_ids, dtype=np.int64), _in_order(get_runtime().device_ids())
    places = np.searchsorted(ordered, ids).clip(max=len(ordered) - 1)
    return np.where(ordered[places] == ids, places, ids)


def devices_of_ranks(ranks: Any) -> np.ndarray[Any, Any]:
    """Return the ids of the devices of some ranks, in an array of the same shape.

    Numbers that are no ranks stay as they are, so that device ids pass, too.

    Example:
        >>> devices_of_ranks([3, 1]).tolist()
        [3, 1]
    """
    numbers = np.asarray(ranks, dtype=np.int64)
    ordered = _in_order(get_runtime().device_ids())
    if numbers.size and not ((numbers >= 0) & (numbers < len(ordered))).all():
        return numbers
    return ordered[numbers]


def coordinate_here(mesh: Mesh) -> list[int] | None:
    """Return where the first device that this process reaches is in a mesh, along its axes.

    First in the order of the mesh's root; None where this process reaches none of the root's.

    Example:
        >>> coordinate_here(Mesh.arange((2, 4), ("dp", "tp"))["tp"])
        [0]
    """
    place, digits = _first_place(mesh.root), mesh.digits()
    if place is None:
        return None
    if digits is None:  # a mesh of an irregular order: its own devices only
        where = np.argwhere(np.isin(mesh.device_ids, get_runtime().addressable_device_ids()))
        return [int(i) for i in where[0]] if len(where) else None
    coordinate = []
    for axis in digits:
        position = 0
        for size, stride in axis:
            position = position * size + place // stride % size
        coordinate.append(int(position))
    return coordinate


def ranks_here(mesh: Mesh) -> np.ndarray[Any, Any]:
    """Return the ranks of a mesh's devices; of a submesh, those of the one that this process is in.

    PyTorch's ``mesh["tp"]`` is another group of ranks in each row of the mesh.
    """
    coordinate, place = coordinate_here(mesh), _first_place(mesh.root)
    if mesh.is_root or coordinate is None or place is None or mesh.digits() is None:
        return ranks_of_devices(mesh.device_ids)
    positions = mesh.positions()
    positions = positions + (place - positions[tuple(coordinate)])
    return ranks_of_devices(mesh.root.device_ids.reshape(-1)[positions])


def _first_place(root: Mesh) -> int | None:
    reached = np.isin(root.device_ids.reshape(-1), get_runtime().addressable_device_ids())
    return int(reached.argmax()) if reached.any() else None


# -------------------------------------------------------------------------------------- Rank notice
#
# One log line for a program that asks which rank it is, where one process is many devices.
#
# PyTorch's ranks use ``mesh.get_local_rank()`` to take their own rows of a batch or their own
# columns of a weight. A process that drives all devices has one answer, that of its first device:
# the rows of rank 0 would be the whole batch, silently.

logger = logging.getLogger("xla_dtensor")
_warned: set[Mesh] = set()


def warn_of_one_rank(mesh: Mesh, axis: int, devices: tuple[int, ...], text: str) -> None:
    """Warn, once per mesh, where a process with several devices along an axis is asked its rank.

    Args:
        mesh: The mesh.
        axis: The number of the axis.
        devices: The ids of the devices that the process reaches.
        text: The mesh as a text, for the message.
    """
    places = np.argwhere(np.isin(mesh.device_ids, devices))[:, axis]
    if mesh in _warned or len(np.unique(places)) < 2 or _asked_by_torch():
        return
    _warned.add(mesh)
    name: Axis = mesh.axis_names[axis]
    logger.warning(
        "get_local_rank() was called for axis %r of the mesh %s, of which this process has %d "
        "devices. It is the first one's number, in all of the program: rows or columns chosen by "
        "it are the same on every device. Shard the whole value with distribute_tensor; per device "
        "there is xla_dtensor.axis_index(view, axis).",
        name,
        text,
        len(np.unique(places)),
    )


def _asked_by_torch() -> bool:
    """Tell whether code of torch's asked, which knows to ask for the shard of the first device."""
    return str(sys._getframe(3).f_globals.get("__name__")).split(".")[0] == "torch"


# -------------------------------------------------------------------------------------- Device mesh


@argument_types
class DeviceMesh(TorchDeviceMesh):
    """A device mesh of type "xla".

    Args:
        mesh: The plain mesh value. Made by :func:`init_device_mesh` or :func:`as_device_mesh`.
    """

    def __init__(self, mesh: Mesh) -> None:
        has_names = all(isinstance(name, str) for name in mesh.axis_names)
        names = tuple(str(name) for name in mesh.axis_names) if has_names else None
        ranks = torch.from_numpy(ranks_here(mesh)).int()
        super().__init__("xla", ranks, mesh_dim_names=names)
        self.value = mesh
        self._dim_group_names: list[str] = NoGroups(mesh)
        self._merged: Merged = {}
        self._coordinate_on_dim = self.get_coordinate()
        self._value_hash = hash(mesh)  # dispatch hashes meshes with each new kind of call

    def get_coordinate(self) -> Any:
        """Return the coordinate of the first addressable device of the mesh, None without one."""
        return coordinate_here(self.value)

    def get_rank(self) -> int:
        """Return the rank of the first addressable device; see :mod:`~xla_dtensor.dtensor.mesh`.

        It is below the number of devices, another in each process, and 0 in the first.
        """
        return int(ranks_of_devices(min(get_runtime().addressable_device_ids())))

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        """Return the first addressable device's position along an axis."""
        if mesh_dim is None and self.value.ndim > 1:
            raise MeshRankError(
                f"get_local_rank() was called on a mesh with axes {mesh_text(self.value)}. It has "
                f"{self.value.ndim} axes, so the question has {self.value.ndim} answers. Pass "
                "mesh_dim, an axis name or number."
            )
        coordinate = self.get_coordinate()
        if coordinate is None:
            raise MeshRankError(
                f"get_local_rank() was called on a mesh {mesh_text(self.value)} of which this "
                "process reaches no device. Such a process has no place in it. Check "
                "get_coordinate() is not None first."
            )
        axis = 0 if mesh_dim is None else self.value.axis_index(mesh_dim)
        devices = get_runtime().addressable_device_ids()
        warn_of_one_rank(self.value, axis, tuple(devices), mesh_text(self.value))
        return coordinate[axis]

    @argument_types
    def __getitem__(self, mesh_dim_names: str | tuple[str, ...]) -> DeviceMesh:
        names = (mesh_dim_names,) if isinstance(mesh_dim_names, str) else tuple(mesh_dim_names)
        if names == self.value.axis_names:
            return self
        return _device_mesh(submesh(self.value, names, self._get_root_mesh()._merged))

    def _flatten(self, mesh_dim_name: str | None = None, backend_override: Any = None) -> Any:
        """Merge all axes into one, of which the root mesh knows the name from then on."""
        return _device_mesh(flattened(self.value, mesh_dim_name, self._get_root_mesh()._merged))

    def _unflatten(
        self,
        dim: int | str,
        mesh_sizes: Sequence[int],
        mesh_dim_names: Sequence[str],
        backend_override: Any = None,
    ) -> DeviceMesh:
        """Split one axis into several."""
        return _device_mesh(unflattened(self.value, dim, mesh_sizes, mesh_dim_names))

    def get_group(self, mesh_dim: int | str | None = None) -> Any:
        """Return what names an axis's members after install(); refused before."""
        return axis_group(self.value, mesh_dim)

    def get_all_groups(self) -> NoReturn:
        """Refused, as :meth:`get_group`."""
        refuse_group(self.value)

    def _get_root_mesh(self) -> DeviceMesh:
        return _device_mesh(self.value.root)

    def __hash__(self) -> int:
        return self._value_hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DeviceMesh) and self.value == other.value

    def __repr__(self) -> str:
        return f"DeviceMesh({mesh_text(self.value)}, device: 'xla')"

    def __reduce__(self) -> Any:
        return (_device_mesh, (self.value,))

    def __deepcopy__(self, memo: Any) -> DeviceMesh:
        return self


@lru_cache(maxsize=1024)
def _device_mesh(mesh: Mesh) -> DeviceMesh:
    with _disable_current_modes():  # its ids are read, also while torch.compile traces
        return DeviceMesh(mesh)


def mesh_text(mesh: Mesh) -> str:
    """Return the axes with their sizes, e.g. ``(dp=2, tp=4)``."""
    pairs = zip(mesh.axis_names, mesh.mesh_shape, strict=True)
    return "(" + ", ".join(f"{name}={size}" for name, size in pairs) + ")"


def as_device_mesh(mesh: Any) -> DeviceMesh:
    """Return our DeviceMesh for a mesh value or for a stock DeviceMesh of type "xla".

    Args:
        mesh: A :class:`mesh_utils.Mesh`, a torch DeviceMesh, or torch_xla's or our spmd Mesh.

    Returns:
        The same object for equal meshes.

    Raises:
        DistributeError: A DeviceMesh of another device type.
        ArgumentTypeError: Another kind of object.
    """
    mesh = getattr(mesh, "real_obj", mesh)  # torch.compile traces with a stand-in
    if isinstance(mesh, DeviceMesh):
        return mesh
    if isinstance(mesh, Mesh):
        return _device_mesh(mesh)
    if isinstance(mesh, TorchDeviceMesh):
        if mesh.device_type != "xla":
            raise DistributeError(
                f"A DeviceMesh with device_type={mesh.device_type!r} was passed. xla_dtensor "
                "computes on the devices of its runtime, which torch calls 'xla'. Pass "
                "init_device_mesh('xla', mesh_shape, mesh_dim_names=...)."
            )
        ids = devices_of_ranks(mesh.mesh.numpy())
        return _device_mesh(Mesh(ids, tuple(mesh.mesh.shape), mesh.mesh_dim_names))
    if isinstance(getattr(mesh, "value", None), Mesh):  # xla_dtensor.spmd.Mesh
        return _device_mesh(mesh.value)
    if hasattr(mesh, "get_logical_mesh"):  # torch_xla.distributed.spmd.Mesh
        return _device_mesh(Mesh(mesh.device_ids, mesh.mesh_shape, mesh.axis_names))
    raise ArgumentTypeError(
        f"A mesh was expected, but an object of type={type(mesh).__name__} was passed. Axes and "
        "devices cannot be read from it. Pass init_device_mesh('xla', ...) or a mesh_utils.Mesh."
    )


def current_mesh(what: str) -> DeviceMesh:
    """Return the mesh of the innermost ``with mesh:`` block.

    Raises:
        DistributeError: Outside of any such block.
    """
    from torch.distributed.device_mesh import _mesh_resources

    try:
        return as_device_mesh(_mesh_resources.get_current_mesh())
    except RuntimeError:
        raise DistributeError(
            f"{what} was called without a mesh. No mesh was passed and no `with mesh:` block is "
            "open. Pass device_mesh=, or call it inside `with init_device_mesh('xla', ...):`."
        ) from None


@argument_types
def init_device_mesh(
    device_type: str,
    mesh_shape: Sequence[int],
    *,
    mesh_dim_names: Sequence[str] | None = None,
    backend_override: Any = None,
) -> DeviceMesh:
    """Return a mesh over the runtime's devices, starting the runtime if none runs.

    Args:
        device_type: "xla".
        mesh_shape: Sizes of the axes, least network-hungry first. Their product may be smaller
            than the number of devices: the first ones are taken.
        mesh_dim_names: One name per axis.
        backend_override: Accepted for torch's signature; XLA has no process group back ends.

    Returns:
        The mesh. The first one made over a set of devices fixes their order in every program.

    Raises:
        DistributeError: Another device type, or more devices asked for than there are.
        MeshError: A shape or names of which no mesh can be made.

    Example:
        >>> mesh = init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
        >>> mesh["tp"]
        DeviceMesh((tp=4), device: 'xla')
    """
    if device_type != "xla":
        raise DistributeError(
            f"init_device_mesh was called with device_type={device_type!r}. xla_dtensor places "
            "tensors on its runtime's devices only. Pass 'xla', or use "
            "torch.distributed.device_mesh.init_device_mesh for that device type."
        )
    runtime = get_runtime()
    mesh_shape = read_mesh_shape(mesh_shape)
    ids, num_devices = runtime.device_ids(), math.prod(mesh_shape)
    if num_devices > len(ids):
        raise DistributeError(
            f"init_device_mesh was called with mesh_shape={mesh_shape}, which takes "
            f"{num_devices} devices. The runtime {runtime.name!r} has {len(ids)}. Pass a smaller "
            f"shape, or on CPU start with get_runtime({runtime.name!r}, "
            f"num_cpu_devices={num_devices})."
        )
    names = tuple(mesh_dim_names) if mesh_dim_names is not None else None
    mesh = _device_mesh(Mesh(ids[:num_devices], mesh_shape, names))
    runtime.root(mesh.value)
    return mesh


# ----------------------------------------------------------------------------------------- Off mesh
#
# What ops on a DTensor give a process that reaches none of its mesh's devices.
#
# PyTorch's rule, so that one program runs in every process: None for a scalar, tensors without
# values for tensors, and NotImplementedError for a list with a None in it. Such a DTensor's payload
# is a meta tensor: it has the shape and dtype of the whole, and no values.
#
# PyTorch asks the processes on the mesh for what ``torch.equal`` gives; that needs a process group.
# Here such a comparison raises, because a None would count as False.

aten = torch.ops.aten
_COMPARISONS = frozenset({aten.equal.default, aten.allclose.default})


def is_off_mesh(mesh: DeviceMesh) -> bool:
    """Tell whether the mesh's devices are all of other processes.

    Devices that no process has are a mistake in the mesh, which the runtime's own check names.
    """
    if mesh._coordinate_on_dim is not None:
        return False
    return set(mesh.value.device_ids.reshape(-1).tolist()) <= set(get_runtime().device_ids())


def empty_local(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return what such a process has of a tensor: nothing, of the right dtype.

    Args:
        shape: The shape of the whole.
        dtype: Its dtype.

    Returns:
        An empty 1-D tensor; a zero where the whole has no dims, as in PyTorch.

    Example:
        >>> empty_local((8, 4), torch.int64)
        tensor([], dtype=torch.int64)
    """
    return torch.empty(0, dtype=dtype) if len(shape) else torch.zeros((), dtype=dtype)


def off_mesh_result(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return what an op gives a process that reaches none of its devices.

    Args:
        func: The ``OpOverload``.
        args: Its arguments, meta tensors in place of DTensors.
        kwargs: Its keyword arguments.

    Returns:
        Meta tensors, or None for a scalar.

    Raises:
        UnsupportedOpError: The result is a list with a None in it, or a comparison of values. A
            NotImplementedError, as in PyTorch.

    Example:
        >>> x = torch.empty(4, device="meta")
        >>> off_mesh_result(torch.ops.aten._local_scalar_dense.default, (x,), {}) is None
        True
        >>> off_mesh_result(torch.ops.aten.neg.default, (x,), {}).shape
        torch.Size([4])
    """
    if func in _COMPARISONS:
        raise UnsupportedOpError(
            f"{func} was called on a DTensor of which this process reaches no device. It compares "
            "values, and this process has none. Call it only where mesh.get_coordinate() is not "
            "None."
        )
    if torch.Tag.nondeterministic_seeded in func.tags:
        get_runtime().skip_draw()  # the generators of all processes stay equal
    returns = [str(returned.type) for returned in func._schema.returns]
    if func is not aten.is_same_size.default and not all("Tensor" in kind for kind in returns):
        return None
    args, kwargs = map_nested(_on_meta, (tuple(args), dict(kwargs)))
    output = func(*args, **kwargs)
    if isinstance(output, (list, tuple)) and any(element is None for element in output):
        raise UnsupportedOpError(
            f"{func} was called on a DTensor of which this process reaches no device. Its results "
            f"are a {type(output).__name__} with None in it, which PyTorch's DTensor does not give "
            "such a process either. Call it only where mesh.get_coordinate() is not None."
        )
    return output


def _on_meta(leaf: Any) -> Any:
    plain = isinstance(leaf, torch.Tensor) and not leaf.is_meta
    return leaf.to("meta") if plain else leaf
