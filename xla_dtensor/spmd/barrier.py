"""apply_backward_optimization_barrier: keep XLA from fusing a module's backward with others."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from xla_dtensor.dtensor import DTensor
from xla_dtensor.runtimes.registry import get_runtime

__all__ = ["apply_backward_optimization_barrier"]


def apply_backward_optimization_barrier(m: nn.Module) -> None:
    """Put a barrier behind the backward pass of a module.

    XLA then neither fuses nor moves work across it, so that the gradients of all layers are not
    held at once, waiting for one large reduction.

    Args:
        m: The module; a full backward hook is registered on it.
    """

    def barrier(module: nn.Module, grad_input: Any, grad_output: Any) -> None:
        runtime = get_runtime()
        grads = [p.grad for p in module.parameters() if p.grad is not None]
        tensors = [*grads, *(g for g in grad_input if isinstance(g, torch.Tensor))]
        payloads = [t._local_tensor if isinstance(t, DTensor) else t for t in tensors]
        payloads = [t for t in payloads if runtime.is_payload(t)]
        if payloads:
            runtime.barrier(payloads)

    m.register_full_backward_hook(barrier)
