"""Replica groups that XLA prints as axes of a mesh it made up.

    mesh['x'=2,'y'=4] {'y'}                             {0,1,2,3} {4,5,6,7}
    mesh['x'=2,'y'=4] {'x'}                             {0,4} {1,5} {2,6} {3,7}
    mesh['x'=2,'y'=4] {'y':(2)2}                        {0,1} {2,3} {4,5} {6,7}
    mesh['x'=2,'y'=2], device_ids=([2,2]T(1,0)) {'y'}   {0,2} {1,3}

The device ids, where printed, are the mesh's devices in its flat order: 0, 1, 2, ... reshaped to
[2,2] and transposed.

'y':(2)2 is a part of axis 'y': the part of size 2 that has a part of size 2 outside it. This is how
XLA and Shardy write a part of an axis, and how `Collective.axes` does.

Example:
    >>> parse_mesh_axis_groups("mesh['x'=2,'y'=2]{'x'}").tolist()
    [[0, 2], [1, 3]]
"""

import math
import re
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from xla_dtensor.report.errors import HloError
from xla_dtensor.report.hlo_numbers import checked_devices, read_number
from xla_dtensor.report.iota_groups import parse_iota

_GROUPS = re.compile(r"mesh\[([^\]]*)\](?:,device_ids=\((.*)\))?\{(.*)\}")
_MAXIMAL = re.compile(r"maximal_mesh\[device_id=([0-9]{1,12})\]\{\}")
_AXIS = re.compile(r"('[^']*'|[^'=,]+)=([0-9]{1,12})")
_REF = re.compile(r"('[^']*'|[^':,]+)(?::\(([0-9]{1,12})\)([0-9]{1,12}))?")
_MOST_AXES = 24
"""What NumPy can take apart, with parts; XLA makes up few."""

_ORDER = re.compile(r"\[([0-9]{1,12}(?:,[0-9]{1,12})*)\]T\([0-9,]{1,80}\)")

_Part = tuple[str, int]  # axis, and the size of what is outside the part


def parse_mesh_axis_groups(text: str) -> NDArray[np.int64] | None:
    """Reads groups that are axes of a mesh.

    Args:
        text: the groups, without spaces.

    Returns:
        The members, int64 [number of groups, group size]; None for text in another syntax.

    Raises:
        HloError: axes that the mesh does not have.
    """
    if maximal := _MAXIMAL.fullmatch(text):
        return np.array([[int(maximal[1])]], np.int64)
    match = _GROUPS.fullmatch(text)
    if match is None:
        return None
    sizes = _axis_sizes(match[1])
    refs = [_axis_ref(ref, sizes) for ref in match[3].split(",") if ref]
    parts = _parts(sizes, refs)
    wanted = [(name, pre) for name, pre, size in refs if size > 1]
    if len(set(wanted)) != len(wanted) or any(
        parts.get((name, pre)) != size for name, pre, size in refs if size > 1
    ):
        raise HloError(f"{match[3]} was asked for. Its axes overlap. Name each part once.")
    return _along(_devices(match[2], tuple(sizes.values())), parts, wanted)


def _along(
    devices: NDArray[np.int64], parts: dict[_Part, int], wanted: list[_Part]
) -> NDArray[np.int64]:
    keys = list(parts)
    members = [keys.index(part) for part in wanted]
    others = [index for index in range(len(keys)) if index not in members]
    group_size = math.prod(parts[part] for part in wanted)
    grid = devices.reshape(tuple(parts.values()))
    return grid.transpose(*others, *members).reshape(-1, group_size)


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
    if order is not None:  # [2,4]T(1,0): what parse_iota reads behind "<="
        text = f"[{math.prod(map(int, order[1].split(',')))}]<={text}"
    iota = parse_iota(text)
    listed = [read_number(number, -1) for number in re.findall(r"[0-9]+", text)]
    ids = np.array(listed, np.int64) if iota is None else iota.reshape(-1)
    if ids.size != math.prod(shape):
        raise HloError(f"{text} was given. A mesh of {shape} has {ids.size} ids. Give each one.")
    return ids
