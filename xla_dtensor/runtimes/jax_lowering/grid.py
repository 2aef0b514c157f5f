"""Sampling of images at the positions of a grid, with gradients of the image and of the grid.

Where torch's gradient of a position is a convention, at the edge of the image or beyond, it is
torch's: none where a position was moved to the edge, and the sign of the last reflection.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax

from xla_dtensor.runtimes.jax_lowering.as_one import as_one
from xla_dtensor.runtimes.jax_lowering.derivative import lower_derivative
from xla_dtensor.runtimes.jax_lowering.points import put_points
from xla_dtensor.runtimes.jax_lowering.pointwise import quotient
from xla_dtensor.runtimes.jax_lowering.table import lower

__all__: list[str] = []

aten = torch.ops.aten
_BILINEAR, _NEAREST, _BICUBIC = 0, 1, 2
_ZEROS, _BORDER, _REFLECTION = 0, 1, 2
_OUTSIDE = -100.0


# ------------------------------------------------------------------ positions


def _unnormalized(position: Any, size: int, align: bool) -> Any:
    if align:
        return (position + 1) / 2 * (size - 1)
    return ((position + 1) * size - 1) / 2


def _clipped(position: Any, size: int) -> Any:
    inside = (position > 0) & (position < size - 1)
    return jnp.where(inside, position, lax.stop_gradient(jnp.clip(position, 0, size - 1)))


def _reflected(position: Any, size: int, align: bool) -> Any:
    low, high = (0.0, size - 1.0) if align else (-0.5, size - 0.5)
    span = high - low
    if span == 0:
        return jnp.zeros_like(position)
    distance = jnp.where(position < low, low - position, position - low)
    flips = lax.stop_gradient(jnp.floor(quotient(distance, span)))
    rest = distance - flips * span
    return jnp.where(flips % 2 == 0, rest + low, span - rest + low)


def _placed(position: Any, size: int, padding: int, align: bool) -> Any:
    """Move positions into the image, as far as the padding mode does that."""
    if padding == _BORDER:
        position = _clipped(position, size)
    elif padding == _REFLECTION:
        position = _clipped(_reflected(position, size, align), size)
    # Anything that no int32 can hold lies outside.
    holds = jnp.abs(position) < 2.0**30
    return jnp.where(holds, position, _OUTSIDE)


# ------------------------------------------------------------------ reading


@jax.custom_vjp
def _read(planes: Any, index: Any) -> Any:
    """Elements of planes, (batch, channels, elements), at an index of shape (batch, points)."""
    return jnp.take_along_axis(planes, index[:, None, :], axis=2, mode="clip")


def _read_forward(planes: Any, index: Any) -> Any:
    return _read(planes, index), (index, jnp.zeros((planes.shape[-1], 0), planes.dtype))


def _read_backward(saved: Any, grad: Any) -> Any:
    index, like = saved
    batch, channels = grad.shape[:2]
    rows = lax.broadcasted_iota(index.dtype, index.shape, 0)
    zeros = jnp.zeros((batch, like.shape[0], channels), like.dtype)
    written = put_points(zeros, [rows, index], jnp.moveaxis(grad, 1, 2), accumulate=True)
    return jnp.moveaxis(written, 2, 1), None


_read.defvjp(_read_forward, _read_backward)


def _elements(x: Any, corner: Sequence[Any]) -> Any:
    """The image's elements at integer positions, zero outside; (batch, channels, points)."""
    sizes = x.shape[2:]
    index = jnp.zeros(corner[0].shape, jnp.int32)
    inside = jnp.ones(corner[0].shape, jnp.bool_)
    for place, size in zip(corner, sizes, strict=True):
        inside &= (place >= 0) & (place < size)
        index = index * size + jnp.clip(place, 0, size - 1).astype(jnp.int32)
    found = _read(x.reshape(*x.shape[:2], math.prod(sizes)), index)
    return jnp.where(inside[:, None], found, 0)


# ------------------------------------------------------------------ sampling


def _linear(x: Any, positions: Sequence[Any]) -> Any:
    starts = [lax.stop_gradient(jnp.floor(position)) for position in positions]
    total: Any = 0.0
    for corner in itertools.product((0, 1), repeat=len(positions)):
        weight: Any = 1.0
        for step, start, position in zip(corner, starts, positions, strict=True):
            weight = weight * (position - start if step else start + 1 - position)
        places = [start + step for start, step in zip(starts, corner, strict=True)]
        total = total + _elements(x, places) * weight[:, None]
    return total


def _cubic_weights(part: Any) -> list[Any]:
    a = -0.75

    def near(d: Any) -> Any:
        return ((a + 2) * d - (a + 3)) * d * d + 1

    def far(d: Any) -> Any:
        return ((a * d - 5 * a) * d + 8 * a) * d - 4 * a

    return [far(part + 1), near(part), near(1 - part), far(2 - part)]


def _cubic(x: Any, positions: Sequence[Any], padding: int, align: bool) -> Any:
    starts = [lax.stop_gradient(jnp.floor(position)) for position in positions]
    weights = [_cubic_weights(p - start) for p, start in zip(positions, starts, strict=True)]
    total: Any = 0.0
    for corner in itertools.product(range(4), repeat=len(positions)):
        # Positions are not moved before; each element that is read is.
        places = [
            _placed(start + step - 1, size, padding, align)
            for start, step, size in zip(starts, corner, x.shape[2:], strict=True)
        ]
        weight: Any = 1.0
        for each, step in zip(weights, corner, strict=True):
            weight = weight * each[step]
        total = total + _elements(x, [lax.stop_gradient(p) for p in places]) * weight[:, None]
    return total


@lower(aten.grid_sampler_2d.default, aten.grid_sampler_3d.default)
@as_one
def _grid_sampler(x: Any, grid: Any, interpolation: int, padding: int, align: bool) -> Any:
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    points = grid.astype(wide.dtype).reshape(
        grid.shape[0], math.prod(grid.shape[1:-1]), grid.shape[-1]
    )
    # The last dim of a grid has the position along the last dim of the image first.
    positions = [
        _unnormalized(points[..., -1 - d], size, align) for d, size in enumerate(x.shape[2:])
    ]
    if interpolation == _BICUBIC:
        found = _cubic(wide, positions, padding, align)
    else:
        moved = zip(positions, x.shape[2:], strict=True)
        positions = [_placed(position, size, padding, align) for position, size in moved]
        if interpolation == _NEAREST:
            nearest = [lax.stop_gradient(jnp.round(position)) for position in positions]
            found = _elements(wide, nearest)
        else:
            found = _linear(wide, positions)
    return found.reshape(*x.shape[:2], *grid.shape[1:-1]).astype(x.dtype)


for _name in ("grid_sampler_2d", "grid_sampler_3d"):
    _op = getattr(aten, _name).default
    lower_derivative(getattr(aten, f"{_name}_backward").default, _op, "input", "grid")
