"""from_local, and LocalViews made of one host tensor per device.

A plain tensor given to ``from_local`` is one value, where PyTorch has one per rank. As Replicate
that is the same thing. As Shard or Partial it is not: PyTorch's ranks each pass rows of their own,
and here the same rows would silently be repeated on every device. So that raises where a process
has several devices along the axis, and ``same_on_every_device=True`` asks for it. With one device
per process a plain tensor is that device's own, as in PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from xla_dtensor.core import Layout, layout_of_op_sharding
from xla_dtensor.core.spanning import layout_on_span, region_of, spanning_mesh
from xla_dtensor.device_mesh import DeviceMesh, as_device_mesh, current_mesh, mesh_text
from xla_dtensor.dispatch import new_dtensor, state_of
from xla_dtensor.dynamo_calls import called_in_graph, one_call
from xla_dtensor.errors import ArgumentTypeError, DistributeError
from xla_dtensor.known_axes import Known, known_of_layout
from xla_dtensor.local_crossing import from_view
from xla_dtensor.local_spread import same_on_all
from xla_dtensor.local_view import LocalView
from xla_dtensor.off_mesh import is_off_mesh
from xla_dtensor.placement_checks import checked_placements
from xla_dtensor.redistribution import as_plain
from xla_dtensor.runtimes import functional_ops
from xla_dtensor.runtimes.functional_local import plain_like
from xla_dtensor.runtimes.functional_ops import is_traced
from xla_dtensor.runtimes.registry import get_runtime
from xla_dtensor.runtimes.whole_autograd import LinearResult, OneResult

if TYPE_CHECKING:
    from xla_dtensor.dtensor import DTensor

__all__ = ["make_from_local", "view_of_shards"]

aten = torch.ops.aten


@one_call
def make_from_local(
    tensor: Any,
    device_mesh: Any,
    placements: Any,
    whole: tuple[Sequence[int] | None, Sequence[int] | None],
    grad_placements: Sequence[Any] | None,
    *,
    run_check: bool,
    same_on_every_device: bool,
) -> DTensor:
    """Make a DTensor of what each device has; see ``DTensor.from_local``."""
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentTypeError(
            f"from_local was called with an object of type={type(tensor).__name__}. It takes what "
            "each device has. Pass a LocalView or a tensor."
        )
    shape, stride = whole
    if (shape is None) != (stride is None):
        raise DistributeError(
            f"from_local was called with shape={shape} and stride={stride}. One without the other "
            "does not describe the global tensor. Pass both, or none."
        )
    mesh = current_mesh("from_local") if device_mesh is None else as_device_mesh(device_mesh)
    checked = checked_placements("from_local", placements, mesh, tensor.ndim, partial=True)
    if is_off_mesh(mesh):
        return _without_values(tensor, mesh, checked, shape)
    if _is_plain(tensor) and shape is None and all(p.is_replicate() for p in checked):
        return _PlainReplicated.apply(tensor, mesh, checked)  # pyright: ignore
    if isinstance(tensor, LocalView) and shape is None:
        from xla_dtensor.fsdp_groups import from_group_view, is_of_groups

        if is_of_groups(tensor, mesh):
            return from_group_view(tensor, mesh, checked)
    if not isinstance(tensor, LocalView):
        tensor = _plain_as_view(tensor, mesh, checked, same_on_every_device)
    for_grad = None
    if grad_placements is not None:
        for_grad = checked_placements(
            "from_local", grad_placements, mesh, tensor.ndim, partial=False
        )
    return from_view(tensor, mesh, checked, shape, run_check or same_on_every_device, for_grad)


def _without_values(
    tensor: torch.Tensor, mesh: DeviceMesh, placements: tuple[Any, ...], shape: Any
) -> DTensor:
    """Return what a process has that reaches no device of the mesh: PyTorch's shape, no values."""
    from xla_dtensor.dtensor import DTensor

    layout = Layout.from_placements(placements, tensor.ndim, mesh.value)
    whole = layout.get_global_shape(tuple(tensor.shape)) if shape is None else tuple(shape)
    payload = torch.empty(whole, dtype=tensor.dtype, device="meta")
    return DTensor._wrapping(payload, mesh, placements, requires_grad=tensor.requires_grad)


def from_local_in_graph(
    tensor: Any,
    device_mesh: Any,
    placements: Any,
    whole: tuple[Any, Any],
    grad_placements: Any,
    **options: bool,
) -> DTensor:
    """Do what :func:`make_from_local` does, in a function that Dynamo reads."""
    given = [None if sizes is None else tuple([int(n) for n in sizes]) for sizes in whole]
    args = (device_mesh, placements, given, grad_placements)
    return called_in_graph("make_from_local", tensor, args, options)


def _is_plain(tensor: torch.Tensor) -> bool:
    return not hasattr(tensor, "_local_tensor") and not getattr(tensor, "_is_per_device", False)


class _PlainReplicated(LinearResult):
    """A plain tensor, one value, as a DTensor that no axis of the mesh cuts."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, mesh: DeviceMesh, placements: Any) -> Any:
        from xla_dtensor.dtensor import DTensor

        runtime, layout = get_runtime(), Layout.replicated(mesh.value, tensor.ndim)
        ctx.mesh, ctx.placements, ctx.on_host = mesh, placements, not runtime.is_payload(tensor)
        payload = tensor.detach()
        if is_traced(tensor):
            ctx.on_host = None
            ctx.save_for_backward(tensor)
            payload = functional_ops.put(payload, layout)
            return new_dtensor(DTensor, payload, state_of(payload, mesh, placements))
        if ctx.on_host:
            payload = runtime.put(payload, layout)
            known: Known = ()
        else:
            known = _known_of(payload, mesh)
        payload = runtime.constrain(payload, layout_on_span(layout, known))
        return new_dtensor(DTensor, payload, state_of(payload, mesh, placements, known))

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        moved = grad.redistribute(ctx.mesh, ctx.placements)
        if ctx.on_host is False:
            return as_plain(moved), None, None
        return _OnHost.apply(moved, *ctx.saved_tensors), None, None


class _OnHost(OneResult):
    """The gradient of a host tensor: what the devices have of it, on the host."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, like: torch.Tensor | None = None) -> torch.Tensor:
        ctx.mesh, ctx.placements = tensor._spec.mesh, tensor._spec.placements
        payload = tensor._local_tensor
        return get_runtime().to_host(payload) if like is None else plain_like(payload, like)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        made = _PlainReplicated.apply(grad, ctx.mesh, ctx.placements)
        return (made, None)[: ctx.num_inputs]


def _known_of(payload: torch.Tensor, mesh: DeviceMesh) -> Known:
    """Return what the runtime knows of how a plain tensor lies over axes that `mesh` lacks."""
    span, runtime = spanning_mesh(mesh.value), get_runtime()
    sharding = runtime.known_sharding(payload)
    if span == mesh.value or sharding is None or not sharding.is_tiled:
        return ()
    layout = layout_of_op_sharding(sharding, span, payload.ndim, runtime.root(span))
    return known_of_layout(layout, mesh)


def _plain_as_view(
    tensor: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Any], same: bool
) -> LocalView:
    if not _is_plain(tensor):
        raise ArgumentTypeError(
            f"from_local was called with a {type(tensor).__name__} of shape={tuple(tensor.shape)}. "
            "That is not one device's tensor. Pass what to_local() gave, or use redistribute."
        )
    runtime = get_runtime()
    mine = runtime.addressable_device_ids()
    own = len(mine) == 1 and len(runtime.device_ids()) > 1 and not runtime.is_payload(tensor)
    if own and not same:
        return view_of_shards({mine[0]: tensor}, mesh)
    sizes = mesh.value.mesh_shape
    wrong = [
        (name, placement)
        for name, placement, size in zip(mesh.value.axis_names, placements, sizes, strict=True)
        if not placement.is_replicate() and size > 1
    ]
    if wrong and not same:
        axis, placement = wrong[0]
        raise DistributeError(
            f"from_local was called with a plain tensor of shape={tuple(tensor.shape)} and "
            f"{placement} for axis {axis!r} of the mesh {mesh_text(mesh.value)}. In PyTorch each "
            "rank passes a tensor of its own; this process has several devices along that axis, "
            "and one tensor for all of them would be repeated. Pass the global tensor to "
            "distribute_tensor, one tensor per device to LocalView.from_shards, or "
            "same_on_every_device=True."
        )
    view: Any = same_on_all(tensor, region_of(mesh.value))
    return view


def view_of_shards(shards: Any, device_mesh: Any) -> LocalView:
    """Make a LocalView of one host tensor per device; see ``LocalView.from_shards``."""
    mesh = as_device_mesh(device_mesh)
    runtime, region = get_runtime(), region_of(mesh.value)
    given = dict(shards) if hasattr(shards, "items") else None
    if given is None:
        ids = [int(i) for i in mesh.value.device_ids.reshape(-1)]
        shards = list(shards)
        if len(shards) != len(ids):
            raise DistributeError(
                f"from_shards was called with {len(shards)} tensors on the mesh "
                f"{mesh_text(mesh.value)}. Each of its {len(ids)} devices has one. Pass them in "
                "the order of the mesh, or a dict by device id."
            )
        given = dict(zip(ids, shards, strict=True))
    by_place = {_place(region, device): tensor for device, tensor in given.items()}
    wanted = [i for i in runtime.addressable_device_ids() if i in region.mesh.device_ids]
    first: Any = next(iter(given.values()), None)
    if not isinstance(first, torch.Tensor):
        raise ArgumentTypeError(
            f"from_shards was called with {first!r} for the first device. A shard is a host "
            "tensor. Pass a torch.Tensor per device."
        )
    for device in wanted:
        shard: Any = by_place.get(_place(region, device))
        fits = isinstance(shard, torch.Tensor) and shard.dtype == first.dtype
        if not fits or shard.shape != first.shape:
            found = getattr(shard, "shape", shard), getattr(shard, "dtype", None)
            found = shard if shard is None else (tuple(found[0]), found[1])
            raise DistributeError(
                f"from_shards was called on the mesh {mesh_text(mesh.value)}, and for device "
                f"{device} the tensor is {found}. Every device that this process reaches needs one "
                f"of the same shape and dtype, here {tuple(first.shape)} and {first.dtype}. Pass "
                "tensors of one shape, padded where they are shorter."
            )
    ndim = len(region.axes)
    layout = Layout(region.mesh, (*((axis,) for axis in region.axes), *((),) * first.ndim))
    stacked = {
        device: by_place[_place(region, device)].detach()[(None,) * ndim] for device in wanted
    }
    payload = runtime.from_shards(stacked, (*region.sizes, *first.shape), layout)
    local = runtime.enter_local(payload, layout, region)
    for _ in range(ndim):
        local = runtime.run_local_op(aten.squeeze.dim, (local, 0), {})
    return LocalView(local, region, varying=frozenset(region.axes))


def _place(region: Any, device: int) -> tuple[int, ...]:
    """Return a device's coordinate along the region's axes."""
    coordinate = region.mesh.coordinates(int(device))
    at = dict(zip(region.mesh.axis_names, coordinate, strict=True))
    return tuple(int(np.asarray(at[axis])) for axis in region.axes)
