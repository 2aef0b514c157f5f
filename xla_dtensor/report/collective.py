"""Collectives of a compiled program: over which mesh axes, how often, how many bytes.

Replica groups that XLA prints as axes of a mesh it made up.

    mesh['x'=2,'y'=4] {'y'}                             {0,1,2,3} {4,5,6,7}
    mesh['x'=2,'y'=4] {'x'}                             {0,4} {1,5} {2,6} {3,7}
    mesh['x'=2,'y'=4] {'y':(2)2}                        {0,1} {2,3} {4,5} {6,7}
    mesh['x'=2,'y'=2], device_ids=([2,2]T(1,0)) {'y'}   {0,2} {1,3}

The device ids, where printed, are the mesh's devices in its flat order: 0, 1, 2, ... reshaped to
[2,2] and transposed.

'y':(2)2 is a part of axis 'y': the part of size 2 that has a part of size 2 outside it. This is how
XLA and Shardy write a part of an axis, and how `Collective.axes` does.

Example:
    >>> _mesh_axis_groups("mesh['x'=2,'y'=2]{'x'}").tolist()
    [[0, 2], [1, 3]]
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from mesh_utils import Axis, Mesh, mixed_radix
from xla_dtensor.report.hlo import HloModule, SourceLine
from xla_dtensor.report.hlo_text import ArrayShape, HloError, checked_devices, read_number

__all__ = []


# -------------------------------- Replica groups that XLA prints as a reshaped and transposed iota
#
# `[2,4]<=[8]` is iota(8) as 2 groups of 4: {0,1,2,3} {4,5,6,7}. `[4,2]<=[2,4]T(1,0)` is iota(8) as
# (2, 4), transposed, as 4 groups of 2: {0,4} {1,5} {2,6} {3,7}.

_LIST = r"[0-9]{1,12}(?:,[0-9]{1,12})*"
_IOTA = re.compile(rf"\[({_LIST})\]<=\[({_LIST})\](?:T\(({_LIST})\))?")
_MOST_DIMS = 32
"""What NumPy takes; XLA writes few."""


def _iota(text: str) -> NDArray[np.int64] | None:
    """An iota array of text without spaces, in the shape before `<=`; None for another syntax.

    HloError for shapes of different sizes, or T(...) that is no permutation.

    Example:
        >>> _iota("[4,2]<=[2,4]T(1,0)").tolist()
        [[0, 4], [1, 5], [2, 6], [3, 7]]
    """
    match = _IOTA.fullmatch(text)
    if match is None:
        return None
    shape, dims, perm = (tuple(map(int, re.findall(r"\d+", part or ""))) for part in match.groups())
    if math.prod(shape) != math.prod(dims):
        raise HloError(f"{text} was given. {shape} and {dims} differ in size. Give equal sizes.")
    if perm and sorted(perm) != list(range(len(dims))):
        raise HloError(f"{text} was given. T{perm} is no permutation of {len(dims)} dims. Fix it.")
    if max(len(shape), len(dims)) > _MOST_DIMS:
        raise HloError(f"{text[:80]} was given. It has over {_MOST_DIMS} dims. Give fewer.")
    checked_devices(math.prod(dims), text)
    devices = np.arange(math.prod(dims), dtype=np.int64).reshape(dims)
    return devices.transpose(perm or None).reshape(shape)


# -------------------------------------------- Which axes of a mesh the groups of a collective span
#
# A group's members are places in the program's device order, that is, in `mesh.device_ids.flat`. On
# a mesh (dp=2, tp=4):
#
#   {0,1,2,3} {4,5,6,7}        ("tp",)
#   {0,4} {1,5} {2,6} {3,7}    ("dp",)
#   {0,1,2,3,4,5,6,7}          ("dp", "tp")
#   {0,1} {2,3} {4,5} {6,7}    ("tp:(2)2",)     a part of tp: of size 2, with a size of 2 outside it
#   {0,2} {1,3} {4,6} {5,7}    ("tp:(1)2",)     the outer part of tp
#   {0} {1} ... {7}            ()               nobody to talk to
#   {0,5} {1,4} {2,7} {3,6}    None             along no axes
#
# Parts are written as XLA and Shardy do. The order of the members does not matter; axes come in the
# order of the mesh.

AxisNames: TypeAlias = tuple[Axis, ...]
AXIS_PART = re.compile(r"(.+):\((\d+)\)(\d+)$")
"""A part of an axis: its name, the size of what is outside the part, and its own."""


def axis_names(axes: AxisNames | None) -> str:
    """Writes the axes of a collective.

    Args:
        axes: as `Collective.axes`.

    Returns:
        "tp", "dp, tp"; "mixed" for groups that follow no axes.

    Example:
        >>> axis_names(("dp", "tp:(2)4")), axis_names(None)
        ('dp, tp:(2)4', 'mixed')
    """
    return "mixed" if axes is None else ", ".join(map(str, axes))


def base_axes(axes: AxisNames | None) -> tuple[str, ...] | None:
    """Names the whole axes of which a collective spans all or part.

    Args:
        axes: as of a collective.

    Returns:
        Names of axes of the mesh; None for None.

    Example:
        >>> base_axes(("dp:(1)2", "dp:(2)4", "tp"))
        ('dp', 'tp')
    """
    if axes is None:
        return None
    return tuple(dict.fromkeys(AXIS_PART.sub(r"\1", str(axis)) for axis in axes))


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


# ----------------------------------------------------------------------------------------- Granules
#
# Groups of a program that runs on several slices, as places in the whole mesh.
#
# XLA compiles one program per slice. Its replica groups number the devices of one slice, in the
# order of the mesh, and all slices run it alike; `local_to_mesh` unfolds them. What goes between
# slices (over DCN) is printed as send and recv with a target, in one of three forms:
#
#   "{1,2}x{0:15}"                 slices 1 and 2 (from 1), their devices 0 to 15 each with its own
#   {{100000,200000},{...}}        groups of device ids
#   {{100000->200000},{...}}       pairs of device ids

_RANGE = r"[0-9]{1,9}(?::[0-9]{1,9})?"
_RANGES = rf"{_RANGE}(?:,{_RANGE})*"
_PRODUCT = re.compile(rf"\{{({_RANGES})\}}x\{{({_RANGES})\}}")
_DEVICE_PAIR = re.compile(r"([0-9]{1,15})->([0-9]{1,15})")
_DEVICE_LIST = re.compile(r"\{([0-9]{1,15}(?:,[0-9]{1,15})*)\}")


class Granules:
    """The slices of a mesh.

    Args:
        granule_of: the slice of each device, in the order of `mesh.device_ids.flat`: [devices].

    Raises:
        HloError: slices of different sizes.

    Example:
        >>> Granules([0, 0, 1, 1]).local_to_mesh(np.array([[0, 1]])).tolist()
        [[0, 1], [2, 3]]
    """

    def __init__(self, granule_of: Sequence[int] | NDArray[np.integer]) -> None:
        keys = np.asarray(granule_of).reshape(-1)
        names, counts = np.unique(keys, return_counts=True)
        if np.unique(counts).size != 1:
            raise HloError(
                f"Granules of {counts.tolist()} devices were given. A program over several runs "
                "alike on each. Pass granules of one size."
            )
        # Row g: the places of granule g's devices, in the order of the mesh.
        self.places: NDArray[np.int64] = np.stack([np.flatnonzero(keys == name) for name in names])

    def local_to_mesh(self, local: NDArray[np.integer]) -> NDArray[np.int64]:
        """Unfolds what one slice does to what all slices do.

        Args:
            local: [rows, n] places in one slice.

        Returns:
            [slices * rows, n] places in the mesh.
        """
        return self.places[:, local].reshape(-1, local.shape[-1])


def transfer_axes(target: str, mesh: Mesh, granules: Granules | None) -> AxisNames | None:
    """Names the axes along which a transfer between slices goes.

    Args:
        target: as XLA prints it.
        mesh: the mesh over all slices; its device ids are those of the runtime.
        granules: its slices.

    Returns:
        The axes, or parts of axes; None if they cannot be told.
    """
    products = _PRODUCT.findall(target)
    if products:
        return None if granules is None else _product_axes(products, mesh, granules)
    pairs = _DEVICE_PAIR.findall(target)
    rows = pairs or [group.split(",") for group in _DEVICE_LIST.findall(target)]
    if not rows or len({len(row) for row in rows}) != 1:
        return None
    places = _places(np.array(rows, np.int64), mesh)
    if places is None:
        return None
    return pair_axes(places, mesh) if pairs else group_axes(places, mesh)


def _product_axes(
    products: list[tuple[str, str]], mesh: Mesh, granules: Granules
) -> AxisNames | None:
    groups: list[NDArray[np.int64]] = []
    for slices, devices in products:
        rows, columns = _ranges(slices, granules), _ranges(devices, granules)
        if rows is None or columns is None:
            return None
        rows = rows - 1
        inside = rows.min() >= 0 and rows.max() < granules.places.shape[0]
        if not inside or columns.max() >= granules.places.shape[1]:
            return None
        groups.append(granules.places[np.ix_(rows, columns)].T)
    return group_axes(np.concatenate(groups), mesh) if _same_width(groups) else None


def _same_width(groups: list[NDArray[np.int64]]) -> bool:
    return len({group.shape[1] for group in groups}) == 1


def _ranges(text: str, granules: Granules) -> NDArray[np.int64] | None:
    """Integers of a list such as 0:3,7, where 0:3 ends with 3; None for more than there can be."""
    ends = [[int(end) for end in part.split(":")] for part in text.split(",")]
    if any(not 0 <= part[-1] - part[0] <= granules.places.size for part in ends):
        return None
    return np.concatenate([np.arange(part[0], part[-1] + 1) for part in ends])


def _places(ids: NDArray[np.int64], mesh: Mesh) -> NDArray[np.int64] | None:
    """The places of device ids in the mesh; None if it has not all of them."""
    order = np.argsort(mesh.device_ids, axis=None)
    ranks = np.searchsorted(mesh.device_ids.reshape(-1), ids, sorter=order)
    places = order[np.minimum(ranks, order.size - 1)]
    return places if np.array_equal(mesh.device_ids.reshape(-1)[places], ids) else None


# ------------------------------------- Replica groups that XLA prints as axes of a mesh it made up

_GROUPS = re.compile(r"mesh\[([^\]]*)\](?:,device_ids=\((.*)\))?\{(.*)\}")
_MAXIMAL = re.compile(r"maximal_mesh\[device_id=([0-9]{1,12})\]\{\}")
_AXIS = re.compile(r"('[^']*'|[^'=,]+)=([0-9]{1,12})")
_REF = re.compile(r"('[^']*'|[^':,]+)(?::\(([0-9]{1,12})\)([0-9]{1,12}))?")
_MOST_AXES = 24
"""What NumPy can take apart, with parts; XLA makes up few."""

_ORDER = re.compile(r"\[([0-9]{1,12}(?:,[0-9]{1,12})*)\]T\([0-9,]{1,80}\)")

_Part = tuple[str, int]  # axis, and the size of what is outside the part


def _mesh_axis_groups(text: str) -> NDArray[np.int64] | None:
    """Groups that are axes of a mesh, of text without spaces: int64 [number of groups, group size].

    None for text in another syntax; HloError for axes that the mesh does not have.

    Example:
        >>> _mesh_axis_groups("mesh['x'=2,'y'=2]{'x'}").tolist()
        [[0, 2], [1, 3]]
    """
    if maximal := _MAXIMAL.fullmatch(text):
        return np.array([[int(maximal[1])]], np.int64)
    match = _GROUPS.fullmatch(text)
    if match is None:
        return None
    sizes = _axis_sizes(match[1])
    refs = [_axis_ref(ref, sizes) for ref in match[3].split(",") if ref]
    parts = _parts(sizes, refs)
    group_parts = [(name, pre) for name, pre, size in refs if size > 1]
    if len(set(group_parts)) != len(group_parts) or any(
        parts.get((name, pre)) != size for name, pre, size in refs if size > 1
    ):
        raise HloError(f"{match[3]} was asked for. Its axes overlap. Name each part once.")
    return _along(_devices(match[2], tuple(sizes.values())), parts, group_parts)


def _along(
    devices: NDArray[np.int64], parts: dict[_Part, int], group_parts: list[_Part]
) -> NDArray[np.int64]:
    keys = list(parts)
    members = [keys.index(part) for part in group_parts]
    outside = [index for index in range(len(keys)) if index not in members]
    group_size = math.prod(parts[part] for part in group_parts)
    grid = devices.reshape(tuple(parts.values()))
    return grid.transpose(*outside, *members).reshape(-1, group_size)


def _parts(sizes: dict[str, int], refs: list[tuple[str, int, int]]) -> dict[_Part, int]:
    """The sizes of the parts that the refs cut the axes into, outer to inner."""
    parts: dict[_Part, int] = {}
    for axis, axis_size in sizes.items():
        cuts = {1, axis_size}
        for name, pre, size in refs:
            cuts |= {pre, pre * size} if name == axis else set()
        for outer, inner in pairwise(sorted(cuts)):
            if inner % outer or axis_size % inner:
                raise HloError(f"{axis} is cut. Its parts do not divide {axis_size}. Cut it so.")
            parts[axis, outer] = inner // outer
    return parts


def _axis_ref(ref: str, sizes: dict[str, int]) -> tuple[str, int, int]:
    match = _REF.fullmatch(ref)
    if match is None or match[1] not in sizes:
        names = ", ".join(sizes)
        raise HloError(f"{ref} was asked for. The mesh has no axis {ref}. Name one of {names}.")
    pre, size = int(match[2] or 1), int(match[3] or sizes[match[1]])
    if not pre or not size:
        raise HloError(f"{ref} was asked for. A part of an axis has size 1 or more. Name such.")
    return match[1], pre, size


def _axis_sizes(axes: str) -> dict[str, int]:
    matches = [_AXIS.fullmatch(axis) for axis in axes.split(",")]
    sizes = {match[1]: int(match[2]) for match in matches if match}
    if len(sizes) != len(matches) or 0 in sizes.values():
        raise HloError(f"[{axes}] was given. It is no list of 'name'=size. Name each axis once.")
    if len(sizes) > _MOST_AXES:
        raise HloError(f"[{axes[:80]}] was given. It has over {_MOST_AXES} axes. Give fewer.")
    checked_devices(math.prod(sizes.values()), axes)
    return sizes


def _devices(text: str | None, shape: tuple[int, ...]) -> NDArray[np.int64]:
    if text is None:
        return np.arange(math.prod(shape), dtype=np.int64)
    order = _ORDER.fullmatch(text)
    if order is not None:  # [2,4]T(1,0): what _iota reads behind "<="
        text = f"[{math.prod(map(int, order[1].split(',')))}]<={text}"
    iota = _iota(text)
    listed = [read_number(number, -1) for number in re.findall(r"[0-9]+", text)]
    ids = np.array(listed, np.int64) if iota is None else iota.reshape(-1)
    if ids.size != math.prod(shape):
        raise HloError(f"{text} was given. A mesh of {shape} has {ids.size} ids. Give each one.")
    return ids


# ---------------------------------------------------------------------------------- Replica groups
#
# Which devices take part in a collective together.
#
# HLO prints them in four ways, all of which give the same value here:
#
#     {{0,2},{1,3}}                  each group with its members
#     {}                             one group of all devices
#     [2,2]<=[2,2]T(1,0)             iota(4) as (2, 2), transposed, as 2 groups of 2: {0,2} {1,3}
#     mesh['x'=2,'y'=2] {'x'}        along axes of a mesh that XLA made up: {0,2} {1,3}
#
# The numbers are places in the program's device order (partition ids), not ids of hardware.

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
    def parse(cls, text: str) -> ReplicaGroups:
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
    iota = _iota(text)
    if iota is not None and iota.ndim == 2:
        return iota
    along_axes = _mesh_axis_groups(text)
    if along_axes is None:
        raise _malformed(text, "They are in none of XLA's syntaxes")
    return along_axes


def _malformed(text: str, why: str) -> HloError:
    return HloError(
        f"The replica groups {text[:80]!r} were given. {why}. "
        "Pass them as XLA prints them: {{0,1},{2,3}}, {}, [2,2]<=[4] or mesh['x'=2,'y'=2] {'x'}."
    )


# -------------------------------------------------------------------------------------- Collective

CollectiveKind: TypeAlias = Literal[
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "ragged-all-to-all",
    "collective-broadcast",
    "send",
    "recv",
]
COLLECTIVE_KINDS: tuple[CollectiveKind, ...] = get_args(CollectiveKind)

DCN_TARGET = "_xla_megascale_target"
TRANSFER_TYPE = "_xla_megascale_transfer_type"
"""The frontend attributes of a send or recv that say which slices it is for, and of what kind."""


@dataclass(frozen=True)
class Collective:
    """A collective instruction. All shapes and bytes are those of one device, in one run.

    Attributes:
        kind: what it does. An all-reduce of which each device keeps only its part, which XLA for
            TPU prints as a fusion "all-reduce-scatter", is a reduce-scatter.
        name: the name of the instruction.
        computation: the name of the computation it stands in.
        operands: the arrays that go in; of a ragged-all-to-all the data only. None for a recv.
        results: the arrays that come out. None for a send.
        replica_groups: as printed; None for permutes, sends and recvs.
        source_target_pairs: as printed, from and to; () if it has none.
        channel_id: as printed, or None.
        use_global_device_ids: as printed.
        axes: the mesh axes its groups span, in mesh order; parts of an axis as in "tp:(2)4" (of
            size 4, with a size of 2 outside it). Of a permute the axes along which something moves.
            () when no device talks to another. None when no mesh was given, or when the groups
            follow no axes ("mixed").
        op_name: the operation it was made for, as the framework named it, or None.
        source: the line of source it was made for and the lines that led there, innermost first.
        is_async: whether it is split into a start and a done.
        in_loop: whether a while loop is around it.
        executions: how often it runs in one run of the program; None if a loop's trip count is not
            known. Of a conditional every branch is counted.
        frontend_attributes: as printed, name and value.

    Example:
        >>> from xla_dtensor.report import collectives
        >>> text = '''HloModule m, num_partitions=4
        ... ENTRY %main (p: f32[8]) -> f32[8] {
        ...   %p = f32[8]{0} parameter(0)
        ...   ROOT %sum = f32[8]{0} all-reduce(%p), channel_id=1, replica_groups=[2,2]<=[4],
        ... }'''
        >>> found = collectives(text)[0]
        >>> found.kind, found.operand_bytes, found.replica_groups.groups
        ('all-reduce', 32, ((0, 1), (2, 3)))
    """

    kind: CollectiveKind
    name: str
    computation: str
    operands: tuple[ArrayShape, ...]
    results: tuple[ArrayShape, ...]
    replica_groups: ReplicaGroups | None
    source_target_pairs: tuple[tuple[int, int], ...]
    channel_id: int | None
    use_global_device_ids: bool
    axes: tuple[Axis, ...] | None
    op_name: str | None
    source: tuple[SourceLine, ...]
    is_async: bool
    in_loop: bool
    executions: int | None
    frontend_attributes: tuple[tuple[str, str], ...]

    @property
    def operand_bytes(self) -> int:
        """The bytes that go in."""
        return sum(array.bytes for array in self.operands)

    @property
    def result_bytes(self) -> int:
        """The bytes that come out."""
        return sum(array.bytes for array in self.results)

    @property
    def payload_bytes(self) -> int:
        """The larger of the two: the whole of what is gathered, reduced, scattered or moved."""
        return max(self.operand_bytes, self.result_bytes)

    @property
    def source_file(self) -> str | None:
        """The file of the innermost source line, or None."""
        return self.source[0].file if self.source else None

    @property
    def source_line(self) -> int | None:
        """The number of the innermost source line, or None."""
        return self.source[0].line if self.source else None


# ------------------------------------------------------------------------------------ Device groups
#
# Replica groups as groups of devices, by XLA's four rules of what their numbers mean.
#
# A program runs as replica_count x num_partitions devices; device r * num_partitions + p is
# partition p of replica r. SPMD programs have one replica.
#
#     channel_id   use_global_device_ids    the numbers are      who talks
#     no           -                        replicas             the same partition of each replica
#     yes          true                     devices              those devices
#     yes          false                    replicas             all partitions of those replicas
#     yes          (the opcode has none)    partitions           those partitions of each replica

# These take use_global_device_ids; all others mean partitions when they have a channel.
_TAKES_GLOBAL_IDS = frozenset({"all-reduce", "all-gather", "reduce-scatter"})


def device_groups(
    collective: Collective, replica_count: int, num_partitions: int
) -> NDArray[np.int64] | None:
    """Writes the groups of a collective with device numbers.

    Args:
        collective: any.
        replica_count: of the module.
        num_partitions: of the module.

    Returns:
        Devices [number of groups, group size]; None for no groups, for groups of different sizes,
        or with numbers that the program does not have.

    Example:
        >>> from xla_dtensor.report import collectives
        >>> text = '''HloModule m, replica_count=2
        ... ENTRY %main (p: f32[8]) -> f32[8] {
        ...   %p = f32[8]{0} parameter(0)
        ...   ROOT %sum = f32[8]{0} all-reduce(%p), replica_groups={}
        ... }'''
        >>> device_groups(collectives(text)[0], 2, 1).tolist()
        [[0, 1]]
    """
    groups, has_channel = collective.replica_groups, collective.channel_id is not None
    if groups is None:
        return None
    devices = np.arange(replica_count * num_partitions).reshape(replica_count, num_partitions)
    if has_channel and collective.use_global_device_ids:
        return _take(devices.reshape(-1, 1), groups)
    if has_channel and collective.kind not in _TAKES_GLOBAL_IDS:
        return _take(devices.T, groups)
    if not has_channel:
        return _take(devices, groups)
    rows = _take(np.arange(replica_count)[:, None], groups)
    return None if rows is None else devices[rows].reshape(rows.shape[0], -1)


def _take(table: NDArray[np.int64], groups: ReplicaGroups) -> NDArray[np.int64] | None:
    """Replaces each number by a row of the table; each column makes groups of its own."""
    members = groups.array(table.shape[0])
    if members is None or members.max(initial=0) >= table.shape[0]:
        return None
    return np.moveaxis(table[members], -1, 0).reshape(-1, members.shape[1])


# --------------------------------------------------- The mesh axes of each collective of a program
#
# Where the program runs on one slice, the places in its replica groups are places in the mesh.
# Where it runs on several, they are places within a slice, and the slices must be given to name the
# axes.


@dataclass(frozen=True)
class ProgramAxes:
    """Names mesh axes for one module.

    Args:
        mesh: the mesh whose axes are wanted, over all devices of the program. Its root (or itself)
            gives the device order.
        replica_count: of the module.
        num_partitions: of the module.
        granules: the slices, if the program runs on several and they are known.
    """

    mesh: Mesh
    replica_count: int
    num_partitions: int
    granules: Granules | None

    @classmethod
    def of(
        cls, module: HloModule, mesh: Mesh, granules: Sequence[int] | NDArray[np.integer] | None
    ) -> ProgramAxes:
        """Makes one, checking that the mesh can be the program's.

        Args:
            module: the module.
            mesh: a root mesh, or a mesh cut out of one; then the axes are those of `mesh` if it has
                all devices of the root, else those of the root.
            granules: the slice of each device, in the order of `mesh.root.device_ids.flat`.

        Returns:
            The namer.

        Raises:
            HloError: a mesh, or slices, of another size than the program.
        """
        root = mesh if mesh.size() == mesh.root.size() else mesh.root
        size = module.replica_count * module.num_partitions
        if root.size() % size:
            raise HloError(
                f"The axes of {root!r} were asked for a program of {size} devices. "
                f"{root.size()} devices do not run it. Pass the mesh it was compiled for."
            )
        slices = None if granules is None else Granules(granules)
        if slices is not None and slices.places.size != root.size():
            raise HloError(
                f"Granules of {slices.places.size} devices were given for {root!r}. Each device "
                f"has one. Pass {root.size()} granules, in the order of mesh.device_ids.flat."
            )
        return cls(root, module.replica_count, module.num_partitions, slices)

    def axes_of(self, collective: Collective) -> AxisNames | None:
        """Names the axes that a collective spans; of a permute those along which it moves.

        Args:
            collective: of the module.

        Returns:
            The axes; None if its groups follow none, or have devices that the program has not.
        """
        target = dict(collective.frontend_attributes).get(DCN_TARGET)
        if target is not None:
            return transfer_axes(target, self.mesh, self.granules)
        pairs = collective.source_target_pairs
        if pairs or collective.kind == "collective-permute":
            local = np.array(pairs, np.int64).reshape(-1, 2)
            if local.max(initial=0) >= self.replica_count * self.num_partitions:
                return None
            places = self._places(local)
            return None if places is None else pair_axes(places, self.mesh)
        groups = device_groups(collective, self.replica_count, self.num_partitions)
        if groups is None or groups.shape[1] == 1:
            return None if groups is None else ()
        places = self._places(groups)
        return None if places is None else group_axes(places, self.mesh)

    def _places(self, local: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """Places in mesh.device_ids.flat of places in the program."""
        if self.replica_count * self.num_partitions < self.mesh.size():
            if self.granules is None or local.max(initial=0) >= self.granules.places.shape[1]:
                return None
            local = self.granules.local_to_mesh(local)
        if self.mesh.is_root:
            return local
        place_of = np.empty(self.mesh.size(), np.int64)
        place_of[self.mesh.positions().reshape(-1)] = np.arange(self.mesh.size())
        return place_of[local]
