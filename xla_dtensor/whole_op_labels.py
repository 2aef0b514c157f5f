"""Labels for the ops that xla_dtensor keeps whole and that PyTorch's propagator never sees.

Each rule looks at one mesh axis at a time, which is enough because the axes act independently: it
maps the placements that the arguments have on the axis to the output's. What no rule names is
Replicate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from xla_dtensor.runtimes import whole_ops as whole_ops  # defines torch.ops.xla_dtensor
from xla_dtensor.runtimes.linear_loss_ops import linear_loss, linear_loss_backward

__all__ = ["WHOLE_OP_LABELS"]

aten = torch.ops.aten
Shape = Sequence[int]


def _dim(placement: Placement) -> int | None:
    """The sharded dim, None for anything but a plain Shard."""
    return placement.dim if type(placement) is Shard else None  # pyright: ignore


class _Factor(NamedTuple):
    """A factor of a product on one mesh axis: which dim of the product it cuts, and its sizes."""

    cuts: int | None
    shape: Sequence[int]


def _product(left: _Factor, right: _Factor) -> Placement:
    """Let the larger factor stay as it is, the left one of two alike; the other is gathered.

    So XLA does it. PyTorch would take what moves the fewest bytes, which is the same thing mostly.
    """
    dim = right.cuts if left.cuts is None else left.cuts
    if None not in (left.cuts, right.cuts) and left.cuts != right.cuts:
        dim = right.cuts if prod(right.shape) > prod(left.shape) else left.cuts
    return Replicate() if dim is None else Shard(dim)


def _linear(x: Any, weight: Any, x_shape: Shape, weight_shape: Shape) -> Placement:
    x_dim, weight_dim, last = _dim(x), _dim(weight), len(x_shape) - 1
    if x_dim == last and weight_dim == 1:
        return Partial()
    return _product(
        _Factor(None if x_dim == last else x_dim, x_shape),
        _Factor(last if weight_dim == 0 else None, weight_shape),
    )


def _matmul(a: Any, b: Any, a_shape: Shape, b_shape: Shape) -> Placement:
    a_ndim, b_ndim = len(a_shape), len(b_shape)
    a_dim, b_dim = _dim(a), _dim(b)
    a_sum, b_sum = a_ndim - 1, max(b_ndim - 2, 0)
    if a_dim == a_sum and b_dim == b_sum:
        return Partial()
    # A dim of size 1 is spread over the other factor's; the sums of a vector leave no dim.
    if a_dim is not None and (a_dim == a_sum or a_shape[a_dim] == 1):
        a_dim = None
    if b_dim is not None and (b_dim == b_sum or b_shape[b_dim] == 1):
        b_dim = None
    if a_dim is not None and b_ndim > 1:
        a_dim += max(a_ndim, b_ndim) - a_ndim
    if b_dim is not None:
        b_dim += max(a_ndim, b_ndim) - b_ndim if a_ndim > 1 else -(b_dim > b_sum)
    return _product(_Factor(a_dim, a_shape), _Factor(b_dim, b_shape))


def _weight_grad(grad: Any, x: Any, grad_shape: Shape, x_shape: Shape) -> Placement:
    grad_dim, x_dim, last = _dim(grad), _dim(x), len(x_shape) - 1
    if grad_dim is not None and grad_dim == x_dim and grad_dim < last:
        return Partial()
    return _product(
        _Factor(0 if grad_dim == last else None, grad_shape),
        _Factor(1 if x_dim == last else None, x_shape),
    )


def _attention(q: Any, k: Any, v: Any, q_shape: Shape, *_: Shape) -> Placement:
    ndim = len(q_shape)
    q_dim, k_dim, v_dim = _dim(q), _dim(k), _dim(v)
    if q_dim is not None and q_dim == k_dim == v_dim and q_dim < ndim - 2:
        return Shard(q_dim)
    if q_dim == ndim - 2 and k_dim is None and v_dim is None:
        return Shard(ndim - 2)
    return Replicate()


def _per_axis(rule: Callable[..., Placement], tensors: int) -> Callable[[int, Any], Any]:
    def placements(num_axes: int, args: Any) -> tuple[Placement, ...]:
        given = [args[i] for i in range(tensors)]
        shapes = [g[1] for g in given]
        return tuple(rule(*(g[0][axis] for g in given), *shapes) for axis in range(num_axes))

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
