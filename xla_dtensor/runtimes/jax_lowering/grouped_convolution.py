"""Convolutions in groups, as one product per element of the kernel.

XLA's own form for them, ``feature_group_count``, is partitioned badly (jax 0.10, on CPU): a sharded
batch is gathered, and the weight's gradient is summed over devices that hold the same part of it,
which makes it too large. Here each element of the kernel multiplies a shifted image; groups are a
batch dim of that product, and a depthwise convolution is left with multiplications only.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from xla_dtensor.runtimes.jax_lowering.matmul import precision

__all__ = ["grouped", "grouped_transpose"]

Sizes = Sequence[int]


def grouped(
    x: Any, weight: Any, stride: Sizes, padding: Sizes, dilation: Sizes, groups: int
) -> Any:
    """Return the convolution of `x`, (batch, groups * in, ...), by (groups * out, in, ...).

    Args:
        x: The images.
        weight: The kernels.
        stride: One number per image dim, as the next two.
        padding: Zeros before and after the image.
        dilation: Elements between those of the kernel.
        groups: How many.
    """
    ndim = x.ndim - 2
    around = [(0, 0, 0)] * 2 + [(p, p, 0) for p in padding]
    x = _split(lax.pad(x, jnp.zeros((), x.dtype), around), groups)
    weight = weight.reshape(groups, weight.shape[0] // groups, *weight.shape[1:])
    sizes = [
        (n - d * (k - 1) - 1) // s + 1
        for n, k, s, d in zip(x.shape[3:], weight.shape[3:], stride, dilation, strict=True)
    ]
    steps = [s if n > 1 else 1 for s, n in zip(stride, sizes, strict=True)]  # as `slices.cut`
    total: Any = None
    for place, starts in _elements_of_weight(weight, dilation):
        ends = [b + s * (n - 1) + 1 for b, s, n in zip(starts, steps, sizes, strict=True)]
        shifted = lax.slice(x, (0, 0, 0, *starts), (*x.shape[:3], *ends), (1, 1, 1, *steps))
        part = _product("ngc{0},goc->ngo{0}", ndim, shifted, weight[(..., *place)])
        total = part if total is None else total + part
    return _merged(total)


def grouped_transpose(
    x: Any,
    weight: Any,
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
    output_padding: Sizes,
    groups: int,
) -> Any:
    """Return the transposed convolution by `weight`, of shape (groups * in, out, ...).

    Args:
        x: The images.
        weight: The kernels.
        stride: One number per image dim, as the next three: how far the image is spread.
        padding: Elements that the result lacks on both sides.
        dilation: Elements between those of the kernel.
        output_padding: Elements that the result has more at its end.
        groups: How many.
    """
    ndim = x.ndim - 2
    x = _split(x, groups)
    weight = weight.reshape(groups, weight.shape[0] // groups, *weight.shape[1:])
    dims = list(zip(x.shape[3:], weight.shape[3:], stride, dilation, strict=True))
    spread = [(n - 1) * s + 1 for n, _, s, _ in dims]
    lengths = [m + d * (k - 1) for m, (_, k, _, d) in zip(spread, dims, strict=True)]
    total: Any = None
    for place, starts in _elements_of_weight(weight, dilation):
        part = _product("ngc{0},gco->ngo{0}", ndim, x, weight[(..., *place)])
        pads = [
            (b, length - b - m, s - 1)
            for b, length, m, s in zip(starts, lengths, spread, stride, strict=True)
        ]
        part = lax.pad(part, jnp.zeros((), part.dtype), [(0, 0, 0)] * 3 + pads)
        total = part if total is None else total + part
    more = [(0, 0, 0)] * 3 + [(0, extra, 0) for extra in output_padding]
    total = lax.pad(total, jnp.zeros((), total.dtype), more)
    begin = (0, 0, 0, *padding)
    end = [n - b for n, b in zip(total.shape, begin, strict=True)]
    return _merged(lax.slice(total, begin, end))


def _split(x: Any, groups: int) -> Any:
    return x.reshape(x.shape[0], groups, x.shape[1] // groups, *x.shape[2:])


def _merged(x: Any) -> Any:
    return x.reshape(x.shape[0], x.shape[1] * x.shape[2], *x.shape[3:])


def _elements_of_weight(
    weight: Any, dilation: Sizes
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Each element of the kernel, and where it lies on the image."""
    for place in itertools.product(*map(range, weight.shape[3:])):
        yield place, tuple(k * d for k, d in zip(place, dilation, strict=True))


def _product(formula: str, ndim: int, x: Any, weight: Any) -> Any:
    if weight.shape[1:] == (1, 1):
        return x * weight.reshape(1, -1, 1, *(1,) * ndim)
    return jnp.einsum(formula.format("xyz"[:ndim]), x, weight, precision=precision())
