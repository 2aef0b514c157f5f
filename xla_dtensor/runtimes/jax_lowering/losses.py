"""Margin losses and CTC: one number per row, from scores and the classes that belong to it."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import torch
from jax import lax

from xla_dtensor.runtimes.jax_lowering.as_one import as_one
from xla_dtensor.runtimes.jax_lowering.derivative import lower_derivative
from xla_dtensor.runtimes.jax_lowering.table import lower

__all__: list[str] = []

aten = torch.ops.aten


def _reduced(losses: Any, reduction: int) -> Any:
    if reduction == 0:
        return losses
    return jnp.mean(losses) if reduction == 1 else jnp.sum(losses)


@lower(aten.multi_margin_loss.default)
@as_one
def _multi_margin_loss(
    x: Any,
    target: Any,
    p: Any = 1,
    margin: Any = 1,
    weight: Any = None,
    reduction: int = 1,
) -> Any:
    scores = x if x.ndim == 2 else x.reshape(1, -1)
    classes = target.reshape(-1)
    right = lax.broadcasted_iota(classes.dtype, scores.shape, 1) == classes[:, None]
    chosen = jnp.sum(jnp.where(right, scores, 0), axis=1, keepdims=True)
    lack = margin - chosen + scores
    # Where nothing is lacking there is no gradient, at zero too.
    lack = jnp.where((lack > 0) & ~right, lack, 0)
    each = lack if p == 1 else lack * lack
    if weight is not None:
        each = each * jnp.take(weight, classes, mode="fill")[:, None]
    losses = jnp.sum(each, axis=1) / scores.shape[1]
    losses = jnp.where(jnp.any(right, axis=1), losses, jnp.nan)  # there is no such class
    return _reduced(losses.reshape(target.shape), reduction)


lower_derivative(aten.multi_margin_loss_backward.default, aten.multi_margin_loss.default, "self")


@lower(aten.multilabel_margin_loss_forward.default)
@as_one
def _multilabel_margin_loss(x: Any, target: Any, reduction: int) -> Any:
    """Each target is a list of classes that ends before the first negative one."""
    scores, classes = (v.reshape(-1, v.shape[-1] if v.ndim else 1) for v in (x, target))
    listed = jnp.cumsum(classes < 0, axis=1) == 0
    # Dims: row, place in the list, class.
    named = classes[..., None] == jnp.arange(scores.shape[1], dtype=classes.dtype)
    named &= listed[..., None]
    is_target = jnp.any(named, axis=1)
    chosen = jnp.sum(jnp.where(named, scores[:, None, :], 0), axis=2)
    lack = 1 - chosen[..., None] + scores[:, None, :]
    counted = (lack > 0) & listed[..., None] & ~is_target[:, None, :]
    losses = jnp.sum(jnp.where(counted, lack, 0), axis=(1, 2)) / scores.shape[1]
    is_no_class = jnp.any((classes < -1) | (classes >= scores.shape[1]), axis=1)
    losses = jnp.where(is_no_class, jnp.nan, losses).reshape(x.shape[: max(x.ndim - 1, 0)])
    return _reduced(losses, reduction), is_target.astype(x.dtype).reshape(target.shape)


lower_derivative(
    aten.multilabel_margin_loss_backward.default,
    aten.multilabel_margin_loss_forward.default,
    "self",
)
