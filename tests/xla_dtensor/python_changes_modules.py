"""Steps whose modules, and tensors that are read by name, change between calls."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from tests.xla_dtensor.python_changes import NUM_CALLS, Put, case, nothing, once, placed


@case(traces=2)
def training_and_evaluation_in_turns(put: Put) -> Any:
    layer = nn.Dropout(1.0)

    def change(call: int) -> None:
        layer.train(call % 2 == 1)

    return lambda x: layer(x), change


class Adversaries(nn.Module):
    """Two networks, of which a step trains one at a time."""

    def __init__(self, put: Put) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.maker = placed(nn.Linear(4, 4), put)
        self.judge = placed(nn.Linear(4, 1), put)


@case(traces=2)
def requires_grad_to_and_fro(put: Put) -> Any:
    nets = Adversaries(put)
    makers = torch.optim.Adam(nets.maker.parameters(), lr=1e-2)
    judges = torch.optim.Adam(nets.judge.parameters(), lr=1e-2)

    def step(x: torch.Tensor) -> torch.Tensor:
        nets.judge.requires_grad_(False)
        made = nets.judge(nets.maker(x)).mean()
        made.backward()
        makers.step()
        makers.zero_grad()
        nets.judge.requires_grad_(True)
        judged = (nets.judge(nets.maker(x).detach()) - nets.judge(x)).square().mean()
        judged.backward()
        judges.step()
        judges.zero_grad()
        return (made + judged).detach()

    return step, nothing


class Noting(nn.Module):
    """Leaves a tensor and a number on itself in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.size = None
        self.auxiliary: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.size = x.shape[0]
        self.auxiliary = x.square().mean()
        return x * 2


@case(traces=2)
def attributes_that_a_forward_sets(put: Put) -> Any:
    layer = Noting()

    def step(x: torch.Tensor) -> torch.Tensor:
        out = layer(x)
        return out.sum() + layer.auxiliary * x.shape[0]

    return step, nothing


class Recurrent(nn.Module):
    """Keeps a hidden state and an average, which each call assigns anew."""

    average: torch.Tensor

    def __init__(self, put: Put) -> None:
        super().__init__()
        self.weight = nn.Parameter(put(torch.eye(4) / 2))
        self.hidden = put(torch.zeros(8, 4))
        self.register_buffer("average", put(torch.zeros(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.hidden = torch.tanh(x + self.hidden @ self.weight).detach()
        self.average = 0.9 * self.average + 0.1 * self.hidden.mean(0)
        return (self.hidden @ self.weight).sum() + self.average.sum()


def recurrent(put: Put) -> tuple[Recurrent, Callable[[torch.Tensor], torch.Tensor]]:
    """Make such a module and a step of it."""
    layer = Recurrent(put)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = layer(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return layer, step


@case(traces=2)
def a_state_that_is_assigned_anew(put: Put) -> Any:
    _, step = recurrent(put)
    return step, nothing


@case(traces=4)
def a_state_that_is_set_back(put: Put) -> Any:
    layer, step = recurrent(put)
    first = layer.hidden
    return step, once(lambda: setattr(layer, "hidden", first))


@case(traces=3)
def a_state_beside_its_beginning(put: Put) -> Any:
    layer, _ = recurrent(put)
    first = layer.hidden

    def step(x: torch.Tensor) -> torch.Tensor:
        return layer(x).detach() + (layer.hidden - first).sum() + (first + 1).sum()

    return step, nothing


@case(traces=NUM_CALLS)
def a_number_that_the_step_counts(put: Put) -> Any:
    calls = 0

    def step(x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return x.sum() * calls

    return step, nothing


@case(traces=2)
def a_tensor_of_the_mesh_is_replaced(put: Put) -> Any:
    weight = put(torch.ones(4))

    def change() -> None:
        nonlocal weight
        weight = put(torch.full((4,), 3.0))

    return lambda x: x * weight, once(change)


@case(traces=2)
def a_host_tensor_is_replaced(put: Put) -> Any:
    weight = torch.ones(4)

    def change() -> None:
        nonlocal weight
        weight = torch.full((4,), 3.0)

    return lambda x: x * weight, once(change)


def noted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function as decorators do that know nothing of its arguments."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


class Decorated(nn.Module):
    """Reads its configuration where only a decorator has called it."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(factor=1.0, power=2)

    @noted
    def forward(self, x: torch.Tensor, *, offset: Any = None) -> torch.Tensor:
        return self.raised(x) * self.config.factor + offset.number

    @noted
    def raised(self, x: torch.Tensor) -> torch.Tensor:
        return x**self.config.power


@case(traces=NUM_CALLS)
def what_decorators_hand_on(put: Put) -> Any:
    layer, offset = Decorated(), SimpleNamespace(number=1.0)

    def change(call: int) -> None:
        if call % 3 == 0:
            layer.config.factor += 1
        elif call % 3 == 1:
            layer.config.power += 1
        else:
            offset.number += 1

    return noted(lambda x: layer(x, offset=offset)), change
