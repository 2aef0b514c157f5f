"""The largest and the smallest of numbers that may be NaN, whichever device has them.

XLA's maximum over devices (jax 0.10, on CPU) loses a NaN that only some of them have, and finite
numbers with it: of [2, 6, 10, nan] over 4 devices it finds 6. So floats are compared as integers in
the same order, with NaN at the end that wins.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

__all__ = ["largest", "ordered", "smallest", "unordered"]


def ordered(x: Any, nan_is_largest: bool) -> Any:
    """Return integers in the order of the float32 or float64 numbers, NaN at one end."""
    kind = jnp.int64 if x.dtype == jnp.float64 else jnp.int32
    limits = jnp.iinfo(kind)
    bits = lax.bitcast_convert_type(x, kind)
    turned = bits ^ ((bits >> (limits.bits - 1)) & limits.max)
    return jnp.where(jnp.isnan(x), limits.max if nan_is_largest else limits.min, turned)


def unordered(numbers: Any, dtype: Any) -> Any:
    """Return the numbers whose order `ordered` gave."""
    limits = jnp.iinfo(numbers.dtype)
    bits = numbers ^ ((numbers >> (limits.bits - 1)) & limits.max)
    return lax.bitcast_convert_type(bits, dtype)


def largest(x: Any, axis: Any = None, keepdims: bool = False) -> Any:
    """Return the maximum over some dims, NaN where there is one."""
    return _extreme(jnp.max, x, axis, keepdims, nan_is_largest=True)


def smallest(x: Any, axis: Any = None, keepdims: bool = False) -> Any:
    """Return the minimum over some dims, NaN where there is one."""
    return _extreme(jnp.min, x, axis, keepdims, nan_is_largest=False)


def _extreme(reduce: Any, x: Any, axis: Any, keepdims: bool, *, nan_is_largest: bool) -> Any:
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return reduce(x, axis=axis, keepdims=keepdims)
    wide = x if x.dtype == jnp.float64 else x.astype(jnp.float32)
    found = reduce(ordered(wide, nan_is_largest), axis=axis, keepdims=keepdims)
    return unordered(found, wide.dtype).astype(x.dtype)
