"""Replica groups: which devices take part in a collective together.

HLO prints them in four ways, all of which give the same value here:

    {{0,2},{1,3}}                  each group with its members
    {}                             one group of all devices
    [2,2]<=[2,2]T(1,0)             iota(4) as (2, 2), transposed, as 2 groups of 2: {0,2} {1,3}
    mesh['x'=2,'y'=2] {'x'}        along axes of a mesh that XLA made up: {0,2} {1,3}

The numbers are places in the program's device order (partition ids), not ids of hardware.
"""

import re
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from xla_dtensor.report.errors import HloError
from xla_dtensor.report.iota_groups import parse_iota
from xla_dtensor.report.mesh_axis_groups import parse_mesh_axis_groups

_GROUP = r"\{[0-9]{1,12}(?:,[0-9]{1,12})*\}"
_EXPLICIT = re.compile(rf"\{{{_GROUP}(?:,{_GROUP})*\}}")


class ReplicaGroups:
    """The groups of one collective; an immutable value, equal if the same groups in the same order.

    Args:
        groups: the members of each group; no group at all means one group of all devices.

    Raises:
        HloError: an empty group, or a device that is in two groups or negative.

    Example:
        >>> groups = ReplicaGroups.parse("[2,2]<=[2,2]T(1,0)")
        >>> groups.groups, groups == ReplicaGroups([[0, 2], [1, 3]])
        (((0, 2), (1, 3)), True)
    """

    __slots__ = ("_members", "_sizes")

    def __init__(self, groups: Iterable[Sequence[int]] | NDArray[np.integer]) -> None:
        if isinstance(groups, np.ndarray) and groups.ndim == 2:
            array: NDArray[np.int64] = np.array(groups, np.int64)
            members = array.reshape(-1)
            sizes = (int(array.shape[1]),) * int(array.shape[0])
        else:
            listed = [np.asarray(group, np.int64).reshape(-1) for group in groups]
            members = np.concatenate(listed or [np.zeros(0, np.int64)])
            sizes = tuple(group.size for group in listed)
        self._members: NDArray[np.int64] = members
        self._sizes: tuple[int, ...] = sizes
        self._members.flags.writeable = False
        self.check_valid()

    def check_valid(self) -> None:
        """Checks that no group is empty and that no device is in two groups or negative.

        Raises:
            HloError: if not.
        """
        members = self._members
        if 0 in self._sizes:
            raise _malformed(str(self.groups), "A group is empty")
        if members.size and (members.min() < 0 or np.unique(members).size != members.size):
            raise _malformed(str(self.groups), "A device is in two groups or is negative")

    @classmethod
    def parse(cls, text: str) -> "ReplicaGroups":
        """Reads groups as HLO prints them, in any of its syntaxes.

        Args:
            text: what stands after `replica_groups=`.

        Returns:
            The groups.

        Raises:
            HloError: text that is in none of the syntaxes, or groups that cannot be.

        Example:
            >>> ReplicaGroups.parse("mesh['x'=2,'y'=2] {'y'}").groups
            ((0, 1), (2, 3))
        """
        try:
            return cls(_parse(re.sub(r"\s+", "", text)))
        except HloError as error:
            reason = str(error).split(". ")
            raise _malformed(text, reason[1] if len(reason) > 1 else str(error)) from None

    @property
    def is_all_devices(self) -> bool:
        """Whether these are the empty groups `{}`: one group of all devices."""
        return not self._sizes

    @property
    def num_groups(self) -> int:
        """The number of groups; 1 for `{}`."""
        return len(self._sizes) or 1

    @property
    def group_size(self) -> int | None:
        """The number of devices in each group; None if they differ, and for `{}`."""
        return self._sizes[0] if len(set(self._sizes)) == 1 else None

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The members of each group; () for `{}`."""
        parts = np.split(self._members, np.cumsum(self._sizes)[:-1]) if self._sizes else []
        return tuple(tuple(part.tolist()) for part in parts)

    def array(self, num_devices: int | None = None) -> NDArray[np.int64] | None:
        """Gives the groups as an array.

        Args:
            num_devices: how many devices `{}` stands for.

        Returns:
            int64 [number of groups, group size]; None if the sizes differ, and for `{}` if
            `num_devices` is None.

        Example:
            >>> ReplicaGroups.parse("{}").array(3).tolist()
            [[0, 1, 2]]
        """
        if self.is_all_devices:
            return None if num_devices is None else np.arange(num_devices)[None]
        size = self.group_size
        return None if size is None else self._members.reshape(-1, size)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ReplicaGroups):
            return NotImplemented
        return self._sizes == other._sizes and np.array_equal(self._members, other._members)

    def __hash__(self) -> int:
        return hash((self._sizes, self._members.tobytes()))

    def __repr__(self) -> str:
        if self.is_all_devices:
            return "ReplicaGroups(all devices)"
        size = self.group_size
        first = ", ".join(map(str, self._members[: min(self._sizes[0], 6)].tolist()))
        more = ", ..." if self._sizes[0] > 6 else ""
        sizes = "different sizes" if size is None else f"{size}"
        return f"ReplicaGroups({self.num_groups} of {sizes}, [{first}{more}], ...)"


def _parse(text: str) -> Iterable[Sequence[int]] | NDArray[np.int64]:
    """The groups in text without spaces."""
    if text == "{}":
        return []
    if _EXPLICIT.fullmatch(text):
        return [list(map(int, group.split(","))) for group in text[2:-2].split("},{")]
    iota = parse_iota(text)
    if iota is not None and iota.ndim == 2:
        return iota
    along_axes = parse_mesh_axis_groups(text)
    if along_axes is None:
        raise _malformed(text, "They are in none of XLA's syntaxes")
    return along_axes


def _malformed(text: str, why: str) -> HloError:
    return HloError(
        f"The replica groups {text[:80]!r} were given. {why}. "
        "Pass them as XLA prints them: {{0,1},{2,3}}, {}, [2,2]<=[4] or mesh['x'=2,'y'=2] {'x'}."
    )
