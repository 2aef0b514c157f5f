"""What an op's result is compared with lies in memory once, in a compiled step.

PyTorch finds the gradient of a largest element by comparing::

    top = x.amax(1, keepdim=True)        x = a * b + c, computed in the step
    grad_x = grad * (x == top)           every element that is the largest

XLA may compute `x` twice, once fused into the reduction and once into the comparison, and round
a * b in one of them only. Then no element is equal to the largest, and the gradient is zero or NaN,
in silence. Such an op reads its operand through an ``optimization_barrier``, and so does whatever
reads the operand later.

XLA:CPU of JAX before 0.11.2 drops barriers before it fuses, and stays wrong.

Invariant: values do not change, and neither do storages that are older than the step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import torch
from jax import lax

from xla_dtensor.runtimes.jax_tensor import JaxTensor, Storage
from xla_dtensor.runtimes.jax_trace import Trace, is_tracer

__all__ = ["COMPARED", "read_once"]

aten = torch.ops.aten
_NORMS = (aten.linalg_vector_norm.default, aten._cdist_forward.default, aten._pdist_forward.default)
COMPARED = frozenset(
    {
        *(aten.amax.default, aten.amin.default, aten.aminmax.default),
        *(aten.max.default, aten.min.default, aten.median.default, aten.nanmedian.default),
        *(aten.scatter_reduce.two, aten.index_reduce.default, *_NORMS),
    }
)
"""Ops whose gradient PyTorch finds by comparing their operands with their result."""


def read_once(trace: Trace, func: Any, args: Sequence[Any]) -> None:
    """Let tensors that a step computes be computed once, for all that reads them from now on.

    Args:
        trace: The step's.
        func: One of `COMPARED`. Of the norms only infinite ones compare.
        args: Its arguments, JaxTensors among them.
    """
    if func in _NORMS and not any(isinstance(n, float) and math.isinf(n) for n in args):
        return
    for value in args:
        if isinstance(value, JaxTensor) and trace.owns(value._storage):
            _settle(value._storage)


def _settle(storage: Storage) -> None:
    array = storage.array
    if is_tracer(array) and jnp.issubdtype(array.dtype, jnp.inexact):
        storage.array = lax.optimization_barrier(array)
