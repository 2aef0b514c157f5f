"""Solves and determinants by the factors that torch's kernels would find of a strided matrix.

torch's kernels factor the transpose of a matrix that lies row by row, and its formulas of the
gradients count on that::

    A.stride() == (n, 1)    the factors are those of A.mT
    A.stride() == (1, n)    those of A

No kernel of XLA sees strides. These rules do, on tensors of any runtime that tell their strides::

    _linalg_solve_ex(A, B)    lu_factor_ex(A.mT), lu_solve(..., adjoint=True)
    _linalg_det(A)            lu_factor_ex(A.mT), the product of the diagonal

Invariant: what is returned as factors is what torch's kernel returns of the same strides, so that
first and higher derivatives are right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["FACTORED"]

aten = torch.ops.aten


def _solve_turns() -> bool:
    """Tell whether torch's solve factors the transpose: 2.9's does, 2.15's does not."""
    matrix = torch.tensor([[2.0, 1.0], [0.0, 2.0]], device="cpu")
    factors: Any = aten._linalg_solve_ex.default(matrix, torch.ones(2, 1, device="cpu"))[1]
    return factors[0, 1].item() == 0


_SOLVE_TURNS = _solve_turns()


def _is_row_by_row(matrix: torch.Tensor) -> bool:
    return matrix.is_contiguous() and not matrix.is_complex()


def _factors(matrix: torch.Tensor, *, turned: bool) -> Any:
    return aten.linalg_lu_factor_ex.default(matrix.mT if turned else matrix)


def _solve_ex(
    matrix: torch.Tensor, other: torch.Tensor, *, left: bool = True, check_errors: bool = False
) -> Any:
    turned = _SOLVE_TURNS and _is_row_by_row(matrix)
    factors, pivots, info = _factors(matrix, turned=turned)
    if check_errors:
        aten._linalg_check_errors.default(info, "torch.linalg.solve_ex", is_matrix=matrix.ndim == 2)
    is_vector = other.ndim == 1 or other.shape == matrix.shape[:-1]
    columns = other.unsqueeze(-1) if is_vector else other
    found = aten.linalg_lu_solve.default(factors, pivots, columns, left=left, adjoint=turned)
    return (found.squeeze(-1) if is_vector else found), factors, pivots, info


def _sign_and_diagonal(matrix: torch.Tensor) -> tuple[Any, Any, Any, Any]:
    factors, pivots, _ = _factors(matrix, turned=_is_row_by_row(matrix))
    rows = torch.ones_like(pivots).cumsum(-1)  # from 1, as pivots count
    exchanges = (pivots != rows).sum(-1)
    sign = (1 - 2 * (exchanges % 2)).to(matrix.dtype)
    return sign, factors.diagonal(0, -2, -1), factors, pivots


def _det(matrix: torch.Tensor) -> Any:
    sign, diagonal, factors, pivots = _sign_and_diagonal(matrix)
    return sign * diagonal.prod(-1), factors, pivots


def _slogdet(matrix: torch.Tensor) -> Any:
    sign, diagonal, factors, pivots = _sign_and_diagonal(matrix)
    return sign * diagonal.sgn().prod(-1), diagonal.abs().log().sum(-1), factors, pivots


FACTORED: dict[Any, Callable[..., Any]] = {
    aten._linalg_solve_ex.default: _solve_ex,
    aten._linalg_det.default: _det,
    aten._linalg_slogdet.default: _slogdet,
}
"""Ops whose results depend on the strides of a matrix, in terms of ops whose results do not."""
