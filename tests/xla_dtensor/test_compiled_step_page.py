"""Each row of docs/compiled_step.md is a small step that is called before and after a change.

A row's first column is its name. Rows and cases have to be the same, so that a row without a test
fails, and a test without a row. Plain PyTorch runs the same steps (`compiled_step_rows`).
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import random
import re
from collections import UserDict
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.utils._pytree import tree_flatten

import xla_dtensor as xd
from tests.xla_dtensor.compiled_step_rows import CASES, VARIABLE, Batch, Case, Put
from xla_dtensor.errors import ArgumentTypeError, CompileError

PAGE = Path(__file__).resolve().parents[2] / "docs" / "compiled_step.md"
TABLES = {"input": "Inputs", "guard": "Guards", "refused": "Refused", "": "On each runtime"}


@cache
def tables() -> dict[str, dict[str, list[str]]]:
    """Return the page's tables, and of each its rows by their first column."""
    found: dict[str, dict[str, list[str]]] = {}
    rows = None
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            rows = None
        elif rows is None:
            rows = found.setdefault(TABLES.get(cells[0], cells[0]), {})
        elif not set(line) <= set("|- "):
            assert cells[0] not in rows
            rows[cells[0]] = cells[1:]
    return found


def test_every_row_has_a_case_and_every_case_a_row() -> None:
    of_cases = {table: {case.row for case in cases} for table, cases in CASES.items()}
    del of_cases["walked through"]
    of_cases |= {"Refused": {*REFUSED}, "On each runtime": {*ON_EACH_RUNTIME}}
    of_cases |= {"what Python does with it": {*NUMBERS}}
    assert {table: {*rows} for table, rows in tables().items()} == of_cases
    for row, columns in ON_EACH_RUNTIME.items():
        assert tables()["On each runtime"][row] == [words for words, _ in columns]


# ---------------------------------------------------------------------- steps beside PyTorch


@pytest.fixture(autouse=True)
def settings_as_they_were(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(VARIABLE, "")
    yield
    usual_settings()


def usual_settings() -> None:
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)
    for device in ("cpu", "xla"):
        torch.set_autocast_enabled(device, False)


def called(case: Case, put: Put, wrap: Callable[[Any], Any]) -> tuple[Any, list[int], list[str]]:
    """Call a case's step; return its results and what is left, the traces, and their reasons."""
    usual_settings()
    torch.manual_seed(7)
    made = case.make(put)
    step = wrap(made.step)
    results, traces, reasons = [], [], []
    for call in range(len(case.traces)):
        made.change(call)
        args = made.args(put(torch.linspace(-1, 2, 4) * (call + 1)), call)
        results.append(plain((step(*args), args)))
        if wrap is xd.compile:
            traces.append(step.stats()["traces"])
            reasons = list(step.stats()["reasons"])
    return (results, plain(made.state()), torch.get_rng_state()), traces, reasons


def plain(value: Any) -> Any:
    """Copy tensors to the host, and take objects apart that are no pytrees."""
    if isinstance(value, Batch | UserDict):
        return plain(dict(vars(value)))
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value


ALL_CASES = [(table, case) for table, cases in CASES.items() for case in cases]


@pytest.mark.only_on("jax")
@pytest.mark.parametrize(
    ("table", "case"), ALL_CASES, ids=[f"{table}: {case.row}" for table, case in ALL_CASES]
)
def test_a_row(mesh: xd.DeviceMesh, table: str, case: Case) -> None:
    expected, *_ = called(case, Put(), lambda step: step)
    found, traces, reasons = called(case, Put(mesh), xd.compile)
    assert_same(found, expected)
    assert traces == list(case.traces), reasons
    assert table != "Guards" or case.reason in reasons[1], reasons


def assert_same(found: Any, expected: Any) -> None:
    leaves, tree = tree_flatten(found)
    wanted, wanted_tree = tree_flatten(expected)
    assert tree == wanted_tree
    for one, other in zip(leaves, wanted, strict=True):
        if isinstance(other, torch.Tensor):
            torch.testing.assert_close(one, other)
        else:
            assert one == other


@pytest.mark.only_on("jax")
def test_four_programs_are_kept(mesh: xd.DeviceMesh) -> None:
    config = SimpleNamespace(scale="0")
    step = xd.compile(lambda x: x * float(config.scale))
    x, traces = xd.distribute_tensor(torch.ones(4), mesh), []
    for value in (1.0, 2.0, 3.0, 4.0, 1.0, 3.0, 5.0, 2.0):
        config.scale = str(value)
        assert step(x).cpu()[0] == value
        traces.append(step.stats()["traces"])
    assert traces == [1, 2, 3, 4, 4, 4, 5, 6]


# ---------------------------------------------------------------------- what is refused


def returns_of_numpy(generator: Any) -> Callable[..., Any]:
    return lambda x: x * float(generator.random())


def of_iterator(kind: Callable[[], Any]) -> Callable[..., Any]:
    elements = kind()
    return lambda x: x * next(elements)


def a_generator_on_the_mesh(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x).normal_(generator=torch.Generator().manual_seed(0))


OF_HOST = torch.ones(4)
OPTIMIZER = torch.optim.SGD([nn.Parameter(torch.ones(4))], lr=0.1)


def an_optimizer_that_keeps_a_norm(x: torch.Tensor) -> torch.Tensor:
    OPTIMIZER.param_groups[0]["norm"] = x.norm().item()
    return x * 2


class Noting(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = x.sum().item()
        return super().forward(x)


def noting_layers(mesh: xd.DeviceMesh) -> nn.Module:
    return xd.distribute_module(xd.scan_layers([Noting(4, 4), Noting(4, 4)]), mesh)


class Signed(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.bias[0] > 0 else -x


def signed_layers(mesh: xd.DeviceMesh) -> nn.Module:
    layers = [Signed(4, 4), Signed(4, 4)]
    with torch.no_grad():
        for sign, layer in zip((1.0, -1.0), layers, strict=True):
            layer.bias.fill_(sign)
    return xd.distribute_module(xd.scan_layers(layers), mesh)


REFUSED: dict[str, list[Callable[..., Any]]] = {
    "Python needs the value of a tensor of the mesh: `float(loss)`, `tolist`, a format": [
        lambda x: x * float(x.sum()),
        lambda x: x.tolist(),
        lambda x: f"{x.sum().item():.3f}",
    ],
    "an object is stored or returned that holds tensors and that Python cannot copy: "
    "`dict.values()`, a generator": [
        lambda x: {"x": x * 2}.values(),
        lambda x: (each * 2 for each in (x + 1, x)),
    ],
    "branches go both ways in layers of one `scan_layers`, or 16 programs the wrong way": [
        lambda x, layers: layers(x[None])
    ],
    "a number of a part that runs several times is stored: `.item()` in a layer of `scan_layers`": [
        lambda x, layers: layers(x[None])
    ],
    "an element is taken of an iterator from before the call": [
        of_iterator(lambda: iter([1.0, 2.0])),
        of_iterator(lambda: (float(each) for each in range(3))),
    ],
    "`random.random()`, `numpy.random`, their generators": [
        lambda x: x * random.random(),
        lambda x: x * float(np.random.rand()),
        returns_of_numpy(random.Random(0)),
        returns_of_numpy(np.random.default_rng(0)),
    ],
    "a random op on the mesh is given a generator": [a_generator_on_the_mesh],
    "a plain CPU tensor from before the call is given values of the mesh": [
        lambda x: OF_HOST.add_(x)
    ],
    "a plain CPU tensor among the arguments is written in place": [
        lambda x, host: host.add_(x.sum()),
        lambda x, host: host[:2].zero_(),
    ],
    "the shape of a tensor from before the call is changed in place: `x.t_()`": [
        lambda x: x.unsqueeze_(0)
    ],
    "a number that only the program knows is stored in an optimizer: "
    '`group["norm"] = norm.item()`': [an_optimizer_that_keeps_a_norm],
    "a NumPy array among the arguments": [lambda x, array: x * array[0]],
    "a compiled step in another one": [lambda x: xd.compile(lambda x: x * 2)(x)],
}
REFUSALS = [(row, number) for row, ops in REFUSED.items() for number in range(len(ops))]


class Around:
    """What a step changes before it fails, and how all of it is now."""

    def __init__(self, mesh: xd.DeviceMesh) -> None:
        self.weight = nn.Parameter(xd.distribute_tensor(torch.ones(4), mesh))
        self.optimizer = torch.optim.AdamW([self.weight], lr=0.1)
        self.calls, self.log = 0, []
        self.latest: dict[str, Any] = {"loss": 1.0}

    def step(self, x: torch.Tensor) -> torch.Tensor:
        loss = (self.weight * x * torch.rand(4) * torch.rand_like(x)).square().sum()
        loss.backward()
        self.optimizer.step()
        self.calls = 7
        self.log.append(loss)
        self.latest.update(loss=loss)
        return loss.detach()

    def now(self) -> Any:
        of_optimizer = plain(self.optimizer.state_dict())
        names = self.calls, len(self.log), plain(self.latest), random.getstate()
        of_numpy = np.random.get_state()[1].tolist()
        return plain((self.weight, self.weight.grad, OF_HOST)), of_optimizer, names, of_numpy

    def drawn(self, x: torch.Tensor) -> Any:
        return plain((torch.rand_like(x), torch.rand(4)))


@pytest.mark.only_on("jax")
@pytest.mark.parametrize(("row", "number"), REFUSALS)
def test_what_is_refused(mesh: xd.DeviceMesh, row: str, number: int) -> None:
    op, words = REFUSED[row][number], tables()["Refused"][row][0].strip("`")
    around, x = Around(mesh), xd.distribute_tensor(torch.ones(4), mesh)

    def step(x: torch.Tensor, *others: Any) -> Any:
        around.step(x)
        return op(x, *others)

    others = (np.ones(4),) if "NumPy array" in row else ()
    error = ArgumentTypeError if others else CompileError
    layers = signed_layers if "branches" in row else noting_layers
    others = (layers(mesh),) if "scan_layers" in row else others
    others = (torch.ones(4),) if "among the arguments is written" in row else others
    torch.manual_seed(3)
    drawn, before = around.drawn(x), around.now()
    torch.manual_seed(3)
    with pytest.raises(error, match=re.escape(words)):
        xd.compile(step)(x, *others)
    assert_same(around.now(), before)
    assert_same(around.drawn(x), drawn)


# ---------------------------------------------------------------------- on each runtime


def calls_of(step: Any, mesh: xd.DeviceMesh) -> list[torch.Tensor]:
    x = xd.distribute_tensor(torch.ones(4), mesh)
    return [plain(step(x)) for _ in range(3)]


def python_runs(times: int) -> Callable[..., None]:
    def check(mesh: xd.DeviceMesh, logged: Any) -> None:
        def step(x: torch.Tensor) -> torch.Tensor:
            print("Python runs")
            return x * 2

        with contextlib.redirect_stdout(io.StringIO()) as printed:
            calls_of(xd.compile(step), mesh)
        assert printed.getvalue().count("Python runs") == times

    return check


def a_guard_changes(mesh: xd.DeviceMesh, logged: Any) -> None:
    config = SimpleNamespace(op=torch.neg)
    step = xd.compile(lambda x: config.op(x))
    assert calls_of(step, mesh)[2].tolist() == [-1] * 4
    traces = step.stats()["traces"]
    config.op = torch.exp
    assert calls_of(step, mesh)[2][0] > 2
    assert step.stats()["traces"] == traces + 1


def effects_are_done(mesh: xd.DeviceMesh, logged: Any) -> None:
    owner, history = SimpleNamespace(last=None), []

    def step(x: torch.Tensor) -> torch.Tensor:
        owner.last = x.sum()
        history.append(x * 2)
        return x

    calls_of(xd.compile(step), mesh)
    assert_same(plain((owner.last, history)), [torch.tensor(4.0), [torch.full((4,), 2.0)] * 3])


def a_counter(traces: int) -> Callable[..., None]:
    def check(mesh: xd.DeviceMesh, logged: Any) -> None:
        owner = SimpleNamespace(calls=0)

        def step(x: torch.Tensor) -> torch.Tensor:
            owner.calls += 1
            return x.sum(0) * 0 + owner.calls

        compiled = xd.compile(step)
        found = [*calls_of(compiled, mesh), *calls_of(compiled, mesh)]
        assert [each.item() for each in found] == [1, 2, 3, 4, 5, 6]
        assert (compiled.stats()["traces"], owner.calls) == (traces, 6)

    return check


NUMBERS: dict[str, tuple[Callable[[Any, torch.Tensor], Any], int]] = {
    "arithmetic, `round`, `abs`, `math.cos`; `isinstance`": (
        lambda n, x: x * round(math.cos(n), 3) + abs(n - 4) + isinstance(n, int),
        1,
    ),
    "`if calls % 100 == 0`, `min`, `max`": (lambda n, x: x * n if n % 3 else x * min(n, 4), 3),
    '`range(calls)`, `x[calls]`, `torch.zeros(calls)`, `f"{calls}"`': (
        lambda n, x: x[n - 1] + sum(range(n)) + torch.zeros(n).sum() + float(f"{n}"),
        6,
    ),
    "a key of a dict, `type(calls) is int`, an int of more than 64 bits": (
        lambda n, x: x * {1: 3.0}.get(n, 2.0) + (type(n) is int) + 2**64 * n / 2**64,
        6,
    ),
}


@pytest.mark.only_on("jax")
@pytest.mark.parametrize("row", NUMBERS)
def test_a_row_of_numbers(mesh: xd.DeviceMesh, row: str) -> None:
    function, traces = NUMBERS[row]
    counts = {"calls": 0}

    def step(x: torch.Tensor) -> Any:
        counts["calls"] += 1
        return function(counts["calls"], x)

    compiled, x = xd.compile(step), torch.linspace(-1, 2, 8)
    for call in range(6):
        expected = function(call + 1, x)
        found = compiled(xd.distribute_tensor(x, mesh, [Replicate(), Shard(0)]))
        torch.testing.assert_close(found.full_tensor(), expected)
    assert compiled.stats()["traces"] == traces, compiled.stats()["reasons"]


def pythons_draws(mesh: xd.DeviceMesh, logged: Any) -> None:
    random.seed(5)
    expected = [random.random() for _ in range(3)]
    random.seed(5)
    found = calls_of(xd.compile(lambda x: x * random.random()), mesh)
    torch.testing.assert_close([each[0].item() for each in found], expected)


def pythons_draws_are_refused(mesh: xd.DeviceMesh, logged: Any) -> None:
    with pytest.raises(CompileError, match="drew numbers from Python's random"):
        pythons_draws(mesh, logged)


def draws(mesh: xd.DeviceMesh, logged: Any) -> None:
    torch.manual_seed(5)
    expected = [torch.rand(4) for _ in range(3)]
    torch.manual_seed(5)
    assert_same(calls_of(xd.compile(lambda x: x * torch.rand(4)), mesh), expected)


Check = Callable[[xd.DeviceMesh, Any], None]
ON_EACH_RUNTIME: dict[str, tuple[tuple[str, Check], tuple[str, Check]]] = {
    "Python of the step": (
        ("once for each trace", python_runs(1)),
        ("on every call", python_runs(3)),
    ),
    "a guard that changes": (
        ("traced anew", a_guard_changes),
        ("compiled anew, if the graph differs", a_guard_changes),
    ),
    "effects in Python": (
        ("done after each run", effects_are_done),
        ("done by Python", effects_are_done),
    ),
    "a counter that the step reads and adds to": (
        ("an input", a_counter(traces=1)),
        ("an input, but for 0 and 1", a_counter(traces=2)),
    ),
    "`random.random()`": (
        ("refused", pythons_draws_are_refused),
        ("drawn on every call, compiled anew", pythons_draws),
    ),
    "draws of plain CPU tensors": (("PyTorch's numbers", draws), ("PyTorch's numbers", draws)),
}


@pytest.mark.only_on("jax")
@pytest.mark.parametrize("row", ON_EACH_RUNTIME)
def test_a_row_of_jax(mesh: xd.DeviceMesh, caplog: pytest.LogCaptureFixture, row: str) -> None:
    with caplog.at_level(logging.WARNING, "xla_dtensor"):
        ON_EACH_RUNTIME[row][0][1](mesh, caplog)


@pytest.mark.only_on("torch_xla")
@pytest.mark.parametrize("row", ON_EACH_RUNTIME)
def test_a_row_of_torch_xla(
    mesh: xd.DeviceMesh, caplog: pytest.LogCaptureFixture, row: str
) -> None:
    ON_EACH_RUNTIME[row][1][1](mesh, caplog)


# ---------------------------------------------------------------------- when a call fails


def raises(error: BaseException) -> Callable[..., Any]:
    def hook(*_: Any, **__: Any) -> None:
        raise error

    return hook


FAILURES = {
    "an exception": KeyError("the step"),
    "Ctrl-C": KeyboardInterrupt("the user"),
    "a hook that raises": ValueError("the hook"),
    "a compiler that refuses": RuntimeError("the compiler"),
}


@pytest.mark.only_on("jax")
@pytest.mark.parametrize("cause", FAILURES)
def test_a_call_that_fails(mesh: xd.DeviceMesh, monkeypatch: Any, cause: str) -> None:
    paragraph = PAGE.read_text(encoding="utf-8").split("## When a call fails\n")[1]
    assert cause.lower() in paragraph.lower()
    around, error = Around(mesh), FAILURES[cause]
    x = xd.distribute_tensor(torch.ones(4), mesh)
    layer = nn.Identity()

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = around.step(x)
        if cause in ("an exception", "Ctrl-C"):
            raise error
        return layer(loss)

    if "hook" in cause:
        layer.register_forward_hook(raises(error))
    if "compiler" in cause:
        monkeypatch.setattr(jax.stages.Lowered, "compile", raises(error))
    torch.manual_seed(3)
    drawn, before = around.drawn(x), around.now()
    torch.manual_seed(3)
    with pytest.raises(type(error), match=str(error).strip("'")):
        xd.compile(step)(x)
    monkeypatch.undo()
    assert_same(around.now(), before)
    assert_same(around.drawn(x), drawn)
