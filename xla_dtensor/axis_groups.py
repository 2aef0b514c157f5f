"""What stands for a process group after install(): the members along one mesh axis.

``mesh.get_group("tp")`` returns an :class:`AxisGroup`. torch's functional collectives on LocalViews
take it, and ``torch.distributed.get_world_size(group)`` is the axis's size. There is one program
for all members, so ``torch.distributed.get_rank(group)`` is no one number: it is a
:class:`MemberNumber`, with which the program computes as with an int::

    start = dist.get_rank(group) * 512          0 on the first member, 512 on the next, ...
    mask = (ids >= start) & (ids < start + 512) a LocalView, each device with its own bounds

It becomes a tensor where it meets a LocalView. Python that would need one value for all members,
such as a branch or an index, gets it where they agree, and an error where they do not.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from mesh_utils import Axis, Mesh
from xla_dtensor.errors import LocalViewError, MeshRankError, ProcessGroupError
from xla_dtensor.nested import leaves, map_nested
from xla_dtensor.process_groups import refuse_group

__all__ = ["BY_NAME", "AxisGroup", "MemberNumber", "allow_groups", "axis_group"]

_allowed: list[bool] = []


def allow_groups(allowed: bool) -> None:
    """Let meshes name groups, or not: torch's functions take ours after install() only."""
    _allowed[:] = [True] if allowed else []


def axis_group(mesh: Mesh, axis: int | str | None) -> AxisGroup:
    """Return the members along an axis.

    Args:
        mesh: The mesh.
        axis: An axis by name or number; None for the only one.

    Raises:
        ProcessGroupError: install() was not called.
        MeshRankError: None, of a mesh of several axes.
    """
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

    def _with(self, other: Any, op: Callable[[int, int], Any]) -> Any:
        if isinstance(other, MemberNumber):
            if other.axis != self.axis:
                raise LocalViewError(
                    f"{self!r} and {other!r} were combined. They count members along different "
                    "axes. Take both from one group, or compute with tensors."
                )
            return [op(a, b) for a, b in zip(self.values, other.values, strict=True)]
        return [op(a, other) for a in self.values] if isinstance(other, int) else None

    def _number(self, other: Any, op: Callable[[int, int], int]) -> Any:
        values = self._with(other, op)
        return NotImplemented if values is None else MemberNumber(self.axis, values)

    def _answer(self, other: Any, op: Callable[[int, int], bool], sign: str) -> Any:
        values = self._with(other, op)
        return NotImplemented if values is None else self._one(values, f"{self!r} {sign} {other}")

    def _one(self, values: Iterable[Any], what: str) -> Any:
        found = set(values)
        if len(found) > 1:
            raise LocalViewError(
                f"{what} was asked for, as one value for all members along {self.axis!r}. Python "
                "runs once for all of them, and it is not the same on each. Compute it with "
                "tensors, such as torch.where; mesh.get_local_rank() is this process's number."
            )
        return found.pop()

    def __add__(self, other: Any) -> Any:
        return self._number(other, operator.add)

    def __sub__(self, other: Any) -> Any:
        return self._number(other, operator.sub)

    def __rsub__(self, other: Any) -> Any:
        return self._number(other, lambda a, b: b - a)

    def __mul__(self, other: Any) -> Any:
        return self._number(other, operator.mul)

    def __floordiv__(self, other: Any) -> Any:
        return self._number(other, operator.floordiv)

    def __mod__(self, other: Any) -> Any:
        return self._number(other, operator.mod)

    def __neg__(self) -> MemberNumber:
        return MemberNumber(self.axis, [-value for value in self.values])

    __radd__, __rmul__ = __add__, __mul__

    def __eq__(self, other: object) -> bool:
        return self._answer(other, operator.eq, "==")

    def __ne__(self, other: object) -> bool:
        return self._answer(other, operator.ne, "!=")

    def __lt__(self, other: Any) -> bool:
        return self._answer(other, operator.lt, "<")

    def __le__(self, other: Any) -> bool:
        return self._answer(other, operator.le, "<=")

    def __gt__(self, other: Any) -> bool:
        return self._answer(other, operator.gt, ">")

    def __ge__(self, other: Any) -> bool:
        return self._answer(other, operator.ge, ">=")

    def __bool__(self) -> bool:
        return self._one([bool(value) for value in self.values], f"bool({self!r})")

    def __index__(self) -> int:
        return self._one(self.values, f"int({self!r})")

    __int__ = __index__
    __hash__ = None  # pyright: ignore[reportAssignmentType]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of torch's, with each number as a scalar on the devices."""
        given = (tuple(args), kwargs or {})
        view = next((v for v in leaves(given) if getattr(v, "_is_per_device", False)), None)
        if view is None:
            number = next(v for v in leaves(given) if isinstance(v, cls))
            raise LocalViewError(
                f"{func.__name__} was called with {number!r}, but no local view. Each member has "
                "its own value, and only local views have one value per device. Call it on "
                "x.to_local(), inside local_map for example."
            )
        args, kwargs = map_nested(lambda v: _scalar(v, view) if isinstance(v, cls) else v, given)
        return func(*args, **kwargs)


def _scalar(number: MemberNumber, view: Any) -> torch.Tensor:
    """Return the number as a view of shape (), each device with its member's."""
    from xla_dtensor.collectives import axis_index
    from xla_dtensor.local_spread import same_on_all

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
