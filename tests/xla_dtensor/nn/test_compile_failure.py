"""A step that fails while it is traced or compiled leaves everything as it was."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

import xla_dtensor as xd
from xla_dtensor.errors import CompileError

pytestmark = [pytest.mark.only_on("jax"), pytest.mark.usefixtures("runtime")]


class Training:
    """A model with buffers and dropout, its optimizer, and a step that can be made to fail."""

    def __init__(self, mesh: xd.DeviceMesh) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.5))
        xd.distribute_module(self.model, mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.x = torch.randn(16, 8)
        self.fails_at: str | None = None

    def step(self, x: torch.Tensor) -> torch.Tensor:
        self._fail("start")
        loss = self.model(x).square().mean()
        self._fail("forward")
        loss.backward()
        self._fail("backward")
        self.optimizer.step()
        self._fail("optimizer")
        self.optimizer.zero_grad()
        self._fail("end")
        return loss.detach()

    def _fail(self, place: str) -> None:
        if self.fails_at == place:
            raise KeyError(place)

    def state(self) -> Any:
        tensors = self.model.state_dict()
        return (
            {name: tensor.full_tensor().clone() for name, tensor in tensors.items()},
            {name: id(p) for name, p in self.model.named_parameters()},
            [p.grad for p in self.model.parameters()],
            {k: dict(v) for k, v in self.optimizer.state.items()},
            dict(self.optimizer.param_groups[0]),
        )


def assert_unchanged(before: Any, after: Any) -> None:
    for name, tensor in before[0].items():
        torch.testing.assert_close(after[0][name], tensor, rtol=0, atol=0)
    assert after[1] == before[1]
    assert all(a is b for a, b in zip(after[2], before[2], strict=True))
    assert after[3].keys() == before[3].keys()
    for entries, entries_before in zip(after[3].values(), before[3].values(), strict=True):
        assert all(entries[name] is value for name, value in entries_before.items())
    assert after[4] == before[4]


@pytest.mark.thorough
@pytest.mark.parametrize("place", ["start", "forward", "backward", "optimizer", "end"])
@pytest.mark.parametrize("calls_before", [0, 2])
def test_everything_is_as_it_was(mesh: xd.DeviceMesh, place: str, calls_before: int) -> None:
    failing, other = Training(mesh), Training(mesh)
    step, other_step = xd.compile(failing.step), xd.compile(other.step)
    xd.manual_seed(1, mesh)
    for _ in range(calls_before):
        step(failing.x)
    before = failing.state()
    failing.fails_at = place
    # Another shape, so that the step is traced.
    with pytest.raises(KeyError, match=place):
        step(failing.x[:8])
    assert_unchanged(before, failing.state())
    # The generator too: what follows is what would have been.
    failing.fails_at = None
    found = [step(failing.x).item() for _ in range(2)]
    xd.manual_seed(1, mesh)
    wanted = [other_step(other.x).item() for _ in range(calls_before + 2)]
    assert found == wanted[calls_before:]


def test_a_model_that_the_user_froze(mesh: xd.DeviceMesh) -> None:
    training = Training(mesh)
    before = training.state()
    gc.freeze()  # hides the model from who asks the collector for all objects
    try:
        training.fails_at = "end"
        with pytest.raises(KeyError):
            xd.compile(training.step)(training.x)
    finally:
        gc.unfreeze()
    assert_unchanged(before, training.state())


def test_a_gradient_from_before_survives(mesh: xd.DeviceMesh) -> None:
    training = Training(mesh)
    training.model(training.x).square().mean().backward()
    gradients = [p.grad for p in training.model.parameters()]
    values = [g.full_tensor().clone() for g in gradients if g is not None]  # pyright: ignore
    training.fails_at = "end"
    with pytest.raises(KeyError):
        xd.compile(training.step)(training.x)
    for parameter, gradient, value in zip(
        training.model.parameters(), gradients, values, strict=True
    ):
        assert parameter.grad is gradient
        torch.testing.assert_close(gradient.full_tensor(), value)  # pyright: ignore


def test_the_compilers_refusal(mesh: xd.DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    from xla_dtensor.runtimes.jax.compile.store import Executables

    training = Training(mesh)
    before = training.state()

    def refuse(self: Any, lowered: Any, compare: Any) -> Any:
        raise CompileError("out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(Executables, "compiled", refuse)
        with pytest.raises(CompileError, match="out of memory"):
            xd.compile(training.step)(training.x)
    assert_unchanged(before, training.state())
    assert xd.compile(training.step)(training.x).isfinite()
