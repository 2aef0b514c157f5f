"""``_foreach_*`` ops in a traced step: one op for all layers, where the lists hold layers' rows.

torch gives such an op lists: of parameters, of their gradients, of a number for each. Places in the
lists that hold the rows of one stack (``traced_stacks``) are one op under ``jax.vmap``; the
others are dealt out one by one (``foreach``)::

    params  [a0, b0, a1, b1]        a0 a1 are the rows of a, b0 b1 those of b
    grads   [g0, h0, g1, h1]        g0 g1 the rows of g, h0 h1 no rows

    torch._foreach_add_(params, grads)        a := vmap(add)(a, g)
                                              b := vmap(add)(b, stack_layers h0 h1)

Numbers are rows as well: a list of Python floats is a vector, and so is one that was computed from
counters that are rows (``number_rows``).

Invariants:

* All results are computed before the first is written, whatever is written to is read before.
* A row's op is the op that its place would get alone, on a tensor of its shape and dtype and on a
  number where there was a number: vmap does not change which dtype torch promotes to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import torch

from xla_dtensor.core.errors import CompileError
from xla_dtensor.runtimes.jax.arrays.trace import active_trace, note_write
from xla_dtensor.runtimes.jax.arrays.values import jax_dtype, numpy_from_torch
from xla_dtensor.runtimes.jax.compile.layers.layer_stacks import stack_layers
from xla_dtensor.runtimes.jax.compile.layers.number_rows import vector_of
from xla_dtensor.runtimes.jax.compile.layers.traced_stacks import (
    TracedStack,
    lanes_of,
    traced_stack,
)
from xla_dtensor.runtimes.jax.compile.trace_values import inner
from xla_dtensor.runtimes.jax.eager.scalar import sym_number
from xla_dtensor.runtimes.jax.eager.tensor import JaxTensor, Storage
from xla_dtensor.runtimes.whole_ops import num_places, run_foreach

__all__ = ["run_foreach_on_rows", "write_foreach"]


class _Column(NamedTuple):
    """What the places of one stack hold in one list.

    Attributes:
        values: One value per layer along dim 0; None where `wrap` needs none.
        wrap: Makes of a row what the op is given.
    """

    values: Any
    wrap: Callable[[Any], Any]


class _Done(NamedTuple):
    """The results of the rows of one stack.

    Attributes:
        places: Where the rows stand in the lists, by lane.
        values: Their results along dim 0.
        like: The result of one row, of which the shape, the strides and the dtype hold for all.
    """

    places: list[int]
    values: Any
    like: JaxTensor


def run_foreach_on_rows(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Run a functional foreach op; what it returns are rows again.

    Args:
        func: An ``OpOverload`` of the ``_foreach_`` family.
        args: Its positional arguments.
        kwargs: Its keyword arguments.

    Returns:
        One result per place of the lists.
    """
    done, others = _run(func, args, kwargs)
    results: dict[int, Any] = dict(others)
    for each in done:
        results |= zip(each.places, _wrapped(each), strict=True)
    return [results[place] for place in range(num_places(args))]


def write_foreach(
    func: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    write: Callable[[torch.Tensor, torch.Tensor], None],
) -> None:
    """Run a foreach op that writes to the tensors of its first list.

    Args:
        func: Its functional form, which takes the same arguments.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        write: Writes one result to one tensor.
    """
    done, others = _run(func, args, kwargs)
    targets = args[0]
    for each in done:
        _write_rows([targets[place] for place in each.places], each, write)
    for place, result in others:
        write(targets[place], result)


def _run(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[_Done], list[tuple[int, Any]]]:
    """Return the results of rows, and the place and the result of each other one."""
    count = num_places(args)
    done = [] if active_trace() is None else list(_run_on_rows(func, args, kwargs))
    taken = {place for each in done for place in each.places}
    rest = [place for place in range(count) if place not in taken]
    if len(rest) == count:
        return [], list(enumerate(run_foreach(func, args, kwargs)))
    if not rest:
        return done, []

    def left(value: Any) -> Any:
        return [value[place] for place in rest] if isinstance(value, list | tuple) else value

    found = run_foreach(func, list(map(left, args)), {k: left(v) for k, v in kwargs.items()})
    return done, list(zip(rest, found, strict=True))


def _run_on_rows(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[_Done]:
    lists = [value for value in (*args, *kwargs.values()) if isinstance(value, list | tuple)]
    given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | dict(kwargs)
    if isinstance(given.get("scalars"), torch.Tensor):  # a number for each place, in one tensor
        return []
    groups = lanes_of(items for items in lists if items and isinstance(items[0], torch.Tensor))
    found = (_run_group(func, places, args, kwargs) for places in groups)
    return [done for done in found if done is not None]


def _run_group(
    func: Any, places: list[int], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> _Done | None:
    """Run an op on the rows of a stack at once; None if something among them is no row."""

    def column(value: Any) -> _Column | None:
        if not isinstance(value, list | tuple):
            return _Column(None, lambda _: value)
        return _column_of([value[place] for place in places])

    columns = [column(value) for value in (*args, *kwargs.values())]
    if None in columns:
        return None
    known = [column for column in columns if column is not None]
    results: list[JaxTensor] = []

    def of_row(values: Sequence[Any]) -> Any:
        rest = iter(values)
        wrapped = [c.wrap(None if c.values is None else next(rest)) for c in known]
        items = [
            [item] if isinstance(value, list | tuple) else item
            for value, item in zip((*args, *kwargs.values()), wrapped, strict=True)
        ]
        named = dict(zip(kwargs, items[len(args) :], strict=True))
        (result,) = run_foreach(func, items[: len(args)], named)
        results.append(result)
        return result.value()

    trace = active_trace()
    latest = None if trace is None else trace.latest
    try:
        values = jax.vmap(of_row)([c.values for c in known if c.values is not None])
    except CompileError:
        return None  # an op that asks what its number is, which has to be one number then
    finally:
        if trace is not None:
            trace.latest = latest  # not what was computed inside of the vmap
    return _Done(places, values, results[0])


def _column_of(items: Sequence[Any]) -> _Column | None:
    if isinstance(items[0], torch.Tensor):
        return _column_of_tensors(items)
    first = items[0]
    if not any(map(_is_sym, items)) and len({repr(item) for item in items}) == 1:
        return _Column(None, lambda _: first)
    if all(type(item) is int for item in items):
        return None
    vector = vector_of(items)
    return None if vector is None else _Column(vector, sym_number)


def _column_of_tensors(items: Sequence[Any]) -> _Column | None:
    if all(type(item) is torch.Tensor for item in items):  # counters that were just made
        made = [JaxTensor(Storage(jnp.array(numpy_from_torch(item)))) for item in items]
        return _column_of_tensors(made)
    payloads = [inner(item) for item in items]
    tensors = [payload for payload in payloads if payload is not None]
    if len(tensors) < len(items) or any(t._storage.manual is not None for t in tensors):
        return None
    shape, stride, dtype = tuple(tensors[0].shape), tensors[0].stride(), tensors[0].dtype
    if any(tuple(t.shape) != shape or t.dtype != dtype for t in tensors):
        return None
    stack = None if any(t._steps for t in tensors) else traced_stack([t._storage for t in tensors])
    if stack is not None and stack.row_shape == shape:
        values = stack.array
    else:
        values = stack_layers([tensor.value() for tensor in tensors])

    def wrap(row: Any) -> JaxTensor:
        return JaxTensor(Storage(row), shape=shape, stride=stride, dtype=dtype)

    return _Column(values, wrap)


def _is_sym(value: Any) -> bool:
    return isinstance(value, torch.SymFloat | torch.SymInt)


def _wrapped(done: _Done) -> list[JaxTensor]:
    shape, stride, dtype = tuple(done.like.shape), done.like.stride(), done.like.dtype
    storages = [Storage(done.values, shape) for _ in done.places]
    TracedStack(done.values, storages, None)
    return [JaxTensor(s, shape=shape, stride=stride, dtype=dtype) for s in storages]


def _write_rows(
    targets: Sequence[Any], done: _Done, write: Callable[[torch.Tensor, torch.Tensor], None]
) -> None:
    tensors = [inner(target) for target in targets]
    shape, dtype = tuple(targets[0].shape), jax_dtype(targets[0].dtype)
    storages = [t._storage for t in tensors if t is not None and not t._steps]
    stack = traced_stack(storages) if len(storages) == len(targets) else None
    if stack is None or stack.row_shape != shape:
        for target, result in zip(targets, _wrapped(done), strict=True):
            write(target, result)
        return
    for storage in storages:
        note_write(storage)
    of_row = tuple(done.values.shape[1:])
    values = done.values.astype(dtype).reshape(-1, *(1,) * (len(shape) - len(of_row)), *of_row)
    stack.array = jnp.broadcast_to(values, (len(storages), *shape))
