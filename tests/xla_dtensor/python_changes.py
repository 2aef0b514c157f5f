"""Steps, and what Python changes between their calls: made for plain PyTorch and for a mesh alike.

A case is a function of `put`, which places a tensor: on the mesh, or not at all. It returns a step
of one batch, and what to do after the n-th call. ``NUM_TRACES`` says how often a case may be traced
in `NUM_CALLS` calls where that is not `USUAL_TRACES`: each change that PyTorch's result depends on
may cost one, and nothing else.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from tests.xla_dtensor import python_changes_elsewhere as elsewhere

NUM_CALLS = 6
USUAL_TRACES = 3
CHANGE_AFTER = 2  # of the calls, counted from 0

Put = Callable[[torch.Tensor], torch.Tensor]
Case = Callable[[Put], tuple[Callable[[torch.Tensor], Any], Callable[[int], None]]]
CASES: dict[str, Case] = {}
NUM_TRACES: dict[str, int] = {}


def case(traces: int = USUAL_TRACES) -> Callable[[Case], Case]:
    """Register a case, and how often it may be traced."""

    def register(function: Case) -> Case:
        CASES[function.__name__] = function
        NUM_TRACES[function.__name__] = traces
        return function

    return register


def once(change: Callable[[], Any]) -> Callable[[int], None]:
    """Do something after one of the calls."""
    return lambda call: change() if call == CHANGE_AFTER else None


class Given:
    """A step that is called with more than a batch."""

    def __init__(self, step: Callable[..., Any], *others: Any) -> None:
        self.step, self.others = step, others


def nothing(call: int) -> None:
    """Change nothing."""


def adding(tensor: torch.Tensor, *calls: int) -> Callable[[int], None]:
    """Add 1 to a tensor after some calls, after each where none are named."""

    def add(call: int) -> None:
        if not calls or call in calls:
            tensor.add_(1)

    return add


# ---------------------------------------------------------------------- names

GLOBAL = 2.0
TABLE = {"bias": 1.0, "unused": 0}
HOOKS: list[Callable[[torch.Tensor], torch.Tensor]] = []


def helped(x: torch.Tensor) -> torch.Tensor:
    """Read a global, a dict and a default in a function that a step calls."""
    return x * GLOBAL + TABLE["bias"]


@case(traces=2)
def a_variable_around(put: Put) -> Any:
    scale = 2.0

    def change() -> None:
        nonlocal scale
        scale = 3.0

    return lambda x: x * scale, once(change)


@case(traces=2)
def a_global_of_a_helper(put: Put) -> Any:
    def change() -> None:
        globals()["GLOBAL"] = 2.0 if GLOBAL == 3.0 else 3.0

    return lambda x: helped(x), once(change)


@case(traces=2)
def an_item_of_a_dict(put: Put) -> Any:
    return lambda x: helped(x), once(lambda: TABLE.update(bias=TABLE["bias"] + 1))


@case(traces=1)
def an_item_that_nobody_reads(put: Put) -> Any:
    return lambda x: x + TABLE["bias"], lambda i: TABLE.update(unused=TABLE["unused"] + 1)


@case(traces=2)
def a_name_of_another_module(put: Put) -> Any:
    def change() -> None:
        elsewhere.FACTOR += 1.0

    return lambda x: elsewhere.scaled(x) + elsewhere.FACTOR, once(change)


@case(traces=2)
def a_function_in_a_list(put: Put) -> Any:
    functions = [torch.relu]
    return lambda x: sum(f(x) for f in functions), once(lambda: functions.append(torch.neg))


@case(traces=2)
def a_partial(put: Put) -> Any:
    made = SimpleNamespace(f=functools.partial(torch.mul, other=2.0))
    return lambda x: made.f(x), once(
        lambda: setattr(made, "f", functools.partial(torch.add, other=2.0))
    )


@case(traces=1)
def an_equal_partial(put: Put) -> Any:
    made = SimpleNamespace(f=functools.partial(torch.mul, other=2.0))
    again = functools.partial
    return lambda x: made.f(x), lambda i: setattr(made, "f", again(torch.mul, other=2.0))


@case(traces=2)
def an_argument_that_is_an_object(put: Put) -> Any:
    config = Config()

    def step(x: torch.Tensor, config: Config) -> torch.Tensor:
        return x * config.scale + config.inner.power

    def change(call: int) -> None:
        config.unused += 1
        if call == CHANGE_AFTER:
            config.inner.power = 3

    return Given(step, config), change


class Mode(enum.Enum):
    SUM = 1
    MEAN = 2


class Slotted:
    __slots__ = ("mode",)

    def __init__(self) -> None:
        self.mode = Mode.SUM


@case(traces=2)
def a_slot(put: Put) -> Any:
    holder = Slotted()

    def step(x: torch.Tensor) -> torch.Tensor:
        return x.sum() if holder.mode is Mode.SUM else x.mean()

    return step, once(lambda: setattr(holder, "mode", Mode.MEAN))


class Found:
    """Answers for any name, as configurations do."""

    def __init__(self) -> None:
        object.__setattr__(self, "held", {"scale": 2.0})

    def __getattr__(self, name: str) -> Any:
        try:
            return object.__getattribute__(self, "held")[name]
        except KeyError:
            raise AttributeError(name) from None


@case(traces=2)
def an_answer_to_a_name(put: Put) -> Any:
    found: Any = Found()
    return lambda x: x * found.scale, once(lambda: found.held.update(scale=3.0))


@dataclass
class Inner:
    power: int = 1


@dataclass
class Config:
    scale: float = 1.0
    unused: int = 0
    inner: Inner = field(default_factory=Inner)


class Trainer:
    """A step that is a method, with everything that trainers have about them."""

    offset = 0.5

    def __init__(self, put: Put) -> None:
        torch.manual_seed(0)
        self.model = placed(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.0), nn.Linear(8, 1)), put)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.config = Config()
        self.epoch = self.global_step = 0
        self.loss: Any = None
        self.history: list[float] = []

    @property
    def weight(self) -> float:
        return self.config.scale * 2

    @staticmethod
    def shifted(x: torch.Tensor, by: float) -> torch.Tensor:
        return x + by

    def loss_of(self, x: torch.Tensor) -> torch.Tensor:
        config = self.config
        out = self.model(self.shifted(x, self.offset)) ** config.inner.power
        return (out * self.weight).square().mean()

    def step(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.loss_of(x)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def between(self, call: int) -> None:
        """Do what a loop does around its steps; the step reads none of it."""
        self.global_step += 1
        self.epoch = self.global_step // 2
        self.config.unused += 1
        self.loss = object()
        self.history.append(0.0)


def placed(model: nn.Module, put: Put) -> Any:
    """Place a model's parameters and buffers, each where `put` puts it."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(put(parameter.detach().clone()))
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else put(buffer)
    return model


def trained(change: Callable[[Trainer], None] | None) -> Case:
    """Make a case of a trainer, and of what changes of it."""

    def made(put: Put) -> Any:
        trainer = Trainer(put)

        def between(call: int) -> None:
            trainer.between(call)
            if change is not None and call == CHANGE_AFTER:
                change(trainer)

        return trainer.step, between

    return made


TRAINER_CHANGES: dict[str, tuple[Callable[[Trainer], None] | None, int]] = {
    "trainer_loop": (None, 2),
    "trainer_scale": (lambda t: setattr(t.config, "scale", 3.0), 3),
    "trainer_power": (lambda t: setattr(t.config.inner, "power", 2), 3),
    "trainer_config": (lambda t: setattr(t, "config", Config(scale=2.0)), 3),
    "trainer_offset": (lambda t: setattr(t, "offset", 1.0), 3),
    "trainer_dropout": (lambda t: setattr(t.model[1], "p", 1.0), 3),
    "trainer_eval": (lambda t: t.model.eval(), 3),
    "trainer_activation": (lambda t: t.model.insert(1, nn.Tanh()), 3),
    "trainer_layer": (lambda t: t.model.__setitem__(1, nn.Tanh()), 3),
    "trainer_hook": (lambda t: hooked(t.model[0]), 3),
    "trainer_frozen": (lambda t: t.model[0].requires_grad_(False), 3),
    "trainer_rate": (lambda t: t.optimizer.param_groups[0].update(lr=1e-3), 2),
    "trainer_decay": (lambda t: t.optimizer.param_groups[0].update(weight_decay=0.5), 3),
    "trainer_loss": (lambda t: setattr(t, "loss_of", lambda x: t.model(x).abs().mean()), 3),
}
for _name, (_change, _traces) in TRAINER_CHANGES.items():
    CASES[_name] = trained(_change)
    NUM_TRACES[_name] = _traces


def hooked(layer: nn.Module) -> None:
    """Let a layer's output be doubled."""
    layer.register_forward_hook(lambda module, args, out: out * 2)  # pyright: ignore[reportOperatorIssue]


class Child(Trainer):
    def loss_of(self, x: torch.Tensor) -> torch.Tensor:
        return super().loss_of(x) + self.config.scale


@case(traces=3)
def a_method_of_the_parent(put: Put) -> Any:
    trainer = Child(put)
    return trainer.step, once(lambda: setattr(trainer.config.inner, "power", 2))
