"""Places: where the devices of a topology are, as arrays.

libtpu numbers devices with the core of a chip fastest, then x, y, z; it lists them host by host.
The ids of several slices start at 100000 for the first, 200000 for the second; hosts (processes)
are numbered through.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mesh_utils.device import Device
from mesh_utils.slice_table import Shape3

IDS_PER_SLICE = 100_000
"""libtpu's ids of one of several slices."""


@dataclass(frozen=True, eq=False)
class Places:
    """Columns, one entry per device, in libtpu's order.

    Attributes:
        ids: the number by which the runtime knows it, [devices].
        processes: the process that drives it, [devices]; -1 where not known.
        slices: its slice, [devices], counted from 0.
        coords: its chip in the box, [devices, 3].
        cores: its number on the chip, [devices].
        devices: the devices that were read; () for synthetic ones.
    """

    ids: NDArray[np.int64]
    processes: NDArray[np.int64]
    slices: NDArray[np.int64]
    coords: NDArray[np.int64]
    cores: NDArray[np.int64]
    devices: tuple[Device, ...] = ()


def synthetic_places(shape: Shape3, host: Shape3, cores: int, num_slices: int) -> Places:
    """Places devices as libtpu does.

    Args:
        shape: chips of a slice in x, y and z.
        host: chips of a host in x, y and z.
        cores: devices per chip.
        num_slices: how many slices.

    Returns:
        The places.

    Example:
        >>> synthetic_places((4, 2, 1), (2, 2, 1), 1, 1).ids.tolist()
        [0, 1, 4, 5, 2, 3, 6, 7]
    """
    z, y, x, core = np.indices((*reversed(shape), cores)).reshape(4, -1)
    hosts = [-(-size // part) for size, part in zip(shape, host, strict=True)]
    process = x // host[0] + hosts[0] * (y // host[1] + hosts[1] * (z // host[2]))
    order = np.argsort(process, kind="stable")  # within a host the order stays that of the ids
    base = IDS_PER_SLICE * np.arange(1, num_slices + 1) if num_slices > 1 else np.zeros(1, np.int64)
    slices = np.repeat(np.arange(num_slices), order.size)
    return Places(
        ids=(base[:, None] + order).reshape(-1).astype(np.int64),
        processes=np.tile(process[order], num_slices) + slices * int(np.prod(hosts)),
        slices=slices,
        coords=np.tile(np.column_stack([x, y, z])[order], (num_slices, 1)),
        cores=np.tile(core[order], num_slices),
    )


def devices_at(places: Places, kind: str, several: bool, on_torus: bool) -> tuple[Device, ...]:
    """Makes the devices of places.

    Args:
        places: where they are.
        kind: the name of their chip.
        several: whether there are several slices, so that they have a slice_index.
        on_torus: whether they have coordinates.

    Returns:
        The devices, in the same order.

    Example:
        >>> places = synthetic_places((2, 1, 1), (2, 1, 1), 1, 1)
        >>> devices_at(places, "TPU v4", False, True)[1].coords
        (1, 0, 0)
    """
    columns = (places.ids, places.processes, places.slices, places.coords, places.cores)
    return tuple(
        Device(
            id=number,
            process_index=process,
            slice_index=index if several else None,
            coords=(chip[0], chip[1], chip[2]) if on_torus else None,
            core_on_chip=core,
            kind=kind,
        )
        for number, process, index, chip, core in zip(
            *(column.tolist() for column in columns), strict=True
        )
    )


def fills(places: Places, sizes: tuple[int, ...]) -> bool:
    """Whether every place of a box has one device.

    Args:
        places: where the devices are.
        sizes: slices, chips in x, y and z, and devices per chip.

    Returns:
        True if none is missing, none is twice, and none lies outside.

    Example:
        >>> fills(synthetic_places((2, 2, 1), (2, 2, 1), 1, 1), (1, 2, 2, 1, 1))
        True
    """
    keys = np.column_stack([places.slices, places.coords, places.cores])
    inside = bool(((keys >= 0) & (keys < np.array(sizes))).all())
    return inside and len(np.unique(keys, axis=0)) == len(keys) == int(np.prod(sizes))
