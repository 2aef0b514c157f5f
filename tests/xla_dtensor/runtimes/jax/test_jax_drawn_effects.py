"""Drawn steps that write to Python, what item() gives too: compiled, beside plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import xla_dtensor as xd
from tests.xla_dtensor.effect_cases import NUM_CHANGES, drawn
from tests.xla_dtensor.test_guard_effects import Walk, called, first_difference, state_of
from xla_dtensor.core.errors import CompileError

pytestmark = [pytest.mark.thorough, pytest.mark.only_on("jax")]

BATCH = 20


class WalkOfMesh(Walk):
    """Takes tensors of a mesh and plain ones for the same; numbers to 12 digits."""

    def plain(self, value: Any) -> Any:
        if isinstance(value, float):
            return "float", round(value, 12)
        found = super().plain(value)
        return ("Tensor", *found[1:]) if isinstance(value, torch.Tensor) else found

    def parts(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return iter([(value.cpu().tolist(), value.requires_grad)])
        return super().parts(value)

    def attributes(self, value: Any) -> list[tuple[str, Any]]:
        return [] if isinstance(value, torch.Tensor) else super().attributes(value)


def difference(seed: int, mesh: xd.DeviceMesh) -> str:
    """Return where a compiled case differs from its twin."""
    twin, case = drawn(seed, items=True), drawn(seed, items=True)
    step = xd.compile(case.step)
    try:
        for number in range(NUM_CHANGES + 1):
            if number:
                done = [called(each.changes[number - 1]) for each in (twin, case)]
                if done[0] != done[1]:
                    return f"change {number}: {done}"
            x = torch.tensor([1.0, 2.0]) * (number + 1)
            y = xd.distribute_tensor(x, mesh)
            try:
                result = twin.step(x)
            except Exception:
                return ""
            try:
                found = step(y)
            except CompileError:
                return ""
            except TypeError as error:
                return "" if "unhashable" in str(error) else f"call {number}: {error}"
            results = WalkOfMesh(given=(x,)).plain(result), WalkOfMesh(given=(y,)).plain(found)
            states = [
                state_of(each, WalkOfMesh(given=(given,))) for each, given in ((twin, x), (case, y))
            ]
            for one, other in (results, states):
                if one != other:
                    return f"call {number}: {first_difference(one, other)}"
        return ""
    finally:
        twin.close()
        case.close()


@pytest.mark.parametrize("start", range(0, 10 * BATCH, BATCH))
def test_compiled_effects_are_those_of_pytorch(mesh: xd.DeviceMesh, start: int) -> None:
    for seed in range(start, start + BATCH):
        why = difference(seed, mesh)
        assert not why, f"seed {seed}: {why}\n{drawn(seed, items=True).source}"
