"""compute_local_shape_and_global_offset: which part of a tensor the first device has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from xla_dtensor.argument_types import argument_types
from xla_dtensor.core import Layout, local_shape
from xla_dtensor.device_mesh import as_device_mesh
from xla_dtensor.errors import ArgumentTypeError
from xla_dtensor.placement_checks import checked_placements

__all__ = ["compute_local_shape_and_global_offset"]


@argument_types
def compute_local_shape_and_global_offset(
    global_shape: Sequence[int], mesh: Any, placements: Sequence[Any] | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Tell which part of a tensor lies on the first device that this process reaches.

    As torch.distributed.tensor's function of this name, which also takes the mesh of
    ``init_device_mesh``: uneven shards are cut by `torch.chunk`, once per mesh axis.

    Args:
        global_shape: The shape of the whole, elements.
        mesh: The mesh.
        placements: One per mesh axis, or one alias entry per dim, e.g. ``("dp", None)``.

    Returns:
        The shard's shape, and its first element along each dim; the global extent where the shard
        is empty. ``((0,), ())`` in a process that reaches none of the mesh's devices.

    Raises:
        ArgumentTypeError: A shape that is not made of non-negative integers, or no mesh.
        DistributeError: Wrong placements.

    Example:
        >>> import xla_dtensor as xd
        >>> mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
        >>> xd.compute_local_shape_and_global_offset((5, 8), mesh, ("dp", "tp"))
        ((3, 2), (0, 0))
    """
    shape = tuple(global_shape)
    if any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in shape):
        raise ArgumentTypeError(
            f"compute_local_shape_and_global_offset was called with global_shape={shape}. A shape "
            "is made of non-negative integers. Pass the shape of the whole tensor."
        )
    mesh = as_device_mesh(mesh)
    function = "compute_local_shape_and_global_offset"
    checked = checked_placements(function, placements, mesh, len(shape), partial=True)
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return (0,), ()
    layout = Layout.from_placements(checked, len(shape), mesh.value)
    part = local_shape(layout, shape, coordinate, rule="torch")
    return part.shape, part.offset
