"""The calls of the lowered ops of linear algebra, and functions of what these do not determine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.xla_dtensor.runtimes.lowering_cases import Case, draw_anew, f, named, overload

draw_anew()


def regular(*batch: int, size: int = 5) -> torch.Tensor:
    """Matrices far from singular."""
    return f(*batch, size, size) + 5 * torch.eye(size)


def positive(*batch: int, size: int = 5) -> torch.Tensor:
    """Symmetric matrices with eigenvalues of 1 and more."""
    half = f(*batch, size, size)
    return half @ half.mT / 4 + torch.eye(size)


WIDE, TALL, MANY = f(4, 6), f(6, 4), f(3, 6, 4)
ONE, BATCH = regular(), regular(3)
TRIANGLE = regular(3).tril()
LINALG: dict[Any, list[Case]] = {
    **named(
        "addbmm",
        Case(f(4, 6), f(3, 4, 5), f(3, 5, 6)),
        Case(f(6), f(3, 4, 5), f(3, 5, 6), beta=0.5, alpha=2),
    ),
    **named(
        "linalg_cholesky_ex",
        Case(positive()),
        Case(positive(3), upper=True),
        Case(torch.zeros(0, 4, 4)),
    ),
    **named(
        "cholesky_solve", Case(f(5, 2), TRIANGLE[0]), Case(f(3, 5, 2), TRIANGLE.mT.clone(), True)
    ),
    **named("cholesky_inverse", Case(TRIANGLE), Case(TRIANGLE[0].T.clone(), True)),
    **named(
        "linalg_qr",
        Case(TALL),
        Case(WIDE),
        Case(MANY, "reduced"),
        Case(TALL, "complete"),
        Case(MANY, "r"),
    ),
    **named("geqrf", Case(TALL), Case(MANY)),
    **named("linalg_householder_product", Case(*torch.geqrf(TALL)), Case(*torch.geqrf(MANY))),
    **named(
        "ormqr",
        Case(*torch.geqrf(TALL), f(6, 3)),
        Case(*torch.geqrf(TALL), f(3, 6), False, True),
        Case(*torch.geqrf(MANY), f(3, 6, 2), True, True),
    ),
    **named("linalg_lu_factor_ex", Case(ONE), Case(BATCH), Case(MANY)),
    **named("linalg_lu", Case(ONE), Case(MANY), Case(WIDE)),
    **named(
        "lu_unpack",
        Case(*torch.linalg.lu_factor(MANY)),
        Case(*torch.linalg.lu_factor(WIDE)),
        Case(*torch.linalg.lu_factor(ONE), False, True),
        Case(*torch.linalg.lu_factor(ONE), True, False),
    ),
    **named(
        "linalg_lu_solve",
        *(
            Case(*torch.linalg.lu_factor(BATCH), b, left=left, adjoint=adjoint)
            for left, b in ((True, f(3, 5, 2)), (False, f(3, 2, 5)))
            for adjoint in (False, True)
        ),
        Case(*torch.linalg.lu_factor(ONE), f(3, 5, 2)),
    ),
    **named("linalg_inv_ex", Case(ONE), Case(BATCH)),
    **named(
        "linalg_solve_triangular",
        Case(TRIANGLE, f(3, 5, 2), upper=False),
        Case(TRIANGLE[0].T.clone(), f(3, 2, 5), upper=True, left=False),
        Case(TRIANGLE / 8, f(5, 2), upper=False, unitriangular=True),
    ),
    **named(
        "triangular_solve",
        Case(f(5, 2), TRIANGLE[0], False),
        Case(f(3, 5, 2), TRIANGLE[0].T.clone(), True, True),
    ),
    **named(
        "linalg_pinv.atol_rtol_tensor",
        Case(TALL),
        Case(f(3, 2, 4)),
        Case(positive(3), hermitian=True),
        Case(positive(), atol=torch.tensor(1.5)),
        Case(torch.zeros(0, 3)),
    ),
    **named("linalg_matrix_exp", Case(f(5, 5)), Case(f(3, 4, 4) / 2), Case(torch.zeros(0, 3, 3))),
    **named(
        "linalg_lstsq",
        Case(TALL, f(6, 2)),
        Case(WIDE, f(4, 2)),
        Case(MANY, f(3, 6), driver="gels"),
        Case(TALL, f(6, 2), driver="gelsd"),
        Case(TALL[:, [0, 1, 1]], f(6, 2), 1e-3, driver="gelss"),
    ),
}
if hasattr(torch.ops.aten, "cholesky"):  # torch 2.15 no longer has it
    LINALG |= named("cholesky", Case(positive()), Case(positive(3), True))
if hasattr(torch.ops.aten, "linalg_polar"):  # torch 2.15 has both
    LINALG |= named("linalg_polar", Case(ONE), Case(TALL), Case(MANY))
    LINALG |= named("linalg_matrix_sqrth", Case(positive()), Case(positive(3)))
# These have many right results; FUNCTIONS are of what is the same for all.
UP_TO_GAUGE = "_linalg_svd _linalg_eigh linalg_eig _linalg_eigvals"
ALL = set(LINALG) | {overload(name) for name in UP_TO_GAUGE.split()}

Function = Callable[..., torch.Tensor]


def _rebuilt(x: torch.Tensor) -> torch.Tensor:
    values, vectors = torch.linalg.eig(x)
    return (vectors @ torch.diag_embed(values) @ torch.linalg.inv(vectors)).real


def _of_singular_values(x: torch.Tensor) -> torch.Tensor:
    u, s, vh = torch.linalg.svd(x, full_matrices=False)
    return (u * s.exp().unsqueeze(-2)) @ vh


def _of_eigenvalues(x: torch.Tensor) -> torch.Tensor:
    # A bounded function of them: beside exp of a large one float32 has no digits for the others.
    values, vectors = torch.linalg.eigh(x)
    return (vectors * values.sin().unsqueeze(-2)) @ vectors.mH


# Results that do not depend on signs and phases, of which there are many right ones.
FUNCTIONS: dict[str, tuple[Function, tuple[torch.Tensor, ...]]] = {
    "svd": (_of_singular_values, (f(4, 6),)),
    "svd of a batch": (_of_singular_values, (f(3, 6, 4),)),
    "all of svd": (lambda x: torch.linalg.svd(x)[0].abs(), (f(5, 4) + 3 * torch.eye(5, 4),)),
    "svdvals": (torch.linalg.svdvals, (f(3, 6, 4),)),
    "eigh": (_of_eigenvalues, (positive(3),)),
    "eigh of the upper part": (lambda x: torch.linalg.eigvalsh(x, UPLO="U"), (f(5, 5),)),
    "eig": (_rebuilt, (f(5, 5),)),
    "eigvals": (lambda x: torch.linalg.eigvals(x).abs().sort().values, (f(3, 4, 4),)),
    "solve": (torch.linalg.solve, (regular(), f(5, 2))),
    "solve for a vector": (torch.linalg.solve, (regular(3), f(3, 5))),
    "solve from the right": (
        lambda a, b: torch.linalg.solve(a, b, left=False),
        (regular(3), f(3, 2, 5)),
    ),
    "solve with columns": (lambda a, b: torch.linalg.solve(a.mT, b), (regular(3), f(3, 5, 2))),
    "det": (torch.linalg.det, (regular(3),)),
    "det of columns": (lambda a: torch.linalg.det(a.mT), (f(5, 5),)),
    "slogdet": (lambda a: torch.stack(torch.linalg.slogdet(a)), (regular(3),)),
    "cond": (torch.linalg.cond, (regular(3),)),
    "matrix_rank": (torch.linalg.matrix_rank, (f(3, 6, 4),)),
    "pinv": (torch.linalg.pinv, (f(3, 6, 4),)),
    "lowrank": (lambda x: torch.svd_lowrank(x, q=2)[1], (f(6, 2) @ f(2, 5),)),
}
