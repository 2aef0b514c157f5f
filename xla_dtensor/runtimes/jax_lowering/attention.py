"""Scaled dot product attention on (..., heads, length, head_dim), kept in that shape throughout.

Scores are computed in float32 for half-precision inputs. The backward is JAX's derivative of the
forward, so that it keeps the same dims apart. Long sequences take the kernels of
``attention_lean`` instead, which never hold all scores.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import torch

from xla_dtensor.runtimes import whole_ops as whole_ops  # defines torch.ops.xla_dtensor
from xla_dtensor.runtimes.attention_choice import is_lean
from xla_dtensor.runtimes.jax_lowering import attention_lean
from xla_dtensor.runtimes.jax_lowering.head_groups import HeadGroups
from xla_dtensor.runtimes.jax_lowering.matmul import precision
from xla_dtensor.runtimes.jax_lowering.table import lower

__all__: list[str] = []

aten = torch.ops.aten


def attention(
    q: Any, k: Any, v: Any, mask: Any, is_causal: bool, scale: float | None, gqa: bool
) -> Any:
    """Return softmax(q k^T * scale + mask) v."""
    if gqa and q.shape[-3] != k.shape[-3]:
        groups = HeadGroups(q, k)
        given = groups.query(q), groups.key(k), groups.key(v), groups.mask(mask)
        return groups.flat(attention(*given, is_causal, scale, False), 3)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    wide = jnp.promote_types(q.dtype, jnp.float32)
    scores = jnp.einsum(
        "...qd,...kd->...qk", q, k, precision=precision(), preferred_element_type=wide
    )
    weights = _softmax(_masked(scores * jnp.asarray(scale, wide), mask, is_causal), mask)
    return jnp.einsum("...qk,...kd->...qd", weights.astype(v.dtype), v, precision=precision())


def _softmax(scores: Any, mask: Any) -> Any:
    """Return weights; those of a row that may see nothing are 0, as in torch, not 0 / 0."""
    if mask is None:
        return jax.nn.softmax(scores, axis=-1)
    is_blind = jnp.isneginf(scores).all(-1, keepdims=True)
    # The scores too: a gradient that is multiplied by 0 is no number if the softmax is none.
    weights = jax.nn.softmax(jnp.where(is_blind, 0, scores), axis=-1)
    return jnp.where(is_blind, 0, weights)


def _masked(scores: Any, mask: Any, is_causal: bool) -> Any:
    if is_causal:
        rows = jax.lax.broadcasted_iota(jnp.int32, scores.shape, scores.ndim - 2)
        columns = jax.lax.broadcasted_iota(jnp.int32, scores.shape, scores.ndim - 1)
        scores = jnp.where(columns <= rows, scores, -jnp.inf)
    if mask is None:
        return scores
    return jnp.where(mask, scores, -jnp.inf) if mask.dtype == jnp.bool_ else scores + mask


@lower(aten.scaled_dot_product_attention.default)
def _sdpa(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    if dropout_p:
        raise NotImplementedError("attention with dropout is written out above this lowering")
    same = enable_gqa or query.shape[:-2] == key.shape[:-2]
    if same and is_lean(query, key, value):
        factor = query.shape[-1] ** -0.5 if scale is None else scale
        return attention_lean.lean_forward(query, key, value, attn_mask, is_causal, factor)[0]
    return attention(query, key, value, attn_mask, is_causal, scale, enable_gqa)


@lower(torch.ops.xla_dtensor.sdpa_backward.default)
def _sdpa_backward(
    grad: Any, q: Any, k: Any, v: Any, mask: Any, is_causal: bool, scale: Any, gqa: bool
) -> Any:
    _, pull = jax.vjp(lambda q, k, v: attention(q, k, v, mask, is_causal, scale, gqa), q, k, v)
    return pull(grad.astype(q.dtype))
