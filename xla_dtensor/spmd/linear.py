"""nn.Linear as one einsum, so that sharded batch and sequence dims are never flattened together.

On the JAX runtime every linear is whole already, and the patch changes nothing there. On torch_xla
an ``nn.Linear`` flattens all dims but the last, and with them their shardings: patch the module
with :func:`apply_xla_patch_to_nn_linear`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from xla_dtensor.argument_types import argument_types
from xla_dtensor.dtensor import DTensor
from xla_dtensor.errors import ArgumentTypeError
from xla_dtensor.propagation import legal_placements, propagate
from xla_dtensor.runtimes import whole_ops as whole_ops  # defines torch.ops.xla_dtensor
from xla_dtensor.runtimes.registry import get_runtime
from xla_dtensor.runtimes.whole_autograd import OneResult

__all__ = [
    "EinsumLinear",
    "XLAPatchedLinear",
    "apply_xla_patch_to_nn_linear",
    "xla_patched_nn_linear_forward",
]

_linear = torch.ops.aten.linear.default
_weight_grad = torch.ops.xla_dtensor.linear_weight_grad.default


class XLAPatchedLinear(OneResult):
    """``input @ weight.T + bias``, forward and backward, without flattening any dim.

    Takes DTensors or the runtime's plain tensors: ``XLAPatchedLinear.apply(input, weight, bias)``.
    Under autocast it computes in autocast's dtype, as ``nn.Linear`` does.
    """

    @staticmethod
    def forward(ctx: Any, input: Any, weight: Any, bias: Any = None) -> Any:
        """Compute the output."""
        ctx.dtypes = tuple(None if t is None else t.dtype for t in (input, weight, bias))
        given = [_autocast(t) for t in (input, weight, bias)]
        ctx.save_for_backward(*given[:2])
        return _whole(_linear, *given)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        """Compute the gradients that are needed."""
        input, weight = ctx.saved_tensors
        if torch.is_grad_enabled():
            return _gradients_by_parts(ctx, grad, input, weight)
        to_input, to_weight, to_bias = (*ctx.needs_input_grad, False)[:3]
        grads = (
            _whole(_linear, grad, weight.mH, None) if to_input else None,
            _whole(_weight_grad, grad, input.conj()) if to_weight else None,
            grad.sum(list(range(grad.ndim - 1))) if to_bias and grad.ndim > 1 else None,
        )
        if to_bias and grad.ndim == 1:
            grads = (*grads[:2], grad)
        return tuple(
            g if g is None else g.to(dtype) for g, dtype in zip(grads, ctx.dtypes, strict=True)
        )


def _gradients_by_parts(ctx: Any, grad: Any, input: Any, weight: Any) -> Any:
    """The gradients in ops that can be differentiated again."""
    rows, outputs = input.conj().reshape(-1, input.shape[-1]), grad.reshape(-1, grad.shape[-1])
    found = (torch.matmul(grad, weight.conj()), torch.matmul(outputs.mT, rows), outputs.sum(0))
    needed = zip(found, ctx.dtypes, ctx.needs_input_grad, strict=False)
    return tuple(value.to(dtype) if wanted else None for value, dtype, wanted in needed)


def _autocast(tensor: Any) -> Any:
    if tensor is None or not torch.is_autocast_enabled(tensor.device.type):
        return tensor
    return tensor.to(torch.get_autocast_dtype(tensor.device.type))


def _whole(func: Any, *args: Any) -> Any:
    """Run a whole op below autograd, on DTensors or on plain tensors of the runtime."""
    runtime = get_runtime()
    first = next((t for t in args if isinstance(t, DTensor)), None)
    payloads = tuple(t._local_tensor if isinstance(t, DTensor) else t for t in args)
    if not any(isinstance(t, torch.Tensor) and runtime.is_payload(t) for t in payloads):
        raise ArgumentTypeError(
            f"XLAPatchedLinear was called with tensors of shapes "
            f"{[tuple(t.shape) for t in args if t is not None]} on the host. It keeps shardings, "
            "and these have none. Use torch.nn.functional.linear, or mark_sharding first."
        )
    result = runtime.run_op(func, payloads, {})
    if first is None:
        return runtime.to_plain(result)
    mesh = first._spec.mesh
    placements = propagate(func, args, {}, mesh)
    return type(first)._wrapping(result, mesh, legal_placements(placements, result.ndim, mesh))


def xla_patched_nn_linear_forward(m: nn.Linear, input: torch.Tensor) -> torch.Tensor:
    """Run a linear layer through :class:`XLAPatchedLinear`."""
    result: Any = XLAPatchedLinear.apply(input, m.weight, m.bias)
    return result


@argument_types
class EinsumLinear(nn.Linear):
    """An ``nn.Linear`` that runs through :class:`XLAPatchedLinear`."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return ``input @ weight.T + bias``."""
        return xla_patched_nn_linear_forward(self, input)


@argument_types
def apply_xla_patch_to_nn_linear(module: nn.Module) -> nn.Module:
    """Make every ``nn.Linear`` below a module an :class:`EinsumLinear`, in place.

    Args:
        module: The module. Its layers' parameters stay the same objects.

    Returns:
        The same module.

    Example:
        >>> apply_xla_patch_to_nn_linear(nn.Sequential(nn.Linear(2, 3)))
        Sequential(
          (0): EinsumLinear(in_features=2, out_features=3, bias=True)
        )
    """
    for child in module.modules():
        if type(child) is nn.Linear:
            child.__class__ = EinsumLinear
    return module
