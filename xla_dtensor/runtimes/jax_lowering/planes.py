"""Read and write by index into images: element ``index`` of each (batch, channel) plane.

An index counts the elements of the plane's last dims in order, as torch's pooling ops do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from xla_dtensor.runtimes.jax_lowering.points import put_points

__all__ = ["add_on_planes", "flat_index"]

# Up to this many (index, element) pairs per plane are compared; more are scattered.
_MOST_COMPARED = 1 << 16


def flat_index(shape: Sequence[int], ndim: int) -> Any:
    """Return each element's index in its plane, an int32 array of `shape`.

    Args:
        shape: The tensor's.
        ndim: How many dims a plane has.
    """
    total = jnp.zeros(tuple(shape), jnp.int32)
    for dim in range(len(shape) - ndim, len(shape)):
        place = lax.broadcasted_iota(jnp.int32, tuple(shape), dim)
        total = total * shape[dim] + place
    return total


def add_on_planes(values: Any, indices: Any, shape: Sequence[int], ndim: int) -> Any:
    """Return zeros of `shape` with `values` added at `indices` of each plane.

    Args:
        values: Dims before the planes' last `ndim` are those of `shape`.
        indices: Of the shape of `values`.
        shape: The result's.
        ndim: How many dims a plane has.
    """
    rest = tuple(shape[: len(shape) - ndim])
    plane = tuple(shape[len(shape) - ndim :])
    size, count = math.prod(plane), math.prod(values.shape[len(rest) :])
    flat_values = values.reshape(*rest, count)
    flat_indices = indices.reshape(*rest, count)
    if size * count <= _MOST_COMPARED:
        # Partitioned over the planes, whatever their number; XLA never writes the pairs out.
        pairs = flat_indices[..., None] == lax.iota(flat_indices.dtype, size)
        return jnp.sum(jnp.where(pairs, flat_values[..., None], 0), axis=-2).reshape(shape)
    points = [lax.broadcasted_iota(jnp.int32, flat_indices.shape, d) for d in range(len(rest))]
    zeros = jnp.zeros((*rest, size), values.dtype)
    points.append(flat_indices.astype(jnp.int32))
    return put_points(zeros, points, flat_values, accumulate=True).reshape(shape)
