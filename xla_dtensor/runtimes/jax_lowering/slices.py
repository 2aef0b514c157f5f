"""Read a slice, and write into one as a pad and a select.

``base.at[1:3].set(new)`` would say the same as one scatter, but XLA's partitioner (jax 0.10, on
CPU) gets chains of such scatters wrong on a sharded dim: in ``a.at[1:3].set(b).at[0].set(5)`` the
second write zeroes rows of the first. Pads and selects are partitioned element by element.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

__all__ = ["cut", "spread", "write_index", "write_slice"]


def cut(base: Any, dim: int, start: int, stop: int, step: int = 1) -> Any:
    """Return ``base[start:stop:step]`` along a dim.

    One element has no step: of a slice that takes one element of a sharded dim by a step, XLA's
    partitioner (jax 0.10) makes an invalid program, or silently a wrong one.
    """
    if stop - start <= step:
        stop, step = min(stop, start + 1), 1
    return lax.slice_in_dim(base, start, stop, step, dim)


def spread(new: Any, shape: Sequence[int], dim: int, start: int, step: int = 1) -> Any:
    """Return zeros of `shape` with `new` at ``start, start + step, ...`` along a dim."""
    count = new.shape[dim]
    if count == 0:
        return jnp.zeros(tuple(shape), new.dtype)
    padding = [(0, 0, 0)] * new.ndim
    between = step - 1 if count > 1 else 0
    padding[dim] = (start, shape[dim] - start - (count - 1) * step - 1, between)
    return lax.pad(new, jnp.zeros((), new.dtype), padding)


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
