"""Attention over blocks of keys: the scores of one block at a time, never length x length.

The softmax is carried along: the maximum so far, the sum of exponentials so far, and the output so
far, which shrinks when a later block has a larger maximum. The backward computes each block's
scores again from the saved logarithm of the sum::

    forward     m' = max(m, s),  l' = l e^(m-m') + sum e^(s-m'),  o' = o e^(m-m') + e^(s-m') v
    saved       o / l,  m + log l
    backward    p = e^(s - saved),  dv = p^T do,  ds = p (do v^T - sum(do o)),
                dq += ds k,  dk = ds^T q

Batch and head dims are never merged or reshaped, so that they stay sharded. A row that may see no
key is 0, as in torch, not NaN.

Reference:
    Rabe and Staats, "Self-attention Does Not Need O(n^2) Memory", arXiv:2112.05682; Dao et al.,
    "FlashAttention", arXiv:2205.14135.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from xla_dtensor.runtimes.jax_counted import counted_scan
from xla_dtensor.runtimes.jax_lowering.matmul import precision

__all__ = ["BLOCK", "Scores", "blocks_backward", "blocks_forward"]

BLOCK = 512


class Scores(NamedTuple):
    """What the scores are made of besides queries and keys.

    Args:
        mask: Boolean or added, broadcast to (..., queries, keys); None for none.
        is_causal: Whether query i sees the keys 0...i only.
        scale: What the products are multiplied by.
    """

    mask: Any
    is_causal: bool
    scale: float

    def of(self, q: Any, k: Any, first_key: Any, n_keys: int) -> Any:
        """Return masked scores of all queries and some keys, float32 or wider.

        Args:
            q: (..., queries, dim).
            k: (..., block, dim).
            first_key: Index of the first key of the block.
            n_keys: Number of all keys; what lies beyond is padding.
        """
        wide = jnp.promote_types(q.dtype, jnp.float32)
        products = jnp.einsum(
            "...qd,...kd->...qk", q, k, precision=precision(), preferred_element_type=wide
        )
        scores = products * jnp.asarray(self.scale, wide)
        columns = first_key + lax.broadcasted_iota(jnp.int32, scores.shape, scores.ndim - 1)
        seen = columns < n_keys
        if self.is_causal:
            rows = lax.broadcasted_iota(jnp.int32, scores.shape, scores.ndim - 2)
            seen = seen & (columns <= rows)
        mask = self._block_of_mask(first_key, k.shape[-2])
        if mask is not None and mask.dtype == jnp.bool_:
            seen = seen & mask
        elif mask is not None:
            scores = scores + mask
        return jnp.where(seen, scores, -jnp.inf)

    def _block_of_mask(self, first_key: Any, size: int) -> Any:
        mask = self.mask
        if mask is None or mask.shape[-1] == 1:
            return mask
        missing = -mask.shape[-1] % size
        mask = jnp.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0, missing)])
        return lax.dynamic_slice_in_dim(mask, first_key, size, axis=-1)


def _padded(tensor: Any, block: int) -> Any:
    missing = -tensor.shape[-2] % block
    if not missing:
        return tensor
    return jnp.pad(tensor, [(0, 0)] * (tensor.ndim - 2) + [(0, missing), (0, 0)])


def _block(tensor: Any, first: Any, block: int) -> Any:
    return lax.dynamic_slice_in_dim(tensor, first, block, axis=-2)


def blocks_forward(q: Any, k: Any, v: Any, scores: Scores, block: int = BLOCK) -> tuple[Any, Any]:
    """Return the output (..., queries, value dim), and the logarithm of the sums (..., queries).

    Args:
        q: (..., queries, dim).
        k: (..., keys, dim); the dims before are broadcast to those of `q`.
        v: (..., keys, value dim).
        scores: Mask and scale.
        block: Number of keys of which scores are held at a time.
    """
    n_keys = k.shape[-2]
    block = min(block, n_keys)
    wide = jnp.promote_types(q.dtype, jnp.float32)
    batch = jnp.broadcast_shapes(q.shape[:-2], k.shape[:-2])
    rows = (*batch, q.shape[-2])
    padded_k, padded_v = _padded(k, block), _padded(v, block)

    def body(state: Any, index: Any) -> Any:
        output, largest, total = state
        first = index * block
        s = scores.of(q, _block(padded_k, first, block), first, n_keys)
        now = jnp.maximum(largest, s.max(-1))
        # -inf - -inf is no number; where nothing was seen so far every weight is 0 anyway.
        base = jnp.where(jnp.isneginf(now), 0, now)
        weights, shrink = jnp.exp(s - base[..., None]), jnp.exp(largest - base)
        added = jnp.einsum(
            "...qk,...kd->...qd",
            weights.astype(v.dtype),
            _block(padded_v, first, block),
            precision=precision(),
            preferred_element_type=wide,
        )
        state = output * shrink[..., None] + added, now, total * shrink + weights.sum(-1)
        return state, None

    start = (
        jnp.zeros((*rows, v.shape[-1]), wide),
        jnp.full(rows, -jnp.inf, wide),
        jnp.zeros(rows, wide),
    )
    blocks = jnp.arange(padded_k.shape[-2] // block, dtype=jnp.int32)
    (output, largest, total), _ = counted_scan(body, start, blocks)
    is_seen = total > 0
    total = jnp.where(is_seen, total, 1)
    output = (output / total[..., None]).astype(v.dtype)
    return output, jnp.where(is_seen, largest + jnp.log(total), 0)


def blocks_backward(
    grad: Any,
    q: Any,
    k: Any,
    v: Any,
    output: Any,
    log_sum: Any,
    scores: Scores,
    block: int = BLOCK,
) -> tuple[Any, Any, Any]:
    """Return the gradients of `q`, `k` and `v`.

    Args:
        grad: The gradient of the output.
        q: As in :func:`forward`.
        k: As in :func:`forward`.
        v: As in :func:`forward`.
        output: What :func:`forward` returned.
        log_sum: What :func:`forward` returned.
        scores: Mask and scale.
        block: Number of keys at a time.
    """
    n_keys = k.shape[-2]
    block = min(block, n_keys)
    wide = log_sum.dtype
    padded_k, padded_v = _padded(k, block), _padded(v, block)
    along = (grad.astype(wide) * output.astype(wide)).sum(-1)

    def product(equation: str, a: Any, b: Any) -> Any:
        return jnp.einsum(equation, a, b, precision=precision(), preferred_element_type=wide)

    def body(grad_q: Any, index: Any) -> Any:
        first = index * block
        k_block, v_block = _block(padded_k, first, block), _block(padded_v, first, block)
        weights = jnp.exp(scores.of(q, k_block, first, n_keys) - log_sum[..., None])
        of_v = product("...qk,...qd->...kd", weights.astype(grad.dtype), grad)
        of_weights = product("...qd,...kd->...qk", grad, v_block)
        of_scores = weights * (of_weights - along[..., None]) * jnp.asarray(scores.scale, wide)
        of_scores = of_scores.astype(q.dtype)
        grad_q = grad_q + product("...qk,...kd->...qd", of_scores, k_block)
        of_k = product("...qk,...qd->...kd", of_scores, q)
        return grad_q, (_summed(of_k, k).astype(k.dtype), _summed(of_v, v).astype(v.dtype))

    start = jnp.zeros((*log_sum.shape, q.shape[-1]), wide)
    blocks = jnp.arange(padded_k.shape[-2] // block, dtype=jnp.int32)
    grad_q, (grads_k, grads_v) = counted_scan(body, start, blocks)
    grad_k, grad_v = _joined(grads_k, n_keys), _joined(grads_v, n_keys)
    return _summed(grad_q, q).astype(q.dtype), grad_k, grad_v


def _summed(gradient: Any, like: Any) -> Any:
    """Sum over the batch dims along which `like` was broadcast."""
    extra = gradient.ndim - like.ndim
    wide = [
        i
        for i, n in enumerate(gradient.shape[:-2])
        if i < extra or (like.shape[i - extra] == 1 and n != 1)
    ]
    if not wide:
        return gradient
    return gradient.sum(wide, keepdims=True).reshape(*like.shape[:-2], *gradient.shape[-2:])


def _joined(blocks: Any, n_keys: int) -> Any:
    """Return (blocks, ..., block, dim) as (..., keys, dim)."""
    moved = jnp.moveaxis(blocks, 0, -3)
    joined = moved.reshape(*moved.shape[:-3], -1, moved.shape[-1])
    return lax.slice_in_dim(joined, 0, n_keys, axis=joined.ndim - 2)
