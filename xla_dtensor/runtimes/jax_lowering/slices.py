"""Read a slice, and write into one, in words that XLA's partitioner gets right on a sharded dim.

It is wrong in silence, in JAX 0.10 and 0.12, by GSPMD and Shardy (docs/decisions/strided_slices.md
has the figures):

* in chains of scatters: in ``a.at[1:3].set(b).at[0].set(5)`` the second write zeroes rows of the
  first. A write is a pad and a select instead.
* in a pad between elements, which is what the gradient of ``x[::2]`` would be: a fifth of the
  results that are cut have values in the gaps. A new dim is padded behind each element instead,
  and merged with the dim.
* in a slice that takes one element by a step. It is taken without one.

It fails where a slice leaves every shard as it is, as 1024 rows on 8 devices and their first 1023
(128 on each), and both are gathered: the partitioner has one name for the two shards, and takes
the one that was gathered first for the other. A constraint that asks for nothing is a copy to it,
which has a name of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from xla_dtensor.core.local_shape import may_leave_shards
from xla_dtensor.runtimes.jax_lowering.images import mesh_of_program

__all__ = ["cut", "spread", "write_index", "write_slice"]


def cut(base: Any, dim: int, start: int, stop: int, step: int = 1) -> Any:
    """Return ``base[start:stop:step]`` along a dim."""
    if stop - start <= step:
        stop, step = min(stop, start + 1), 1
    result = lax.slice_in_dim(base, start, stop, step, dim)
    mesh = mesh_of_program() if start == 0 and step == 1 and isinstance(base, Tracer) else None
    if mesh is None or not may_leave_shards(base.shape[dim], stop, mesh.size):
        return result
    is_open = NamedSharding(mesh, PartitionSpec(*[PartitionSpec.UNCONSTRAINED] * base.ndim))
    return lax.with_sharding_constraint(result, is_open)


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
