"""Gradients that a compiled step leaves, adds to and drops, with an optimizer inside or outside."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import xla_dtensor as xd

pytestmark = pytest.mark.usefixtures("runtime")


def made() -> tuple[nn.Module, list[torch.Tensor]]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Linear(8, 4), [torch.randn(8, 8) for _ in range(6)]


def grads(model: nn.Module) -> list[torch.Tensor | None]:
    found: list[Any] = [p.grad for p in model.parameters()]
    return [g.full_tensor().cpu() if isinstance(g, xd.DTensor) else g for g in found]


def assert_same(given: nn.Module, wanted: nn.Module) -> None:
    for a, b in zip(grads(given), grads(wanted), strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            torch.testing.assert_close(a, b)
    for a, b in zip(given.parameters(), wanted.parameters(), strict=True):
        torch.testing.assert_close(a.full_tensor().cpu(), b.detach())  # pyright: ignore


Use = Callable[[Any, Any, Any, int, torch.Tensor], None]


def _outside(run: Any, optimizer: Any, model: Any, i: int, x: torch.Tensor) -> None:
    run(x)
    optimizer.step()
    optimizer.zero_grad()


def _outside_not_none(run: Any, optimizer: Any, model: Any, i: int, x: torch.Tensor) -> None:
    run(x)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


def _accumulated(run: Any, optimizer: Any, model: Any, i: int, x: torch.Tensor) -> None:
    run(x)
    if i % 3 == 2:
        optimizer.step()
        optimizer.zero_grad()


def _clipped(run: Any, optimizer: Any, model: Any, i: int, x: torch.Tensor) -> None:
    run(x)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()


def _never_cleared(run: Any, optimizer: Any, model: Any, i: int, x: torch.Tensor) -> None:
    run(x)
    optimizer.step()


def _replaced(run: Any, optimizer: Any, model: Any, i: int, x: torch.Tensor) -> None:
    run(x)
    for parameter in model.parameters():
        parameter.grad = parameter.grad * 0.5
    optimizer.step()


USES = {
    "optimizer outside": (_outside, 1),
    "zeros instead of None": (_outside_not_none, 2),
    "accumulated over three calls": (_accumulated, 2),
    "clipped outside": (_clipped, 1),
    "never cleared": (_never_cleared, 2),
    "replaced": (_replaced, None),
}


@pytest.mark.parametrize("name", USES)
def test_backward_alone_is_compiled(mesh: xd.DeviceMesh, name: str) -> None:
    use, most_traces = USES[name]
    plain, batches = made()
    model = xd.distribute_module(copy.deepcopy(plain), mesh)

    def forward_and_backward(model: Any) -> Any:
        def step(x: torch.Tensor) -> torch.Tensor:
            loss = model(x).square().mean()
            loss.backward()
            return loss.detach()

        return step

    compiled = xd.compile(forward_and_backward(model))
    plain_step = forward_and_backward(plain)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    for i, x in enumerate(batches):
        use(compiled, optimizers[0], model, i, x)
        use(plain_step, optimizers[1], plain, i, x)
        assert_same(model, plain)
    if most_traces is not None:
        assert compiled.stats()["traces"] <= most_traces


@pytest.mark.parametrize("where", ["start", "end", "never"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_clearing_inside_the_step(mesh: xd.DeviceMesh, where: str, optimizer: str) -> None:
    plain, batches = made()
    model = xd.distribute_module(copy.deepcopy(plain), mesh)

    def training(model: Any) -> Any:
        kind: Any = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[optimizer]
        inside = kind(model.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            if where == "start":
                inside.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            inside.step()
            if where == "end":
                inside.zero_grad()
            return loss.detach()

        return step

    compiled, plain_step = xd.compile(training(model)), training(plain)
    for x in batches:
        torch.testing.assert_close(compiled(x).cpu(), plain_step(x))
        assert_same(model, plain)
    assert compiled.stats()["traces"] <= 2


@pytest.mark.only_on("jax")
def test_a_cache_made_anew_on_each_call(mesh: xd.DeviceMesh) -> None:
    """Tensors that take the place of those of the trace before are no reason for another."""
    plain, batches = made()
    model: Any = xd.distribute_module(plain, mesh)
    kept: dict[str, Any] = {}

    def step(x: torch.Tensor) -> torch.Tensor:
        kept["hidden"] = model(x).detach()
        return kept["hidden"].sum()

    compiled: Any = xd.compile(step)
    for x in batches:
        total = compiled(x)
        torch.testing.assert_close(kept["hidden"].sum().cpu(), total.cpu())
    assert compiled.stats()["traces"] <= 2


@pytest.mark.only_on("jax")
def test_gradients_that_hang_nowhere_take_no_memory(mesh: xd.DeviceMesh) -> None:
    plain, batches = made()
    model: Any = xd.distribute_module(plain, mesh)

    def step(x: torch.Tensor) -> None:
        model(x).square().mean().backward()

    compiled: Any = xd.compile(step)
    compiled(batches[0])
    storage = model.weight.grad._local_tensor._storage
    model.zero_grad()
    released = []
    inner_run = compiled._last.executable

    def run(*arguments: Any) -> Any:
        released.append(storage.array is None)
        return inner_run(*arguments)

    compiled._last.executable = run
    compiled(batches[1])
    assert released == [True]
    assert model.weight.grad._local_tensor._storage is storage


def test_updates_of_one_and_of_two_batches_in_turn(mesh: xd.DeviceMesh) -> None:
    """A trainer's accumulation: what a program finds is there again after an update without it."""
    plain, batches = made()
    model = xd.distribute_module(copy.deepcopy(plain), mesh)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]

    def backward(which: Any, x: torch.Tensor) -> None:
        which(x).square().mean().backward()

    def update(which: Any, optimizer: Any, x: torch.Tensor) -> None:
        backward(which, x)
        optimizer.step()
        optimizer.zero_grad()

    programs = xd.compile(backward), xd.compile(update)
    short = batches[0][:4]
    for first, last in [(batches[0], batches[1]), (None, short), (short, batches[2])] * 3:
        for run, which, optimizer in (
            (programs, model, optimizers[0]),
            ((backward, update), plain, optimizers[1]),
        ):
            if first is not None:
                run[0](which, first)
            run[1](which, optimizer, last)
        assert_same(model, plain)
    # `update` finds the gradients of the whole first batch, none, and those of the short one.
    traces = [program.stats()["traces"] for program in programs]
    assert traces[0] <= 2
    assert traces[1] <= 3
