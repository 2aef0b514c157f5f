"""What the Functions of whole ops share: undefined gradients, second derivatives, tangents.

A backward that is differentiated once more (``create_graph=True``) runs in grad mode, and has to
be written in ops that torch can differentiate. Kernels below autograd cannot be. So a backward
asks::

    torch.is_grad_enabled()    False, as a rule: the fused kernel, below autograd
                               True: the same formula in differentiable ops

What has no such formula says so where the second derivative is asked for (`refuse_second`).
torch's ``once_differentiable`` does not, if the gradient that comes in is a constant: it loses
the rest.

In forward mode a Function that is linear in its first argument (`LinearResult`) moves the tangent
as it moves the value. The others ask `has_tangent` before, and take ops of torch that know their
derivative.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import wraps
from typing import Any

import torch
from torch.autograd import forward_ad

from xla_dtensor.core.errors import UnsupportedOpError

__all__ = ["LinearResult", "OneResult", "below", "has_tangent", "refuse_second", "save", "saved"]


class OneResult(torch.autograd.Function):
    """A Function with one result. If the gradient of that is undefined, so are those of its inputs.

    torch calls a gradient undefined that a Function gave as None; it stands for zeros. By default
    torch makes zeros of it before it calls a backward, and these are plain ones on no mesh.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "forward" not in cls.__dict__:
            return
        forward, backward = cls.forward, cls.backward

        @wraps(forward)
        def keep_undefined(ctx: Any, *args: Any) -> Any:
            ctx.set_materialize_grads(False)
            ctx.num_inputs = len(args)
            if issubclass(ctx._forward_cls, LinearResult):
                ctx.constants = args[1:]
            return forward(ctx, *args)

        @wraps(backward)
        def pass_undefined(ctx: Any, grad: Any) -> Any:
            # Of a view that was written to PyTorch makes zeros without memory: plain tensors.
            is_undefined = grad is None or grad._is_zerotensor()
            return (None,) * ctx.num_inputs if is_undefined else backward(ctx, grad)

        function: Any = cls
        function.forward = staticmethod(keep_undefined)
        function.backward = staticmethod(pass_undefined)

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
        return ctx._forward_cls.apply(tangents[0], *ctx.constants)


def has_tangent(*tensors: Any) -> bool:
    """Whether forward mode is on, and one of the tensors carries a tangent."""
    return forward_ad._current_level >= 0 and any(
        tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None
        for tensor in tensors
    )


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
    differentiable = [tensor for tensor in inputs if tensor is not None and tensor.requires_grad]
    refusing = _NoSecond.apply(
        what, len(differentiable), *differentiable, *(gradients[i] for i in places)
    )
    results = [None] * len(gradients)
    for i, gradient in zip(places, refusing, strict=True):  # pyright: ignore[reportArgumentType]
        results[i] = gradient
    return tuple(results)
