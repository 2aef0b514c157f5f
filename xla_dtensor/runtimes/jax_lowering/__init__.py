"""Lowerings: aten op -> function on JAX arrays, grouped by kind of op.

A lowering takes what the aten op takes, arrays in place of tensors, and returns arrays. It may
promote dtypes as JAX does; the caller casts the result to the dtype torch promises. What it must
not do is flatten dims: a reshape that merges a sharded dim with another makes XLA gather.

``find_lowering`` looks in our own table, then in torch's decompositions for ops that belong to
backward passes (by returning None, which lets the caller decompose), then in torchax's registry of
forward lowerings.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from xla_dtensor.runtimes.jax_lowering import (
    attention,
    creation,
    indexing,
    matmul,
    normalization,
    pointwise,
    random,
    reduction,
    shape,
)
from xla_dtensor.runtimes.jax_lowering.table import TABLE, Lowering

__all__ = ["find_lowering"]

_ = (
    attention,
    creation,
    indexing,
    matmul,
    normalization,
    pointwise,
    random,
    reduction,
    shape,
)


@lru_cache(maxsize=None)
def find_lowering(func: Any) -> Lowering | None:
    """Return the lowering of an aten op, or None when it has to be decomposed."""
    if func in TABLE:
        return TABLE[func]
    from torch._decomp import decomposition_table

    if "backward" in func._schema.name and func in decomposition_table:
        return None
    return _torchax_lowering(func) if func not in decomposition_table else None


def _torchax_lowering(func: Any) -> Lowering | None:
    registry = _torchax_registry()
    operator = registry.get(func) or registry.get(func.overloadpacket)
    if operator is None or not operator.is_jax_function or operator.needs_env:
        return None
    return Lowering(operator.func)


@lru_cache(maxsize=None)
def _torchax_registry() -> dict[Any, Any]:
    """torchax's table; empty where torchax is absent or does not know this torch (0.0.13 names an
    overload that torch 2.13 has removed, and fails to import)."""
    try:
        import torchax.ops.jaten  # noqa: F401  (fills the table)
        from torchax.ops.ops_registry import all_aten_ops
    except (ImportError, AttributeError):
        return {}
    return all_aten_ops
