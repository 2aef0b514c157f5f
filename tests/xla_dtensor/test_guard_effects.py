"""Drawn steps that write to Python's state: effects done again, and undone; on plain PyTorch.

A step is recorded on its first call. A later call whose guards hold does the recorded effects again
and does not run; what can be reached from the step has to be as where the step ran on every call.
"""

from __future__ import annotations

import array
import collections
import functools
import threading
import types
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from tests.xla_dtensor.effect_cases import IMPORTS, KINDS, NUM_CHANGES, Case, drawn
from xla_dtensor.runtimes.guards import Guards, Recording
from xla_dtensor.runtimes.guards.owners import Effect

pytestmark = pytest.mark.thorough

NUM_SEEDS = 300
_CONTAINERS = (dict, list, tuple, set, collections.deque)
_NOT_STATE = (types.BuiltinFunctionType, types.MethodDescriptorType, property, torch.dtype)


# ------------------------------------------------------------------------------ state


class Walk:
    """Turns what can be reached from values into plain data.

    Args:
        by_identity: Whether another object in an object's place counts; else an equal one will do,
            as long as what is one object in several places is one in the same places.
        given: The arguments of the last call, which are told from other tensors.
    """

    def __init__(self, by_identity: bool = False, given: tuple[Any, ...] = ()) -> None:
        self.by_identity, self.given = by_identity, given
        self.seen: dict[int, tuple[int, Any]] = {}

    def plain(self, value: Any) -> Any:
        """Return a value as plain data."""
        if value is None or isinstance(value, bool | int | float | str | bytes):
            return type(value).__name__, repr(value)
        if isinstance(value, _NOT_STATE):
            return repr(type(value))
        is_new = id(value) not in self.seen
        number, _ = self.seen.setdefault(id(value), (len(self.seen), value))
        identity = id(value) if self.by_identity else any(each is value for each in self.given)
        about = type(value).__name__, identity, number if not isinstance(value, tuple) else 0
        return (*about, *self.parts(value)) if is_new or isinstance(value, tuple) else about

    def parts(self, value: Any) -> Iterator[Any]:
        """Yield what an object holds."""
        if isinstance(value, torch.Tensor):
            yield value.tolist(), value.requires_grad
        elif isinstance(value, dict):
            yield [(self.plain(key), self.plain(each)) for key, each in dict.items(value)]
        elif isinstance(value, set):
            yield sorted(map(repr, map(self.plain, value)))
        elif isinstance(value, list | tuple | collections.deque):
            yield getattr(value, "maxlen", None), [self.plain(each) for each in value]
        elif isinstance(value, np.ndarray):
            yield value.shape, str(value.dtype), list(map(self.plain, value.ravel().tolist()))
        elif isinstance(value, ContextVar):
            yield self.plain(value.get("nothing"))
        elif isinstance(value, types.CellType):
            yield self.contents(value)
        elif isinstance(value, array.array | bytearray):
            yield bytes(value)
        elif isinstance(value, types.MethodType):
            yield self.plain(value.__self__), self.plain(value.__func__)
        elif isinstance(value, types.FunctionType):
            yield self.plain(value.__defaults__), [*map(self.plain, value.__closure__ or ())]
        elif isinstance(value, functools.partial):
            yield self.plain(value.keywords)
        if not isinstance(value, types.CellType):
            yield self.attributes(value)

    def contents(self, cell: types.CellType) -> Any:
        try:
            return self.plain(cell.cell_contents)
        except ValueError:
            return "nothing"

    def attributes(self, value: Any) -> list[tuple[str, Any]]:
        """Return an object's own attributes, and those of a class of the case.

        Their order counts where identity does, but for classes and modules: a step that deletes an
        attribute and sets it again may leave it in its place.
        """
        own = dict(getattr(value, "__dict__", {}))
        for name in getattr(type(value), "__slots__", ()):
            if hasattr(value, name):
                own[name] = getattr(value, name)
        names = [name for name in own if not name.startswith("__")]
        is_ordered = self.by_identity and not isinstance(value, type | types.ModuleType)
        names = names if is_ordered else sorted(names)
        found = [(name, self.plain(own[name])) for name in names]
        kind = value if isinstance(value, type) else type(value)
        is_own = kind.__module__.startswith("effect_case")
        return found + ([("class", self.plain(kind))] if is_own and kind is not value else [])


def state_of(case: Case, walk: Walk) -> list[Any]:
    """Return all that the step can reach, in the module too, as plain data."""
    names = {n: v for n, v in vars(case.module).items() if not n.startswith("__")}
    kinds = types.ModuleType | type | types.FunctionType
    kept = {n: v for n, v in names.items() if not isinstance(v, kinds)}
    classes = {n: v for n, v in names.items() if isinstance(v, type) and n[0].isupper()}
    own = {n: v for n, v in classes.items() if v.__module__ == case.name}
    found = sorted({**kept, **own}.items(), key=lambda item: item[0])
    return [walk.plain(case.step), *((name, walk.plain(value)) for name, value in found)]


def called(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return a call's result as plain data, or what it raises."""
    try:
        return Walk(given=arguments).plain(function(*arguments))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


# ------------------------------------------------------------------------------ calls


@dataclass
class Program:
    """What a recorded call has left.

    Attributes:
        guards: What it read.
        effects: What it changed.
        result: What it gave.
        given: Its argument.
        older: What its state held before, by ids.
        made: What the containers held that it made and stored, by ids.
    """

    guards: Guards
    effects: list[Effect]
    result: Any
    given: torch.Tensor
    older: dict[int, Any]
    made: dict[int, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for effect in self.effects:
            self.keep(effect.value)

    def keep(self, value: Any) -> None:
        """Keep what a container of the step's own holds, which later calls may add to."""
        if type(value) in _CONTAINERS and id(value) not in {**self.older, **self.made}:
            self.made[id(value)] = value.copy() if hasattr(value, "copy") else value
            for each in value.values() if isinstance(value, dict) else value:
                self.keep(each)

    def run(self, x: torch.Tensor) -> Any:
        """Do the effects again for another argument."""
        made: dict[int, Any] = {id(self.given): x}
        for effect in self.effects:
            effect.do(self.again(effect.value, made))
        return self.again(self.result, made)

    def again(self, value: Any, made: dict[int, Any]) -> Any:
        """Make anew what the step makes on each call."""
        new: Any
        kind = type(value)
        if id(value) in made:
            return made[id(value)]
        if id(value) in self.older and kind is not tuple:
            return value
        if kind is torch.Tensor:
            new = value.clone()
        elif kind not in _CONTAINERS:
            return value
        elif kind is dict:
            items = self.made.get(id(value), value).items()
            new = {key: self.again(each, made) for key, each in items}
        else:
            new = kind(self.again(each, made) for each in self.made.get(id(value), value))
        made[id(value)] = new
        return new


class Replayed:
    """A step that is recorded where the guards of no earlier call hold.

    Args:
        case: With the step.
        reads: The tensors that the step's program reads.
    """

    def __init__(self, case: Case, reads: type) -> None:
        self.case, self.reads, self.programs = case, reads, list[Program]()

    def __call__(self, x: torch.Tensor) -> Any:
        for program in self.programs:
            if program.guards.broken() is None:
                return program.run(x)
        walk = Walk()
        state_of(self.case, walk)
        older = {key: value for key, (_, value) in walk.seen.items()}
        with Recording(self.case.step, (x,)) as recording:
            result = self.case.step(x)
        effects, guards = recording.effects(), recording.guards()
        guards.settle(lambda value: isinstance(value, self.reads))
        self.programs.append(Program(guards, effects, result, x, older))
        return result


def difference(seed: int, kind: str | None = None) -> tuple[str, int]:
    """Return where a case differs from its twin that runs on every call, and how many recordings.

    Args:
        seed: Of the case.
        kind: The kind of owner; drawn if None.
    """
    plain, case = drawn(seed, kind=kind), drawn(seed, kind=kind)
    # No step computes with a tensor of its state, so that it may be taken for read or not.
    replayed = Replayed(case, torch.Tensor if seed % 2 else torch.nn.Parameter)
    for number in range(NUM_CHANGES + 1):
        if number:
            done = [called(each.changes[number - 1]) for each in (plain, case)]
            if done[0] != done[1]:
                return f"change {number}: {done}", 0
        first, second = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0])
        results = called(plain.step, first), called(replayed, second)
        if results[0] != results[1]:
            return f"call {number}: {results}", 0
        if isinstance(results[0], str):
            break
        states = state_of(plain, Walk(given=(first,))), state_of(case, Walk(given=(second,)))
        if states[0] != states[1]:
            return f"call {number}: {first_difference(*states)}", 0
    return "", len(replayed.programs)


def first_difference(a: Any, b: Any) -> tuple[Any, Any]:
    """Return the first parts of plain data that differ."""
    if isinstance(a, list | tuple) and type(a) is type(b) and len(a) == len(b):
        return next(
            first_difference(*pair) for pair in zip(a, b, strict=True) if pair[0] != pair[1]
        )
    return a, b


def test_effects_done_again_are_what_the_step_would_do() -> None:
    recordings = 0
    for seed in range(NUM_SEEDS):
        why, number = difference(seed)
        assert not why, f"seed {seed}: {why}\n{drawn(seed).source}"
        recordings += number
    print(f"{recordings} recordings for {NUM_SEEDS} cases of {NUM_CHANGES + 1} calls")


# ------------------------------------------------------------------------------ a step that fails


def unlike_before(seed: int, kind: str | None = None) -> str:
    """Return what a step that fails in the middle has left behind, after it is undone.

    Args:
        seed: Of the case.
        kind: The kind of owner; drawn if None.
    """
    case, x = drawn(seed, fails=True, kind=kind), torch.tensor([1.0, 2.0])
    for number in range(seed % 3):  # Another time what there is has been changed before.
        called(case.step, x)
        called(case.changes[number])
    walk = Walk(by_identity=True)
    before = state_of(case, walk)
    with Recording(case.step, (x,)) as recording:
        called(case.step, x)
    recording.rewind()
    after = state_of(case, Walk(by_identity=True))
    return "" if after == before else f"{first_difference(before, after)}"


def test_a_step_that_fails_leaves_nothing_behind() -> None:
    for seed in range(NUM_SEEDS):
        why = unlike_before(seed)
        assert not why, f"seed {seed}: {why}\n{drawn(seed, fails=True).source}"


# ------------------------------------------------------------------------------ another thread

_BY_OTHERS = ("object", "slots", "dataclass", "property", "nn.Module", "__setattr__ of its own, 0")


@pytest.mark.parametrize("kind", _BY_OTHERS)
@pytest.mark.parametrize("is_found", [True, False])
def test_what_another_thread_assigns_is_no_effect(kind: str, is_found: bool) -> None:
    names: dict[str, Any] = {"__name__": __name__}  # which dataclasses look up
    source = KINDS[kind].prelude + _STEP.replace("$make", KINDS[kind].make)
    exec(compile(IMPORTS + source, "/home/me/steps.py", "exec"), names)
    owner, go, done = names["OWNER"], threading.Event(), threading.Event()
    names |= {"meet": lambda: (go.set(), done.wait(10))}

    def assign() -> None:
        assert go.wait(10)
        if is_found:
            owner.other, names["FOUND"] = 8, 8
        else:
            owner.added, names["ADDED"] = 8, 8
        done.set()

    thread = threading.Thread(target=assign)
    thread.start()
    with Recording(names["step"]) as recording:
        names["step"]()
    thread.join()
    effects = recording.effects()
    owner.held, owner.other, names["STEPS"], names["FOUND"] = 0, 5, 0, 5
    for name in ("added", "made"):
        if hasattr(owner, name):
            delattr(owner, name)
    names.pop("ADDED", None)
    for effect in effects:
        effect.do(effect.value)
    assert (owner.held, owner.other, hasattr(owner, "added")) == (3, 5, False)
    assert (names["STEPS"], names["FOUND"], "ADDED" in names) == (1, 5, False)
    if is_found:
        owner.other, names["FOUND"] = 8, 8
        recording.rewind()
        assert (owner.held, owner.other, names["STEPS"], names["FOUND"]) == (0, 8, 0, 8)


_STEP = """
OWNER, STEPS, FOUND = $make, 0, 0

def step():
    global STEPS
    OWNER.held = 1
    meet()
    OWNER.held = 3
    STEPS = STEPS + 1
    return OWNER.count + FOUND
"""
