"""How fully_shard lays parameters, and lends them whole to a module's forward.

Outside of forward a parameter is a DTensor, sharded over the mesh's last axis; so are its
gradient and the optimizer's state. For a forward it is *gathered*: cast to the compute dtype,
then told to be Replicate over that mesh. In global view that is one constraint, and its gradient
is another, which XLA turns into an all-gather and a reduce-scatter::

    weight        float32, [Shard(0)]       between the steps
    gathered      bfloat16, [Replicate()]   what ``module.weight`` is during forward
    its gradient  reduce_dtype, [Shard(0)]  what ``module.weight.grad`` becomes

A parameter that tensor parallelism has put on ``mesh["tp"]`` gets the data-parallel axis beside
it: its gathered form is a DTensor on ``mesh["tp"]`` again. Where both cut one dim, tp's cut is
the outer one, a strided placement for dp.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from xla_dtensor.core import Layout
from xla_dtensor.core.errors import DistributeError
from xla_dtensor.core.spanning import joint_mesh, layout_on_span, region_of
from xla_dtensor.dtensor.api import distribute_tensor, parameter_in_place_of
from xla_dtensor.dtensor.dtensor import DTensor
from xla_dtensor.dtensor.groups import as_view, grouped
from xla_dtensor.dtensor.labels import OuterCuts
from xla_dtensor.dtensor.local import LocalView
from xla_dtensor.dtensor.local_border import border_of, spread_payload
from xla_dtensor.dtensor.mesh import DeviceMesh, as_device_mesh, mesh_text
from xla_dtensor.dtensor.redistribute import redistribute_marker
from xla_dtensor.runtimes import functional
from xla_dtensor.runtimes.guards.libraries import guarded
from xla_dtensor.runtimes.registry import get_runtime
from xla_dtensor.runtimes.whole_ops import OneResult, refuse_second

__all__ = [
    "Settings",
    "ShardedParameter",
    "data_parallel_part",
    "lent_unreduced",
    "shard_parameter",
]

aten = torch.ops.aten


# ----------------------------------------------------------- Which axes of a mesh fully_shard uses
#
# All, or those that ``dp_mesh_dims`` names.
#
# ``fully_shard(module, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))`` is for
# parameters that are DTensors on all axes of `mesh` already, Replicate along the data-parallel
# ones. In the module's forward they are so again, beside activations on all axes.


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
    device_mesh = as_device_mesh(mesh)
    if len(dims.shard_names) != 1 or len(dims.replicate_names) > 1:
        raise DistributeError(
            f"fully_shard was called with dp_mesh_dims={dims} on the mesh "
            f"{mesh_text(device_mesh.value)}. Parameters are sharded over one axis, and copied "
            "along one at most. Name one axis each, and merge axes where the mesh is made."
        )
    return device_mesh[(*dims.replicate_names, *dims.shard_names)]


def check_replicated(state: Any, mesh: DeviceMesh) -> None:
    """Refuse a parameter that is cut along fully_shard's own axes before it comes there."""
    by_axis = dict(zip(state.mesh.value.axis_names, state.placements, strict=True))
    cut = {axis: by_axis[axis] for axis in mesh.value.axis_names if by_axis[axis] != Replicate()}
    if cut:
        raise DistributeError(
            f"fully_shard was called with dp_mesh_dims on a parameter that has the placements "
            f"{cut} along them. They are the axes that fully_shard itself cuts or sums over. Pass "
            "parameters that are Replicate() there."
        )


def summed_over(state: Any, mesh: DeviceMesh) -> tuple[Any, ...]:
    """Return how the gradient of a gathered parameter's ``to_local()`` lies.

    Each device computes with rows of its own, and has a part of the gradient.
    """
    axes = {*mesh.value.axis_names}
    pairs = zip(state.mesh.value.axis_names, state.placements, strict=True)
    return tuple(Partial() if axis in axes else placement for axis, placement in pairs)


# ------------------------------------------------------------------------------ The parameters


@guarded("sync", "factor")  # what else can change alters no value
@dataclass
class Settings:
    """What the methods of an FSDPModule change.

    Args:
        mesh: One axis to shard over, or (replicate, shard).
        param_dtype: Dtype of the gathered parameters; None for their own.
        reduce_dtype: Dtype in which gradients are reduced; None for that of the computation.
        reshard_after_forward: Whether the backward gathers again.
        sync: Whether gradients are reduced.
        full_mesh: The mesh of all axes that parameters lie on already, `mesh` among them; None:
            they lie on other axes only.
        factor: What the sum of the devices' gradients is divided by; their number when None.
    """

    mesh: DeviceMesh
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    reshard_after_forward: bool = True
    sync: bool = True
    full_mesh: DeviceMesh | None = None
    factor: float | None = None

    def divide_by(self, per_device: bool) -> float | None:
        """Return what gradients are divided by; None: nothing.

        A factor of 1 is how programs turn the division off whose loss is a sum over the batch,
        divided by what it counts in all. Such a loss needs none here either.

        Args:
            per_device: Whether each device has a loss of its own, and not all of them one.
        """
        if self.factor is None or (self.factor == 1 and not per_device):
            return None
        return self.factor / self.mesh.value.size()


@guarded("settings", "pending")
@dataclass(eq=False)
class ShardedParameter:
    """One parameter, in all places of the module tree that share it.

    Args:
        places: (module, name) pairs.
        parameter: The sharded parameter.
        settings: Those of the module that it was sharded with.
        inner: Its mesh without the axes of fully_shard, None if it had none.
        pending: Unreduced gradients of microbatches without a sync, one per device.
        gathered: What the modules see in place of it at present.
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

    def adopt(self) -> list[ShardedParameter]:
        """Take what the modules have been given in its place, by assign=True or by tying.

        Returns:
            Another one for each parameter that some of its places were given alone.

        Raises:
            DistributeError: A parameter that does not lie on its mesh.
        """
        parameters: dict[int, nn.Parameter] = {}
        places: dict[int, list[tuple[nn.Module, str]]] = {}
        for module, name in self.places:
            parameter = module._parameters.get(name)
            if parameter is not None:
                parameter = self.parameter if parameter is self.gathered else parameter
                parameters[id(parameter)] = parameter
                places.setdefault(id(parameter), []).append((module, name))
        if places == {id(self.parameter): self.places}:
            return []
        for key, parameter in parameters.items():
            self._check_lies_alike(parameter, *places[key][0])
        self.gathered, self.places = None, []
        untied: list[ShardedParameter] = []
        for key, parameter in parameters.items():
            if not self.places:
                self.parameter, self.places = parameter, places[key]
            else:
                untied.append(ShardedParameter(places[key], parameter, self.settings, self.inner))
        return untied

    def _check_lies_alike(self, parameter: Any, module: nn.Module, name: str) -> None:
        mesh = self.state.mesh
        if getattr(getattr(parameter, "_spec", None), "mesh", None) == mesh:
            return
        raise DistributeError(
            f"{type(module).__name__}.{name}, which fully_shard manages, was given a parameter of "
            f"shape={tuple(parameter.shape)} that does not lie on {mesh_text(mesh.value)}. Its "
            "gradient and the optimizer's state would lie elsewhere. Load without assign=True, or "
            f"pass distribute_tensor(tensor, mesh, {list(self.state.placements)}) of it."
        )

    def lend(self, make: Callable[[], torch.Tensor]) -> None:
        """Let the modules see a gathered form in place of the parameter."""
        lacks_history = (  # unshard() gathered it under no_grad
            self.gathered is not None
            and not self.gathered.requires_grad
            and self.parameter.requires_grad
            and torch.is_grad_enabled()
        )
        if self.gathered is None or lacks_history:
            self.gathered = make()
        for module, name in self.places:
            module._parameters[name] = self.gathered  # pyright: ignore[reportArgumentType]

    def take_back(self) -> None:
        """Let the modules see the sharded parameter again."""
        self.gathered = None
        for module, name in self.places:
            module._parameters[name] = self.parameter

    def gather(self, went_back: Callable[[], None]) -> torch.Tensor:
        """Return the gathered form, differentiably.

        Args:
            went_back: Called when the gradient has been computed.
        """
        return _Gather.apply(self.parameter, self, went_back)  # pyright: ignore[reportReturnType]

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
        source: Any = tensor._local_tensor if payload is None else payload
        dtype = self.settings.param_dtype
        if dtype is not None and source.dtype != dtype and source.is_floating_point():
            source = get_runtime().run_op(aten._to_copy.default, (source,), {"dtype": dtype})
        with redistribute_marker():
            return functional.constrain(source, self._gathered_layout())

    def _gathered_layout(self) -> Layout:
        state, axes = self.state, set(self.settings.mesh.value.axis_names)
        placements = tuple(
            Replicate() if axis in axes else placement
            for axis, placement in zip(state.mesh.value.axis_names, state.placements, strict=True)
        )
        layout = Layout.from_placements(placements, len(state.shape), state.mesh.value)
        return layout_on_span(layout)

    def wrapped(self, payload: torch.Tensor) -> torch.Tensor:
        """Return a gathered payload as the modules are to see it."""
        if self.inner is None:
            return functional.to_plain(payload)
        tensor = DTensor._wrapping(payload, self.inner, self.inner_placements())
        if self.settings.full_mesh is not None:
            tensor._gradient_placements = summed_over(tensor._spec, self.settings.mesh)
        return tensor

    def inner_placements(self) -> tuple[Any, ...]:
        """The placements that the parameter had before fully_shard."""
        assert self.inner is not None
        by_axis = dict(zip(self.state.mesh.value.axis_names, self.state.placements, strict=True))
        by_axis |= dict.fromkeys(self.settings.mesh.value.axis_names, Replicate())
        return tuple(by_axis[axis] for axis in self.inner.value.axis_names)

    def inner_cuts(self) -> OuterCuts:
        """The axes of that mesh that cut the parameter, each with the dim."""
        if self.inner is None:
            return ()
        pairs = zip(self.inner.value.axis_names, self.inner_placements(), strict=True)
        return tuple((axis, p.dim) for axis, p in pairs if type(p) is Shard)

    def reduce_pending(self) -> None:
        """Add to the parameter's gradient what microbatches without a sync have left."""
        parameter: Any = self.parameter
        if self.pending is None or not parameter.requires_grad:
            return
        with torch.no_grad():
            total = self.sharded_gradient(_mean(self.pending), per_device=True)
            self.pending = None
            parameter.grad = total if parameter.grad is None else parameter.grad + total

    def sharded_gradient(self, payload: torch.Tensor, per_device: bool = False) -> DTensor:
        """Return a whole gradient as the parameter's: cast, divided, sharded.

        Args:
            payload: The gradient, or the mean of the devices' own.
            per_device: Whether it is such a mean.
        """
        run, settings, state = get_runtime().run_op, self.settings, self.state
        dtype = settings.reduce_dtype
        if dtype is not None and payload.dtype != dtype:
            payload = run(aten._to_copy.default, (payload,), {"dtype": dtype})
        with redistribute_marker():
            payload = functional.constrain(payload, state.span_layout)
        divide_by = settings.divide_by(per_device)
        if divide_by is not None:
            payload = run(aten.div.Scalar, (payload, divide_by), {})
        if payload.dtype != self.parameter.dtype:
            options = {"dtype": self.parameter.dtype}
            payload = run(aten._to_copy.default, (payload,), options)
        return DTensor._wrapping(payload, state.mesh, state.placements, outer_cuts=state.outer_cuts)


class _Gather(OneResult):
    @staticmethod
    def forward(
        ctx: Any, parameter: Any, owner: ShardedParameter, went_back: Callable[[], None]
    ) -> torch.Tensor:
        ctx.owner, ctx.went_back = owner, went_back
        return owner.wrapped(owner.gathered_payload())

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        owner: ShardedParameter = ctx.owner
        ctx.went_back()
        total = owner.sharded_gradient(getattr(grad, "_local_tensor", grad))
        total = _with_pending(total, owner)
        grads = refuse_second("the parameters of fully_shard", [owner.parameter], total)
        return *grads, None, None


def _with_pending(total: DTensor, owner: ShardedParameter) -> DTensor:
    """Add what microbatches without a sync have left."""
    if owner.pending is None:
        return total
    pending: Any = owner.pending
    owner.pending = None
    return total + owner.sharded_gradient(_mean(pending), per_device=True)  # pyright: ignore[reportReturnType]


def _mean(view: LocalView) -> torch.Tensor:
    """Return the mean over all devices of a region, as a payload: one reduction."""
    mesh = as_device_mesh(view.region.mesh[view.region.axes])
    layout = Layout(mesh.value, ((),) * view.ndim, tuple((a, "avg") for a in view.region.axes))
    return border_of(layout, tuple(view.shape)).joined(view._payload)


def lent_unreduced(
    owner: ShardedParameter, reduce: bool, went_back: Callable[[], None]
) -> torch.Tensor:
    """Return the gathered parameter with a gradient per device of fully_shard's mesh.

    A LocalView, or a GroupDTensor where the parameter was on another mesh before.

    Args:
        owner: The parameter.
        reduce: Whether the backward averages the gradients, with those that were left before, or
            leaves them on each device.
        went_back: Called when the gradient has been computed.
    """
    view: Any = _LendUnreduced.apply(owner.parameter, owner, reduce, went_back)
    return view if owner.inner is None else grouped(view, owner.inner, owner.inner_placements())


class _LendUnreduced(OneResult):
    @staticmethod
    def forward(
        ctx: Any,
        parameter: Any,
        owner: ShardedParameter,
        reduce: bool,
        went_back: Callable[[], None],
    ) -> LocalView:
        ctx.owner, ctx.reduce, ctx.went_back = owner, reduce, went_back
        region = region_of(owner.settings.mesh.value)
        payload = spread_payload(owner.gathered_payload(), region)
        return LocalView(payload, region, varying=frozenset(), outer_cuts=owner.inner_cuts())

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        owner: ShardedParameter = ctx.owner
        ctx.went_back()
        if owner.inner is not None:  # each device's lies as the parameter does on the other axes
            placements = owner.inner_placements()
            grad = grouped(grad, owner.inner, placements).redistribute(placements=placements)
            grad = as_view(grad)
        if owner.settings.reduce_dtype is not None:  # microbatches add up in it, too
            grad = grad.to(owner.settings.reduce_dtype)
        total = grad if owner.pending is None else owner.pending + grad
        owner.pending = None if ctx.reduce else total
        gradient = owner.sharded_gradient(_mean(total), per_device=True) if ctx.reduce else None
        grads = refuse_second("the parameters of fully_shard", [owner.parameter], gradient)
        return *grads, None, None, None


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
    own_placements: list[Any] = [Replicate()] * (mesh.ndim - 1)
    own_placements.append(Replicate() if cut is None else Shard(cut))
    if not isinstance(parameter.data, DTensor):
        sharded = distribute_tensor(parameter.detach(), mesh, own_placements)
        return parameter_in_place_of(parameter, sharded), None
    tensor: Any = parameter
    state = tensor._spec
    joint_value = joint_mesh(mesh.value, state.mesh.value)
    if state.mesh == settings.full_mesh:
        check_replicated(state, mesh)
        joint_value = state.mesh.value
    if joint_value is None:
        raise DistributeError(
            f"fully_shard was called with the mesh {mesh_text(mesh.value)} on a parameter that "
            f"lies on {mesh_text(state.mesh.value)}. It needs axes of its own, of one root mesh. "
            "Make one mesh with all axes and pass mesh['dp'] here and mesh['tp'] to "
            "parallelize_module."
        )
    joint = as_device_mesh(joint_value)
    by_axis = dict(zip(state.mesh.value.axis_names, state.placements, strict=True))
    by_axis |= dict(zip(mesh.value.axis_names, own_placements, strict=True))
    placements = _joined_placements(by_axis, joint, mesh.value.axis_names[-1], cut)
    sharded = tensor.detach().redistribute(joint, placements)
    return parameter_in_place_of(parameter, sharded), state.mesh


def _joined_placements(
    by_axis: dict[Any, Any], joint: DeviceMesh, axis: Any, cut: int | None
) -> list[Any]:
    """Return placements on the joint mesh; axes right of `axis` that cut the same dim go outside.

    That is what torch's fully_shard does, so that the data-parallel shards lie within tp's.
    """
    names = joint.value.axis_names
    factor = 1
    for inner in names[names.index(axis) + 1 :]:
        if isinstance(by_axis[inner], Shard) and by_axis[inner].dim == cut:
            factor *= joint.value.size(inner)
    if factor > 1:
        assert cut is not None
        by_axis[axis] = _StridedShard(cut, split_factor=factor)
    return [by_axis[name] for name in names]
