"""A compiled step gives what PyTorch gives, whatever Python changes between its calls.

`MECHANISMS` names a case for each way in which a step reads Python's state, or leaves something in
it. The other cases of `python_changes`, the reasons given and what is refused: test_compile_python.
"""

from __future__ import annotations

import itertools
from collections import UserDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves

import xla_dtensor as xd
from tests.xla_dtensor import (
    python_changes,
    python_changes_effects,
    python_changes_elsewhere,
    python_changes_host,
    python_changes_modules,
)
from tests.xla_dtensor.python_changes import CASES, NUM_CALLS, NUM_TRACES, Given
from xla_dtensor.errors import CompileError

# The modules of cases register them.
_ = python_changes_effects, python_changes_host, python_changes_modules

MECHANISMS = {
    "a cell of the function": "a_variable_around",
    "a global, in a function that is called": "a_global_of_a_helper",
    "another module's name": "a_name_of_another_module",
    "an item of a dict": "an_item_of_a_dict",
    "what is there and not read": "an_item_that_nobody_reads",
    "a list": "a_function_in_a_list",
    "a partial": "a_partial",
    "a slot": "a_slot",
    "__getattr__": "an_answer_to_a_name",
    "an argument's attributes": "an_argument_that_is_an_object",
    "a parent's method": "a_method_of_the_parent",
    "a loop's usual bookkeeping": "trainer_loop",
    "a module's mode": "trainer_eval",
    "a module's hooks": "trainer_hook",
    "requires_grad": "trainer_frozen",
    "a hyperparameter": "trainer_rate",
    "the optimizer itself": "the_optimizer_is_another_one",
    "a tensor that is replaced": "a_tensor_of_the_mesh_is_replaced",
    "a name that the step assigns": "two_names_change_places",
    "a counter that the step keeps": "a_number_that_the_step_counts",
    "a container that the step fills": "results_are_added_to_containers",
    "a host tensor's values": "a_host_tensor_is_written",
    "a NumPy array's values": "memory_of_numpy",
    "the host's random numbers": "draws_of_all_kinds",
}


@pytest.fixture(autouse=True)
def names_as_they_were() -> Any:
    """Compare in float64, and give the names of modules back their values."""
    before = python_changes.GLOBAL, dict(python_changes.TABLE), python_changes_elsewhere.FACTOR
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
    python_changes.GLOBAL, table, python_changes_elsewhere.FACTOR = before
    python_changes.TABLE.update(table)


def called(case: Any, put: Any, wrap: Callable[[Any], Any]) -> tuple[list[Any], Any]:
    """Call a case's step several times, with its changes between; return results and the step."""
    python_changes.GLOBAL, python_changes_elsewhere.FACTOR = 2.0, 2.0
    python_changes.TABLE.update(bias=1.0, unused=0)
    torch.manual_seed(3)
    step, change = case(put)
    others = step.others if isinstance(step, Given) else ()
    step = wrap(step.step if isinstance(step, Given) else step)
    torch.manual_seed(7)
    found = []
    for call in range(NUM_CALLS):
        x = put(torch.linspace(-1, 2, 32).reshape(8, 4) * (call + 1))
        found.append([leaf.detach().cpu().clone() for leaf in tree_leaves(step(x, *others))])
        change(call)
    return found, step


def check(name: str, mesh: xd.DeviceMesh) -> None:
    """Compare a case with PyTorch; on JAX, count its traces as well."""
    expected, _ = called(CASES[name], lambda tensor: tensor, lambda step: step)
    after = torch.get_rng_state()
    found, step = called(CASES[name], lambda t: xd.distribute_tensor(t, mesh), xd.compile)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)
    assert torch.equal(torch.get_rng_state(), after)
    if xd.get_runtime().name == "jax":
        assert step.stats()["traces"] <= NUM_TRACES[name], step.stats()["reasons"]


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_a_step_gives_what_pytorch_gives(mesh: xd.DeviceMesh, mechanism: str) -> None:
    check(MECHANISMS[mechanism], mesh)


class Pair(NamedTuple):
    inputs: Any
    targets: Any


BATCHES: dict[str, Callable[[torch.Tensor], Any]] = {
    "dict": lambda x: {"x": x, "id": 3},
    "list": lambda x: [x, "train"],
    "dict of lists": lambda x: {"x": [x]},
    "named tuple of dicts": lambda x: Pair({"x": x}, None),
}


def first(batch: Any) -> torch.Tensor:
    while not isinstance(batch, torch.Tensor):
        batch = batch["x"] if isinstance(batch, dict) else batch[0]
    return batch


@pytest.mark.only_on("jax")
@pytest.mark.parametrize("kind", BATCHES)
def test_a_batch_in_a_container_is_an_input(mesh: xd.DeviceMesh, kind: str) -> None:
    step = xd.compile(lambda batch: first(batch) * 2)
    for number in range(4):
        x = torch.full((4,), float(number))
        found = step(BATCHES[kind](xd.distribute_tensor(x, mesh)))
        torch.testing.assert_close(found.cpu(), x * 2)
    assert step.stats()["traces"] == 1


@dataclass
class Batch:
    x: Any
    loss: Any = None


def pops(batch: Any) -> Any:
    labels = batch.pop("labels")
    return batch["x"] * labels


def adds(batch: Any) -> Any:
    batch["loss"], batch["x"] = batch["x"].sum(), batch["x"] + 1
    return batch["loss"]


def appends(batch: Any) -> Any:
    batch.append({"mean": batch[0].mean()})
    return batch.pop(0)


def fills(batch: Any) -> Any:
    batch.append(batch[0] * 2)
    return batch[0]


def sets(batch: Any) -> Any:
    batch.loss = batch.x.mean()
    return batch.x


def adds_inside(batch: Any) -> Any:
    batch["inner"][0]["y"] = batch["x"] * 2
    del batch["x"]
    return batch["inner"][0]["y"]


WRITERS: dict[str, tuple[Callable[[Any], Any], Callable[[torch.Tensor], Any]]] = {
    "a dict loses": (pops, lambda x: {"x": x, "labels": x + 1}),
    "a dict gets": (adds, lambda x: {"x": x}),
    "a UserDict loses": (pops, lambda x: UserDict(x=x, labels=x + 1)),
    "a list gets and loses": (appends, lambda x: [x, x * 2]),
    "a deque gets": (fills, lambda x: deque([x], maxlen=1)),
    "an attribute is set": (sets, Batch),
    "inside of others": (adds_inside, lambda x: {"x": x, "inner": ({"z": x},)}),
}


@pytest.mark.parametrize("how", WRITERS)
def test_what_a_step_does_to_a_container_that_it_is_given(mesh: xd.DeviceMesh, how: str) -> None:
    step, pack = WRITERS[how]
    compiled = xd.compile(step)
    for number in range(3):
        x = torch.full((4,), float(number))
        theirs, mine = pack(x), pack(xd.distribute_tensor(x, mesh))
        results = step(theirs), compiled(mine)
        expected = tree_flatten(plain((results[0], theirs)))
        found = tree_flatten(plain((results[1], mine)))
        assert found[1] == expected[1]
        torch.testing.assert_close([each.cpu() for each in found[0]], expected[0])
    if xd.get_runtime().name == "jax":
        assert compiled.stats()["traces"] == 1


def plain(value: Any) -> Any:
    """Take objects apart that are no pytrees."""
    if isinstance(value, Batch | UserDict):
        return dict(vars(value).get("data", vars(value)))
    return tuple(map(plain, value)) if isinstance(value, tuple) else value


@pytest.mark.only_on("jax")
def test_a_container_that_is_an_argument_and_has_a_name(mesh: xd.DeviceMesh) -> None:
    def of(value: float) -> dict[str, torch.Tensor]:
        return {"x": xd.distribute_tensor(torch.full((4,), value), mesh)}

    named = of(1.0)
    step = xd.compile(lambda batch: batch["x"] + named["x"])
    assert step(named).cpu()[0] == 2
    assert step(of(3.0)).cpu()[0] == 4
    named["x"] = of(5.0)["x"]
    assert [step(each).cpu()[0].item() for each in (named, of(3.0))] == [10, 8]


@pytest.mark.only_on("jax")
def test_code_that_would_count_and_does_not_run(mesh: xd.DeviceMesh) -> None:
    numbers, is_logged = itertools.count(), False

    def step(x: torch.Tensor) -> torch.Tensor:
        return x * next(numbers) if is_logged else x

    compiled = xd.compile(step)
    assert compiled(xd.distribute_tensor(torch.ones(4), mesh)).cpu()[0] == 1
    assert next(numbers) == 0
    is_logged = True
    with pytest.raises(CompileError, match="made before the call, a count"):
        compiled(xd.distribute_tensor(torch.ones(4), mesh))


class Momentum(torch.optim.Optimizer):
    """An optimizer of the user's own, which counts its steps on the host."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["step"], state["mean"] = torch.zeros(()), torch.zeros_like(parameter)
                state["step"] += 1
                state["mean"].mul_(0.9).add_(parameter.grad)
                parameter.sub_(state["mean"] / (1 + state["step"]), alpha=group["lr"])


@pytest.mark.only_on("jax")
def test_an_optimizer_of_the_users_own_is_traced_twice(mesh: xd.DeviceMesh) -> None:
    weights = [nn.Parameter(torch.ones(4, 4)) for _ in range(2)]
    weights[1] = nn.Parameter(xd.distribute_tensor(weights[1].detach(), mesh))
    plain, compiled = map(training, weights)
    compiled = xd.compile(compiled)
    for _ in range(4):
        x = torch.linspace(-1, 1, 4)
        torch.testing.assert_close(compiled(xd.distribute_tensor(x, mesh)).cpu(), plain(x))
    assert compiled.stats()["traces"] == 2


def training(weight: nn.Parameter) -> Any:
    optimizer = Momentum([weight])

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = (weight @ x).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step
