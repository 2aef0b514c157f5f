"""Bags of embeddings: rows of a table, summed, averaged or maximised per bag."""

from __future__ import annotations

from typing import Any, NoReturn

import jax.numpy as jnp
import torch
from jax import lax

from xla_dtensor.errors import UnsupportedOpError
from xla_dtensor.runtimes.jax_lowering.as_one import as_one
from xla_dtensor.runtimes.jax_lowering.points import put_points
from xla_dtensor.runtimes.jax_lowering.table import lower

__all__: list[str] = []

aten = torch.ops.aten
_SUM, _MEAN, _MAX = 0, 1, 2


def _bag_of(indices: Any, offsets: Any) -> Any:
    """The bag that each index lies in."""
    places = jnp.arange(indices.shape[0], dtype=offsets.dtype)
    return jnp.sum(offsets <= places[:, None], axis=1, dtype=offsets.dtype) - 1


def _rows(weight: Any, indices: Any) -> Any:
    return weight.at[indices].get(mode="fill", wrap_negative_indices=False)


def _total(bags: Any, values: Any, count: int) -> Any:
    """Sum values per bag."""
    wide = jnp.promote_types(values.dtype, jnp.float32) if values.dtype.kind != "i" else jnp.int64
    zeros = jnp.zeros((count, *values.shape[1:]), wide)
    return put_points(zeros, [bags], values.astype(wide), accumulate=True)


def _maximum(weight: Any, indices: Any, inside: Any) -> Any:
    """The largest element per bag and column, and the index of the row that has it."""
    values = jnp.where(inside[..., None], _rows(weight, indices), -jnp.inf)
    place = jnp.argmax(values, axis=1)
    found = jnp.where(jnp.any(inside, 1)[:, None], jnp.max(values, axis=1), 0)
    return found, jnp.where(jnp.any(inside, 1)[:, None], indices[place], 0)


@lower(aten._embedding_bag.default, aten._embedding_bag_forward_only.default)
@as_one
def _embedding_bag(
    weight: Any,
    indices: Any,
    offsets: Any,
    scale_grad_by_freq: bool = False,
    mode: int = _SUM,
    sparse: bool = False,
    per_sample_weights: Any = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> Any:
    count = offsets.shape[0] - include_last_offset
    bags = _bag_of(indices, offsets[:count])
    kept = indices != padding_idx
    sizes = _total(bags, kept.astype(jnp.int64), count)
    largest = jnp.zeros((0,), indices.dtype)
    if mode == _MAX and not indices.size:
        result = jnp.zeros((count, weight.shape[1]), weight.dtype)
        largest = jnp.zeros(result.shape, indices.dtype)
    elif mode == _MAX:
        inside = (bags == jnp.arange(count, dtype=bags.dtype)[:, None]) & kept
        result, largest = _maximum(weight, indices, inside)
    else:
        rows = _rows(weight, indices)
        rows = rows if per_sample_weights is None else rows * per_sample_weights[:, None]
        result = _total(bags, jnp.where(kept[:, None], rows, 0), count)
        if mode == _MEAN:
            result = result / jnp.maximum(sizes, 1)[:, None]
    is_right = jnp.all((offsets >= 0) & (offsets <= indices.shape[0]))
    result = jnp.where(is_right, result, jnp.nan)
    sizes = jnp.pad(sizes, (0, int(include_last_offset)))
    return result.astype(weight.dtype), bags, sizes, largest


def _refuse(option: str, reason: str) -> NoReturn:
    raise UnsupportedOpError(
        f"The gradient of embedding_bag was asked for with {option}. The JAX runtime does not have "
        f"it: {reason}. Leave the option out."
    )


def _table_gradient(
    grad: Any,
    indices: Any,
    bags: Any,
    sizes: Any,
    largest: Any,
    num_weights: int,
    scale_grad_by_freq: bool,
    mode: int,
    per_sample_weights: Any,
    padding_idx: int,
) -> Any:
    if scale_grad_by_freq:
        _refuse("scale_grad_by_freq=True", "torch divides by the frequency of another row")
    wide = jnp.promote_types(grad.dtype, jnp.float32)
    zeros = jnp.zeros((num_weights, grad.shape[1]), wide)
    if not indices.size:
        return zeros.astype(grad.dtype)
    if mode == _MAX:
        filled = jnp.where(sizes[: grad.shape[0], None] > 0, grad, 0)
        columns = lax.broadcasted_iota(largest.dtype, largest.shape, 1)
        return put_points(zeros, [largest, columns], filled, accumulate=True).astype(grad.dtype)
    values = _rows(grad.astype(wide), bags)
    if mode == _MEAN:
        values = values / jnp.maximum(sizes, 1)[bags][:, None]
    if per_sample_weights is not None:
        values = values * per_sample_weights[:, None]
    values = jnp.where((indices == padding_idx)[:, None], 0, values)
    return put_points(zeros, [indices], values, accumulate=True).astype(grad.dtype)


@lower(aten._embedding_bag_backward.default)
@as_one
def _backward(
    grad: Any,
    indices: Any,
    offsets: Any,
    bags: Any,
    sizes: Any,
    largest: Any,
    num_weights: int,
    scale_grad_by_freq: bool,
    mode: int,
    sparse: bool,
    per_sample_weights: Any,
    padding_idx: int = -1,
) -> Any:
    if sparse:
        _refuse("sparse=True", "XLA has no sparse tensors")
    options = (num_weights, scale_grad_by_freq, mode, per_sample_weights, padding_idx)
    return _table_gradient(grad, indices, bags, sizes, largest, *options)


@lower(aten._embedding_bag_dense_backward.default)
@as_one
def _dense_backward(
    grad: Any,
    indices: Any,
    bags: Any,
    sizes: Any,
    largest: Any,
    num_weights: int,
    scale_grad_by_freq: bool,
    mode: int,
    per_sample_weights: Any,
    padding_idx: int = -1,
) -> Any:
    options = (num_weights, scale_grad_by_freq, mode, per_sample_weights, padding_idx)
    return _table_gradient(grad, indices, bags, sizes, largest, *options)


@lower(aten._embedding_bag_per_sample_weights_backward.default)
@as_one
def _sample_weights_backward(
    grad: Any,
    weight: Any,
    indices: Any,
    offsets: Any,
    bags: Any,
    mode: int,
    padding_idx: int = -1,
) -> Any:
    found = jnp.sum(_rows(grad, bags) * _rows(weight, indices), axis=1)
    return jnp.where(indices == padding_idx, 0, found)
