"""DTensor in global view: PyTorch's tensor type, one global value, XLA does the rest.

``DTensor`` subclasses ``torch.distributed.tensor.DTensor``. The inherited ``_local_tensor`` slot
holds the *payload*: the runtime's tensor for the whole global value. Every aten op reaches
``__torch_dispatch__``, which

1. unwraps DTensors to payloads (a plain tensor stands for its own global value),
2. runs the op through the runtime, which is right whatever the sharding, because the value is
   global and XLA partitions it,
3. wraps the results, labelled with the placements that PyTorch's propagator gives.

Linear, matmul, einsum and attention are caught before that, whole, on the autograd key
(``runtimes/whole_ops.py``): `x @ w` arrives here as one op whose dims are not flattened.

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

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch.distributed.device_mesh import DeviceMesh as TorchDeviceMesh
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.modules import module as torch_module

from mesh_utils import Mesh
from xla_dtensor.core import Layout, OpSharding, local_shape
from xla_dtensor.core.argument_types import argument_types
from xla_dtensor.core.errors import ArgumentTypeError, DistributeError
from xla_dtensor.dtensor import dcp, dynamo
from xla_dtensor.dtensor.dispatch import check_dispatch, dispatch, new_dtensor, state_of
from xla_dtensor.dtensor.labels import GlobalState, OuterCuts, propagate
from xla_dtensor.dtensor.mesh import (
    DeviceMesh,
    as_device_mesh,
    current_mesh,
    devices_of_ranks,
    is_off_mesh,
    mesh_text,
    ranks_of_devices,
)
from xla_dtensor.dtensor.redistribute import as_plain, checked_placements, redistributed
from xla_dtensor.runtimes import functional
from xla_dtensor.runtimes.base import AddressableShard
from xla_dtensor.runtimes.nested import runs_as_it_is
from xla_dtensor.runtimes.op_meta import output_meta
from xla_dtensor.runtimes.registry import get_runtime
from xla_dtensor.runtimes.state import ON_MESH
from xla_dtensor.runtimes.torch_own import ReadOnHost

__all__ = [
    "DTensor",
    "GlobalState",
    "empty",
    "full",
    "load_dtensor",
    "ones",
    "rand",
    "randn",
    "reduce_dtensor",
    "zeros",
]

aten = torch.ops.aten


# -------------------------------------------------------------------------- DTensor in global view

check_dispatch()


@runs_as_it_is
class DTensor(ReadOnHost, TorchDTensor):
    """A tensor distributed over a mesh. Made by :func:`xla_dtensor.distribute_tensor`."""

    _local_tensor: torch.Tensor
    _spec: GlobalState
    # How the gradient of to_local() lies where nobody says; None: as the tensor does.
    _gradient_placements: tuple[Any, ...] | None = None

    @staticmethod
    def __new__(
        cls,
        local_tensor: torch.Tensor,
        device_mesh: Any = None,
        placements: Sequence[Any] | None = None,
        **options: Any,
    ) -> DTensor:
        """Make a DTensor of what each device has: :meth:`from_local` under its shortest name."""
        return cls.from_local(local_tensor, device_mesh, placements, **options)

    @classmethod
    def _wrapping(
        cls,
        payload: torch.Tensor,
        mesh: DeviceMesh,
        placements: tuple[Any, ...],
        requires_grad: bool = False,
        outer_cuts: OuterCuts = (),
        stride: tuple[int, ...] | None = None,
    ) -> DTensor:
        """Wrap `payload`, the runtime's tensor for the whole value, which may have no strides."""
        state = state_of(payload, mesh, placements, outer_cuts)
        if stride is not None and not get_runtime().has_strides:
            state = state.with_stride(stride)
        return new_dtensor(cls, payload, state, requires_grad)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    # ------------------------------------------------------------------ dispatch

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if len(types) > 1 and any(getattr(t, "_is_per_device", False) for t in types):
            return NotImplemented  # a ManualTensor answers, and refuses
        if module_hooks:
            warn_if_communication_is_counted()
        return dispatch(cls, func, args, kwargs or {})

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    def rewrapped(self, payload: torch.Tensor) -> DTensor:
        """Return a DTensor over another payload, with this one's mesh and placements."""
        return self.rewrapper()(payload)

    def _reshaped_in_place(self, func: Any, args: Sequence[Any], kwargs: Any) -> DTensor:
        """Follow the payload, whose shape ``t_``, ``squeeze_`` and the like have changed."""
        name = func._schema.name.removeprefix("aten::").removesuffix("_")
        packet, names = getattr(aten, name), [a.name for a in func._schema.arguments]
        overloads = [getattr(packet, overload) for overload in packet.overloads()]
        view = next(o for o in overloads if [a.name for a in o._schema.arguments] == names)
        mesh, placements = self._spec.mesh, propagate(view, args, kwargs, self._spec.mesh)
        payload = functional.reshaped(view, self._local_tensor, args, kwargs)
        meta = None if get_runtime().has_strides else output_meta(view, args, kwargs)
        stride = None if meta is None else meta.stride
        changed = DTensor._wrapping(payload, mesh, placements, stride=stride)
        self._local_tensor = payload
        torch.Tensor.data.__set__(self, changed)  # pyright: ignore
        self._spec = changed._spec
        if get_runtime().is_payload(self._local_tensor):
            get_runtime().reshaped_in_place(self._local_tensor, self._spec.layout)
        return self

    def rewrapper(self) -> Callable[[torch.Tensor], DTensor]:
        """Return a function that wraps payloads as this one is, without holding this one."""
        kind, mesh, placements = type(self), self._spec.mesh, self._spec.placements
        outer_cuts, made_by = self._spec.outer_cuts, self._spec.made_by

        def wrap(payload: torch.Tensor) -> DTensor:
            tensor = kind._wrapping(payload, mesh, placements, outer_cuts=outer_cuts)
            tensor._spec.made_by = made_by
            return tensor

        return wrap

    # ------------------------------------------------------------------ what it is

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh that the placements refer to."""
        return self._spec.mesh

    @property
    def mesh_layout(self) -> Layout:
        """The placements as a :class:`xla_dtensor.Layout`.

        HyperParallel's ``layout``; under that name a torch tensor has torch.strided.
        """
        return self._spec.layout

    @property
    def local_shape(self) -> torch.Size:
        """The shape of the first reachable device's shard, by PyTorch's rule for uneven ones."""
        return torch.Size(self._local_shape())

    def is_partial(self) -> bool:
        """Tell whether a placement is Partial: on an axis, a reduction is pending."""
        return any(placement.is_partial() for placement in self._spec.placements)

    def reduce_partial(self) -> DTensor:
        """Return the tensor with Replicate in place of each Partial; itself if it has none.

        Example:
            >>> import torch, xla_dtensor as xd
            >>> from torch.distributed.tensor import Partial, Shard
            >>> mesh = xd.init_device_mesh("xla", (8,))
            >>> total = xd.distribute_tensor(torch.ones(16, 2), mesh, [Shard(0)]).sum(0)
            >>> total.is_partial(), total.reduce_partial().is_partial()
            (True, False)
        """
        placements = [Replicate() if p.is_partial() else p for p in self._spec.placements]
        return self.redistribute(placements=placements) if self.is_partial() else self

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
        off_mesh = is_off_mesh(self._spec.mesh)
        return () if off_mesh else get_runtime().addressable_shards(self._local_tensor)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        placements = ", ".join(map(str, self._spec.placements))
        grad = ", requires_grad=True" if self.requires_grad else ""
        return (
            f"DTensor(shape={tuple(self.shape)}, dtype={dtype}, placements=({placements}), "
            f"mesh={mesh_text(self._spec.mesh.value)}, local_shape={self._local_shape()}{grad})"
        )

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
            DistributeError: Wrong placements. A RuntimeError too, where there are none, or Partial.
        """
        return redistributed(self, device_mesh, placements, forward_dtype, backward_dtype)

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
        return as_plain(self.redistribute(placements=replicated), for_grad)

    def to_local(self, *, grad_placements: Sequence[Any] | None = None) -> torch.Tensor:
        """Return the local tensor, as a :class:`~xla_dtensor.LocalView` of all devices' shards.

        Args:
            grad_placements: How the gradient of the result lies; as this tensor does when None.

        Returns:
            The view, of the first device's local shape. It shares memory with this tensor, unless
            a gradient is recorded.

        Raises:
            DistributeError: Wrong placements.

        Example:
            >>> import torch, xla_dtensor as xd
            >>> from torch.distributed.tensor import Shard
            >>> mesh = xd.init_device_mesh("xla", (8,))
            >>> xd.distribute_tensor(torch.arange(16), mesh, [Shard(0)]).to_local().tolist()
            [0, 1]
        """
        from xla_dtensor.dtensor.local import to_view

        mesh = self._spec.mesh
        if grad_placements is None:
            return to_view(self, self._gradient_placements)
        canonical = checked_placements("to_local", grad_placements, mesh, self.ndim, partial=True)
        return to_view(self, canonical)

    @staticmethod
    @argument_types
    def from_local(
        local_tensor: torch.Tensor,
        device_mesh: Any = None,
        placements: Sequence[Any] | None = None,
        *,
        run_check: bool = False,
        shape: Sequence[int] | None = None,
        stride: Sequence[int] | None = None,
        grad_placements: Sequence[Any] | None = None,
        same_on_every_device: bool = False,
    ) -> DTensor:
        """Make a DTensor of what each device has.

        Args:
            local_tensor: A LocalView; or a plain tensor, which is the same on every device.
            device_mesh: The mesh; that of the open ``with mesh:`` block when None.
            placements: One per mesh axis, Partial too; None replicates.
            run_check: Along Replicate axes, take the first device's values, where the devices may
                have different ones. Without it, that raises.
            shape: The global shape, where it is not what equal shards make up.
            stride: Goes with `shape`; XLA lays memory out by itself.
            grad_placements: How the gradient lies of which each device gets its shard back; as
                `placements` say when None.
            same_on_every_device: Let a plain tensor stand for equal shards, or equal parts.

        Returns:
            The DTensor. Its gradient goes back to `local_tensor`.

        Raises:
            DistributeError: Wrong mesh, placements or shape; or a plain tensor for several devices.
            LocalViewError: A view that does not fit mesh, placements and shape.
        """
        from xla_dtensor.dtensor.local import from_local_in_graph, make_from_local

        make = from_local_in_graph if torch.compiler.is_dynamo_compiling() else make_from_local
        return make(
            local_tensor,
            device_mesh,
            placements,
            (shape, stride),
            grad_placements,
            run_check=run_check,
            same_on_every_device=same_on_every_device,
        )

    def cpu(self, *_: Any, **__: Any) -> torch.Tensor:
        """Return the whole value as a plain CPU tensor. All processes have to call this alike."""
        # Parts are put together on the host: on the devices each would need room for the whole.
        has_sums = any(placement.is_partial() for placement in self._spec.placements)
        tensor = (self.full_tensor() if has_sums else as_plain(self)).detach()
        return tensor if is_off_mesh(self._spec.mesh) else get_runtime().to_host(tensor)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """As :meth:`torch.Tensor.to`; to the mesh's own device type it stays where it is.

        To the CPU, from a mesh of other devices: the whole value, as a plain tensor.
        """
        kind = self._spec.mesh.device_type
        if args and isinstance(args[0], (str, torch.device)):
            names = ("device", "dtype", "non_blocking", "copy")
            args, kwargs = (), {**dict(zip(names, args, strict=False)), **kwargs}
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == kind:
            kwargs = {**kwargs, "device": None}
        elif (
            self.device.type != "cpu" and device is not None and torch.device(device).type == "cpu"
        ):
            return self.full_tensor().to(*args, **kwargs)
        return super().to(*args, **kwargs)

    def data_ptr(self) -> int:
        """Return the address of the whole value on the host; see `ReadOnHost`."""
        if not get_runtime().is_payload(self._local_tensor):  # a fake tensor of torch.compile's
            return torch.Tensor.data_ptr(self)
        return super().data_ptr()

    def numpy(self, *, force: bool = False) -> Any:
        """Return the whole value as a NumPy array."""
        return self.cpu().numpy(force=force)

    def jax(self) -> Any:
        """Return the whole value as a global jax.Array, on the JAX runtime.

        While a step is traced it is JAX's tracer of the value. Libraries tell by that whether
        values can be read: Transformers takes its branches for ``jax.jit`` then.

        Returns:
            A jax.Array of the tensor's shape and dtype. It shares the tensor's memory, which a
            compiled step may give back: use it before the next one.

        Raises:
            UnsupportedOpError: The runtime is not JAX.

        Example:
            >>> import torch, xla_dtensor as xd
            >>> from torch.distributed.tensor import Shard
            >>> mesh = xd.init_device_mesh("xla", (8,))
            >>> xd.distribute_tensor(torch.arange(3), mesh, [Shard(0)]).jax()
            Array([0, 1, 2], dtype=int64)
        """
        return get_runtime().jax_array(self.reduce_partial()._local_tensor)

    def __array_wrap__(self, array: Any, *_: Any) -> NoReturn:
        raise DistributeError(
            f"A NumPy array was combined with {self!r}. NumPy computes on the host, and its result "
            "would be no DTensor. Pass torch.from_numpy(array), or take x.numpy()."
        )

    def tolist(self) -> Any:
        """Return the whole value as nested lists."""
        return self.cpu().tolist()

    # ------------------------------------------------------------------ Python's protocols

    @property
    def data(self) -> torch.Tensor:
        """The tensor without its autograd history; assigning rebinds the payload.

        Writes to it are hidden from autograd, unlike those to ``detach()``; on torch_xla, where
        only autograd's counter tells local views of writes, they are not.
        """
        if torch.compiler.is_compiling() or not get_runtime().has_value_tokens:
            return self.detach()
        return torch.Tensor.data.__get__(self)  # pyright: ignore

    @data.setter
    def data(self, source: torch.Tensor) -> None:
        if not isinstance(source, DTensor):
            raise DistributeError(
                f"A {type(source).__name__} was assigned to .data of {self!r}. A DTensor's data "
                "has to say how it lies on the mesh. Assign distribute_tensor(value, mesh, "
                "placements). Where module.cpu() does that, call "
                "torch.__future__.set_overwrite_module_params_on_conversion(True) first: the "
                "module gets plain parameters, new objects, in place of DTensors."
            )
        runtime, old, new = get_runtime(), self._local_tensor, source._local_tensor
        has_values = runtime.is_payload(old) and runtime.is_payload(new)
        same_labels = source._spec.placements == self._spec.placements
        if has_values and same_labels and runtime.is_same_memory(new, old):
            return  # Its own data, as in ``p.data -= p.grad``.
        runtime.note_new_data(self)
        torch.Tensor.data.__set__(self, source)  # pyright: ignore
        self._local_tensor, self._spec = source._local_tensor, source._spec

    def __deepcopy__(self, memo: dict[int, Any]) -> DTensor:
        if id(self) not in memo:
            with torch.no_grad():
                payload = functional.constrain(self._local_tensor, self._spec.span_layout)
            memo[id(self)] = copied = self._as_this(self.rewrapped(payload))
            if self.is_leaf and self.grad is not None:
                copied.grad = copy.deepcopy(self.grad, memo)
            _give_attributes(copied, copy.deepcopy(_attributes_of(self), memo))
        return memo[id(self)]

    def __copy__(self) -> DTensor:
        copied = self._as_this(self.detach())
        _give_attributes(copied, _attributes_of(self))
        return copied

    def _as_this(self, tensor: Any) -> Any:
        """Return a new tensor as one that requires a gradient, or is a Parameter, as this one."""
        if getattr(self, "_is_param", False):
            return torch.nn.Parameter(tensor, self.requires_grad)
        return tensor.requires_grad_(self.requires_grad)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return reduce_dtensor(self)

    def __tensor_flatten__(self) -> Any:
        return dynamo.flatten(self)

    @staticmethod
    def __tensor_unflatten__(inner: Any, state: Any, size: Any, stride: Any) -> DTensor:
        return dynamo.unflatten(DTensor, inner, state, stride)

    def __coerce_tangent_metadata__(self) -> Any:
        return dynamo.coerced_tangent(self)

    def __coerce_same_metadata_as_tangent__(self, state: Any, expected_type: Any = None) -> Any:
        return dynamo.coerced_tangent(self, state, expected_type)

    def __create_write_items__(self, fqn: str, object: Any) -> Any:
        return dcp.create_write_items(fqn, self)

    def __create_chunk_list__(self) -> Any:
        return dcp.create_chunk_list(self)

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        return dcp.get_tensor_shard(self, index)


# ------------------------------------------------------------------------ Tensors made on the mesh
#
# Each device makes its own part, the whole exists nowhere.
#
# The names and arguments are PyTorch's (``torch.distributed.tensor.ones`` and the others)::
#
#     ones(8, 6, device_mesh=mesh, placements=[Shard(0), Replicate()])
#     zeros((8, 6), mesh, ["dp", None])            mesh and placements may be given by position
#
# Random values do not depend on the placements: the same seed gives the same global tensor however
# it is cut.


@argument_types
def ones(
    *size: Any,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: Any = None,
    placements: Sequence[Any] | None = None,
) -> DTensor:
    """Make a DTensor of ones.

    Args:
        *size: The global shape, as integers or one sequence; mesh and placements may follow.
        dtype: Its dtype; torch's default when None.
        layout: torch.strided.
        requires_grad: Whether autograd records operations on it.
        device_mesh: The mesh; that of the open ``with mesh:`` block when None.
        placements: One per mesh axis, or one alias entry per dim; None replicates.

    Returns:
        The DTensor.

    Raises:
        DistributeError: Wrong mesh, placements or layout.
        ArgumentTypeError: A size that is none.

    Example:
        >>> import xla_dtensor as xd
        >>> from torch.distributed.tensor import Shard
        >>> mesh = xd.init_device_mesh("xla", (8,))
        >>> ones(16, 2, device_mesh=mesh, placements=[Shard(0)])
        DTensor(shape=(16, 2), dtype=float32, placements=(S(0)), mesh=(0=8), local_shape=(2, 2))
    """
    return _make("ones", size, 1, dtype, layout, requires_grad, device_mesh, placements)


@argument_types
def zeros(
    *size: Any,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: Any = None,
    placements: Sequence[Any] | None = None,
) -> DTensor:
    """Make a DTensor of zeros; see :func:`ones`."""
    return _make("zeros", size, 0, dtype, layout, requires_grad, device_mesh, placements)


@argument_types
def empty(
    *size: Any,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: Any = None,
    placements: Sequence[Any] | None = None,
) -> DTensor:
    """Make a DTensor whose values are not to be relied upon (they are zeros); see :func:`ones`."""
    return _make("empty", size, 0, dtype, layout, requires_grad, device_mesh, placements)


@argument_types
def full(
    size: Any,
    fill_value: complex,
    *mesh_and_placements: Any,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: Any = None,
    placements: Sequence[Any] | None = None,
) -> DTensor:
    """Make a DTensor of one value; see :func:`ones`.

    Args:
        size: The global shape.
        fill_value: The value; it decides the dtype when that is None.
        *mesh_and_placements: Mesh and placements, where given by position.
        dtype: As for :func:`ones`.
        layout: As for :func:`ones`.
        requires_grad: As for :func:`ones`.
        device_mesh: As for :func:`ones`.
        placements: As for :func:`ones`.
    """
    if dtype is None:
        dtype = torch.full((), fill_value).dtype
    size = (size, *mesh_and_placements)
    return _make("full", size, fill_value, dtype, layout, requires_grad, device_mesh, placements)


@argument_types
def rand(
    *size: Any,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    device_mesh: Any = None,
    placements: Sequence[Any] | None = None,
) -> DTensor:
    """Make a DTensor of values drawn uniformly from [0, 1); see :func:`ones`."""
    return _make("rand", size, "uniform", dtype, layout, requires_grad, device_mesh, placements)


@argument_types
def randn(
    *size: Any,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    device_mesh: Any = None,
    placements: Sequence[Any] | None = None,
) -> DTensor:
    """Make a DTensor of values drawn from the standard normal distribution; see :func:`ones`."""
    return _make("randn", size, "normal", dtype, layout, requires_grad, device_mesh, placements)


def _make(
    function: str,
    size: tuple[Any, ...],
    fill: Any,
    dtype: torch.dtype | None,
    layout: torch.layout,
    requires_grad: bool,
    device_mesh: Any,
    placements: Any,
) -> DTensor:
    size, device_mesh, placements = _by_position(size, device_mesh, placements)
    shape = _shape(function, size)
    if layout != torch.strided:
        raise DistributeError(
            f"{function} was called with layout={layout}. A DTensor is dense. Pass torch.strided, "
            "or leave it out."
        )
    dtype = torch.get_default_dtype() if dtype is None else dtype
    mesh = current_mesh(function) if device_mesh is None else as_device_mesh(device_mesh)
    canonical = checked_placements(function, placements, mesh, len(shape), partial=False)
    mesh_layout = Layout.from_placements(canonical, len(shape), mesh.value)
    if is_off_mesh(mesh):
        payload = torch.empty(shape, dtype=dtype, device="meta")
        if isinstance(fill, str):
            get_runtime().skip_draw()
    else:
        payload = get_runtime().make(fill, shape, dtype, mesh_layout)
    return DTensor._wrapping(payload, mesh, canonical, requires_grad=requires_grad)


def _by_position(size: tuple[Any, ...], mesh: Any, placements: Any) -> tuple[Any, Any, Any]:
    """Take mesh and placements from behind the size."""
    for place, argument in enumerate(size):
        if isinstance(argument, (TorchDeviceMesh, Mesh)):
            behind = size[place + 1 :]
            if mesh is not None or len(behind) > 1 or (behind and placements is not None):
                raise ArgumentTypeError(
                    "A factory was called with a mesh by position and more arguments than "
                    "placements behind it, or by name as well. Each is taken once. Pass (size, "
                    "mesh, placements)."
                )
            return size[:place], argument, behind[0] if behind else placements
    return size, mesh, placements


def _shape(function: str, size: tuple[Any, ...]) -> tuple[int, ...]:
    if len(size) == 1 and isinstance(size[0], Sequence):
        size = tuple(size[0])
    if any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in size):
        raise ArgumentTypeError(
            f"{function} was called with size={size}. A shape is made of non-negative integers. "
            "Pass them one by one or as one sequence; mesh and placements go behind or by name."
        )
    return tuple(size)


# ---------------------------------------------------------- Save and load DTensors with torch.save
#
# The whole value with mesh and placements.
#
# A file holds the global value as a CPU tensor, so it can be read anywhere; loading puts it on the
# mesh again. The record is made of plain values only, so that ``torch.load`` accepts it with its
# default ``weights_only=True``. (Sharded checkpoints of big models are another matter.)


def reduce_dtensor(tensor: DTensor) -> Any:
    """Return the pickle record of `tensor`. All processes have to call this alike."""
    mesh = tensor._spec.mesh.value
    payload = tensor._local_tensor
    host = payload if payload.is_meta else get_runtime().to_host(payload.detach())
    record = {
        "value": host,
        "root": _mesh_record(mesh.root),
        "axes": None if mesh.is_root else tuple(mesh.axis_names),
        "placements": [_placement_record(p) for p in tensor._spec.placements],
        "requires_grad": tensor.requires_grad,
        "is_parameter": bool(getattr(tensor, "_is_param", False)),
        "attributes": _attributes_of(tensor),
    }
    return (load_dtensor, (record,))


def load_dtensor(record: dict[str, Any]) -> DTensor:
    """Return the DTensor of a record made by :func:`reduce_dtensor`."""
    ranks, *shape_and_names = record["root"]
    root = Mesh(devices_of_ranks(ranks).tolist(), *shape_and_names)
    mesh = as_device_mesh(root if record["axes"] is None else root[record["axes"]])
    placements = tuple(_placement(*fields) for fields in record["placements"])
    host: torch.Tensor = record["value"]
    layout = Layout.from_placements(placements, host.ndim, mesh.value)
    payload = host if host.is_meta else get_runtime().put(host, layout)
    tensor = DTensor._wrapping(payload, mesh, placements, requires_grad=record["requires_grad"])
    if record["is_parameter"]:
        tensor = torch.nn.Parameter(tensor, record["requires_grad"])
    _give_attributes(tensor, record.get("attributes", {}))
    return tensor  # pyright: ignore


def _attributes_of(tensor: DTensor) -> dict[str, Any]:
    """Return what Python code has put on a tensor."""
    own = ("_is_param", "_host_copy")
    return {name: value for name, value in vars(tensor).items() if name not in own}


def _give_attributes(tensor: Any, attributes: dict[str, Any]) -> None:
    for name, value in attributes.items():
        setattr(tensor, name, value)


def _mesh_record(mesh: Mesh) -> tuple[Any, ...]:
    # Ranks, so that another job, whose processes hold other ids, finds its devices.
    return (
        ranks_of_devices(mesh.device_ids).ravel().tolist(),
        tuple(mesh.mesh_shape),
        tuple(mesh.axis_names),
    )


def _placement_record(placement: Any) -> tuple[Any, ...]:
    if isinstance(placement, _StridedShard):
        return ("strided", placement.dim, placement.split_factor)
    if placement.is_partial():
        return ("partial", placement.reduce_op)
    return ("shard", placement.dim) if placement.is_shard() else ("replicate",)


def _placement(kind: str, *fields: Any) -> Any:
    from torch.distributed.tensor import Partial, Replicate, Shard

    if kind == "strided":
        return _StridedShard(fields[0], split_factor=fields[1])
    return {"partial": Partial, "shard": Shard, "replicate": Replicate}[kind](*fields)


torch.serialization.add_safe_globals(
    [load_dtensor, (load_dtensor, "xla_dtensor.pickling.load_dtensor")]  # the name in older files
)


# ------------------------------- CommDebugMode counts torch's collectives, and there are none here
#
# A warning says so.
#
# PyTorch's DTensor calls collectives, and ``torch.distributed.tensor.debug.CommDebugMode`` counts
# the calls. Here the partitioner puts them into the compiled program, where no mode of Python's
# sees them, and the count would be 0 whatever is communicated. What a program communicates is read
# from the program itself::
#
#     step = xd.compile(function)
#     step(x)
#     summarize(collectives(step.hlo()))      of xla_dtensor.report

_TRACKERS = "torch.distributed.tensor.debug._comm_mode"
_WARNED = "_xla_dtensor_has_warned"

# CommDebugMode takes itself off the stack of modes while an op runs, but its hooks stay.
module_hooks = torch_module._global_forward_pre_hooks


def warn_if_communication_is_counted() -> None:
    """Warn, once per CommDebugMode that is open, that it counts nothing of what XLA does.

    To be called where an op on a DTensor arrives while `module_hooks` is not empty.

    Example:
        >>> import torch, xla_dtensor as xd
        >>> from torch.distributed.tensor.debug import CommDebugMode
        >>> mesh = xd.init_device_mesh("xla", (8,))
        >>> with warnings.catch_warnings(record=True) as caught, CommDebugMode() as mode:
        ...     _ = xd.distribute_tensor(torch.ones(8), mesh) + 1
        >>> len(caught), mode.get_total_counts()
        (1, 0)
    """
    for hook in list(module_hooks.values()):
        tracker = getattr(hook, "__self__", None)
        if type(tracker).__module__ == _TRACKERS and _WARNED not in vars(tracker):
            setattr(tracker, _WARNED, True)
            warnings.warn(
                "CommDebugMode saw an op on a DTensor of xla_dtensor. It counts calls of "
                "collectives, but here XLA's partitioner makes them, and the counts stay 0. Pass "
                "the hlo() of a function compiled with xla_dtensor.compile to "
                "xla_dtensor.report.collectives.",
                UserWarning,
                stacklevel=3,
            )


ON_MESH.append(DTensor)
