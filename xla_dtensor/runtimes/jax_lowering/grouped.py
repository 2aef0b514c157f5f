"""Products of groups of rows, each with a matrix of its own: what a mixture of experts computes.

``_grouped_mm`` takes the ends of the groups along the one dim that is cut into them, which differs
by the ranks of its arguments. With G groups whose ends are ``offs`` (the last end may come before
the dim does; what lies behind it is zero here, and undefined in torch)::

    a (M, K)     b (G, K, N)   groups of rows of a           (M, N)       the forward
    a (G, M, K)  b (K, N)      groups of columns of b        (M, N)
    a (M, K)     b (K, N)      groups of the contracted dim  (G, M, N)    the weights' gradient
    a (G, M, K)  b (G, K, N)   none, a batched product       (G, M, N)
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import torch
from jax import lax

from xla_dtensor.runtimes.jax_convert import jax_dtype
from xla_dtensor.runtimes.jax_lowering.matmul import precision
from xla_dtensor.runtimes.jax_lowering.table import lower

__all__: list[str] = []

_ROWS = lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), (0,), (0,))
_CONTRACTED = lax.RaggedDotDimensionNumbers((((1,), (0,)), ((), ())), (1,), ())


@lower(torch.ops.aten._grouped_mm.default)
def _grouped_mm(
    a: Any, b: Any, offs: Any = None, bias: Any = None, out_dtype: torch.dtype | None = None
) -> Any:
    if bias is not None:
        raise NotImplementedError("a grouped product with a bias")
    dtype = a.dtype if out_dtype is None else jax_dtype(out_dtype)
    return _grouped_product(a, b, offs).astype(dtype)


def _grouped_product(a: Any, b: Any, offs: Any) -> Any:
    wide = jnp.promote_types(a.dtype, jnp.float32)
    options: dict[str, Any] = {"precision": precision(), "preferred_element_type": wide}
    if a.ndim == 3 and b.ndim == 3:
        return jnp.einsum("gmk,gkn->gmn", a, b, **options)
    if a.ndim == 3:  # Groups of columns are groups of rows of the transposed product.
        return _grouped_product(b.mT, a.mT, offs).mT
    sizes = jnp.diff(offs, prepend=jnp.zeros((), offs.dtype)).astype(jnp.int32)
    numbers = _ROWS if b.ndim == 3 else _CONTRACTED
    return lax.ragged_dot_general(a, b, sizes, numbers, **options)
