"""Programs that differ between processes: what each is told."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import Shard

import xla_dtensor as xd
from xla_dtensor.errors import ProgramMismatchError
from xla_dtensor.runtimes.same_program import checks

__all__ = ["cost", "told"]


def _put(*shape: int) -> Any:
    mesh = xd.init_device_mesh("xla", (len(xd.get_runtime().device_ids()),))
    return xd.distribute_tensor(torch.ones(shape), mesh, [Shard(0)])


def _shapes(process: int) -> None:
    train = xd.compile(lambda x: x.sum())
    train(_put(4 + 4 * process, 4))


def _branch(process: int) -> None:
    def train(x: Any) -> Any:
        return (x * 2).sum() if process else x.sum()

    xd.compile(train)(_put(4, 4))


def _order(process: int) -> None:
    def train(x: Any) -> Any:
        return x.sum()

    def evaluate(x: Any) -> Any:
        return x.amax()

    steps = [xd.compile(train), xd.compile(evaluate)]
    for step in reversed(steps) if process else steps:
        step(_put(4, 4))


def _eager(process: int) -> None:
    with xd.program_checks("every"):
        x = _put(4, 4) + 1
        if process:
            x = x * 2
        x.sum()


def _values(process: int) -> None:
    with xd.program_checks("every"):
        _put(4, 4).mul_(torch.full((4,), float(process)))


def _draws(process: int) -> None:
    torch.manual_seed(process)
    xd.compile(lambda x: x * torch.rand(4))(_put(4, 4))


def _equal_draws(process: int) -> None:
    torch.manual_seed(7)
    step = xd.compile(lambda x: (x * torch.rand(4)).sum())
    assert step(_put(4, 4)).full_tensor().item() != step(_put(4, 4)).full_tensor().item()
    torch.manual_seed(process)  # No longer compared; what each draws is its own.


def _configuration(process: int) -> None:
    xd.check_same_program("the learning rate", 0.1 * (process + 1))


def _equal(process: int) -> None:
    xd.check_same_program("the learning rate", 0.1)
    with xd.program_checks("every"):
        step = xd.compile(lambda x: (x @ x.t()).sum())
        for _ in range(3):
            step(_put(4, 4))
        assert (_put(4, 4) + 1).full_tensor().sum().item() == 32


def _gather_of_one(process: int) -> None:
    if process == 0:
        _put(4, 4).cpu()


def _guard(process: int, comes_late: bool = False) -> None:
    settings = {"scale": "1"}

    def train(x: Any) -> Any:
        return (x * float(settings["scale"])).sum()

    step, x = xd.compile(train), _put(4, 4)
    for _ in range(2):
        step(x).full_tensor()
    settings["scale"] = "2"  # in all processes: each traces anew
    assert step(x).full_tensor().item() == 32
    settings["scale"] = str(2 + process)
    if comes_late and not process:
        time.sleep(4)
    step(x).full_tensor()


def _numbers(process: int) -> None:
    settings = {"calls": 0}

    def train(x: Any) -> Any:
        settings["calls"] += 1
        return (x * settings["calls"]).sum()

    step, x = xd.compile(train), _put(4, 4)
    for call in range(200):
        settings["calls"] += process if call == 30 else 0
        step(x).full_tensor()
        time.sleep(0.05)


PROGRAMS: dict[str, Callable[[int], None]] = {
    "shapes": _shapes,
    "branch": _branch,
    "order": _order,
    "eager": _eager,
    "values": _values,
    "configuration": _configuration,
    "equal": _equal,
    "draws": _draws,
    "equal draws": _equal_draws,
    "gather of one": _gather_of_one,
    "numbers": _numbers,
    "guard": _guard,
    "guard, late": lambda process: _guard(process, comes_late=True),
}


def told(
    program: str, patience_seconds: float = 20.0, folder: str | None = None
) -> tuple[str, float]:
    """What this process is told when it runs a program, and after how many seconds.

    Where another process ends, nobody is asked: it is written into a folder as well.
    """
    runs: Any = checks()
    runs.patience_seconds = patience_seconds
    began = time.monotonic()
    try:
        PROGRAMS[program](runs._store.index)
    except ProgramMismatchError as error:
        if folder is not None:
            Path(folder, str(runs._store.index)).write_text(str(error))
        return str(error), time.monotonic() - began
    return "", time.monotonic() - began


def cost(calls: int) -> dict[str, float]:
    """Milliseconds of a small compiled step, and of a check, by mode."""
    runs: Any = checks()
    step, x, found = xd.compile(lambda x: (x @ x.t()).sum()), _put(4, 4), {}
    for mode in ("off", "first", "every"):
        with xd.program_checks(mode):
            step(x).item()
            before, counted, began = runs.seconds, runs._counts.total(), time.monotonic()
            for _ in range(calls):
                step(x).item()
            found[f"step, {mode}"] = (time.monotonic() - began) / calls * 1000
            number = runs._counts.total() - counted
            found[f"checks, {mode}"] = float(number)
            if number:
                found["check"] = (runs.seconds - before) / number * 1000
    return found
