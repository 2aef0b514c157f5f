"""Run a lowering of many steps as one program, when it is called op by op.

Outside a compiled step every JAX function is a program of its own, and a loop is compiled anew at
each call. A lowering with this decorator is one program per kind of arguments, and is kept.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any

import jax
import numpy as np
import torch
from jax.core import Tracer

from xla_dtensor.nested import leaves, map_nested

__all__ = ["as_one"]

_Kept = dict[Hashable, Callable[..., Any]]
_LIMIT = 1024


class _Place:
    """Stands for an array among the arguments."""


_PLACE = _Place()


def as_one(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a lowering that runs as one program; inside another program it changes nothing.

    Args:
        function: Takes arrays, and other values that may be hashed when lists become tuples.

    Example:
        >>> double_all = as_one(lambda x, times: x * times)
        >>> double_all(np.ones(2, np.float32), 2)
        Array([2., 2.], dtype=float32)
    """
    kept: _Kept = {}

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        given = (args, kwargs)
        arrays = [v for v in leaves(given) if isinstance(v, (jax.Array, np.ndarray))]
        if any(isinstance(array, Tracer) for array in arrays):
            return function(*args, **kwargs)
        rest = map_nested(lambda v: _PLACE if isinstance(v, (jax.Array, np.ndarray)) else v, given)
        # 1, 1.0 and True are equal, and None of them means the same.
        kinds = tuple(type(v) for v in leaves(rest))
        key = (_hashable(rest), kinds, torch.get_float32_matmul_precision())
        if key not in kept:
            if len(kept) >= _LIMIT:
                kept.clear()
            kept[key] = jax.jit(functools.partial(_filled, function, rest))
        return kept[key](*arrays)

    return run


def _filled(function: Callable[..., Any], rest: Any, *arrays: Any) -> Any:
    following = iter(arrays)
    args, kwargs = map_nested(lambda v: next(following) if v is _PLACE else v, rest)
    return function(*args, **kwargs)


def _hashable(value: Any) -> Hashable:
    if isinstance(value, (tuple, list)):
        return (type(value), *map(_hashable, value))
    if isinstance(value, dict):
        return tuple((name, _hashable(v)) for name, v in value.items())
    return value
