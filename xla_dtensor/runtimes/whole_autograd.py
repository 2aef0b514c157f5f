"""What the differentiable kernels of whole ops share, and one that has no name in aten."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["Contract", "below", "save"]


def below(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Call an op below autograd."""
    with torch._C._AutoDispatchBelowAutograd():
        return func(*args, **kwargs)


def save(ctx: Any, *tensors: Any) -> None:
    """Save tensors for the backward."""
    # Under saved-tensor hooks (checkpoint), torch 2.9 loses the gradient hooks of a leaf that a
    # Function saves. Nothing here is differentiated twice, so a detached alias does.
    hooks = torch._C._autograd  # pyright: ignore[reportAttributeAccessIssue]
    if hooks._top_saved_tensors_default_hooks(True) is not None:
        tensors = tuple(t.detach() if t is not None and t.is_leaf else t for t in tensors)
    ctx.save_for_backward(*tensors)


class Contract(torch.autograd.Function):
    """``...m,...n->mn``: the product of two tensors over all of their dims but the last."""

    @staticmethod
    def forward(ctx: Any, a: Any, b: Any) -> Any:
        """Compute the product."""
        save(ctx, a, b)
        return below(torch.ops.xla_dtensor.linear_weight_grad.default, a, b)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Any) -> Any:
        """Compute the gradients that are needed."""
        a, b = ctx.saved_tensors
        to_a, to_b = ctx.needs_input_grad
        grad_a = torch.matmul(b.conj(), grad.mT) if to_a else None
        grad_b = torch.matmul(a.conj(), grad) if to_b else None
        return grad_a, grad_b
