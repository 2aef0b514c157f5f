"""What an optimizer keeps in Python's numbers, in compiled steps: equal to plain PyTorch.

Most optimizers that are not torch's count their steps in ``state["step"] += 1`` or
``group["step"] += 1``, and remember numbers that come of their rate. Such optimizers are drawn:
where the number lies, who writes to it, what is made of it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import xla_dtensor as xd

pytestmark = pytest.mark.only_on("jax")
CALLS = 6


# What is made of a number, a factor of the update.
USES: dict[str, Callable[[Any], Any]] = {
    "factor": lambda n: n + 1,
    "power": lambda n: 1 - 0.9 ** (n + 1),
    "root": lambda n: math.sqrt(1 - 0.9 ** (n + 1)),
    "exponential": lambda n: math.exp(-n),
    "branch": lambda n: 1.0 if n > 1.5 else 0.5,
    "every second": lambda n: 1.0 if n % 2 else 0.25,
    "whole": lambda n: sum(range(math.floor(n) + 2)),
    "least": lambda n: min(1.0, (n + 1) / 4),
}
WRITES: dict[str, Callable[[Any, Any], Any]] = {
    "counted": lambda n, rate: n + 1,
    "decayed": lambda n, rate: n * 0.5,
    "summed": lambda n, rate: n + rate**2,
    "greatest": lambda n, rate: max(n, rate),
    "bounded": lambda n, rate: min(n + 1, 3),
    "kept": lambda n, rate: n,
    "a flag": lambda n, rate: False,
}
PLACES = ("group", "state", "beside the state", "in the group", "in the state", "attribute")
WRITERS = ("step", "step, last", "pre hook", "post hook", "the step around", "nobody")


def drawn_optimizer(seed: int) -> tuple[Any, str]:
    """An optimizer with its training step and the changes between calls, and what it is."""
    choose = random.Random(seed).choice
    place, writer, write, use = map(choose, (PLACES, WRITERS, [*WRITES], [*USES]))
    start, base = choose([0, 1, 0.5, 2.0]), choose([torch.optim.Optimizer, torch.optim.SGD])
    schedule, reset, two = choose([None, 0.5]), choose([None, 3]), choose([False, True])

    class Drawn(base):  # pyright: ignore[reportGeneralTypeIssues]
        def __init__(self, parameters: Any) -> None:
            options: Any = {"lr": 0.125}
            if base is torch.optim.Optimizer:
                options = {"defaults": options}
            super().__init__(parameters, **options)
            self.param_groups[0].update(n=start, inner={"n": start})
            self.n = start
            self.mixes = write in ("greatest", "bounded")
            if place == "beside the state":
                self.state["n"] = start  # pyright: ignore[reportArgumentType]

        def tables(self) -> list[Any]:
            if place == "group":
                return self.param_groups
            if place == "in the group":
                return [group["inner"] for group in self.param_groups]
            if place == "attribute":
                return [vars(self)]
            if place == "beside the state":
                return [self.state]
            tables = [self.state[p] for group in self.param_groups for p in group["params"]]
            if place == "in the state":
                tables = [table.setdefault("inner", {}) for table in tables]
            for table in tables:
                table.setdefault("n", start)
            return tables

        def written(self) -> None:
            for table in self.tables():
                table["n"] = WRITES[write](table["n"], self.param_groups[0]["lr"])

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            if writer == "step":
                self.written()
            for group in self.param_groups:
                for p, n in zip(group["params"], [t["n"] for t in self.tables()] * 2, strict=False):
                    p.grad.mul_(USES[use](n))
                    if base is torch.optim.Optimizer:
                        p.sub_(p.grad, alpha=group["lr"])
            if base is torch.optim.SGD:
                super().step()
            if writer == "step, last":
                self.written()

    def make(weights: list[Any]) -> tuple[Any, Callable[[], Any], Callable[[int], None]]:
        optimizer = Drawn(weights)
        if writer == "pre hook":
            optimizer.register_step_pre_hook(lambda *_: optimizer.written())
        if writer == "post hook":
            optimizer.register_step_post_hook(lambda *_: optimizer.written())

        def step() -> Any:
            if writer == "the step around":
                optimizer.written()
            for _ in range(1 + two):
                torch.stack([weight.square().sum() for weight in weights]).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            return sum(weight.detach().sum() for weight in weights)

        def between(call: int) -> None:
            if schedule:
                optimizer.param_groups[0]["lr"] *= schedule
            if call == reset:
                for table in optimizer.tables():
                    table["n"] = start

        return optimizer, step, between

    what = f"{place}, {start}, {write} by {writer}, {use}, {base.__name__}"
    return make, f"{what}, {schedule=}, {reset=}, {two=}"


def plain_values(optimizer: Any) -> list[Any]:
    """What it keeps beside tensors, with the types of numbers.

    Of an int and a float Python's max and min keep one as it is; torch.sym_max's is a float.
    """
    tables = [
        *optimizer.param_groups,
        *[of for of in optimizer.state.values() if isinstance(of, dict)],
    ]
    tables += [table["inner"] for table in tables if "inner" in table]
    tables += [{"n": optimizer.n}, {k: v for k, v in optimizer.state.items() if type(k) is str}]
    return [
        [
            (name, float if optimizer.mixes else type(value), value)
            for name, value in table.items()
            if name in ("lr", "n")
        ]
        for table in tables
    ]


def trained(make: Any, mesh: xd.DeviceMesh | None) -> tuple[list[float], list[Any]]:
    weights: list[Any] = [torch.full((8, 2), 1.0, dtype=torch.float64) for _ in range(2)]
    if mesh is not None:
        weights = [xd.distribute_tensor(w, mesh, [Shard(0), Replicate()]) for w in weights]
    weights = [nn.Parameter(w) for w in weights]
    optimizer, step, between = make(weights)
    step = step if mesh is None else xd.compile(step)
    results, kept = [], []
    for call in range(CALLS):
        results.append(step().item())
        kept.append(plain_values(optimizer))
        between(call)
    return results, kept


def judge(mesh: xd.DeviceMesh, seed: int) -> None:
    make, what = drawn_optimizer(seed)
    expected, kept_plainly = trained(make, None)
    found, kept = trained(make, mesh)
    assert found == pytest.approx(expected, rel=1e-12), what
    for ours, plain in zip(kept, kept_plainly, strict=True):
        for own, wanted in zip(ours, plain, strict=True):
            assert [entry[:2] for entry in own] == [entry[:2] for entry in wanted], what
            values = [entry[2] for entry in wanted]
            assert [entry[2] for entry in own] == pytest.approx(values, rel=1e-12), what


@pytest.mark.parametrize("seed", range(6))
def test_drawn_optimizers(mesh: xd.DeviceMesh, seed: int) -> None:
    judge(mesh, seed)


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(6, 120))
def test_more_drawn_optimizers(mesh: xd.DeviceMesh, seed: int) -> None:
    judge(mesh, seed)
