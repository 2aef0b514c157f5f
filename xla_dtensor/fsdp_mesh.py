"""Which axes of a mesh fully_shard uses: all, or those that ``dp_mesh_dims`` names.

``fully_shard(module, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))`` is for parameters
that are DTensors on all axes of `mesh` already, Replicate along the data-parallel ones. In the
module's forward they are so again, beside activations on all axes.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import Partial, Replicate

from xla_dtensor.device_mesh import DeviceMesh, as_device_mesh, mesh_text
from xla_dtensor.errors import DistributeError

__all__ = ["check_replicated", "data_parallel_part", "summed_over"]


def data_parallel_part(mesh: Any, dims: Any) -> DeviceMesh:
    """Return the axes to replicate and to shard over.

    Args:
        mesh: A mesh with named axes.
        dims: torch's ``DataParallelMeshDims``.

    Returns:
        The submesh of the replicate axis, if any, and the shard axis.

    Raises:
        DistributeError: Not one shard axis, or several replicate axes.
    """
    whole = as_device_mesh(mesh)
    if len(dims.shard_names) != 1 or len(dims.replicate_names) > 1:
        raise DistributeError(
            f"fully_shard was called with dp_mesh_dims={dims} on the mesh "
            f"{mesh_text(whole.value)}. Parameters are sharded over one axis, and copied along one "
            "at most. Name one axis each, and merge axes where the mesh is made."
        )
    return whole[(*dims.replicate_names, *dims.shard_names)]


def check_replicated(state: Any, mesh: DeviceMesh) -> None:
    """Refuse a parameter that is cut along fully_shard's own axes before it comes there.

    Args:
        state: The parameter's state, on all axes.
        mesh: The axes to replicate and to shard over.

    Raises:
        DistributeError: It is.
    """
    on = dict(zip(state.mesh.value.axis_names, state.placements, strict=True))
    cut = {axis: on[axis] for axis in mesh.value.axis_names if on[axis] != Replicate()}
    if cut:
        raise DistributeError(
            f"fully_shard was called with dp_mesh_dims on a parameter that has the placements "
            f"{cut} along them. They are the axes that fully_shard itself cuts or sums over. Pass "
            "parameters that are Replicate() there."
        )


def summed_over(state: Any, mesh: DeviceMesh) -> tuple[Any, ...]:
    """Return how the gradient of a gathered parameter's ``to_local()`` lies.

    Each device computes with rows of its own, and has a part of the gradient.

    Args:
        state: The gathered parameter's state, on all axes.
        mesh: The axes that fully_shard sums over.
    """
    own = {*mesh.value.axis_names}
    pairs = zip(state.mesh.value.axis_names, state.placements, strict=True)
    return tuple(Partial() if axis in own else placement for axis, placement in pairs)
