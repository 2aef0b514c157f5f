"""DTensor in global view: PyTorch's tensor type, one global value, XLA does the rest.

``DTensor`` subclasses ``torch.distributed.tensor.DTensor``. The inherited ``_local_tensor`` slot
holds the *payload*: the runtime's tensor for the whole global value. Every aten op reaches
``__torch_dispatch__``, which

1. unwraps DTensors to payloads (a plain tensor stands for its own global value),
2. runs the op through the runtime, which is right whatever the sharding, because the value is
   global and XLA partitions it,
3. wraps the results, labelled with the placements that PyTorch's propagator gives.

A worked example, on a (dp=2, tp=4) mesh::

    w = distribute_tensor(weight, mesh, [Replicate(), Shard(0)])   annotated: XLA keeps rows on tp
    x = distribute_tensor(batch, mesh, [Shard(0), Replicate()])    annotated: XLA keeps rows on dp
    y = F.linear(x, w)         one dot; label (Shard(0), Shard(1)); XLA decides by propagation
    y.placements               the label, what PyTorch would say
    y.xla_sharding()           the runtime's truth

Invariants: ``shape``, ``stride`` and ``dtype`` are the payload's; labels are never enforced;
annotations are made only by distribute_tensor, redistribute and tensors made like another
(``zeros_like``, so that optimizer state lies as its parameter does).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from xla_dtensor import checkpoint_hooks
from xla_dtensor.core import Layout, OpSharding, local_shape
from xla_dtensor.device_mesh import DeviceMesh, as_device_mesh, mesh_text
from xla_dtensor.dispatch_check import check_dispatch
from xla_dtensor.errors import DistributeError, UnsupportedOpError
from xla_dtensor.nested import leaves, map_nested
from xla_dtensor.pickling import reduce_dtensor
from xla_dtensor.placement_checks import checked_placements
from xla_dtensor.propagation import legal_placements, propagate
from xla_dtensor.runtimes.base import AddressableShard
from xla_dtensor.runtimes.registry import get_runtime
from xla_dtensor.written import written_targets

__all__ = ["DTensor", "GlobalState", "as_plain"]

check_dispatch()
aten = torch.ops.aten
_MADE_LIKE = {
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.empty_like.default,
    aten.rand_like.default,
    aten.randn_like.default,
}


class GlobalState(DTensorSpec):
    """What a DTensor knows beside its payload; torch reads mesh, placements and meta from it."""

    mesh: DeviceMesh

    @property
    def layout(self) -> Layout:
        """The placements as a Layout of the mesh value."""
        return Layout.from_placements(self.placements, len(self.shape), self.mesh.value)


class DTensor(TorchDTensor):
    """A tensor distributed over a mesh. Made by :func:`xla_dtensor.distribute_tensor`."""

    _local_tensor: torch.Tensor
    _spec: GlobalState

    @staticmethod
    def __new__(
        cls,
        payload: torch.Tensor,
        mesh: DeviceMesh,
        placements: tuple[Any, ...],
        *,
        requires_grad: bool = False,
    ) -> DTensor:
        """Wrap `payload`, the runtime's tensor for the whole value."""
        extra = get_runtime().extra_dispatch_keys
        keys = (
            {} if extra is None or payload.device.type != "cpu" else {"_extra_dispatch_keys": extra}
        )
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            payload.shape,
            strides=payload.stride(),
            storage_offset=payload.storage_offset(),
            dtype=payload.dtype,
            layout=payload.layout,
            device=payload.device,
            requires_grad=requires_grad,
            **keys,
        )
        meta = TensorMeta(payload.shape, payload.stride(), payload.dtype)
        self._spec = GlobalState(mesh, placements, tensor_meta=meta)
        self._local_tensor = payload
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    # ------------------------------------------------------------------ dispatch

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if len(types) > 1 and any(getattr(t, "_is_manual_tensor", False) for t in types):
            return NotImplemented  # a ManualTensor answers, and refuses
        kwargs = kwargs or {}
        payload_args, payload_kwargs = map_nested(_payload, (tuple(args), kwargs))
        result = _run(func, payload_args, payload_kwargs)
        if torch.Tag.inplace_view in func.tags and isinstance(args[0], DTensor):
            return args[0]._reshaped_in_place(func, args, kwargs)
        if func._schema.is_mutable:
            return written_targets(func, args, kwargs)
        if isinstance(result, torch.Tensor) or (isinstance(result, (list, tuple)) and result):
            mesh = _first(args, kwargs)._spec.mesh
            return _wrap(cls, func, result, propagate(func, args, kwargs, mesh), mesh)
        return result

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    def rewrapped(self, payload: torch.Tensor) -> DTensor:
        """Return a DTensor over another payload, with this one's mesh and placements."""
        return type(self)(payload, self._spec.mesh, self._spec.placements)

    def _reshaped_in_place(self, func: Any, args: Sequence[Any], kwargs: Any) -> DTensor:
        """Follow the payload, whose shape ``t_``, ``squeeze_`` and the like have changed."""
        name = func._schema.name.removeprefix("aten::").removesuffix("_")
        packet, taken = getattr(aten, name), [a.name for a in func._schema.arguments]
        overloads = [getattr(packet, overload) for overload in packet.overloads()]
        view = next(o for o in overloads if [a.name for a in o._schema.arguments] == taken)
        mesh, placements = self._spec.mesh, propagate(view, args, kwargs, self._spec.mesh)
        changed = DTensor(self._local_tensor, mesh, placements)
        torch.Tensor.data.__set__(self, changed)  # pyright: ignore
        self._spec = changed._spec
        if not self.is_meta:
            get_runtime().reshaped_in_place(self._local_tensor, self._spec.layout)
        return self

    def rewrapper(self) -> Callable[[torch.Tensor], DTensor]:
        """Return a function that wraps payloads as this one is, without holding this one."""
        kind, mesh, placements = type(self), self._spec.mesh, self._spec.placements
        return lambda payload: kind(payload, mesh, placements)

    # ------------------------------------------------------------------ what it is

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh that the placements refer to."""
        return self._spec.mesh

    @property
    def mesh_layout(self) -> Layout:
        """The placements as a :class:`xla_dtensor.Layout`; ``layout`` is torch's, strided."""
        return self._spec.layout

    def xla_sharding(self) -> OpSharding:
        """Return how the tensor really lies, read from the runtime, relative to its root mesh.

        Example:
            >>> import torch, xla_dtensor as xd
            >>> from torch.distributed.tensor import Shard
            >>> mesh = xd.init_device_mesh("xla", (8,))
            >>> str(xd.distribute_tensor(torch.ones(8), mesh, [Shard(0)]).xla_sharding())
            '{devices=[8]<=[8]}'
        """
        return get_runtime().op_sharding(self._local_tensor)

    def addressable_shards(self) -> tuple[AddressableShard, ...]:
        """Return this process's shards, ordered by device id."""
        return get_runtime().addressable_shards(self._local_tensor)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        placements = ", ".join(map(str, self._spec.placements))
        grad = ", requires_grad=True" if self.requires_grad else ""
        return (
            f"DTensor(shape={tuple(self.shape)}, dtype={dtype}, placements=({placements}), "
            f"mesh={mesh_text(self._spec.mesh.value)}, local_shape={self._local_shape()}{grad})"
        )

    def __format__(self, format_spec: str) -> str:
        # torch formats a number only when the type is exactly Tensor.
        number = format_spec and self.ndim == 0 and not self.is_meta
        return format(self.item(), format_spec) if number else super().__format__(format_spec)

    def _local_shape(self) -> tuple[int, ...]:
        mesh, shape = self._spec.mesh, tuple(self.shape)
        coordinate = tuple(mesh.get_coordinate() or [0] * mesh.ndim)
        return local_shape(self._spec.layout, shape, coordinate, rule="torch").shape

    # ------------------------------------------------------------------ moving

    def redistribute(
        self,
        device_mesh: Any = None,
        placements: Sequence[Any] | None = None,
        *,
        async_op: bool = False,
        forward_dtype: torch.dtype | None = None,
        backward_dtype: torch.dtype | None = None,
    ) -> DTensor:
        """Return the same values lying as `placements` say; this tensor stays as it is.

        Args:
            device_mesh: The mesh of the result; this tensor's own when None.
            placements: One per axis of that mesh; Partial is refused.
            async_op: Accepted for torch's signature: XLA schedules communication itself.
            forward_dtype: Cast to this dtype first.
            backward_dtype: Cast the gradient to this dtype before it is moved.

        Returns:
            A new DTensor. The gradient comes back with this tensor's placements.

        Raises:
            DistributeError: Wrong placements.
        """
        mesh = self._spec.mesh if device_mesh is None else as_device_mesh(device_mesh)
        if placements is None:
            raise DistributeError(
                "redistribute was called without placements. There is nothing to move to. Pass "
                f"placements with one entry per axis of the mesh {mesh_text(mesh.value)}."
            )
        checked = checked_placements("redistribute", placements, mesh, self.ndim, partial=False)
        source = self if forward_dtype is None else self.to(forward_dtype)
        return _Redistribute.apply(  # pyright: ignore[reportReturnType]
            source, mesh, checked, backward_dtype
        )

    def full_tensor(self, *, grad_placements: Sequence[Any] | None = None) -> torch.Tensor:
        """Return the whole value as a plain tensor of the runtime, replicated on every device.

        Nothing is copied to the host: call ``.cpu()`` on the result for that.

        Args:
            grad_placements: How the incoming gradient is to lie; Replicate when None.

        Raises:
            DistributeError: Wrong placements.
        """
        mesh = self._spec.mesh
        replicated = (Replicate(),) * mesh.ndim
        for_grad = checked_placements(
            "full_tensor", grad_placements, mesh, self.ndim, partial=False
        )
        whole = self.redistribute(placements=replicated)
        return as_plain(whole, for_grad)

    def to_local(self, *, grad_placements: Sequence[Any] | None = None) -> torch.Tensor:
        """Refused: see the message."""
        raise UnsupportedOpError(
            f"to_local() was called on {self!r}. One process holds many devices here, so there is "
            "no one local tensor. Use addressable_shards() for this process's shards, or "
            "full_tensor() for the whole value."
        )

    @staticmethod
    def from_local(
        local_tensor: torch.Tensor, device_mesh: Any = None, placements: Any = None, **_: Any
    ) -> DTensor:
        """Refused: see the message."""
        raise UnsupportedOpError(
            f"from_local was called with a tensor of shape={tuple(local_tensor.shape)}. One "
            "process holds many devices here, and one local tensor does not say what the others "
            "hold. Pass the global tensor to distribute_tensor."
        )

    def cpu(self, *_: Any, **__: Any) -> torch.Tensor:
        """Return the whole value as a plain CPU tensor. All processes have to call this alike."""
        return get_runtime().to_host(self.full_tensor().detach())

    def numpy(self, *, force: bool = False) -> Any:
        """Return the whole value as a NumPy array."""
        return self.cpu().numpy(force=force)

    def tolist(self) -> Any:
        """Return the whole value as nested lists."""
        return self.cpu().tolist()

    # ------------------------------------------------------------------ Python's protocols

    @property
    def data(self) -> torch.Tensor:
        """The tensor without its autograd history; assigning rebinds the payload."""
        return self.detach()

    @data.setter
    def data(self, source: torch.Tensor) -> None:
        if not isinstance(source, DTensor):
            raise DistributeError(
                f"A {type(source).__name__} was assigned to .data of {self!r}. A DTensor's data "
                "has to say how it lies on the mesh. Assign distribute_tensor(value, mesh, "
                "placements)."
            )
        torch.Tensor.data.__set__(self, source)  # pyright: ignore
        self._local_tensor, self._spec = source._local_tensor, source._spec

    def __deepcopy__(self, memo: dict[int, Any]) -> DTensor:
        if id(self) not in memo:
            with torch.no_grad():
                payload = _constrained(self._local_tensor, self._spec.layout)
            memo[id(self)] = copied = self.rewrapped(payload)
            copied.requires_grad_(self.requires_grad)
            if getattr(self, "_is_param", False):
                copied = memo[id(self)] = torch.nn.Parameter(copied, self.requires_grad)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return reduce_dtensor(self)

    def __create_write_items__(self, fqn: str, object: Any) -> Any:
        return checkpoint_hooks.create_write_items(fqn, self)

    def __create_chunk_list__(self) -> Any:
        return checkpoint_hooks.create_chunk_list(self)

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        return checkpoint_hooks.get_tensor_shard(self, index)


def _constrained(payload: torch.Tensor, layout: Layout) -> torch.Tensor:
    return payload.clone() if payload.is_meta else get_runtime().constrain(payload, layout)


def _payload(value: Any) -> Any:
    return value._local_tensor if isinstance(value, DTensor) else value


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    runtime = get_runtime()
    given = leaves((args, kwargs))
    if any(isinstance(leaf, torch.Tensor) and runtime.is_payload(leaf) for leaf in given):
        return runtime.run_op(func, args, kwargs)
    return func(*args, **kwargs)


def _first(args: Any, kwargs: Any) -> DTensor:
    return next(v for v in leaves((args, kwargs)) if isinstance(v, DTensor))


def _wrap(cls: type[DTensor], func: Any, result: Any, placements: Any, mesh: DeviceMesh) -> Any:
    if isinstance(result, (list, tuple)):
        each = placements if isinstance(placements, list) else [placements] * len(result)
        each = each if len(each) == len(result) else [each[0]] * len(result)
        # Not type(result): some are named tuples, which the dispatcher makes from any sequence.
        wrapped = [_wrap(cls, func, r, p, mesh) for r, p in zip(result, each, strict=True)]
        return wrapped if isinstance(result, list) else tuple(wrapped)
    if not isinstance(result, torch.Tensor):
        return result
    labels = legal_placements(placements, result.ndim, mesh)
    if func in _MADE_LIKE and not result.is_meta:
        layout = Layout.from_placements(labels, result.ndim, mesh.value)
        result = get_runtime().constrain(result, layout)
    return cls(result, mesh, labels)


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, source: DTensor, mesh: DeviceMesh, placements: Any, dtype: Any
    ) -> DTensor:
        ctx.source = (source._spec.mesh, source._spec.placements)
        ctx.dtype = dtype
        layout = Layout.from_placements(placements, source.ndim, mesh.value)
        return DTensor(_constrained(source._local_tensor, layout), mesh, placements)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        mesh, placements = ctx.source
        # A gradient has a value, so what was pending in the forward is whole in the backward.
        target = tuple(Replicate() if p.is_partial() else p for p in placements)
        grad = grad if ctx.dtype is None else grad.to(ctx.dtype)
        return grad.redistribute(mesh, target), None, None, None


def as_plain(tensor: DTensor, grad_placements: Sequence[Any] | None = None) -> torch.Tensor:
    """Return the runtime's plain tensor for the whole value, lying as it does; no data moves.

    Args:
        tensor: The DTensor. Gradients of the result come back to it.
        grad_placements: How these are to lie; as `tensor` is labelled when None.
    """
    placements = tensor._spec.placements if grad_placements is None else grad_placements
    placements = tuple(Replicate() if p.is_partial() else p for p in placements)
    return _ToPlain.apply(tensor, placements)  # pyright: ignore[reportReturnType]


class _ToPlain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, source: DTensor, grad_placements: Any) -> torch.Tensor:
        ctx.mesh, ctx.placements = source._spec.mesh, grad_placements
        return get_runtime().to_plain(source._local_tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        layout = Layout.from_placements(ctx.placements, grad.ndim, ctx.mesh.value)
        return DTensor(_constrained(grad, layout), ctx.mesh, ctx.placements), None
