"""Gathers, scatters, embeddings, and the losses that pick one class per row.

torch refuses an index out of range; a compiled program cannot. Here such an index gives NaN (or
the smallest integer) rather than the clamped neighbour that JAX would return by default, and
writes NaN; negative ones are out of range where torch refuses them.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax

from xla_dtensor.runtimes.jax_lowering.host_values import read_on_host
from xla_dtensor.runtimes.jax_lowering.points import (
    on_rows,
    or_poison,
    put_points,
    put_points_along,
)
from xla_dtensor.runtimes.jax_lowering.table import lower

__all__: list[str] = []

aten = torch.ops.aten


@lower(aten.embedding.default)
def _embedding(
    weight: Any,
    indices: Any,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    return weight.at[indices].get(mode="fill", wrap_negative_indices=False)


@lower(aten.embedding_dense_backward.default)
def _embedding_backward(
    grad: Any, indices: Any, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
) -> Any:
    if scale_grad_by_freq:
        counts = jnp.zeros(num_weights, grad.dtype).at[indices].add(1)
        grad = grad / counts[indices][..., None]
    if padding_idx >= 0:
        grad = jnp.where((indices == padding_idx)[..., None], 0, grad)
    rows = jnp.zeros((num_weights, grad.shape[-1]), jnp.promote_types(grad.dtype, jnp.float32))
    # The indices just as the forward pass takes them: what moves them there serves here as well.
    summed = put_points(rows, [indices], grad, accumulate=True, from_the_end=False)
    return summed.astype(grad.dtype)


@lower(aten.index_select.default)
def _index_select(x: Any, dim: int, index: Any) -> Any:
    if not x.ndim:
        return _index_select(x[None], 0, index.reshape(-1)).reshape(())
    return jnp.take(x, _from_start(index, x.shape[dim]), axis=dim, mode="fill")


def _from_start(index: Any, size: int) -> Any:
    """Return indices of which the negative ones are out of range, like those beyond the end."""
    return jnp.where(index < 0, size, index)


@lower(aten.gather.default)
def _gather(x: Any, dim: int, index: Any, *, sparse_grad: bool = False) -> Any:
    if not index.size:
        return jnp.zeros(index.shape, x.dtype)
    if not x.ndim:
        return _gather(x[None], 0, index.reshape(-1)).reshape(index.shape)
    cut = tuple(
        slice(None) if d == dim % x.ndim else slice(0, n) for d, n in enumerate(index.shape)
    )
    index = _from_start(index, x.shape[dim])
    return jnp.take_along_axis(x[cut], index, axis=dim, mode="fill")


def _scattered(x: Any, dim: int, index: Any, values: Any, accumulate: bool) -> Any:
    if not index.size:
        return x
    points = [lax.broadcasted_iota(index.dtype, index.shape, d) for d in range(index.ndim)]
    points[dim % x.ndim] = index
    points, values = or_poison(x, points, values, from_the_end=False)
    return put_points(x, points, values, accumulate)


@lower(aten.scatter.src)
@on_rows
def _scatter_src(x: Any, dim: int, index: Any, src: Any) -> Any:
    return _scattered(x, dim, index, src[tuple(map(slice, index.shape))], accumulate=False)


@lower(aten.scatter.value)
@on_rows
def _scatter_value(x: Any, dim: int, index: Any, value: Any) -> Any:
    values = jnp.broadcast_to(jnp.asarray(value), index.shape)
    return _scattered(x, dim, index, values, accumulate=False)


@lower(aten.scatter_add.default)
@on_rows
def _scatter_add(x: Any, dim: int, index: Any, src: Any) -> Any:
    return _scattered(x, dim, index, src[tuple(map(slice, index.shape))], accumulate=True)


def _advanced(indices: Any) -> tuple[Any, ...]:
    def index(i: Any) -> Any:
        if i is None:
            return slice(None)
        if i.dtype not in (jnp.bool_, jnp.uint8):  # to torch, uint8 is a mask as well
            return i
        what = "used as a mask that decides how many elements there are"
        return read_on_host(i, what).astype(bool)

    return tuple(map(index, indices))


@lower(aten.index.Tensor)
def _index(x: Any, indices: Any) -> Any:
    places = _advanced(indices)
    if any(isinstance(i, jax.Array) and i.dtype != jnp.bool_ for i in places):
        return x.at[places].get(mode="fill")
    return x[places]


@lower(aten.index_put.default)
def _index_put(x: Any, indices: Any, values: Any, accumulate: bool = False) -> Any:
    values = values.astype(x.dtype)
    mask = indices[0] if len(indices) == 1 else None
    if mask is not None and mask.dtype == jnp.bool_ and values.size == 1:
        # The one write through a mask whose shapes do not depend on the mask's values.
        mask = mask.reshape(mask.shape + (1,) * (x.ndim - mask.ndim))
        return jnp.where(mask, x + values.reshape(()) if accumulate else values.reshape(()), x)
    if any(i is not None and i.dtype in (jnp.bool_, jnp.uint8) for i in indices):
        at = x.at[_advanced(indices)]
        return at.add(values) if accumulate else at.set(values)
    dims = [dim for dim, i in enumerate(indices) if i is not None]
    points = jnp.broadcast_arrays(*(indices[dim] for dim in dims))
    shape = points[0].shape
    rest = [x.shape[dim] for dim in range(x.ndim) if dim not in dims]
    # Values have the indices' dims in place of the indexed ones, or first where these are apart.
    at = dims[0] if dims[-1] - dims[0] + 1 == len(dims) else 0
    values = jnp.broadcast_to(values, (*rest[:at], *shape, *rest[at:]))
    values = jnp.moveaxis(values, range(at, at + len(shape)), range(len(shape)))
    return put_points_along(x, dims, points, values, accumulate)


@lower(aten.put.default)
def _put(x: Any, index: Any, source: Any, accumulate: bool = False) -> Any:
    flat = x.reshape(-1)
    points, values = or_poison(flat, [index.reshape(-1)], source.reshape(-1))
    return put_points(flat, points, values, accumulate).reshape(x.shape)


@lower(aten.index_copy.default)
@on_rows
def _index_copy(x: Any, dim: int, index: Any, source: Any) -> Any:
    values = jnp.moveaxis(jnp.atleast_1d(source), dim, 0)
    points = [index.reshape(-1)]
    return put_points_along(x, [dim], points, values, accumulate=False, from_the_end=False)


@lower(aten.index_fill.int_Scalar, aten.index_fill.int_Tensor)
@on_rows
def _index_fill(x: Any, dim: int, index: Any, value: Any) -> Any:
    index, value = index.reshape(-1), jnp.asarray(value).reshape(())
    rest = [size for d, size in enumerate(x.shape) if d != dim % x.ndim]
    values = jnp.broadcast_to(value, (*index.shape, *rest))
    return put_points_along(x, [dim], [index], values, accumulate=False)


@lower(aten.index_add.default)
@on_rows
def _index_add(x: Any, dim: int, index: Any, source: Any, *, alpha: Any = 1) -> Any:
    source = (source * alpha).reshape(*x.shape[: dim % x.ndim], -1, *x.shape[dim % x.ndim + 1 :])
    values = jnp.moveaxis(source, dim, 0)
    points = [index.reshape(-1)]
    return put_points_along(x, [dim], points, values, accumulate=True, from_the_end=False)


@lower(aten.max_unpool2d.default, aten.max_unpool3d.default)
def _max_unpool(x: Any, indices: Any, output_size: Any, *_: Any) -> Any:
    lead = x.shape[: -len(output_size)]
    volume = jnp.zeros((*lead, math.prod(output_size)), x.dtype)
    places, values = indices.reshape(*lead, -1), x.reshape(*lead, -1)
    found = _scattered(volume, -1, places, values, accumulate=False)
    return found.reshape(*lead, *output_size)


# ------------------------------------------------------------------ class-picking losses


def _picked(shape: tuple[int, ...], target: Any) -> Any:
    """True at each row's class. A comparison partitions over sharded classes; a gather gathers."""
    axis = 1 if len(shape) > 1 else 0
    classes = lax.broadcasted_iota(target.dtype, shape, axis)
    return classes == jnp.expand_dims(target, axis)


def _row_weights(log_probs: Any, target: Any, weight: Any, ignore_index: int) -> Any:
    kept = target != ignore_index
    if weight is None:
        return kept.astype(log_probs.dtype)
    return jnp.where(kept, weight[jnp.where(kept, target, 0)], 0)


@lower(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def _nll_loss(log_probs: Any, target: Any, weight: Any, reduction: int, ignore_index: int) -> Any:
    axis = 1 if log_probs.ndim > 1 else 0
    rows = _row_weights(log_probs, target, weight, ignore_index)
    chosen = jnp.sum(jnp.where(_picked(log_probs.shape, target), log_probs, 0), axis=axis)
    is_class = (target >= 0) & (target < log_probs.shape[axis]) | (target == ignore_index)
    chosen = jnp.where(is_class, chosen, jnp.nan)
    losses, total = -chosen * rows, jnp.sum(rows)
    if reduction == 0:
        return losses, jnp.zeros((), log_probs.dtype)
    return (jnp.sum(losses) / total if reduction == 1 else jnp.sum(losses)), total


@lower(aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)
def _nll_loss_backward(
    grad: Any,
    log_probs: Any,
    target: Any,
    weight: Any,
    reduction: int,
    ignore_index: int,
    total: Any,
) -> Any:
    axis = 1 if log_probs.ndim > 1 else 0
    rows = _row_weights(log_probs, target, weight, ignore_index) * grad
    rows = rows / total if reduction == 1 else rows
    return jnp.where(_picked(log_probs.shape, target), -jnp.expand_dims(rows, axis), 0)


@lower(aten.one_hot.default)
def _one_hot(x: Any, num_classes: int = -1) -> Any:
    if num_classes < 0:
        raise NotImplementedError("one_hot needs num_classes here: the values are not known")
    return jax.nn.one_hot(x, num_classes, dtype=jnp.int64)
