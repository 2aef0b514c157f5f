"""Read a slice, and write into one, in words that XLA's partitioner gets right on a sharded dim.

It is wrong in silence, in JAX 0.10 and 0.12, by GSPMD and Shardy (docs/decisions/strided_slices.md
has the figures):

* in chains of scatters: in ``a.at[1:3].set(b).at[0].set(5)`` the second write zeroes rows of the
  first. A write is a pad and a select instead.
* in a pad between elements, which is what the gradient of ``x[::2]`` would be: a fifth of the
  results that are cut have values in the gaps. A new dim is padded behind each element instead,
  and merged with the dim.
* in a slice that takes one element by a step. It is taken without one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

__all__ = ["cut", "spread", "write_index", "write_slice"]


def cut(base: Any, dim: int, start: int, stop: int, step: int = 1) -> Any:
    """Return ``base[start:stop:step]`` along a dim."""
    if stop - start <= step:
        stop, step = min(stop, start + 1), 1
    return lax.slice_in_dim(base, start, stop, step, dim)


def spread(new: Any, shape: Sequence[int], dim: int, start: int, step: int = 1) -> Any:
    """Return zeros of `shape` with `new` at ``start, start + step, ...`` along a dim."""
    count = new.shape[dim]
    if count == 0:
        return jnp.zeros(tuple(shape), new.dtype)
    if step > 1 and count > 1:
        new = _with_gaps(new, dim, step)
        new = lax.slice_in_dim(new, 0, min(count * step, shape[dim] - start), 1, dim)
    padding = [(0, 0, 0)] * new.ndim
    padding[dim] = (start, shape[dim] - start - new.shape[dim], 0)
    return lax.pad(new, jnp.zeros((), new.dtype), padding)


def _with_gaps(x: Any, dim: int, step: int) -> Any:
    """Return `x` with ``step - 1`` zeros behind each element along a dim."""
    padding = [(0, 0, 0)] * (x.ndim + 1)
    padding[dim + 1] = (0, step - 1, 0)
    apart = lax.pad(jnp.expand_dims(x, dim + 1), jnp.zeros((), x.dtype), padding)
    return lax.collapse(apart, dim, dim + 2)


def write_slice(base: Any, new: Any, dim: int, start: int, step: int = 1) -> Any:
    """Return `base` with `new` at ``start, start + step, ...`` along a dim."""
    place = lax.broadcasted_iota(jnp.int32, base.shape, dim) - start
    inside = (place >= 0) & (place < new.shape[dim] * step)
    if step > 1:
        inside &= place % step == 0
    return jnp.where(inside, spread(new, base.shape, dim, start, step), base)


def write_index(base: Any, new: Any, dim: int, index: Any) -> Any:
    """Return `base` with `new`, which lacks the dim, at an index that may be a traced number."""
    place = lax.broadcasted_iota(jnp.int32, base.shape, dim)
    return jnp.where(place == index, jnp.expand_dims(new, dim), base)
