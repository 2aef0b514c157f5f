"""Controls: where a constant is baked into a program on purpose, the other tests' comparison fails.

A step with a learning rate, a counter or a random key of its first call still trains, and its
losses still fall. Each control here holds one of them fixed between calls, from outside, and shows
that the comparison with plain PyTorch tells.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim

import xla_dtensor as xd
from tests.xla_dtensor.nn.test_compile_optimizers import (
    decaying,
    distributed,
    model_and_batch,
    trained_plainly,
    training,
)

pytestmark = [pytest.mark.only_on("jax"), pytest.mark.usefixtures("runtime")]

STEPS = 8
TOLERANCE = 1e-6


def adamw(parameters: Any) -> optim.AdamW:
    return optim.AdamW(parameters, lr=1e-2)


def losses_with(mesh: xd.DeviceMesh, hold: Callable[[Any], Callable[[], None]]) -> list[float]:
    """Train; between calls, do what `hold` returned of the compiled program."""
    model, x, y = model_and_batch()
    step, scheduler = training(distributed(model, mesh), adamw, decaying)
    compiled: Any = xd.compile(step)
    batch = [xd.distribute_tensor(t, mesh) for t in (x, y)]
    losses, put_back, held = [], None, None
    for _ in range(STEPS):
        losses.append(compiled(*batch).item())
        scheduler.step()
        if compiled._last is not held:
            held = compiled._last
            put_back = hold(held)
        assert put_back is not None
        put_back()
    assert compiled.stats()["traces"] <= 2
    return losses


def nothing(program: Any) -> Callable[[], None]:
    return lambda: None


def the_rate(program: Any) -> Callable[[], None]:
    program.numbers.clear()
    return lambda: None


def the_counters(program: Any) -> Callable[[], None]:
    # One for each parameter; the first call, which makes them, has none yet.
    counters = [s for s in program.state if tuple(s.array.shape) == ()]
    assert len(counters) in (0, 4)
    kept = [s.array.copy() for s in counters]

    def put_back() -> None:
        for storage, value in zip(counters, kept, strict=True):
            storage.array = value.copy()

    return put_back


def test_losses_equal_where_nothing_is_held(mesh: xd.DeviceMesh) -> None:
    wanted, _ = trained_plainly(adamw, decaying)
    assert losses_with(mesh, nothing) == pytest.approx(wanted, abs=TOLERANCE)


@pytest.mark.parametrize("hold", [the_rate, the_counters], ids=lambda f: f.__name__)
def test_a_held_number_is_noticed(mesh: xd.DeviceMesh, hold: Any) -> None:
    wanted, _ = trained_plainly(adamw, decaying)
    found = losses_with(mesh, hold)
    assert found[0] == pytest.approx(wanted[0], abs=TOLERANCE)
    assert max(abs(a - b) for a, b in zip(found, wanted, strict=True)) > 100 * TOLERANCE
    assert found[-1] < found[0]  # which is why it takes a comparison


def test_a_held_key_is_noticed(mesh: xd.DeviceMesh) -> None:
    dropout = nn.Dropout(0.5)
    step: Any = xd.compile(lambda x: dropout(x))
    x = xd.distribute_tensor(torch.ones(64, 8), mesh)
    xd.manual_seed(7, mesh)
    masks = [step(x).cpu() for _ in range(3)]
    assert not torch.equal(masks[1], masks[2])
    assert step.stats()["traces"] <= 2
    held = []
    for _ in range(2):
        xd.manual_seed(7, mesh)
        held.append(step(x).cpu())
    assert torch.equal(*held)
    assert torch.equal(held[0], masks[0])


def test_a_check_that_is_left_out_computes_as_any_op(mesh: xd.DeviceMesh) -> None:
    @xd.compile
    def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        torch._check_tensor_all(x > 0, lambda: "x is to be positive")
        return x * 2, torch.ops.aten._is_all_true(x > 0)

    for value in (1.0, -1.0):
        with xd.check_values(False):
            doubled, is_positive = step(xd.distribute_tensor(torch.full((8,), value), mesh))
        assert torch.equal(doubled.cpu(), torch.full((8,), 2 * value))
        assert bool(is_positive) is (value > 0)
