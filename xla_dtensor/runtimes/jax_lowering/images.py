"""Keep images whole: the dims that windows move over are not cut among devices.

XLA's partitioner (jax 0.10, on CPU) cuts a convolution over image dims with an exchange of borders,
and gets it wrong in places: weight gradients of strided convolutions over dims that divide
unevenly are wrong in silence, and some spread windows abort the process. So an image that is cut
is gathered first; batch and channels stay as they lie.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from xla_dtensor.runtimes.jax_trace import active_trace

__all__ = ["mesh_of_program", "whole"]


def whole(x: Any, rest: int) -> Any:
    """Return `x` with all dims but the first `rest` in one piece on each device.

    Args:
        x: An array, or a tracer; the values stay.
        rest: How many dims may stay cut, in whichever way.
    """
    if isinstance(x, Tracer):
        mesh = mesh_of_program()
        if mesh is None:
            return x
        spec = (*[PartitionSpec.UNCONSTRAINED] * rest, *[None] * (x.ndim - rest))
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*spec)))
    sharding = getattr(x, "sharding", None)
    if not isinstance(sharding, NamedSharding) or not any(sharding.spec[rest:]):
        return x
    return jax.device_put(x, NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:rest])))


def mesh_of_program() -> Mesh | None:
    """A mesh of the devices that the step which is traced will run on; None if nothing tells."""
    trace = active_trace()
    axis_types = jax.sharding.get_abstract_mesh().axis_types or ()
    if trace is None or AxisType.Manual in axis_types:
        return None
    for storage in chain(trace.captured, trace._arguments):
        if isinstance(storage.sharding, NamedSharding):
            mesh = storage.sharding.mesh
            # The mesh of one device has no axes, and nothing to say.
            return mesh if isinstance(mesh, Mesh) and mesh.axis_names else None
    return None
