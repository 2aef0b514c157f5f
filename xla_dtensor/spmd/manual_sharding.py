"""enable_manual_sharding and disable_manual_sharding, by torch_xla's names.

Between the two a tensor is what one device has, and nothing is communicated but by the collectives
of :mod:`xla_dtensor.collectives`; see :mod:`xla_dtensor.manual`. Unlike torch_xla's, gradients pass
the border, and what aborts the process there (reading a manual tensor, a wrong full_shape, an op
on a manual and a global tensor) is an error here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from mesh_utils import Axis
from xla_dtensor.argument_types import argument_types
from xla_dtensor.manual import enter_region, leave_region
from xla_dtensor.manual_tensor import ManualTensor
from xla_dtensor.spmd.mesh import as_mesh
from xla_dtensor.spmd.sharded_tensor import XLAShardedTensor, wrap_as_sharded_tensor

__all__ = ["disable_manual_sharding", "enable_manual_sharding"]


@argument_types
def enable_manual_sharding(
    t: torch.Tensor,
    partition_spec: Sequence[Any],
    *,
    mesh: Any = None,
    manual_axes: Iterable[Axis] | None = None,
) -> ManualTensor:
    """Return each device's tile of a global tensor, to be computed with by hand.

    Args:
        t: A DTensor, a plain tensor of the runtime, or a CPU tensor without gradient. It stays as
            it is.
        partition_spec: Per dim an axis, a tuple of axes, or None. Along axes that it does not name
            each device gets a copy.
        mesh: The mesh; the global one when None.
        manual_axes: The axes that become manual, all of them when None. Along the others tensors
            stay global and XLA shards them (JAX runtime only).

    Returns:
        A ManualTensor of the tile's shape. A dim that the axes do not divide is padded with zeros.

    Raises:
        ManualRegionError: `t` is manual already.
        LayoutError: A partition spec that does not fit.
        UnsupportedOpError: Some axes only, on torch_xla.

    Example:
        >>> import torch
        >>> from xla_dtensor.collectives import psum
        >>> from xla_dtensor.spmd import Mesh
        >>> mesh = Mesh(range(8), (2, 4), ("dp", "tp"))
        >>> x = enable_manual_sharding(torch.arange(8.0), ("tp",), mesh=mesh)
        >>> x.shape
        torch.Size([2])
        >>> disable_manual_sharding(psum(x, "tp"), (None,), (2,), mesh=mesh).tolist()
        [12.0, 16.0]
    """
    return enter_region(t, partition_spec, as_mesh(mesh, "enable_manual_sharding"), manual_axes)


@argument_types
def disable_manual_sharding(
    t: torch.Tensor,
    partition_spec: Sequence[Any],
    full_shape: Sequence[int],
    *,
    mesh: Any = None,
) -> XLAShardedTensor:
    """Return the global tensor whose tiles the devices have.

    Args:
        t: A ManualTensor.
        partition_spec: Per dim an axis, a tuple of axes, or None. Along axes that it does not name
            all devices must hold the same values; the first one's are taken.
        full_shape: The global shape.
        mesh: The mesh; the region's own when None.

    Returns:
        An XLAShardedTensor that lies as the partition spec says.

    Raises:
        ManualRegionError: No manual tensor, another mesh, or a wrong full_shape.
        LayoutError: A partition spec that does not fit.
    """
    return wrap_as_sharded_tensor(leave_region(t, partition_spec, full_shape, mesh))
