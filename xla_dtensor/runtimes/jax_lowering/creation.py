"""Tensors made like another one. Factories without a tensor argument never reach this runtime."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import torch

from xla_dtensor.runtimes.jax_convert import jax_dtype
from xla_dtensor.runtimes.jax_lowering.table import lower

__all__: list[str] = []

aten = torch.ops.aten


def _filled(value: Any, meta: Any) -> Any:
    return jnp.full(meta.shape, value, jax_dtype(meta.dtype))


@lower(
    aten.zeros_like.default,
    aten.empty_like.default,
    aten.new_zeros.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
    wants_meta=True,
)
def _zeros(*_: Any, meta: Any, **__: Any) -> Any:
    return _filled(0, meta)


@lower(aten._new_zeros_with_same_feature_meta.default)
def _zeros_for_tangent(x: Any, other: Any, *, self_num_batch_dims: int = 0) -> Any:
    """Zeros that a tangent is written to, in parts: of the primal's shape."""
    return jnp.zeros(x.shape[:self_num_batch_dims] + other.shape, x.dtype)


@lower(aten.ones_like.default, aten.new_ones.default, wants_meta=True)
def _ones(*_: Any, meta: Any, **__: Any) -> Any:
    return _filled(1, meta)


@lower(aten.full_like.default, wants_meta=True)
def _full_like(x: Any, value: Any, *, meta: Any, **_: Any) -> Any:
    return _filled(value, meta)


@lower(aten.new_full.default, wants_meta=True)
def _new_full(x: Any, size: Any, value: Any, *, meta: Any, **_: Any) -> Any:
    return _filled(value, meta)
