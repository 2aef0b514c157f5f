"""Factorizations, solves, spectra and Fourier transforms.

LAPACK reports a failure by a number per matrix, XLA by NaN. Where torch returns that number, it is
computed here. Outside of a compiled step an op that torch would let raise raises as well; inside of
one the result is NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from jax.lax import linalg
from jax.scipy.linalg import expm

from xla_dtensor.core.errors import UnsupportedOpError
from xla_dtensor.runtimes.jax.arrays import values as jax_devices
from xla_dtensor.runtimes.jax.arrays.sharding import host_value
from xla_dtensor.runtimes.jax.arrays.trace import is_tracer
from xla_dtensor.runtimes.jax.arrays.values import jax_dtype
from xla_dtensor.runtimes.jax.lower.host import read_on_host
from xla_dtensor.runtimes.jax.lower.index import uncut
from xla_dtensor.runtimes.jax.lower.matmul import precision
from xla_dtensor.runtimes.jax.lower.table import lower

__all__ = ["raise_if_failed"]


# ----------------------------------------------------------------------------- Cholesky, QR and LU

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
        remainder, info = state
        pivot = jnp.real(remainder[..., k, k])
        is_good = pivot > 0
        info = jnp.where((info == 0) & ~is_good, k + 1, info)
        column = remainder[..., :, k]
        scaled = jnp.conj(column) / jnp.where(is_good, pivot, 1).astype(x.dtype)[..., None]
        return remainder - column[..., :, None] * scaled[..., None, :], info

    lower = jnp.tril(x)
    symmetric = lower + adjoint(jnp.tril(x, -1))
    info = jnp.zeros(x.shape[:-2], jnp.int32)
    return lax.fori_loop(0, x.shape[-1], eliminate, (symmetric, info))[1].astype(jnp.int32)


@lower(aten.linalg_cholesky_ex.default)
def _cholesky_ex(x: Any, *, upper: bool = False, check_errors: bool = False) -> Any:
    x = adjoint(x) if upper else x
    factor = linalg.cholesky(x, symmetrize_input=False)
    failed = jnp.any(jnp.isnan(factor), axis=(-2, -1))
    zeros = jnp.zeros(x.shape[:-2], jnp.int32)
    if not x.size:
        return factor, zeros
    minors = lax.cond(jnp.any(failed), _first_bad_minor, lambda _: zeros, x)
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
def _ormqr(x: Any, tau: Any, matrix: Any, left: bool = True, transpose: bool = False) -> Any:
    return linalg.ormqr(x, tau, matrix, left=left, transpose=transpose)


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
    lower = jnp.tril(factors[..., :, :rank], -1)
    lower = lower + jnp.eye(*lower.shape[-2:], dtype=lower.dtype)
    return lower, jnp.triu(factors[..., :rank, :])


@lower(aten.linalg_lu.default)
def _lu(x: Any, *, pivot: bool = True) -> Any:
    _need_pivots(pivot)
    factors, _, rows = linalg.lu(x)
    return (_permutation_matrix(rows, x.dtype), *_triangles(factors))


@lower(aten.lu_unpack.default, wants_meta=True)
def _lu_unpack(
    factors: Any, pivots: Any, unpack_data: bool = True, unpack_pivots: bool = True, *, meta: Any
) -> Any:
    zeros = [jnp.zeros(m.shape, jax_dtype(m.dtype)) for m in meta]
    matrix, triangles = zeros[0], tuple(zeros[1:])
    if unpack_pivots:
        matrix = _permutation_matrix(permutation(pivots, factors.shape[-2]), factors.dtype)
    return (matrix, *(_triangles(factors) if unpack_data else triangles))


# ----------------------------------------------------- Fourier transforms, one dim after the other
#
# Torch hands down what to scale by as a code: 0 for nothing, 1 for the root of the number of
# elements, 2 for their number.


def _scaled(x: Any, normalization: int, sizes: Sequence[int]) -> Any:
    if normalization == 0:
        return x
    count = math.prod(sizes)
    return x * (1 / math.sqrt(count) if normalization == 1 else 1 / count)


def _transformed(function: Callable[..., Any], x: Any, dim: int, **options: Any) -> Any:
    """Transform along one dim, which is whole on each device.

    On CPU the others are merged. XLA (jax 0.10 to 0.12) makes programs that fail when they run,
    because they hand the transform a transposed layout, of a batch that is cut in more than one
    dim, and of a matrix whose sharding it takes from what is computed of the spectrum.
    """
    x = jnp.moveaxis(x, dim, -1)
    batch = x.shape[:-1]
    if len(batch) > 1 and jax_devices.platform() == "cpu":
        x = x.reshape(-1, x.shape[-1])
    spectrum = uncut(function(uncut(x, x.ndim - 1), axis=-1, **options), x.ndim - 1)
    return jnp.moveaxis(spectrum.reshape(*batch, spectrum.shape[-1]), -1, dim)


def _along(x: Any, dims: Sequence[int], forward: bool) -> Any:
    # Each norm leaves its own direction unscaled.
    for dim in dims:
        x = (
            _transformed(jnp.fft.fft, x, dim, norm="backward")
            if forward
            else _transformed(jnp.fft.ifft, x, dim, norm="forward")
        )
    return x


@lower(aten._fft_c2c.default)
def _c2c(x: Any, dim: Any, normalization: int, forward: bool) -> Any:
    return _scaled(_along(x, dim, forward), normalization, [x.shape[d] for d in dim])


@lower(aten._fft_r2c.default)
def _r2c(x: Any, dim: Any, normalization: int, onesided: bool) -> Any:
    sizes = [x.shape[d] for d in dim]
    last = jnp.fft.rfft if onesided else jnp.fft.fft
    halved = _transformed(last, x, dim[-1], norm="backward")
    return _scaled(_along(halved, dim[:-1], forward=True), normalization, sizes)


@lower(aten._fft_c2r.default)
def _c2r(x: Any, dim: Any, normalization: int, last_dim_size: int) -> Any:
    sizes = [*(x.shape[d] for d in dim[:-1]), last_dim_size]
    x = _along(x, dim[:-1], forward=False)
    signal = _transformed(jnp.fft.irfft, x, dim[-1], n=last_dim_size, norm="forward")
    return _scaled(signal, normalization, sizes)


# ------------------------------------------------------------------------------------------ Solving
#
# Solve linear systems from a factorization, and what torch builds from that.


def _same_batch(*matrices: Any) -> list[Any]:
    batch = jnp.broadcast_shapes(*(m.shape[:-2] for m in matrices))
    return [jnp.broadcast_to(m, (*batch, *m.shape[-2:])) for m in matrices]


def _triangular(a: Any, b: Any, **options: Any) -> Any:
    a, b = _same_batch(a, b)
    if not a.size or not b.size:
        return jnp.zeros(b.shape, b.dtype)
    return linalg.triangular_solve(a, b, **options)


@lower(aten.linalg_solve_triangular.default)
def _solve_triangular(
    a: Any, b: Any, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> Any:
    return _triangular(a, b, left_side=left, lower=not upper, unit_diagonal=unitriangular)


@lower(aten.triangular_solve.default)
def _old_triangular_solve(
    b: Any, a: Any, upper: bool = True, transpose: bool = False, unitriangular: bool = False
) -> Any:
    a, b = _same_batch(a, b)
    solution = _triangular(
        a, b, left_side=True, lower=not upper, transpose_a=transpose, unit_diagonal=unitriangular
    )
    return solution, jnp.array(a, copy=True)


@lower(aten.cholesky_solve.default)
def _cholesky_solve(b: Any, factor: Any, upper: bool = False) -> Any:
    factor = adjoint(factor) if upper else factor
    half = _triangular(factor, b, left_side=True, lower=True)
    return _triangular(factor, half, left_side=True, lower=True, transpose_a=True, conjugate_a=True)


@lower(aten.cholesky_inverse.default)
def _cholesky_inverse(factor: Any, upper: bool = False) -> Any:
    identity = jnp.broadcast_to(jnp.eye(factor.shape[-1], dtype=factor.dtype), factor.shape)
    return _cholesky_solve(identity, factor, upper)


def _solve_by_lu(factors: Any, pivots: Any, b: Any, adjoint_of_a: bool) -> Any:
    factors, b = _same_batch(factors, b)
    rows = jnp.broadcast_to(permutation(pivots, b.shape[-2]), b.shape[:-1])[..., None]
    if not b.size:
        return b
    if not adjoint_of_a:
        b = jnp.take_along_axis(b, rows, axis=-2)
        half = _triangular(factors, b, left_side=True, lower=True, unit_diagonal=True)
        return _triangular(factors, half, left_side=True, lower=False)
    turned = {"left_side": True, "transpose_a": True, "conjugate_a": True}
    half = _triangular(factors, b, lower=False, **turned)
    solution = _triangular(factors, half, lower=True, unit_diagonal=True, **turned)
    return jnp.take_along_axis(solution, jnp.argsort(rows, axis=-2), axis=-2)


@lower(aten.linalg_lu_solve.default)
def _lu_solve(
    factors: Any, pivots: Any, b: Any, *, left: bool = True, adjoint: bool = False
) -> Any:
    if left:
        return _solve_by_lu(factors, pivots, b, adjoint)
    return _adjoint(_solve_by_lu(factors, pivots, _adjoint(b), not adjoint))


_adjoint = adjoint


@lower(aten.linalg_inv_ex.default)
def _inv_ex(x: Any, *, check_errors: bool = False) -> Any:
    factors, pivots, _ = linalg.lu(x)
    info = lu_info(factors)
    if check_errors:
        raise_if_failed(info, "torch.linalg.inv_ex", x.ndim == 2)
    identity = jnp.broadcast_to(jnp.eye(x.shape[-1], dtype=x.dtype), x.shape)
    return _solve_by_lu(factors, pivots + 1, identity, adjoint_of_a=False), info


# ----------------------------------------------------------------------------------------- Spectral
#
# Singular values, eigenvalues, and functions of a matrix that rest on them.


def _zeros_of(meta: Any) -> Any:
    return jnp.zeros(meta.shape, jax_dtype(meta.dtype))


def _product(a: Any, b: Any) -> Any:
    return jnp.matmul(a, b, precision=precision())


@lower(aten._linalg_svd.default, wants_meta=True)
def _svd(
    x: Any,
    full_matrices: bool = False,
    compute_uv: bool = True,
    *,
    driver: str | None = None,
    meta: Any,
) -> Any:
    if not compute_uv:
        return _zeros_of(meta[0]), linalg.svd(x, compute_uv=False), _zeros_of(meta[2])
    return linalg.svd(x, full_matrices=full_matrices)


@lower(aten._linalg_eigh.default, wants_meta=True)
def _eigh(x: Any, uplo: str = "L", compute_v: bool = True, *, meta: Any) -> Any:
    vectors, values = linalg.eigh(x, lower=uplo.upper() == "L", symmetrize_input=False)
    return values, (vectors if compute_v else _zeros_of(meta[1]))


def _need_cpu() -> None:
    if jax_devices.platform() != "cpu":
        raise UnsupportedOpError(
            "The eigenvalues of a general matrix were asked for on the JAX runtime, platform="
            f"{jax_devices.platform()}. XLA computes them on CPU only. Use torch.linalg.eigh if "
            "the matrix is symmetric, or move it to the host with .full_tensor().cpu()."
        )


@lower(aten.linalg_eig.default)
def _eig(x: Any) -> Any:
    _need_cpu()
    values, vectors = linalg.eig(x, compute_left_eigenvectors=False)
    return values, vectors


@lower(aten._linalg_eigvals.default)
def _eigvals(x: Any) -> Any:
    _need_cpu()
    return linalg.eig(x, compute_left_eigenvectors=False, compute_right_eigenvectors=False)[0]


# ------------------------------------------------------------------ built from these


def _tolerance(x: Any, atol: Any, rtol: Any, largest: Any) -> Any:
    """Return the size, per matrix, below which torch takes a singular value for zero."""
    if rtol is None:
        rtol = jnp.asarray(jnp.finfo(x.dtype).eps * max(x.shape[-2:]), largest.dtype)
        rtol = rtol if atol is None else jnp.where(jnp.asarray(atol) > 0, 0, rtol)
    relative = jnp.asarray(rtol)[..., None] * largest
    return relative if atol is None else jnp.maximum(jnp.asarray(atol)[..., None], relative)


def _inverted(values: Any, tolerance: Any) -> Any:
    is_kept = jnp.abs(values) > tolerance
    return jnp.where(is_kept, 1 / jnp.where(is_kept, values, 1), 0)


@lower(aten.linalg_pinv.atol_rtol_tensor)
def _pinv(x: Any, *, atol: Any = None, rtol: Any = None, hermitian: bool = False) -> Any:
    if not x.size:
        return jnp.zeros((*x.shape[:-2], x.shape[-1], x.shape[-2]), x.dtype)
    if hermitian:
        vectors, values = linalg.eigh(x, symmetrize_input=False)
        largest = jnp.max(jnp.abs(values), axis=-1, keepdims=True)
        v, uh = vectors, adjoint(vectors)
    else:
        u, values, vh = linalg.svd(x, full_matrices=False)
        largest = values[..., :1]
        v, uh = adjoint(vh), adjoint(u)
    inverted = _inverted(values, _tolerance(x, atol, rtol, largest)).astype(x.dtype)
    return _product(v * inverted[..., None, :], uh)


@lower(aten.linalg_matrix_exp.default)
def _matrix_exp(x: Any) -> Any:
    if not x.size:
        return jnp.array(x, copy=True)
    batch = x.shape[:-2]
    if not batch:
        return expm(x, max_squarings=64)
    flat = x.reshape(-1, *x.shape[-2:])
    return jax.vmap(lambda m: expm(m, max_squarings=64))(flat).reshape(x.shape)


def _has_residuals(a: Any, rank: Any, driver: str) -> bool:
    if a.shape[-2] <= a.shape[-1] or driver == "gelsy":
        return False
    if driver == "gels":
        return True
    usage = "asked for the rank of a matrix, which decides whether there are residuals,"
    return bool((read_on_host(rank, usage) == a.shape[-1]).all())


@lower(aten.linalg_lstsq.default)
def _lstsq(a: Any, b: Any, rcond: float | None = None, *, driver: str | None = None) -> Any:
    """All of LAPACK's drivers as the one by singular values; what they return differs."""
    driver = driver or "gelsy"
    is_vector = b.ndim == 1 or (a.ndim - 1 == b.ndim and b.shape == a.shape[:-1])
    b = b[..., None] if is_vector else b
    rows, columns = a.shape[-2:]
    u, values, vh = linalg.svd(a, full_matrices=False)
    eps = jnp.finfo(values.dtype).eps
    rtol = eps * max(rows, columns) if rcond is None else (rcond if rcond >= 0 else eps)
    tolerance = (
        0.0 if driver == "gels" else rtol * jnp.max(values, axis=-1, keepdims=True, initial=0)
    )
    is_large = values > tolerance
    inverted = _inverted(values, tolerance).astype(a.dtype)
    solution = _product(adjoint(vh), inverted[..., :, None] * _product(adjoint(u), b))
    rank = jnp.sum(is_large, axis=-1, dtype=jnp.int64)
    residuals = jnp.zeros((0,), values.dtype)
    if _has_residuals(a, rank, driver):
        residuals = jnp.sum(jnp.abs(_product(a, solution) - b) ** 2, axis=-2)
    singular_values = jnp.zeros((0,), values.dtype) if driver in ("gels", "gelsy") else values
    rank = jnp.zeros((0,), jnp.int64) if driver == "gels" else rank
    return (solution[..., 0] if is_vector else solution), residuals, rank, singular_values


if hasattr(aten, "linalg_polar"):  # torch 2.15 has both

    @lower(aten.linalg_polar.default)
    def _polar(x: Any) -> Any:
        """An orthogonal matrix, and a positive one that it is multiplied by."""
        u, sizes, vh = linalg.svd(x, full_matrices=False)
        return _product(u, vh), _product(adjoint(vh) * sizes[..., None, :].astype(x.dtype), vh)

    @lower(aten.linalg_matrix_sqrth.default)
    def _square_root(x: Any) -> Any:
        vectors, values = linalg.eigh(x, symmetrize_input=False)
        roots = jnp.sqrt(jnp.maximum(values, 0))[..., None, :].astype(x.dtype)
        return _product(vectors * roots, adjoint(vectors))
