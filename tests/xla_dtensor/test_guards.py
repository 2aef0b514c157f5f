"""Guards by what a step really reads: drawn and fixed cases, on plain PyTorch, without a runtime.

A step is watched on its first call; a later call whose guards hold is given that call's result.
"""

from __future__ import annotations

import collections
import functools
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.xla_dtensor.fixed_guard_cases import READ, UNREAD, fixed
from tests.xla_dtensor.guard_cases import drawn
from tests.xla_dtensor.guard_runs import Verdict, judge
from xla_dtensor.runtimes.guards import Guards, Recording

pytestmark = pytest.mark.thorough

NUM_SEEDS = 400
# What is read as a whole: a container that is handed on, an array, an object whose dict is asked.
_OF_A_WHOLE = {
    *("another key", "a new key", "setdefault", "another element", "append", "extend"),
    *("another attribute", "a new attribute", "a list that grows", "another name", "a new name"),
    *("another method", "an attribute of the function"),  # of a class, of a function handed on
}
# Kept by others: the values of host tensors (the tape), generators and iterators.
_OF_OTHERS = {
    "a_cycle_that_the_step_goes_on_with",
    "a_draw_of_pythons_generator",
    "an_iterator_that_a_loop_leaves",
}
_READ_AS_A_WHOLE = {
    "a_count_beside_a_scale_in_a_dict",
    "a_list_of_which_only_the_sign_of_the_length_counts",
    "a_counter_on_a_config_read_by_computed_names",
    "a_list_that_grows_on_a_config_read_by_computed_names",
}


class Watched:
    """A step that runs when its guards do not hold."""

    def __init__(self, step: Callable[..., Any]) -> None:
        self.step, self.reasons = step, list[str]()
        self.programs: list[tuple[Guards, Any]] = []

    def __call__(self, *args: Any) -> Any:
        for guards, result in self.programs:
            change = guards.broken()
            if change is None:
                return result
            self.reasons.append(change.why)
        with Recording(self.step, args) as recording:
            result = self.step(*args)
        guards = recording.guards()
        guards.settle(lambda value: isinstance(value, torch.Tensor))
        self.programs.append((guards, result))
        return result

    def stats(self) -> dict[str, Any]:
        return {"traces": len(self.programs), "reasons": self.reasons}


class Running(Watched):
    """The same of a step that trains: it runs on every call."""

    def __call__(self, *args: Any) -> Any:
        if any(guards.broken() is None for guards, _ in self.programs):
            return self.step(*args)
        return super().__call__(*args)


def verdicts_of(make: Callable[[], Any], kind: type[Watched] = Watched) -> list[Verdict]:
    return judge(lambda put: make(), lambda tensor: tensor, kind)


@pytest.mark.parametrize("first", range(0, NUM_SEEDS, 50))
def test_drawn_cases_are_right(first: int) -> None:
    wrong, needless = [], collections.Counter[str]()
    for seed in range(first, first + 50):
        for each in verdicts_of(lambda seed=seed: drawn(seed)):
            if each.kind in ("wrong", "error") and not each.form.startswith("fill_"):
                wrong.append(each)
            needless[each.form] += each.kind == "needless"
    assert not wrong
    assert {form for form, number in needless.items() if number} <= _OF_A_WHOLE


@pytest.mark.parametrize("name", [name for name in READ if name not in _OF_OTHERS])
def test_a_change_of_what_is_read_is_seen(name: str) -> None:
    assert {each.kind for each in verdicts_of(lambda: fixed(name))} <= {"right"}


@pytest.mark.parametrize("name", [name for name in UNREAD if name not in _READ_AS_A_WHOLE])
def test_a_change_of_what_nobody_reads_is_not(name: str) -> None:
    assert {each.kind for each in verdicts_of(lambda: fixed(name), Running)} == {"right"}


def test_nothing_stays_watched() -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    model = Model()
    looks_up = nn.Module.__getattribute__, Model.__getattribute__

    def fails(x: torch.Tensor) -> torch.Tensor:
        raise ValueError(str(model(x).sum()))

    with pytest.raises(ValueError, match="4"):
        Watched(fails)(torch.ones(2))
    assert (nn.Module.__getattribute__, Model.__getattribute__) == looks_up
    assert "__getattribute__" not in {**vars(nn.Module), **vars(Model)}


def test_what_the_step_makes_guards_nothing() -> None:
    class Scratch:
        def __init__(self, x: torch.Tensor) -> None:
            self.x, self.number = x, 0

    kept = []

    def step(x: torch.Tensor) -> torch.Tensor:
        kept.append(Scratch(x))
        kept[-1].number += 1
        return kept[-1].x * kept[-1].number

    watched = Watched(step)
    watched(torch.ones(2))
    owners = watched.programs[0][0]._owners
    assert "Scratch" not in {type(owner.holder).__name__ for owner in owners}


def test_results_that_a_cached_function_gets_later_change_nothing() -> None:
    scale = [2.0]

    @functools.lru_cache
    def kept(power: int) -> float:
        return scale[0] ** power

    table = {"double": (kept, "a message")}

    def step(x: torch.Tensor) -> torch.Tensor:
        function, _ = dict(table)["double"]
        return x * function(1)

    kept(1)  # the step finds it
    watched = Watched(step)
    assert float(watched(torch.ones(()))) == 2.0
    kept(2)
    assert float(watched(torch.ones(()))) == 2.0
    assert len(watched.programs) == 1
    kept.cache_clear()
    scale[0] = 3.0
    assert float(watched(torch.ones(()))) == 3.0


def test_a_module_that_is_met_twice_is_not_read_as_a_whole() -> None:
    settings: Any = types.ModuleType("settings")
    settings.scale = 2.0

    def scaled_by(module: types.ModuleType) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: x * module.scale

    later = scaled_by(settings)

    def step(x: torch.Tensor) -> torch.Tensor:
        scale = settings.scale
        return later(x) + scale

    watched = Watched(step)
    assert float(watched(torch.ones(()))) == 4.0
    settings.another = 1
    assert float(watched(torch.ones(()))) == 4.0
    assert watched.reasons == []
    settings.scale = 3.0
    assert float(watched(torch.ones(()))) == 6.0


def test_an_array_whose_elements_are_an_input_may_change_and_not_be_replaced() -> None:
    weights = np.ones(3)

    def step() -> float:
        return float(weights.sum())

    with Recording(step) as recording:
        step()
    guards = recording.guards()
    guards.settle(lambda value: isinstance(value, np.ndarray))
    weights[0] = 2.0
    assert guards.broken() is None
    weights = np.ones(3)  # as the trace found it, in memory that the program does not read
    assert guards.broken() is not None
