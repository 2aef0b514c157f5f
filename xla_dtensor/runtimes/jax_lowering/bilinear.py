"""``_trilinear``, the product behind ``torch.nn.functional.bilinear``."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import torch

from xla_dtensor.runtimes.jax_lowering.matmul import precision
from xla_dtensor.runtimes.jax_lowering.table import lower

__all__: list[str] = []

aten = torch.ops.aten


@lower(aten._trilinear.default)
def _trilinear(
    i1: Any,
    i2: Any,
    i3: Any,
    expand1: Any,
    expand2: Any,
    expand3: Any,
    sumdim: Any,
    unroll_dim: int = 1,
) -> Any:
    """Sum the product of three tensors over dims; each lacks the dims it is expanded by."""
    factors: list[Any] = []
    ndim = i1.ndim + len(expand1)
    for factor, expanded in ((i1, expand1), (i2, expand2), (i3, expand3)):
        dims = [dim for dim in range(ndim) if dim not in expanded]
        factors += [factor, dims]
    kept = [dim for dim in range(ndim) if dim not in sumdim]
    return jnp.einsum(*factors, kept, precision=precision())
