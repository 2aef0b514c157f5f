"""Distances between the rows of matrices."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch

from xla_dtensor.runtimes.jax_lowering.as_one import as_one
from xla_dtensor.runtimes.jax_lowering.table import lower

__all__: list[str] = []

aten = torch.ops.aten


def _norm(difference: Any, p: float) -> Any:
    size = jnp.abs(difference)
    if p == 0:
        return jnp.sum(size != 0, axis=-1).astype(size.dtype)
    if p == 1:
        return jnp.sum(size, axis=-1)
    if p == 2:
        return jnp.sqrt(jnp.sum(size * size, axis=-1))
    if math.isinf(p):
        return jnp.max(size, axis=-1, initial=0)
    return jnp.sum(size**p, axis=-1) ** (1 / p)


def _norm_backward(grad: Any, difference: Any, p: float, norm: Any) -> Any:
    """The gradient of each element of a difference; none where torch has none, at a norm of 0."""
    grad, norm = grad[..., None], norm[..., None]
    size, sign = jnp.abs(difference), jnp.sign(difference)
    if p == 0:
        return jnp.zeros_like(difference)
    if p == 1:
        return grad * sign
    if math.isinf(p):
        return grad * sign * (size == norm)
    safe = jnp.where(norm == 0, 1, norm)
    if p == 2:
        return jnp.where(norm == 0, 0, grad * difference / safe)
    power = jnp.where(size == 0, 1, size) ** (p - 1)
    power = jnp.where(size == 0, 0, power)
    return jnp.where(norm == 0, 0, grad * sign * power / safe ** (p - 1))


def _differences(x1: Any, x2: Any) -> Any:
    return x1[..., :, None, :] - x2[..., None, :, :]


@lower(aten._cdist_forward.default)
@as_one
def _cdist(x1: Any, x2: Any, p: float, compute_mode: int | None) -> Any:
    return _norm(_differences(x1, x2), p)


@lower(aten._cdist_backward.default)
@as_one
def _cdist_backward(grad: Any, x1: Any, x2: Any, p: float, cdist: Any) -> Any:
    # One matrix per pair of matrices; torch sums those of a matrix that stands in several.
    return jnp.sum(_norm_backward(grad, _differences(x1, x2), p, cdist), axis=-2)


def _pairs(count: int) -> Any:
    """The rows of each pair, and for two rows their pair (any one for a row with itself)."""
    rows, columns = np.triu_indices(count, 1)
    pair = np.zeros((count, count), np.int64)
    pair[rows, columns] = pair[columns, rows] = np.arange(len(rows))
    return rows, columns, pair


@lower(aten._pdist_forward.default)
@as_one
def _pdist(x: Any, p: float = 2.0) -> Any:
    rows, columns, _ = _pairs(x.shape[0])
    return _norm(jnp.take(x, rows, axis=0) - jnp.take(x, columns, axis=0), p)


@lower(aten._pdist_backward.default)
@as_one
def _pdist_backward(grad: Any, x: Any, p: float, pdist: Any) -> Any:
    if x.shape[0] < 2 or not x.size:
        return jnp.zeros_like(x)
    _, _, pair = _pairs(x.shape[0])
    others = ~np.eye(x.shape[0], dtype=bool)
    full_grad, full = (jnp.where(others, jnp.take(v, pair), 0) for v in (grad, pdist))
    return jnp.sum(_norm_backward(full_grad, _differences(x, x), p, full), axis=-2)
