"""Rows of one value of a traced step: the same parameter in every layer of a loop.

A loop over layers (``scan``) takes the layers' parameters as one stack and gives their gradients as
one. While a step is traced, the storages of such a stack stay its *rows*, and what an op makes of a
row, it makes of all of them, once::

    loss.backward()       grads 0, 1, 2 are rows of g
    grads[0].mul_(c)      h = vmap(mul)(g, c), one equation; grad 0 is row 0 of h
    grads[1].mul_(c)      the same op of the next row: row 1 of h, which is there
    grads[1].norm()       n = vmap(norm)(h); row 1 of it

So an optimizer, a clip or an average that treats all layers alike is traced as equations of stacks,
whether its Python goes through the layers in a loop or gives lists to ``_foreach_*`` ops.

An op of one layer alone is computed for all of them, in vain. That happens once for each op on the
same stacks: with other numbers it is an op of rows only for a layer that was given the first one
too. A loop whose numbers differ by layer goes on layer by layer behind the first.

A :class:`TracedStack` is to a trace what ``stacks.Stack`` is between two calls, and a storage's
``row`` may be of either.

Invariants:

* A stack never changes. Who writes to a row becomes a row of another stack.
* Whether storages are rows decides what is traced, never which values: a row's value is that row,
  and a row's op is the op that it would get alone, on a tensor of its shape and dtype.
* What is older than the trace is captured before it becomes a row, so the end of the trace gives
  its array back. No row outlives the trace.
* An argument's storage is no row: whether the step, or a block, wrote to it is seen by its array.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.extend.core import set_current_trace

from xla_dtensor.runtimes.bounds import are_checked
from xla_dtensor.runtimes.jax.arrays.private import trace_of
from xla_dtensor.runtimes.jax.arrays.sharding import place
from xla_dtensor.runtimes.jax.arrays.storage import Storage
from xla_dtensor.runtimes.jax.arrays.trace import Trace, active_trace, note_write
from xla_dtensor.runtimes.jax.arrays.values import jax_dtype, numpy_from_torch
from xla_dtensor.runtimes.jax.compile.layers.layer_stacks import (
    pinned_rows,
    pinned_stack,
    stack_layers,
    unstack_layers,
)
from xla_dtensor.runtimes.jax.compile.layers.number_rows import NumberRows, RowNode
from xla_dtensor.runtimes.jax.compile.trace_values import inner
from xla_dtensor.runtimes.jax.eager.scalar import sym_number, sym_of_node
from xla_dtensor.runtimes.jax.eager.tensor import JaxTensor

__all__ = [
    "Rows",
    "TracedStack",
    "gather",
    "placed_values",
    "row_of",
    "traced_stack",
]


class TracedStack:
    """Values of one kind, one per layer, as one value of the trace in progress.

    Args:
        array: The values along a new dim 0.
        row_sharding: How each of them is to lie; None leaves that to XLA.
    """

    def __init__(self, array: Any, row_sharding: Any = None) -> None:
        self.array, self.row_sharding = array, row_sharding
        self._fitted: dict[Hashable, TracedStack] = {}

    def __len__(self) -> int:
        return self.array.shape[0]

    @property
    def row_shape(self) -> tuple[int, ...]:
        """The shape of a row, with its padding."""
        return tuple(self.array.shape[1:])

    @functools.cached_property
    def rows(self) -> list[Any]:
        """The rows by themselves, as values of the stack's own trace."""
        with set_current_trace(trace_of(self.array)):
            return pinned_rows(self.array, self.row_sharding)

    @functools.cached_property
    def numbers(self) -> NumberRows:
        """The rows as numbers of Python, where they are 0-dim."""
        return NumberRows.of(self.array)

    def read(self, storage: Storage, lane: int) -> Any:
        """Return a row for who reads it alone; its storage stays a row."""
        return self.rows[lane]

    def fitted(self, shape: tuple[int, ...], dtype: Any) -> TracedStack:
        """Return the stack whose rows are cast to a dtype and broadcast to a shape."""
        if self.row_shape == shape and self.array.dtype == dtype:
            return self
        if (shape, dtype) not in self._fitted:
            ones = (1,) * (len(shape) - len(self.row_shape))
            with set_current_trace(trace_of(self.array)):
                values = self.array.astype(dtype).reshape(len(self), *ones, *self.row_shape)
                stack = TracedStack(jnp.broadcast_to(values, (len(self), *shape)))
            self._fitted[shape, dtype] = stack
        return self._fitted[shape, dtype]


def traced_stack(storages: Sequence[Storage]) -> TracedStack | None:
    """Return a stack of which these storages are the rows, in this order; None if it cannot be.

    It is made if there is none: then something in the step wants their values as one.
    """
    trace = active_trace()
    if trace is None or len(storages) < 2:
        return None
    for storage in storages:
        trace.capture(storage)
    first = storages[0]
    stack: Any = None if first.row is None else first.row[0]
    is_whole = isinstance(stack, TracedStack) and len(stack) == len(storages)
    if is_whole and all(s.row == (stack, lane) for lane, s in enumerate(storages)):
        return stack
    alike = all(
        s.shape == first.shape and s.sharding == first.sharding and s.dtype == first.dtype
        for s in storages
    )
    if not alike or len(set(map(id, storages))) < len(storages):
        return None
    if trace.recomputation is not None or not all(_may_be_row(s, trace) for s in storages):
        return None
    values = stack_layers([storage.array for storage in storages])
    stack = TracedStack(pinned_stack(values, first.sharding), first.sharding)
    for lane, storage in enumerate(storages):
        storage.become_row(stack, lane)
    return stack


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


def gather(parameters: Sequence[torch.Tensor], states: Sequence[Mapping[str, Any]]) -> None:
    """Let an optimizer's state of parameters that are rows be rows as well.

    Args:
        parameters: The parameters.
        states: Its state of each: tensors by name, and other things.
    """
    by_stack: dict[TracedStack, dict[int, Mapping[str, Any]]] = {}
    for parameter, state in zip(parameters, states, strict=True):
        row = row_of(parameter)
        if row is not None:
            by_stack.setdefault(row[0], {})[row[1]] = state
    for stack, of_lanes in by_stack.items():
        if len(of_lanes) < len(stack):
            continue
        for name in of_lanes[0]:
            payloads = [inner(of_lanes[lane].get(name)) for lane in range(len(stack))]
            storages = [p._storage for p in payloads if p is not None and not p._steps]
            if len(storages) == len(stack):
                traced_stack(storages)


def placed_values(storages: Sequence[Storage]) -> list[Any]:
    """Return what storages hold at the end of a step, placed as they are to lie.

    The rows of a stack are placed as one.
    """
    placed: dict[tuple[TracedStack, Any], list[Any]] = {}
    values: list[Any] = []
    for storage in storages:
        row: Any = storage.row
        if row is None or row[0].row_shape != storage.shape or storage.constraint is not None:
            values.append(place(storage.read(), storage.sharding))
            continue
        stack, lane = row
        key = stack, storage.sharding
        if key not in placed:
            placed[key] = unstack_layers(pinned_stack(stack.array, storage.sharding))
        values.append(placed[key][lane])
    return values


def _may_be_row(storage: Storage, trace: Trace) -> bool:
    row: Any = storage.row
    shape = tuple(storage.array.shape) if row is None else row[0].row_shape
    return (
        storage.manual is None
        and storage.constraint is None
        and storage.unannotated is None
        and trace.may_be_row(storage)
        and shape == storage.shape
    )


# ---------------------------------------------------------------------- ops


Facts = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]


@dataclass
class OpOfRows:
    """What an op has made of all rows of its operands.

    Args:
        key: Equal for the same op with the same other arguments.
        operands: What the key's ids are of.
        results: Stacks, each with the shape, strides and dtype of its rows as torch knows them.
        is_tuple: Whether the op returns several results.
        lanes: The rows that were asked for.
    """

    key: Hashable
    operands: Sequence[_Operand]
    results: Sequence[tuple[TracedStack, Facts]]
    is_tuple: bool
    lanes: set[int] = field(default_factory=set)

    def row(self, lane: int) -> Any:
        """Return what the op makes of one row."""
        self.lanes.add(lane)
        rows = [_wrapped(stack, facts, lane) for stack, facts in self.results]
        return tuple(rows) if self.is_tuple else rows[0]


@dataclass
class _Operand:
    """One argument of an op of rows.

    Args:
        key: Equal for the same argument.
        of: What it is: what all rows are given, or the stack that it is a row of.
        values: Its values along dim 0, one per layer; None for an argument that all rows share.
        wrap: Makes of one of them what the op is given.
    """

    key: Hashable
    of: Any
    values: Any = None
    wrap: Callable[[Any], Any] | None = None


class Rows:
    """What one trace asks of rows, and what ops have made of them."""

    def __init__(self) -> None:
        # By the op and the stacks that its operands are rows of.
        self._ops: dict[Hashable, list[OpOfRows]] = {}

    def forget(self) -> None:
        """Let go of what ops have made: what is alive at the end of a trace is a result."""
        self._ops.clear()

    def number(self, tensor: JaxTensor) -> Any | None:
        """Return the SymFloat or SymInt of a 0-dim tensor that is a row; None for another one."""
        row = row_of(tensor)
        if row is None or tensor.ndim > 0 or tensor.dtype == torch.bool or tensor.is_complex():
            return None
        stack, lane = row
        return sym_of_node(RowNode(stack.numbers, lane))

    def give(self, target: torch.Tensor, source: torch.Tensor) -> bool:
        """Write a tensor that is a row to another one, which becomes a row; whether it has."""
        row, trace = row_of(source), active_trace()
        payload = inner(target)
        if row is None or trace is None or payload is None or payload._steps:
            return False
        storage = payload._storage
        if trace.recomputation is not None or storage.manual is not None:
            return False
        note_write(storage)
        if not _may_be_row(storage, trace):
            return False
        stack, lane = row
        if np.broadcast_shapes(stack.row_shape, storage.shape) != storage.shape:
            return False
        storage.become_row(stack.fitted(storage.shape, jax_dtype(payload.dtype)), lane)
        return True

    def run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any | None:
        """Run a functional op on tensors that are rows; None where it is not an op of rows.

        Args:
            func: An ``OpOverload``.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
        """
        trace = active_trace()
        # A flag of an op's numbers is one of the step, and none of a row.
        if trace is None or trace.recomputation is not None or are_checked():
            return None
        arguments = (*args, *kwargs.values())
        lane = next((row[1] for row in map(row_of, arguments) if row is not None), None)
        if lane is None or torch.Tag.nondeterministic_seeded in func.tags:
            return None
        operands = [_operand(argument, lane) for argument in arguments]
        valid_operands = [operand for operand in operands if operand is not None]
        of_rows = [operand for operand in valid_operands if operand.values is not None]
        if (
            len(valid_operands) < len(arguments)
            or len({len(operand.values) for operand in of_rows}) > 1
        ):
            return None
        key = tuple(operand.key for operand in valid_operands), tuple(kwargs)
        alike = self._ops.setdefault((func, *(id(operand.of) for operand in of_rows)), [])
        op = next((old_op for old_op in alike if old_op.key == key), None)
        if op is None:
            if any(lane not in old_op.lanes for old_op in alike):
                return None
            op = _ran(trace, func, key, valid_operands, len(args), tuple(kwargs))
            if op is None:
                return None
            alike.append(op)
        return op.row(lane)


def _operand(argument: Any, lane: int) -> _Operand | None:
    if isinstance(argument, JaxTensor):
        row = row_of(argument)
        if row is None:
            if argument.ndim > 0 or argument._storage.manual is not None:
                return None
            # Another tensor, as this one may be written to.
            shared = JaxTensor(Storage(argument.value()), dtype=argument.dtype)
            return _Operand(("shared", id(shared._storage.array)), shared)
        if row[1] != lane:
            return None
        shape, stride, dtype = tuple(argument.shape), argument.stride(), argument.dtype

        def wrap(row: Any) -> JaxTensor:
            return JaxTensor(Storage(row), shape=shape, stride=stride, dtype=dtype)

        return _Operand(("row", id(row[0])), row[0], row[0].array, wrap)
    if isinstance(argument, torch.SymFloat | torch.SymInt):
        node: Any = argument.node
        if not isinstance(node, RowNode):
            return _Operand(("number", node.key()), argument)
        is_own = node.lane == lane
        vector = node.rows.vector
        return _Operand(("row", id(node.rows)), node.rows, vector, sym_number) if is_own else None
    if isinstance(argument, torch.Tensor):
        if argument.ndim > 0:
            return None
        number = numpy_from_torch(argument)
        return _Operand(("constant", argument.dtype, number.tobytes()), argument)
    if isinstance(argument, list | tuple) and any(
        isinstance(entry, torch.Tensor | torch.SymFloat | torch.SymInt) for entry in argument
    ):
        return None
    return _Operand((type(argument), repr(argument)), argument)


def _ran(
    trace: Trace,
    func: Any,
    key: Hashable,
    operands: Sequence[_Operand],
    num_args: int,
    names: Sequence[str],
) -> OpOfRows | None:
    """Run an op on all rows; None where it cannot be."""
    outputs: list[Facts] = []
    is_tuple = False

    def of_row(values: Sequence[Any]) -> list[Any]:
        nonlocal is_tuple
        iterator = iter(values)
        arguments = [
            operand.of if operand.wrap is None else operand.wrap(next(iterator))
            for operand in operands
        ]
        tensors = func(*arguments[:num_args], **dict(zip(names, arguments[num_args:], strict=True)))
        is_tuple = isinstance(tensors, tuple | list)
        tensors = tensors if is_tuple else [tensors]
        outputs[:] = [(tuple(tensor.shape), tensor.stride(), tensor.dtype) for tensor in tensors]
        return [tensor.value() for tensor in tensors]

    latest = trace.latest
    try:
        values = jax.vmap(of_row)(
            [operand.values for operand in operands if operand.values is not None]
        )
    except Exception:  # What fails is run again by itself, and fails there in its own words.
        return None
    finally:
        trace.latest = latest  # not what was computed inside of the vmap
    results = [(TracedStack(v), facts) for v, facts in zip(values, outputs, strict=True)]
    return OpOfRows(key, operands, results, is_tuple)


def _wrapped(stack: TracedStack, facts: Facts, lane: int) -> JaxTensor:
    shape, stride, dtype = facts
    storage = Storage(stack.array, shape)
    storage.become_row(stack, lane)
    return JaxTensor(storage, shape=shape, stride=stride, dtype=dtype)
