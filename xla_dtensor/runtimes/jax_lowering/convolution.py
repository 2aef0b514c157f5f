"""Convolutions of any number of dims, with groups, dilation and strides, and their transposes.

Batch, channels and image dims stay what they are, so a sharded batch costs no communication but the
sum of the weight's gradient, and sharded channels cost one sum of the output or of the gradient.
Image dims that are cut are gathered (see ``images``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import torch
from jax import lax

from xla_dtensor.runtimes.jax_lowering.derivative import pull_back
from xla_dtensor.runtimes.jax_lowering.grouped_convolution import grouped, grouped_transpose
from xla_dtensor.runtimes.jax_lowering.images import whole
from xla_dtensor.runtimes.jax_lowering.matmul import precision
from xla_dtensor.runtimes.jax_lowering.table import lower

__all__: list[str] = []

aten = torch.ops.aten


def _each(value: Sequence[int], ndim: int) -> tuple[int, ...]:
    """One number per image dim; torch lets a single one stand for all."""
    return tuple(value) * ndim if len(value) == 1 else tuple(value)


@lower(aten.convolution.default)
def _convolution(
    x: Any,
    weight: Any,
    bias: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
) -> Any:
    ndim = x.ndim - 2
    x, weight = whole(x, 2), whole(weight, 2)
    stride, padding, dilation = (_each(v, ndim) for v in (stride, padding, dilation))
    if transposed:
        output_padding = _each(output_padding, ndim)
        settings = (x, weight, stride, padding, dilation, output_padding)
        y = _transposed(*settings) if groups == 1 else grouped_transpose(*settings, groups)
    elif groups > 1:
        y = grouped(x, weight, stride, padding, dilation, groups)
    else:
        y = lax.conv_general_dilated(
            x,
            weight,
            stride,
            [(p, p) for p in padding],
            rhs_dilation=dilation,
            precision=precision(),
        )
    y = whole(y, 2)
    return y if bias is None else y + bias.reshape(-1, *(1,) * ndim)


def _transposed(
    x: Any,
    weight: Any,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    output_padding: Sequence[int],
) -> Any:
    """The gradient of a convolution: stride spreads the input, the weight is turned round."""
    ndim = x.ndim - 2
    weight = jnp.flip(jnp.swapaxes(weight, 0, 1), tuple(range(2, weight.ndim)))
    reach = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
    sides = zip(reach, padding, output_padding, strict=True)
    return lax.conv_general_dilated(
        x,
        weight,
        (1,) * ndim,
        [(r - p, r - p + extra) for r, p, extra in sides],
        lhs_dilation=stride,
        rhs_dilation=dilation,
        precision=precision(),
    )


@lower(aten.convolution_backward.default)
def _convolution_backward(
    grad: Any, x: Any, weight: Any, bias_sizes: Any, *options: Any
) -> tuple[Any, Any, Any]:
    *settings, mask = options
    grad, x, weight = whole(grad, 2), whole(x, 2), whole(weight, 2)
    needed = [value for value, wanted in zip((x, weight), mask, strict=False) if wanted]

    def function(*values: Any) -> Any:
        rest = list(values)
        image = rest.pop(0) if mask[0] else x
        kernel = rest.pop(0) if mask[1] else weight
        return _convolution(image, kernel, None, *settings)

    grads = list(pull_back(function, needed, grad)) if needed else []
    to_x = grads.pop(0) if mask[0] else None
    to_weight = grads.pop(0) if mask[1] else None
    to_bias = jnp.sum(grad, (0, *range(2, grad.ndim))) if mask[2] else None
    return to_x, to_weight, to_bias
