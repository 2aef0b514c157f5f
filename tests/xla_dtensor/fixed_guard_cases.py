"""Steps with names that read Python's state, each with a change: ordinary ones, and unread ones.

`READ` has steps whose results depend on what changes between the calls (where nothing changes, the
step itself draws, counts or steps on), `UNREAD` changes that nobody reads and that must not
retrace. Nothing here knows of guards or of xla_dtensor. A case is a function of `put`, which places
a tensor; it returns a step of one tensor of 4 elements, and what to do before the call of a number,
from 1 on.
"""

from __future__ import annotations

import array
import bisect
import collections
import contextvars
import decimal
import functools
import itertools
import operator
import os
import random
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from tests.xla_dtensor.guard_cases import Change

__all__ = ["FIXED", "READ", "UNREAD", "FixedCase", "fixed"]

NUM_CHANGES = 3

Put = Callable[[torch.Tensor], torch.Tensor]
Step = Callable[[torch.Tensor], torch.Tensor]
Made = tuple[Step, Callable[[int], Any]]
READ: dict[str, Callable[[Put], Made]] = {}
UNREAD: dict[str, Callable[[Put], Made]] = {}


def read(function: Callable[[Put], Made]) -> Callable[[Put], Made]:
    """Register a case whose change is read."""
    READ[function.__name__] = function
    return function


def unread(function: Callable[[Put], Made]) -> Callable[[Put], Made]:
    """Register a case whose change nobody reads."""
    UNREAD[function.__name__] = function
    return function


def nothing(number: int) -> None:
    """Change nothing."""


@dataclass(frozen=True)
class FixedCase:
    """A case with a name, of the same shape as `guard_cases.Case`.

    Attributes:
        name: Of its function.
        made: The step and its change.
        changes: One before each further call.
    """

    name: str
    made: Made
    changes: tuple[Change, ...]
    owners: tuple[str, ...] = ("fixed",)
    source: str = field(default="", repr=False)

    @property
    def step(self) -> Step:
        """The step, of one tensor."""
        return self.made[0]

    def change(self, number: int) -> None:
        """Do one of the changes."""
        self.made[1](number + 1)

    def is_read(self, number: int) -> bool | None:
        """Whether a change alters what the step reads."""
        return self.changes[number].is_read

    def close(self) -> None:
        """Nothing is to be let go of."""


def fixed(name: str, put: Put = lambda tensor: tensor) -> FixedCase:
    """Make a case, with state of its own.

    Args:
        name: Of `FIXED`.
        put: Places a tensor.
    """
    torch.manual_seed(0)
    made = FIXED[name](put)
    is_read = name in READ or None
    change = Change(name, "fixed", "fixed", False if name in UNREAD else is_read, "")
    return FixedCase(name, made, (change,) * NUM_CHANGES)


def linear(put: Put) -> Any:
    """A layer of 4 to 4 features, placed."""
    layer = nn.Linear(4, 4)
    for name, parameter in list(layer.named_parameters()):
        setattr(layer, name, nn.Parameter(put(parameter.detach().clone())))
    return layer


# ----------------------------------------------------------------------- what is read

WEIGHTS = {"box": 1.0, "cls": 0.5}
SCALE: contextvars.ContextVar[float] = contextvars.ContextVar("scale", default=1.0)


@read
def weights_of_losses_by_the_keys_of_parts(put: Put) -> Made:
    WEIGHTS.update(box=1.0, cls=0.5)

    def step(x: torch.Tensor) -> torch.Tensor:
        parts = {"box": x.sum(), "cls": (x * x).sum()}
        return sum(WEIGHTS[key] * part for key, part in parts.items())  # pyright: ignore

    return step, lambda number: WEIGHTS.update(box=1.0 + number)


class Meters(float):
    """A number of a class of its own: no attribute shows it."""


class Ratio(decimal.Decimal):
    """Another one, whose value is in a class of C that is made on the heap."""


class Code(str):
    """A text of a class of its own."""

    __slots__ = ()


@read
def a_number_of_a_class_of_the_users(put: Put) -> Made:
    config = SimpleNamespace(width=Meters(1.0))
    return lambda x: x * config.width, lambda number: setattr(config, "width", Meters(1 + number))


@read
def a_decimal_of_a_class_of_the_users_in_a_list(put: Put) -> Made:
    ratios = [Ratio(1)]

    def step(x: torch.Tensor) -> torch.Tensor:
        return x * float(ratios[0])

    return step, lambda number: ratios.__setitem__(0, Ratio(1 + number))


class Phase(complex):
    """A number whose parts look like slots."""


@read
def the_real_part_of_a_number_of_a_class_of_the_users(put: Put) -> Made:
    phases = {"a": Phase(1.0)}

    def step(x: torch.Tensor) -> torch.Tensor:
        return x * phases["a"].real

    return step, lambda number: phases.update(a=Phase(1.0 + number))


@read
def a_text_of_a_class_of_the_users(put: Put) -> Made:
    layer = linear(put)
    layer.kind = Code("1")
    return lambda x: layer(x) * len(layer.kind), lambda n: setattr(layer, "kind", Code("1" * n))


class Gains(nn.Module):
    """Reads attributes whose names it puts together."""

    def __init__(self) -> None:
        super().__init__()
        self.gain_left, self.gain_right = 1.0, 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(x * getattr(self, f"gain_{side}") for side in ("left", "right"))  # pyright: ignore


@read
def an_attribute_by_an_f_string(put: Put) -> Made:
    gains = Gains()
    return lambda x: gains(x), lambda number: setattr(gains, "gain_left", 1.0 + number)


@read
def a_context_variable(put: Put) -> Made:
    SCALE.set(1.0)
    return lambda x: x * SCALE.get(), lambda number: SCALE.set(1.0 + number)


@read
def a_variable_of_the_environment(put: Put) -> Made:
    os.environ.pop("GUARD_CASES_FAST", None)

    def step(x: torch.Tensor) -> torch.Tensor:
        return x * (2.0 if os.environ.get("GUARD_CASES_FAST") == "1" else 1.0)

    return step, lambda number: os.environ.update(GUARD_CASES_FAST=str(number % 2))


@read
def a_cycle_that_the_step_goes_on_with(put: Put) -> Made:
    trainer = SimpleNamespace(betas=itertools.cycle([1.0, 2.0, 3.0]))
    return lambda x: x * next(trainer.betas), nothing


@read
def a_draw_of_pythons_generator(put: Put) -> Made:
    random.seed(3)
    return lambda x: x if random.random() < 0.5 else x * 2, nothing


@read
def an_attribute_of_a_parameter(put: Put) -> Made:
    layer = linear(put)
    for parameter in layer.parameters():
        parameter.rate = 1.0

    def step(x: torch.Tensor) -> torch.Tensor:
        scaled = [(x.sum() * p.detach() * p.rate).sum() for p in layer.parameters()]
        return torch.stack(scaled)

    return step, lambda number: setattr(layer.weight, "rate", 1.0 + number)


@read
def a_method_that_is_exchanged(put: Put) -> Made:
    class Activation:
        def apply(self, x: torch.Tensor) -> torch.Tensor:
            return x

    activation = Activation()

    def change(number: int) -> None:
        Activation.apply = lambda self, x: x * (number + 2)

    return lambda x: activation.apply(x), change


class Config:
    """Has a kind and a gain."""

    def __init__(self) -> None:
        self.kind, self.gain = "a", 1.0


@read
def an_attribute_in_a_pattern(put: Put) -> Made:
    config = Config()

    def step(x: torch.Tensor) -> torch.Tensor:
        match config:
            case Config(gain=1.0):
                return x * 1.0
            case _:
                return x * 5

    return step, lambda number: setattr(config, "gain", 1.0 + number)


@read
def an_element_of_a_long_list(put: Put) -> Made:
    weights = [0.01] * 300
    return lambda x: x * sum(weights), lambda number: weights.__setitem__(250, float(number))


@read
def an_element_of_an_array(put: Put) -> Made:
    weights = array.array("d", [1.0, 2.0])
    return lambda x: x * weights[0], lambda number: weights.__setitem__(0, 1.0 + number)


class Decaying:
    """Writes its attributes through vars before it reads one."""

    def __init__(self) -> None:
        self.tau_left = 1.0

    def decay(self) -> None:
        vars(self).update({k: v * 0.9 for k, v in vars(self).items() if k.startswith("tau")})


@read
def an_attribute_that_the_step_writes_first(put: Put) -> Made:
    decaying = Decaying()

    def step(x: torch.Tensor) -> torch.Tensor:
        decaying.decay()
        return x * decaying.tau_left

    return step, nothing


@read
def a_scheduler_in_the_step(put: Put) -> Made:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(4))], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    optimizer.step()  # else the scheduler warns

    def step(x: torch.Tensor) -> torch.Tensor:
        scheduler.step()
        return x * optimizer.param_groups[0]["lr"]

    return step, nothing


@read
def a_hook_on_a_gradient(put: Put) -> Made:
    layer = linear(put)

    def step(x: torch.Tensor) -> torch.Tensor:
        layer.zero_grad()
        layer(x).sum().backward()
        return layer.weight.grad.clone()

    def tripled(parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            parameter.grad.mul_(3.0)

    def change(number: int) -> None:
        if number == 1:
            layer.weight.register_post_accumulate_grad_hook(tripled)

    return step, change


@read
def a_key_that_bisect_finds(put: Put) -> Made:
    bounds, config = [0.0, 1.0], SimpleNamespace(table={0: 1.0, 1: 2.0}, position=0.5)

    def step(x: torch.Tensor) -> torch.Tensor:
        return x * config.table[bisect.bisect(bounds, config.position)]

    return step, lambda number: config.table.update({1: 2.0 + number})


class Same(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 1.0


class Larger(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 7.0


@read
def the_class_of_a_layer(put: Put) -> Made:
    layers = nn.Sequential(Same())
    return lambda x: layers(x), lambda number: setattr(layers[0], "__class__", Larger)


@read
def a_mean_of_a_large_numpy_array(put: Put) -> Made:
    values = np.ones(1_000_000)
    return lambda x: x * float(values.mean()), lambda number: values.fill(1.0 + number)


@read
def an_attribute_of_the_end_of_a_chain(put: Put) -> Made:
    last = SimpleNamespace(gain=1.0)
    first = functools.reduce(lambda below, _: SimpleNamespace(child=below), range(9), last)

    def end(node: Any) -> Any:
        return end(node.child) if hasattr(node, "child") else node

    return lambda x: x * end(first).gain, lambda number: setattr(last, "gain", 1.0 + number)


@read
def the_defaults_of_a_function(put: Put) -> Made:
    def activation(x: torch.Tensor, slope: float = 0.1) -> torch.Tensor:
        return x * slope

    def change(number: int) -> None:
        activation.__defaults__ = (0.1 * (number + 2),)

    return lambda x: activation(x), change


@read
def an_attribute_behind_a_weak_reference(put: Put) -> Made:
    config = Config()
    holder = SimpleNamespace(owner=weakref.ref(config), strong=config)

    def step(x: torch.Tensor) -> torch.Tensor:
        return x * holder.owner().gain

    return step, lambda number: setattr(config, "gain", 1.0 + number)


@read
def an_iterator_that_a_loop_leaves(put: Put) -> Made:
    rates = iter([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0])

    def step(x: torch.Tensor) -> torch.Tensor:
        for rate in rates:
            return x * rate
        return x

    return step, nothing


# ----------------------------------------------------------------------- what nobody reads


class Trainer:
    """An ordinary loop's state: a model with a config, an optimizer, and what is kept beside."""

    def __init__(self, put: Put) -> None:
        self.model = linear(put)
        self.model.config = SimpleNamespace(scale=2.0, steps=0, logging=SimpleNamespace(every=10))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.epoch, self.best = 0, float("inf")
        self.losses: list[float] = []
        self.history: dict[str, list[float]] = {"loss": [], "rate": []}
        self.seconds: collections.deque[float] = collections.deque(maxlen=2)
        self.started = 0.0
        self.last_batch: Any = None

    def loss_of(self, x: torch.Tensor) -> torch.Tensor:
        return (self.model(x) * self.model.config.scale).square().mean()

    def step(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.loss_of(x)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def beside_a_trainer(change: Callable[[Trainer, int], Any]) -> Callable[[Put], Made]:
    """A case of a trainer's step, and of what a loop does beside it."""

    def made(put: Put) -> Made:
        trainer = Trainer(put)
        return trainer.step, lambda number: change(trainer, number)

    made.__name__ = change.__name__
    return unread(made)


@beside_a_trainer
def a_number_on_the_model_named_step(trainer: Trainer, number: int) -> None:
    trainer.model.step = number


@beside_a_trainer
def a_counter_on_the_config_of_a_model(trainer: Trainer, number: int) -> None:
    trainer.model.config.steps = number


@beside_a_trainer
def an_inner_config_that_is_replaced(trainer: Trainer, number: int) -> None:
    trainer.model.config.logging = SimpleNamespace(every=number)


@beside_a_trainer
def an_epoch_of_a_trainer(trainer: Trainer, number: int) -> None:
    trainer.epoch = number


@beside_a_trainer
def a_best_metric(trainer: Trainer, number: int) -> None:
    trainer.best = 1.0 / number


@beside_a_trainer
def a_list_of_losses_that_grows(trainer: Trainer, number: int) -> None:
    trainer.losses.append(float(number))


@beside_a_trainer
def a_history_of_lists(trainer: Trainer, number: int) -> None:
    trainer.history["loss"].append(float(number))
    trainer.history[f"metric_{number}"] = []


@beside_a_trainer
def a_deque_of_durations(trainer: Trainer, number: int) -> None:
    trainer.seconds.append(float(number))


@beside_a_trainer
def the_time_that_a_step_began(trainer: Trainer, number: int) -> None:
    trainer.started = time.perf_counter()


@beside_a_trainer
def a_new_attribute_of_the_model(trainer: Trainer, number: int) -> None:
    setattr(trainer.model, f"note_{number}", number)


@beside_a_trainer
def a_batch_that_is_kept(trainer: Trainer, number: int) -> None:
    trainer.last_batch = torch.full((4,), float(number))


@beside_a_trainer
def a_number_on_the_optimizer(trainer: Trainer, number: int) -> None:
    trainer.optimizer.num_logged = number  # pyright: ignore[reportAttributeAccessIssue]


@beside_a_trainer
def a_name_in_a_parameter_group(trainer: Trainer, number: int) -> None:
    trainer.optimizer.param_groups[0]["logged_as"] = f"group at {number}"


@beside_a_trainer
def a_variable_of_the_environment_beside(trainer: Trainer, number: int) -> None:
    os.environ["GUARD_CASES_STEP"] = str(number)


@beside_a_trainer
def seeds_of_python_and_numpy(trainer: Trainer, number: int) -> None:
    random.seed(number)
    np.random.seed(number)


@beside_a_trainer
def a_method_that_is_added(trainer: Trainer, number: int) -> None:
    Trainer.described = lambda self: f"{number}"  # pyright: ignore[reportAttributeAccessIssue]


class Meter:
    """A running mean, as recipes have them."""

    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def update(self, value: float) -> None:
        self.total, self.count = self.total + value, self.count + 1


class Bar:
    """A progress bar as far as a loop writes to it."""

    def __init__(self) -> None:
        self.n, self.postfix = 0, ""

    def update(self, postfix: str) -> None:
        self.n, self.postfix = self.n + 1, postfix


METER = Meter()
LOG: list[dict[str, Any]] = []
HANDLES: list[Any] = []
loss_of: Any = None


@beside_a_trainer
def a_meter_of_the_module(trainer: Trainer, number: int) -> None:
    METER.update(float(number))


@beside_a_trainer
def a_log_of_the_module(trainer: Trainer, number: int) -> None:
    LOG.append({"step": number, "loss": 1.0 / number})


@beside_a_trainer
def a_global_named_as_a_method(trainer: Trainer, number: int) -> None:
    globals()["loss_of"] = number


@beside_a_trainer
def handles_of_hooks_of_another_model(trainer: Trainer, number: int) -> None:
    HANDLES.append(nn.Linear(1, 1).register_forward_hook(lambda module, args, out: out))


@unread
def a_bar_beside_a_closure(put: Put) -> Made:
    bar, layer = Bar(), linear(put)
    return lambda x: layer(x), lambda number: bar.update(f"loss {number}")


@unread
def a_cell_that_a_loop_counts_in(put: Put) -> Made:
    layer, seen, scale = linear(put), 0, 2.0

    def step(x: torch.Tensor) -> torch.Tensor:
        return layer(x) * scale

    def change(number: int) -> None:
        nonlocal seen
        seen += number

    return step, change


@unread
def a_number_on_the_model_beside_the_optimizers_step(put: Put) -> Made:
    layer = linear(put)
    layer.config = SimpleNamespace(width=4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = layer(x).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step, lambda number: setattr(layer, "step", number)


@unread
def an_epoch_of_the_config_beside_one_of_a_log(put: Put) -> Made:
    class Log:
        epoch = 0

    layer, log = linear(put), Log()
    layer.config = SimpleNamespace(epoch=0)

    def is_counted(module: nn.Module, epoch: int) -> bool:
        return epoch >= 0

    def step(x: torch.Tensor) -> torch.Tensor:
        is_counted(layer, log.epoch)
        return layer(x)

    return step, lambda number: setattr(layer.config, "epoch", number)


@unread
def a_count_beside_a_scale_in_a_dict(put: Put) -> Made:
    stats = {"calls": 0, "scale": 2.0}

    def step(x: torch.Tensor) -> torch.Tensor:
        for key in ("scale",):
            x = x * stats[key]
        return x

    return step, lambda number: stats.update(calls=number)


@unread
def a_list_of_which_only_the_sign_of_the_length_counts(put: Put) -> Made:
    trainer = SimpleNamespace(losses=list[float](), scale=2.0)

    def step(x: torch.Tensor) -> torch.Tensor:
        return x * trainer.scale if len(trainer.losses) >= 0 else x

    return step, lambda number: trainer.losses.append(float(number))


def by_computed_names(config: Any, x: torch.Tensor) -> torch.Tensor:
    """Read an object as configurations are read that say which of their names count."""
    return functools.reduce(lambda held, name: held * getattr(config, name), config.names, x)


@unread
def a_counter_on_a_config_read_by_computed_names(put: Put) -> Made:
    layer = linear(put)
    layer.config = SimpleNamespace(names=("scale", "gain"), scale=2.0, gain=0.5, steps=0)

    def step(x: torch.Tensor) -> torch.Tensor:
        return by_computed_names(layer.config, layer(x))

    return step, lambda number: setattr(layer.config, "steps", number)


@unread
def a_list_that_grows_on_a_config_read_by_computed_names(put: Put) -> Made:
    config = SimpleNamespace(names=("scale",), scale=2.0, losses=list[float]())
    return lambda x: by_computed_names(config, x), lambda number: config.losses.append(number)


@unread
def a_counter_on_an_object_read_by_attrgetter(put: Put) -> Made:
    config = Config()
    gain = operator.attrgetter("gain")
    return lambda x: x * gain(config), lambda number: setattr(config, "calls", number)


@unread
def a_number_of_a_class_of_the_users_that_is_made_anew(put: Put) -> Made:
    config = SimpleNamespace(width=Meters(2.0))
    return lambda x: x * config.width, lambda number: setattr(config, "width", Meters(2.0))


class Renaming:
    """An object that assigns by another name, as configurations with old names do."""

    width: float

    def __init__(self) -> None:
        vars(self).update(names={"size": "width"}, factor=2.0, width=2.0)

    def __setattr__(self, name: str, value: Any) -> None:
        name = super().__getattribute__("names").get(name, name)
        super().__setattr__(name, value * super().__getattribute__("factor"))


@read
def what_an_assignment_looks_up_past_the_class(put: Put) -> Made:
    config = Renaming()

    def step(x: torch.Tensor) -> torch.Tensor:
        config.size = 1.0
        return x * config.width

    return step, lambda number: vars(config).update(factor=float(number))


@unread
def a_counter_beside_an_object_whose_assignment_looks_up_past_the_class(put: Put) -> Made:
    config, trainer = Renaming(), SimpleNamespace(scale=2.0, steps=0)

    def step(x: torch.Tensor) -> torch.Tensor:
        x = x * trainer.scale
        config.size = 1.0
        return x

    return step, lambda number: setattr(trainer, "steps", number)


FIXED = {**READ, **UNREAD}
