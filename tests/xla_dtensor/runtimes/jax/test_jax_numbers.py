"""Numbers that exist only in the program, beside ordinary CPU tensors: never a silent NaN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import xla_dtensor as xd
from xla_dtensor.errors import CompileError

pytestmark = [pytest.mark.only_on("jax"), pytest.mark.usefixtures("runtime")]

PLAIN = torch.tensor([2.0, 4.0])
USES: dict[str, Callable[[Any], Any]] = {
    "tensor * number": lambda n: PLAIN * n,
    "number * tensor": lambda n: n * PLAIN,
    "number / tensor": lambda n: n / PLAIN,
    "number - tensor": lambda n: n - PLAIN,
    "tensor + number * tensor": lambda n: torch.add(PLAIN, PLAIN, alpha=n),
    "number ** tensor": lambda n: n**PLAIN,
    "clamp": lambda n: PLAIN.clamp(max=n),
    "lerp": lambda n: torch.lerp(PLAIN, PLAIN * 2, n),
}


@pytest.mark.parametrize("name", USES)
def test_equals_plain_pytorch(mesh: xd.DeviceMesh, name: str) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return USES[name](x.sum().item())

    compiled: Any = xd.compile(step)
    for total in (3.0, 5.0):  # Read anew: not what the trace found.
        x = torch.full((8,), total / 8)
        found = compiled(xd.distribute_tensor(x, mesh))
        torch.testing.assert_close(found.cpu(), step(x))


def test_a_write_to_an_ordinary_tensor_is_refused(mesh: xd.DeviceMesh) -> None:
    kept = torch.ones(2)

    def step(x: torch.Tensor) -> torch.Tensor:
        return kept.mul_(x.sum().item())

    with pytest.raises(CompileError, match="ordinary CPU tensor"):
        xd.compile(step)(xd.distribute_tensor(torch.ones(8), mesh))
    assert kept.tolist() == [1.0, 1.0]


def test_item_of_an_older_tensor_is_read_anew(mesh: xd.DeviceMesh) -> None:
    factor: Any = xd.distribute_tensor(torch.tensor(2.0), mesh)
    x: Any = xd.distribute_tensor(torch.ones(4), mesh)
    compiled: Any = xd.compile(lambda: x * factor.item())
    assert compiled().full_tensor().tolist() == [2.0] * 4
    factor.add_(1)
    assert compiled().full_tensor().tolist() == [3.0] * 4
    assert compiled.stats()["traces"] == 1


def test_a_branch_on_an_older_tensor(mesh: xd.DeviceMesh) -> None:
    flag: Any = xd.distribute_tensor(torch.tensor(True), mesh)
    x: Any = xd.distribute_tensor(torch.ones(4), mesh)
    step: Any = xd.compile(lambda: x * 2 if flag else x * 3)
    for answer, factor in ((True, 2.0), (False, 3.0), (True, 2.0)):
        flag.copy_(torch.tensor(answer))
        assert step().full_tensor().tolist() == [factor] * 4
    assert step.stats()["traces"] == 2
