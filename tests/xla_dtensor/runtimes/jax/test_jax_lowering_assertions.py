"""What `torch._assert_async` does: raises where the value is there, nothing inside of a program."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import xla_dtensor as xd

pytestmark = pytest.mark.only_on("jax")


@pytest.mark.parametrize("message", [(), ("not so",)], ids=["default", "own"])
def test_eager(mesh: xd.DeviceMesh, message: tuple[str, ...]) -> None:
    op: Any = torch.ops.aten._assert_async

    def assert_async(claim: Any) -> None:
        op.msg(claim, *message) if message else op.default(claim)

    holds, fails = (xd.distribute_tensor(torch.tensor(v), mesh) for v in (True, False))
    assert_async(holds)
    with pytest.raises(RuntimeError, match=message[0] if message else "single nonzero value"):
        assert_async(fails)


def test_in_a_compiled_step(mesh: xd.DeviceMesh) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        torch.ops.aten._assert_async.default((x > 0).all())
        return x * 2

    compiled: Any = xd.compile(step)
    for value in (1.0, -1.0):  # A program cannot raise.
        x = xd.distribute_tensor(torch.full((8,), value), mesh)
        assert compiled(x).full_tensor().tolist() == [2 * value] * 8
