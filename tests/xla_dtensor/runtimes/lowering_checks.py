"""What test_jax_lowering does with its cases, for the cases of other files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from tests.xla_dtensor.runtimes.lowering_cases import Case
from tests.xla_dtensor.runtimes.test_jax_lowering import (
    assert_same,
    count_calls,
    leaf,
    pulled,
    sharded,
    wide,
)
from xla_dtensor import DeviceMesh
from xla_dtensor import compile as xla_compile

__all__ = ["check_gradients", "check_in_a_step", "check_values"]

Put = Callable[[torch.Tensor], torch.Tensor]


def check_values(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch, op: Any, cases: Sequence[Case]
) -> None:
    """Compare each call on sharded inputs with torch in float64."""
    calls = count_calls(monkeypatch, op)
    for case in cases:
        del calls[:]
        with torch.inference_mode():
            found = case.mapped(sharded(mesh)).run(op)
        assert calls, "the op never reached its lowering"
        assert_same(found, case.run(op), case.mapped(wide).run(op))


def check_in_a_step(mesh: DeviceMesh, op: Any, cases: Sequence[Case]) -> None:
    """Compare all calls as one compiled step, which XLA partitions as a whole."""
    given = [case.mapped(sharded(mesh)) for case in cases]

    def step() -> list[Any]:
        with torch.no_grad():
            return [case.run(op) for case in given]

    found = xla_compile(step)()
    for case, result in zip(cases, found, strict=True):
        assert_same(result, case.run(op), case.mapped(wide).run(op))


def check_gradients(mesh: DeviceMesh, op: Any, cases: Sequence[Case]) -> None:
    """Compare the gradients of all inputs with torch in float64, where torch has them."""
    for case in cases:
        if not all(t.numel() for t in case.tensors()):
            continue
        reference = case.mapped(wide).mapped(leaf)
        try:
            pulled(reference.run(op), lambda t: t)
        except RuntimeError:
            continue  # torch itself cannot differentiate it
        ours = case.mapped(lambda t: leaf(sharded(mesh)(t)))
        pulled(ours.run(op), sharded(mesh))
        for mine, theirs in zip(ours.tensors(), reference.tensors(), strict=True):
            assert (mine.grad is None) == (theirs.grad is None)
            if theirs.grad is not None:
                assert mine.grad is not None
                torch.testing.assert_close(
                    mine.grad.cpu(),
                    theirs.grad.to(mine.dtype),
                    rtol=1e-4,
                    atol=2e-5,
                    equal_nan=True,
                )
