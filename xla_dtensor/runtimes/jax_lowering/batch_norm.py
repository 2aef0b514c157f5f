"""Batch normalisation, statistics in float32: sums over the batch and the image, nothing moved.

``native_batch_norm`` also writes its running statistics; ``jax_batch_norm`` does that with what
the functional op of this module returns.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import torch
from jax import lax

from xla_dtensor.runtimes.jax_lowering.as_one import as_one
from xla_dtensor.runtimes.jax_lowering.table import lower

__all__: list[str] = []

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


def _moved(running: Any, new: Any, momentum: float) -> Any:
    return (momentum * new + (1 - momentum) * running).astype(running.dtype)


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
        _moved(running_mean, mean, momentum),
        _moved(running_var, unbiased, momentum),
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
    return tuple(gradient if wanted else None for gradient, wanted in pairs)


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
