"""What goes into a traced step and what comes out: arguments, writes to them, outputs."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import torch
from jax.sharding import NamedSharding, PartitionSpec

from xla_dtensor.core.errors import CompileError
from xla_dtensor.runtimes.base import refuse_lost_write
from xla_dtensor.runtimes.host_work.tape import TraceAgainError
from xla_dtensor.runtimes.jax.arrays.sharding import host_value, place
from xla_dtensor.runtimes.jax.arrays.storage import Storage
from xla_dtensor.runtimes.jax.arrays.trace import Trace, active_trace, is_tracer
from xla_dtensor.runtimes.jax.eager.manual import ManualAxes, stacked_sharding, wrapped
from xla_dtensor.runtimes.jax.eager.scalar import unwrap_number
from xla_dtensor.runtimes.jax.eager.tensor import JaxTensor, ViewStep
from xla_dtensor.runtimes.live_objects import live_objects

__all__ = [
    "Delivered",
    "Same",
    "Static",
    "ViewsWritten",
    "bound",
    "inner",
    "is_without_values",
    "maker_of",
    "refuse_manual",
    "replaced",
    "rewrapper_of",
    "split_outputs",
    "write_new_data",
    "written_arguments",
]


class Same:
    """Equal to what stands for the same object; what the object holds, guards look after."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other._value is self._value

    def __hash__(self) -> int:
        return id(self._value)

    def __repr__(self) -> str:
        return f"a {type(self._value).__name__}"


def inner(value: Any) -> JaxTensor | None:
    """Return the JaxTensor in a DTensor, in a manual tensor or in itself; None for all else."""
    if not issubclass(type(value), torch.Tensor):  # whatever that answers to names
        return None
    is_manual = getattr(value, "_is_per_device", False)
    payload = getattr(value, "_payload" if is_manual else "_local_tensor", value)
    return payload if isinstance(payload, JaxTensor) else None


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
    originals = {s: s.array for s in storages}
    for storage, array in zip(storages, arrays, strict=True):
        if storage.array is originals[storage]:  # the first of several arguments that have it
            trace.adopt_argument(storage)
            storage.array = array
    trace.arguments = {id(t) for t in tensors if t is not None}
    try:
        yield
    finally:
        for storage, array in originals.items():
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


class ViewsWritten(TraceAgainError):
    """A step wrote to an argument that is a view, or to the base of one.

    Args:
        places: Those of the views among the leaves.
    """

    def __init__(self, places: Sequence[int]) -> None:
        super().__init__("writes to an argument that is a view")
        self.places = frozenset(places)


def written_arguments(
    leaves: Sequence[Any],
    tensors: Sequence[JaxTensor | None],
    arrays: Sequence[jax.Array],
    trace: Trace,
) -> tuple[list[int], list[jax.Array]]:
    """Return which arguments the step wrote to, by position among the tensors, and their values.

    Raises:
        ViewsWritten: A view and its base have to be one input, and are two.
    """
    positions: list[int] = []
    values: list[jax.Array] = []
    pairs = enumerate(zip(leaves, tensors, strict=True))
    rows = [(i, leaf, t) for i, (leaf, t) in pairs if t is not None]
    first: dict[Storage, jax.Array] = {}
    for (_, _, tensor), array in zip(rows, arrays, strict=True):
        first.setdefault(tensor._storage, array)
    written = {storage for storage, array in first.items() if storage.array is not array}
    # Views that were cut out of their base, before the step, by its storage.
    views_of = {i: (inner(leaf), t) for i, leaf, t in rows}
    copies = {i: v for i, (v, t) in views_of.items() if v is not None and v is not t}
    changed = written | set(trace.state)
    views = [i for i, view in copies.items() if view._storage in changed]
    views += [i for i, _, t in rows if i in copies and t._storage in written]
    if views:
        raise ViewsWritten(views)
    for position, (_, leaf, tensor) in enumerate(rows):
        storage = tensor._storage
        if storage not in written:
            continue
        if inner(leaf) is not tensor:
            refuse_lost_write(leaf)
        written.discard(storage)
        positions.append(position)
        values.append(place(storage.read(), storage.sharding))
    return positions, values


def write_new_data(trace: Trace) -> None:
    """Make writes to a tensor's own memory of data that it was assigned, where nobody can tell.

    ``p.data = p.data - rate * p.grad`` gives p memory of the step's own, which the next call would
    find in the place of what the program reads. If no other tensor has p's old memory, and none its
    new one, that is ``p.data.copy_(...)``.
    """
    entries = [
        (tensor, payload, spec)
        for tensor, payload, spec in trace.new_data.values()
        if _is_like(tensor, payload, spec) and trace.owns(tensor._local_tensor._storage)
    ]
    if not entries:
        return
    payloads = map(inner, live_objects(torch.Tensor, late=True))
    holders = Counter(payload._storage for payload in payloads if payload is not None)
    olds = Counter(payload._storage for _, payload, _ in entries)
    for tensor, payload, spec in entries:
        old, new = payload._storage, tensor._local_tensor._storage
        # The old payload; the new one, and the tensor itself.
        if (olds[old], holders[old], holders[new]) == (1, 1, 2) and not trace.owns(old):
            old.write(new.read())
            tensor._local_tensor, tensor._spec = payload, spec
            del trace.new_data[id(tensor)]


def _is_like(tensor: Any, payload: Any, spec: Any) -> bool:
    """Tell whether a tensor's payload lies as another one does, which is that of its memory."""
    new = tensor._local_tensor
    if not (isinstance(new, JaxTensor) and isinstance(payload, JaxTensor)):
        return False
    facts = [(p.shape, p.stride(), p.dtype, p._steps, p._storage.manual) for p in (new, payload)]
    return tensor._spec == spec and facts[0] == facts[1] and facts[0][3:] == ((), None)


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
        number = unwrap_number(leaf)
        if tensor is None and is_tracer(number):  # what item() gave
            arrays.append(number)
            static.append(lambda array: host_value(array).item())
            pinned.append(None)
            continue
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
    shape, make = tuple(tensor.shape), maker_of(leaf, tensor, ())
    return lambda array: make(Storage(array, shape, sharding), ())


def maker_of(
    leaf: Any, tensor: JaxTensor, own: tuple[ViewStep, ...]
) -> Callable[[Storage, tuple[ViewStep, ...]], torch.Tensor]:
    """Return what makes a tensor like `leaf` of a storage and views; it keeps nothing of it alive.

    Args:
        leaf: A tensor.
        tensor: Its payload.
        own: The views of its storage that it is.
    """
    form = {
        "shape": tuple(tensor.shape),
        "stride": tensor.stride(),
        "storage_offset": tensor.storage_offset() if own else 0,
        "dtype": tensor.dtype,
    }
    # Not a method of the leaf: that would keep the traced output alive.
    rewrapper = getattr(leaf, "rewrapper", None)
    rewrap = None if rewrapper is None else rewrapper()
    is_parameter, requires_grad = isinstance(leaf, torch.nn.Parameter), False
    with contextlib.suppress(RuntimeError):  # One of several views, whose base was written to.
        requires_grad = leaf.is_leaf and leaf.requires_grad

    def make(storage: Storage, steps: tuple[ViewStep, ...]) -> torch.Tensor:
        payload = JaxTensor(storage, (*steps, *own), **form)
        made = payload if rewrap is None else rewrap(payload)
        if is_parameter:
            return torch.nn.Parameter(made, requires_grad)
        return made.requires_grad_() if requires_grad else made

    return make
