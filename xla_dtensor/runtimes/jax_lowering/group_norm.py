"""Group normalisation, statistics in float32: channels are split into groups, nothing is merged."""

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
    return tuple(gradient if wanted else None for gradient, wanted in pairs)
