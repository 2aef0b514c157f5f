"""Names for values, by which a loop of layers keeps some of them for its backward pass."""

from __future__ import annotations

from typing import Any

import torch

from xla_dtensor.errors import ArgumentTypeError
from xla_dtensor.runtimes.registry import get_runtime
from xla_dtensor.runtimes.whole_autograd import LinearResult

__all__ = ["checkpoint_name"]


def checkpoint_name(x: torch.Tensor, name: str) -> torch.Tensor:
    """Give a value in a block a name that ``scan_layers(..., remat="save:name")`` can keep.

    The values are `x`'s, and so is the gradient. Outside of :func:`xla_dtensor.scan_layers`, and on
    a runtime other than JAX's, it returns `x` itself.

    Args:
        x: A tensor.
        name: Its name; several values may have the same.

    Returns:
        A tensor of the same values.

    Raises:
        ArgumentTypeError: Not a tensor, or not a text without commas.

    Example:
        >>> checkpoint_name(torch.ones(2), "mlp").tolist()
        [1.0, 1.0]
    """
    if not isinstance(x, torch.Tensor) or not isinstance(name, str) or not name or "," in name:
        raise ArgumentTypeError(
            f"checkpoint_name was called with x of type={type(x).__name__}, name={name!r}. A name "
            "is a text without commas, and only tensors have one. Pass a tensor and a text."
        )
    payload = getattr(x, "_local_tensor", x)
    runtime = get_runtime() if type(payload) is not torch.Tensor else None
    if runtime is None or not runtime.has_loops or not runtime.is_payload(payload):
        return x
    return _Named.apply(x, name)  # pyright: ignore[reportReturnType]


class _Named(LinearResult):
    @staticmethod
    def forward(ctx: Any, x: Any, name: str) -> Any:
        payload = getattr(x, "_local_tensor", x)
        made = get_runtime().named(payload, name)
        return made if payload is x else x.rewrapped(made)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad, None
