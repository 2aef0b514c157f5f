"""Reductions along dims, and the ops that scan or sort along one.

Half-precision sums accumulate in float32, as torch's kernels do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax

from xla_dtensor.errors import IndexRangeError
from xla_dtensor.runtimes.jax_convert import jax_dtype
from xla_dtensor.runtimes.jax_lowering.extremes import largest, smallest
from xla_dtensor.runtimes.jax_lowering.pointwise import log_add_exp, quotient
from xla_dtensor.runtimes.jax_lowering.table import lower

__all__: list[str] = []

aten = torch.ops.aten


def _axes(x: jax.Array, dim: Any) -> tuple[int, ...]:
    if dim is None or (isinstance(dim, Sequence) and not dim):
        return tuple(range(x.ndim))
    dims = (dim,) if isinstance(dim, int) else tuple(dim)
    most = max(x.ndim, 1)
    if any(not -most <= d < most for d in dims):
        raise IndexRangeError(
            f"A reduction was asked for along dim={dim} of a tensor of shape={x.shape}. It has the "
            f"dims {-most} to {most - 1}. Pass one of these."
        )
    return tuple(d % max(x.ndim, 1) for d in dims) if x.ndim else ()


def _wide(x: jax.Array, meta: Any) -> jax.Array:
    """`x` in the dtype to accumulate in: that of the result, but complex numbers stay complex."""
    dtype = jax_dtype(meta.dtype)
    if jnp.iscomplexobj(x):
        return x.astype(jnp.promote_types(x.dtype, dtype))
    return x.astype(jnp.float32 if dtype in (jnp.bfloat16, jnp.float16) else dtype)


@lower(aten.sum.default, aten.sum.dim_IntList, wants_meta=True)
def _sum(x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None, meta: Any) -> Any:
    return jnp.sum(_wide(x, meta), axis=_axes(x, dim), keepdims=keepdim)


@lower(aten.mean.default, aten.mean.dim, wants_meta=True)
def _mean(x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None, meta: Any) -> Any:
    axes, wide = _axes(x, dim), _wide(x, meta)
    if wide.dtype != jax_dtype(meta.dtype) or jnp.iscomplexobj(wide):
        return jnp.mean(wide, axis=axes, keepdims=keepdim)
    count = math.prod(x.shape[d] for d in axes)
    return quotient(jnp.sum(wide, axis=axes, keepdims=keepdim), count)


@lower(aten.prod.default, wants_meta=True)
def _prod(x: Any, *, dtype: Any = None, meta: Any) -> Any:
    return jnp.prod(_wide(x, meta))


@lower(aten.prod.dim_int, wants_meta=True)
def _prod_dim(x: Any, dim: int, keepdim: bool = False, *, dtype: Any = None, meta: Any) -> Any:
    return jnp.prod(_wide(x, meta), axis=_axes(x, dim), keepdims=keepdim)


@lower(aten.amax.default)
def _amax(x: Any, dim: Any = (), keepdim: bool = False) -> Any:
    return largest(x, axis=_axes(x, dim), keepdims=keepdim)


@lower(aten.amin.default)
def _amin(x: Any, dim: Any = (), keepdim: bool = False) -> Any:
    return smallest(x, axis=_axes(x, dim), keepdims=keepdim)


@lower(aten.max.default)
def _max(x: Any) -> Any:
    return largest(x)


@lower(aten.min.default)
def _min(x: Any) -> Any:
    return smallest(x)


@lower(aten.max.dim)
def _max_dim(x: Any, dim: int, keepdim: bool = False) -> Any:
    axis = _axes(x, dim)
    if not axis:
        return x, jnp.zeros((), jnp.int64)
    return (
        largest(x, axis=axis, keepdims=keepdim),
        jnp.argmax(x, axis=axis[0], keepdims=keepdim),
    )


@lower(aten.min.dim)
def _min_dim(x: Any, dim: int, keepdim: bool = False) -> Any:
    axis = _axes(x, dim)
    if not axis:
        return x, jnp.zeros((), jnp.int64)
    return (
        smallest(x, axis=axis, keepdims=keepdim),
        jnp.argmin(x, axis=axis[0], keepdims=keepdim),
    )


@lower(aten.argmax.default)
def _argmax(x: Any, dim: int | None = None, keepdim: bool = False) -> Any:
    return jnp.argmax(x, axis=dim if x.ndim else None, keepdims=keepdim and x.ndim > 0)


@lower(aten.argmin.default)
def _argmin(x: Any, dim: int | None = None, keepdim: bool = False) -> Any:
    return jnp.argmin(x, axis=dim if x.ndim else None, keepdims=keepdim and x.ndim > 0)


@lower(aten.any.default, aten.any.dim, aten.any.dims, aten._is_any_true.default)
def _any(x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    return jnp.any(x != 0, axis=_axes_of_truth(x, dim), keepdims=keepdim)


@lower(aten.all.default, aten.all.dim, aten.all.dims, aten._is_all_true.default)
def _all(x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    return jnp.all(x != 0, axis=_axes_of_truth(x, dim), keepdims=keepdim)


def _axes_of_truth(x: Any, dim: Any) -> tuple[int, ...]:
    """To any and all, no dims are no dims; to sum and the like they are all dims."""
    return () if isinstance(dim, Sequence) and not dim else _axes(x, dim)


@lower(aten.logsumexp.default)
def _logsumexp(x: Any, dim: Any, keepdim: bool = False) -> Any:
    return jax.nn.logsumexp(x, axis=_axes(x, dim), keepdims=keepdim)


@lower(aten.var.correction, wants_meta=True)
def _var(x: Any, dim: Any = None, *, correction: Any = 1, keepdim: bool = False, meta: Any) -> Any:
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        # torch's kernels say so; its meta device takes any dtype.
        raise NotImplementedError("std and var only support floating point and complex dtypes")
    axes = _axes(x, dim)
    count = 1
    for axis in axes:
        count *= x.shape[axis]
    wide = _wide(x, meta)
    centred = wide - jnp.mean(wide, axis=axes, keepdims=True)
    divisor = max(count - (1 if correction is None else correction), 0)
    squares = jnp.real(centred * jnp.conj(centred))
    return jnp.sum(squares, axis=axes, keepdims=keepdim) / divisor


@lower(aten.linalg_vector_norm.default, wants_meta=True)
def _vector_norm(
    x: Any, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None, meta: Any
) -> Any:
    wide, axes = _wide(jnp.abs(x), meta), _axes(x, dim)
    if ord == 2:
        return jnp.sqrt(jnp.sum(wide * wide, axis=axes, keepdims=keepdim))
    if ord in (float("inf"), float("-inf")):
        return (largest if ord > 0 else smallest)(wide, axis=axes, keepdims=keepdim)
    if ord == 0:
        return jnp.sum(wide != 0, axis=axes, keepdims=keepdim)
    return jnp.sum(wide**ord, axis=axes, keepdims=keepdim) ** (1 / ord)


@lower(aten.cumsum.default, wants_meta=True)
def _cumsum(x: Any, dim: int, *, dtype: Any = None, meta: Any) -> Any:
    return jnp.cumsum(_wide(x, meta), axis=dim) if x.ndim else x


@lower(aten.cumprod.default, wants_meta=True)
def _cumprod(x: Any, dim: int, *, dtype: Any = None, meta: Any) -> Any:
    return jnp.cumprod(_wide(x, meta), axis=dim) if x.ndim else x


@lower(aten.logcumsumexp.default)
def _logcumsumexp(x: Any, dim: int) -> Any:
    if not x.ndim or not x.size:
        return x
    if x.dtype.kind != "c":
        return lax.cumlogsumexp(x, axis=dim % x.ndim)
    rows = jnp.moveaxis(x, dim, 0)

    def add(total: Any, row: Any) -> tuple[Any, Any]:
        total = log_add_exp(total, row)
        return total, total

    _, totals = lax.scan(add, rows[0], rows[1:])
    return jnp.moveaxis(jnp.concatenate([rows[:1], totals]), 0, dim)


@lower(aten._softmax.default)
def _softmax(x: Any, dim: int, half_to_float: bool) -> Any:
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return jax.nn.softmax(wide, axis=_axes(x, dim))


@lower(aten._log_softmax.default)
def _log_softmax(x: Any, dim: int, half_to_float: bool) -> Any:
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return jax.nn.log_softmax(wide, axis=_axes(x, dim))


@lower(aten._softmax_backward_data.default)
def _softmax_backward(grad: Any, y: Any, dim: int, input_dtype: Any) -> Any:
    product = grad * y
    return product - y * jnp.sum(product, axis=_axes(y, dim), keepdims=True)


@lower(aten._log_softmax_backward_data.default)
def _log_softmax_backward(grad: Any, y: Any, dim: int, input_dtype: Any) -> Any:
    return grad - jnp.exp(y) * jnp.sum(grad, axis=_axes(y, dim), keepdims=True)


@lower(aten.topk.default)
def _topk(x: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    if not x.ndim:
        return x, jnp.zeros((), jnp.int64)
    # ~x turns the order of integers round without the overflow of -x.
    turned = (lambda v: v) if largest else jnp.invert if x.dtype.kind in "biu" else jnp.negative
    values, indices = lax.top_k(jnp.moveaxis(turned(x), dim, -1), k)
    values = turned(values)
    return jnp.moveaxis(values, -1, dim), jnp.moveaxis(indices, -1, dim)


@lower(aten.sort.default, aten.sort.stable)
def _sort(x: Any, dim: int = -1, descending: bool = False, *, stable: bool | None = None) -> Any:
    if not x.ndim:
        return x, jnp.zeros((), jnp.int64)
    order = jnp.argsort(x, axis=dim, descending=descending, stable=True)
    return jnp.take_along_axis(x, order, axis=dim), order
