"""Products, as one dot over exactly the contracted dims.

torch's composite kernels flatten the leading dims of ``linear`` and ``matmul`` into one; where two
of them are sharded, XLA has to gather to do so. Here batch, sequence and head dims stay apart in
the forward and in the backward.

Below the products are what is made of them: `_trilinear`, products of groups of rows, the linear
loss, and distances between rows.

Precision follows ``torch.set_float32_matmul_precision``: "highest" is float32 throughout, also on
TPUs, where XLA's default would be one bfloat16 pass.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from xla_dtensor.core.errors import UnsupportedOpError
from xla_dtensor.runtimes.jax.arrays.values import counted_scan, jax_dtype
from xla_dtensor.runtimes.jax.lower.random import as_one
from xla_dtensor.runtimes.jax.lower.table import lower
from xla_dtensor.runtimes.whole_ops import linear_loss, linear_loss_backward

__all__ = ["precision"]

aten = torch.ops.aten


# ------------------------------------------- Products, as one dot over exactly the contracted dims

library = torch.ops.xla_dtensor

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


@lower(aten.mm.default, aten.bmm.default, aten.mv.default, aten.dot.default, aten.matmul.default)
def _matmul(a: Any, b: Any) -> Any:
    _check_dtypes(a, b)
    if a.dtype.kind in "biu":
        return jnp.matmul(a, b).astype(a.dtype)
    return jnp.matmul(a, b, precision=precision())


@lower(aten._int_mm.default)
def _int_matmul(a: Any, b: Any) -> Any:
    return jnp.matmul(a, b, preferred_element_type=jnp.int32)


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
        product, bias = (
            x.astype(jnp.float32) if x.dtype in (jnp.bfloat16, jnp.float16) else x
            for x in (product, bias)
        )
    product = product if _is_number(alpha, 1) else product * alpha
    if _is_number(beta, 0):
        return product.astype(dtype)
    return (product + (bias if _is_number(beta, 1) else bias * beta)).astype(dtype)


def _is_number(scalar: Any, number: int) -> bool:
    return isinstance(scalar, (int, float)) and scalar == number


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


@lower(library.linear_weight_grad.default)
def _linear_weight_grad(grad: Any, x: Any) -> Any:
    leading = tuple(range(x.ndim - 1))
    return lax.dot_general(grad, x, ((leading, leading), ((), ())), precision=precision())


# ------------------------------------- _trilinear, the product behind torch.nn.functional.bilinear


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
    output_dims = [dim for dim in range(ndim) if dim not in sumdim]
    return jnp.einsum(*factors, output_dims, precision=precision())


# --------------------------------------- Products of groups of rows, each with a matrix of its own
#
# What a mixture of experts computes.
#
# ``_grouped_mm`` takes the ends of the groups along the one dim that is cut into them, which
# differs by the ranks of its arguments. With G groups whose ends are ``offs`` (the last end may
# come before the dim does; what lies behind it is zero here, and undefined in torch)::
#
#     a (M, K)     b (G, K, N)   groups of rows of a           (M, N)       the forward
#     a (G, M, K)  b (K, N)      groups of columns of b        (M, N)
#     a (M, K)     b (K, N)      groups of the contracted dim  (G, M, N)    the weights' gradient
#     a (G, M, K)  b (G, K, N)   none, a batched product       (G, M, N)

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


# -------------------------------------------------------------------------------------- Linear loss
#
# Cross entropy of a linear layer's outputs, some columns of the vocabulary at a time.
#
# Chunk j of n has every n-th row of the weight, from the j-th on. Rows that lie next to each other
# go to different chunks, so each chunk is cut over the devices as the whole weight is::
#
#     weight [v, d]  ->  [v / n, n, d]          v / n keeps the cuts of v
#     chunk j        =   [:, j]                 rows j, j + n, j + 2 n, ...
#
# One chunk's logits exist at a time, in the forward and again in the backward. Tokens keep their
# dims and their cuts.


class _Layer(NamedTuple):
    """A linear layer in chunks.

    Args:
        weight: (rows, chunks, features).
        bias: (rows, chunks), or None.
        classes: Number of rows of the weight, those added to fill the last chunks left out.
    """

    weight: Any
    bias: Any
    classes: int

    @classmethod
    def of(cls, weight: Any, bias: Any, chunks: int) -> _Layer:
        classes, features = weight.shape
        missing = -classes % chunks
        if missing:
            weight = jnp.pad(weight, ((0, missing), (0, 0)))
            bias = None if bias is None else jnp.pad(bias, (0, missing))
        rows = (classes + missing) // chunks
        return cls(
            weight.reshape(rows, chunks, features),
            None if bias is None else bias.reshape(rows, chunks),
            classes,
        )

    def chunk(self, index: Any) -> tuple[Any, Any]:
        """Return the weight's rows of a chunk, and which classes they are."""
        weight = lax.dynamic_index_in_dim(self.weight, index, axis=1, keepdims=False)
        return weight, jnp.arange(self.weight.shape[0]) * self.weight.shape[1] + index

    def logits(self, x: Any, weight: Any, index: Any, classes: Any) -> Any:
        """Return (..., rows of the chunk); what only fills up is -inf."""
        wide = jnp.promote_types(x.dtype, jnp.float32)
        logits = _product("...d,vd->...v", x, weight, wide)
        if self.bias is not None:
            logits = logits + lax.dynamic_index_in_dim(self.bias, index, axis=1, keepdims=False)
        if self.weight.shape[0] * self.weight.shape[1] == self.classes:
            return logits
        return jnp.where(classes < self.classes, logits, -jnp.inf)


def _product(equation: str, a: Any, b: Any, wide: Any) -> Any:
    return jnp.einsum(equation, a, b, precision=precision(), preferred_element_type=wide)


@lower(linear_loss)
def _linear_loss(
    x: Any, weight: Any, target: Any, bias: Any, ignore_index: int, smoothing: float, chunks: int
) -> tuple[Any, Any]:
    layer = _Layer.of(weight, bias, chunks)
    wide = jnp.promote_types(x.dtype, jnp.float32)

    def body(state: Any, index: Any) -> Any:
        largest, total, picked, summed = state
        rows, classes = layer.chunk(index)
        logits = layer.logits(x, rows, index, classes)
        maximum = jnp.maximum(largest, logits.max(-1))
        base = jnp.where(jnp.isneginf(maximum), 0, maximum)
        total = total * jnp.exp(largest - base) + jnp.exp(logits - base[..., None]).sum(-1)
        is_target = classes == target[..., None]
        picked = picked + jnp.where(is_target, logits, 0).sum(-1)
        summed = summed + jnp.where(classes < layer.classes, logits, 0).sum(-1)
        return (maximum, total, picked, summed), None

    zeros = jnp.zeros(x.shape[:-1], wide)
    start = (jnp.full(x.shape[:-1], -jnp.inf, wide), zeros, zeros, zeros)
    indices = jnp.arange(chunks, dtype=jnp.int32)
    (largest, total, picked, summed), _ = counted_scan(body, start, indices)
    log_sum = largest + jnp.log(total)
    loss = log_sum - (1 - smoothing) * picked
    if smoothing:
        loss = loss - smoothing / layer.classes * summed
    return jnp.where(target == ignore_index, 0, loss).astype(wide), log_sum


@lower(linear_loss_backward)
def _linear_loss_backward(
    grad: Any,
    x: Any,
    weight: Any,
    target: Any,
    bias: Any,
    log_sum: Any,
    ignore_index: int,
    smoothing: float,
    chunks: int,
) -> tuple[Any, Any, Any]:
    layer = _Layer.of(weight, bias, chunks)
    wide = log_sum.dtype
    grad = jnp.where(target == ignore_index, 0, grad).astype(wide)

    def body(grad_x: Any, index: Any) -> Any:
        rows, classes = layer.chunk(index)
        weights = jnp.exp(layer.logits(x, rows, index, classes) - log_sum[..., None])
        target_weights = (1 - smoothing) * (classes == target[..., None])
        if smoothing:
            target_weights = target_weights + smoothing / layer.classes * (classes < layer.classes)
        of_logits = grad[..., None] * (weights - target_weights)
        narrow = of_logits.astype(x.dtype)
        grad_x = grad_x + _product("...v,vd->...d", narrow, rows, wide)
        of_rows = _product("...v,...d->vd", narrow, x, wide).astype(weight.dtype)
        of_bias = of_logits.sum(list(range(x.ndim - 1))).astype(weight.dtype)
        return grad_x, (of_rows, of_bias)

    start = jnp.zeros(x.shape, wide)
    grad_x, (of_weight, of_bias) = counted_scan(body, start, jnp.arange(chunks, dtype=jnp.int32))
    of_weight = jnp.moveaxis(of_weight, 0, 1).reshape(-1, weight.shape[1])[: layer.classes]
    return grad_x.astype(x.dtype), of_weight, of_bias.T.reshape(-1)[: layer.classes]


# ---------------------------------------------------------- Distances between the rows of matrices


def _norm(difference: Any, p: float) -> Any:
    size = jnp.abs(difference)
    if p == 0:
        return jnp.sum(size != 0, axis=-1).astype(size.dtype)
    if p == 1:
        return jnp.sum(size, axis=-1)
    if p == 2:
        return jnp.sqrt(jnp.sum(size * size, axis=-1))
    if math.isinf(p):
        return jnp.max(size, axis=-1, initial=0)
    return jnp.sum(size**p, axis=-1) ** (1 / p)


def _norm_backward(grad: Any, difference: Any, p: float, norm: Any) -> Any:
    """The gradient of each element of a difference; none where torch has none, at a norm of 0."""
    grad, norm = grad[..., None], norm[..., None]
    size, sign = jnp.abs(difference), jnp.sign(difference)
    if p == 0:
        return jnp.zeros_like(difference)
    if p == 1:
        return grad * sign
    if math.isinf(p):
        return grad * sign * (size == norm)
    safe = jnp.where(norm == 0, 1, norm)
    if p == 2:
        return jnp.where(norm == 0, 0, grad * difference / safe)
    power = jnp.where(size == 0, 1, size) ** (p - 1)
    power = jnp.where(size == 0, 0, power)
    return jnp.where(norm == 0, 0, grad * sign * power / safe ** (p - 1))


def _differences(x1: Any, x2: Any) -> Any:
    return x1[..., :, None, :] - x2[..., None, :, :]


@lower(aten._cdist_forward.default)
@as_one
def _cdist(x1: Any, x2: Any, p: float, compute_mode: int | None) -> Any:
    return _norm(_differences(x1, x2), p)


@lower(aten._cdist_backward.default)
@as_one
def _cdist_backward(grad: Any, x1: Any, x2: Any, p: float, cdist: Any) -> Any:
    # One matrix per pair of matrices; torch sums those of a matrix that stands in several.
    return jnp.sum(_norm_backward(grad, _differences(x1, x2), p, cdist), axis=-2)


def _pairs(count: int) -> Any:
    """The rows of each pair, and for two rows their pair (any one for a row with itself)."""
    rows, columns = np.triu_indices(count, 1)
    pair = np.zeros((count, count), np.int64)
    pair[rows, columns] = pair[columns, rows] = np.arange(len(rows))
    return rows, columns, pair


@lower(aten._pdist_forward.default)
@as_one
def _pdist(x: Any, p: float = 2.0) -> Any:
    rows, columns, _ = _pairs(x.shape[0])
    return _norm(jnp.take(x, rows, axis=0) - jnp.take(x, columns, axis=0), p)


@lower(aten._pdist_backward.default)
@as_one
def _pdist_backward(grad: Any, x: Any, p: float, pdist: Any) -> Any:
    if x.shape[0] < 2 or not x.size:
        return jnp.zeros_like(x)
    _, _, pair = _pairs(x.shape[0])
    off_diagonal = ~np.eye(x.shape[0], dtype=bool)
    full_grad, full = (jnp.where(off_diagonal, jnp.take(v, pair), 0) for v in (grad, pdist))
    return jnp.sum(_norm_backward(full_grad, _differences(x, x), p, full), axis=-2)
