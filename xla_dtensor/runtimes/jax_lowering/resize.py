"""Resizing of images: nearest, linear and cubic in any number of dims, with and without antialias.

Each dim is resized on its own, by taps that are computed here as torch computes them: positions in
float32 unless the image has float64, which decides what is nearest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch

from xla_dtensor.runtimes.jax_lowering.as_one import as_one
from xla_dtensor.runtimes.jax_lowering.table import lower
from xla_dtensor.runtimes.jax_lowering.taps import Taps, apply_taps

__all__: list[str] = []

aten = torch.ops.aten
Maker = Callable[[int, int, bool, "float | None", Any], Taps]


def _scale(size: int, outputs: int, align: bool, factor: float | None, dtype: Any) -> Any:
    """Elements of the image per element of the result."""
    if align:
        return dtype((size - 1) / (outputs - 1) if outputs > 1 else 0)
    if factor is not None and factor > 0:
        return dtype(1 / factor)
    return dtype(size) / dtype(outputs)


def _positions(size: int, outputs: int, align: bool, factor: float | None, dtype: Any) -> Any:
    scale, place = _scale(size, outputs, align, factor, dtype), np.arange(outputs).astype(dtype)
    return scale * place if align else scale * (place + dtype(0.5)) - dtype(0.5)


def _one(indices: Any, size: int) -> Taps:
    clipped = np.minimum(indices, size - 1).astype(np.int64)
    return Taps(clipped[:, None], np.ones((len(clipped), 1)), size)


def _nearest(size: int, outputs: int, align: bool, factor: float | None, dtype: Any) -> Taps:
    scale = _scale(size, outputs, False, factor, dtype)
    return _one(np.floor(scale * np.arange(outputs).astype(dtype)), size)


def _nearest_exact(size: int, outputs: int, align: bool, factor: float | None, dtype: Any) -> Taps:
    positions = _positions(size, outputs, False, factor, dtype)
    return _one(np.floor(np.maximum(positions, 0) + dtype(0.5)), size)


def _linear_taps(size: int, outputs: int, align: bool, factor: float | None, dtype: Any) -> Taps:
    if size == outputs:
        return _one(np.arange(size), size)
    positions = np.maximum(_positions(size, outputs, align, factor, dtype), 0)
    first = np.minimum(positions.astype(np.int64), size - 1)
    second = np.minimum(first + 1, size - 1)
    part = np.clip(positions - first, 0, 1)
    return Taps(np.stack([first, second], 1), np.stack([1 - part, part], 1), size)


def _cubic_weight(distance: Any, a: float) -> Any:
    """The cubic kernel of Keys at a distance, zero from two elements on."""
    d = np.abs(distance)
    near = ((a + 2) * d - (a + 3)) * d * d + 1
    far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
    return np.where(d <= 1, near, np.where(d < 2, far, 0))


def _cubic_taps(size: int, outputs: int, align: bool, factor: float | None, dtype: Any) -> Taps:
    positions = _positions(size, outputs, align, factor, dtype)
    first = np.minimum(np.floor(positions), size - 1)
    part = np.clip(positions - first, 0, 1)
    offsets = np.arange(-1, 3)
    indices = np.clip(first[:, None].astype(np.int64) + offsets, 0, size - 1)
    return Taps(indices, _cubic_weight(part[:, None] - offsets, -0.75), size)


def _antialiased(kernel: Callable[[Any], Any], width: int) -> Maker:
    """The kernel stretched over the elements that one element of the result stands for."""

    def make(size: int, outputs: int, align: bool, factor: float | None, dtype: Any) -> Taps:
        scale = _scale(size, outputs, align, factor, dtype)
        support = dtype(width / 2) * max(scale, dtype(1))
        centers = scale * (np.arange(outputs).astype(dtype) + dtype(0.5))
        first = np.maximum((centers - support + dtype(0.5)).astype(np.int64), 0)
        end = np.minimum((centers + support + dtype(0.5)).astype(np.int64), size)
        indices = first[:, None] + np.arange(max(int((end - first).max(initial=1)), 1))
        distance = (indices - centers[:, None] + dtype(0.5)) / max(scale, dtype(1))
        weights = np.where(indices < end[:, None], kernel(distance), 0)
        total = weights.sum(1, keepdims=True)
        weights = weights / np.where(total == 0, 1, total)
        return Taps(np.minimum(indices, size - 1), weights, size)

    return make


_linear_aa = _antialiased(lambda d: np.maximum(1 - np.abs(d), 0), 2)
_cubic_aa = _antialiased(lambda d: _cubic_weight(d, -0.5), 4)


def _maps(make: Maker, sizes: Any, outputs: Any, align: bool, factors: Any, dtype: Any) -> Any:
    dtype = np.float64 if dtype == jnp.float64 else np.float32
    rest = len(sizes) - len(outputs)
    given = [*factors, *[None] * (len(outputs) - len(factors))]
    for dim, (count, factor) in enumerate(zip(outputs, given, strict=True), rest):
        yield dim, make(int(sizes[dim]), int(count), align, factor, dtype)


def _mapped(x: Any, maps: Any) -> Any:
    whole = x.dtype.kind in "iu"
    wide = x.astype(jnp.promote_types(jnp.float32 if whole else x.dtype, jnp.float32))
    for dim, taps in maps:
        wide = apply_taps(wide, dim, taps)
    if whole:  # the cubic kernel has negative weights, which lead out of a byte's range
        limits = jnp.iinfo(x.dtype)
        wide = jnp.clip(jnp.round(wide), limits.min, limits.max)
    return wide.astype(x.dtype)


def _lower_resize(name: str, make: Maker, aligns: bool) -> None:
    def forward(x: Any, output_size: Any, *options: Any) -> Any:
        align, factors = (options[0], options[1:]) if aligns else (False, options)
        return _mapped(x, _maps(make, x.shape, output_size, align, factors, x.dtype))

    def backward(grad: Any, output_size: Any, input_size: Any, *options: Any) -> Any:
        align, factors = (options[0], options[1:]) if aligns else (False, options)
        maps = _maps(make, input_size, output_size, align, factors, grad.dtype)
        return _mapped(grad, [(dim, taps.transposed()) for dim, taps in maps])

    lower(getattr(aten, name).default)(as_one(forward))
    lower(getattr(aten, f"{name}_backward").default)(as_one(backward))


for _dims in (1, 2, 3):
    _lower_resize(f"upsample_nearest{_dims}d", _nearest, False)
    _lower_resize(f"_upsample_nearest_exact{_dims}d", _nearest_exact, False)
_lower_resize("upsample_linear1d", _linear_taps, True)
_lower_resize("upsample_bilinear2d", _linear_taps, True)
_lower_resize("upsample_trilinear3d", _linear_taps, True)
_lower_resize("upsample_bicubic2d", _cubic_taps, True)
_lower_resize("_upsample_bilinear2d_aa", _linear_aa, True)
_lower_resize("_upsample_bicubic2d_aa", _cubic_aa, True)
