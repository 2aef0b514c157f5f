"""Layer and RMS normalisation, statistics in float32; the backward of weight normalisation."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import torch
from jax import lax

from xla_dtensor.runtimes.jax_lowering.table import lower

__all__: list[str] = []

aten = torch.ops.aten


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
    grad, wide, norms = (each.astype(norms.dtype) for each in (grad, v, norms))
    others = tuple(axis for axis in range(v.ndim) if axis != dim % v.ndim)
    along = jnp.sum(grad * wide, axis=others, keepdims=True) / norms
    grad_v = g.astype(norms.dtype) / norms * (grad - wide * (along / norms))
    return grad_v.astype(v.dtype), along.astype(g.dtype)
