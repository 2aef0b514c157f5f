"""Backward passes that start at LocalViews.

``backward()`` and ``torch.autograd.grad`` take tensors to find them in the graph, where stand-ins
for them are not. And what a checkpoint computes again inside of them has to meet LocalView's
``__torch_function__``, so they are not called below it: LocalViews are named by their places in the
graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from xla_dtensor.local_spread import as_gradient
from xla_dtensor.per_device import PerDeviceTensor

__all__ = ["BACKWARD_PASSES", "run_backward"]

# Their arguments, the outputs first.
BACKWARD_PASSES: Mapping[Any, tuple[str, ...]] = {
    torch.Tensor.backward: ("self", "gradient", "retain_graph", "create_graph", "inputs"),
    torch.autograd.grad: (
        *("outputs", "inputs", "grad_outputs", "retain_graph", "create_graph"),
        *("only_inputs", "allow_unused", "is_grads_batched", "materialize_grads"),
    ),
}


def run_backward(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run ``Tensor.backward`` or ``torch.autograd.grad`` with LocalViews among the arguments.

    Args:
        func: Which of them.
        args: Its arguments. Plain gradients of views are equal on all devices.
        kwargs: Its keyword arguments.
    """
    given: dict[str, Any] = dict(zip(BACKWARD_PASSES[func], args, strict=False)) | dict(kwargs)
    if func is torch.Tensor.backward:
        output, grad = given.pop("self"), given.pop("gradient", None)
        grad = None if grad is None else as_gradient(grad, output)
        return torch.autograd.backward(output, grad, **given)
    outputs, inputs = _sequence(given.pop("outputs")), _sequence(given.pop("inputs"))
    grads: Any = given.pop("grad_outputs", None)
    grads = [None] * len(outputs) if grads is None else _sequence(grads)
    if given.pop("materialize_grads", False):
        given["allow_unused"] = True
        found = _grad(outputs, inputs, grads, given)
        pairs = zip(found, inputs, strict=True)
        return tuple(torch.zeros_like(i) if g is None else g for g, i in pairs)
    return _grad(outputs, inputs, grads, given)


def _grad(outputs: Sequence[Any], inputs: Sequence[Any], grads: Sequence[Any], given: Any) -> Any:
    pairs = list(zip(grads, outputs, strict=True))
    grads = [None if grad is None else as_gradient(grad, output) for grad, output in pairs]
    # torch makes the gradient of a scalar only where it is given the tensor.
    grads = [
        torch.ones_like(output) if grad is None and output.numel() == 1 else grad
        for grad, (_, output) in zip(grads, pairs, strict=True)
    ]
    return torch.autograd.grad(
        [_edge(output) for output in outputs], [_edge(each) for each in inputs], grads, **given
    )


def _edge(tensor: Any) -> Any:
    if not isinstance(tensor, PerDeviceTensor) or not tensor.requires_grad:
        return tensor
    with torch._C.DisableTorchFunctionSubclass():
        return get_gradient_edge(tensor)


def _sequence(value: Any) -> Sequence[Any]:
    return (value,) if isinstance(value, torch.Tensor) else tuple(value)
