"""Numbers that change between calls of a compiled step, and what Python computes of them."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Shard

import xla_dtensor as xd
from xla_dtensor.core.errors import CompileError

pytestmark = pytest.mark.only_on("jax")

CALLS = 6
Make = Callable[[Any], Callable[[torch.Tensor], Any]]
COUNTER = 0


class Thing:
    """Has attributes."""

    shared = 0

    def __init__(self) -> None:
        self.n, self.total, self.log = 0, 0.0, list[Any]()


class Meter:
    """As training loops have one."""

    def __init__(self) -> None:
        self.sum, self.count, self.average = 0.0, 0, 0.0

    def update(self, value: float, count: int = 1) -> None:
        self.sum += value * count
        self.count += count
        self.average = self.sum / self.count


CASES: dict[str, tuple[Make, int | None]] = {}


def case(traces: int | None) -> Callable[[Make], Make]:
    def register(make: Make) -> Make:
        CASES[make.__name__] = make, traces
        return make

    return register


@case(None)
def becomes_a_float(thing: Any) -> Any:
    """What is returned, and no more, was an int when the same program was compiled."""
    total, more = 1, 2

    def step(x: torch.Tensor) -> Any:
        nonlocal total, more
        x = x + total
        total += more
        more += 0.0
        return x, total

    return step


@case(1)
def counter(thing: Any) -> Any:
    def step(x: torch.Tensor) -> Any:
        thing.n += 1
        return x * thing.n, thing.n / 2

    return step


@case(1)
def sum_of_losses(thing: Any) -> Any:
    def step(x: torch.Tensor) -> Any:
        loss = x.square().sum()
        thing.total += loss.item()
        return loss

    return step


@case(1)
def meter(thing: Any) -> Any:
    thing.meter = Meter()

    def step(x: torch.Tensor) -> Any:
        loss = x.square().sum()
        thing.meter.update(loss.item(), len(x))
        return loss, thing.meter.average

    return step


@case(1)
def items_and_variables(thing: Any) -> Any:
    stats, calls = {"kl": 0.0, "steps": 0}, 0
    thing.stats = stats

    def step(x: torch.Tensor) -> Any:
        nonlocal calls
        global COUNTER
        calls += 1
        COUNTER += calls
        stats["kl"] += x.mean().item()
        stats["steps"] += 2
        Thing.shared += 3
        return x / stats["steps"] + calls, COUNTER, Thing.shared

    return step


@case(2)
def warm_up(thing: Any) -> Any:
    def step(x: torch.Tensor) -> Any:
        thing.n += 1
        return x * min(1.0, thing.n / 3)

    return step


@case(1)
def cosine(thing: Any) -> Any:
    def step(x: torch.Tensor) -> Any:
        thing.n += 1
        return x * (0.1 * (1 + math.cos(math.pi * thing.n / 10)) / 2)

    return step


@case(2)
def every_third_call(thing: Any) -> Any:
    def step(x: torch.Tensor) -> Any:
        thing.n += 1
        if thing.n % 3 == 0:
            thing.log.append({"n": thing.n, "loss": x.sum().item()})
        return x + 1

    return step


@case(1)
def as_scalars_of_ops(thing: Any) -> Any:
    def step(x: torch.Tensor) -> Any:
        thing.n += 1
        share = thing.n / 4
        x = x.clamp(-share, max=share) + torch.full_like(x, thing.n)
        x = x.add(x, alpha=share).masked_fill(x > 0, share) + torch.where(x > share, thing.n, x)
        return x**thing.n, (x * 3).long() * thing.n, (x > 1) * share

    return step


@case(1)
def in_a_backward_pass(thing: Any) -> Any:
    def step(x: torch.Tensor) -> Any:
        thing.n += 1
        x = x.detach().requires_grad_()
        ((x * thing.n) ** 2 / thing.n).sum().backward()
        return x.grad

    return step


@case(None)  # PyTorch's C++ asks what the power is; before 2.13 for more than whether it is 0
def a_power_in_a_backward_pass(thing: Any) -> Any:
    def step(x: torch.Tensor) -> Any:
        thing.n += 1
        x = x.detach().requires_grad_()
        (x.abs() ** (1 / thing.n)).sum().backward()
        return x.grad

    return step


@case(1)
def of_plain_tensors(thing: Any) -> Any:
    def step(x: torch.Tensor) -> Any:
        thing.n += 1
        row = torch.arange(8, dtype=x.dtype) * thing.n
        row[1] = thing.n
        return x + row, row, torch.full((2,), thing.n)

    return step


@case(1)
def told_by_its_class(thing: Any) -> Any:
    def step(x: torch.Tensor) -> Any:
        thing.n += 1
        is_int = isinstance(thing.n, int) and isinstance(thing.n * 2, int)
        name = len(type(thing.n / 2).__name__)
        return x * (2 if is_int and isinstance(thing.n / 2, float) else 5) + name

    return step


@case(CALLS)
def told_by_its_type(thing: Any) -> Any:
    def step(x: torch.Tensor) -> Any:
        thing.n += 1
        return x * (thing.n if type(thing.n) is int else -1)

    return step


@case(CALLS)
def a_text(thing: Any) -> Any:
    def step(x: torch.Tensor) -> Any:
        thing.n += 1
        thing.log.append(f"call {thing.n:02d}")
        return x * thing.n

    return step


@case(CALLS)
def a_key_whose_error_is_caught(thing: Any) -> Any:
    names = {1: 3.0, 2: 5.0}

    def step(x: torch.Tensor) -> Any:
        thing.n += 1
        try:
            return x * names.get(thing.n, 7.0)
        except TypeError:
            return x * 0

    return step


@case(CALLS)
def more_than_64_bits(thing: Any) -> Any:
    thing.n = 1

    def step(x: torch.Tensor) -> Any:
        thing.n = (thing.n * 6364136223846793005 + 1442695040888963407) % 2**64
        return x * (thing.n % 7)

    return step


def on(mesh: xd.DeviceMesh, x: torch.Tensor) -> torch.Tensor:
    return xd.distribute_tensor(x, mesh, [Shard(0), Shard(x.ndim - 1)])


def values_of(value: Any) -> Any:
    """Return what can be compared: tensors and floats to 10 digits, and types."""
    if isinstance(value, torch.Tensor):
        whole = value.full_tensor() if isinstance(value, xd.DTensor) else value
        numbers = [
            f"{n + 0.0:.10g}" for n in torch.as_tensor(whole.cpu()).double().flatten().tolist()
        ]
        return tuple(whole.shape), whole.dtype, numbers
    if isinstance(value, dict):
        return {key: values_of(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [values_of(each) for each in value]
    if isinstance(value, Thing | Meter):
        return values_of(vars(value))
    return type(value), f"{value:.10g}" if isinstance(value, float) else repr(value)


def outcomes(
    make: Make, put: Callable[[Any], Any], wrap: Callable[[Any], Any]
) -> tuple[list[Any], Any]:
    global COUNTER
    COUNTER = Thing.shared = 0
    thing = Thing()
    step = wrap(make(thing))
    results = []
    for call in range(CALLS):
        x = torch.linspace(-1, 2 + call, 32, dtype=torch.float64).view(4, 8)
        results.append(values_of([step(put(x)), thing]))
    return results, step


@pytest.mark.parametrize("name", CASES)
def test_as_pytorch(mesh: xd.DeviceMesh, name: str) -> None:
    make, traces = CASES[name]
    expected, _ = outcomes(make, lambda x: x, lambda step: step)
    found, step = outcomes(make, partial(on, mesh), xd.compile)
    assert found == expected
    assert traces in (None, step.stats()["traces"]), step.stats()["reasons"]


# ------------------------------------------------------------------ arguments


def test_numbers_among_the_arguments(mesh: xd.DeviceMesh) -> None:
    x = on(mesh, torch.ones(4, 8))

    def step(x: torch.Tensor, stats: dict[str, Any], beta: float = 0.0, epoch: int = 0) -> Any:
        stats["calls"] += 1
        return x * beta + (epoch if epoch < 2 else stats["calls"])

    compiled = xd.compile(step)
    for call in range(CALLS):
        stats = {"calls": call}
        found = compiled(x, stats, beta=call / 4, epoch=call)
        expected = step(torch.ones(4, 8), {"calls": call}, call / 4, call)
        assert torch.equal(found.full_tensor(), expected)
        assert stats == {"calls": call + 1}
    # the first one, lent numbers, the other side of the branch
    assert compiled.stats()["traces"] == 3


def test_numbers_that_select_are_kept_apart(mesh: xd.DeviceMesh) -> None:
    x = on(mesh, torch.arange(8.0))
    compiled = xd.compile(lambda x, size: x[: len(range(size))].sum())
    for size in (1, 2, 3, 4, 5, 6) * 4:
        assert compiled(x, size).full_tensor().item() == sum(range(size))
    assert compiled.stats()["traces"] <= 12


def test_numbers_that_are_equal_in_python_only(mesh: xd.DeviceMesh) -> None:
    x, step = on(mesh, torch.ones(4)), xd.compile(lambda x, n: 1 / (x * n))
    for number in (1.0, 0.0, -0.0, 0.0, 2.0, -0.0, math.nan):
        expected = 1 / (torch.ones(4) * number)
        assert torch.equal(step(x, number).full_tensor().isnan(), expected.isnan())
        assert step(x, number).full_tensor().nan_to_num().tolist() == expected.nan_to_num().tolist()


def test_a_failed_call_leaves_the_numbers(mesh: xd.DeviceMesh) -> None:
    x, thing = on(mesh, torch.ones(4)), Thing()

    def fails(x: torch.Tensor) -> Any:
        thing.n += 1
        if thing.n == 3:
            raise ValueError("three")
        return x * thing.n

    step = xd.compile(fails)
    for _ in range(2):
        step(x)
    for _ in range(2):
        with pytest.raises(ValueError, match="three"):
            step(x)
        assert (thing.n, type(thing.n)) == (2, int)
    thing.n = 5
    assert step(x).full_tensor()[0].item() == 6
    assert (thing.n, type(thing.n)) == (6, int)


def test_verify_knows_them(mesh: xd.DeviceMesh) -> None:
    x, thing = on(mesh, torch.ones(4)), Thing()
    step = xd.compile(CASES["counter"][0](thing))
    for _ in range(3):
        step(x)
    assert step.verify(x)
    assert thing.n == 3
    branch = xd.compile(lambda x, epoch: x * epoch if epoch < 4 else x - epoch)
    for epoch in range(3):
        branch(x, epoch)
    assert branch.verify(x, 3)  # by the argument of this call, not by the last one's
    assert "would trace anew" in branch.verify(x, 5).note


# ------------------------------------------------------------------ drawn


def drawn(seed: int) -> str:
    """Return the source of a step on numbers in an object, a dict and around it."""
    draw = random.Random(seed)
    names = ["thing.n", "thing.total", "stats['a']", "stats['b']", "around"]

    def expression(depth: int = 0) -> str:
        if depth > 2 or draw.random() < 0.3:
            return draw.choice([*names, "3", "0.5", "loss"])
        a, b = expression(depth + 1), expression(depth + 1)
        return draw.choice(
            [
                *(f"({a} + {b})", f"({a} - {b})", f"({a} * {b}) % 17", f"({a} / (1 + abs({b})))"),
                *(f"({a} // (1 + abs({b})))", f"min({a}, {b})", f"max({a}, {b})", f"round({a})"),
                *(f"math.floor({a})", f"math.sin({a})", f"(-{a})", f"(abs({a}) + 1) ** 0.5"),
            ]
        ).replace("loss", "3" if depth else "loss")

    def statement() -> str:
        target, value = draw.choice(names), expression()
        if "loss" in value and target in ("thing.n", "stats['b']"):
            value = "2"
        return draw.choice(
            [
                f"{target} = {value.replace('loss', 'loss.item()')}",
                f"{target} += {value.replace('loss', '1')}",
                f"x = x * {value}",
                f"x = x.clamp(max=2 + {value.replace('loss', '1')}) + {draw.choice(names)}",
                f"if {value.replace('loss', '1')} > 2: {target} = {draw.choice(names)}",
                f"thing.log.append({value.replace('loss', '1')})",
            ]
        )

    body = "\n        ".join(statement() for _ in range(draw.randint(3, 8)))
    return f"""
def make(thing):
    stats, around = {{"a": 1.5, "b": 2}}, 1
    thing.stats = stats
    def step(x):
        nonlocal around
        loss = x.sum()
        {body}
        return x, around
    return step
"""


def differs(seed: int, mesh: xd.DeviceMesh) -> bool:
    names: dict[str, Any] = {"math": math}
    exec(drawn(seed), names)
    try:
        expected, _ = outcomes(names["make"], lambda x: x, lambda step: step)
    except (ArithmeticError, ValueError, TypeError):
        return False  # of Python's own arithmetic
    try:
        found, _ = outcomes(names["make"], partial(on, mesh), xd.compile)
    except CompileError:
        return False  # an `if` of what item() gives
    return found != expected


@pytest.mark.parametrize("seed", range(6))
def test_drawn(mesh: xd.DeviceMesh, seed: int) -> None:
    assert not differs(seed, mesh), drawn(seed)


@pytest.mark.thorough
@pytest.mark.parametrize("part", range(10))
def test_many_drawn(mesh: xd.DeviceMesh, part: int) -> None:
    assert [seed for seed in range(100 + part * 20, 120 + part * 20) if differs(seed, mesh)] == []


# Each beside a tensor whose dtype has no place for some of the numbers.
LIMITED: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "clamp": lambda x, n: x.clamp(-n, n),
    "at most": lambda x, n: x.clamp(max=n),
    "fill": lambda x, n: x.clone().fill_(n),
    "masked": lambda x, n: x.masked_fill(x > 2, n),
    "power": lambda x, n: x**n,
    "sum": lambda x, n: x + n,
    "tensor": lambda x, n: x * torch.tensor(n),
    "tensor of a list": lambda x, n: x + torch.tensor([n, 1]).sum(),
}


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("name", LIMITED)
def test_numbers_that_a_dtype_has_no_place_for(
    mesh: xd.DeviceMesh, name: str, dtype: torch.dtype
) -> None:
    if name in ("clamp", "at most") and torch.tensor(7, dtype=torch.uint8).clamp(min=-2) != 7:
        pytest.skip("the limits of this torch's own clamp wrap")
    x, op = torch.arange(8).to(dtype), LIMITED[name]
    step: Any = xd.compile(op)
    for number in (2, 3, 5, -3, 300, 2**31 + 1, 4):
        try:
            expected = op(x, number)
        except RuntimeError:
            with pytest.raises(RuntimeError):
                step(on(mesh, x), number)
        else:
            assert torch.equal(step(on(mesh, x), number).cpu(), expected), number


# As every layer of Transformers asks for its own class.
ASKS_FOR_CLASSES: dict[str, tuple[Callable[[Any, Any], Any], bool]] = {
    "of another": (lambda thing, n: type(thing) is Thing, True),
    "by name": (lambda thing, n: type(n).__name__, True),
    "of the number": (lambda thing, n: type(n) is int, False),
    "in a loop": (lambda thing, n: [type(each) for each in (n,)], False),
    "by another function": (lambda thing, n: list(map(type, [n])), False),
}


@pytest.mark.parametrize("name", ASKS_FOR_CLASSES)
def test_what_asks_for_a_class(mesh: xd.DeviceMesh, name: str) -> None:
    (ask, is_lent), thing, seen = ASKS_FOR_CLASSES[name], Thing(), list[Any]()

    def step(x: torch.Tensor) -> torch.Tensor:
        thing.n += 1
        seen.append(ask(thing, thing.n))
        return x * thing.n

    compiled: Any = xd.compile(step)
    for number in range(1, 6):
        assert compiled(on(mesh, torch.ones(4))).cpu().tolist() == [number] * 4
        assert seen[-1] == ask(Thing(), number)
    # Before 3.12 nothing tells which value type() is called with.
    is_told = sys.version_info >= (3, 12) or name == "by name"
    assert compiled.stats()["traces"] == (1 if is_lent and is_told else 5)


def test_what_fails_before_the_step_runs_leaves_the_numbers(
    mesh: xd.DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, calls = on(mesh, torch.ones(4)), 0

    def count(x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return x * calls

    step, cosine = xd.compile(count), math.cos
    for _ in range(2):
        step(x)
    monkeypatch.setattr(
        "xla_dtensor.runtimes.guards.reads._MOST_OWNERS", 1
    )  # the variable is lent by then
    with pytest.raises(CompileError, match="reads more than 1 objects"):
        step(x[:3])
    assert (calls, type(calls)) == (2, int)
    assert math.cos is cosine
    monkeypatch.undo()
    assert step(x[:3]).full_tensor()[0].item() == 3
