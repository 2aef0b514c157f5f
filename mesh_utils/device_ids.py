"""Arrays of device ids: reading them and writing them short.

Nothing here is per-device in Python: the ids of 262,144 devices are read in a few milliseconds.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mesh_utils.errors import MeshError


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
    given = _as_array(device_ids)
    count = math.prod(mesh_shape)
    if given.size == 0:
        raise MeshError(
            f"Mesh was given no device ids for mesh_shape={mesh_shape}. "
            f"A mesh of that shape has {count} devices. Pass {count} device ids."
        )
    if given.size != count:
        raise MeshError(
            f"Mesh was given {given.size} device ids for mesh_shape={mesh_shape}. "
            f"A mesh of that shape has {count} devices. "
            f"Pass {count} device ids, or a mesh_shape with a product of {given.size}."
        )
    if given.dtype.kind not in "iu":
        raise MeshError(
            f"Mesh was given device_ids of dtype {given.dtype}. Device ids are integers. "
            f"Pass {count} integers, such as range({count})."
        )
    _refuse_out_of_range(given)
    ids = np.array(given, np.int64, order="C").reshape(mesh_shape)
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


def _refuse_out_of_range(ids: NDArray[np.integer]) -> None:
    lowest, highest = int(ids.min()), int(ids.max())
    if lowest < 0 or highest > np.iinfo(np.int64).max:
        outside = lowest if lowest < 0 else highest
        raise MeshError(
            f"Mesh was given device_ids with the id {outside}. "
            "Device ids are 0 or more and fit in 64 bits with a sign. "
            "Pass the ids by which the runtime knows its devices."
        )


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


def read_asked_ids(device_id: int | Sequence[int] | NDArray[np.integer]) -> NDArray[np.int64]:
    """Reads device ids that are to be looked up.

    Args:
        device_id: one id, or an array of ids of any shape.

    Returns:
        The ids, int64, of the same shape.

    Raises:
        MeshError: ids that are no integers.

    Example:
        >>> read_asked_ids(6).shape, read_asked_ids([[6]]).shape
        ((), (1, 1))
    """
    given = _as_array(device_id)
    if given.dtype.kind not in "iu" and given.size:
        raise MeshError(
            f"Devices were looked up with ids of dtype {given.dtype}. Device ids are integers. "
            "Pass an integer or an array of integers."
        )
    return given.astype(np.int64)


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
