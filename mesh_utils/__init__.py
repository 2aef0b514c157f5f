"""Named meshes of devices: plain values over numpy, without torch and without jax.

Example:
    >>> from mesh_utils import Mesh
    >>> mesh = Mesh.arange((2, 4), ("dp", "tp"))
    >>> mesh["tp"].device_ids.tolist()
    [0, 1, 2, 3]
"""

from mesh_utils.assignment import Assignment, assign
from mesh_utils.assignment_orders import DeviceOrder, jax_order, row_major_order, search_order
from mesh_utils.config import JobConfig
from mesh_utils.device import Device, read_devices, synthetic_devices
from mesh_utils.drawing import Drawing, draw_mesh
from mesh_utils.errors import AxisError, JobError, MeshError, TopologyError
from mesh_utils.figure import Figure
from mesh_utils.granule import Granule, granules
from mesh_utils.hardware import Chip, chips, find_chip
from mesh_utils.hybrid import HybridMesh
from mesh_utils.jax_drop_in import create_device_mesh, create_hybrid_device_mesh
from mesh_utils.mesh import Mesh
from mesh_utils.mesh_input import Axis
from mesh_utils.network import Collective, Network
from mesh_utils.network_report import AxisReport, axis_reports
from mesh_utils.order import Digit, mixed_radix, mixed_radix_positions
from mesh_utils.span import Span
from mesh_utils.topology import Topology

__all__ = [
    "Assignment",
    "Axis",
    "AxisError",
    "AxisReport",
    "Chip",
    "Collective",
    "Device",
    "DeviceOrder",
    "Digit",
    "Drawing",
    "Figure",
    "Granule",
    "HybridMesh",
    "JobConfig",
    "JobError",
    "Mesh",
    "MeshError",
    "Network",
    "Span",
    "Topology",
    "TopologyError",
    "assign",
    "axis_reports",
    "chips",
    "create_device_mesh",
    "create_hybrid_device_mesh",
    "draw_mesh",
    "find_chip",
    "granules",
    "jax_order",
    "mixed_radix",
    "mixed_radix_positions",
    "read_devices",
    "row_major_order",
    "search_order",
    "synthetic_devices",
]
