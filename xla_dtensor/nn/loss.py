"""``linear_cross_entropy``: the loss of a language model without its logits.

The last layer of a language model maps each token to as many numbers as the vocabulary has words;
for 8192 tokens and 128,256 words that is 4.2 GB in float32, kept for the backward. The loss only
needs the logarithm of their summed exponentials and the one number of the right word.
"""

from __future__ import annotations

from math import prod
from typing import Any, Literal

import torch
from torch.nn import functional as F

from xla_dtensor.core.argument_types import argument_types
from xla_dtensor.core.errors import ArgumentTypeError
from xla_dtensor.runtimes.registry import current_runtime
from xla_dtensor.runtimes.whole_ops import (
    OneResult,
    below,
    linear_loss,
    linear_loss_backward,
    refuse_second,
    save,
)

__all__ = ["linear_cross_entropy"]

Reduction = Literal["none", "mean", "sum"]
# Words of the vocabulary at a time: wide enough to keep a matrix unit busy.
_COLUMNS = 8192
_MOST_CHUNKS = 4


@argument_types
def linear_cross_entropy(
    input: torch.Tensor,
    linear_weight: torch.Tensor,
    target: torch.Tensor,
    *,
    linear_bias: torch.Tensor | None = None,
    reduction: Reduction = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    chunks: int | None = None,
) -> torch.Tensor:
    """Return ``cross_entropy(linear(input, linear_weight, linear_bias), target)``.

    On the JAX runtime the logits are computed some columns at a time, in the forward and again in
    the backward, and never held together; batch, sequence and vocabulary keep their shardings.
    Elsewhere it is what the formula says. Named as in ``torch.nn.functional`` of torch 2.15, whose
    own takes class weights and probabilities as well, and flat inputs only.

    Args:
        input: (..., features). The dims before the last are not merged.
        linear_weight: (classes, features).
        target: (...), the right classes; integers.
        linear_bias: (classes,).
        reduction: "mean" over the targets that count, "sum", or "none".
        ignore_index: Targets that do not count.
        label_smoothing: Share of the target that is spread over all classes, 0 to 1.
        chunks: Number of parts of the vocabulary; as many as make about 8192 classes each when
            None. A number that divides the classes saves a copy of the weight.

    Returns:
        The loss, in float32 where the input is half precision.

    Raises:
        ArgumentTypeError: Shapes that do not fit, a target of class probabilities, or an unknown
            reduction.

    Example:
        >>> import torch, xla_dtensor as xd
        >>> mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
        >>> x = xd.distribute_tensor(torch.ones(2, 3, 8), mesh, ("dp", None, None))
        >>> weight = xd.distribute_tensor(torch.zeros(16, 8), mesh, ("tp", None))
        >>> target = xd.distribute_tensor(torch.zeros(2, 3, dtype=torch.long), mesh, ("dp", None))
        >>> round(xd.linear_cross_entropy(x, weight, target).item(), 4)  # log(16)
        2.7726
    """
    _check(input, linear_weight, target, linear_bias, reduction, chunks)
    tensors = (input, linear_weight, target, linear_bias)
    if not _is_on_jax(tensors):
        return _plain(*tensors, reduction, ignore_index, label_smoothing)
    count = chunks or _chunks(linear_weight.shape[0])
    options = (ignore_index, float(label_smoothing), count)
    losses: Any = _LinearLoss.apply(*tensors, *options)
    if reduction == "none":
        return losses
    total = losses.sum()
    return total / (target != ignore_index).sum() if reduction == "mean" else total


def _chunks(classes: int) -> int:
    """Return a number of chunks, if possible one that divides the classes."""
    least = max(1, -(-classes // _COLUMNS))
    for count in range(least, _MOST_CHUNKS * least + 1):
        if classes % count == 0:
            return count
    return least


def _is_on_jax(tensors: Any) -> bool:
    runtime = current_runtime()
    if runtime is None or not runtime.has_loops:
        return False
    payloads = [getattr(t, "_local_tensor", t) for t in tensors if t is not None]
    return any(runtime.is_payload(p) for p in payloads) and not torch.compiler.is_compiling()


def _plain(
    input: Any,
    weight: Any,
    target: Any,
    bias: Any,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
) -> torch.Tensor:
    logits = F.linear(input, weight, bias)
    wide = torch.promote_types(logits.dtype, torch.float32)
    classes = (prod(logits.shape[:-1]), logits.shape[-1])
    loss = F.cross_entropy(
        logits.to(wide).reshape(classes),
        target.reshape(-1),
        reduction=reduction,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
    )
    return loss.reshape(target.shape) if reduction == "none" else loss


def _check(
    input: Any, weight: Any, target: Any, bias: Any, reduction: str, chunks: int | None
) -> None:
    def refuse(why: str, instead: str) -> None:
        raise ArgumentTypeError(
            f"linear_cross_entropy was called with input={tuple(input.shape)}, "
            f"linear_weight={tuple(weight.shape)}, target={tuple(target.shape)} of "
            f"{target.dtype}, reduction={reduction!r}, chunks={chunks}. {why} {instead}"
        )

    if weight.ndim != 2 or input.ndim < 1 or input.shape[-1] != weight.shape[1]:
        refuse("The input's last dim is the weight's second.", "Pass (..., d) and (classes, d).")
    if target.is_floating_point() or target.is_complex() or target.dtype == torch.bool:
        refuse("Targets are classes here.", "Pass integers, or use cross_entropy on the logits.")
    if tuple(target.shape) != tuple(input.shape[:-1]):
        refuse("There is one target for each row of the input.", "Pass a target of that shape.")
    if bias is not None and tuple(bias.shape) != tuple(weight.shape[:1]):
        refuse("There is one bias for each class.", f"Pass a bias of {weight.shape[0]} numbers.")
    if reduction not in ("none", "mean", "sum"):
        refuse("There is no such reduction.", "Pass 'none', 'mean' or 'sum'.")
    if chunks is not None and not 1 <= chunks <= max(1, weight.shape[0]):
        refuse("A chunk has at least one class.", "Pass 1 to the number of classes, or None.")


class _LinearLoss(OneResult):
    @staticmethod
    def forward(ctx: Any, input: Any, weight: Any, target: Any, bias: Any, *options: Any) -> Any:
        losses, log_sum = below(linear_loss, input, weight, target, bias, *options)
        save(ctx, input, weight, target, bias, log_sum)
        ctx.options = options
        return losses

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        grads = below(linear_loss_backward, grad, *ctx.saved_tensors, *ctx.options)
        inputs = ctx.saved_tensors[:4]
        of_input, of_weight, of_bias = refuse_second("linear_cross_entropy", inputs, *grads)
        to_input, to_weight, _, to_bias, *_ = ctx.needs_input_grad
        return (
            of_input if to_input else None,
            of_weight if to_weight else None,
            None,
            of_bias if to_bias else None,
            *(None,) * len(ctx.options),
        )
