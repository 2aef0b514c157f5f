"""Named meshes of devices: plain values over numpy, without torch and without jax.

Example:
    >>> from mesh_utils import Mesh
    >>> mesh = Mesh.arange((2, 4), ("dp", "tp"))
    >>> mesh["tp"].device_ids.tolist()
    [0, 1, 2, 3]
"""

import sys

from mesh_utils.assignment import Assignment, assign
from mesh_utils.devices import Device, Granule, granules, read_devices, synthetic_devices
from mesh_utils.draw import Drawing, draw_mesh
from mesh_utils.errors import AxisError, JobError, MeshError, TopologyError
from mesh_utils.hardware import Chip, Figure, chips, find_chip
from mesh_utils.hybrid import (
    DeviceOrder,
    HybridMesh,
    jax_order,
    row_major_order,
    search_order,
)
from mesh_utils.jax_compat import create_device_mesh, create_hybrid_device_mesh
from mesh_utils.job import JobConfig
from mesh_utils.mesh import Axis, Digit, Mesh, mixed_radix, mixed_radix_positions
from mesh_utils.network import AxisReport, Collective, Network, axis_reports
from mesh_utils.span import Span
from mesh_utils.topology import Topology

# What was pickled before these modules were merged names them so.
sys.modules["mesh_utils.device"] = sys.modules["mesh_utils.devices"]
for _name in ("figure", "slice_table"):
    sys.modules[f"mesh_utils.{_name}"] = sys.modules["mesh_utils.hardware"]

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
