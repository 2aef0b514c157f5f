"""Products, as one dot over exactly the contracted dims.

torch's composite kernels flatten the leading dims of ``linear`` and ``matmul`` into one; where two
of them are sharded, XLA has to gather to do so. Here batch, sequence and head dims stay apart in
the forward and in the backward.

Precision follows ``torch.set_float32_matmul_precision``: "highest" is float32 throughout, also on
TPUs, where XLA's default would be one bfloat16 pass.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import torch
from jax import lax

from xla_dtensor.errors import UnsupportedOpError
from xla_dtensor.runtimes import whole_ops as whole_ops  # defines torch.ops.xla_dtensor
from xla_dtensor.runtimes.jax_lowering.table import lower

__all__ = ["precision"]

aten = torch.ops.aten
whole = torch.ops.xla_dtensor

_PRECISION = {
    "highest": lax.Precision.HIGHEST,
    "high": lax.Precision.HIGH,
    "medium": lax.Precision.DEFAULT,
}


def precision() -> lax.Precision:
    """Return XLA's precision for torch's current float32 matmul precision."""
    return _PRECISION[torch.get_float32_matmul_precision()]


def _check_dtypes(a: Any, b: Any) -> None:
    if a.dtype != b.dtype:
        raise UnsupportedOpError(
            f"A product of tensors of {a.dtype} and {b.dtype} was asked for. PyTorch multiplies "
            "matrices of one dtype. Cast one of them."
        )


def _matmul(a: Any, b: Any) -> Any:
    _check_dtypes(a, b)
    if a.dtype.kind in "biu":
        return jnp.matmul(a, b).astype(a.dtype)
    return jnp.matmul(a, b, precision=precision())


@lower(aten.mm.default, aten.bmm.default, aten.mv.default, aten.dot.default, aten.matmul.default)
def _mm(a: Any, b: Any) -> Any:
    return _matmul(a, b)


@lower(aten.addmm.default, aten.baddbmm.default, aten.addmv.default)
def _addmm(bias: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    return _combined(bias, _matmul(a, b), beta, alpha)


def _combined(bias: Any, product: Any, beta: Any, alpha: Any) -> Any:
    """Return ``beta * bias + alpha * product``, rounded once."""
    dtype = product.dtype
    if dtype.kind in "biu":  # torch rounds the factors first, too
        alpha, beta = int(alpha), int(beta)
    if not (_is_number(alpha, 1) and _is_number(beta, 1)):
        # Only here: the product keeps its dtype where XLA sums it over devices.
        product, bias = (_widened(value) for value in (product, bias))
    product = product if _is_number(alpha, 1) else product * alpha
    if _is_number(beta, 0):
        return product.astype(dtype)
    return (product + (bias if _is_number(beta, 1) else bias * beta)).astype(dtype)


def _is_number(value: Any, number: int) -> bool:
    return isinstance(value, (int, float)) and value == number


def _widened(value: Any) -> Any:
    return value.astype(jnp.float32) if value.dtype in (jnp.bfloat16, jnp.float16) else value


@lower(aten.addbmm.default)
def _addbmm(bias: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    product = jnp.sum(_matmul(a, b), axis=0).astype(a.dtype)
    return _combined(bias, product, beta, alpha)


@lower(aten.linear.default)
def _linear(x: Any, weight: Any, bias: Any = None) -> Any:
    _check_dtypes(x, weight)
    y = lax.dot_general(
        x, weight, (((x.ndim - 1,), (weight.ndim - 1,)), ((), ())), precision=precision()
    )
    return y if bias is None else y + bias


@lower(whole.linear_weight_grad.default)
def _linear_weight_grad(grad: Any, x: Any) -> Any:
    leading = tuple(range(x.ndim - 1))
    return lax.dot_general(grad, x, ((leading, leading), ((), ())), precision=precision())
