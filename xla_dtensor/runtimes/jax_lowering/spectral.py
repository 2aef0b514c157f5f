"""Singular values, eigenvalues, and functions of a matrix that rest on them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax.lax import linalg
from jax.scipy.linalg import expm

from xla_dtensor.errors import UnsupportedOpError
from xla_dtensor.runtimes import jax_devices
from xla_dtensor.runtimes.jax_convert import jax_dtype
from xla_dtensor.runtimes.jax_lowering.factorizations import adjoint
from xla_dtensor.runtimes.jax_lowering.host_values import read_on_host
from xla_dtensor.runtimes.jax_lowering.matmul import precision
from xla_dtensor.runtimes.jax_lowering.table import lower

__all__: list[str] = []

aten = torch.ops.aten


def _nothing(meta: Any) -> Any:
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
        return _nothing(meta[0]), linalg.svd(x, compute_uv=False), _nothing(meta[2])
    return linalg.svd(x, full_matrices=full_matrices)


@lower(aten._linalg_eigh.default, wants_meta=True)
def _eigh(x: Any, uplo: str = "L", compute_v: bool = True, *, meta: Any) -> Any:
    vectors, values = linalg.eigh(x, lower=uplo.upper() == "L", symmetrize_input=False)
    return values, (vectors if compute_v else _nothing(meta[1]))


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
        left, right = vectors, adjoint(vectors)
    else:
        u, values, vh = linalg.svd(x, full_matrices=False)
        largest = values[..., :1]
        left, right = adjoint(vh), adjoint(u)
    inverted = _inverted(values, _tolerance(x, atol, rtol, largest)).astype(x.dtype)
    return _product(left * inverted[..., None, :], right)


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
    what = "asked for the rank of a matrix, which decides whether there are residuals,"
    return bool((read_on_host(rank, what) == a.shape[-1]).all())


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
    is_kept = values > tolerance
    inverted = _inverted(values, tolerance).astype(a.dtype)
    found = _product(adjoint(vh), inverted[..., :, None] * _product(adjoint(u), b))
    rank = jnp.sum(is_kept, axis=-1, dtype=jnp.int64)
    residuals = jnp.zeros((0,), values.dtype)
    if _has_residuals(a, rank, driver):
        residuals = jnp.sum(jnp.abs(_product(a, found) - b) ** 2, axis=-2)
    shown = jnp.zeros((0,), values.dtype) if driver in ("gels", "gelsy") else values
    rank = jnp.zeros((0,), jnp.int64) if driver == "gels" else rank
    return (found[..., 0] if is_vector else found), residuals, rank, shown


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
