"""Tensors made on the mesh: each device makes its own part, the whole exists nowhere.

The names and arguments are PyTorch's (``torch.distributed.tensor.ones`` and the others)::

    ones(8, 6, device_mesh=mesh, placements=[Shard(0), Replicate()])
    zeros((8, 6), mesh, ["dp", None])            mesh and placements may be given by position

Random values do not depend on the placements: the same seed gives the same global tensor however it
is cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh as TorchDeviceMesh

from mesh_utils import Mesh
from xla_dtensor.argument_types import argument_types
from xla_dtensor.core import Layout
from xla_dtensor.device_mesh import as_device_mesh, current_mesh
from xla_dtensor.dtensor import DTensor
from xla_dtensor.errors import ArgumentTypeError, DistributeError
from xla_dtensor.off_mesh import is_off_mesh
from xla_dtensor.placement_checks import checked_placements
from xla_dtensor.runtimes.registry import get_runtime

__all__ = ["empty", "full", "ones", "rand", "randn", "zeros"]


@argument_types
def ones(
    *size: Any,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: Any = None,
    placements: Sequence[Any] | None = None,
) -> DTensor:
    """Make a DTensor of ones.

    Args:
        *size: The global shape, as integers or one sequence; mesh and placements may follow.
        dtype: Its dtype; torch's default when None.
        layout: torch.strided.
        requires_grad: Whether autograd records operations on it.
        device_mesh: The mesh; that of the open ``with mesh:`` block when None.
        placements: One per mesh axis, or one alias entry per dim; None replicates.

    Returns:
        The DTensor.

    Raises:
        DistributeError: Wrong mesh, placements or layout.
        ArgumentTypeError: A size that is none.

    Example:
        >>> import xla_dtensor as xd
        >>> from torch.distributed.tensor import Shard
        >>> mesh = xd.init_device_mesh("xla", (8,))
        >>> ones(16, 2, device_mesh=mesh, placements=[Shard(0)])
        DTensor(shape=(16, 2), dtype=float32, placements=(S(0)), mesh=(0=8), local_shape=(2, 2))
    """
    return _made("ones", size, 1, dtype, layout, requires_grad, device_mesh, placements)


@argument_types
def zeros(
    *size: Any,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: Any = None,
    placements: Sequence[Any] | None = None,
) -> DTensor:
    """Make a DTensor of zeros; see :func:`ones`."""
    return _made("zeros", size, 0, dtype, layout, requires_grad, device_mesh, placements)


@argument_types
def empty(
    *size: Any,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: Any = None,
    placements: Sequence[Any] | None = None,
) -> DTensor:
    """Make a DTensor whose values are not to be relied upon (they are zeros); see :func:`ones`."""
    return _made("empty", size, 0, dtype, layout, requires_grad, device_mesh, placements)


@argument_types
def full(
    size: Any,
    fill_value: complex,
    *mesh_and_placements: Any,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: Any = None,
    placements: Sequence[Any] | None = None,
) -> DTensor:
    """Make a DTensor of one value; see :func:`ones`.

    Args:
        size: The global shape.
        fill_value: The value; it decides the dtype when that is None.
        *mesh_and_placements: Mesh and placements, where given by position.
        dtype: As for :func:`ones`.
        layout: As for :func:`ones`.
        requires_grad: As for :func:`ones`.
        device_mesh: As for :func:`ones`.
        placements: As for :func:`ones`.
    """
    if dtype is None:
        dtype = torch.full((), fill_value).dtype
    given = (size, *mesh_and_placements)
    return _made("full", given, fill_value, dtype, layout, requires_grad, device_mesh, placements)


@argument_types
def rand(
    *size: Any,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    device_mesh: Any = None,
    placements: Sequence[Any] | None = None,
) -> DTensor:
    """Make a DTensor of values drawn uniformly from [0, 1); see :func:`ones`."""
    return _made("rand", size, "uniform", dtype, layout, requires_grad, device_mesh, placements)


@argument_types
def randn(
    *size: Any,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    device_mesh: Any = None,
    placements: Sequence[Any] | None = None,
) -> DTensor:
    """Make a DTensor of values drawn from the standard normal distribution; see :func:`ones`."""
    return _made("randn", size, "normal", dtype, layout, requires_grad, device_mesh, placements)


def _made(
    function: str,
    size: tuple[Any, ...],
    fill: Any,
    dtype: torch.dtype | None,
    layout: torch.layout,
    requires_grad: bool,
    device_mesh: Any,
    placements: Any,
) -> DTensor:
    size, device_mesh, placements = _by_position(size, device_mesh, placements)
    shape = _shape(function, size)
    if layout != torch.strided:
        raise DistributeError(
            f"{function} was called with layout={layout}. A DTensor is dense. Pass torch.strided, "
            "or leave it out."
        )
    dtype = torch.get_default_dtype() if dtype is None else dtype
    mesh = current_mesh(function) if device_mesh is None else as_device_mesh(device_mesh)
    checked = checked_placements(function, placements, mesh, len(shape), partial=False)
    lies = Layout.from_placements(checked, len(shape), mesh.value)
    if is_off_mesh(mesh):
        payload = torch.empty(shape, dtype=dtype, device="meta")
        if isinstance(fill, str):
            get_runtime().skip_draw()
    else:
        payload = get_runtime().make(fill, shape, dtype, lies)
    return DTensor._wrapping(payload, mesh, checked, requires_grad=requires_grad)


def _by_position(size: tuple[Any, ...], mesh: Any, placements: Any) -> tuple[Any, Any, Any]:
    """Take mesh and placements from behind the size."""
    for place, value in enumerate(size):
        if isinstance(value, (TorchDeviceMesh, Mesh)):
            rest = size[place + 1 :]
            if mesh is not None or len(rest) > 1 or (rest and placements is not None):
                raise ArgumentTypeError(
                    "A factory was called with a mesh by position and more arguments than "
                    "placements behind it, or by name as well. Each is taken once. Pass (size, "
                    "mesh, placements)."
                )
            return size[:place], value, rest[0] if rest else placements
    return size, mesh, placements


def _shape(function: str, size: tuple[Any, ...]) -> tuple[int, ...]:
    if len(size) == 1 and isinstance(size[0], Sequence):
        size = tuple(size[0])
    if any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in size):
        raise ArgumentTypeError(
            f"{function} was called with size={size}. A shape is made of non-negative integers. "
            "Pass them one by one or as one sequence; mesh and placements go behind or by name."
        )
    return tuple(size)
