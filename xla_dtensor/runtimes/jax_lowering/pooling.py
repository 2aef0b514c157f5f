"""Pooling over windows: averages, maxima and where these lie. Batch and channels stay apart.

Image dims that are cut are gathered (see ``images``). A maximum's index counts the elements of its
plane in order. The backward of a maximum does not scatter by these indices, which XLA's partitioner
would gather for: each element of a window is compared with the window's index, and spread back with
a pad.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from xla_dtensor.runtimes.jax_lowering.as_one import as_one
from xla_dtensor.runtimes.jax_lowering.derivative import pull_back
from xla_dtensor.runtimes.jax_lowering.images import whole
from xla_dtensor.runtimes.jax_lowering.planes import add_on_planes, flat_index
from xla_dtensor.runtimes.jax_lowering.table import lower
from xla_dtensor.runtimes.jax_lowering.windows import Windows

__all__ = ["larger", "lowest"]

aten = torch.ops.aten
# Windows of more elements than this are not unrolled, so that programs stay small.
_LARGEST_UNROLLED = 64


# ------------------------------------------------------------------ averages


def _average(
    x: Any,
    ndim: int,
    kernel_size: Any,
    stride: Any = (),
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Any:
    rest = x.ndim - ndim
    x = whole(x, rest)
    windows = Windows.of(x.shape, ndim, kernel_size, stride, padding, ceil_mode)
    divisor = windows.counts(count_include_pad) if divisor_override is None else divisor_override
    integer = x.dtype.kind in "iu"
    wide = x if integer else x.astype(jnp.promote_types(x.dtype, jnp.float32))
    zero = np.zeros((), wide.dtype)  # not traced, or JAX does not see the sum
    total = lax.reduce_window(wide, zero, lax.add, **windows.reduce_window(x.ndim))
    divisor = jnp.broadcast_to(jnp.asarray(divisor, total.dtype), total.shape)
    return whole(lax.div(total, divisor).astype(x.dtype), rest)


@lower(aten.avg_pool2d.default)
def _avg_pool2d(x: Any, *options: Any) -> Any:
    return _average(x, 2, *options)


@lower(aten.avg_pool3d.default)
def _avg_pool3d(x: Any, *options: Any) -> Any:
    return _average(x, 3, *options)


def _average_backward(grad: Any, x: Any, ndim: int, options: Any) -> Any:
    grad, x = whole(grad, x.ndim - ndim), whole(x, x.ndim - ndim)
    return pull_back(lambda v: _average(v, ndim, *options), (x,), grad)[0]


@lower(aten.avg_pool2d_backward.default)
def _avg_pool2d_backward(grad: Any, x: Any, *options: Any) -> Any:
    return _average_backward(grad, x, 2, options)


@lower(aten.avg_pool3d_backward.default)
def _avg_pool3d_backward(grad: Any, x: Any, *options: Any) -> Any:
    return _average_backward(grad, x, 3, options)


# ------------------------------------------------------------------ maxima


def lowest(dtype: Any) -> Any:
    """Return the number that no maximum is below."""
    return jnp.array(-jnp.inf if dtype.kind not in "iu" else jnp.iinfo(dtype).min, dtype)


def larger(one: Any, other: Any) -> Any:
    """Return the (value, index) of the larger value: of equal ones the first, of NaNs the last."""
    (a, i), (b, j) = one, other
    nan_a, nan_b = a != a, b != b
    tied = jnp.where(nan_a, i > j, i < j)
    first = jnp.where(nan_a == nan_b, (a > b) | (((a == b) | nan_a) & tied), nan_a)
    return jnp.where(first, a, b), jnp.where(first, i, j)


def _maximum(x: Any, windows: Windows) -> Any:
    ndim = len(windows.sizes)
    rest = x.ndim - ndim
    start = (lowest(x.dtype), jnp.array(jnp.iinfo(jnp.int32).max, jnp.int32))
    pairs = (whole(x, rest), flat_index(x.shape, ndim))
    results = lax.reduce_window(pairs, start, larger, **windows.reduce_window(x.ndim))
    return tuple(whole(result, rest) for result in results)


def _maximum_backward(grad: Any, x: Any, windows: Windows, indices: Any) -> Any:
    rest = x.ndim - len(windows.sizes)
    return _put_back(whole(grad, rest), x, windows, whole(indices, rest))


@as_one
def _put_back(grad: Any, x: Any, windows: Windows, indices: Any) -> Any:
    """Give each window's gradient to the element that `indices` names; sums where windows meet."""
    ndim, rest = len(windows.sizes), x.ndim - len(windows.sizes)
    if math.prod(windows.kernel) > _LARGEST_UNROLLED:
        return add_on_planes(grad, indices, x.shape, ndim)
    # Windows are spread over the padded image: XLA's partitioner aborts on pads below zero.
    edges = list(zip(windows.padding, windows.sizes, windows.padding_after, strict=True))
    padded = [before + size + after for before, size, after in edges]
    total = jnp.zeros((*x.shape[:rest], *padded), jnp.promote_types(grad.dtype, jnp.float32))
    for offsets in itertools.product(*map(range, windows.kernel)):
        index, inside = jnp.zeros((), indices.dtype), jnp.ones((), jnp.bool_)
        pads = [(0, 0, 0)] * rest
        for dim, offset in enumerate(offsets):
            count, step, size = windows.outputs[dim], windows.stride[dim], windows.sizes[dim]
            begin = offset * windows.dilation[dim]
            place = begin + step * lax.broadcasted_iota(indices.dtype, grad.shape, rest + dim)
            place = place - windows.padding[dim]
            inside &= (place >= 0) & (place < size)
            index = index * size + place
            pads.append((begin, padded[dim] - begin - step * (count - 1) - 1, step - 1))
        here = jnp.where(inside & (indices == index), grad, 0).astype(total.dtype)
        total = total + lax.pad(here, np.zeros((), total.dtype), pads)
    begins = [before for before, _, _ in edges]
    ends = [before + size for before, size, _ in edges]
    total = lax.slice(total, [0] * rest + begins, [*x.shape[:rest], *ends])
    return whole(total.astype(grad.dtype), rest)


def _of_maximum(x: Any, ndim: int, options: Any) -> Windows:
    names = ("kernel", "stride", "padding", "dilation", "ceil_mode")
    defaults = {"stride": (), "padding": 0, "dilation": 1, "ceil_mode": False}
    return Windows.of(x.shape, ndim, **(defaults | dict(zip(names, options, strict=False))))


@lower(aten.max_pool2d_with_indices.default)
def _max_pool2d(x: Any, *options: Any) -> Any:
    return _maximum(x, _of_maximum(x, 2, options))


@lower(aten.max_pool3d_with_indices.default)
def _max_pool3d(x: Any, *options: Any) -> Any:
    return _maximum(x, _of_maximum(x, 3, options))


@lower(aten.max_pool2d_with_indices_backward.default)
def _max_pool2d_backward(grad: Any, x: Any, *options: Any) -> Any:
    *settings, indices = options
    return _maximum_backward(grad, x, _of_maximum(x, 2, settings), indices)


@lower(aten.max_pool3d_with_indices_backward.default)
def _max_pool3d_backward(grad: Any, x: Any, *options: Any) -> Any:
    *settings, indices = options
    return _maximum_backward(grad, x, _of_maximum(x, 3, settings), indices)
