"""Scatters that combine: by sum, product, mean or extremum; and writes through a mask."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import torch
from jax import lax

from xla_dtensor.runtimes import jax_devices
from xla_dtensor.runtimes.jax_lowering.extremes import ordered, unordered
from xla_dtensor.runtimes.jax_lowering.points import on_rows, or_poison
from xla_dtensor.runtimes.jax_lowering.table import lower

__all__ = ["identity", "reduce_points"]

aten = torch.ops.aten
_METHODS = {"sum": "add", "mean": "add", "prod": "multiply", "amax": "max", "amin": "min"}


def identity(reduce: str, dtype: Any) -> Any:
    """Return what changes nothing when combined with any number."""
    if reduce in ("sum", "mean"):
        return jnp.zeros((), dtype)
    if reduce == "prod":
        return jnp.ones((), dtype)
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.asarray(-jnp.inf if reduce == "amax" else jnp.inf, dtype)
    limits = jnp.iinfo(dtype)
    return jnp.asarray(limits.min if reduce == "amax" else limits.max, dtype)


def reduce_points(x: Any, points: Sequence[Any], values: Any, reduce: str) -> Any:
    """Return `x` combined with `values` at points along its first dims ("mean" sums).

    The points are padded to a size that XLA's partitioner never cuts unevenly; see
    :mod:`~xla_dtensor.runtimes.jax_lowering.points`.
    """
    rest = x.shape[len(points) :]
    count = math.prod(points[0].shape)
    if not count:
        return x
    if reduce in ("amax", "amin") and x.dtype.kind == "f":
        largest = reduce == "amax"
        numbers = reduce_points(
            ordered(x, largest), points, ordered(values.astype(x.dtype), largest), reduce
        )
        return unordered(numbers, x.dtype)
    lack = -count % jax_devices.device_count()
    flat = [jnp.pad(point.reshape(-1), (0, lack)) for point in points]
    values = values.astype(x.dtype).reshape(count, *rest)
    padding = [(0, lack), *[(0, 0)] * len(rest)]
    values = jnp.pad(values, padding, constant_values=identity(reduce, x.dtype))
    return getattr(x.at[tuple(flat)], _METHODS[reduce])(values, mode="drop")


_BY = {"add": "sum", "multiply": "prod"}


def _reduced(x: Any, points: Sequence[Any], values: Any, reduce: str, include_self: bool) -> Any:
    shape = points[0].shape
    points, values = or_poison(x, points, values, from_the_end=False)
    kind = x.dtype
    if kind in (jnp.bfloat16, jnp.float16):
        x, values = x.astype(jnp.float32), values.astype(jnp.float32)
    elif kind == jnp.bool_:
        x, values = x.astype(jnp.int32), values.astype(jnp.int32)
    counts = None
    if reduce == "mean" or not include_self:
        head = x.shape[: len(points)]
        ones = jnp.ones(shape, jnp.int64)
        counts = reduce_points(jnp.zeros(head, jnp.int64), points, ones, "sum")
        counts = counts.reshape(*head, *(1,) * (x.ndim - len(head)))
    base = x
    if not include_self and counts is not None:
        base = jnp.where(counts > 0, identity(reduce, x.dtype), x)
    found = reduce_points(base, points, values, reduce)
    if reduce == "mean" and counts is not None:
        number = jnp.maximum(counts + (1 if include_self else 0), 1)
        found = found // number if kind.kind in "iu" else found / number.astype(found.dtype)
    return found.astype(kind)


@lower(aten.scatter_reduce.two)
@on_rows
def _scatter_reduce(
    x: Any, dim: int, index: Any, src: Any, reduce: str, *, include_self: bool = True
) -> Any:
    if not index.size:
        return x
    index = index.reshape((-1,) if not index.ndim else index.shape)
    src = src.reshape((-1,) if not src.ndim else src.shape)
    points = [lax.broadcasted_iota(index.dtype, index.shape, d) for d in range(index.ndim)]
    points[dim % x.ndim] = index
    values = src[tuple(map(slice, index.shape))]
    return _reduced(x, points, values, reduce, include_self)


@lower(aten.scatter.reduce)
def _scatter_by(x: Any, dim: int, index: Any, src: Any, *, reduce: str) -> Any:
    """The older form of scatter_reduce; its ``reduce`` is "add" or "multiply"."""
    return _scatter_reduce(x, dim, index, src, _BY[reduce])


@lower(aten.scatter.value_reduce)
def _scatter_value_by(x: Any, dim: int, index: Any, value: Any, *, reduce: str) -> Any:
    src = jnp.full(index.shape, value, x.dtype)
    return _scatter_reduce(x, dim, index, src, _BY[reduce])


@lower(aten.index_reduce.default)
@on_rows
def _index_reduce(
    x: Any, dim: int, index: Any, source: Any, reduce: str, *, include_self: bool = True
) -> Any:
    source = jnp.moveaxis(source.reshape((-1,) if not source.ndim else source.shape), dim, 0)
    moved = jnp.moveaxis(x, dim, 0)
    found = _reduced(moved, [index.reshape(-1)], source, reduce, include_self)
    return jnp.moveaxis(found, 0, dim)


# ------------------------------------------------------------------ through a mask


@lower(aten.masked_scatter.default, wants_meta=True)
def _masked_scatter(x: Any, mask: Any, source: Any, *, meta: Any) -> Any:
    x, mask = jnp.broadcast_to(x, meta.shape), jnp.broadcast_to(mask, meta.shape)
    if not source.size or not x.size:
        return x
    number = (jnp.cumsum(mask.reshape(-1)) - 1).reshape(mask.shape)
    taken = jnp.take(source.reshape(-1), jnp.where(mask, number, 0), mode="fill")
    return jnp.where(mask, taken, x)


@lower(aten.masked_scatter_backward.default)
def _masked_scatter_backward(grad: Any, mask: Any, sizes: Any) -> Any:
    """The gradient of the source: what lies under the mask, in order, and zeros behind."""
    sizes = tuple(sizes)
    count, mask = math.prod(sizes), jnp.broadcast_to(mask, grad.shape).reshape(-1)
    if not count or not mask.size:
        return jnp.zeros(sizes, grad.dtype)
    order = jnp.argsort(~mask, stable=True)[:count]
    taken = jnp.where(mask[order], grad.reshape(-1)[order], 0)
    return jnp.pad(taken, (0, count - taken.shape[0])).reshape(sizes)
