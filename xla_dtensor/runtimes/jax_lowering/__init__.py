"""Lowerings: aten op -> function on JAX arrays, grouped by kind of op.

A lowering takes what the aten op takes, arrays in place of tensors, and returns arrays. It may
promote dtypes as JAX does; the caller casts the result to the dtype torch promises. What it must
not do is flatten dims: a reshape that merges a sharded dim with another makes XLA gather.

Ops without a lowering here are decomposed by torch into ops that have one.
"""

from __future__ import annotations

from typing import Any

from xla_dtensor.runtimes.jax_lowering import (
    adaptive,
    assertions,
    attention,
    attention_lean,
    batch_norm,
    bessel,
    bilinear,
    convolution,
    counting,
    creation,
    ctc,
    distances,
    embedding_bag,
    factorizations,
    fft,
    grid,
    group_norm,
    grouped,
    host_shapes,
    indexing,
    linear_loss,
    losses,
    matmul,
    normalization,
    padding,
    pointwise,
    polynomials,
    pooling,
    random,
    reduction,
    resize,
    scatter,
    segments,
    shape,
    shrinking,
    solving,
    sorting,
    special,
    spectral,
)
from xla_dtensor.runtimes.jax_lowering.table import TABLE, Lowering

__all__ = ["find_lowering"]

# Imported for what they put into the table.
_MODULES = (
    adaptive,
    assertions,
    attention,
    attention_lean,
    batch_norm,
    bessel,
    bilinear,
    convolution,
    counting,
    creation,
    ctc,
    distances,
    embedding_bag,
    factorizations,
    fft,
    grid,
    grouped,
    group_norm,
    host_shapes,
    indexing,
    linear_loss,
    losses,
    matmul,
    normalization,
    padding,
    pointwise,
    polynomials,
    pooling,
    random,
    reduction,
    resize,
    scatter,
    segments,
    shape,
    shrinking,
    solving,
    sorting,
    special,
    spectral,
)


def find_lowering(func: Any) -> Lowering | None:
    """Return the lowering of an aten op, or None when it has to be decomposed."""
    return TABLE.get(func)
