"""How fully_shard lays parameters, and lends them whole to a module's forward.

Outside of forward a parameter is a DTensor, sharded over the mesh's last axis; so are its gradient
and the optimizer's state. For a forward it is *gathered*: cast to the compute dtype, then told to
be Replicate over that mesh. In global view that is one constraint, and its gradient is another,
which XLA turns into an all-gather and a reduce-scatter::

    weight        (dp=8): [Shard(0)]                  float32
    gathered      cast to bfloat16, replicated         what ``module.weight`` is during forward
    its gradient  cast to reduce_dtype, [Shard(0)]     what ``module.weight.grad`` becomes

A parameter that tensor parallelism has put on ``mesh["tp"]`` gets the data-parallel axis beside it:
its gathered form is a DTensor on ``mesh["tp"]`` again. Where both cut one dim, tp's cut is the
outer one, a strided placement for dp.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from xla_dtensor.api import distribute_tensor
from xla_dtensor.core import Layout
from xla_dtensor.core.spanning import layout_on_span, region_of, spanning_mesh
from xla_dtensor.device_mesh import DeviceMesh, as_device_mesh, mesh_text
from xla_dtensor.dtensor import DTensor
from xla_dtensor.errors import DistributeError
from xla_dtensor.local_border import border
from xla_dtensor.local_spread import spread_payload
from xla_dtensor.local_view import LocalView
from xla_dtensor.runtimes import functional_ops
from xla_dtensor.runtimes.registry import get_runtime

__all__ = ["Settings", "ShardedParameter", "lent_unreduced", "shard_parameter"]

aten = torch.ops.aten


@dataclass
class Settings:
    """What the methods of an FSDPModule change.

    Args:
        mesh: One axis to shard over, or (replicate, shard).
        param_dtype: Dtype of the gathered parameters; None for their own.
        reduce_dtype: Dtype in which gradients are reduced; None for that of the computation.
        reshard_after_forward: Whether the backward gathers again.
        sync: Whether gradients are reduced.
        divide_by: What gradients are divided by; None: nothing, as the loss is the global one.
    """

    mesh: DeviceMesh
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    reshard_after_forward: bool = True
    sync: bool = True
    divide_by: float | None = None


@dataclass(eq=False)
class ShardedParameter:
    """One parameter, in all places of the module tree that share it.

    Args:
        places: (module, name) pairs.
        parameter: The sharded parameter.
        settings: Those of the module that it was sharded with.
        inner: Its mesh without the axes of fully_shard, None if it had none.
        pending: Unreduced gradients of microbatches without a sync, one per device.
    """

    places: list[tuple[nn.Module, str]]
    parameter: nn.Parameter
    settings: Settings
    inner: DeviceMesh | None
    pending: LocalView | None = None
    gathered: torch.Tensor | None = field(default=None, repr=False)

    @property
    def state(self) -> Any:
        """The DTensor's state."""
        tensor: Any = self.parameter
        return tensor._spec

    def lend(self, make: Callable[[], torch.Tensor]) -> None:
        """Let the modules see a gathered form in place of the parameter."""
        if self.gathered is None:
            self.gathered = make()
        for module, name in self.places:
            module._parameters[name] = self.gathered  # pyright: ignore[reportArgumentType]

    def take_back(self) -> None:
        """Let the modules see the sharded parameter again."""
        self.gathered = None
        for module, name in self.places:
            module._parameters[name] = self.parameter

    def whole(self) -> torch.Tensor:
        """Return the gathered form, differentiably."""
        return _Gather.apply(self.parameter, self)  # pyright: ignore[reportReturnType]

    def gathered_again(self) -> torch.Tensor:
        """Return the gathered form for a backward, without history: another gather for XLA."""
        runtime, tensor = get_runtime(), self.parameter
        payload: Any = tensor
        sharded = runtime.run_op(aten.clone.default, (payload._local_tensor,), {})
        runtime.barrier([sharded])
        with torch.no_grad():
            return self.wrapped(self.gathered_payload(sharded))

    def gathered_payload(self, payload: torch.Tensor | None = None) -> torch.Tensor:
        """Return the payload of the gathered form, cast before it is moved."""
        tensor: Any = self.parameter
        whole: Any = tensor._local_tensor if payload is None else payload
        dtype = self.settings.param_dtype
        if dtype is not None and whole.dtype != dtype and whole.is_floating_point():
            whole = get_runtime().run_op(aten._to_copy.default, (whole,), {"dtype": dtype})
        return functional_ops.constrain(whole, self._gathered_layout())

    def _gathered_layout(self) -> Layout:
        state, own = self.state, set(self.settings.mesh.value.axis_names)
        kept = tuple(
            Replicate() if axis in own else placement
            for axis, placement in zip(state.mesh.value.axis_names, state.placements, strict=True)
        )
        return layout_on_span(Layout.from_placements(kept, len(state.shape), state.mesh.value))

    def wrapped(self, payload: torch.Tensor) -> torch.Tensor:
        """Return a gathered payload as the modules are to see it."""
        if self.inner is None:
            return functional_ops.to_plain(payload)
        return DTensor._wrapping(payload, self.inner, self.inner_placements())

    def inner_placements(self) -> tuple[Any, ...]:
        """The placements that the parameter had before fully_shard."""
        assert self.inner is not None
        on = dict(zip(self.state.mesh.value.axis_names, self.state.placements, strict=True))
        return tuple(on[axis] for axis in self.inner.value.axis_names)

    def sharded_gradient(self, payload: torch.Tensor) -> DTensor:
        """Return a whole gradient as the parameter's: cast, divided, sharded."""
        run, settings, state = get_runtime().run_op, self.settings, self.state
        dtype = settings.reduce_dtype
        if dtype is not None and payload.dtype != dtype:
            payload = run(aten._to_copy.default, (payload,), {"dtype": dtype})
        payload = functional_ops.constrain(payload, state.span_layout)
        if settings.divide_by is not None:
            payload = run(aten.div.Scalar, (payload, settings.divide_by), {})
        if payload.dtype != self.parameter.dtype:
            wanted = {"dtype": self.parameter.dtype}
            payload = run(aten._to_copy.default, (payload,), wanted)
        return DTensor._wrapping(payload, state.mesh, state.placements, known=state.known)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Any, owner: ShardedParameter) -> torch.Tensor:
        ctx.owner = owner
        return owner.wrapped(owner.gathered_payload())

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        owner: ShardedParameter = ctx.owner
        total = owner.sharded_gradient(getattr(grad, "_local_tensor", grad))
        return _with_pending(total, owner), None


def _with_pending(total: DTensor, owner: ShardedParameter) -> DTensor:
    """Add what microbatches without a sync have left."""
    if owner.pending is None:
        return total
    pending: Any = owner.pending
    owner.pending = None
    return total + owner.sharded_gradient(_mean(pending))  # pyright: ignore[reportReturnType]


def _mean(view: LocalView) -> torch.Tensor:
    """Return the mean over all devices of a region, as a payload: one reduction."""
    mesh = as_device_mesh(view.region.mesh[view.region.axes])
    layout = Layout(mesh.value, ((),) * view.ndim, tuple((a, "avg") for a in view.region.axes))
    return border(layout, tuple(view.shape)).joined(view._payload)


def lent_unreduced(owner: ShardedParameter, reduce: bool) -> LocalView:
    """Return the gathered parameter as a LocalView, with a gradient per device.

    Args:
        owner: The parameter.
        reduce: Whether the backward averages the gradients, with those that were left before, or
            leaves them on each device.
    """
    return _LendUnreduced.apply(owner.parameter, owner, reduce)  # pyright: ignore[reportReturnType]


class _LendUnreduced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Any, owner: ShardedParameter, reduce: bool) -> LocalView:
        ctx.owner, ctx.reduce = owner, reduce
        region = region_of(owner.settings.mesh.value)
        payload = spread_payload(owner.gathered_payload(), region)
        return LocalView(payload, region, varying=frozenset())

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        owner: ShardedParameter = ctx.owner
        total = grad if owner.pending is None else owner.pending + grad
        owner.pending = None if ctx.reduce else total
        return owner.sharded_gradient(_mean(total)) if ctx.reduce else None, None, None


def shard_parameter(
    parameter: nn.Parameter, settings: Settings, dim: int | None
) -> tuple[nn.Parameter, DeviceMesh | None]:
    """Shard one parameter over the last axis of the mesh.

    Args:
        parameter: A plain parameter, or a DTensor on other axes of the same devices.
        settings: Whose mesh to shard over.
        dim: Which dim to cut; 0 when None.

    Returns:
        The sharded parameter, and the mesh that it was on before.
    """
    mesh = settings.mesh
    cut = (0 if dim is None else dim % parameter.ndim) if parameter.ndim else None
    own: list[Any] = [Replicate()] * (mesh.ndim - 1)
    own.append(Replicate() if cut is None else Shard(cut))
    if not isinstance(parameter.data, DTensor):
        made = distribute_tensor(parameter.detach(), mesh, own)
        return nn.Parameter(made, parameter.requires_grad), None
    tensor: Any = parameter
    before = tensor._spec
    span = spanning_mesh(mesh.value)
    if spanning_mesh(before.mesh.value) != span or set(before.mesh.value.axis_names) & set(
        mesh.value.axis_names
    ):
        raise DistributeError(
            f"fully_shard was called with the mesh {mesh_text(mesh.value)} on a parameter that "
            f"lies on {mesh_text(before.mesh.value)}. It needs axes of its own, of one root mesh. "
            "Make one mesh with all axes and pass mesh['dp'] here and mesh['tp'] to "
            "parallelize_module."
        )
    names = {*mesh.value.axis_names, *before.mesh.value.axis_names}
    joint = as_device_mesh(span[tuple(axis for axis in span.axis_names if axis in names)])
    on = dict(zip(before.mesh.value.axis_names, before.placements, strict=True))
    on |= dict(zip(mesh.value.axis_names, own, strict=True))
    placements = _beside(on, joint, mesh.value.axis_names[-1], cut)
    made = tensor.detach().redistribute(joint, placements)
    return nn.Parameter(made, parameter.requires_grad), before.mesh


def _beside(on: dict[Any, Any], joint: DeviceMesh, axis: Any, cut: int | None) -> list[Any]:
    """Return placements on the joint mesh; axes right of `axis` that cut the same dim go outside.

    That is what torch's fully_shard does, so that the data-parallel shards lie within tp's.
    """
    names = joint.value.axis_names
    factor = 1
    for other in names[names.index(axis) + 1 :]:
        if isinstance(on[other], Shard) and on[other].dim == cut:
            factor *= joint.value.size(other)
    if factor > 1:
        assert cut is not None
        on[axis] = _StridedShard(cut, split_factor=factor)
    return [on[name] for name in names]
