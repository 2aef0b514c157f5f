"""redistribute: the same values, lying another way.

In global view it is one sharding constraint: XLA finds the communication. What is left to do here
is to check what was asked, to keep what is known of mesh axes that were not spoken of, and to send
the gradient back the way the source lay.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import Replicate

from xla_dtensor.asking import asking
from xla_dtensor.core import Layout
from xla_dtensor.device_mesh import DeviceMesh, as_device_mesh, mesh_text
from xla_dtensor.dispatch import new_dtensor, state_of
from xla_dtensor.errors import RedistributeError
from xla_dtensor.explaining_labels import note_op
from xla_dtensor.known_axes import placements_on
from xla_dtensor.off_mesh import empty_local, is_off_mesh
from xla_dtensor.placement_checks import checked_placements
from xla_dtensor.runtimes import functional_ops
from xla_dtensor.runtimes.registry import get_runtime
from xla_dtensor.runtimes.whole_autograd import LinearResult

if TYPE_CHECKING:
    from xla_dtensor.dtensor import DTensor

__all__ = ["as_plain", "redistributed"]


def redistributed(
    source: DTensor,
    device_mesh: Any,
    placements: Sequence[Any] | None,
    forward_dtype: torch.dtype | None,
    backward_dtype: torch.dtype | None,
) -> DTensor:
    """Return a DTensor of the same values; see ``DTensor.redistribute``."""
    mesh = source._spec.mesh if device_mesh is None else as_device_mesh(device_mesh)
    if placements is None:
        raise RedistributeError(
            "redistribute was called without placements. There is nothing to move to. Pass "
            f"placements with one entry per axis of the mesh {mesh_text(mesh.value)}."
        )
    checked = checked_placements("redistribute", placements, mesh, source.ndim, partial=True)
    for axis, placement in zip(mesh.value.axis_names, checked, strict=True):
        if placement.is_partial():
            raise RedistributeError(
                f"redistribute was called with {placement!r} for axis {axis!r} of the mesh "
                f"{mesh_text(mesh.value)}. Partial says that a reduction is still pending, which "
                "no annotation can bring about for a value that is already whole. Pass Shard(dim) "
                "or Replicate()."
            )
    _check_same_devices(source._spec.mesh, mesh)
    moved: Any = source if forward_dtype is None else source.to(forward_dtype)
    return _Redistribute.apply(  # pyright: ignore[reportReturnType]
        moved, mesh, checked, backward_dtype
    )


def _check_same_devices(before: DeviceMesh, after: DeviceMesh) -> None:
    if before is after or before.value.root == after.value.root:
        return
    ids = [set(mesh.value.root.device_ids.reshape(-1).tolist()) for mesh in (before, after)]
    if ids[0] != ids[1]:
        raise RedistributeError(
            f"redistribute was called with a mesh over {len(ids[1])} devices on a tensor over "
            f"{len(ids[0])} others. One XLA program runs on one set of devices. Pass a mesh over "
            "the same devices, or move the value through the host: "
            "distribute_tensor(tensor.cpu(), mesh, placements)."
        )


class _Redistribute(LinearResult):
    @staticmethod
    def forward(
        ctx: Any, source: DTensor, mesh: DeviceMesh, placements: Any, dtype: Any
    ) -> DTensor:
        ctx.source, ctx.dtype, ctx.original = source._spec, dtype, source.dtype
        moved = source._spec.moved(mesh, placements)
        ctx.moved, ctx.kind = moved.span_layout, type(source)
        with asking(mesh, placements_on(source._spec, mesh), placements):
            payload = functional_ops.constrain(source._local_tensor, moved.span_layout)
        state = state_of(payload, mesh, placements, moved.known)
        return new_dtensor(type(source), payload, note_op(state, "redistribute", [source]))

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        # A gradient has a value, so what was pending in the forward is whole in the backward.
        placements = ctx.source.placements
        target = tuple(Replicate() if p.is_partial() else p for p in placements)
        state = ctx.source.moved(ctx.source.mesh, target)
        if not hasattr(grad, "_spec"):  # PyTorch makes a plain one of a view that was written to
            grad = _FromPlain.apply(grad, state, ctx.kind)
        grad = grad if ctx.dtype is None else grad.to(ctx.dtype)
        grad = _summed_up(grad, ctx.moved, state.span_layout)
        return grad.redistribute(ctx.source.mesh, target).to(ctx.original), None, None, None


def _summed_up(grad: DTensor, arrives: Layout, leaves: Layout) -> DTensor:
    """Return a gradient that a program sums up before it moves it on.

    A gradient is the sum of what the readers of a value sent. Left alone, XLA hands the layout that
    is wanted behind the move on to each summand, and moves each by itself.

    Args:
        grad: The gradient of what `redistribute` returned.
        arrives: How that lies.
        leaves: How the gradient will lie.
    """
    whole = frozenset(dim for dim, cuts in enumerate(arrives.dims) if not cuts)
    if len(whole) == arrives.ndim or arrives.dims == leaves.dims or torch.is_grad_enabled():
        return grad  # in grad mode it is differentiated once more, and this is below autograd
    told = Layout(arrives.mesh, arrives.dims, (), whole)
    payload = get_runtime().summed_up(grad._local_tensor, told)
    return grad if payload is grad._local_tensor else new_dtensor(type(grad), payload, grad._spec)


def as_plain(tensor: DTensor, grad_placements: Sequence[Any] | None = None) -> torch.Tensor:
    """Return the runtime's plain tensor for the whole value, lying as it does; no data moves.

    Args:
        tensor: The DTensor. Gradients of the result come back to it.
        grad_placements: How these are to lie; as `tensor` is labelled when None.
    """
    if is_off_mesh(tensor._spec.mesh):
        return empty_local(tensor.shape, tensor.dtype)
    placements = tensor._spec.placements if grad_placements is None else grad_placements
    placements = tuple(Replicate() if p.is_partial() else p for p in placements)
    return _ToPlain.apply(tensor, placements)  # pyright: ignore[reportReturnType]


class _ToPlain(LinearResult):
    @staticmethod
    def forward(ctx: Any, source: DTensor, grad_placements: Any) -> torch.Tensor:
        ctx.state = source._spec.moved(source._spec.mesh, grad_placements)
        ctx.kind = type(source)
        return functional_ops.to_plain(source._local_tensor)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        if hasattr(grad, "_spec"):  # of a sum of the plain tensor and a DTensor
            return grad.redistribute(ctx.state.mesh, ctx.state.placements), None
        return _FromPlain.apply(grad, ctx.state, ctx.kind), None


class _FromPlain(LinearResult):
    """The way back of `_ToPlain`: a plain tensor of the runtime as a DTensor."""

    @staticmethod
    def forward(ctx: Any, plain: torch.Tensor, state: Any, kind: Any) -> DTensor:
        ctx.placements = state.placements
        # Where no gradient arrives PyTorch makes zeros itself, on the host.
        runtime = get_runtime()
        is_host = type(plain) is torch.Tensor and not runtime.is_payload(plain)
        place = runtime.put if is_host else functional_ops.constrain
        payload = place(plain, state.span_layout)
        made = state_of(payload, state.mesh, state.placements, state.known)
        return new_dtensor(kind, payload, made)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return _ToPlain.apply(grad, ctx.placements), None, None
