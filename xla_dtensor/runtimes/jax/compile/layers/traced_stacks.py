"""Rows of one value of a traced step: the same parameter in every layer of a loop.

A loop over layers (``scan``) takes the layers' parameters as one stack and gives their
gradients as one. While a step is traced, the storages of such a stack stay its *rows*: they have no
value of their own, until somebody reads one by itself::

    loss.backward()                  grads 0, 1, 2 are rows of g
    torch._foreach_mul_(grads, c)    g := g * c, one equation         (``foreach``)
    grads[1].norm()                  g is taken apart, once           g0 g1 g2 = unstack_layers g

So Python that treats all layers alike in one call, as ``torch.optim`` does where ``foreach`` is
true, is traced in a time that does not depend on how many there are.

A :class:`TracedStack` is to a trace what ``stacks.Stack`` is between two calls, and a storage's
``row`` may be of either.

Invariants:

* Whether storages are rows decides what is traced, never which values: a row's value is that row.
* What is older than the trace is captured before it becomes a row, so the end of the trace gives
  its array back. No row outlives the trace.
* An argument's storage is no row: whether the step, or a block, wrote to it is seen by its array.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from jax.extend.core import set_current_trace

from xla_dtensor.runtimes.jax.arrays.private import trace_of
from xla_dtensor.runtimes.jax.arrays.sharding import place
from xla_dtensor.runtimes.jax.arrays.trace import Trace, active_trace
from xla_dtensor.runtimes.jax.compile.layers.layer_stacks import stack_layers, unstack_layers
from xla_dtensor.runtimes.jax.compile.layers.packed import pinned_rows, pinned_stack
from xla_dtensor.runtimes.jax.compile.trace_values import inner
from xla_dtensor.runtimes.jax.eager.tensor import Storage

if TYPE_CHECKING:
    from xla_dtensor.runtimes.jax.compile.layers.block import Form

__all__ = [
    "TracedStack",
    "gather",
    "lanes_of",
    "placed_values",
    "row_of",
    "traced_stack",
    "wrapped_rows",
]


class TracedStack:
    """Values of storages as one value of the trace in progress.

    Args:
        array: Their values along a new dim 0; who rebinds it writes to all of them.
        storages: The storages. They become its rows.
        row_sharding: How each of them is to lie; None leaves that to XLA.
    """

    def __init__(self, array: Any, storages: Sequence[Storage], row_sharding: Any) -> None:
        self.array = array
        self.row_sharding = row_sharding
        self.numbers: tuple[Any, Any] | None = None  # for ``number_rows``
        self._rows = [weakref.ref(storage) for storage in storages]
        for lane, storage in enumerate(storages):
            storage.become_row(self, lane)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def row_shape(self) -> tuple[int, ...]:
        """The shape of a row, with its padding."""
        return tuple(self.array.shape[1:])

    def dissolve(self) -> None:
        """Give each storage that is still a row a value of its own."""
        for lane, value in enumerate(self.values()):
            storage = self._rows[lane]()
            if storage is not None and storage.row == (self, lane):
                storage.array = value

    def values(self) -> list[Any]:
        """Return the rows' values, as values of the stack's own trace."""
        with set_current_trace(trace_of(self.array)):
            return pinned_rows(self.array, self.row_sharding)


def traced_stack(storages: Sequence[Storage]) -> TracedStack | None:
    """Return a stack of which these storages are the rows, in this order; None if it cannot be.

    It is made if there is none: then something in the step wants their values as one.
    """
    trace = active_trace()
    if trace is None or len(storages) < 2:
        return None
    for storage in storages:
        trace.capture(storage)
    found = _stack_if_rows(storages)
    if found is not None:
        return found
    first = storages[0]
    alike = all(
        s.shape == first.shape and s.sharding == first.sharding and s.dtype == first.dtype
        for s in storages
    )
    if not alike or len(set(map(id, storages))) < len(storages):
        return None
    if trace.recomputation is not None or not all(_may_be_row(s, trace) for s in storages):
        return None
    return TracedStack(_stacked_storages(storages), storages, first.sharding)


def _stack_if_rows(storages: Sequence[Storage]) -> TracedStack | None:
    """Return the stack whose rows these storages are, all of them and in this order."""
    stack = storages[0].row[0] if storages and storages[0].row is not None else None
    if not isinstance(stack, TracedStack) or len(stack) != len(storages):
        return None
    return stack if all(s.row == (stack, lane) for lane, s in enumerate(storages)) else None


def row_of(tensor: Any) -> tuple[TracedStack, int] | None:
    """Return the stack of which a tensor is a row, and which; None for a view or a padded row."""
    payload = inner(tensor)
    if payload is None or payload._steps:
        return None
    storage = payload._storage
    row: Any = storage.row
    if row is None or not isinstance(row[0], TracedStack) or storage.constraint is not None:
        return None
    return row if row[0].row_shape == storage.shape else None


def lanes_of(lists: Iterable[Sequence[Any]]) -> list[list[int]]:
    """Return where a whole stack's rows stand in lists of equal length, by lane.

    Args:
        lists: Lists in which one place is one thing: parameters and their gradients, say.

    Returns:
        For each stack of which some list holds every row once, the places, layer by layer. No place
        is named twice.
    """
    found: list[list[int]] = []
    taken: set[int] = set()
    for items in lists:
        by_stack: dict[TracedStack, dict[int, int]] = {}
        spoilt: set[TracedStack] = set()
        for place_, item in enumerate(items):
            row = None if place_ in taken else row_of(item)
            if row is None:
                continue
            lanes = by_stack.setdefault(row[0], {})
            if row[1] in lanes:
                spoilt.add(row[0])
            lanes[row[1]] = place_
        for stack, lanes in by_stack.items():
            if stack not in spoilt and len(lanes) == len(stack):
                found.append([lanes[lane] for lane in range(len(stack))])
                taken.update(lanes.values())
    return found


def gather(parameters: Sequence[torch.Tensor], states: Sequence[Mapping[str, Any]]) -> bool:
    """Let an optimizer's state of parameters that are rows be rows as well.

    Args:
        parameters: The parameters.
        states: Its state of each: tensors by name, and other things.

    Returns:
        Whether there are any rows among the parameters.
    """
    groups = lanes_of([parameters])
    for places in groups:
        for name in states[places[0]]:
            payloads = [inner(states[place].get(name)) for place in places]
            storages = [p._storage for p in payloads if p is not None and not p._steps]
            if len(storages) == len(places):
                traced_stack(storages)
    return bool(groups)


def wrapped_rows(stack: Any, form: Form, count: int) -> list[torch.Tensor]:
    """Return the rows of a value as tensors of a form.

    Args:
        stack: The value, one row per layer.
        form: What each row is.
        count: How many there are.
    """
    storages = [Storage(stack, form.shape, form.sharding) for _ in range(count)]
    if count > 1:
        TracedStack(stack, storages, form.sharding)
    else:
        storages[0].array = unstack_layers(stack)[0]
    return [form.over(storage) for storage in storages]


def placed_values(storages: Sequence[Storage]) -> list[Any]:
    """Return what storages hold at the end of a step, placed as they are to lie.

    The rows of a stack are placed as one.
    """
    of_stack: dict[TracedStack, list[Any]] = {}
    found: list[Any] = []
    for storage in storages:
        row: Any = storage.row
        if row is None or row[0].row_shape != storage.shape or storage.constraint is not None:
            found.append(place(storage.read(), storage.sharding))
            continue
        stack, lane = row
        if stack not in of_stack:
            of_stack[stack] = unstack_layers(pinned_stack(stack.array, stack.row_sharding))
        found.append(of_stack[stack][lane])
    return found


def _may_be_row(storage: Storage, trace: Trace) -> bool:
    return (
        storage.manual is None
        and storage.constraint is None
        and storage.unannotated is None
        and trace.may_be_row(storage)
        and tuple(storage.array.shape) == storage.shape
    )


def _stacked_storages(storages: Sequence[Storage]) -> Any:
    stack = stack_layers([storage.array for storage in storages])
    return pinned_stack(stack, storages[0].sharding)
