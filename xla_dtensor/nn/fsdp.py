"""fully_shard: parameters, gradients and optimizer state sharded over the data-parallel axis.

PyTorch's API (``torch.distributed.fsdp.fully_shard``), by annotations: a parameter lies sharded on
the mesh, is told to be whole for its module's forward, and its gradient is told to be sharded. XLA
makes the all-gathers and reduce-scatters of it, and overlaps them with the compute::

    for block in model.layers:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])

What differs from PyTorch, because one program sees the whole batch: the batch that goes into the
model is the global one, and a loss that is a mean over it is the global mean. Its gradient needs no
division by the number of devices; a loss that is a *sum* over the batch has the sum's gradient,
where PyTorch's has the sum over the devices divided by their number.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.tensor import Shard
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

from mesh_utils import Mesh
from xla_dtensor.core import Layout
from xla_dtensor.core.argument_types import argument_types
from xla_dtensor.core.errors import (
    ArgumentTypeError,
    DistributeError,
    LocalViewError,
    UnsupportedOpError,
)
from xla_dtensor.core.spanning import layout_on_span, region_of
from xla_dtensor.dtensor.api import distribute_tensor
from xla_dtensor.dtensor.dtensor import DTensor
from xla_dtensor.dtensor.groups import GroupDTensor
from xla_dtensor.dtensor.local import LocalView
from xla_dtensor.dtensor.mesh import DeviceMesh, as_device_mesh, current_mesh, mesh_text
from xla_dtensor.dtensor.redistribute import as_plain
from xla_dtensor.nn.fsdp_parameters import (
    Settings,
    ShardedParameter,
    data_parallel_part,
    lent_unreduced,
    shard_parameter,
)
from xla_dtensor.runtimes import functional
from xla_dtensor.runtimes.guards.libraries import guarded
from xla_dtensor.runtimes.registry import get_runtime

__all__ = ["FSDPModule", "fully_shard", "register_fsdp_forward_method"]


# ------------------------------------------------------------------------------------- Fsdp forward
#
# What happens around the forward of a module that fully_shard was called on.
#
# Before it the parameters are gathered and put in the module's place of them, after it the sharded
# ones come back. The gathered form of a parameter is needed again in the backward. With
# ``reshard_after_forward`` it is not kept until then: what autograd saves of it is only the note to
# gather it once more, behind a barrier, as XLA would otherwise merge the two gathers and keep the
# first one's result.
#
# Plain inputs of the outermost module are the global batch: their dim 0 is sharded over the mesh.
# In a forward without a gradient sync (``set_requires_gradient_sync(False)``) each device computes
# on its own rows, and its gradients stay where they are. There the inputs have to say which rows
# these are: DTensors on the mesh, or LocalViews. Plain tensors are then the same on every device,
# and parameters of tensor-parallel modules are DTensors on their own mesh there, with another value
# on each device of this one (:mod:`xla_dtensor.dtensor.groups`). LocalViews as inputs mean the same
# where gradients are synchronized: each device has a loss of its own, and its gradients are
# averaged over the devices, as torch's ranks do.

logger = logging.getLogger("xla_dtensor")
aten = torch.ops.aten
_active: list[Group] = []
_ending: set[tuple[int, int]] = set()  # roots, with the backward at whose end they are asked
_warned: set[DeviceMesh] = set()  # meshes that a plain batch was said of


@guarded("parameters", "settings", "unsharded")
@dataclass(eq=False)
class Group:
    """The parameters of one call of fully_shard, and how they are used.

    Args:
        parameters: The sharded parameters.
        settings: What the module's methods change.
        modules: Those that it was called on.
        output_dtype: Dtype of floating outputs; None as they come.
        cast_inputs: Whether floating inputs are cast to the parameters' dtype.
    """

    parameters: list[ShardedParameter]
    settings: Settings
    modules: Sequence[nn.Module] = ()
    output_dtype: torch.dtype | None = None
    cast_inputs: bool = True
    unsharded: bool = False
    _entered: list[contextlib.ExitStack] = field(default_factory=list)

    def adopt(self) -> None:
        """Take the parameters that the modules have been given since the last forward."""
        for owner in [*self.parameters]:
            self.parameters += owner.adopt()
        for owner in [owner for owner in self.parameters if not owner.places]:
            self.parameters.remove(owner)

    def gather(self) -> None:
        """Lend the gathered parameters to the modules."""
        went_back = self._follower()
        for owner in self.parameters:
            owner.lend(partial(owner.gather, went_back))

    def release(self) -> None:
        """Give the modules the sharded parameters back."""
        self.unsharded = False
        for owner in self.parameters:
            owner.take_back()

    def _follower(self) -> Callable[[], None]:
        """Return what a backward calls that has computed the gradient of a parameter."""
        root = _active[0] if _active else self

        def went_back() -> None:
            if self.unsharded and not self._entered:
                self.release()  # what unshard() gathered: the optimizer may write to it next
            if self.settings.sync:
                root.reduce_at_end()

        return went_back

    def reduce_at_end(self) -> None:
        """Let the end of this backward reduce what no parameter that it reaches has reduced."""
        task = id(self), torch._C._current_graph_task_id()
        if task not in _ending:
            _ending.add(task)
            callback = partial(self._reduce_pending, task)
            torch.autograd.Variable._execution_engine.queue_callback(callback)  # pyright: ignore

    def _reduce_pending(self, task: tuple[int, int]) -> None:
        _ending.discard(task)
        modules = {id(m): m for module in self.modules for m in module.modules()}
        groups = [m.__dict__[_STATE] for m in modules.values() if _STATE in m.__dict__]
        for group in dict.fromkeys(groups):
            for owner in group.parameters if group.settings.sync else ():
                owner.reduce_pending()

    def _gather_anew(self) -> None:
        for owner in self.parameters:
            owner.gathered = None
        self.gather()

    def pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Prepare parameters and inputs; a forward pre-hook."""
        self.adopt()
        stack = contextlib.ExitStack()
        per_device = not self.settings.sync or self._on_own_views(args, kwargs)
        unreduced = per_device and torch.is_grad_enabled()
        if not _active:
            args, kwargs = self._inputs(args, kwargs, unreduced)
        _active.append(self)
        self._entered.append(stack)
        if unreduced:
            if self.unsharded:
                stack.callback(self._gather_anew)
            went_back = self._follower()
            for owner in self.parameters:
                owner.gathered = None
                owner.lend(partial(lent_unreduced, owner, self.settings.sync, went_back))
        else:
            self.gather()
            if self.parameters and self.settings.reshard_after_forward and _nothing_else_saves():
                hooks = torch.autograd.graph.saved_tensors_hooks(_noted, _gathered_again)
                stack.enter_context(hooks)
        dtype = self.settings.param_dtype
        if dtype is not None and self.cast_inputs:
            args, kwargs = _on_tensors(lambda v: _cast(v, dtype), (args, kwargs))
        return args, kwargs

    def post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Put the sharded parameters back; a forward hook, called after an error too."""
        if not self._entered:
            return output  # `pre_forward` has raised
        self._entered.pop().close()
        _active.remove(self)
        if not self.unsharded:
            self.release()
        if self.output_dtype is not None:
            output = _on_tensors(lambda v: _cast(v, self.output_dtype), output)
        return output

    def _on_own_views(self, args: Any, kwargs: Any) -> bool:
        """Tell whether each device has rows and a loss of its own, whose gradients are averaged."""
        region = region_of(self.settings.mesh.value)
        inputs = _tensors_in((args, kwargs))
        regions = [v.region for v in inputs if isinstance(v, (LocalView, GroupDTensor))]
        # A tensor-parallel module may be given its own shard of each device's rows.
        return any(r.mesh == region.mesh and set(region.axes) <= set(r.axes) for r in regions)

    def _inputs(self, args: Any, kwargs: Any, unreduced: bool) -> tuple[Any, Any]:
        mesh = self.settings.mesh
        if not unreduced:
            return _on_tensors(self._batch, (args, kwargs))
        inputs = _tensors_in((args, kwargs))
        if inputs and not any(isinstance(v, (DTensor, LocalView)) for v in inputs):
            raise LocalViewError(
                "A forward without a gradient sync was called with plain tensors only, the first "
                f"of shape={tuple(inputs[0].shape)}. Each device computes on rows of its own, and "
                f"nothing says which. Pass distribute_tensor(batch, mesh, [Shard(0)]) on {mesh}, "
                "or its to_local()."
            )
        return _on_tensors(self._own_rows, (args, kwargs))

    def _own_rows(self, leaf: Any) -> Any:
        """Return each device's rows of a DTensor."""
        if not isinstance(leaf, DTensor) or isinstance(leaf, GroupDTensor):
            return leaf
        mesh, axes = self.settings.mesh, self.settings.mesh.value.axis_names
        by_axis = dict(zip(leaf._spec.mesh.value.axis_names, leaf._spec.placements, strict=True))
        outer = [placement for axis, placement in by_axis.items() if axis not in axes]
        if not set(axes) < set(by_axis) or not all(p.is_replicate() for p in outer):
            return leaf.to_local()
        # Devices along the other axes share the rows; tensor parallelism takes what it needs.
        return leaf.redistribute(mesh, [by_axis[axis] for axis in axes]).to_local()

    def _batch(self, leaf: Any) -> Any:
        """Shard dim 0 of a plain input over the mesh, where that divides it."""
        mesh, runtime = self.settings.mesh, get_runtime()
        if isinstance(leaf, (DTensor, LocalView)):
            return leaf
        if leaf.ndim == 0 or leaf.shape[0] % mesh.value.size():
            return leaf
        if runtime.is_payload(leaf):
            sharding = runtime.known_sharding(leaf)
            if sharding is not None and sharding.is_tiled:
                return leaf
        _warn_once(
            mesh,
            "fully_shard takes dim 0 of plain inputs for the global batch and shards it over the "
            f"mesh {mesh_text(mesh.value)}, the first of shape={tuple(leaf.shape)}. Rows that "
            "a process loaded for itself would count as the whole batch. "
            "distribute_tensor(batch, mesh, [Shard(0)]) says what is meant.",
        )
        placements = [Shard(0)] * mesh.ndim
        if runtime.is_payload(leaf):
            layout = Layout.from_placements(placements, leaf.ndim, mesh.value)
            if leaf.requires_grad:
                return leaf
            return runtime.to_plain(functional.constrain(leaf.detach(), layout_on_span(layout)))
        if leaf.requires_grad:
            return leaf
        return as_plain(distribute_tensor(leaf, mesh, placements))


def _on_tensors(function: Callable[[Any], Any], values: Any) -> Any:
    """Map over tensors in containers, in dataclasses too, as torch's fully_shard does."""

    def mapped(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return function(leaf)
        if not dataclasses.is_dataclass(leaf) or isinstance(leaf, type):
            return leaf
        names = [f.name for f in dataclasses.fields(leaf) if f.init]
        old = {name: getattr(leaf, name) for name in names}
        new = {name: _on_tensors(function, value) for name, value in old.items()}
        is_same = all(a is b for a, b in zip(tree_leaves(old), tree_leaves(new), strict=True))
        return leaf if is_same else dataclasses.replace(leaf, **new)

    return tree_map(mapped, values)


def _tensors_in(values: Any) -> list[Any]:
    found: list[Any] = []
    _on_tensors(lambda v: found.append(v) or v, values)
    return found


def _cast(leaf: Any, dtype: torch.dtype | None) -> Any:
    return leaf.to(dtype) if leaf.is_floating_point() else leaf


def _warn_once(mesh: DeviceMesh, text: str) -> None:
    if mesh not in _warned:
        _warned.add(mesh)
        logger.warning(text)


# ------------------------------------------------------------------------------ What autograd saves


@dataclass(frozen=True)
class _Note:
    """Stands for a gathered parameter among what autograd saves."""

    owner: ShardedParameter


def _nothing_else_saves() -> bool:
    """Tell whether this forward is recorded, and not by activation checkpointing.

    That saves nothing of the forward, and gathers again as it runs the module again. Of several
    pairs of hooks only the innermost is called, so ours would keep what it is there to drop.
    """
    top = torch._C._autograd._top_saved_tensors_default_hooks(False)  # pyright: ignore
    return torch.is_grad_enabled() and (top is None or top[0] is _noted)


def _noted(tensor: torch.Tensor) -> Any:
    payload = getattr(tensor, "_local_tensor", tensor)
    for group in _active:
        if group.settings.reshard_after_forward and not group.unsharded:
            for owner in group.parameters:
                gathered = owner.gathered
                if gathered is None:
                    continue
                if getattr(gathered, "_local_tensor", gathered) is payload:
                    return _Note(owner)
    return tensor


def _gathered_again(saved: Any) -> torch.Tensor:
    if not isinstance(saved, _Note):
        return saved
    return saved.owner.gathered_again()


# ------------------------------------------------------------------------------------- fully_shard

_STATE = "_xla_dtensor_group"
_classes: dict[type, type] = {}
# The parameters that DTensors were made of; a tied module may still have one.
_originals = WeakIdKeyDictionary()


@argument_types
def fully_shard(
    module: nn.Module | Sequence[nn.Module],
    *,
    mesh: Any = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
) -> Any:
    """Shard a module's parameters that no call on a submodule has sharded before.

    Args:
        module: The module, or a list of modules that form one group.
        mesh: One axis to shard over, or (replicate, shard); a submesh. The open ``with mesh:``
            block's, else all devices, when None.
        reshard_after_forward: Whether the backward gathers the parameters again, in place of
            keeping them. True when None. An int counts as True.
        shard_placement_fn: Says of a parameter which ``Shard(dim)`` to use, None for dim 0.
        mp_policy: Dtypes of parameters during forward, of gradient reduction, and of outputs.
        offload_policy: Only the base ``OffloadPolicy``, which offloads nothing.
        ignored_params: Parameters to leave alone.
        dp_mesh_dims: Names the axes of `mesh` to use, where parameters lie on all of its axes.

    Returns:
        `module`, now an :class:`FSDPModule`.

    Raises:
        DistributeError: A wrong mesh, or parameters that lie on its axes already.
        UnsupportedOpError: CPU offloading, or a module after ``module.compile()``.
        ArgumentTypeError: Not a module, or a container without a forward.

    Example:
        >>> import torch, xla_dtensor as xd
        >>> mesh = xd.init_device_mesh("xla", (8,), mesh_dim_names=("dp",))
        >>> model = xd.fully_shard(torch.nn.Linear(4, 16), mesh=mesh)
        >>> model.weight.placements, type(model).__name__
        ((Shard(dim=0),), 'FSDPLinear')
    """
    modules = [module] if isinstance(module, nn.Module) else module
    _check_modules(modules)
    _check_reshard(reshard_after_forward)
    settings = Settings(
        _mesh(mesh if dp_mesh_dims is None else data_parallel_part(mesh, dp_mesh_dims)),
        reshard_after_forward=reshard_after_forward is None or bool(reshard_after_forward),
        full_mesh=None if dp_mesh_dims is None else as_device_mesh(mesh),
    )
    if isinstance(offload_policy, CPUOffloadPolicy):
        raise UnsupportedOpError(
            "fully_shard was called with CPUOffloadPolicy. XLA programs keep their parameters on "
            "the devices. Leave offload_policy out."
        )
    policy = mp_policy or MixedPrecisionPolicy()
    settings.param_dtype, settings.reduce_dtype = policy.param_dtype, policy.reduce_dtype
    owners = _sharded(modules, settings, shard_placement_fn, ignored_params or set())
    _move_buffers(modules)
    group = Group(owners, settings, modules, policy.output_dtype, policy.cast_forward_inputs)
    for submodule in modules:
        submodule.__dict__[_STATE] = group
        # A checkpointed module runs twice, and needs its parameters both times.
        hooked = getattr(submodule, "_checkpoint_wrapped_module", submodule)
        hooked.register_forward_pre_hook(group.pre_forward, prepend=True, with_kwargs=True)
        hooked.register_forward_hook(group.post_forward, always_call=True)
        kind = type(submodule)
        if kind not in _classes:
            _classes[kind] = type(f"FSDP{kind.__name__}", (FSDPModule, kind), {})
        submodule.__class__ = _classes[kind]
    return module


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Gather a module's parameters for one of its methods as for its forward.

    Args:
        module: A module of :func:`fully_shard`; with any other one nothing is done.
        method_name: The method.

    Raises:
        ArgumentTypeError: The module has no such method.

    Example:
        >>> import torch, xla_dtensor as xd
        >>> class Encoder(torch.nn.Linear):
        ...     def encode(self, x):
        ...         return x @ self.weight.T
        >>> encoder = xd.fully_shard(Encoder(4, 16))
        >>> xd.register_fsdp_forward_method(encoder, "encode")
        >>> encoder.encode(torch.ones(8, 4)).shape
        torch.Size([8, 16])
    """
    group: Group | None = module.__dict__.get(_STATE)
    if group is None:
        return
    method = getattr(module, method_name, None)
    if method is None:
        raise ArgumentTypeError(
            f"register_fsdp_forward_method was called with {method_name!r}, which "
            f"{type(module).__name__} does not have. It names the method for which parameters are "
            "gathered. Pass the name of a method of the module."
        )

    @functools.wraps(method)
    def gathered(*args: Any, **kwargs: Any) -> Any:
        output = None
        try:
            args, kwargs = group.pre_forward(module, args, kwargs)
            output = method(*args, **kwargs)
        finally:
            output = group.post_forward(module, args, output)
        return output

    setattr(module, method_name, gathered)


def _move_buffers(modules: Sequence[nn.Module]) -> None:
    """Put buffers beside the gathered parameters, as torch's fully_shard does."""
    device = get_runtime().torch_device
    for owner in (submodule for module in modules for submodule in module.modules()):
        for name, buffer in owner._buffers.items():
            if type(buffer) is torch.Tensor and buffer.device.type == "cpu":
                owner._buffers[name] = buffer.to(device)


def _check_reshard(reshard_after_forward: Any) -> None:
    if isinstance(reshard_after_forward, bool | None):
        return
    if not isinstance(reshard_after_forward, int) or reshard_after_forward < 1:
        raise ArgumentTypeError(
            f"fully_shard was called with reshard_after_forward={reshard_after_forward!r}. It says "
            "whether the backward gathers parameters again. Pass True, False, None, or the number "
            "of devices of a smaller group, which counts as True here."
        )


def _check_modules(modules: Any) -> None:
    no_module = next((m for m in modules if not isinstance(m, nn.Module)), None)
    container = next((m for m in modules if isinstance(m, (nn.ModuleList, nn.ModuleDict))), None)
    if no_module is not None or container is not None:
        kind = type(container if no_module is None else no_module).__name__
        raise ArgumentTypeError(
            f"fully_shard was called with a {kind}. Parameters are gathered for a module's "
            "forward, and this has none. Pass the modules that are called."
        )
    if any(m._compiled_call_impl is not None for m in modules):
        raise UnsupportedOpError(
            "fully_shard was called on a module after module.compile(). Its parameters are "
            "gathered by hooks around the forward, which torch.compile cannot trace. Leave "
            "module.compile() out, and call xla_dtensor.compile on the whole step."
        )
    if any(_STATE in m.__dict__ for m in modules):
        raise DistributeError(
            "fully_shard was called on a module that it was called on before. Its parameters are "
            "sharded already. Call it once per module, submodules first."
        )


def _mesh(mesh: Any) -> Any:
    if mesh is None:
        try:
            device_mesh = current_mesh("fully_shard")
        except DistributeError:
            ids = get_runtime().device_ids()
            device_mesh = as_device_mesh(Mesh(list(ids), (len(ids),), ("fsdp",)))
    else:
        device_mesh = as_device_mesh(mesh)
    if device_mesh.ndim not in (1, 2):
        raise DistributeError(
            f"fully_shard was called with the mesh {mesh_text(device_mesh.value)}. Parameters are "
            "sharded over one axis, or over the second of two and copied along the first. Pass a "
            "submesh of one or two axes, e.g. mesh['dp']."
        )
    return device_mesh


def _sharded(
    modules: Sequence[nn.Module],
    settings: Settings,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None,
    ignored: set[nn.Parameter],
) -> list[ShardedParameter]:
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    parameters: dict[int, nn.Parameter] = {}
    for module in _managed(modules):
        for name, parameter in module._parameters.items():
            if parameter is not None and not any(parameter is p for p in ignored):
                places.setdefault(id(parameter), []).append((module, name))
                parameters[id(parameter)] = parameter
    owners: list[ShardedParameter] = []
    for key, parameter in parameters.items():
        if parameter in _originals:
            name = ", ".join(name for _, name in places[key])
            raise DistributeError(
                f"fully_shard was called on a module whose parameter {name!r} is tied with one of "
                "a module that it was called on before. The two would be parameters of their own. "
                "Call it once for both, fully_shard([one, other]), or on a module that has both."
            )
        placement = None if shard_placement_fn is None else shard_placement_fn(parameter)
        sharded, inner = shard_parameter(parameter, settings, getattr(placement, "dim", None))
        owner = ShardedParameter(places[key], sharded, settings, inner)
        owner.take_back()
        owners.append(owner)
        _originals[parameter] = True
    return owners


def _managed(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the modules of the trees, without those that fully_shard manages already."""
    managed: list[nn.Module] = []
    pending = list(modules)
    while pending:
        module = pending.pop(0)
        if _STATE not in module.__dict__ and not any(module is m for m in managed):
            managed.append(module)
            pending.extend(module.children())
    return managed


class FSDPModule(TorchFSDPModule):
    """A module that :func:`fully_shard` was called on. The methods are PyTorch's.

    Those that schedule communication do nothing: XLA schedules it.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make a module of the original class, as in ``type(self)(...)``."""
        original = next(k for k in cls.__mro__ if k not in (cls, FSDPModule, TorchFSDPModule))
        module = original.__new__(original, *args, **kwargs)
        module.__init__(*args, **kwargs)
        return module

    def _groups(self, recurse: bool) -> list[Group]:
        modules: Any = self.modules() if recurse else [self]  # pyright: ignore
        return [m.__dict__[_STATE] for m in modules if _STATE in m.__dict__]

    def unshard(self, async_op: bool = False) -> Any:
        """Gather this module's parameters, until :meth:`reshard` or the end of a backward."""
        for group in self._groups(recurse=False):
            group.adopt()
            group.gather()
            group.unsharded = True
        return _Handle() if async_op else None

    def reshard(self) -> None:
        """Give up what :meth:`unshard` gathered."""
        for group in self._groups(recurse=False):
            group.release()

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Say whether the next backward reduces gradients over the mesh.

        Without a sync each device keeps its own, and the next backward with one reduces their sum:
        the bytes reduced do not grow with the number of microbatches.
        """
        for group in self._groups(recurse):
            group.settings.sync = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Refused when False: XLA reduces over both axes at once."""
        if not requires_all_reduce:
            raise UnsupportedOpError(
                "set_requires_all_reduce(False) was called. A gradient is reduced over all axes of "
                "fully_shard's mesh at once, or over none. Call set_requires_gradient_sync(False)."
            )

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Say whether the backward gathers the parameters again, in place of keeping them."""
        for group in self._groups(recurse):
            group.settings.reshard_after_forward = reshard_after_forward

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the sum of the devices' gradients by `factor`, in place of their number.

        1.0 turns the division off, for a loss that is a sum over the batch; the gradient of a loss
        over the global batch is not divided, and stays what it is.
        """
        for group in self._groups(recurse=False):
            group.settings.factor = factor

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The older name of :meth:`set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Do nothing: no reduction is left for later."""

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Do nothing: what a program gathered is gone when it ends."""

    def set_modules_to_forward_prefetch(self, modules: list[Any]) -> None:
        """Do nothing: XLA schedules the gathers."""

    def set_modules_to_backward_prefetch(self, modules: list[Any]) -> None:
        """Do nothing: XLA schedules the gathers."""

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Do nothing: a parameter that the backward does not use is not gathered."""

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Do nothing: XLA chooses the reduction."""

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Do nothing: XLA allocates."""

    def set_post_optim_event(self, event: Any) -> None:
        """Do nothing: there are no streams."""

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Do nothing: XLA schedules the gathers."""

    def set_all_reduce_hook(self, hook: Any, *, stream: Any = None) -> NoReturn:
        """Refused: the reduction is XLA's."""
        _refuse_custom("set_all_reduce_hook")

    def set_custom_all_gather(self, comm: Any) -> NoReturn:
        """Refused: the gather is XLA's."""
        _refuse_custom("set_custom_all_gather")

    def set_custom_reduce_scatter(self, comm: Any) -> NoReturn:
        """Refused: the reduction is XLA's."""
        _refuse_custom("set_custom_reduce_scatter")

    def _get_fsdp_state(self) -> NoReturn:
        raise UnsupportedOpError(
            "torch asked a module of fully_shard for its own state, register_fsdp_forward_method "
            "say, as it does where torch's function was called. There is none. Call xla_dtensor's "
            "of that name, or xla_dtensor.install() first."
        )

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self.reshard()
        applied = nn.Module._apply(self, *args, **kwargs)  # pyright: ignore
        for group in self._groups(recurse=True):
            for owner in group.parameters:
                module, name = owner.places[0]
                owner.parameter = module._parameters[name]  # pyright: ignore
        return applied

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise UnsupportedOpError(
            "deepcopy was called on a module of fully_shard. Its parameters and hooks belong "
            "together. Copy the module first, or use its state_dict()."
        )


class _Handle:
    """What ``unshard(async_op=True)`` returns."""

    def wait(self) -> None:
        """Do nothing: XLA schedules the gather."""


def _refuse_custom(name: str) -> NoReturn:
    raise UnsupportedOpError(
        f"{name} was called. Gathers and reductions are XLA's own, made from annotations, and no "
        "Python runs in between. Leave it out."
    )
