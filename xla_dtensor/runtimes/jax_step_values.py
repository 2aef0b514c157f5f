"""What goes into a traced step and what comes out: arguments, writes to them, outputs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import torch
from jax.sharding import NamedSharding, PartitionSpec

from xla_dtensor.errors import CompileError
from xla_dtensor.runtimes.jax_manual import ManualAxes, stacked_sharding, wrapped
from xla_dtensor.runtimes.jax_placing import place
from xla_dtensor.runtimes.jax_tensor import JaxTensor, Storage
from xla_dtensor.runtimes.jax_trace import Trace, active_trace

__all__ = [
    "Delivered",
    "Static",
    "bound",
    "inner",
    "is_without_values",
    "refuse_manual",
    "replaced",
    "rewrapper_of",
    "split_outputs",
    "written_arguments",
]


def inner(value: Any) -> JaxTensor | None:
    """Return the JaxTensor in a DTensor, in a manual tensor or in itself; None for all else."""
    is_manual = getattr(value, "_is_per_device", False)
    value = value._payload if is_manual else getattr(value, "_local_tensor", value)
    return value if isinstance(value, JaxTensor) else None


def is_without_values(value: Any) -> bool:
    """Tell whether a DTensor's devices are all of other processes, which run the program."""
    payload = getattr(value, "_local_tensor", None)
    return payload is not None and payload.is_meta


@dataclass(frozen=True)
class Static:
    """An output that is no tensor: the same on every call."""

    value: Any


@dataclass(frozen=True)
class Delivered:
    """An output that is a host tensor, made anew on every call.

    Args:
        number: Of what the host's tape delivers.
    """

    number: int


@contextlib.contextmanager
def bound(
    tensors: Sequence[JaxTensor | None], arrays: Sequence[jax.Array], trace: Trace
) -> Iterator[None]:
    """Let the arguments' storages hold tracers for the time of the trace."""
    storages = [t._storage for t in tensors if t is not None]
    before = [s.array for s in storages]
    for storage, array in zip(storages, arrays, strict=True):
        trace.adopt_argument(storage)
        storage.array = array
    try:
        yield
    finally:
        for storage, array in zip(storages, before, strict=True):
            storage.array = array


def replaced(leaves: Sequence[Any], tensors: Sequence[JaxTensor | None]) -> Iterator[Any]:
    """Yield what the traced step is given for each leaf: something over the bound storage."""
    for leaf, tensor in zip(leaves, tensors, strict=True):
        if tensor is None or inner(leaf) is tensor:
            yield leaf
        elif hasattr(leaf, "rewrapped"):  # a DTensor that is a view: its storage is another's
            yield leaf.rewrapped(tensor).requires_grad_(leaf.requires_grad)
        else:
            yield tensor


def written_arguments(
    leaves: Sequence[Any], tensors: Sequence[JaxTensor | None], arrays: Sequence[jax.Array]
) -> tuple[list[int], list[jax.Array]]:
    """Return which arguments the step wrote to, by position among the tensors, and their values."""
    positions: list[int] = []
    values: list[jax.Array] = []
    pairs = [(leaf, t) for leaf, t in zip(leaves, tensors, strict=True) if t is not None]
    for position, ((leaf, tensor), array) in enumerate(zip(pairs, arrays, strict=True)):
        storage = tensor._storage
        if storage.array is array:
            continue
        if inner(leaf) is not tensor:
            raise CompileError(
                f"A compiled step wrote in place to an argument of shape={tuple(leaf.shape)} that "
                "is a view or a plain CPU tensor. The program works on a copy of it, and the write "
                "would be lost. Pass a DTensor that is no view, or write to argument.clone()."
            )
        positions.append(position)
        values.append(place(storage.read(), storage.sharding))
    return positions, values


def split_outputs(
    leaves: Sequence[Any],
) -> tuple[list[Any], list[jax.Array], list[NamedSharding | None]]:
    """Separate the tensors among the outputs from the rest, with how to wrap each one again.

    A tensor that was told how to lie leaves the program so, padded if it is uneven: as a logical
    value it could only leave replicated. The last list pins these.
    """
    static: list[Any] = []
    arrays: list[jax.Array] = []
    pinned: list[NamedSharding | None] = []
    for leaf in leaves:
        tensor = inner(leaf)
        if tensor is None:
            static.append(_from_host(leaf))
            continue
        if tensor._storage.manual is not None:
            refuse_manual(leaf, "about to return", "before returning it")
            arrays.append(tensor.raw())
            static.append(_local_wrapper(leaf, tensor._storage.manual))
            pinned.append(stacked_sharding(tensor._storage.manual))
            continue
        sharding = None if tensor._steps else tensor._storage.sharding
        arrays.append(tensor.value() if sharding is None else place(tensor.value(), sharding))
        static.append(rewrapper_of(leaf, tensor, sharding))
        is_open = sharding is None or PartitionSpec.UNCONSTRAINED in tuple(sharding.spec)
        pinned.append(None if is_open else sharding)
    return static, arrays, pinned


def _from_host(leaf: Any) -> Static | Delivered:
    trace = active_trace()
    if trace is None or trace.host is None or not isinstance(leaf, torch.Tensor):
        return Static(leaf)
    number = trace.host.tape.deliver(leaf)
    return Static(leaf) if number is None else Delivered(number)


def refuse_manual(leaf: Any, what: str, when: str) -> None:
    """Raise for a manual tensor, which has no value outside its region; a LocalView passes."""
    tensor = inner(leaf)
    if tensor is None or tensor._storage.manual is None or hasattr(leaf, "_varying"):
        return
    raise CompileError(
        f"A compiled step was {what} a manual tensor of shape={tuple(leaf.shape)}. It has "
        "another value on each device, and a program's arguments and results are global. Call "
        f"disable_manual_sharding {when}; inside the step manual tensors are as usual."
    )


def _local_wrapper(leaf: Any, axes: ManualAxes) -> Callable[[jax.Array], Any]:
    rewrap = leaf.rewrapper()
    return lambda array: rewrap(wrapped(array, axes))


def rewrapper_of(
    leaf: Any, tensor: JaxTensor, sharding: NamedSharding | None
) -> Callable[[jax.Array], Any]:
    """Return what makes a tensor like `leaf` of an array; it keeps nothing of the leaf alive."""
    shape, stride, dtype = tuple(tensor.shape), tensor.stride(), tensor.dtype
    # Not a method of the leaf: that would keep the traced output alive, as if it were state.
    rewrapper = getattr(leaf, "rewrapper", None)
    rewrap = None if rewrapper is None else rewrapper()

    def wrap(array: jax.Array) -> Any:
        made = JaxTensor(Storage(array, shape, sharding), stride=stride, dtype=dtype)
        return rewrap(made) if rewrap is not None else made

    return wrap
