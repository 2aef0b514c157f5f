"""Solve linear systems from a factorization, and what torch builds from that."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import torch
from jax.lax import linalg

from xla_dtensor.runtimes.jax_lowering.factorizations import (
    adjoint,
    lu_info,
    permutation,
    raise_if_failed,
)
from xla_dtensor.runtimes.jax_lowering.table import lower

__all__: list[str] = []

aten = torch.ops.aten


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
    found = _triangular(
        a, b, left_side=True, lower=not upper, transpose_a=transpose, unit_diagonal=unitriangular
    )
    return found, jnp.array(a, copy=True)


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
    found = _triangular(factors, half, lower=True, unit_diagonal=True, **turned)
    return jnp.take_along_axis(found, jnp.argsort(rows, axis=-2), axis=-2)


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
