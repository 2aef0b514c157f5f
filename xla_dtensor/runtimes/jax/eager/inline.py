"""Trace an op that a step calls often once for each description of its arguments.

A lowering is a few calls of ``jax.numpy``, of which each takes JAX 0.1 to 0.3 ms to trace. A step
calls most ops many times with arrays of the same kind: AdamW is twelve of them for each parameter.
So while a step is traced, the lowering becomes a jitted function of its arrays alone, and JAX puts
the equations that it has of it into the step's program::

    lerp(a, b, 0.1)    a, b: float32 (8, 8)     traced, 1.1 ms
    lerp(c, d, 0.1)    c, d: float32 (8, 8)     the same equations, on c and d: 0.1 ms
    lerp(c, d, 0.2)                             traced

The program is the same as without, its source lines too: they are those of the call.

Invariants:

* Only what depends on its arguments alone is traced so: ops element by element, and those listed
  in `_PURE`. All that is no array is part of the cache key, by its value and its type; so is the
  precision of products, the one setting that these read. Attention itself is none of them: a
  setting chooses its form.
* Outside of a trace nothing changes: there, one program of several operations could be rounded
  otherwise than each by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any

import jax
import numpy as np
import torch

from xla_dtensor.runtimes.jax.arrays.trace import active_trace
from xla_dtensor.runtimes.jax.lower.matmul import precision
from xla_dtensor.runtimes.nested import map_nested

__all__ = ["call", "inlined"]

aten, ours = torch.ops.aten, torch.ops.xla_dtensor

_PURE = frozenset(
    {
        aten.linalg_vector_norm.default,
        aten.mean.dim,
        aten.native_layer_norm.default,
        aten.native_layer_norm_backward.default,
        aten.sum.dim_IntList,
        ours.sdpa_backward.default,
    }
)
# From JAX 0.12 on True says that a function is inlined when the program is lowered, not here.
_EARLY: Any = jax.Inline.JAX_EARLY if hasattr(jax, "Inline") else True
_programs: dict[Any, Any] = {}
_LIMIT = 10_000
_ARRAY = object()


def call(
    func: Any, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Call the lowering of an op.

    Args:
        func: The ``OpOverload``.
        function: Its lowering.
        args: The lowering's positional arguments, with arrays for tensors.
        kwargs: Its keyword arguments.

    Returns:
        What it returns.
    """
    if active_trace() is None or not _is_pure(func):
        return function(*args, **kwargs)
    arrays: list[Any] = []
    key = function, precision(), _key((*args, *kwargs.items()), arrays)
    try:
        program = _programs.get(key)
    except TypeError:  # an argument that has no hash
        return function(*args, **kwargs)
    if program is None:
        if len(_programs) >= _LIMIT:
            _programs.clear()
        program = _programs[key] = _program(function, args, kwargs)
    return program(*arrays)


@cache
def _is_pure(func: Any) -> bool:
    drawn = torch.Tag.nondeterministic_seeded in func.tags
    return func in _PURE or (torch.Tag.pointwise in func.tags and not drawn)


def _key(value: Any, arrays: list[Any]) -> Any:
    """Return what tells a value apart from others; arrays, which JAX tells apart, are collected."""
    if isinstance(value, (jax.Array, np.ndarray)):
        arrays.append(value)
        return _ARRAY
    if type(value) in (list, tuple):
        return (type(value), *[_key(part, arrays) for part in value])
    if isinstance(value, (float, complex)):
        return repr(value)  # 0.0 and -0.0 are equal
    return type(value), value


def _program(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Callable[..., Any]:
    """Return a jitted function of the arrays among some arguments; it keeps none of them."""

    def without(leaf: Any) -> Any:
        return _ARRAY if isinstance(leaf, (jax.Array, np.ndarray)) else leaf

    template = map_nested(without, (tuple(args), dict(kwargs)))

    def on_arrays(*arrays: Any) -> Any:
        iterator = iter(arrays)
        positional, named = map_nested(lambda v: next(iterator) if v is _ARRAY else v, template)
        return function(*positional, **named)

    return jax.jit(on_arrays, inline=_EARLY)


@lru_cache(maxsize=256)
def inlined(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of arrays of which a trace has the equations, without tracing it anew."""
    return jax.jit(function, inline=_EARLY)
