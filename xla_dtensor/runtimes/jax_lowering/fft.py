"""Fourier transforms, one dim after the other.

torch hands down what to scale by as a code: 0 for nothing, 1 for the root of the number of
elements, 2 for their number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import torch

from xla_dtensor.runtimes import jax_devices
from xla_dtensor.runtimes.jax_lowering.table import lower

__all__: list[str] = []

aten = torch.ops.aten


def _scaled(x: Any, normalization: int, sizes: Sequence[int]) -> Any:
    if normalization == 0:
        return x
    count = math.prod(sizes)
    return x * (1 / math.sqrt(count) if normalization == 1 else 1 / count)


def _transformed(function: Callable[..., Any], x: Any, dim: int, **options: Any) -> Any:
    """Transform along one dim.

    On CPU the others are merged: of a batch that it shards in more than one dim XLA (jax 0.10)
    makes programs that fail when they run, because they hand the transform a transposed layout.
    """
    x = jnp.moveaxis(x, dim, -1)
    batch = x.shape[:-1]
    merge = len(batch) > 1 and jax_devices.platform() == "cpu"
    found = function(x.reshape(-1, x.shape[-1]) if merge else x, axis=-1, **options)
    return jnp.moveaxis(found.reshape(*batch, found.shape[-1]), -1, dim)


def _along(x: Any, dims: Sequence[int], forward: bool) -> Any:
    # Each norm leaves its own direction unscaled.
    for dim in dims:
        x = (
            _transformed(jnp.fft.fft, x, dim, norm="backward")
            if forward
            else _transformed(jnp.fft.ifft, x, dim, norm="forward")
        )
    return x


@lower(aten._fft_c2c.default)
def _c2c(x: Any, dim: Any, normalization: int, forward: bool) -> Any:
    return _scaled(_along(x, dim, forward), normalization, [x.shape[d] for d in dim])


@lower(aten._fft_r2c.default)
def _r2c(x: Any, dim: Any, normalization: int, onesided: bool) -> Any:
    sizes = [x.shape[d] for d in dim]
    last = jnp.fft.rfft if onesided else jnp.fft.fft
    halved = _transformed(last, x, dim[-1], norm="backward")
    return _scaled(_along(halved, dim[:-1], forward=True), normalization, sizes)


@lower(aten._fft_c2r.default)
def _c2r(x: Any, dim: Any, normalization: int, last_dim_size: int) -> Any:
    sizes = [*(x.shape[d] for d in dim[:-1]), last_dim_size]
    rest = _along(x, dim[:-1], forward=False)
    found = _transformed(jnp.fft.irfft, rest, dim[-1], n=last_dim_size, norm="forward")
    return _scaled(found, normalization, sizes)
