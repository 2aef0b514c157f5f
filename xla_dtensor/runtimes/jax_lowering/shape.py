"""Ops that move elements without computing on them and return new tensors, not views."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import torch
from jax import lax

from xla_dtensor.runtimes.jax_lowering.slices import spread
from xla_dtensor.runtimes.jax_lowering.table import lower

__all__: list[str] = []

aten = torch.ops.aten


@lower(aten.clone.default)
def _clone(x: Any, *, memory_format: Any = None) -> Any:
    return jnp.array(x, copy=True)


@lower(aten._unsafe_view.default, aten.reshape.default, wants_meta=True)
def _reshape(x: Any, size: Any, *, meta: Any) -> Any:
    return x.reshape(meta.shape)


@lower(aten.cat.default)
def _cat(tensors: Any, dim: int = 0) -> Any:
    # torch skips empty 1-D tensors whatever the shape of the others.
    kept = [t for t in tensors if t.shape != (0,)]
    return jnp.concatenate(kept, axis=dim) if kept else jnp.zeros(0, tensors[0].dtype)


@lower(aten.stack.default)
def _stack(tensors: Any, dim: int = 0) -> Any:
    return jnp.stack(tensors, axis=dim)


@lower(aten.repeat.default)
def _repeat(x: Any, repeats: Any) -> Any:
    return jnp.tile(x.reshape((1,) * (len(repeats) - x.ndim) + x.shape), tuple(repeats))


@lower(aten.flip.default)
def _flip(x: Any, dims: Any) -> Any:
    return jnp.flip(x, tuple(dims)) if x.ndim else x


@lower(aten.roll.default)
def _roll(x: Any, shifts: Any, dims: Any = ()) -> Any:
    if not dims or not x.ndim:
        return jnp.roll(x.ravel(), shifts[0]).reshape(x.shape)
    return jnp.roll(x, tuple(shifts), tuple(dims))


@lower(aten.tril.default)
def _tril(x: Any, diagonal: int = 0) -> Any:
    return jnp.tril(x, diagonal)


@lower(aten.triu.default)
def _triu(x: Any, diagonal: int = 0) -> Any:
    return jnp.triu(x, diagonal)


@lower(aten.constant_pad_nd.default)
def _constant_pad(x: Any, pad: Any, value: Any = 0) -> Any:
    pairs = [(0, 0, 0)] * (x.ndim - len(pad) // 2)
    pairs += [(pad[i], pad[i + 1], 0) for i in range(len(pad) - 2, -1, -2)]
    return lax.pad(x, jnp.asarray(value).astype(x.dtype), pairs)


@lower(aten.slice_backward.default)
def _slice_backward(grad: Any, sizes: Any, dim: int, start: int, end: int, step: int) -> Any:
    dim %= len(sizes)
    first, _, _ = slice(start, end, step).indices(sizes[dim])
    return spread(grad, sizes, dim, first, step)


@lower(aten.select_backward.default)
def _select_backward(grad: Any, sizes: Any, dim: int, index: int) -> Any:
    dim %= len(sizes)
    return spread(jnp.expand_dims(grad, dim), sizes, dim, index % sizes[dim])


@lower(aten.fill.Scalar, aten.fill.Tensor)
def _fill(x: Any, value: Any) -> Any:
    return jnp.broadcast_to(jnp.asarray(value).astype(x.dtype), x.shape)


@lower(aten.zero.default)
def _zero(x: Any) -> Any:
    return jnp.zeros_like(x)


@lower(aten.copy.default)
def _copy(x: Any, source: Any, non_blocking: bool = False) -> Any:
    return jnp.broadcast_to(source.astype(x.dtype), x.shape)
