"""A step that fails while it is traced or compiled leaves everything as it was."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
from collections.abc import Callable, Iterator
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
        self.last: Any = None

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


class Launch:
    """An executable that does something else when it is run."""

    def __init__(self, executable: Any, instead: Callable[[Any], Any]) -> None:
        self._executable, self._instead = executable, instead

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executable, name)

    def __call__(self, *arrays: Any) -> Any:
        return self._instead(lambda: self._executable(*arrays))


def executables_type() -> Any:
    from xla_dtensor.runtimes.jax.compile.store import Executables  # not beside torch_xla

    return Executables


@contextlib.contextmanager
def launched(monkeypatch: pytest.MonkeyPatch, instead: Callable[[Any], Any]) -> Iterator[None]:
    """Let programs that are compiled meanwhile be run by `instead`."""
    executables = executables_type()
    compiled = executables.compiled

    def made(self: Any, lowered: Any, compare: Any) -> Any:
        return Launch(compiled(self, lowered, compare), instead)

    with monkeypatch.context() as patched:
        patched.setattr(executables, "compiled", made)
        yield


def out_of_memory(run: Any) -> Any:
    raise MemoryError("out of memory")


@pytest.mark.parametrize("calls_before", [0, 2])
def test_a_first_run_that_fails(
    mesh: xd.DeviceMesh, monkeypatch: pytest.MonkeyPatch, calls_before: int
) -> None:
    failing, other = Training(mesh), Training(mesh)
    losses: list[Any] = []

    def logged(x: torch.Tensor) -> torch.Tensor:
        losses.append(failing.step(x))
        failing.last = losses[-1]
        return losses[-1]

    step, other_step = xd.compile(logged), xd.compile(other.step)
    xd.manual_seed(1, mesh)
    for _ in range(calls_before):
        step(failing.x)
    before, num_losses = failing.state(), len(losses)
    with launched(monkeypatch, out_of_memory), pytest.raises(MemoryError) as raised:
        step(failing.x[:8])
    assert raised.value.__notes__ == [
        "The model, the optimizer and gradients are as they were before the call."
    ]
    assert_unchanged(before, failing.state())
    assert len(losses) == num_losses
    assert (failing.last is losses[-1]) if losses else failing.last is None
    found = [step(failing.x).item() for _ in range(2)]
    xd.manual_seed(1, mesh)
    wanted = [other_step(other.x).item() for _ in range(calls_before + 2)]
    assert found == wanted[calls_before:]


def test_a_later_run_that_fails(mesh: xd.DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    training, fails = Training(mesh), [False]
    step = xd.compile(training.step)
    with launched(monkeypatch, lambda run: out_of_memory(run) if fails[0] else run()):
        for _ in range(2):
            step(training.x)
        before, fails[0] = training.state(), True
        with pytest.raises(MemoryError):
            step(training.x)
        assert_unchanged(before, training.state())
        fails[0] = False
        assert step(training.x).isfinite()


def test_an_error_says_what_is_lost(mesh: xd.DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(mesh)
    step = xd.compile(training.step)

    def lose(run: Any) -> Any:
        run()
        raise MemoryError("too late")

    with launched(monkeypatch, lose), pytest.raises(MemoryError) as raised:
        step(training.x)
    (note,) = raised.value.__notes__
    assert "were given to the program that failed" in note
    assert "load a checkpoint" in note


def test_ctrl_c_waits_for_the_run_to_end(
    mesh: xd.DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing, other = Training(mesh), Training(mesh)
    step, other_step, interrupts = xd.compile(failing.step), xd.compile(other.step), [False]

    def interrupted(run: Any) -> Any:
        outputs = run()
        if interrupts[0]:
            os.kill(os.getpid(), signal.SIGINT)
        return outputs

    xd.manual_seed(1, mesh)
    with launched(monkeypatch, interrupted):
        step(failing.x)
        interrupts[0] = True
        with pytest.raises(KeyboardInterrupt):
            step(failing.x)
        interrupts[0] = False
        found = step(failing.x).item()
    xd.manual_seed(1, mesh)
    assert [other_step(other.x).item() for _ in range(3)][-1] == found


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
    training = Training(mesh)
    before = training.state()

    def refuse(self: Any, lowered: Any, compare: Any) -> Any:
        raise CompileError("out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(executables_type(), "compiled", refuse)
        with pytest.raises(CompileError, match="out of memory"):
            xd.compile(training.step)(training.x)
    assert_unchanged(before, training.state())
    assert xd.compile(training.step)(training.x).isfinite()
