"""Labels for the ops that xla_dtensor keeps whole and that PyTorch's propagator never sees.

Each rule looks at one mesh axis at a time, which is enough because the axes act independently: it
maps the placements that the arguments have on the axis to the output's. What no rule names is
Replicate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from xla_dtensor.runtimes import whole_ops as whole_ops  # defines torch.ops.xla_dtensor
from xla_dtensor.runtimes.linear_loss_ops import linear_loss, linear_loss_backward

__all__ = ["WHOLE_OP_LABELS"]

aten = torch.ops.aten


def _dim(placement: Placement) -> int | None:
    """The sharded dim, None for anything but a plain Shard."""
    return placement.dim if type(placement) is Shard else None  # pyright: ignore


def _linear(x: Any, weight: Any, x_ndim: int) -> Placement:
    x_dim, weight_dim = _dim(x), _dim(weight)
    if x_dim == x_ndim - 1 and weight_dim == 1:
        return Partial()
    if weight_dim == 0 and x_dim is None:
        return Shard(x_ndim - 1)
    if x_dim is not None and x_dim < x_ndim - 1:
        return Shard(x_dim)
    return Replicate()


def _matmul(a: Any, b: Any, a_ndim: int, b_ndim: int) -> Placement:
    ndim = max(a_ndim, b_ndim)
    a_dim, b_dim = _dim(a), _dim(b)
    a_dim = None if a_dim is None else a_dim - a_ndim
    b_dim = None if b_dim is None else b_dim - b_ndim
    if a_dim == -1 and b_dim == -2:
        return Partial()
    if a_dim is not None and a_dim < -1 and (b_dim in (None, -1, a_dim)):
        # Where both would cut the output (its rows, its columns), one has to be gathered: b.
        return Shard(ndim + a_dim)
    if b_dim is not None and b_dim != -2 and (a_dim in (None, b_dim)):
        return Shard(ndim + b_dim)
    return Replicate()


def _weight_grad(grad: Any, x: Any, ndim: int) -> Placement:
    grad_dim, x_dim = _dim(grad), _dim(x)
    if grad_dim is not None and grad_dim == x_dim and grad_dim < ndim - 1:
        return Partial()
    if grad_dim == ndim - 1 and x_dim is None:
        return Shard(0)
    if x_dim == ndim - 1 and grad_dim is None:
        return Shard(1)
    return Replicate()


def _attention(q: Any, k: Any, v: Any, ndim: int) -> Placement:
    q_dim, k_dim, v_dim = _dim(q), _dim(k), _dim(v)
    if q_dim is not None and q_dim == k_dim == v_dim and q_dim < ndim - 2:
        return Shard(q_dim)
    if q_dim == ndim - 2 and k_dim is None and v_dim is None:
        return Shard(ndim - 2)
    return Replicate()


def _per_axis(rule: Callable[..., Placement], tensors: int) -> Callable[[int, Any], Any]:
    def placements(num_axes: int, args: Any) -> tuple[Placement, ...]:
        given = [args[i] for i in range(tensors)]
        ndims = [len(g[1]) for g in given]
        ndims = ndims if rule is _matmul else ndims[:1]
        return tuple(rule(*(g[0][axis] for g in given), *ndims) for axis in range(num_axes))

    return placements


def _attention_grads(num_axes: int, args: Any) -> list[Any]:
    return [args[1][0], args[2][0], args[3][0]]


def _lean_attention(num_axes: int, args: Any) -> list[Any]:
    output = _per_axis(_attention, 3)(num_axes, args)
    return [output, output]  # the sums have all dims of the output but the last


def _linear_loss(num_axes: int, args: Any) -> list[Any]:
    """One number for each token: it lies as the tokens do."""
    placements, shape = args[0][:2]
    kept = [p if _dim(p) not in (None, len(shape) - 1) else Replicate() for p in placements]
    return [tuple(kept), tuple(kept)]


def _linear_loss_grads(num_axes: int, args: Any) -> list[Any]:
    of_bias = [p if _dim(p) == 0 else Replicate() for p in args[2][0]]
    return [args[1][0], args[2][0], tuple(of_bias)]


def _replicated(num_axes: int, args: Any) -> tuple[Placement, ...]:
    """PyTorch has no rule for products of groups of rows, and asking it logs an error each time."""
    return (Replicate(),) * num_axes


WHOLE_OP_LABELS: dict[Any, Callable[[int, Any], Any]] = {
    aten.linear.default: _per_axis(_linear, 2),
    aten.matmul.default: _per_axis(_matmul, 2),
    aten.scaled_dot_product_attention.default: _per_axis(_attention, 3),
    torch.ops.xla_dtensor.linear_weight_grad.default: _per_axis(_weight_grad, 2),
    torch.ops.xla_dtensor.sdpa_backward.default: _attention_grads,
    torch.ops.xla_dtensor.sdpa_lean.default: _lean_attention,
    torch.ops.xla_dtensor.sdpa_lean_backward.default: _attention_grads,
    linear_loss: _linear_loss,
    linear_loss_backward: _linear_loss_grads,
    aten._grouped_mm.default: _replicated,
}
