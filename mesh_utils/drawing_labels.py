"""What is written at each chip: the place in the mesh of the devices on it."""

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from mesh_utils.mesh import Mesh
from mesh_utils.mesh_spans import mesh_places
from mesh_utils.topology import Topology

LabelArray: TypeAlias = NDArray[np.str_]
"""The label of each chip of a slice, [x, y, z]."""


def chip_labels(topology: Topology, mesh: Mesh) -> LabelArray:
    """Writes the coordinates of each chip of the first slice.

    Args:
        topology: the chips.
        mesh: a mesh of all of them.

    Returns:
        "2,5" for the device at place (2, 5) of the mesh. Two devices of a chip that follow each
        other on one axis are "2,4-5", others "2,4 0,7".

    Raises:
        MeshError: ids that are not in the topology.

    Example:
        >>> topology = Topology.parse("v5e:2x2")
        >>> chip_labels(topology, Mesh([0, 1, 3, 2], (4,)))[:, :, 0].tolist()
        [['0', '3'], ['1', '2']]
        >>> topology = Topology.parse("tpu7x:2x2x1")
        >>> chip_labels(topology, Mesh(range(8), (4, 2)))[0, 0, 0].item()
        '0,0-1'
    """
    places = mesh_places(topology, mesh.device_ids).reshape(-1, 5)
    spots = np.indices(mesh.mesh_shape).reshape(mesh.ndim, -1).T
    x, y, z = topology.shape
    # A device that the mesh does not have is at -1.
    at = np.full((x, y, z, topology.devices_per_chip, mesh.ndim), -1, np.int64)
    first = places[:, 0] == 0
    here = places[first]
    at[here[:, 1], here[:, 2], here[:, 3], here[:, 4]] = spots[first]
    chips: list[list[list[int]]] = at.reshape(x * y * z, topology.devices_per_chip, -1).tolist()
    return np.array([_label(devices) for devices in chips], np.str_).reshape(x, y, z)


def _label(devices: list[list[int]]) -> str:
    there = sorted(spot for spot in devices if spot[0] >= 0)
    if len(there) == 2:
        first, second = there
        steps = [b - a for a, b in zip(first, second, strict=True)]
        if sorted(map(abs, steps)) == [*(0,) * (len(steps) - 1), 1]:
            pairs = zip(first, steps, strict=True)
            return ",".join(f"{low}-{low + 1}" if step else str(low) for low, step in pairs)
    return " ".join(",".join(map(str, spot)) for spot in there)
