"""Lowerings: aten op -> function on JAX arrays, grouped by kind of op.

A lowering takes what the aten op takes, arrays in place of tensors, and returns arrays. It may
promote dtypes as JAX does; the caller casts the result to the dtype torch promises. What it must
not do is flatten dims: a reshape that merges a sharded dim with another makes XLA gather.

Ops without a lowering here are decomposed by torch into ops that have one.
"""

from __future__ import annotations

from typing import Any

from xla_dtensor.runtimes.jax.lower import (
    attention,
    conv,
    host,
    index,
    linalg,
    matmul,
    norm,
    pointwise,
    random,
    reduce,
    special,
)
from xla_dtensor.runtimes.jax.lower.table import TABLE, Lowering

__all__ = ["find_lowering"]

# Imported for what they put into the table.
_MODULES = (
    attention,
    conv,
    host,
    index,
    linalg,
    matmul,
    norm,
    pointwise,
    random,
    reduce,
    special,
)


def find_lowering(func: Any) -> Lowering | None:
    """Return the lowering of an aten op, or None when it has to be decomposed."""
    return TABLE.get(func)
