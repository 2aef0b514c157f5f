"""The backward of the shrinking activations, which set what is near zero to zero."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import torch

from xla_dtensor.runtimes.jax_lowering.table import lower

__all__: list[str] = []

aten = torch.ops.aten


@lower(aten.hardshrink_backward.default, aten.softshrink_backward.default)
def _shrink_backward(grad: Any, x: Any, lambd: Any) -> Any:
    return jnp.where((x >= -lambd) & (x <= lambd), 0, grad)
