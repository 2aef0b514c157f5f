"""Whenever what a step reads of Python changes, its premises break; otherwise they hold."""

from __future__ import annotations

import functools
import gc
import itertools
import linecache
import weakref
from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from xla_dtensor.runtimes.premises import Moving, Premises
from xla_dtensor.runtimes.premises.modules import ModuleBefore, Modules
from xla_dtensor.runtimes.premises.reach import Reach


def premises_of(
    step: Any, modules: tuple[nn.Module, ...] = (), reads: Any = lambda tensor: True
) -> Premises:
    """Return the premises of a step that reads all tensors and calls `modules`."""
    every = [each for module in modules for each in module.modules()]
    found = Premises(Reach.of(step), Modules({id(m): ModuleBefore.of(m) for m in every}))
    for each in every:
        found.see_module(each)
    found.settle(reads)
    return found


def why(premises: Premises) -> str | None:
    """Return why premises are broken."""
    change = premises.broken()
    return None if change is None else change.why


# ---------------------------------------------------------------------- drawn objects and code


class Slotted:
    __slots__ = ("a", "b")


class Asked:
    """Finds its names in a dict, as many configurations do."""

    def __init__(self, held: dict[str, Any]) -> None:
        self.__dict__["held"] = held

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["held"][name]
        except KeyError:
            raise AttributeError(name) from None


KINDS = ("namespace", "dict", "slots", "asked", "list", "tuple")
TREE = st.recursive(
    st.just(None),
    lambda inner: st.tuples(st.sampled_from(KINDS), inner, inner),
    max_leaves=8,
)


def built(shape: Any, numbers: list[float]) -> Any:
    """Build objects of a drawn shape, with a number for each leaf."""
    if shape is None:
        return numbers.pop()
    kind, *parts = shape
    a, b = (built(part, numbers) for part in parts)
    if kind == "namespace":
        return SimpleNamespace(a=a, b=b)
    if kind == "slots":
        made = Slotted()
        made.a, made.b = a, b
        return made
    if kind == "asked":
        return Asked({"a": a, "b": b})
    return {"dict": {"a": a, "b": b}, "list": [a, b], "tuple": (a, b)}[kind]


def paths_of(shape: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths to all leaves, each step with the kind of what it goes through."""
    if shape is None:
        return [path]
    kind, *parts = shape
    pairs = zip("ab", parts, strict=True)
    return [leaf for name, part in pairs for leaf in paths_of(part, (*path, (kind, name)))]


def text_of(root: str, path: tuple[Any, ...]) -> str:
    """Return the Python that reads a path."""
    for kind, name in path:
        by_number = f"[{'ab'.index(name)}]"
        forms = {"dict": f"[{name!r}]", "list": by_number, "tuple": by_number}
        root += forms.get(kind, f".{name}")
    return root


def written(root: Any, path: tuple[Any, ...], number: float) -> bool:
    """Write a number at a path; False where something on it cannot be written to."""
    *front, (kind, name) = path
    for step, each in front:
        root = _inside(root, step, each)
    if kind == "tuple":
        return False
    if kind == "dict":
        root[name] = number
    elif kind == "list":
        root["ab".index(name)] = number
    elif kind == "asked":
        root.held[name] = number
    else:
        setattr(root, name, number)
    return True


def _inside(value: Any, kind: str, name: str) -> Any:
    if kind in ("list", "tuple"):
        return value["ab".index(name)]
    return value[name] if kind == "dict" else getattr(value, name)


# How a step reads a path of `root`: the names in the text are those of the code below.
FORMS = {
    "straight": "    found.append({path})\n",
    "by a local": "    part_{n} = {front}\n    found.append({last})\n",
    "in a function": "    found.append((lambda: {path})())\n",
    "passed on": "    found.append(read_{n}({front}))\n",
    "in a loop": "    for part_{n} in [{front}]:\n        found.append({last})\n",
    "if": "    if {path} > 0:\n        found.append(1)\n",
}


def code_of(reads: list[tuple[str, tuple[Any, ...]]], where: str) -> str:
    """Return the source of a step that reads paths in given forms, of a root that lies `where`."""
    root = {"global": "root", "around": "root", "self": "self.root"}[where]
    body, helpers = "    found = []\n", ""
    for n, (form, path) in enumerate(reads):
        front, last = text_of(root, path[:-1]), text_of(f"part_{n}", path[-1:])
        body += FORMS[form].format(path=text_of(root, path), front=front, last=last, n=n)
        helpers += f"def read_{n}(part_{n}):\n    return {last}\n"
    body += "    return found\n"
    if where == "around":
        inner = "".join(f"    {line}\n" for line in f"def step():\n{body}".splitlines())
        return f"{helpers}def make(root):\n{inner}    return step\nstep = make(root)\n"
    if where == "self":
        inner = "".join(f"    {line}\n" for line in f"def step(self):\n{body}".splitlines())
        return f"{helpers}class Holder:\n{inner}holder = Holder()\nholder.root = root\n"
    return f"{helpers}def step():\n{body}"


_sources = itertools.count()


def run_source(source: str, names: dict[str, Any], has_source: bool = True) -> None:
    """Run Python; with a source that can be looked up, or without one."""
    name = f"<drawn {next(_sources)}>"
    if has_source:
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    exec(compile(source, name, "exec"), names)


@settings(max_examples=300, deadline=None)
@given(
    shape=TREE.filter(lambda shape: shape is not None),
    where=st.sampled_from(["global", "around", "self"]),
    has_source=st.booleans(),
    data=st.data(),
)
def test_a_change_of_what_is_read_breaks(
    shape: Any, where: str, has_source: bool, data: st.DataObject
) -> None:
    """Python itself is asked whether the change matters: the step is run before and after."""
    paths = paths_of(shape)
    some = st.tuples(st.sampled_from(list(FORMS)), st.sampled_from(paths))
    reads = data.draw(st.lists(some, max_size=4))
    root = built(shape, [float(i + 1) for i in range(len(paths))])
    names: dict[str, Any] = {"root": root, "__name__": "drawn"}
    run_source(code_of(reads, where), names, has_source)
    step = names["holder"].step if where == "self" else names["step"]
    before, premises = step(), premises_of(step)
    assert why(premises) is None
    changed = data.draw(st.sampled_from(paths))
    if not written(root, changed, data.draw(st.sampled_from([-1.0, 100.0]))):
        return
    if step() != before:
        assert why(premises) is not None
    elif has_source:
        in_whole = any(kind in ("list", "tuple") for _, path in reads for kind, _ in path)
        if changed not in [path for _, path in reads] and not in_whole:
            assert why(premises) is None


@settings(max_examples=100, deadline=None)
@given(shape=TREE.filter(lambda shape: shape is not None), data=st.data())
def test_another_object_in_its_place(shape: Any, data: st.DataObject) -> None:
    """What is replaced on the way to a value that is read breaks, unless all is equal."""
    paths = paths_of(shape)
    path = data.draw(st.sampled_from(paths))
    numbers = [float(i + 1) for i in range(len(paths))]
    names: dict[str, Any] = {"root": built(shape, list(numbers)), "__name__": "drawn"}
    run_source(code_of([("straight", path)], "global"), names)
    before, premises = names["step"](), premises_of(names["step"])
    names["root"] = built(shape, [number + 1 for number in numbers])
    if names["step"]() != before:
        assert why(premises) is not None


# ---------------------------------------------------------------------- functions


def test_code_of_libraries_is_not_gone_into() -> None:
    reach = Reach.of(lambda x: torch.nn.functional.gelu(torch.relu(x)).sum())
    names = {key for table in reach.tables for key in table.keys}
    assert names == {"torch", "nn", "functional", "gelu", "relu"}


def test_decorated_functions() -> None:
    held = SimpleNamespace(scale=1.0)

    @torch.no_grad()
    @functools.lru_cache
    def helper() -> float:
        return held.scale

    premises = premises_of(lambda: helper())
    held.scale = 2.0
    assert why(premises) == "SimpleNamespace.scale changed from 1.0 to 2.0"


def test_functions_that_do_the_same_are_the_same() -> None:
    holder = SimpleNamespace()

    def remade(by: float) -> Any:
        return lambda x, n=2: x * by * n

    holder.f = remade(1.0)
    premises = premises_of(lambda x: holder.f(x))
    holder.f = remade(1.0)
    assert why(premises) is None
    holder.f = remade(2.0)
    assert why(premises) is not None


def test_a_method_that_is_shadowed() -> None:
    class Thing:
        scale = 1.0

        def go(self) -> float:
            return self.scale

    thing = Thing()
    premises = premises_of(thing.go)
    thing.scale = 3.0
    assert why(premises) == "Thing.scale changed from nothing to 3.0"


def test_a_property() -> None:
    class Thing:
        def __init__(self) -> None:
            self.inner = SimpleNamespace(x=1.0)

        @property
        def double(self) -> float:
            return self.inner.x * 2

    thing = Thing()
    premises = premises_of(lambda: thing.double)
    thing.inner.x = 2.0
    assert why(premises) is not None


def test_a_callable_object() -> None:
    class Loss:
        def __init__(self) -> None:
            self.weight = 1.0

        def __call__(self, x: Any) -> Any:
            return x * self.weight

    loss = Loss()
    premises = premises_of(lambda x: loss(x))
    loss.weight = 2.0
    assert why(premises) == "Loss.weight changed from 1.0 to 2.0"


def test_recursion_and_cycles_end() -> None:
    holder = SimpleNamespace(n=1)
    holder.me, holder.items = holder, []
    holder.items.append(holder.items)

    def step(n: int) -> Any:
        return step(n - 1) if n else (holder.me.me.n, holder.items)

    premises = premises_of(step)
    assert why(premises) is None
    holder.n = 2
    assert why(premises) is not None


def test_generators_are_found() -> None:
    mine, numbers = torch.Generator(), np.random.default_rng(0)
    holder = SimpleNamespace(generator=mine)
    reach = Reach.of(lambda: (torch.rand(2, generator=holder.generator), numbers.random()))
    assert reach.generators == [mine]
    assert reach.randoms == [numbers]


def test_numpys_arrays_and_numbers() -> None:
    rates, holder = np.ones(3), SimpleNamespace(rate=np.float64(1), seen=deque([1]))
    premises = premises_of(
        lambda x: x * rates[0] * holder.rate * rates.mean() * holder.seen[0],
        reads=lambda value: False,
    )
    holder.rate = np.float64(1)
    assert why(premises) is None
    rates[2] = 5
    assert why(premises) == "the elements of a NumPy array changed"
    rates[2] = 1
    assert why(premises) is None
    holder.rate = np.float32(1)
    assert why(premises) is not None
    holder.rate = np.float64(1)
    holder.seen.append(2)
    assert "has 2 elements and had 1" in str(why(premises))


def test_an_array_that_the_program_reads_anew() -> None:
    rates = np.ones(3)
    premises = premises_of(lambda x: x * rates[0], reads=lambda value: True)
    rates[2] = 5
    assert why(premises) is None


def test_a_dict_by_tensors() -> None:
    a, b = torch.ones(2), torch.ones(2)
    groups = {a: 1.0}
    premises = premises_of(lambda x: groups)
    assert why(premises) is None
    groups[a] = 2.0
    assert why(premises) is not None
    groups[a] = 1.0
    groups[b] = 1.0
    assert "is new" in str(why(premises))
    del groups[a]
    assert why(premises) is not None


# ---------------------------------------------------------------------- modules


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.config = nn.Linear(2, 2), SimpleNamespace(scale=1.0)
        self.register_buffer("mean", torch.zeros(2))
        self.cache: Any = None
        self.rate = 0.5

    def forward(self, x: Any) -> Any:
        return self.linear(x) * self.config.scale * self.rate


CHANGES: dict[str, tuple[Any, str | None]] = {
    "nothing": (lambda net: None, None),
    "an equal number": (lambda net: setattr(net, "rate", 0.25 * 2), None),
    "a number": (lambda net: setattr(net, "rate", 1.0), "Net.rate changed from 0.5 to 1.0"),
    "what is looked into": (lambda net: setattr(net.config, "scale", 2.0), "SimpleNamespace.scale"),
    "what leads there": (
        lambda net: setattr(net, "config", SimpleNamespace(scale=2.0)),
        "Net.config changed",
    ),
    "what leads to the same": (
        lambda net: setattr(net, "config", SimpleNamespace(scale=1.0)),
        None,
    ),
    "mode": (lambda net: net.eval(), "Net.training changed from True to False"),
    "a child": (lambda net: setattr(net, "linear", nn.Linear(2, 2)), "Net.linear changed"),
    "a new child": (lambda net: net.add_module("more", nn.ReLU()), "Net.more changed from nothing"),
    "a parameter": (
        lambda net: setattr(net.linear, "bias", nn.Parameter(torch.zeros(2))),
        "a parameter or buffer was replaced: Linear.bias",
    ),
    "no parameter": (lambda net: setattr(net.linear, "bias", None), "Linear.bias"),
    "a buffer": (lambda net: setattr(net, "mean", torch.ones(2)), "Net.mean"),
    "frozen": (lambda net: net.requires_grad_(False), "Linear.weight.requires_grad changed to Fal"),
    "a hook": (lambda net: net.register_forward_hook(print), "a hook of Net changed from nothing"),
    "frozen and back": (lambda net: net.requires_grad_(False).requires_grad_(True), None),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_of_modules(name: str) -> None:
    net, (change, expected) = Net(), CHANGES[name]
    premises = premises_of(lambda x: net(x), (net,))
    assert why(premises) is None
    change(net)
    found = why(premises)
    assert found is None if expected is None else expected in str(found)
    assert found == why(premises)  # asking changes nothing


def test_a_module_that_is_not_called_is_watched_by_name() -> None:
    net = Net()
    premises = premises_of(lambda x: nn.functional.linear(x, net.linear.weight))
    net.rate = 7.0
    assert why(premises) is None
    net.linear.weight = nn.Parameter(torch.zeros(2, 2))
    assert why(premises) is not None


@pytest.mark.parametrize("is_read", [True, False])
def test_a_tensor_that_is_only_replaced(is_read: bool) -> None:
    net = Net()
    net.cache = torch.zeros(3)
    premises = premises_of(lambda x: net(x) * net.cache, (net,), reads=lambda tensor: is_read)
    kept = weakref.ref(net.cache)
    net.cache = torch.ones(3)
    assert (why(premises) is not None) == is_read
    gc.collect()
    assert (kept() is not None) == is_read
    net.cache = torch.ones(4)
    assert why(premises) is not None


def test_what_is_read_by_name() -> None:
    net = Net()
    net.cache = before = torch.zeros(3)
    snapshots = {id(module): ModuleBefore.of(module) for module in net.modules()}
    premises = Premises(Reach.of(lambda x: net(x) + net.cache), Modules(snapshots))
    premises.see_module(net)
    net.cache = left = torch.ones(3)
    seen = [each for each in premises.sightings() if each.found is before]
    assert [each.now is left for each in seen] == [True]
    moving = Moving(left, lambda other: other.shape == left.shape)
    premises.settle(lambda tensor: True, {id(before): moving})
    assert why(premises) is None
    net.cache = before
    assert why(premises) is None
    assert moving.tensor is before
    net.cache = torch.ones(4)
    assert why(premises) is not None
