"""Groups of a program that runs on several slices, as places in the whole mesh.

XLA compiles one program per slice. Its replica groups number the devices of one slice, in the order
of the mesh, and all slices run it alike; `local_to_mesh` unfolds them. What goes between slices
(over DCN) is printed as send and recv with a target, in one of three forms:

    "{1,2}x{0:15}"                 slices 1 and 2 (from 1), their devices 0 to 15 each with its own
    {{100000,200000},{...}}        groups of device ids
    {{100000->200000},{...}}       pairs of device ids
"""

import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mesh_utils import Mesh
from xla_dtensor.report.errors import HloError
from xla_dtensor.report.mesh_axes import AxisNames, group_axes, pair_axes

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
    found = np.searchsorted(mesh.device_ids.reshape(-1), ids, sorter=order)
    places = order[np.minimum(found, order.size - 1)]
    return places if np.array_equal(mesh.device_ids.reshape(-1)[places], ids) else None
