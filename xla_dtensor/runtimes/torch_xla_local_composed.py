"""Ops on the stacks of local payloads that are said with others.

Of those in `COMPOSED` torch_xla and XLA's partitioner make a wrong program, or one with
collectives, or none. Those in `PARTIAL_REGIONS` run well on each device by itself; but a region
over some mesh axes has no other way to do that than to gather along the rest, so there they are
said with ops that leave the rest to XLA.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["COMPOSED", "PARTIAL_REGIONS"]

aten = torch.ops.aten
_NONE, _MEAN = 0, 1  # torch's numbers for reductions of a loss


def _normal(x: torch.Tensor, dtype: torch.dtype | None = None, **_: Any) -> torch.Tensor:
    """By Box and Muller's method: XLA's own draws pairs, and cuts them across the devices."""
    radius = (-2 * torch.log1p(-torch.rand_like(x, dtype=torch.float32))).sqrt()
    angle = torch.rand_like(x, dtype=torch.float32) * (2 * torch.pi)
    return (radius * angle.cos()).to(x.dtype if dtype is None else dtype)


def _normal_in_place(
    x: torch.Tensor, mean: float = 0, std: float = 1, generator: None = None
) -> torch.Tensor:
    return x.copy_(_normal(x, torch.float32) * std + mean)


def _glu_backward(grad: torch.Tensor, x: torch.Tensor, dim: int) -> torch.Tensor:
    first, second = x.chunk(2, dim)
    gate = second.sigmoid()
    return torch.cat([grad * gate, grad * first * gate * (1 - gate)], dim)


def _safe_softmax(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    weights = torch.softmax(x, dim, dtype=dtype)
    nothing = (x == float("-inf")).all(dim, keepdim=True)
    return torch.where(nothing, torch.zeros_like(weights), weights)


def _filled(value: float) -> Callable[..., torch.Tensor]:
    def like(x: torch.Tensor, dtype: torch.dtype | None = None, **_: Any) -> torch.Tensor:
        # Lies as x does: nothing else says where a constant is.
        kept = torch.where(x == x, value, value)
        return kept.to(x.dtype if dtype is None else dtype)

    return like


def _picked(
    x: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, ignored: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which class counts in each row, as a mask; and each row's weight."""
    classes = torch.arange(x.shape[-1], device=x.device)
    counts = target != ignored
    mask = (target.unsqueeze(-1) == classes) & counts.unsqueeze(-1)
    if weight is None:
        return mask, counts.to(x.dtype)
    return mask, torch.where(mask, weight, torch.zeros_like(weight)).sum(-1)


def _nll_loss(
    x: torch.Tensor, target: torch.Tensor, weight: Any, reduction: int, ignored: int
) -> tuple[torch.Tensor, torch.Tensor]:
    mask, weights = _picked(x, target, weight, ignored)
    losses = -torch.where(mask, x, torch.zeros_like(x)).sum(-1) * weights
    total = weights.sum()
    if reduction == _NONE:
        return losses, torch.zeros_like(total)
    return (losses.sum() / total if reduction == _MEAN else losses.sum()), total


def _nll_loss_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    target: torch.Tensor,
    weight: Any,
    reduction: int,
    ignored: int,
    total: torch.Tensor,
) -> torch.Tensor:
    mask, weights = _picked(x, target, weight, ignored)
    each = grad / total if reduction == _MEAN else grad
    return torch.where(mask, -(weights * each).unsqueeze(-1), torch.zeros_like(x))


PARTIAL_REGIONS: dict[Any, Callable[..., Any]] = {
    aten._safe_softmax.default: _safe_softmax,
    aten.nll_loss_forward.default: _nll_loss,
    aten.nll_loss_backward.default: _nll_loss_backward,
    aten.empty_like.default: _filled(0),
    aten.zeros_like.default: _filled(0),
    aten.ones_like.default: _filled(1),
}
COMPOSED: dict[Any, Callable[..., Any]] = {
    aten.count_nonzero.default: lambda x, dim=None: (x != 0).sum(dim),
    aten.count_nonzero.dim_IntList: lambda x, dim: (x != 0).sum(dim),
    aten.randn_like.default: _normal,
    aten.normal_.default: _normal_in_place,
    aten.glu_backward.default: _glu_backward,
    **PARTIAL_REGIONS,
}
