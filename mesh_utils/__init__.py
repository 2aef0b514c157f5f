"""Named meshes of devices: plain values over numpy, without torch and without jax.

Example:
    >>> from mesh_utils import Mesh
    >>> mesh = Mesh.arange((2, 4), ("dp", "tp"))
    >>> mesh["tp"].device_ids.tolist()
    [0, 1, 2, 3]
"""

from mesh_utils.errors import AxisError, MeshError
from mesh_utils.mesh import Mesh
from mesh_utils.mesh_input import Axis
from mesh_utils.order import Digit, mixed_radix, mixed_radix_positions

__all__ = [
    "Axis",
    "AxisError",
    "Digit",
    "Mesh",
    "MeshError",
    "mixed_radix",
    "mixed_radix_positions",
]
