"""The ops behind ``linear_cross_entropy``: a loss for each token, and its gradients.

``log_sum`` is the logarithm of the sum of the exponentials of a token's logits. It and the inputs
are all that the backward needs; the logits themselves are computed again, chunk by chunk.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["linear_loss", "linear_loss_backward"]

_linear_loss = torch.library.Library("xla_dtensor", "FRAGMENT")
_linear_loss.define(
    "linear_loss(Tensor input, Tensor weight, Tensor target, Tensor? bias, int ignore_index, "
    "float label_smoothing, int chunks) -> (Tensor, Tensor)"
)
_linear_loss.define(
    "linear_loss_backward(Tensor grad, Tensor input, Tensor weight, Tensor target, Tensor? bias, "
    "Tensor log_sum, int ignore_index, float label_smoothing, int chunks) "
    "-> (Tensor, Tensor, Tensor)"
)


@torch.library.impl(_linear_loss, "linear_loss", "Meta")
def _(input: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    wide = torch.promote_types(input.dtype, torch.float32)
    one, other = (torch.empty(input.shape[:-1], dtype=wide, device="meta") for _ in range(2))
    return one, other


@torch.library.impl(_linear_loss, "linear_loss_backward", "Meta")
def _(_: Any, input: Any, weight: Any, *__: Any) -> tuple[torch.Tensor, ...]:
    shapes = (input.shape, weight.shape, weight.shape[:1])
    dtypes = (input.dtype, weight.dtype, weight.dtype)
    return tuple(
        torch.empty(shape, dtype=dtype, device="meta")
        for shape, dtype in zip(shapes, dtypes, strict=True)
    )


linear_loss = torch.ops.xla_dtensor.linear_loss.default
linear_loss_backward = torch.ops.xla_dtensor.linear_loss_backward.default
