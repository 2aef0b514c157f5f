"""Annotations in place on the JAX runtime: the same tensor, told how to lie.

JAX arrays are immutable, so "in place" means three things here:

====================================  ==========================================================
a tensor with its own storage         the storage is rebound to the placed array, and pinned: later
                                      writes keep the sharding
a view                                a step is added to its chain: what is read through it is
                                      constrained, what is written passes
a storage older than a traced step    the step constrains what it reads; the storage itself stays
(a parameter, an argument)            as it was, because the program must not depend on who traced
                                      it first
====================================  ==========================================================

Values and autograd's record do not change, so neither version counters nor hooks are involved.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from jax.sharding import NamedSharding, PartitionSpec

from xla_dtensor.core import OpSharding
from xla_dtensor.runtimes.jax_placing import constrained, place
from xla_dtensor.runtimes.jax_private import hlo_sharding_text
from xla_dtensor.runtimes.jax_tensor import JaxTensor, ViewStep
from xla_dtensor.runtimes.jax_trace import active_trace

__all__ = ["annotate", "annotation", "clear_annotation", "when_step_ends"]


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
        before = storage.array if storage.unannotated is None else storage.unannotated[1]
        storage.array = place(storage.read(), sharding)
        storage.sharding = sharding
        storage.unannotated = (storage.array, before)
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
    return None if sharding is None else _asked(sharding, tensor.ndim)


@lru_cache(maxsize=4096)
def _asked(sharding: NamedSharding, ndim: int) -> OpSharding:
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
    lying = sharding or storage.array.sharding
    if isinstance(lying, NamedSharding) and not lying.is_fully_replicated:
        storage.array = place(storage.read(), NamedSharding(lying.mesh, PartitionSpec()))


def when_step_ends(tensor: JaxTensor, undo: Callable[[], None]) -> None:
    """Call `undo` after the trace in progress, if `tensor` is older than it."""
    trace = active_trace()
    if trace is not None and not tensor._steps and not trace.owns(tensor._storage):
        trace.at_end.append(undo)


def _without_constraint(tensor: JaxTensor) -> None:
    if isinstance(tensor._steps[-1], Constraint):
        tensor._steps, tensor._cached = tensor._steps[:-1], None
