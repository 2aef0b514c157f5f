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

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from mesh_utils import Axis
from xla_dtensor.core import Layout
from xla_dtensor.core.argument_types import argument_types
from xla_dtensor.core.errors import (
    AlreadyAnnotatedError,
    ArgumentTypeError,
    DistributeError,
    ManualRegionError,
)
from xla_dtensor.dtensor.api import distribute_module, distribute_tensor, refuse_auto_policy
from xla_dtensor.dtensor.dtensor import DTensor, GlobalState
from xla_dtensor.dtensor.labels import legal_placements, propagate
from xla_dtensor.dtensor.manual import ManualTensor, enter_region, leave_region
from xla_dtensor.dtensor.mesh import as_device_mesh
from xla_dtensor.dtensor.redistribute import redistribute_marker, torch_placements
from xla_dtensor.runtimes.registry import get_runtime
from xla_dtensor.runtimes.whole_ops import LinearResult, OneResult
from xla_dtensor.spmd.mesh import as_mesh
from xla_dtensor.spmd.sharded_tensor import (
    XLAShardedTensor,
    take_plain_tensors,
    wrap_as_sharded_tensor,
    wrap_plain,
    wrapped_tensor,
)

__all__ = [
    "EinsumLinear",
    "MarkShardingFunction",
    "ShardingSpec",
    "XLAPatchedLinear",
    "annotate_custom_sharding",
    "apply_backward_optimization_barrier",
    "apply_xla_patch_to_nn_linear",
    "auto_policy",
    "clear_sharding",
    "disable_manual_sharding",
    "enable_manual_sharding",
    "mark_sharding",
    "mark_sharding_with_gradients",
    "xla_distribute_module",
    "xla_distribute_tensor",
    "xla_patched_nn_linear_forward",
]


# -------------------------------------------------------------------- mark_sharding and its family


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
        with redistribute_marker():
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
    return MarkShardingFunction.apply(t, mesh, partition_spec)  # pyright: ignore[reportReturnType]


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
    with redistribute_marker():
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
    layout = Layout.replicated(t._spec.mesh.value, t.ndim)
    t._spec = GlobalState(t._spec.mesh, torch_placements(layout), tensor_meta=t._spec.tensor_meta)
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
    annotation = runtime.annotation(payload)
    if annotation is None or not annotation.is_tiled:
        return
    sharding = layout.op_sharding(runtime.root(layout.mesh))
    if annotation != sharding:
        raise AlreadyAnnotatedError(
            f"mark_sharding was called with {sharding} on a tensor of shape={tuple(payload.shape)} "
            f"that was told {annotation} before. Existing annotation must be cleared first, or the "
            "later one would win in some programs and the earlier in others. Call clear_sharding, "
            "or move it with redistribute."
        )


def _annotated(t: DTensor, layout: Layout) -> XLAShardedTensor:
    if not t.is_meta:
        _restore_label_after_step(t)
        with redistribute_marker():
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
    device_tensor = _on_devices(t, layout)
    if t.grad is not None:
        device_tensor.grad = t.grad if _is_on_devices(t.grad) else _on_devices(t.grad, layout)
    hooks = t._backward_hooks, t._post_accumulate_grad_hooks
    try:
        torch.utils.swap_tensors(t, device_tensor)
    except RuntimeError as error:
        raise DistributeError(
            f"mark_sharding was called with a CPU tensor of shape={tuple(t.shape)} that cannot "
            f"become a device tensor in place: {error}. Something holds on to it as it is. Use the "
            "tensor that distribute_tensor(t, mesh, placements) returns."
        ) from error
    # swap_tensors takes attributes and hooks away with the old value; they belong to the object.
    for name in set(device_tensor.__dict__) - set(t.__dict__):
        setattr(t, name, device_tensor.__dict__[name])
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
    plain = runtime.to_plain(runtime.put(t.detach(), layout))
    if isinstance(t, torch.nn.Parameter):
        return torch.nn.Parameter(plain, t.requires_grad)
    return plain.requires_grad_(t.requires_grad)


# ------------------------------------------------------------- apply_backward_optimization_barrier
#
# Keep XLA from fusing a module's backward with others.


def apply_backward_optimization_barrier(m: nn.Module) -> None:
    """Put a barrier behind the backward pass of a module.

    XLA then neither fuses nor moves work across it, so that the gradients of all layers are not
    held at once, waiting for one large reduction.

    Args:
        m: The module; a full backward hook is registered on it.
    """

    def barrier(module: nn.Module, grad_input: Any, grad_output: Any) -> None:
        runtime = get_runtime()
        grads = [p.grad for p in module.parameters() if p.grad is not None]
        tensors = [*grads, *(g for g in grad_input if isinstance(g, torch.Tensor))]
        payloads = [t._local_tensor if isinstance(t, DTensor) else t for t in tensors]
        payloads = [t for t in payloads if runtime.is_payload(t)]
        if payloads:
            runtime.barrier(payloads)

    m.register_full_backward_hook(barrier)


# ------------------------------------------------- xla_distribute_tensor and xla_distribute_module
#
# torch_xla's names for the DTensor functions.


def xla_distribute_tensor(
    tensor: torch.Tensor, device_mesh: Any, placements: Sequence[Any] | None = None
) -> XLAShardedTensor:
    """Put a tensor on the mesh; :func:`xla_dtensor.distribute_tensor`, whose arguments it takes.

    Returns:
        An XLAShardedTensor. `tensor` stays as it is.

    Raises:
        DistributeError: Wrong mesh or placements.
    """
    return wrap_as_sharded_tensor(distribute_tensor(tensor, device_mesh, placements))


xla_distribute_module = distribute_module


def auto_policy(mod_name: str, mod: nn.Module, mesh: Any) -> None:
    """Refused: see the message."""
    refuse_auto_policy()


# ------------------------------------------------------------------------------------------- Linear
#
# nn.Linear as one einsum, so that sharded batch and sequence dims are never flattened together.
#
# On the JAX runtime every linear is whole already, and the patch changes nothing there. On
# torch_xla an ``nn.Linear`` flattens all dims but the last, and with them their shardings: patch
# the module with :func:`apply_xla_patch_to_nn_linear`.

_linear = torch.ops.aten.linear.default
_weight_grad = torch.ops.xla_dtensor.linear_weight_grad.default


class XLAPatchedLinear(OneResult):
    """``input @ weight.T + bias``, forward and backward, without flattening any dim.

    Takes DTensors or the runtime's plain tensors: ``XLAPatchedLinear.apply(input, weight, bias)``.
    Under autocast it computes in autocast's dtype, as ``nn.Linear`` does.
    """

    @staticmethod
    def forward(ctx: Any, input: Any, weight: Any, bias: Any = None) -> Any:
        """Compute the output."""
        ctx.dtypes = tuple(None if t is None else t.dtype for t in (input, weight, bias))
        operands = [_autocast(t) for t in (input, weight, bias)]
        ctx.save_for_backward(*operands[:2])
        return _run_whole_op(_linear, *operands)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        """Compute the gradients that are needed."""
        input, weight = ctx.saved_tensors
        if torch.is_grad_enabled():
            return _gradients_by_parts(ctx, grad, input, weight)
        to_input, to_weight, to_bias = (*ctx.needs_input_grad, False)[:3]
        grads = (
            _run_whole_op(_linear, grad, weight.mH, None) if to_input else None,
            _run_whole_op(_weight_grad, grad, input.conj()) if to_weight else None,
            grad.sum(list(range(grad.ndim - 1))) if to_bias and grad.ndim > 1 else None,
        )
        if to_bias and grad.ndim == 1:
            grads = (*grads[:2], grad)
        return tuple(
            g if g is None else g.to(dtype) for g, dtype in zip(grads, ctx.dtypes, strict=True)
        )


def _gradients_by_parts(ctx: Any, grad: Any, input: Any, weight: Any) -> Any:
    """The gradients in ops that can be differentiated again."""
    rows, outputs = input.conj().reshape(-1, input.shape[-1]), grad.reshape(-1, grad.shape[-1])
    grads = (torch.matmul(grad, weight.conj()), torch.matmul(outputs.mT, rows), outputs.sum(0))
    triples = zip(grads, ctx.dtypes, ctx.needs_input_grad, strict=False)
    return tuple(g.to(dtype) if is_needed else None for g, dtype, is_needed in triples)


def _autocast(tensor: Any) -> Any:
    if tensor is None or not torch.is_autocast_enabled(tensor.device.type):
        return tensor
    return tensor.to(torch.get_autocast_dtype(tensor.device.type))


def _run_whole_op(func: Any, *args: Any) -> Any:
    """Run a whole op below autograd, on DTensors or on plain tensors of the runtime."""
    runtime = get_runtime()
    first = next((t for t in args if isinstance(t, DTensor)), None)
    payloads = tuple(t._local_tensor if isinstance(t, DTensor) else t for t in args)
    if not any(isinstance(t, torch.Tensor) and runtime.is_payload(t) for t in payloads):
        raise ArgumentTypeError(
            f"XLAPatchedLinear was called with tensors of shapes "
            f"{[tuple(t.shape) for t in args if t is not None]} on the host. It keeps shardings, "
            "and these have none. Use torch.nn.functional.linear, or mark_sharding first."
        )
    output = runtime.run_op(func, payloads, {})
    if first is None:
        return runtime.to_plain(output)
    mesh = first._spec.mesh
    placements = propagate(func, args, {}, mesh)
    return type(first)._wrapping(output, mesh, legal_placements(placements, output.ndim, mesh))


def xla_patched_nn_linear_forward(m: nn.Linear, input: torch.Tensor) -> torch.Tensor:
    """Run a linear layer through :class:`XLAPatchedLinear`."""
    return XLAPatchedLinear.apply(input, m.weight, m.bias)  # pyright: ignore[reportReturnType]


@argument_types
class EinsumLinear(nn.Linear):
    """An ``nn.Linear`` that runs through :class:`XLAPatchedLinear`."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return ``input @ weight.T + bias``."""
        return xla_patched_nn_linear_forward(self, input)


@argument_types
def apply_xla_patch_to_nn_linear(module: nn.Module) -> nn.Module:
    """Make every ``nn.Linear`` below a module an :class:`EinsumLinear`, in place.

    Args:
        module: The module. Its layers' parameters stay the same objects.

    Returns:
        The same module.

    Example:
        >>> apply_xla_patch_to_nn_linear(nn.Sequential(nn.Linear(2, 3)))
        Sequential(
          (0): EinsumLinear(in_features=2, out_features=3, bias=True)
        )
    """
    for child in module.modules():
        if type(child) is nn.Linear:
            child.__class__ = EinsumLinear
    return module


# ------------------------ enable_manual_sharding and disable_manual_sharding, by torch_xla's names
#
# Between the two a tensor is what one device has, and nothing is communicated but by the
# collectives of :mod:`xla_dtensor.collectives`; see :mod:`xla_dtensor.dtensor.manual`. Unlike
# torch_xla's, gradients pass the border, and what aborts the process there (reading a manual
# tensor, a wrong full_shape, an op on a manual and a global tensor) is an error here.


@argument_types
def enable_manual_sharding(
    t: torch.Tensor,
    partition_spec: Sequence[Any],
    *,
    mesh: Any = None,
    manual_axes: Iterable[Axis] | None = None,
) -> ManualTensor:
    """Return each device's tile of a global tensor, to be computed with by hand.

    Args:
        t: A DTensor, a plain tensor of the runtime, or a CPU tensor without gradient. It stays as
            it is.
        partition_spec: Per dim an axis, a tuple of axes, or None. Along axes that it does not name
            each device gets a copy.
        mesh: The mesh; the global one when None.
        manual_axes: The axes that become manual, all of them when None. Along the others tensors
            stay global and XLA shards them (JAX runtime only).

    Returns:
        A ManualTensor of the tile's shape. A dim that the axes do not divide is padded with zeros.

    Raises:
        ManualRegionError: `t` is manual already.
        LayoutError: A partition spec that does not fit.
        UnsupportedOpError: Some axes only, on torch_xla.

    Example:
        >>> import torch
        >>> from xla_dtensor.collectives import psum
        >>> from xla_dtensor.spmd import Mesh
        >>> mesh = Mesh(range(8), (2, 4), ("dp", "tp"))
        >>> x = enable_manual_sharding(torch.arange(8.0), ("tp",), mesh=mesh)
        >>> x.shape
        torch.Size([2])
        >>> disable_manual_sharding(psum(x, "tp"), (None,), (2,), mesh=mesh).tolist()
        [12.0, 16.0]
    """
    return enter_region(t, partition_spec, as_mesh(mesh, "enable_manual_sharding"), manual_axes)


@argument_types
def disable_manual_sharding(
    t: torch.Tensor,
    partition_spec: Sequence[Any],
    full_shape: Sequence[int],
    *,
    mesh: Any = None,
) -> XLAShardedTensor:
    """Return the global tensor whose tiles the devices have.

    Args:
        t: A ManualTensor.
        partition_spec: Per dim an axis, a tuple of axes, or None. Along axes that it does not name
            all devices must hold the same values; the first one's are taken.
        full_shape: The global shape.
        mesh: The mesh; the region's own when None.

    Returns:
        An XLAShardedTensor that lies as the partition spec says.

    Raises:
        ManualRegionError: No manual tensor, another mesh, or a wrong full_shape.
        LayoutError: A partition spec that does not fit.
    """
    return wrap_as_sharded_tensor(leave_region(t, partition_spec, full_shape, mesh))


# ------------------------------------------------------------------------------------ ShardingSpec
#
# A mesh and a partition spec, kept to be applied to tensors of one rank.


@argument_types
@dataclass
class ShardingSpec:
    """How the tensors of a data loader are to lie.

    Args:
        mesh: The mesh.
        partition_spec: Per dim an axis (name or number), a tuple of axes, or None.
        minibatch: Whether each process passes its own part of the batch. In one process both mean
            the same.

    Raises:
        LayoutError: The partition spec does not fit the mesh.

    Example:
        >>> from xla_dtensor.spmd import Mesh
        >>> rows = ShardingSpec(Mesh(range(8), (4, 2), ("x", "y")), ("x", None))
        >>> rows.can_apply(torch.ones(8, 2)), rows.can_apply(torch.ones(8))
        (True, False)
    """

    mesh: Any
    partition_spec: tuple[Any, ...]
    minibatch: bool | None = False

    def __post_init__(self) -> None:
        self._layout = Layout.from_partition_spec(
            tuple(self.partition_spec), as_mesh(self.mesh, "ShardingSpec")
        )

    def can_apply(self, t: torch.Tensor) -> bool:
        """Tell whether the spec has as many entries as `t` has dims."""
        return t.ndim == len(self.partition_spec)

    def apply(self, t: torch.Tensor) -> None:
        """Annotate `t` in place; see :func:`xla_dtensor.spmd.mark_sharding`."""
        mark_sharding(t, self.mesh, self.partition_spec)

    def xla_spec(self, t: torch.Tensor) -> Any:
        """Return torch_xla's own object for `t`, as its data loaders want it.

        Args:
            t: A host tensor.

        Returns:
            A ``torch_xla._XLAC.XlaShardingSpec``, None when the spec is for another rank.

        Raises:
            UnsupportedOpError: The runtime is not torch_xla, and has no such loaders.
        """
        if not self.can_apply(t):
            return None
        runtime = get_runtime()
        sharding = self._layout.op_sharding(runtime.root(self._layout.mesh))
        return runtime.input_sharding(t, sharding, bool(self.minibatch))
