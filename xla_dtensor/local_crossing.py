"""to_local and from_local: the border between DTensors and LocalViews, differentiable.

Gradients follow PyTorch's rules, placement by placement:

* ``to_local``: the gradient comes back as `grad_placements` say, else as the tensor lay. Where that
  is Replicate, each device's gradient is taken for the whole one. Devices whose gradients differ
  there are parts of a sum that nobody has told of: that raises, and asks for
  ``grad_placements=[Partial()]``. (PyTorch goes on with each rank's own part.)
* ``from_local``: each device gets its shard of the gradient. Of a sum each part gets the whole
  gradient, of a mean its share, of a maximum those that hold it, of a product that of the others.
  With run_check the devices whose values were not taken get zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import Replicate

from xla_dtensor.collectives import all_gather, axis_index, pmax, pmin, psum
from xla_dtensor.core import Layout
from xla_dtensor.core.spanning import layout_on_span
from xla_dtensor.device_mesh import DeviceMesh, mesh_text
from xla_dtensor.dispatch import new_dtensor, state_of
from xla_dtensor.errors import DistributeError, LocalViewError, UnsupportedOpError
from xla_dtensor.known_axes import Known
from xla_dtensor.local_border import Border, border
from xla_dtensor.local_link import Link
from xla_dtensor.local_spread import same_on_all
from xla_dtensor.local_view import LocalView
from xla_dtensor.off_mesh import empty_local, is_off_mesh
from xla_dtensor.runtimes import functional_ops
from xla_dtensor.runtimes.functional_local import crossed_in, crossed_out, run_local_op
from xla_dtensor.runtimes.registry import get_runtime
from xla_dtensor.runtimes.whole_autograd import LinearResult, has_tangent
from xla_dtensor.strided_labels import same_placements
from xla_dtensor.written_bases import tell_known

if TYPE_CHECKING:
    from xla_dtensor.dtensor import DTensor

__all__ = ["from_view", "to_view"]

aten = torch.ops.aten


def to_view(tensor: DTensor, grad_placements: Sequence[Any] | None) -> LocalView:
    """Return the local view of a DTensor; see ``DTensor.to_local``."""
    if is_off_mesh(tensor._spec.mesh):
        empty: Any = empty_local(tensor.shape, tensor.dtype)
        return empty
    if _is_differentiated(tensor):
        return _ToLocal.apply(tensor, grad_placements)  # pyright: ignore[reportReturnType]
    return _linked(tensor)


def _is_differentiated(tensor: torch.Tensor) -> bool:
    is_recorded = tensor.requires_grad and torch.is_grad_enabled()
    return is_recorded or has_tangent(tensor)


def _linked(tensor: DTensor) -> LocalView:
    at = _border_of(tensor)
    # The link goes to the memory, which assigning x.data takes away from x.
    source: Any = tensor.detach()
    tell_known(source)
    link = Link(
        source,
        lambda: crossed_in(source._local_tensor, at),
        lambda local: crossed_out(local, at),
        at.replicated,
    )
    # Another object on the same memory: t_() and the like change the shape of this one only.
    payload = run_local_op(aten.detach.default, (link.memory,), {})
    known = tensor._spec.known
    return LocalView(
        payload, at.region, varying=at.varying, uneven=at.uneven, link=link, known=known
    )


def from_view(
    view: LocalView,
    mesh: DeviceMesh,
    placements: tuple[Any, ...],
    shape: Sequence[int] | None,
    run_check: bool,
    grad_placements: tuple[Any, ...] | None = None,
) -> DTensor:
    """Return the DTensor of which `view` is the local tensor; see ``DTensor.from_local``."""
    layout = Layout.from_placements(placements, view.ndim, mesh.value)
    whole = _global_shape(view, layout) if shape is None else tuple(shape)
    at = border(layout, whole)
    _check_fits(view, at, mesh)
    differ = at.replicated & view.varying
    whole_numbers = not (view.dtype.is_floating_point or view.dtype.is_complex)
    if whole_numbers and any(op == "avg" for _, op in layout.partial):
        raise DistributeError(
            f"from_local was called with placements={placements} on a local view of dtype="
            f"{view.dtype}. The mean of whole numbers is none. Pass Partial('sum'), or convert the "
            "view to a floating-point dtype."
        )
    if differ and not run_check:
        raise LocalViewError(
            f"from_local was called with placements={placements} on a local view whose values may "
            f"differ along {sorted(map(str, differ))}. Replicate says that they are equal there. "
            "Pass Partial() if they are parts of a sum, reduce them first, or pass run_check=True "
            "to take the first device's."
        )
    same = _first_along(view, differ)
    if _is_differentiated(same):
        same = _reduced_first(same, layout.partial)
    return _FromLocal.apply(same, mesh, placements, at, grad_placements)  # pyright: ignore


def _border_of(tensor: DTensor) -> Border:
    return border(tensor._spec.layout, tuple(map(int, tensor.shape)))


def _global_shape(view: LocalView, layout: Layout) -> tuple[int, ...]:
    """Return what the shards make up: PyTorch's rule, and the real sizes of uneven ones."""
    shape = list(layout.get_global_shape(tuple(view.shape)))
    if view._uneven is not None:
        region = view.region
        for dim, sizes in view._uneven.sizes_on(region).items():
            cut = border(layout, tuple(shape)).dims[dim].axes
            alike = tuple(0 if axis not in cut else slice(None) for axis in region.axes)
            shape[dim] = int(sizes[alike].sum())
    return tuple(shape)


def _check_fits(view: LocalView, at: Border, mesh: DeviceMesh) -> None:
    if view.region != at.region:
        raise LocalViewError(
            f"from_local was called with the mesh {mesh_text(mesh.value)} on a local view over the "
            f"axes {view.region.axes} of the mesh {mesh_text(view.region.mesh)}. Its devices have "
            "their parts along those axes. Pass the mesh that the view comes from."
        )
    if tuple(view.shape) != at.local_shape:
        raise LocalViewError(
            f"from_local was called with shape={at.shape} and layout {at.layout} on a local view "
            f"of local shape={tuple(view.shape)}. The first device's part of that is "
            f"{at.local_shape}. Pass the global shape that the shards make up."
        )
    if view._uneven is not None and view._uneven != at.uneven:
        raise LocalViewError(
            f"from_local was called with shape={at.shape} and layout {at.layout} on an uneven "
            f"local view with the sizes {view._uneven.sizes}. The shards of that tensor have the "
            f"sizes {at.uneven and at.uneven.sizes}. Pass the placements and the shape that the "
            "view was cut with."
        )


def _constrained(payload: torch.Tensor, layout: Layout, known: Known) -> torch.Tensor:
    """Tell XLA how a joined payload is to lie; a reduction that was just made stays its own."""
    if layout.partial:
        Layout(layout.mesh, layout.dims).op_sharding()  # refuses gaps
        return payload
    return functional_ops.constrain(payload, layout_on_span(layout, known))


class _ToLocal(LinearResult):
    @staticmethod
    def forward(ctx: Any, tensor: DTensor, grad_placements: Any) -> Any:
        ctx.at, ctx.mesh = _border_of(tensor), tensor._spec.mesh
        ctx.placements = grad_placements
        ctx.forward_placements = tensor._spec.placements
        return _linked(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        placements, given = ctx.placements, ctx.at.layout.partial
        if placements is None:
            placements = tuple(Replicate() if p.is_partial() else p for p in ctx.forward_placements)
            # The first device had the value, the others zeros or ones that are nobody's.
            first_only = {axis for axis, op in given if op in ("sum", "product")}
        else:
            first_only = set()
        layout = Layout.from_placements(placements, grad.ndim, ctx.mesh.value)
        at = border(layout, ctx.at.shape)
        if not isinstance(grad, LocalView):
            grad = same_on_all(grad, ctx.at.region)
        if tuple(grad.shape) != at.local_shape:
            raise LocalViewError(
                f"The gradient of a to_local() of shape={ctx.at.shape} has the local shape "
                f"{tuple(grad.shape)}, and under its grad_placements={placements} a shard has the "
                f"shape {at.local_shape}. Pass grad_placements of which that is a shard."
            )
        differ = at.replicated & grad.varying
        if differ - first_only:
            raise LocalViewError(
                f"The gradient of a to_local() of shape={ctx.at.shape} may differ along "
                f"{sorted(map(str, differ - first_only))}, where its placements {placements} say "
                "Replicate. Each device has only a part of it there. Pass "
                "to_local(grad_placements=...) with Partial() for these axes."
            )
        grad = _first_along(grad, differ)
        return _FromLocal.apply(grad, ctx.mesh, tuple(placements), at, None), None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        if get_runtime().name == "torch_xla":
            raise UnsupportedOpError(
                "A forward derivative (forward_ad, jvp) was asked for through to_local() on "
                "torch_xla, which runs some derivatives of local tensors on no device. Take it in "
                "reverse mode, of the DTensor, or on the JAX runtime."
            )
        tangent, placements = tangents[0], ctx.forward_placements
        if not same_placements(tangent._spec.placements, placements):
            tangent = tangent.redistribute(ctx.mesh, placements)
        return _ToLocal.apply(tangent, ctx.placements)


class _FromLocal(LinearResult):
    @staticmethod
    def forward(
        ctx: Any, view: LocalView, mesh: DeviceMesh, placements: Any, at: Border, for_grad: Any
    ) -> Any:
        from xla_dtensor.dtensor import DTensor

        ctx.at, ctx.mesh, ctx.placements, ctx.varying = at, mesh, placements, view.varying
        ctx.for_grad = for_grad
        payload = _constrained(crossed_out(view._payload, at), at.layout, view._known)
        return new_dtensor(DTensor, payload, state_of(payload, mesh, placements, view._known))

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        from xla_dtensor.api import distribute_tensor

        target = tuple(Replicate() if p.is_partial() else p for p in ctx.placements)
        target = ctx.for_grad or target
        if not hasattr(grad, "_spec"):
            grad = distribute_tensor(grad, ctx.mesh, target)
        if grad._spec.mesh != ctx.mesh or not same_placements(grad._spec.placements, target):
            grad = grad.redistribute(ctx.mesh, target)
        view: Any = _ToLocal.apply(grad, None)
        for axis, op in ctx.at.layout.partial:
            if op == "avg":
                view = view / ctx.mesh.value.size(axis)
        # Each is the gradient of the device's own part, also where all are equal.
        return view._labelled(ctx.varying), None, None, None, None


def _reduced_first(view: LocalView, partial: Sequence[tuple[Any, str]]) -> LocalView:
    """Make the reductions whose gradient is not the same for every part."""
    for axis, op in partial:
        if op in ("max", "min"):
            # Each device's tensor is a part of its own: equal ones share the gradient.
            own = view._labelled(view.varying | {axis})
            view = pmax(own, axis) if op == "max" else pmin(own, axis)  # pyright: ignore
        elif op == "product":
            own = axis_index(view, axis) == 0
            # Not prod(0): PyTorch looks for zeros to choose how to differentiate that.
            whole = reduce(torch.mul, all_gather(view.unsqueeze(0), axis).unbind(0))
            view = torch.where(own, whole, 1.0)  # pyright: ignore
    return view


def _first_along(view: Any, axes: Any) -> Any:
    """Return the view with the first device's values on all devices along `axes`."""
    asked, dtype = view.dtype, torch.uint8 if view.dtype == torch.bool else view.dtype
    view = view.to(dtype) if axes else view
    for axis in axes:
        zero = torch.zeros((), dtype=dtype)
        view = psum(torch.where(axis_index(view, axis) == 0, view, zero), axis)
    return view.to(asked)
