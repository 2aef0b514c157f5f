"""Special functions, orthogonal polynomials and Fourier transforms against plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.xla_dtensor.runtimes.jax.lowering_checks import (
    assert_same,
    check_gradients,
    check_values,
    per_op,
    sharded,
)
from tests.xla_dtensor.runtimes.lowering_cases_special import ALL
from xla_dtensor import DeviceMesh

pytestmark = [pytest.mark.only_on("jax"), pytest.mark.usefixtures("runtime")]


@pytest.mark.thorough
@per_op(ALL)
def test_values(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch, op: Any) -> None:
    check_values(mesh, monkeypatch, op, ALL[op])


@pytest.mark.thorough
@per_op(ALL)
def test_gradients(mesh: DeviceMesh, op: Any) -> None:
    check_gradients(mesh, op, ALL[op])


@pytest.mark.parametrize(
    "name", ["special.bessel_j0", "special.zeta", "special.erfcx", "igamma", "special.airy_ai"]
)
def test_half_precision_is_computed_in_float32(mesh: DeviceMesh, name: str) -> None:
    function: Any = torch
    for part in name.split("."):
        function = getattr(function, part)
    x = torch.linspace(1.5, 9, 30).reshape(5, 6)
    given = [x, x + 1][: 2 if name in ("special.zeta", "igamma") else 1]
    half = [v.bfloat16() for v in given]
    expected = function(*(v.float() for v in half)).bfloat16()
    assert_same(function(*map(sharded(mesh), half)), expected, expected)


@pytest.mark.parametrize("center", [True, False])
def test_short_time_transform_and_back(mesh: DeviceMesh, center: bool) -> None:
    x = torch.randn(2, 40, generator=torch.Generator().manual_seed(0))
    window = torch.ones(8)
    options: dict[str, Any] = {"n_fft": 8, "hop_length": 2, "center": center}
    there = torch.stft(x, window=window, return_complex=True, **options)
    ours = torch.stft(sharded(mesh)(x), window=window, return_complex=True, **options)
    torch.testing.assert_close(ours.cpu(), there)
    back = torch.istft(sharded(mesh)(there), window=window, **options)
    torch.testing.assert_close(back.cpu(), torch.istft(there, window=window, **options))
