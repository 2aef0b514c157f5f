"""Named meshes of devices: plain values over numpy, without torch and without jax.

Example:
    >>> from mesh_utils import Mesh
    >>> mesh = Mesh.arange((2, 4), ("dp", "tp"))
    >>> mesh["tp"].device_ids.tolist()
    [0, 1, 2, 3]
"""

from mesh_utils.assignment import DeviceOrder, jax_order, row_major_order
from mesh_utils.device import Device, read_devices, synthetic_devices
from mesh_utils.errors import AxisError, MeshError
from mesh_utils.granule import Granule, granules
from mesh_utils.hybrid import HybridMesh
from mesh_utils.mesh import Mesh
from mesh_utils.mesh_input import Axis
from mesh_utils.order import Digit, mixed_radix, mixed_radix_positions

__all__ = [
    "Axis",
    "AxisError",
    "Device",
    "DeviceOrder",
    "Digit",
    "Granule",
    "HybridMesh",
    "Mesh",
    "MeshError",
    "granules",
    "jax_order",
    "mixed_radix",
    "mixed_radix_positions",
    "read_devices",
    "row_major_order",
    "synthetic_devices",
]
