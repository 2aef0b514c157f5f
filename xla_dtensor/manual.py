"""Manual regions: the border between global tensors and per-device ones.

``enable_manual_sharding`` cuts a global tensor into its tiles, ``disable_manual_sharding`` puts
tiles together again. In between, :class:`~xla_dtensor.manual_tensor.ManualTensor` and the
collectives of :mod:`xla_dtensor.collectives`. A row-parallel matmul, written by hand::

    x = enable_manual_sharding(x, (None, "tp"), mesh=mesh)      (16, 2): columns of the device
    w = enable_manual_sharding(w, ("tp", None), mesh=mesh)      (2, 5): rows of the device
    y = psum(x @ w, "tp")                                       (16, 5), the same on all of tp
    y = disable_manual_sharding(y, (None, None), (16, 5), mesh=mesh)

Gradients are those of the function from global tensors to global tensors. Two rules make them so,
those of JAX's shard_map without replication checks: where a tensor enters as copies, the gradients
of the copies are summed; where copies leave as one tensor, each gets its share of the gradient.

Invariants: entering and leaving move no data when the tensor lies as the partition spec says. A dim
that the mesh does not divide is padded with zeros behind its end, and cut off when it leaves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

import torch

from mesh_utils import Axis, Mesh
from xla_dtensor.collectives import psum
from xla_dtensor.core import Layout, LayoutError, ManualRegion
from xla_dtensor.device_mesh import DeviceMesh, as_device_mesh, mesh_text
from xla_dtensor.dtensor import DTensor
from xla_dtensor.errors import ArgumentTypeError, ManualRegionError
from xla_dtensor.manual_tensor import ManualTensor
from xla_dtensor.placement_checks import torch_placements
from xla_dtensor.redistribution import as_plain
from xla_dtensor.runtimes.registry import get_runtime
from xla_dtensor.runtimes.whole_autograd import LinearResult

__all__ = ["enter_region", "leave_region"]


def enter_region(
    tensor: torch.Tensor,
    partition_spec: Sequence[Any],
    mesh: DeviceMesh | Mesh,
    axes: Iterable[Axis] | None = None,
) -> ManualTensor:
    """Cut a global tensor into its tiles; see ``xla_dtensor.spmd.enable_manual_sharding``.

    Args:
        tensor: A DTensor, a plain tensor of the runtime, or a CPU tensor without gradient.
        partition_spec: Per dim a manual axis, a tuple of them, or None.
        mesh: The mesh.
        axes: The axes that become manual; None for all.

    Returns:
        The tile, on every device.

    Raises:
        ManualRegionError: The tensor is manual already.
        LayoutError: A partition spec that does not fit tensor, mesh or axes.
    """
    value = as_device_mesh(mesh).value
    region = ManualRegion.over(value, axes)
    layout = _border_layout("enable_manual_sharding", partition_spec, tensor.ndim, region)
    if isinstance(tensor, ManualTensor):
        raise ManualRegionError(
            f"enable_manual_sharding was called on {tensor!r}. It is a device's tile already. Call "
            "it once, on the global tensor."
        )
    source = _on_devices(tensor, region.mesh)
    shape = tuple(source.shape)
    missing = [
        tile * layout.op_sharding().num_tiles(dim) - size
        for dim, (tile, size) in enumerate(
            zip(region.tile_shape(layout, shape), shape, strict=True)
        )
    ]
    if any(missing):
        behind = [pad for dim in reversed(missing) for pad in (0, dim)]
        source = torch.nn.functional.pad(source, behind)
    return _Enter.apply(source, layout, region)  # pyright: ignore[reportReturnType]


def leave_region(
    tensor: torch.Tensor, partition_spec: Sequence[Any], full_shape: Sequence[int], mesh: Any = None
) -> DTensor:
    """Put tiles together again; see ``xla_dtensor.spmd.disable_manual_sharding``.

    Args:
        tensor: A ManualTensor.
        partition_spec: Per dim a manual axis, a tuple of them, or None. Along axes that it does
            not name, all devices must hold the same values.
        full_shape: The global shape.
        mesh: The mesh of the region; may be left out.

    Returns:
        The global tensor.

    Raises:
        ManualRegionError: No manual tensor, another mesh, or a shape of which the tile is no tile.
        LayoutError: A partition spec that does not fit tensor, mesh or axes.
    """
    if not isinstance(tensor, ManualTensor):
        raise ManualRegionError(
            f"disable_manual_sharding was called on a {type(tensor).__name__} of "
            f"shape={tuple(tensor.shape)}. It is global already. Pass what enable_manual_sharding "
            "returned, or what was computed from it."
        )
    region = tensor.region
    if mesh is not None and as_device_mesh(mesh).value != region.mesh:
        raise ManualRegionError(
            "disable_manual_sharding was called with the mesh "
            f"{mesh_text(as_device_mesh(mesh).value)} on a tensor that is manual over "
            f"{mesh_text(region.mesh)}. Its tiles are those of the latter. Pass that mesh, or none."
        )
    layout = _border_layout("disable_manual_sharding", partition_spec, tensor.ndim, region)
    shape = tuple(full_shape)
    tile = region.tile_shape(layout, shape) if len(shape) == tensor.ndim else None
    if tile != tuple(tensor.shape):
        raise ManualRegionError(
            f"disable_manual_sharding was called with full_shape={shape} and "
            f"partition_spec={tuple(partition_spec)} on tiles of shape={tuple(tensor.shape)}. A "
            f"tensor of that full shape has tiles of shape={tile}. Pass the shape that the tiles "
            "make up, or another partition spec."
        )
    whole: Any = _Leave.apply(tensor, layout, region)
    if tuple(whole.shape) != shape:
        whole = whole[tuple(slice(0, size) for size in shape)]
        whole = whole.redistribute(placements=torch_placements(layout))
    return whole


def _border_layout(
    function: str, partition_spec: Sequence[Any], ndim: int, region: ManualRegion
) -> Layout:
    layout = Layout.from_partition_spec(partition_spec, region.mesh)
    if layout.ndim != ndim:
        raise LayoutError(
            f"{function} was called with partition_spec={tuple(partition_spec)} on a tensor with "
            f"{ndim} dims. A partition spec has one entry per dim. Pass {ndim} entries; None "
            "leaves a dim whole."
        )
    region.check_layout(layout)
    return layout


def _on_devices(tensor: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """Return the tensor as a DTensor or a plain tensor of the runtime."""
    runtime = get_runtime()
    if isinstance(tensor, DTensor) or runtime.is_payload(tensor):
        return tensor
    if tensor.requires_grad:
        raise ArgumentTypeError(
            f"enable_manual_sharding was called on a CPU tensor of shape={tuple(tensor.shape)} "
            "that requires grad. Its gradient would end at the copy to the devices. Put it there "
            "first: mark_sharding(tensor, mesh, partition_spec)."
        )
    device_mesh = as_device_mesh(mesh)
    whole = Layout.replicated(mesh, tensor.ndim)
    return DTensor._wrapping(runtime.put(tensor, whole), device_mesh, torch_placements(whole))


def _payload(tensor: Any) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


class _Enter(LinearResult):
    @staticmethod
    def forward(ctx: Any, tensor: Any, layout: Layout, region: ManualRegion) -> Any:
        ctx.border, ctx.plain = (layout, region), not isinstance(tensor, DTensor)
        return ManualTensor(get_runtime().enter_manual(_payload(tensor), layout, region), region)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        layout, region = ctx.border
        copied = region.copied_axes(layout)
        if copied:
            grad = psum(grad, copied)
        whole: Any = _Leave.apply(grad, layout, region, False)
        return (as_plain(whole) if ctx.plain else whole), None, None


class _Leave(LinearResult):
    @staticmethod
    def forward(
        ctx: Any, tensor: Any, layout: Layout, region: ManualRegion, share: bool = True
    ) -> Any:
        ctx.border, ctx.share = (layout, region), share
        payload = get_runtime().leave_manual(tensor._payload, layout, region)
        return DTensor._wrapping(payload, as_device_mesh(region.mesh), torch_placements(layout))

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        layout, region = ctx.border
        tile: Any = _Enter.apply(grad, layout, region)
        copies = prod(region.mesh.size(axis) for axis in region.copied_axes(layout))
        if ctx.share and copies > 1:
            tile = tile / copies
        return tile, None, None, None
