"""Pooling to a given number of windows, which then differ in size, and at random places."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from xla_dtensor.runtimes.jax_lowering.as_one import as_one
from xla_dtensor.runtimes.jax_lowering.planes import add_on_planes, flat_index
from xla_dtensor.runtimes.jax_lowering.pointwise import quotient
from xla_dtensor.runtimes.jax_lowering.pooling import larger, lowest
from xla_dtensor.runtimes.jax_lowering.table import lower
from xla_dtensor.runtimes.jax_lowering.taps import Taps, apply_taps

__all__: list[str] = []

aten = torch.ops.aten


def _adaptive(size: int, outputs: int) -> Taps:
    """The mean over each of `outputs` windows; neighbours may share an element."""
    place = np.arange(outputs)
    start, end = place * size // outputs, -(-(place + 1) * size // outputs)
    count = (end - start)[:, None]
    offsets = np.arange(max(int(count.max(initial=1)), 1))
    indices = np.minimum(start[:, None] + offsets, end[:, None] - 1)
    return Taps(indices, np.where(offsets < count, 1 / count, 0), size)


def _averages(shape: Sequence[int], outputs: Sequence[int]) -> list[tuple[int, Taps]]:
    rest = len(shape) - len(outputs)
    return [(d, _adaptive(shape[d], n)) for d, n in enumerate(outputs, rest)]


@lower(aten._adaptive_avg_pool2d.default, aten._adaptive_avg_pool3d.default)
@as_one
def _adaptive_average(x: Any, output_size: Any) -> Any:
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    for dim, taps in _averages(x.shape, output_size):
        wide = apply_taps(wide, dim, taps)
    return wide.astype(x.dtype)


def _adaptive_average_backward(grad: Any, x: Any, ndim: int) -> Any:
    wide = grad.astype(jnp.promote_types(grad.dtype, jnp.float32))
    for dim, taps in _averages(x.shape, grad.shape[grad.ndim - ndim :]):
        wide = apply_taps(wide, dim, taps.transposed())
    return wide.astype(grad.dtype)


@lower(aten._adaptive_avg_pool2d_backward.default)
@as_one
def _adaptive_average2d_backward(grad: Any, x: Any) -> Any:
    return _adaptive_average_backward(grad, x, 2)


@lower(aten._adaptive_avg_pool3d_backward.default)
@as_one
def _adaptive_average3d_backward(grad: Any, x: Any) -> Any:
    return _adaptive_average_backward(grad, x, 3)


# ------------------------------------------------------------------ maxima


def _largest(x: Any, places: Any, kernel: Sequence[int]) -> Any:
    """Reduce windows whose elements lie side by side: dims (window, element) for each image dim."""
    ndim = len(kernel)
    rest = x.ndim - 2 * ndim
    start = (lowest(x.dtype), jnp.array(jnp.iinfo(jnp.int32).max, jnp.int32))
    return lax.reduce((x, places), start, larger, tuple(range(rest + 1, x.ndim, 2)))


@lower(aten.adaptive_max_pool2d.default, aten.adaptive_max_pool3d.default)
@as_one
def _adaptive_maximum(x: Any, output_size: Any) -> Any:
    ndim, rest = len(output_size), x.ndim - len(output_size)
    places = flat_index(x.shape, ndim)
    kernel: list[int] = []
    for d, n in enumerate(output_size):
        # An element that a short window takes twice changes no maximum.
        indices = _adaptive(x.shape[rest + 2 * d], n).indices
        kernel.append(indices.shape[1])
        x, places = (_windows_along(v, rest + 2 * d, indices) for v in (x, places))
    return _largest(x, places, kernel)


def _windows_along(x: Any, dim: int, indices: Any) -> Any:
    taken = jnp.take(x, indices.reshape(-1), axis=dim, mode="clip")
    return taken.reshape(*x.shape[:dim], *indices.shape, *x.shape[dim + 1 :])


@lower(aten.adaptive_max_pool2d_backward.default)
@as_one
def _adaptive_maximum2d_backward(grad: Any, x: Any, indices: Any) -> Any:
    return add_on_planes(grad, indices, x.shape, 2)


@lower(aten.adaptive_max_pool3d_backward.default)
@as_one
def _adaptive_maximum3d_backward(grad: Any, x: Any, indices: Any) -> Any:
    return add_on_planes(grad, indices, x.shape, 3)


# ------------------------------------------------------------------ at random places


def _starts(sample: Any, size: int, kernel: int, outputs: int) -> Any:
    """Where the windows of each plane start, as torch draws them from one number in [0, 1)."""
    room = size - kernel
    if outputs == 1:
        return jnp.full((*sample.shape, 1), room, jnp.int32)
    step = quotient(jnp.asarray(room, sample.dtype), outputs - 1)
    place = jnp.arange(outputs, dtype=sample.dtype)
    starts = ((place + sample[..., None]) * step).astype(jnp.int32)
    starts = starts - (sample * step).astype(jnp.int32)[..., None]
    return jnp.where(place == outputs - 1, room, starts)


def _fractional(x: Any, kernel_size: Any, output_size: Any, samples: Any, order: Any) -> Any:
    ndim = len(order)
    shape = x.shape
    x = x.reshape(*samples.shape[:2], *shape[x.ndim - ndim :])
    places = flat_index(x.shape, ndim)
    for d, (k, n) in enumerate(zip(kernel_size, output_size, strict=True)):
        dim = 2 + 2 * d
        starts = _starts(samples[..., order[d]], x.shape[dim], k, n)
        indices = starts[..., None] + jnp.arange(k, dtype=jnp.int32)
        behind = (1,) * (x.ndim - dim - 1)
        across = indices.reshape(*x.shape[:2], *(1,) * (dim - 2), n * k, *behind)
        taken = [jnp.take_along_axis(v, across, axis=dim, mode="clip") for v in (x, places)]
        x, places = (v.reshape(*v.shape[:dim], n, k, *v.shape[dim + 1 :]) for v in taken)
    values, indices = _largest(x, places, kernel_size)
    result = (*shape[: len(shape) - ndim], *output_size)
    return values.reshape(result), indices.reshape(result)


@lower(aten.fractional_max_pool2d.default)
@as_one
def _fractional2d(x: Any, kernel_size: Any, output_size: Any, samples: Any) -> Any:
    # torch takes the first number of each pair for the second dim.
    return _fractional(x, kernel_size, output_size, samples, (1, 0))


@lower(aten.fractional_max_pool3d.default)
@as_one
def _fractional3d(x: Any, kernel_size: Any, output_size: Any, samples: Any) -> Any:
    return _fractional(x, kernel_size, output_size, samples, (0, 1, 2))


@lower(aten.fractional_max_pool2d_backward.default)
@as_one
def _fractional2d_backward(grad: Any, x: Any, k: Any, output_size: Any, indices: Any) -> Any:
    return add_on_planes(grad, indices, x.shape, 2)


@lower(aten.fractional_max_pool3d_backward.default)
@as_one
def _fractional3d_backward(grad: Any, x: Any, k: Any, output_size: Any, indices: Any) -> Any:
    return add_on_planes(grad, indices, x.shape, 3)
