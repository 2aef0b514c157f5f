"""What happens around the forward of a module that fully_shard was called on.

Before it the parameters are gathered and put in the module's place of them, after it the sharded
ones come back. The gathered form of a parameter is needed again in the backward. With
``reshard_after_forward`` it is not kept until then: what autograd saves of it is only the note to
gather it once more, behind a barrier, as XLA would otherwise merge the two gathers and keep the
first one's result.

Plain inputs of the outermost module are the global batch: their dim 0 is sharded over the mesh.
In a forward without a gradient sync (``set_requires_gradient_sync(False)``) each device computes on
its own rows, and its gradients stay where they are. There the inputs have to say which rows these
are: DTensors on the mesh, or LocalViews. Plain tensors are then the same on every device, and
parameters of tensor-parallel modules are DTensors on their own mesh there, with another value on
each device of this one (:mod:`xla_dtensor.fsdp_groups`).
LocalViews as inputs mean the same where gradients are synchronized: each device has a loss of its
own, and its gradients are averaged over the devices, as torch's ranks do.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Shard
from torch.utils._pytree import tree_leaves, tree_map

from xla_dtensor.api import distribute_tensor
from xla_dtensor.core import Layout
from xla_dtensor.core.spanning import layout_on_span, region_of
from xla_dtensor.device_mesh import DeviceMesh, mesh_text
from xla_dtensor.dtensor import DTensor
from xla_dtensor.errors import LocalViewError
from xla_dtensor.fsdp_groups import GroupDTensor
from xla_dtensor.fsdp_parameters import Settings, ShardedParameter, lent_unreduced
from xla_dtensor.local_view import LocalView
from xla_dtensor.redistribution import as_plain
from xla_dtensor.runtimes import functional_ops
from xla_dtensor.runtimes.registry import get_runtime

__all__ = ["Group"]

logger = logging.getLogger("xla_dtensor")
aten = torch.ops.aten
_active: list[Group] = []
_warned: set[DeviceMesh] = set()  # meshes that a plain batch was said of


@dataclass(eq=False)
class Group:
    """The parameters of one call of fully_shard, and how they are used.

    Args:
        parameters: The sharded parameters.
        settings: What the module's methods change.
        output_dtype: Dtype of floating outputs; None as they come.
        cast_inputs: Whether floating inputs are cast to the parameters' dtype.
    """

    parameters: list[ShardedParameter]
    settings: Settings
    output_dtype: torch.dtype | None = None
    cast_inputs: bool = True
    kept: bool = False
    _entered: list[contextlib.ExitStack] = field(default_factory=list)

    def __post_init__(self) -> None:
        for owner in self.parameters:
            owner.went_back = self._went_back

    def adopt(self) -> None:
        """Take the parameters that the modules have been given since the last forward."""
        for owner in [*self.parameters]:
            for other in owner.adopt():
                other.went_back = self._went_back
                self.parameters.append(other)
        self.parameters = [owner for owner in self.parameters if owner.places]

    def gather(self) -> None:
        """Lend the gathered parameters to the modules."""
        for owner in self.parameters:
            owner.lend(owner.whole)

    def release(self) -> None:
        """Give the modules the sharded parameters back."""
        self.kept = False
        for owner in self.parameters:
            owner.take_back()

    def _went_back(self) -> None:
        """Give up what :meth:`FSDPModule.unshard` gathered: the optimizer may write to it next."""
        if self.kept and not self._entered:
            self.release()

    def _gather_anew(self) -> None:
        for owner in self.parameters:
            owner.gathered = None
        self.gather()

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
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
            if self.kept:
                stack.callback(self._gather_anew)
            for owner in self.parameters:
                owner.gathered = None
                owner.lend(lambda owner=owner: lent_unreduced(owner, self.settings.sync))
        else:
            self.gather()
            if self.parameters and self.settings.reshard_after_forward and _nothing_else_saves():
                hooks = torch.autograd.graph.saved_tensors_hooks(_noted, _gathered_again)
                stack.enter_context(hooks)
        dtype = self.settings.param_dtype
        if dtype is not None and self.cast_inputs:
            args, kwargs = tree_map(lambda v: _cast(v, dtype), (args, kwargs))
        return args, kwargs

    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Put the sharded parameters back; a forward hook, called after an error too."""
        if not self._entered:
            return output  # `before` has raised
        self._entered.pop().close()
        _active.remove(self)
        if not self.kept:
            self.release()
        if self.output_dtype is not None:
            output = tree_map(lambda v: _cast(v, self.output_dtype), output)
        return output

    def _on_own_views(self, args: Any, kwargs: Any) -> bool:
        """Tell whether each device has rows and a loss of its own, whose gradients are averaged."""
        region = region_of(self.settings.mesh.value)
        given = tree_leaves((args, kwargs))
        regions = [v.region for v in given if isinstance(v, (LocalView, GroupDTensor))]
        # A tensor-parallel module may be given its own shard of each device's rows.
        return any(r.mesh == region.mesh and set(region.axes) <= set(r.axes) for r in regions)

    def _inputs(self, args: Any, kwargs: Any, unreduced: bool) -> tuple[Any, Any]:
        mesh = self.settings.mesh
        if not unreduced:
            return tree_map(self._batch, (args, kwargs))
        given = [v for v in tree_leaves((args, kwargs)) if isinstance(v, torch.Tensor)]
        if given and not any(isinstance(v, (DTensor, LocalView)) for v in given):
            raise LocalViewError(
                "A forward without a gradient sync was called with plain tensors only, the first "
                f"of shape={tuple(given[0].shape)}. Each device computes on rows of its own, and "
                f"nothing says which. Pass distribute_tensor(batch, mesh, [Shard(0)]) on {mesh}, "
                "or its to_local()."
            )
        return tree_map(self._own_rows, (args, kwargs))

    def _own_rows(self, value: Any) -> Any:
        """Return each device's rows of a DTensor."""
        if not isinstance(value, DTensor) or isinstance(value, GroupDTensor):
            return value
        mesh, own = self.settings.mesh, self.settings.mesh.value.axis_names
        on = dict(zip(value._spec.mesh.value.axis_names, value._spec.placements, strict=True))
        others = [placement for axis, placement in on.items() if axis not in own]
        if not set(own) < set(on) or not all(p.is_replicate() for p in others):
            return value.to_local()
        # Devices along the other axes share the rows; tensor parallelism takes what it needs.
        return value.redistribute(mesh, [on[axis] for axis in own]).to_local()

    def _batch(self, value: Any) -> Any:
        """Shard dim 0 of a plain input over the mesh, where that divides it."""
        mesh, runtime = self.settings.mesh, get_runtime()
        if isinstance(value, (DTensor, LocalView)) or not isinstance(value, torch.Tensor):
            return value
        if value.ndim == 0 or value.shape[0] % mesh.value.size():
            return value
        _warn_once(
            mesh,
            "fully_shard takes dim 0 of plain inputs for the global batch and shards it over the "
            f"mesh {mesh_text(mesh.value)}, the first of shape={tuple(value.shape)}. Rows that "
            "a process loaded for itself would count as the whole batch. "
            "distribute_tensor(batch, mesh, [Shard(0)]) says what is meant.",
        )
        placements = [Shard(0)] * mesh.ndim
        if runtime.is_payload(value):
            known = runtime.known_sharding(value)
            if known is not None and known.is_tiled:
                return value
            layout = Layout.from_placements(placements, value.ndim, mesh.value)
            if value.requires_grad:
                return value
            return runtime.to_plain(
                functional_ops.constrain(value.detach(), layout_on_span(layout))
            )
        if value.requires_grad:
            return value
        made = distribute_tensor(value, mesh, placements)
        return as_plain(made)


def _cast(value: Any, dtype: torch.dtype | None) -> Any:
    is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.to(dtype) if is_float else value


def _warn_once(mesh: DeviceMesh, text: str) -> None:
    if mesh not in _warned:
        _warned.add(mesh)
        logger.warning(text)


# ---------------------------------------------------------------------- what autograd saves


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
        if group.settings.reshard_after_forward and not group.kept:
            for owner in group.parameters:
                lent = owner.gathered
                if lent is not None and getattr(lent, "_local_tensor", lent) is payload:
                    return _Note(owner)
    return tensor


def _gathered_again(saved: Any) -> torch.Tensor:
    if not isinstance(saved, _Note):
        return saved
    return saved.owner.gathered_again()
