"""Devices as PyTorch's ranks: numbered from 0 without gaps, over all processes of the job.

JAX gives each device an id. On TPUs and GPUs the ids of a job are 0 to N - 1. CPU devices of
process k begin at 2048 k, and code written for PyTorch, where a rank is below the world size, fails
on such numbers. So what torch's own interface names by rank (``mesh.mesh``, ``mesh.get_rank()``, a
saved tensor's mesh) is the device's place among all ids in order, on every platform:

    ids of the job      0  1  2  3  2048  2049  2050  2051
    ranks               0  1  2  3     4     5     6     7

A tensor on ``mesh["tp"]`` is one of the whole mesh, in every process. So a process has a place in a
submesh if it has one in its root: that of its first device, along the submesh's axes.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from mesh_utils import Mesh
from xla_dtensor.runtimes.registry import get_runtime

__all__ = ["coordinate_here", "devices_of_ranks", "ranks_here", "ranks_of_devices"]


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
    ids, known = np.asarray(device_ids, dtype=np.int64), _in_order(get_runtime().device_ids())
    places = np.searchsorted(known, ids).clip(max=len(known) - 1)
    return np.where(known[places] == ids, places, ids)


def devices_of_ranks(ranks: Any) -> np.ndarray[Any, Any]:
    """Return the ids of the devices of some ranks, in an array of the same shape.

    Numbers that are no ranks stay as they are, so that device ids pass, too.

    Example:
        >>> devices_of_ranks([3, 1]).tolist()
        [3, 1]
    """
    numbers = np.asarray(ranks, dtype=np.int64)
    known = _in_order(get_runtime().device_ids())
    if numbers.size and not ((numbers >= 0) & (numbers < len(known))).all():
        return numbers
    return known[numbers]


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
        at = 0
        for size, stride in axis:
            at = at * size + place // stride % size
        coordinate.append(int(at))
    return coordinate


def ranks_here(mesh: Mesh) -> np.ndarray[Any, Any]:
    """Return the ranks of a mesh's devices; of a submesh, those of the one that this process is in.

    PyTorch's ``mesh["tp"]`` is another group of ranks in each row of the mesh.
    """
    coordinate, place = coordinate_here(mesh), _first_place(mesh.root)
    if mesh.is_root or coordinate is None or place is None or mesh.digits() is None:
        return ranks_of_devices(mesh.device_ids)
    positions = mesh.positions()
    moved = positions + (place - positions[tuple(coordinate)])
    return ranks_of_devices(mesh.root.device_ids.reshape(-1)[moved])


def _first_place(root: Mesh) -> int | None:
    mine = np.isin(root.device_ids.reshape(-1), get_runtime().addressable_device_ids())
    return int(mine.argmax()) if mine.any() else None
