"""`step.verify()` finds what no guard sees, with its line, and leaves everything as it was."""

from __future__ import annotations

import inspect
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import xla_dtensor as xd
from xla_dtensor.errors import CompileError
from xla_dtensor.runtimes import CompiledStep, Difference, Verification

pytestmark = [pytest.mark.only_on("jax"), pytest.mark.usefixtures("runtime")]
VARIABLE = "XLA_DTENSOR_VERIFY_STEPS"


def placed(mesh: xd.DeviceMesh, *shape: int) -> Any:
    values = torch.arange(1.0, 1.0 + torch.Size(shape).numel()).reshape(shape) / 10
    return xd.distribute_tensor(values, mesh, ["dp", *[None] * (len(shape) - 1)])


def line_of(mark: str) -> str:
    """How a difference says the line of this file that ends with a mark."""
    lines = inspect.getsource(sys.modules[__name__]).splitlines()
    number = next(n for n, line in enumerate(lines, 1) if line.endswith(f",  # {mark}"))
    return f"{__file__}:{number} "


# ------------------------------------------------------------------ a training, left as it was


def training(mesh: xd.DeviceMesh, kind: str) -> tuple[Any, dict[str, Any]]:
    """A step with dropout, an optimizer, and all that a step may do in Python; what it holds."""
    torch.manual_seed(0)
    layers: nn.Module = nn.ModuleList(
        nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5 * (kind != "scan_layers")), nn.Tanh())
        for _ in range(3)
    )
    if kind == "scan_layers":
        layers = xd.scan_layers(layers, remat="full")  # pyright: ignore[reportArgumentType]
    else:
        layers = nn.Sequential(*layers.children(), nn.BatchNorm1d(8))
    model = xd.shard_module(layers, mesh, {"*.*.weight": ["tp", None]}, unmatched="replicate")
    makers = {"sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)}
    optimizer: Any = makers.get(kind, lambda p: torch.optim.AdamW(p, lr=0.1))(model.parameters())
    held: dict[str, Any] = {"model": model, "optimizer": optimizer, "history": [], "last": {}}
    noise = held["noise"] = torch.zeros(8)

    def step(x: Any) -> Any:
        if kind != "scan_layers":
            noise.normal_()  # on the host, anew for each run
        loss = (model(x) + noise).square().mean()
        loss.backward()
        optimizer.step()
        if kind != "sgd":  # whose gradients add up
            optimizer.zero_grad()
        held["history"].append(loss.detach())
        held["last"]["loss"] = loss.detach()
        return loss

    return xd.compile(step), held


def state_of(held: dict[str, Any]) -> dict[str, Any]:
    """Values and identities of all that a step could change."""
    model, optimizer = held["model"], held["optimizer"]
    tensors = {f"model {n}": t for n, t in model.state_dict().items()}
    found: dict[str, Any] = {"training": model.training, "history": [*map(id, held["history"])]}
    for number, p in enumerate(model.parameters()):
        found[f"{number}"] = (id(p), p.requires_grad, id(p.grad), p.data_ptr)
        tensors[f"grad {number}"] = p.grad
        state = optimizer.state.get(p, {})
        found[f"state {number}"] = {name: id(value) for name, value in state.items()}
        tensors |= {f"state {number} {name}": value for name, value in state.items()}
    found["values"] = {
        name: None if t is None else torch.as_tensor(getattr(t, "full_tensor", lambda t=t: t)())
        for name, t in tensors.items()
    }
    found["last"] = {name: id(value) for name, value in held["last"].items()}
    found["groups"] = [
        {n: v for n, v in g.items() if n != "params"} for g in optimizer.param_groups
    ]
    found["host"] = held["noise"].clone()
    found["random"] = (torch.get_rng_state(), random.getstate(), repr(np.random.get_state()))
    return found


def assert_same(before: dict[str, Any], now: dict[str, Any]) -> None:
    torch.testing.assert_close(now.pop("values"), before.pop("values"), rtol=0, atol=0)
    torch.testing.assert_close(now.pop("host"), before.pop("host"), rtol=0, atol=0)
    (state, *others), (state_before, *others_before) = now.pop("random"), before.pop("random")
    assert torch.equal(state, state_before)
    assert (now, others) == (before, others_before)


@pytest.mark.parametrize("kind", ["adamw", "sgd", "scan_layers"])
def test_a_training_is_verified_and_left_as_it_was(mesh: xd.DeviceMesh, kind: str) -> None:
    x = placed(mesh, 4, 8)

    def losses(is_verified: bool) -> tuple[list[float], dict[str, Any]]:
        step, held = training(mesh, kind)
        found = []
        for number in range(5):
            before, stats = state_of(held), dict(step.stats())
            report = step.verify(x) if is_verified else None
            if report is not None:
                assert report.differences == ()
                assert report.is_same == (report.note == "")
                assert report.is_same or number < 2
                assert dict(step.stats()) == stats
                assert_same(before, state_of(held))
            found.append(step(x).item())
        return found, held

    (plain, _), (verified, held) = losses(False), losses(True)
    assert plain == verified
    assert len(held["history"]) == 5
    assert [each.item() for each in held["history"]] == verified


def test_a_step_that_raises_leaves_all_as_it_was(mesh: xd.DeviceMesh, settings: Settings) -> None:
    step, held = training(mesh, "adamw")
    model, x = held["model"], placed(mesh, 4, 8)
    for _ in range(3):
        step(x)

    def refuse() -> None:
        model[0][0].weight.requires_grad_(False)
        model.eval()
        held["last"]["other"] = 1
        raise ValueError("no")

    def broken(x: Any) -> Any:
        loss = model(x).sum()
        loss.backward()
        held["optimizer"].step()
        held["history"].append(loss)
        if settings["twice"]:
            refuse()
        return loss

    step = xd.compile(broken)
    for _ in range(3):
        step(x)
    assert step.verify(x).is_same
    settings.write(twice=True)
    before = state_of(held)
    with pytest.raises(ValueError, match="no"):
        step.verify(x)
    assert_same(before, state_of(held))


# ------------------------------------------------------------------ what it finds


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(tmp_path / "settings.json")


class Settings:
    """Numbers in a file, at which no compiled step looks."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.write()

    def write(self, **changed: Any) -> None:
        usual = {"slope": 0.1, "twice": False, "host": 0.0, "table": [1.0, 2.0, 3.0, 4.0]}
        self.path.write_text(json.dumps(usual | changed))

    def __getitem__(self, name: str) -> Any:
        return json.loads(self.path.read_text())[name]


FUNCTIONS: dict[str, Callable[[Any, Settings], Any]] = {
    "slope": lambda x, file: x * file["slope"],  # the slope
    "twice": lambda x, file: x.sin().sin() if file["twice"] else x.sin(),  # twice
    "table": lambda x, file: x + torch.tensor(file["table"]),  # the table
    "host": lambda x, file: x * (torch.rand(4) * file["host"]),
    "result": lambda x, file: (x + 1, file["slope"]),
    "nesting": lambda x, file: [x] * (1 + file["twice"]),
    "input": lambda x, file: x * OTHERS[file["twice"]],  # the input
    "state": lambda x, file: OTHERS[file["twice"]].add_(x),
}
OTHERS: list[Any] = []
CHANGES: dict[str, tuple[dict[str, Any], tuple[str, str, str], str]] = {
    "slope": ({"slope": 0.25}, ("constant", "0.1 of mul", "0.25 of mul"), "the slope"),
    "twice": ({"twice": True}, ("op", "nothing", "sin giving float32[4,4]"), "twice"),
    "table": ({"table": [9.0] * 4}, ("constant", "[1. 2. 3. 4.] of ", "[9. 9. 9. 9.] of "), ""),
    "host": ({"host": 3.0}, ("host op", "aten.mul.Tensor ((", "aten.mul.Tensor (("), ""),
    "result": ({"slope": 0.5}, ("output", "the value 0.1", "the value 0.5"), ""),
    "nesting": ({"twice": True}, ("output", "", ""), ""),
    "input": ({"twice": True}, ("input", "a tensor found by name, ", "another one"), "the input"),
    "state": ({"twice": True}, ("output", "a write to a tensor, float32[4,4]", "nothing"), ""),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_that_no_guard_sees(mesh: xd.DeviceMesh, settings: Settings, name: str) -> None:
    changed, (what, kept, now), mark = CHANGES[name]
    OTHERS[:] = [placed(mesh, 4, 4), placed(mesh, 4, 4)]
    function, x = FUNCTIONS[name], placed(mesh, 4, 4)
    step: Any = xd.compile(lambda x: function(x, settings))
    step(x)
    assert step.verify(x) == Verification(True)
    settings.write(**changed)
    found = step.verify(x)
    step(x)
    assert step.stats()["traces"] == 1  # No guard sees it: else nothing is shown here.
    assert (found.is_same, found.note) == (False, "")
    assert str(found).splitlines() == [*map(str, found.differences)]
    each = next(each for each in found.differences if each.what == what)
    assert each.kept.startswith(kept)
    assert each.now.startswith(now)
    assert line_of(mark) in each.line if mark else True
    assert len(found.differences) == 1 or name in ("nesting", "state")
    settings.write()
    assert step.verify(x).is_same


def act(x: Any, slope: float = 0.1) -> Any:
    return x * slope


def test_what_guards_do_not_see_yet(mesh: xd.DeviceMesh) -> None:
    """Either the guards see it, or `verify` does."""
    big, x = np.ones(1_000_000), placed(mesh, 4, 4)
    for function, change in (
        (lambda x: act(x), lambda: setattr(act, "__defaults__", (0.25,))),
        (lambda x: x * float(big.mean()), lambda: big.fill(2.0)),
    ):
        step = xd.compile(function)
        step(x)
        assert step.verify(x).is_same
        change()
        found = step.verify(x)
        assert not found.is_same
        assert [each.what for each in found.differences] == ["constant"] or "anew" in found.note


def test_where_a_call_would_trace_anew(mesh: xd.DeviceMesh) -> None:
    known = {"gain": 1.0}
    step, x = xd.compile(lambda x: x * known["gain"]), placed(mesh, 4, 4)
    assert step.verify(x).note == "the call would trace anew: first call"
    step(x)
    known["gain"] = 2.0
    found = step.verify(x)
    assert not found.is_same
    assert found.differences == ()
    where = "the variable 'known' of test_where_a_call_would_trace_anew"
    changed = f"the item 'gain' of {where} changed from 1.0 to 2.0"
    assert str(found) == found.note == f"the call would trace anew: {changed}"
    step(x)
    assert str(step.verify(x)) == "same"
    assert "shape=(2, 4)" in step.verify(placed(mesh, 2, 4)).note


def test_arguments_that_were_placed_and_computed(mesh: xd.DeviceMesh) -> None:
    step, x = xd.compile(lambda x: (x[0].sum() + x.sum(), x[1] * 2)), placed(mesh, 4, 4)
    step(x)
    assert step.verify(x * 3).differences == ()
    step(x * 3)
    assert step.verify(x).differences == ()


def test_a_number_read_on_the_host(mesh: xd.DeviceMesh) -> None:
    """Whether the program fits is asked without drawing, and without the host's writes."""
    count, x = torch.zeros(1), placed(mesh, 4, 4)

    def function(x: Any) -> Any:
        count.add_(1)
        return x * 2 if count.item() < 3 else x * torch.rand(4)

    step = xd.compile(function)
    for number in range(4):
        state = torch.get_rng_state()
        found = step.verify(x)
        assert found.differences == ()
        assert found.note.startswith("the call would trace anew") or number == 3
        assert count.item() == number
        assert torch.equal(torch.get_rng_state(), state)
        step(x)


# ------------------------------------------------------------------ every so many calls


def test_every_so_many_calls(
    mesh: xd.DeviceMesh, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "3")
    step, x = xd.compile(lambda x: x * settings["slope"]), placed(mesh, 4, 4)
    step(x)
    settings.write(slope=0.25)
    step(x)  # wrong, and the third one says so
    with pytest.raises(CompileError) as raised:
        step(x)
    text = str(raised.value)
    assert text.startswith(
        "Call 3 of the compiled step 'test_every_so_many_calls.<locals>.<lambda>'"
    )
    assert "\n  constant: 0.1 of mul in the program, 0.25 of mul now, " in text
    assert "Pass what changes as an argument" in text
    assert step.stats()["traces"] == 1
    settings.write()
    for _ in range(4):
        step(x)
    assert step.stats()["calls"] == 7


@pytest.mark.parametrize("text", ["0", "-1", "often", "1.5"])
def test_a_bad_number_of_calls(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(CompileError, match=f"{VARIABLE}={text!r}.* whole number from 1 on.*=100"):
        xd.compile(lambda x: x)


def test_a_runtime_that_cannot() -> None:
    class Step(CompiledStep):
        __call__ = hlo = stats = metrics = lambda self: None  # pyright: ignore

    with pytest.raises(CompileError, match=r"verify a call of 2 arguments\. Step cannot"):
        Step(abs).verify(1, x=2)


def test_texts() -> None:
    difference = Difference("op", "nothing", "sin")
    assert str(difference) == "op: nothing in the program, sin now"
    assert (
        str(Difference("op", "a", "b", "f.py:1 (g)")) == "op: a in the program, b now, f.py:1 (g)"
    )
    assert str(Verification(False, (difference, difference))).count("\n") == 1
