"""Batch norm, of which torch_xla 2.9 forgets that the running variance is the unbiased one.

In float64 XLA takes eps in the precision of float32: there it is made of other ops.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["batch_norm", "has_other_statistics"]

_OTHER_DTYPES = (torch.float16, torch.bfloat16, torch.float64)


def batch_norm(
    func: Any,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor | None,
    variance: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Callable[[], Any] | None:
    """Return what to run in place of batch norm, which is `func`; None where torch_xla is right."""
    if x.numel() == 0:
        return None
    if x.dtype == torch.float64:
        return lambda: _batch_norm_in_float64(
            x, weight, bias, mean, variance, training, momentum, eps
        )
    if not training or variance is None:
        return None

    def norm() -> Any:
        old = variance.clone()
        result = func(x, weight, bias, mean, variance, training, momentum, eps)
        number = x.numel() // x.shape[1]
        unbiased = (result[2].square().reciprocal() - eps) * (number / max(number - 1, 1))
        variance.copy_((1 - momentum) * old + momentum * unbiased)
        return result

    return norm


def _batch_norm_in_float64(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor | None,
    variance: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dims = [dim for dim in range(x.ndim) if dim != 1]
    shape = [-1 if dim == 1 else 1 for dim in range(x.ndim)]
    if training or mean is None or variance is None:
        center = x.mean(dims)
        spread = (x - center.reshape(shape)).square().mean(dims)
        number = x.numel() // x.shape[1]
        unbiased = spread * (number / max(number - 1, 1))
        for to, new in ((mean, center), (variance, unbiased)):
            if training and to is not None:
                to.copy_((1 - momentum) * to + momentum * new)
    else:
        center, spread = mean, variance
    scale = (spread + eps).rsqrt()
    result = (x - center.reshape(shape)) * scale.reshape(shape)
    result = result if weight is None else result * weight.reshape(shape)
    result = result if bias is None else result + bias.reshape(shape)
    if training:
        return result, center, scale
    return result, x.new_empty(0), x.new_empty(0)


def has_other_statistics(*args: Any, **_: Any) -> bool:
    """Whether the backward is not for XLA's kernel.

    That needs the batch's own statistics, as in training, and in the input's dtype.

    In float64 it would take another eps than the forward.
    """
    return not args[7] or args[1].dtype in _OTHER_DTYPES
