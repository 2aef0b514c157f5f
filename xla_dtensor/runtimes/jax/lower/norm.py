"""Normalization over batches, groups and rows, statistics in float32.

``native_batch_norm`` also writes its running statistics; ``ops`` does that with what
the functional op of this module returns.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import torch
from jax import lax

from xla_dtensor.runtimes.jax.lower.random import as_one
from xla_dtensor.runtimes.jax.lower.table import lower

__all__: list[str] = []


# ------------------------------------------------------ Batch normalisation, statistics in float32

aten = torch.ops.aten


def _in_float32(x: Any) -> Any:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _across(values: Any, x: Any) -> Any:
    """One number per channel, in the shape that broadcasts over `x`."""
    return values.reshape(1, -1, *(1,) * (x.ndim - 2))


def _dims(x: Any) -> tuple[int, ...]:
    return (0, *range(2, x.ndim))


def _normalized(x: Any, mean: Any, rstd: Any, weight: Any, bias: Any) -> Any:
    y = (_in_float32(x) - _across(mean, x)) * _across(rstd, x)
    y = y if weight is None else y * _across(weight, x)
    return (y if bias is None else y + _across(bias, x)).astype(x.dtype)


def _statistics(x: Any) -> tuple[Any, Any]:
    wide = _in_float32(x)
    mean = jnp.mean(wide, _dims(x))
    centred = wide - _across(mean, x)
    return mean, jnp.mean(centred * centred, _dims(x))


def _update_average(average: Any, new: Any, momentum: float) -> Any:
    return (momentum * new + (1 - momentum) * average).astype(average.dtype)


@lower(aten._native_batch_norm_legit_functional.default)
@as_one
def _functional(
    x: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    if not training:
        mean, rstd = _in_float32(running_mean), lax.rsqrt(_in_float32(running_var) + eps)
        y = _normalized(x, mean, rstd, weight, bias)
        return y, mean, rstd, running_mean, running_var
    mean, var = _statistics(x)
    rstd = lax.rsqrt(var + eps)
    count = math.prod(x.shape[d] for d in _dims(x))
    unbiased = var * (count / (count - 1) if count != 1 else math.nan)
    means, variances = (
        _update_average(running_mean, mean, momentum),
        _update_average(running_var, unbiased, momentum),
    )
    return _normalized(x, mean, rstd, weight, bias), mean, rstd, means, variances


@lower(aten._native_batch_norm_legit.no_stats)
@as_one
def _no_stats(x: Any, weight: Any, bias: Any, training: bool, momentum: float, eps: float) -> Any:
    mean, var = _statistics(x)
    rstd = lax.rsqrt(var + eps)
    return _normalized(x, mean, rstd, weight, bias), mean, rstd


@lower(aten._batch_norm_with_update_functional.default)
@as_one
def _with_update(
    x: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    momentum: float,
    eps: float,
) -> Any:
    results = _functional(x, weight, bias, running_mean, running_var, True, momentum, eps)
    return *results[:3], jnp.zeros((0,), jnp.uint8), *results[3:]


@lower(aten.native_batch_norm_backward.default)
@as_one
def _backward(
    grad: Any,
    x: Any,
    weight: Any,
    running_mean: Any,
    running_var: Any,
    save_mean: Any,
    save_invstd: Any,
    train: bool,
    eps: float,
    output_mask: Any,
) -> Any:
    mean = _in_float32(save_mean if train else running_mean)
    rstd = _in_float32(save_invstd) if train else lax.rsqrt(_in_float32(running_var) + eps)
    grad, count = _in_float32(grad), math.prod(x.shape[d] for d in _dims(x))
    normal = (_in_float32(x) - _across(mean, x)) * _across(rstd, x)
    to_bias = jnp.sum(grad, _dims(x))
    to_weight = jnp.sum(grad * normal, _dims(x))
    scale = rstd if weight is None else rstd * weight
    to_x = grad
    if train:
        to_x = grad - (_across(to_bias, x) + normal * _across(to_weight, x)) / count
    gradients = (to_x * _across(scale, x), to_weight, to_bias)
    pairs = zip(gradients, output_mask, strict=True)
    return tuple(gradient if is_needed else None for gradient, is_needed in pairs)


@lower(aten.batch_norm_backward.default)
@as_one
def _update_backward(
    grad: Any,
    x: Any,
    weight: Any,
    running_mean: Any,
    running_var: Any,
    save_mean: Any,
    save_var: Any,
    update: bool,
    eps: float,
    output_mask: Any,
    reserve: Any,
) -> Any:
    statistics = (running_mean, running_var, save_mean, save_var)
    return _backward(grad, x, weight, *statistics, update, eps, output_mask)


# ------------------------------------------------------ Group normalisation, statistics in float32
#
# Channels are split into groups, nothing is merged.


def _split(x: Any, groups: int) -> Any:
    """(batch, groups, channels of a group, ...), in float32 at least."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return wide.reshape(x.shape[0], groups, x.shape[1] // groups, *x.shape[2:])


def _per_group(values: Any, split: Any) -> Any:
    return values.reshape(*split.shape[:2], *(1,) * (split.ndim - 2))


def _per_channel(values: Any, split: Any) -> Any:
    return values.reshape(1, *split.shape[1:3], *(1,) * (split.ndim - 3))


@lower(aten.native_group_norm.default)
@as_one
def _group_norm(
    x: Any, weight: Any, bias: Any, N: int, C: int, HxW: int, group: int, eps: float
) -> Any:
    split = _split(x, group)
    dims = tuple(range(2, split.ndim))
    mean = jnp.mean(split, dims, keepdims=True)
    centred = split - mean
    rstd = lax.rsqrt(jnp.mean(centred * centred, dims, keepdims=True) + eps)
    y = centred * rstd
    y = y if weight is None else y * _per_channel(weight, split)
    y = y if bias is None else y + _per_channel(bias, split)
    return y.reshape(x.shape), mean.reshape(N, group), rstd.reshape(N, group)


@lower(aten.native_group_norm_backward.default)
@as_one
def _group_norm_backward(
    grad: Any,
    x: Any,
    mean: Any,
    rstd: Any,
    weight: Any,
    N: int,
    C: int,
    HxW: int,
    group: int,
    output_mask: Any,
) -> Any:
    split, grad_split = _split(x, group), _split(grad, group)
    mean, rstd = (_per_group(v.astype(split.dtype), split) for v in (mean, rstd))
    normal = (split - mean) * rstd
    outside = (0, *range(3, split.ndim))
    to_weight = jnp.sum(grad_split * normal, outside).reshape(C)
    to_bias = jnp.sum(grad_split, outside).reshape(C)
    scaled = grad_split if weight is None else grad_split * _per_channel(weight, split)
    dims = tuple(range(2, split.ndim))
    count = math.prod(split.shape[2:])
    along = jnp.sum(scaled * normal, dims, keepdims=True) / count
    to_x = (scaled - jnp.sum(scaled, dims, keepdims=True) / count - normal * along) * rstd
    gradients = (to_x.reshape(x.shape), to_weight, to_bias)
    pairs = zip(gradients, output_mask, strict=True)
    return tuple(gradient if is_needed else None for gradient, is_needed in pairs)


# ------------------------------------------------------------------------------------ Normalization
#
# Layer and RMS normalisation, statistics in float32; the backward of weight normalisation.


def _check_normalized(x: Any, shape: Any) -> None:
    # torch's meta function does not look.
    if tuple(x.shape[x.ndim - len(shape) :]) != tuple(shape):
        raise RuntimeError(
            f"Given normalized_shape={list(shape)}, expected input with shape [*, "
            f"{', '.join(map(str, shape))}], but got input of size{list(x.shape)}"
        )


@lower(aten.native_layer_norm.default)
def _layer_norm(x: Any, shape: Any, weight: Any, bias: Any, eps: float) -> Any:
    _check_normalized(x, shape)
    axes = tuple(range(x.ndim - len(shape), x.ndim))
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    mean = jnp.mean(wide, axis=axes, keepdims=True)
    centred = wide - mean
    rstd = lax.rsqrt(jnp.mean(centred * centred, axis=axes, keepdims=True) + eps)
    y = centred * rstd
    y = y if weight is None else y * weight
    return (y if bias is None else y + bias), mean, rstd


@lower(aten._weight_norm_interface_backward.default)
def _weight_norm_backward(grad: Any, v: Any, g: Any, norms: Any, dim: int) -> tuple[Any, Any]:
    """Return the gradients of ``v * g / norms`` by `v` and by `g`, `norms` over all but `dim`."""
    # torch keeps the norms of half precision in float32.
    grad, wide, norms = (x.astype(norms.dtype) for x in (grad, v, norms))
    dims = tuple(axis for axis in range(v.ndim) if axis != dim % v.ndim)
    along = jnp.sum(grad * wide, axis=dims, keepdims=True) / norms
    grad_v = g.astype(norms.dtype) / norms * (grad - wide * (along / norms))
    return grad_v.astype(v.dtype), along.astype(g.dtype)
