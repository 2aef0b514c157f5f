"""Cross entropy of a linear layer's outputs, some columns of the vocabulary at a time.

Chunk j of n has every n-th row of the weight, from the j-th on. Rows that lie next to each other go
to different chunks, so each chunk is cut over the devices as the whole weight is::

    weight [v, d]  ->  [v / n, n, d]          v / n keeps the cuts of v
    chunk j        =   [:, j]                 rows j, j + n, j + 2 n, ...

One chunk's logits exist at a time, in the forward and again in the backward. Tokens keep their
dims and their cuts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from xla_dtensor.runtimes.jax_counted import counted_scan
from xla_dtensor.runtimes.jax_lowering.matmul import precision
from xla_dtensor.runtimes.jax_lowering.table import lower
from xla_dtensor.runtimes.linear_loss_ops import linear_loss, linear_loss_backward

__all__: list[str] = []


class _Layer(NamedTuple):
    """A linear layer in chunks.

    Args:
        weight: (rows, chunks, features).
        bias: (rows, chunks), or None.
        classes: Number of rows of the weight, those added to fill the last chunks left out.
    """

    weight: Any
    bias: Any
    classes: int

    @classmethod
    def of(cls, weight: Any, bias: Any, chunks: int) -> _Layer:
        classes, features = weight.shape
        missing = -classes % chunks
        if missing:
            weight = jnp.pad(weight, ((0, missing), (0, 0)))
            bias = None if bias is None else jnp.pad(bias, (0, missing))
        rows = (classes + missing) // chunks
        return cls(
            weight.reshape(rows, chunks, features),
            None if bias is None else bias.reshape(rows, chunks),
            classes,
        )

    def chunk(self, index: Any) -> tuple[Any, Any]:
        """Return the weight's rows of a chunk, and which classes they are."""
        weight = lax.dynamic_index_in_dim(self.weight, index, axis=1, keepdims=False)
        return weight, jnp.arange(self.weight.shape[0]) * self.weight.shape[1] + index

    def logits(self, x: Any, weight: Any, index: Any, classes: Any) -> Any:
        """Return (..., rows of the chunk); what only fills up is -inf."""
        wide = jnp.promote_types(x.dtype, jnp.float32)
        logits = _product("...d,vd->...v", x, weight, wide)
        if self.bias is not None:
            logits = logits + lax.dynamic_index_in_dim(self.bias, index, axis=1, keepdims=False)
        if self.weight.shape[0] * self.weight.shape[1] == self.classes:
            return logits
        return jnp.where(classes < self.classes, logits, -jnp.inf)


def _product(equation: str, a: Any, b: Any, wide: Any) -> Any:
    return jnp.einsum(equation, a, b, precision=precision(), preferred_element_type=wide)


@lower(linear_loss)
def _linear_loss(
    x: Any, weight: Any, target: Any, bias: Any, ignore_index: int, smoothing: float, chunks: int
) -> tuple[Any, Any]:
    layer = _Layer.of(weight, bias, chunks)
    wide = jnp.promote_types(x.dtype, jnp.float32)

    def body(state: Any, index: Any) -> Any:
        largest, total, picked, summed = state
        rows, classes = layer.chunk(index)
        logits = layer.logits(x, rows, index, classes)
        now = jnp.maximum(largest, logits.max(-1))
        base = jnp.where(jnp.isneginf(now), 0, now)
        total = total * jnp.exp(largest - base) + jnp.exp(logits - base[..., None]).sum(-1)
        is_target = classes == target[..., None]
        picked = picked + jnp.where(is_target, logits, 0).sum(-1)
        summed = summed + jnp.where(classes < layer.classes, logits, 0).sum(-1)
        return (now, total, picked, summed), None

    zeros = jnp.zeros(x.shape[:-1], wide)
    start = (jnp.full(x.shape[:-1], -jnp.inf, wide), zeros, zeros, zeros)
    indices = jnp.arange(chunks, dtype=jnp.int32)
    (largest, total, picked, summed), _ = counted_scan(body, start, indices)
    log_sum = largest + jnp.log(total)
    loss = log_sum - (1 - smoothing) * picked
    if smoothing:
        loss = loss - smoothing / layer.classes * summed
    return jnp.where(target == ignore_index, 0, loss).astype(wide), log_sum


@lower(linear_loss_backward)
def _linear_loss_backward(
    grad: Any,
    x: Any,
    weight: Any,
    target: Any,
    bias: Any,
    log_sum: Any,
    ignore_index: int,
    smoothing: float,
    chunks: int,
) -> tuple[Any, Any, Any]:
    layer = _Layer.of(weight, bias, chunks)
    wide = log_sum.dtype
    grad = jnp.where(target == ignore_index, 0, grad).astype(wide)

    def body(grad_x: Any, index: Any) -> Any:
        rows, classes = layer.chunk(index)
        weights = jnp.exp(layer.logits(x, rows, index, classes) - log_sum[..., None])
        wanted = (1 - smoothing) * (classes == target[..., None])
        if smoothing:
            wanted = wanted + smoothing / layer.classes * (classes < layer.classes)
        of_logits = grad[..., None] * (weights - wanted)
        narrow = of_logits.astype(x.dtype)
        grad_x = grad_x + _product("...v,vd->...d", narrow, rows, wide)
        of_rows = _product("...v,...d->vd", narrow, x, wide).astype(weight.dtype)
        of_bias = of_logits.sum(list(range(x.ndim - 1))).astype(weight.dtype)
        return grad_x, (of_rows, of_bias)

    start = jnp.zeros(x.shape, wide)
    grad_x, (of_weight, of_bias) = counted_scan(body, start, jnp.arange(chunks, dtype=jnp.int32))
    of_weight = jnp.moveaxis(of_weight, 0, 1).reshape(-1, weight.shape[1])[: layer.classes]
    return grad_x.astype(x.dtype), of_weight, of_bias.T.reshape(-1)[: layer.classes]
