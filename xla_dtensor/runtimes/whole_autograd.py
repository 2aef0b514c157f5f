"""What the differentiable kernels of whole ops share, and one that has no name in aten.

A backward that is differentiated once more (``create_graph=True``) runs in grad mode, and has to be
written in ops that torch can differentiate. Kernels below autograd cannot be. So a backward asks::

    torch.is_grad_enabled()    False, as a rule: the fused kernel, below autograd
                               True: the same formula in differentiable ops

What has no such formula says so where the second derivative is asked for (`refuse_second`). torch's
``once_differentiable`` does not, if the gradient that comes in is a constant: it loses the rest.

In forward mode a Function that is linear in its first argument (`LinearResult`) moves the tangent
as it moves the value. The others ask `has_tangent` before, and take ops of torch that know their
derivative.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch.autograd import forward_ad

from xla_dtensor.errors import UnsupportedOpError

__all__ = [
    "Contract",
    "LinearResult",
    "OneResult",
    "below",
    "contract",
    "has_tangent",
    "refuse_second",
    "save",
    "saved",
]


class OneResult(torch.autograd.Function):
    """A Function with one result. If the gradient of that is undefined, so are those of its inputs.

    torch calls a gradient undefined that a Function gave as None; it stands for zeros. By default
    torch makes zeros of it before it calls a backward, and these are plain ones on no mesh.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "forward" in cls.__dict__:
            cls.forward = staticmethod(_keeps_undefined(cls.forward))
            cls.backward = staticmethod(_passes_undefined(cls.backward))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        """Refuse: the tangent of the result is not known."""
        raise UnsupportedOpError(
            f"A forward derivative (forward_ad, jvp) was asked for through "
            f"{ctx._forward_cls.__name__}, which knows its gradient alone. Take the derivative in "
            "reverse mode (torch.autograd.grad, backward), or write this part with ops of torch."
        )


class LinearResult(OneResult):
    """A Function that is linear in its first argument, and takes no other tensor."""

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        """Return the tangent of the result."""
        return ctx._forward_cls.apply(tangents[0], *ctx.others)


def has_tangent(*tensors: Any) -> bool:
    """Whether forward mode is on, and one of the tensors carries a tangent."""
    return forward_ad._current_level >= 0 and any(
        tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None
        for tensor in tensors
    )


def _keeps_undefined(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def run(ctx: Any, *args: Any) -> Any:
        ctx.set_materialize_grads(False)
        ctx.num_inputs = len(args)
        if issubclass(ctx._forward_cls, LinearResult):
            ctx.others = args[1:]
        return forward(ctx, *args)

    return run


def _passes_undefined(backward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(backward)
    def run(ctx: Any, grad: Any) -> Any:
        # Of a view that was written to PyTorch makes zeros without memory, which are plain ones.
        is_undefined = grad is None or grad._is_zerotensor()
        return (None,) * ctx.num_inputs if is_undefined else backward(ctx, grad)

    return run


def below(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Call an op below autograd."""
    with torch._C._AutoDispatchBelowAutograd():
        return func(*args, **kwargs)


def save(ctx: Any, *tensors: Any) -> None:
    """Save tensors for the backward, which reads them by `saved`."""
    # Under saved-tensor hooks (checkpoint), torch 2.9 loses the gradient hooks of a leaf that a
    # Function saves. A detached alias does, unless the backward is differentiated itself.
    hooks = torch._C._autograd  # pyright: ignore[reportAttributeAccessIssue]
    ctx.is_detached = False
    if hooks._top_saved_tensors_default_hooks(True) is not None:
        ctx.is_detached = any(t is not None and t.is_leaf and t.requires_grad for t in tensors)
        tensors = tuple(t.detach() if t is not None and t.is_leaf else t for t in tensors)
    ctx.save_for_backward(*tensors)


def saved(ctx: Any) -> Any:
    """The tensors that `save` has saved."""
    if torch.is_grad_enabled() and ctx.is_detached:
        raise UnsupportedOpError(
            "A second derivative was asked for (create_graph=True) of an op on a parameter inside "
            "of torch.utils.checkpoint. The parameter is saved there without its graph. Take the "
            "gradients of this part without checkpoint."
        )
    return ctx.saved_tensors


class _NoSecond(torch.autograd.Function):
    """Tensors as they are, whose derivative with respect to the inputs is refused."""

    @staticmethod
    def forward(ctx: Any, what: str, number: int, *tensors: Any) -> Any:
        ctx.what = what
        return tuple(tensor.view_as(tensor) for tensor in tensors[number:])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise UnsupportedOpError(
            f"A second derivative of {ctx.what} was asked for. Its backward is a program of its "
            "own that is not differentiated. Leave create_graph=True away, or write this part with "
            "ops of torch."
        )


def refuse_second(what: str, inputs: Sequence[Any], *gradients: Any) -> Any:
    """Return gradients that raise when they are differentiated: their derivative is not known.

    Args:
        what: What the backward is of, for the message.
        inputs: What the gradients depend on: the inputs of the forward.
        *gradients: What the backward has computed; None where it is not needed.
    """
    if not torch.is_grad_enabled():
        return gradients
    places = [i for i, gradient in enumerate(gradients) if gradient is not None]
    known = [tensor for tensor in inputs if tensor is not None and tensor.requires_grad]
    marked = _NoSecond.apply(what, len(known), *known, *(gradients[i] for i in places))
    results = [None] * len(gradients)
    for i, gradient in zip(places, marked, strict=True):  # pyright: ignore[reportArgumentType]
        results[i] = gradient
    return tuple(results)


class Contract(OneResult):
    """``...m,...n->mn``: the product of two tensors over all of their dims but the last."""

    @staticmethod
    def forward(ctx: Any, a: Any, b: Any) -> Any:
        """Compute the product."""
        save(ctx, a, b)
        return below(torch.ops.xla_dtensor.linear_weight_grad.default, a, b)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        """Compute the gradients that are needed."""
        a, b = saved(ctx)
        to_a, to_b = ctx.needs_input_grad
        grad_a = torch.matmul(b.conj(), grad.mT) if to_a else None
        grad_b = torch.matmul(a.conj(), grad) if to_b else None
        return grad_a, grad_b


def contract(a: Any, b: Any) -> Any:
    """`Contract`, recorded only where it is differentiated."""
    if has_tangent(a, b):
        return torch.matmul(a.flatten(0, -2).mT, b.flatten(0, -2))
    if torch.is_grad_enabled():
        return Contract.apply(a, b)
    return below(torch.ops.xla_dtensor.linear_weight_grad.default, a, b)
