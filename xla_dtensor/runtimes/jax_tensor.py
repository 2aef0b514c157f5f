"""JaxTensor: a torch tensor whose values are one global ``jax.Array``.

Two objects share the work. A :class:`Storage` is what torch calls a storage: a cell that holds the
current array and can be rebound, because arrays are immutable and torch tensors are not. A
:class:`JaxTensor` is what torch calls a tensor: a shape over a storage, reached through a chain of
view steps. Reading replays the chain on the storage's value; writing scatters back through it::

    x = JaxTensor of shape (4, 6)            storage S, no steps
    y = x[:, 2]                              storage S, steps (select dim 1 index 2,)
    y.mul_(2)                                S.array = S.array.at[:, 2].set(2 * S.array[:, 2])

Uneven tensors: JAX has no uneven global arrays. A pinned storage (one that was put on the devices
with a sharding) therefore holds an array padded with zeros to a multiple of its tiles, while
``shape`` stays logical. Only :meth:`Storage.read` and :meth:`Storage.write` know of the padding.

The tensor reports the device ``cpu`` and carries a dispatch key of its own, see
``docs/decisions/device.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.core
import jax.numpy as jnp
import torch
from jax.sharding import NamedSharding
from torch._C import DispatchKey, DispatchKeySet

from xla_dtensor.runtimes import jax_trace
from xla_dtensor.runtimes.jax_convert import torch_dtype, torch_from_numpy, x64
from xla_dtensor.runtimes.jax_placing import host_value, place, unpadded

__all__ = ["EXTRA_KEYS", "JaxTensor", "Storage", "ViewStep"]

# AutogradPrivateUse3 lets whole ops be caught without touching ordinary CPU tensors; naming a
# second backend drops the autocast key of the first, so that one is named again.
EXTRA_KEYS = DispatchKeySet(DispatchKey.AutogradPrivateUse3) | DispatchKeySet(
    DispatchKey.AutocastCPU
)


class Storage:
    """A rebindable cell for one global array.

    Args:
        array: The values, padded to the tiles of `sharding` when they divide unevenly.
        shape: The logical shape; the array's own when None.
        sharding: Where later writes have to lie; None leaves that to XLA.
    """

    __slots__ = ("__weakref__", "array", "shape", "sharding")

    def __init__(
        self,
        array: jax.Array,
        shape: tuple[int, ...] | None = None,
        sharding: NamedSharding | None = None,
    ) -> None:
        self.array = array
        self.shape = tuple(array.shape) if shape is None else shape
        self.sharding = sharding
        jax_trace.note_created(self)

    def read(self) -> jax.Array:
        """Return the logical value."""
        jax_trace.note_read(self)
        return unpadded(self.array, self.shape)

    def write(self, value: jax.Array) -> None:
        """Rebind to `value`, of the logical shape and dtype."""
        jax_trace.note_write(self)
        if self.sharding is not None and not isinstance(value, jax.core.Tracer):
            value = place(value, self.sharding)
        self.array = value

    def check_valid(self) -> None:
        """Raise when the array cannot hold the logical shape."""
        if any(a < s for a, s in zip(self.array.shape, self.shape, strict=True)):
            raise RuntimeError(f"array {self.array.shape} is smaller than shape {self.shape}")


@dataclass(frozen=True)
class ViewStep:
    """One view op: how to read through it, and how to write new values back below it."""

    read: Callable[[jax.Array], jax.Array]
    write: Callable[[jax.Array, jax.Array], jax.Array]


class JaxTensor(torch.Tensor):
    """A torch tensor over one global jax.Array. Made by the JAX runtime, not by users."""

    __slots__ = ("_cached", "_steps", "_storage")

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
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            shape,
            strides=_contiguous_stride(shape) if stride is None else tuple(stride),
            storage_offset=storage_offset,
            dtype=dtype or torch_dtype(storage.array.dtype),
            device=torch.device("cpu"),
            _extra_dispatch_keys=EXTRA_KEYS,
        )
        self._storage = storage
        self._steps = steps
        self._cached = None
        return self

    if TYPE_CHECKING:

        def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def value(self) -> jax.Array:
        """Return the logical value as a JAX array (a tracer while a step is traced)."""
        base = self._storage.read()
        if not self._steps:
            return base
        if self._cached is None or self._cached[0] is not self._storage.array:
            value = base
            for step in self._steps:
                value = step.read(value)
            self._cached = (self._storage.array, value)
        return self._cached[1]

    def set_value(self, value: jax.Array) -> None:
        """Write `value` (of this tensor's shape and dtype) through the views to the storage."""
        below = [self._storage.read()] if self._steps else []
        for step in self._steps[:-1]:
            below.append(step.read(below[-1]))
        for step, base in zip(reversed(self._steps), reversed(below), strict=True):
            value = step.write(base, value)
        self._storage.write(value)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        from xla_dtensor.runtimes.jax_ops import run_op

        return run_op(func, args, kwargs or {})

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

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
        with x64(), torch.no_grad():
            copied = place(self.value(), self._storage.sharding) if not self._steps else None
            if copied is None:
                return self.clone()  # pyright: ignore[reportReturnType]
            storage = Storage(copied, self._storage.shape, self._storage.sharding)
            return JaxTensor(storage, stride=self.stride())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return (_from_host, (self.host(),))


def _contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


def _from_host(tensor: torch.Tensor) -> JaxTensor:
    from xla_dtensor.runtimes.jax_convert import numpy_from_torch

    with x64():
        return JaxTensor(Storage(jnp.array(numpy_from_torch(tensor))))
