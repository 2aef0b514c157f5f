"""Parameters that are frozen and thawed between calls of a compiled step, with their gradients.

As adversarial networks, gradual unfreezing and adapters have them: a program that serves again has
to leave the gradients of then, not those of its trace.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import xla_dtensor as xd

pytestmark = pytest.mark.only_on("jax")

CALLS = 8
ZERO_GRADS = ("start", "end", "outside", "never", "module", "by hand")


class Drawn:
    """A loop: where it drops gradients, what it asks of them, what is frozen when."""

    def __init__(self, seed: int) -> None:
        chance = self.chance = random.Random(seed)
        self.zero_grad = chance.choice(ZERO_GRADS)
        self.momentum = chance.choice((0.0, 0.9))
        self.updates = chance.random() < 0.5
        self.clips, self.asks = chance.random() < 0.4, chance.random() < 0.3

    def step_of(self, model: nn.Module, optimizer: Any) -> Any:
        def step(x: torch.Tensor) -> Any:
            if self.zero_grad == "start":
                optimizer.zero_grad()
            elif self.zero_grad == "module":
                model.zero_grad()
            elif self.zero_grad == "by hand":
                for parameter in model.parameters():
                    parameter.grad = None
            loss = model(x).square().mean()
            if loss.requires_grad:
                loss.backward()
            seen = nn.utils.clip_grad_norm_(model.parameters(), 0.5) if self.clips else loss
            for parameter in model.parameters() if self.asks else ():
                if parameter.grad is not None:
                    seen = seen + parameter.grad.sum()
            if self.updates:
                optimizer.step()
            if self.zero_grad == "end":
                optimizer.zero_grad()
            return seen.detach()

        return step

    def run(self, mesh: Any = None) -> list[Any]:
        """Return what each call gives and leaves; on the CPU where there is no mesh."""
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
        x = torch.randn(8, 4).double()
        if mesh is not None:
            model = xd.distribute_module(model, mesh)
            x = xd.distribute_tensor(x, mesh, [Shard(0), Replicate()])
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=self.momentum)
        step = self.step_of(model, optimizer)
        step = step if mesh is None else xd.compile(step)
        seen: list[Any] = []
        for _ in range(CALLS):
            for parameter in model.parameters() if self.chance.random() < 0.7 else ():
                parameter.requires_grad_(self.chance.random() < 0.6)
            seen.append(_on_host(step(x)))
            if not self.updates and self.chance.random() < 0.7:
                optimizer.step()
            if self.zero_grad == "outside" or self.chance.random() < 0.1:
                optimizer.zero_grad(set_to_none=self.chance.random() < 0.8)
            for parameter in model.parameters():
                seen += (_on_host(parameter), _on_host(parameter.grad))
        return seen


def _on_host(tensor: Any) -> Any:
    if tensor is None:
        return None
    return getattr(tensor, "full_tensor", lambda: tensor)().detach().cpu().clone()


def check(seed: int, mesh: Any) -> None:
    expected, found = Drawn(seed).run(), Drawn(seed).run(mesh)
    for number, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        assert (mine is None) == (theirs is None), (seed, number)
        if mine is not None:
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-9, msg=f"{seed}, {number}")


@pytest.mark.parametrize("seed", [15, 19, 4])
def test_drawn(mesh: xd.DeviceMesh, seed: int) -> None:
    check(seed, mesh)


@pytest.mark.thorough
@pytest.mark.parametrize("part", range(8))
def test_many_drawn(mesh: xd.DeviceMesh, part: int) -> None:
    for seed in range(100 + part * 10, 110 + part * 10):
        check(seed, mesh)


@pytest.mark.parametrize("first", ["thawed", "frozen"])
def test_layers_that_take_turns(mesh: xd.DeviceMesh, first: str) -> None:
    """A frozen layer's gradient is gone after each call, whichever program ran."""
    model: Any = xd.distribute_module(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), mesh)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x = xd.distribute_tensor(torch.ones(8, 4), mesh)

    @xd.compile
    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()

    for call in range(6):
        is_frozen = (call % 2 == 0) == (first == "frozen")
        model[0].requires_grad_(not is_frozen)
        model[1].requires_grad_(is_frozen)
        step(x)
        optimizer.step()
        assert (model[0].weight.grad is None) == is_frozen
        assert (model[1].weight.grad is None) != is_frozen
    assert step.stats()["traces"] == 2
