"""Cholesky, QR and LU: a matrix as a product of triangular and orthogonal ones.

LAPACK reports a failure by a number per matrix, XLA by NaN. Where torch returns that number, it is
computed here. Outside of a compiled step an op that torch would let raise raises as well; inside of
one the result is NaN.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from jax.lax import linalg

from xla_dtensor.errors import UnsupportedOpError
from xla_dtensor.runtimes.jax_convert import jax_dtype
from xla_dtensor.runtimes.jax_lowering.table import lower
from xla_dtensor.runtimes.jax_placing import host_value
from xla_dtensor.runtimes.jax_trace import is_tracer

__all__ = ["adjoint", "lu_info", "permutation", "raise_if_failed"]

aten = torch.ops.aten


def adjoint(x: Any) -> Any:
    """Return the conjugate transpose of each matrix."""
    transposed = jnp.swapaxes(x, -1, -2)
    return jnp.conj(transposed) if x.dtype.kind == "c" else transposed


def raise_if_failed(info: Any, name: str, is_matrix: bool) -> None:
    """Raise torch's error of a failed factorization, if the value is there to be looked at.

    Args:
        info: One number per matrix; 0 where it went well.
        name: The function's name, for the text.
        is_matrix: The input was one matrix, not a batch.
    """
    if is_tracer(info):
        return
    numbers = torch.from_numpy(np.array(host_value(info))).int()
    aten._linalg_check_errors(numbers, name, is_matrix=is_matrix)


# ------------------------------------------------------------------ Cholesky


def _first_bad_minor(x: Any) -> Any:
    """Return, per matrix, the order of the first leading minor that is not positive; 0 for none."""

    def eliminate(k: Any, state: Any) -> Any:
        rest, info = state
        pivot = jnp.real(rest[..., k, k])
        is_good = pivot > 0
        info = jnp.where((info == 0) & ~is_good, k + 1, info)
        column = rest[..., :, k]
        scaled = jnp.conj(column) / jnp.where(is_good, pivot, 1).astype(x.dtype)[..., None]
        return rest - column[..., :, None] * scaled[..., None, :], info

    lower = jnp.tril(x)
    whole = lower + adjoint(jnp.tril(x, -1))
    info = jnp.zeros(x.shape[:-2], jnp.int32)
    return lax.fori_loop(0, x.shape[-1], eliminate, (whole, info))[1].astype(jnp.int32)


@lower(aten.linalg_cholesky_ex.default)
def _cholesky_ex(x: Any, *, upper: bool = False, check_errors: bool = False) -> Any:
    x = adjoint(x) if upper else x
    factor = linalg.cholesky(x, symmetrize_input=False)
    failed = jnp.any(jnp.isnan(factor), axis=(-2, -1))
    nothing = jnp.zeros(x.shape[:-2], jnp.int32)
    if not x.size:
        return factor, nothing
    minors = lax.cond(jnp.any(failed), _first_bad_minor, lambda _: nothing, x)
    info = jnp.where(failed, jnp.maximum(minors, 1), 0)
    if check_errors:
        raise_if_failed(info, "torch.linalg.cholesky_ex", x.ndim == 2)
    return jnp.triu(adjoint(factor)) if upper else jnp.tril(factor), info


def _cholesky(x: Any, upper: bool = False) -> Any:
    factor, info = _cholesky_ex(x, upper=upper)
    raise_if_failed(info, "cholesky", x.ndim == 2)
    return factor


if hasattr(aten, "cholesky"):  # torch.cholesky, which torch 2.15 no longer has
    lower(aten.cholesky.default)(_cholesky)


# ------------------------------------------------------------------ QR


@lower(aten.linalg_qr.default, wants_meta=True)
def _qr(x: Any, mode: str = "reduced", *, meta: Any) -> Any:
    q, r = linalg.qr(x, full_matrices=mode == "complete")
    return (jnp.zeros(meta[0].shape, x.dtype) if mode == "r" else q), r


@lower(aten.geqrf.default)
def _geqrf(x: Any) -> Any:
    # LAPACK's geqrf, transposed as NumPy has it.
    raw, taus = jnp.linalg.qr(x, mode="raw")
    return jnp.swapaxes(raw, -1, -2), taus


@lower(aten.linalg_householder_product.default)
def _householder_product(x: Any, tau: Any) -> Any:
    return linalg.householder_product(x, tau)


@lower(aten.ormqr.default)
def _ormqr(x: Any, tau: Any, other: Any, left: bool = True, transpose: bool = False) -> Any:
    return linalg.ormqr(x, tau, other, left=left, transpose=transpose)


# ------------------------------------------------------------------ LU


def permutation(pivots: Any, size: int) -> Any:
    """Return LAPACK's row exchanges, counted from 1, as the rows in their new order."""
    return linalg.lu_pivots_to_permutation(pivots.astype(jnp.int32) - 1, size)


def lu_info(factors: Any) -> Any:
    """Return, per matrix, which diagonal element of U is the first zero; 0 for none."""
    diagonal = jnp.diagonal(factors, axis1=-2, axis2=-1)
    if not diagonal.shape[-1]:
        return jnp.zeros(diagonal.shape[:-1], jnp.int32)
    is_zero = diagonal == 0
    return jnp.where(jnp.any(is_zero, -1), jnp.argmax(is_zero, -1) + 1, 0).astype(jnp.int32)


def _need_pivots(pivot: bool) -> None:
    if not pivot:
        raise UnsupportedOpError(
            "An LU factorization was asked for with pivot=False on the JAX runtime. XLA has only "
            "the one with row exchanges. Leave pivot=True."
        )


@lower(aten.linalg_lu_factor_ex.default)
def _lu_factor_ex(x: Any, *, pivot: bool = True, check_errors: bool = False) -> Any:
    _need_pivots(pivot)
    factors, pivots, _ = linalg.lu(x)
    info = lu_info(factors)
    if check_errors:
        raise_if_failed(info, "torch.linalg.lu_factor_ex", x.ndim == 2)
    return factors, pivots + 1, info


def _permutation_matrix(rows: Any, dtype: Any) -> Any:
    return jnp.swapaxes(jax.nn.one_hot(rows, rows.shape[-1], dtype=dtype), -1, -2)


def _triangles(factors: Any) -> tuple[Any, Any]:
    rank = min(factors.shape[-2:])
    below = jnp.tril(factors[..., :, :rank], -1)
    return below + jnp.eye(*below.shape[-2:], dtype=below.dtype), jnp.triu(factors[..., :rank, :])


@lower(aten.linalg_lu.default)
def _lu(x: Any, *, pivot: bool = True) -> Any:
    _need_pivots(pivot)
    factors, _, rows = linalg.lu(x)
    return (_permutation_matrix(rows, x.dtype), *_triangles(factors))


@lower(aten.lu_unpack.default, wants_meta=True)
def _lu_unpack(
    factors: Any, pivots: Any, unpack_data: bool = True, unpack_pivots: bool = True, *, meta: Any
) -> Any:
    nothing = [jnp.zeros(m.shape, jax_dtype(m.dtype)) for m in meta]
    matrix, triangles = nothing[0], tuple(nothing[1:])
    if unpack_pivots:
        matrix = _permutation_matrix(permutation(pivots, factors.shape[-2]), factors.dtype)
    return (matrix, *(_triangles(factors) if unpack_data else triangles))
