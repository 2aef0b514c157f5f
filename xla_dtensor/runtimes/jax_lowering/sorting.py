"""Order statistics: medians, modes, running extrema, and places in a sorted sequence."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax

from xla_dtensor.runtimes.jax_lowering.table import lower

__all__: list[str] = []

aten = torch.ops.aten


def _is_nan(x: Any) -> Any:
    return jnp.isnan(x) if jnp.issubdtype(x.dtype, jnp.floating) else jnp.zeros(x.shape, jnp.bool_)


def _picked(x: Any, order: Any, place: Any, dim: int, keepdim: bool) -> tuple[Any, Any]:
    """Return the elements at `place` in the sorted order along a dim, and where they were."""
    shape = [1 if d == dim else n for d, n in enumerate(x.shape)]
    indices = jnp.take_along_axis(order, jnp.broadcast_to(place, shape), axis=dim)
    values = jnp.take_along_axis(x, indices, axis=dim)
    return (values, indices) if keepdim else (values.squeeze(dim), indices.squeeze(dim))


@lower(aten.kthvalue.default)
def _kthvalue(x: Any, k: int, dim: int = -1, keepdim: bool = False) -> Any:
    if not x.ndim:
        return x, jnp.zeros((), jnp.int64)
    dim %= x.ndim
    return _picked(x, jnp.argsort(x, axis=dim, stable=True), k - 1, dim, keepdim)


# ------------------------------------------------------------------ medians


def _median(x: Any, dim: int, keepdim: bool, skip_nan: bool) -> Any:
    if not x.ndim:
        return x, jnp.zeros((), jnp.int64)
    dim %= x.ndim
    order = jnp.argsort(x, axis=dim, stable=True)  # NaN comes last
    numbers = jnp.sum(~_is_nan(x), axis=dim, keepdims=True)
    size = x.shape[dim]
    middle = jnp.maximum(numbers - 1, 0) // 2
    if not skip_nan:
        middle = jnp.where(numbers < size, numbers, (size - 1) // 2)  # the first NaN
    return _picked(x, order, middle, dim, keepdim)


@lower(aten.median.dim)
def _median_dim(x: Any, dim: int, keepdim: bool = False) -> Any:
    return _median(x, dim, keepdim, skip_nan=False)


@lower(aten.nanmedian.dim)
def _nanmedian_dim(x: Any, dim: int, keepdim: bool = False) -> Any:
    return _median(x, dim, keepdim, skip_nan=True)


def _median_of_all(x: Any, skip_nan: bool) -> Any:
    if not x.size:
        is_float = jnp.issubdtype(x.dtype, jnp.floating)
        return jnp.asarray(jnp.nan if is_float else jnp.iinfo(x.dtype).min, x.dtype)
    return _median(x.reshape(-1), 0, False, skip_nan)[0]


@lower(aten.median.default)
def _median_default(x: Any) -> Any:
    return _median_of_all(x, skip_nan=False)


@lower(aten.nanmedian.default)
def _nanmedian_default(x: Any) -> Any:
    return _median_of_all(x, skip_nan=True)


@lower(aten.mode.default)
def _mode(x: Any, dim: int = -1, keepdim: bool = False) -> Any:
    if not x.ndim:
        return x, jnp.zeros((), jnp.int64)
    dim %= x.ndim
    order = jnp.argsort(x, axis=dim, stable=True)
    values = jnp.take_along_axis(x, order, axis=dim)
    # How many equal elements end at each place; the first maximum is the least of the modes.
    place = lax.broadcasted_iota(jnp.int64, x.shape, dim)
    before = jnp.roll(values, 1, axis=dim)
    starts = (place == 0) | (values != before)
    run = place - lax.cummax(jnp.where(starts, place, 0), axis=dim)
    return _picked(x, order, jnp.argmax(run, axis=dim, keepdims=True), dim, keepdim)


# ------------------------------------------------------------------ running extrema


def _running(x: Any, dim: int, scan: Any) -> Any:
    if not x.ndim:
        return x, jnp.zeros((), jnp.int64)
    dim %= x.ndim
    kind = x.dtype
    x = x.astype(jnp.uint8) if kind == jnp.bool_ else x
    values = scan(x, axis=dim)
    is_new = (x == values) | (_is_nan(x) & _is_nan(values))  # the last one of equals, as torch
    place = lax.broadcasted_iota(jnp.int64, x.shape, dim)
    return values.astype(kind), lax.cummax(jnp.where(is_new, place, 0), axis=dim)


@lower(aten.cummax.default)
def _cummax(x: Any, dim: int) -> Any:
    return _running(x, dim, lax.cummax)


@lower(aten.cummin.default)
def _cummin(x: Any, dim: int) -> Any:
    return _running(x, dim, lax.cummin)


# ------------------------------------------------------------------ places in a sequence


@lower(aten.searchsorted.Tensor, aten.searchsorted.Scalar)
def _searchsorted(
    sequence: Any,
    values: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Any = None,
) -> Any:
    values = jnp.asarray(values)
    if sorter is not None:
        sequence = jnp.take_along_axis(sequence, sorter, axis=-1)
    kind = jnp.promote_types(sequence.dtype, values.dtype)
    sequence, values = sequence.astype(kind), values.astype(kind)
    where = "right" if right or side == "right" else "left"

    def search(one: Any, its: Any) -> Any:
        return jnp.searchsorted(one, its, side=where)

    for _ in range(sequence.ndim - 1):
        search = jax.vmap(search)
    return search(sequence, values).astype(jnp.int32 if out_int32 else jnp.int64)


@lower(aten.bucketize.Tensor, aten.bucketize.Scalar)
def _bucketize(
    values: Any, boundaries: Any, *, out_int32: bool = False, right: bool = False
) -> Any:
    return _searchsorted(boundaries, values, out_int32=out_int32, right=right)
