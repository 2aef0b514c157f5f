"""Linear algebra against plain torch: factorizations, systems, and spectra up to their gauge."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.xla_dtensor.runtimes.jax.lowering_checks import (
    check_gradients,
    check_values,
    leaf,
    per_op,
    sharded,
)
from tests.xla_dtensor.runtimes.lowering_cases import f
from tests.xla_dtensor.runtimes.lowering_cases_linalg import FUNCTIONS, LINALG, positive, regular
from xla_dtensor import DeviceMesh, distribute_tensor
from xla_dtensor import compile as xla_compile
from xla_dtensor.errors import CompileError, UnsupportedOpError
from xla_dtensor.report import collectives

pytestmark = [pytest.mark.only_on("jax"), pytest.mark.usefixtures("runtime")]


@pytest.mark.thorough
@per_op(LINALG)
def test_values(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch, op: Any) -> None:
    check_values(mesh, monkeypatch, op, LINALG[op])


@pytest.mark.thorough
@per_op(LINALG)
def test_gradients(mesh: DeviceMesh, op: Any) -> None:
    check_gradients(mesh, op, LINALG[op])


@pytest.mark.thorough
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(mesh: DeviceMesh, name: str) -> None:
    function, given = FUNCTIONS[name]
    theirs, ours = [leaf(t.double()) for t in given], [leaf(sharded(mesh)(t)) for t in given]
    expected, found = function(*theirs), function(*ours)
    torch.testing.assert_close(found.cpu(), expected.detach().to(found.dtype), rtol=1e-4, atol=1e-5)
    if not expected.requires_grad or name == "all of svd":
        return
    expected.sum().backward()
    found.sum().backward()
    for mine, plain in zip(ours, theirs, strict=True):
        assert mine.grad is not None
        assert plain.grad is not None
        torch.testing.assert_close(mine.grad.cpu(), plain.grad.float(), rtol=1e-3, atol=1e-4)


def test_complex_matrices(mesh: DeviceMesh) -> None:
    a, b = torch.complex(regular(3), f(3, 5, 5)), torch.complex(f(3, 5, 2), f(3, 5, 2))
    ours, other = sharded(mesh)(a), sharded(mesh)(b)
    hermitian = a @ a.mH
    for found, expected in (
        (torch.linalg.solve(ours, other), torch.linalg.solve(a, b)),
        (torch.linalg.inv(ours), torch.linalg.inv(a)),
        (torch.linalg.det(ours), torch.linalg.det(a)),
        (torch.linalg.svdvals(ours), torch.linalg.svdvals(a)),
        (torch.linalg.pinv(ours), torch.linalg.pinv(a)),
        (torch.linalg.cholesky(sharded(mesh)(hermitian)), torch.linalg.cholesky(hermitian)),
        (torch.linalg.eigvalsh(sharded(mesh)(hermitian)), torch.linalg.eigvalsh(hermitian)),
    ):
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["cholesky", "qr", "lu_factor", "svd", "eigh", "inv", "pinv"])
def test_a_sharded_batch_stays_sharded(mesh: DeviceMesh, name: str) -> None:
    batch = distribute_tensor(positive(8), mesh, (("dp", "tp"), None, None))
    step = xla_compile(lambda: getattr(torch.linalg, name)(batch))
    step()
    assert not collectives(step.hlo())


# ------------------------------------------------------------------ failures


def test_a_matrix_that_is_not_positive_raises_as_in_torch(mesh: DeviceMesh) -> None:
    bad = positive(3)
    bad[1, 2, 2] = -9
    plain = torch.linalg.cholesky_ex(bad)
    assert torch.linalg.cholesky_ex(sharded(mesh)(bad)).info.cpu().tolist() == plain.info.tolist()
    assert plain.info.tolist() == [0, 3, 0]
    for function in (torch.linalg.cholesky, torch.cholesky):  # 2.15 keeps the second as an error
        with pytest.raises(RuntimeError) as expected:
            function(bad)
        with pytest.raises(RuntimeError) as found:
            function(sharded(mesh)(bad))
        assert str(found.value).lower() == str(expected.value).lower()


@pytest.mark.parametrize("name", ["inv", "lu_factor", "solve"])
def test_a_singular_matrix_raises_as_in_torch(mesh: DeviceMesh, name: str) -> None:
    function = getattr(torch.linalg, name)
    singular = torch.zeros(5, 5)
    more = (torch.ones(5, 1),) if name == "solve" else ()
    with pytest.raises(RuntimeError) as plain:
        function(singular, *more)
    with pytest.raises(type(plain.value)) as ours:
        function(sharded(mesh)(singular), *more)
    assert str(ours.value) == str(plain.value)


def test_in_a_step_a_failure_is_nan(mesh: DeviceMesh) -> None:
    bad = sharded(mesh)(-torch.eye(4))
    found = xla_compile(lambda: torch.linalg.cholesky(bad))()
    assert found.cpu().isnan().any()


def test_shapes_that_depend_on_the_rank_are_refused_in_a_step(mesh: DeviceMesh) -> None:
    a, b = sharded(mesh)(f(6, 4)), sharded(mesh)(f(6, 2))
    with pytest.raises(CompileError, match="asked for the rank of a matrix"):
        xla_compile(lambda: torch.linalg.lstsq(a, b, driver="gelsd").solution)()


def test_factorizations_that_xla_lacks_are_refused(mesh: DeviceMesh) -> None:
    a = sharded(mesh)(positive())
    with pytest.raises(UnsupportedOpError, match="pivot=False"):
        torch.linalg.lu_factor(a, pivot=False)
    with pytest.raises(UnsupportedOpError, match="linalg_ldl_factor_ex"):
        torch.linalg.ldl_factor(a)
