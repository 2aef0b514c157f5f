"""JaxTensor: a torch tensor whose values are one global ``jax.Array``.

A tensor is a shape over a storage (``arrays.storage``), reached through a chain of view steps.
Reading replays the chain on the storage's value; writing scatters back through it::

    x = JaxTensor of shape (4, 6)            storage S, no steps
    y = x[:, 2]                              storage S, steps (select dim 1 index 2,)
    y.mul_(2)                                S.array = S.array with 2 * S.array[:, 2] in its place

The tensor reports the device ``cpu`` and carries a dispatch key of its own, see
``docs/decisions/device.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import jax
import jax.core
import jax.numpy as jnp
import torch
from jax.sharding import NamedSharding, PartitionSpec
from torch._C import DispatchKey, DispatchKeySet
from torch.distributed.tensor import DTensor

from xla_dtensor.core import OpSharding
from xla_dtensor.runtimes.jax.arrays import autocast
from xla_dtensor.runtimes.jax.arrays.private import hlo_sharding_text
from xla_dtensor.runtimes.jax.arrays.sharding import constrained, host_value, place
from xla_dtensor.runtimes.jax.arrays.storage import Storage
from xla_dtensor.runtimes.jax.arrays.trace import (
    active_trace,
    array_before,
    array_read,
    is_tracer,
)
from xla_dtensor.runtimes.jax.arrays.values import torch_dtype, torch_from_numpy, x64
from xla_dtensor.runtimes.nested import runs_as_it_is
from xla_dtensor.runtimes.torch_own import ReadOnHost, make_wrapper

if TYPE_CHECKING:
    pass

__all__ = [
    "EXTRA_KEYS",
    "JaxTensor",
    "ViewStep",
    "annotate",
    "annotation",
    "clear_annotation",
    "read_through",
    "when_step_ends",
    "write_through",
]


# --------------------------------------------------------------------------------------- JaxTensor

# AutogradPrivateUse3 lets whole ops be caught without touching ordinary CPU tensors; naming a
# second backend drops the autocast key of the first, so that one is named again. AutocastXLA is
# for `torch.autocast(mesh.device_type)`.
EXTRA_KEYS = (
    DispatchKeySet(DispatchKey.AutogradPrivateUse3)
    | DispatchKeySet(DispatchKey.AutocastCPU)
    | autocast.KEY
)


@dataclass(frozen=True)
class ViewStep:
    """One view op: how to read through it, and how to write new values back below it.

    Args:
        read: From the value below the view to the value that it shows.
        write: From the value below and a new value shown to the new value below.
        key: Equal for steps that do the same; None where nobody needs to know.
    """

    read: Callable[[jax.Array], jax.Array]
    write: Callable[[jax.Array, jax.Array], jax.Array]
    key: Hashable | None = field(default=None, kw_only=True)


def read_through(steps: Iterable[ViewStep], array: jax.Array) -> jax.Array:
    """Return what a chain of views shows of `array`."""
    for step in steps:
        array = step.read(array)
    return array


def write_through(steps: Sequence[ViewStep], base: jax.Array, array: jax.Array) -> jax.Array:
    """Return `base` with what a chain of views shows of it replaced by `array`."""
    bases = [base] if steps else []
    for step in steps[:-1]:
        bases.append(step.read(bases[-1]))
    for step, below in zip(reversed(steps), reversed(bases), strict=True):
        array = step.write(below, array)
    return array


@runs_as_it_is
class JaxTensor(ReadOnHost, torch.Tensor):
    """A torch tensor over one global jax.Array. Made by the JAX runtime, not by users."""

    # No slots: a CPU tensor can then become one of these in place (torch.utils.swap_tensors).
    _storage: Storage
    _steps: tuple[ViewStep, ...]
    _cached: tuple[jax.Array, jax.Array] | None

    @staticmethod
    def __new__(
        cls,
        storage: Storage,
        steps: tuple[ViewStep, ...] = (),
        *,
        shape: Sequence[int] | None = None,
        stride: Sequence[int] | None = None,
        storage_offset: int = 0,
        dtype: torch.dtype | None = None,
    ) -> JaxTensor:
        shape = storage.shape if shape is None else tuple(shape)
        self = make_wrapper(
            cls,
            shape,
            strides=_contiguous_stride(shape) if stride is None else tuple(stride),
            storage_offset=storage_offset,
            dtype=dtype or torch_dtype(storage.dtype),
            device=torch.device("cpu"),
            _extra_dispatch_keys=EXTRA_KEYS,
        )
        self._storage = storage
        if storage.aliases is not None:
            storage.note_alias(self)
        self._steps = steps
        self._cached = None
        return self

    if TYPE_CHECKING:

        def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def value(self) -> jax.Array:
        """Return the logical value as a JAX array (a tracer while a step is traced).

        Raises:
            ManualRegionError: The tensor is manual, so each device has a value of its own.
        """
        if self._storage.manual is not None:
            from xla_dtensor.runtimes.jax.eager.manual import refuse_value

            refuse_value(self)
        return self.raw()

    def raw(self) -> jax.Array:
        """Return the value, the stacked one of a manual tensor."""
        base = self._storage.read()
        if not self._steps:
            return base
        array = array_read(self._storage)
        if active_trace() is not None and not is_tracer(array):
            # An older storage has its array even while a step is traced. What was cut out of it
            # before the trace would be a constant of the program, the cut of now is its own.
            return self._viewed(base)
        if self._cached is None or self._cached[0] is not array:
            self._cached = (array, self._viewed(base))
        return self._cached[1]

    def _viewed(self, base: jax.Array) -> jax.Array:
        axes = self._storage.manual
        if axes is None:
            return read_through(self._steps, base)
        from xla_dtensor.runtimes.jax.eager.manual import read_steps

        return read_steps(axes, self._steps, base)

    def placed(self) -> jax.Array:
        """Return the array as it lies on the devices, with padding unless this is a view."""
        manual = self._storage.manual is not None
        return self.value() if self._steps or manual else array_before(self._storage)

    def set_value(self, array: jax.Array) -> None:
        """Write `array` (of this tensor's shape and dtype) through the views to the storage."""
        base = self._storage.read() if self._steps else array
        self._storage.write(write_through(self._steps, base, array))

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        from xla_dtensor.runtimes.jax.eager.ops import run_op

        # Ops on a JaxTensor and a DTensor, or another class over it, are that one's.
        if len(types) > 1 and any(
            issubclass(kind, DTensor) or getattr(kind, "_is_per_device", False) for kind in types
        ):
            return NotImplemented
        return run_op(func, args, kwargs or {})

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    def __coerce_same_metadata_as_tangent__(self, _: Any, expected_type: Any = None) -> Any:
        # To a compiled backward, which was traced with stand-ins, this is a plain tensor.
        return self if expected_type is torch.Tensor else None

    def host(self) -> torch.Tensor:
        """Return the whole value as a plain CPU tensor. All processes have to call this alike."""
        with x64():
            return torch_from_numpy(host_value(self.value())).reshape(self.shape)

    def cpu(self, *_: Any, **__: Any) -> torch.Tensor:
        """Return the value as a plain CPU tensor (detached)."""
        return self.host()

    def numpy(self, *, force: bool = False) -> Any:
        """Return the value as a NumPy array."""
        return self.host().numpy(force=force)

    def tolist(self) -> Any:
        """Return the value as nested lists."""
        return self.host().tolist()

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"JaxTensor(shape={tuple(self.shape)}, dtype={dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> JaxTensor:
        if id(self) not in memo:
            with x64(), torch.no_grad():
                copy: torch.Tensor
                if self._steps or self._storage.manual is not None:
                    copy = self.clone()
                else:
                    array = place(self.value(), self._storage.sharding)
                    storage = Storage(array, self._storage.shape, self._storage.sharding)
                    copy = JaxTensor(storage, stride=self.stride())
                copy.requires_grad_(self.requires_grad)
                if getattr(self, "_is_param", False):
                    copy = torch.nn.Parameter(copy, self.requires_grad)
                memo[id(self)] = copy
        return memo[id(self)]

    def __copy__(self) -> Any:
        is_parameter = bool(getattr(self, "_is_param", False))
        return _from_host(self.host(), self.requires_grad, is_parameter)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A file that torch reads anywhere, also with weights_only=True.
        host = self.host().requires_grad_(self.requires_grad)
        if getattr(self, "_is_param", False):
            host = torch.nn.Parameter(host.detach(), self.requires_grad)
        return host.__reduce_ex__(protocol)


def _contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


def _from_host(
    tensor: torch.Tensor, requires_grad: bool = False, is_parameter: bool = False
) -> Any:
    """Return the runtime's tensor; files of before name this function."""
    from xla_dtensor.runtimes.jax.arrays.values import numpy_from_torch

    with x64():
        copy = JaxTensor(Storage(jnp.array(numpy_from_torch(tensor))))
    if is_parameter:
        return torch.nn.Parameter(copy, requires_grad)
    return copy.requires_grad_(requires_grad)


# --------------------------------------------------------- Annotations in place on the JAX runtime
#
# The same tensor, told how to lie.
#
# JAX arrays are immutable, so "in place" means three things here:
#
# ====================================  ==========================================================
# a tensor with its own storage         the storage is rebound to the placed array, and pinned:
#                                       later writes keep the sharding
# a view                                a step is added to its chain: what is read through it is
#                                       constrained, what is written passes
# a storage older than a traced step    the step constrains what it reads; the storage itself stays
# (a parameter, an argument)            as it was, because the program must not depend on who traced
#                                       it first
# ====================================  ==========================================================
#
# Values and autograd's record do not change, so neither version counters nor hooks are involved.


@dataclass(frozen=True)
class Constraint(ViewStep):
    """A view step that changes no value: it says how what is read has to lie."""

    sharding: NamedSharding


def annotate(tensor: JaxTensor, sharding: NamedSharding) -> None:
    """Tell XLA how `tensor` is to lie, in place."""
    if tensor._steps:
        _without_constraint(tensor)
        step = Constraint(lambda x: constrained(x, sharding), lambda _, new: new, sharding)
        tensor._steps, tensor._cached = (*tensor._steps, step), None
        return
    storage, trace = tensor._storage, active_trace()
    if trace is None:
        storage.array = place(storage.read(), sharding)
        storage.sharding = sharding
    elif trace.owns(storage):
        unannotated = storage.array if storage.unannotated is None else storage.unannotated[1]
        storage.array = place(storage.read(), sharding)
        storage.sharding = sharding
        storage.unannotated = (storage.array, unannotated)
        trace.note_annotated(storage)
    else:
        trace.capture(storage)
        trace.constrain(storage, sharding)


def annotation(tensor: JaxTensor) -> OpSharding | None:
    """Return what `tensor` was told, or None."""
    if tensor._steps:
        last = tensor._steps[-1]
        sharding = last.sharding if isinstance(last, Constraint) else None
    else:
        storage, trace = tensor._storage, active_trace()
        cleared = trace is not None and trace.has_cleared(storage)
        sharding = None if cleared else storage.constraint or storage.sharding
    return None if sharding is None else _op_sharding(sharding, tensor.ndim)


@lru_cache(maxsize=4096)
def _op_sharding(sharding: NamedSharding, ndim: int) -> OpSharding:
    return OpSharding.parse(hlo_sharding_text(sharding, ndim)).canonical()


def clear_annotation(tensor: JaxTensor) -> None:
    """Take back what `tensor` was told; a concrete array is replicated."""
    if tensor._steps:
        _without_constraint(tensor)
        return
    storage, trace = tensor._storage, active_trace()
    if trace is not None and not trace.owns(storage):
        trace.constrain(storage, None)
        return
    sharding, storage.sharding = storage.sharding, None
    if trace is not None:
        if storage.unannotated is not None and storage.unannotated[0] is storage.array:
            storage.array = storage.unannotated[1]
        return
    old_sharding = sharding or storage.array.sharding
    if isinstance(old_sharding, NamedSharding) and not old_sharding.is_fully_replicated:
        storage.array = place(storage.read(), NamedSharding(old_sharding.mesh, PartitionSpec()))


def when_step_ends(tensor: JaxTensor, undo: Callable[[], None]) -> None:
    """Call `undo` after the trace in progress, if `tensor` is older than it."""
    trace = active_trace()
    if trace is not None and not tensor._steps and not trace.owns(tensor._storage):
        trace.at_end.append(undo)


def _without_constraint(tensor: JaxTensor) -> None:
    if isinstance(tensor._steps[-1], Constraint):
        tensor._steps, tensor._cached = tensor._steps[:-1], None
