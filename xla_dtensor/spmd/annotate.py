"""mark_sharding and its family: tell XLA how a tensor is to lie.

What each does, by what it is given:

========================  ======================================================================
a DTensor                 annotated in place; the same object comes back, as XLAShardedTensor
a plain device tensor     annotated in place; comes back in a wrapper, its ``global_tensor`` being
                          the very tensor
a CPU tensor              becomes a plain device tensor in place: a parameter stays the same object,
                          with its gradient, hooks and attributes, so optimizers keep it; memory
                          that it shared with others stays theirs
========================  ======================================================================

An annotation changes no value and adds no op that computes. It holds eagerly and inside a compiled
step. On the JAX runtime it belongs to that step there, and a parameter that only the step annotates
lies outside as it did before; on torch_xla it is the tensor's from then on, at the cost of a second
trace. Its gradient is not annotated: use :func:`mark_sharding_with_gradients` for activations.

A partition spec has one entry per dim. Marking again in the same way does nothing; otherwise, the
first annotation has to be cleared, unless it was a replication. Of a pending value torch_xla takes
the second annotation without a word; here that is the same error everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from xla_dtensor.argument_types import argument_types
from xla_dtensor.asking import asking
from xla_dtensor.core import Layout
from xla_dtensor.device_mesh import as_device_mesh
from xla_dtensor.dtensor import DTensor, GlobalState
from xla_dtensor.errors import (
    AlreadyAnnotatedError,
    ArgumentTypeError,
    DistributeError,
    ManualRegionError,
)
from xla_dtensor.manual_tensor import ManualTensor
from xla_dtensor.placement_checks import torch_placements
from xla_dtensor.runtimes.registry import get_runtime
from xla_dtensor.runtimes.whole_autograd import LinearResult
from xla_dtensor.spmd.mesh import as_mesh
from xla_dtensor.spmd.sharded_tensor import (
    XLAShardedTensor,
    take_plain_tensors,
    wrap_plain,
    wrapped_tensor,
)

__all__ = [
    "MarkShardingFunction",
    "annotate_custom_sharding",
    "clear_sharding",
    "mark_sharding",
    "mark_sharding_with_gradients",
    "partition_layout",
]


@argument_types
def mark_sharding(t: torch.Tensor, mesh: Any, partition_spec: Sequence[Any]) -> XLAShardedTensor:
    """Tell XLA how a tensor is to lie, in place.

    Args:
        t: A DTensor, a plain tensor of the runtime, or a CPU tensor; see the module docstring.
        mesh: The mesh.
        partition_spec: Per dim an axis (name or number), a tuple of axes, the outermost first, or
            None.

    Returns:
        The tensor as an XLAShardedTensor.

    Raises:
        AlreadyAnnotatedError: The tensor was annotated otherwise before.
        DistributeError: The tensor cannot be annotated.
        LayoutError: A partition spec that does not fit the tensor or the mesh.

    Example:
        >>> import torch
        >>> from xla_dtensor.spmd import Mesh
        >>> x = torch.ones(8, 32)
        >>> mark_sharding(x, Mesh(range(8), (4, 2), ("x", "y")), ("x", None)).sharding_spec
        '{devices=[4,1,2]<=[8] last_tile_dim_replicate}'
    """
    layout = partition_layout("mark_sharding", t, mesh, partition_spec)
    if isinstance(t, DTensor):
        for payload in _payloads(t) if not t.is_meta else ():
            _check_first(payload, layout)
        return _annotated(t, layout)
    if get_runtime().is_payload(t):
        _check_first(t, layout)
        with asking():
            get_runtime().annotate(t, layout)
        return wrap_plain(t, layout)
    return _moved_in_place(t, layout)


@argument_types
def mark_sharding_with_gradients(
    t: torch.Tensor, mesh: Any, partition_spec: Sequence[Any]
) -> torch.Tensor:
    """Return a new tensor of the same value that is annotated, and whose gradient will be.

    Args:
        t: A DTensor or a plain tensor of the runtime; it stays as it is.
        mesh: The mesh.
        partition_spec: As for :func:`mark_sharding`.

    Returns:
        An XLAShardedTensor for a DTensor, a plain tensor for a plain one.

    Raises:
        DistributeError: A CPU tensor.
        LayoutError: A partition spec that does not fit the tensor or the mesh.
    """
    result: Any = MarkShardingFunction.apply(t, mesh, partition_spec)
    return result


class MarkShardingFunction(LinearResult):
    """The autograd function behind :func:`mark_sharding_with_gradients`."""

    @staticmethod
    def forward(ctx: Any, t: torch.Tensor, mesh: Any, partition_spec: Sequence[Any]) -> Any:
        """Constrain the value."""
        layout = partition_layout("mark_sharding_with_gradients", t, mesh, partition_spec)
        ctx.layout = layout
        return _constrained("mark_sharding_with_gradients", t, layout)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        """Constrain the gradient."""
        return _Constrain.apply(grad, ctx.layout), None, None


class _Constrain(LinearResult):
    @staticmethod
    def forward(ctx: Any, t: Any, layout: Layout) -> Any:
        ctx.layout = layout
        return _constrained("mark_sharding_with_gradients", t, layout)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return _Constrain.apply(grad, ctx.layout), None


def annotate_custom_sharding(
    t: torch.Tensor, mesh: Any, partition_spec: Sequence[Any]
) -> XLAShardedTensor:
    """Annotate in place what may have been annotated otherwise before; see :func:`mark_sharding`.

    Raises:
        DistributeError: A CPU tensor.
        LayoutError: A partition spec that does not fit the tensor or the mesh.
    """
    layout = partition_layout("annotate_custom_sharding", t, mesh, partition_spec)
    if isinstance(t, DTensor):
        return _annotated(t, layout)
    _check_on_devices("annotate_custom_sharding", t)
    with asking():
        get_runtime().annotate(t, layout)
    return wrap_plain(t, layout)


@argument_types
def clear_sharding(t: torch.Tensor) -> torch.Tensor:
    """Take back an annotation, in place; the tensor becomes replicated.

    Inside a compiled step on the JAX runtime a value that the step made is as if it had never been
    annotated.

    Args:
        t: A DTensor or a plain tensor of the runtime.

    Returns:
        The plain tensor behind an XLAShardedTensor; else `t`.

    Raises:
        DistributeError: A CPU tensor.
    """
    runtime = get_runtime()
    if not isinstance(t, DTensor):
        _check_on_devices("clear_sharding", t)
        runtime.clear_annotation(t)
        return t
    if not t.is_meta:
        _restore_label_after_step(t)
        for payload in _payloads(t):
            runtime.clear_annotation(payload)
    whole = Layout.replicated(t._spec.mesh.value, t.ndim)
    t._spec = GlobalState(t._spec.mesh, torch_placements(whole), tensor_meta=t._spec.tensor_meta)
    return t.global_tensor if isinstance(t, XLAShardedTensor) else t


def partition_layout(
    function: str, t: torch.Tensor, mesh: Any, partition_spec: Sequence[Any]
) -> Layout:
    """Return the layout that a partition spec means for a tensor, after checking both.

    Raises:
        ArgumentTypeError: `t` is no tensor.
        ManualRegionError: `t` is a manual tensor.
        DistributeError: The spec has another number of entries than the tensor has dims.
        LayoutError: An unknown axis, an axis twice, a nested tuple.
    """
    if not isinstance(t, torch.Tensor):
        raise ArgumentTypeError(
            f"{function} was called with an object of type={type(t).__name__}. Only a tensor can "
            "be annotated. Pass torch.as_tensor(value)."
        )
    if isinstance(t, ManualTensor):
        raise ManualRegionError(
            f"{function} was called on {t!r}. Inside a manual region XLA lays nothing out. Call "
            "disable_manual_sharding first."
        )
    layout = Layout.from_partition_spec(tuple(partition_spec), as_mesh(mesh, function))
    if layout.ndim != t.ndim:
        raise DistributeError(
            f"{function} was called with partition_spec={tuple(partition_spec)} of {layout.ndim} "
            f"entries on a tensor of shape={tuple(t.shape)}. There is one entry per dim, because a "
            f"shorter one does not say which dims it leaves out. Pass {t.ndim} entries; None "
            "leaves a dim whole."
        )
    return layout


def _check_first(payload: torch.Tensor, layout: Layout) -> None:
    runtime = get_runtime()
    before = runtime.annotation(payload)
    if before is None or not before.is_tiled:
        return
    asked = layout.op_sharding(runtime.root(layout.mesh))
    if before != asked:
        raise AlreadyAnnotatedError(
            f"mark_sharding was called with {asked} on a tensor of shape={tuple(payload.shape)} "
            f"that was told {before} before. Existing annotation must be cleared first, or the "
            "later one would win in some programs and the earlier in others. Call clear_sharding, "
            "or move it with redistribute."
        )


def _annotated(t: DTensor, layout: Layout) -> XLAShardedTensor:
    if not t.is_meta:
        _restore_label_after_step(t)
        with asking():
            for payload in _payloads(t):
                get_runtime().annotate(payload, layout)
    meta = t._spec.tensor_meta
    t._spec = GlobalState(as_device_mesh(layout.mesh), torch_placements(layout), tensor_meta=meta)
    t.__class__ = XLAShardedTensor
    take_plain_tensors()
    return t  # pyright: ignore[reportReturnType]


def _payloads(t: DTensor) -> list[torch.Tensor]:
    """The payload, and the plain tensor that a wrapper was made around, which lies with it."""
    wrapped = wrapped_tensor(t)
    return [t._local_tensor] if wrapped is None else [t._local_tensor, wrapped]


def _restore_label_after_step(t: DTensor) -> None:
    kind, spec = type(t), t._spec

    def restore() -> None:
        t.__class__, t._spec = kind, spec

    get_runtime().when_step_ends(t._local_tensor, restore)


def _is_on_devices(t: torch.Tensor) -> bool:
    return isinstance(t, DTensor) or get_runtime().is_payload(t)


def _check_on_devices(function: str, t: torch.Tensor) -> None:
    if not _is_on_devices(t):
        raise DistributeError(
            f"{function} was called with a host tensor of shape={tuple(t.shape)} on "
            f"device={t.device}. Only tensors on the runtime's devices lie in some way. Call "
            "mark_sharding or distribute_tensor, which put it there."
        )


def _constrained(function: str, t: torch.Tensor, layout: Layout) -> torch.Tensor:
    runtime = get_runtime()
    if isinstance(t, DTensor):
        payload = runtime.constrain(t._local_tensor, layout)
        return XLAShardedTensor(payload, as_device_mesh(layout.mesh), torch_placements(layout))
    _check_on_devices(function, t)
    return runtime.to_plain(runtime.constrain(t, layout))


def _moved_in_place(t: torch.Tensor, layout: Layout) -> XLAShardedTensor:
    """Turn a CPU tensor into a plain device tensor: the same Python object, on the devices."""
    _check_movable(t)
    made = _on_devices(t, layout)
    if t.grad is not None:
        made.grad = t.grad if _is_on_devices(t.grad) else _on_devices(t.grad, layout)
    hooks = t._backward_hooks, t._post_accumulate_grad_hooks
    try:
        torch.utils.swap_tensors(t, made)
    except RuntimeError as error:
        raise DistributeError(
            f"mark_sharding was called with a CPU tensor of shape={tuple(t.shape)} that cannot "
            f"become a device tensor in place: {error}. Something holds on to it as it is. Use the "
            "tensor that distribute_tensor(t, mesh, placements) returns."
        ) from error
    # swap_tensors takes attributes and hooks away with the old value; they belong to the object.
    for name in set(made.__dict__) - set(t.__dict__):
        setattr(t, name, made.__dict__[name])
    t._backward_hooks, t._post_accumulate_grad_hooks = hooks
    get_runtime().annotate(t, layout)
    return wrap_plain(t, layout)


def _check_movable(t: torch.Tensor) -> None:
    plain = t.layout == torch.strided and not t.is_nested and not is_traceable_wrapper_subclass(t)
    if t.device.type != "cpu" or not plain or not t.is_leaf:
        kind = "nested" if t.is_nested else "a leaf" if t.is_leaf else "with an autograd history"
        raise DistributeError(
            f"mark_sharding was called with a {type(t).__name__} on device={t.device}, "
            f"layout={t.layout}, {kind}. Only a dense CPU tensor without history can be put on the "
            "devices in place. Pass such a tensor, or compute it from tensors that are there "
            "already."
        )


def _on_devices(t: torch.Tensor, layout: Layout) -> torch.Tensor:
    runtime = get_runtime()
    made = runtime.to_plain(runtime.put(t.detach(), layout))
    if isinstance(t, torch.nn.Parameter):
        return torch.nn.Parameter(made, t.requires_grad)
    return made.requires_grad_(t.requires_grad)
