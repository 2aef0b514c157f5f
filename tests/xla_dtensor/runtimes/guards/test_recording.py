"""What a step reads by functions, modules, arrays and tensors guards it; what it does not, not."""

from __future__ import annotations

import builtins
import contextlib
import copy
import functools
import gc
import importlib
import itertools
import random
import sys
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.xla_dtensor.runtimes.guards.recorded import guards_of, is_tensor, why
from xla_dtensor.runtimes.guards import Guards, Recording, off_the_record
from xla_dtensor.runtimes.guards.values import Moving

MODULE = "a_module_of_the_users"
SCALE: Any = 1.0


class Thing:
    """Has what it is given."""

    a: Any
    b: Any
    f: Any
    inner: Any
    items: Any
    made: Any
    me: Any
    n: Any
    new: Any
    next: Any
    number: Any
    old: Any
    rate: Any
    seen: Any
    unread: Any
    x: Any
    scale = 1.0

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)

    def scaled(self) -> float:
        return self.scale

    @property
    def double(self) -> float:
        return self.inner.x * 2

    def __call__(self, x: float) -> float:
        return x * self.scale


# ---------------------------------------------------------------------- functions and objects


def test_functions_that_do_the_same_are_the_same() -> None:
    holder = Thing()

    def remade(by: float) -> Any:
        return lambda x, n=2: x * by * n

    holder.f = remade(1.0)
    guards = guards_of(lambda x: holder.f(x), 1.0)
    holder.f = remade(1.0)
    assert why(guards) is None
    holder.f = remade(2.0)
    assert "Thing.f changed" in str(why(guards))


DECORATORS: dict[str, Callable[[Any], Any]] = {
    "no_grad": torch.no_grad(),
    "a context manager": contextlib.contextmanager,
    "singledispatch": functools.singledispatch,
    "partial": functools.partial,
    "vectorize": np.vectorize,
    "a function of C": lambda function: np.frompyfunc(function, 1, 1),
    "twice": lambda function: torch.no_grad()(torch.enable_grad()(function)),
}


@pytest.mark.parametrize("name", DECORATORS)
def test_a_function_that_code_of_a_library_calls(name: str) -> None:
    held, factor = Thing(scale=1.0), 1.0

    def scaled(x: float) -> Any:
        return held.scaled() * factor * x

    def generates(x: float) -> Any:
        yield scaled(x)

    is_manager = name == "a context manager"
    decorated = DECORATORS[name](generates if is_manager else scaled)

    def step() -> Any:
        with decorated(1.0) if is_manager else contextlib.nullcontext(decorated(1.0)) as found:
            return found

    assert float(step()) == 1.0
    guards = guards_of(step)
    assert why(guards) is None
    held.scale = 2.0
    assert why(guards) == "Thing.scale changed from 1.0 to 2.0"
    held.scale = 1.0
    factor = 2.0
    assert "the variable 'factor' of" in str(why(guards))


def test_another_function_behind_a_decorator() -> None:
    holder = Thing(f=torch.no_grad()(lambda: 1.0))
    guards = guards_of(lambda of: of.f(), holder)
    holder.f = torch.no_grad()(lambda: 2.0)
    assert "Thing.f changed" in str(why(guards))


def test_a_hook_of_a_gradient_reads_too() -> None:
    factor, weight = 1.0, torch.ones(2, requires_grad=True)
    weight.register_hook(lambda gradient: gradient * factor)
    guards = guards_of(lambda: weight.sum().backward())
    assert why(guards) is None
    factor = 2.0
    assert "the variable 'factor' of" in str(why(guards))


def test_what_the_collector_calls_is_not_the_steps() -> None:
    calls = [0]

    def on_collection(phase: str, info: Any) -> None:
        calls[0] += 1

    gc.callbacks.append(on_collection)
    try:
        guards = guards_of(lambda: gc.collect())
    finally:
        gc.callbacks.remove(on_collection)
    assert calls[0] > 0
    assert why(guards) is None


class Base:
    scale = 1.0

    @classmethod
    def of_method(cls) -> float:
        return cls.scale

    def of_cell(self) -> float:
        return __class__.scale


class Derived(Base):
    """Has what its base has."""


def handed_on(kind: Any) -> float:
    return kind.scale


OF_CLASSES: dict[str, Callable[[Any], float]] = {
    "type": lambda of: type(of).scale,
    "__class__": lambda of: of.__class__.scale,
    "a class method": lambda of: of.of_method(),
    "the class around": lambda of: of.of_cell(),
    "handed on": lambda of: handed_on(type(of)),
}


@pytest.mark.parametrize("of_base", [True, False])
@pytest.mark.parametrize("name", OF_CLASSES)
def test_an_attribute_of_the_class(
    name: str, of_base: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    guards = guards_of(OF_CLASSES[name], Derived())
    assert why(guards) is None
    if of_base or name == "the class around":
        monkeypatch.setattr(Base, "scale", 2.0)
        assert why(guards) == "Base.scale changed from 1.0 to 2.0"
    else:
        monkeypatch.setattr(Derived, "scale", 2.0, raising=False)
        assert "Derived.scale" in str(why(guards))


class Meta(type):
    scale = 1.0


class Made(metaclass=Meta):
    """Finds an attribute in its metaclass."""


class Local(threading.local):
    """Of a class of the user's."""


def dict_with(table: Any, key: Any) -> Any:
    table[key] = 1.0
    return table


# What a step reads, with the read, and a write of 2.0 where it reads 1.0.
PLACES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any, float], Any]]] = {
    "a method of C": (lambda: {"a": 1.0}, lambda of: of, lambda of, x: of.update(a=x)),
    "a thread's local": (
        threading.local,
        lambda of: of.scale,
        lambda of, x: setattr(of, "scale", x),
    ),
    "a local of the user's": (Local, lambda of: of.scale, lambda of, x: setattr(of, "scale", x)),
    "weak keys": (
        lambda: dict_with(weakref.WeakKeyDictionary(), Thing),
        lambda of: of[Thing],
        lambda of, x: of.__setitem__(Thing, x),
    ),
    "a copy": (Thing, lambda of: copy.copy(of).scale, lambda of, x: setattr(of, "scale", x)),
    "a deep copy": (
        lambda: Thing(inner=Thing()),
        lambda of: copy.deepcopy(of).inner.scale,
        lambda of, x: setattr(of.inner, "scale", x),
    ),
    "a metaclass": (lambda: Made, lambda of: of.scale, lambda of, x: setattr(Meta, "scale", x)),
    "a proxy of a dict": (
        lambda: {"a": 1.0},
        lambda of: types.MappingProxyType(of)["a"],
        lambda of, x: of.update(a=x),
    ),
}


@pytest.mark.parametrize("name", PLACES)
def test_values_in_unusual_places(name: str) -> None:
    make, read, write = PLACES[name]
    held = make()
    write(held, 1.0)
    looks_up = held.get if name == "a method of C" else None
    proxy = types.MappingProxyType(held) if name == "a proxy of a dict" else None

    def step() -> float:
        if looks_up is not None:
            return looks_up("a")
        return read(held) if proxy is None else proxy["a"]

    assert step() == 1.0
    guards = guards_of(step)
    assert why(guards) is None
    write(held, 2.0)
    assert step() == 2.0
    assert "changed from 1.0 to 2.0" in str(why(guards)) or "nothing to 2.0" in str(why(guards))
    write(held, 1.0)


def test_a_weak_proxy_is_what_it_stands_for() -> None:
    thing, told = Thing(scale=1.0), list[Any]()
    proxy = weakref.proxy(thing)
    with Recording(lambda: None, [proxy], told.append) as recording:
        assert proxy.scale == 1.0
    assert not told  # though it looks like an iterator
    guards = recording.guards()
    thing.scale = 2.0
    assert why(guards) == "Thing.scale changed from 1.0 to 2.0"


def test_a_name_that_is_built_in(monkeypatch: pytest.MonkeyPatch) -> None:
    guards = guards_of(lambda: abs(-1.0))
    assert why(guards) is None
    monkeypatch.setattr(builtins, "abs", lambda x: x)
    assert "the global 'abs' of builtins changed" in str(why(guards))


def test_attributes_of_objects() -> None:
    thing = Thing(inner=Thing(x=1.0))
    by_method, by_property = guards_of(thing.scaled), guards_of(lambda: thing.double)
    called = guards_of(lambda x: thing(x), 1.0)
    thing.scale = 3.0
    assert why(by_method) == why(called) == "Thing.scale changed from nothing to 3.0"
    assert why(by_property) is None
    del thing.scale
    assert why(by_method) is None
    thing.inner.x = 2.0
    assert why(by_property) == "Thing.x changed from 1.0 to 2.0"
    assert why(by_method) is None


def test_cycles_end() -> None:
    holder = Thing(n=1)
    holder.me, holder.items = holder, []
    holder.items.append(holder.items)

    def step(n: int, of: Any = holder) -> Any:
        return step(n - 1) if n else (of.me.me.n, of.items)

    guards = guards_of(step, 3)
    assert why(guards) is None
    holder.n = 2
    assert why(guards) == "Thing.n changed from 1 to 2"


def test_one_of_two_names_gets_an_equal_object() -> None:
    """The program holds for as long as nobody can tell the two objects apart."""
    both = Thing(x=1.0)
    holder = Thing(a=both, b=both)
    guards = guards_of(lambda of: (of.a.x, of.b.x, of.a is of.b), holder)
    holder.b = Thing(x=1.0)
    assert "is no longer what it is elsewhere" in str(why(guards))
    holder.a = holder.b
    assert why(guards) is None
    both.x = 2.0
    assert why(guards) is None
    holder.a.x = 2.0
    assert why(guards) == "Thing.x changed from 1.0 to 2.0"


def test_a_name_of_the_globals_by_text(monkeypatch: pytest.MonkeyPatch) -> None:
    guards = guards_of(lambda: globals()["SCALE"])
    monkeypatch.setitem(globals(), "SCALE", 2.0)
    assert f"the global 'SCALE' of {__name__} changed from 1.0 to 2.0" == why(guards)


# ---------------------------------------------------------------------- arrays, dicts, tensors


def test_numpys_arrays_and_numbers() -> None:
    rates, holder = np.ones(3), Thing(rate=np.float64(1), seen=deque([1]))
    guards = guards_of(lambda h: (rates[0] * h.rate * rates.mean() * h.seen[0],), holder)
    holder.rate = np.float64(1)
    assert why(guards) is None
    rates[2] = 5
    assert "the elements of the variable 'rates'" in str(why(guards))
    rates[2] = 1
    assert why(guards) is None
    holder.rate = np.float32(1)
    assert "Thing.rate changed" in str(why(guards))
    holder.rate = np.float64(1)
    holder.seen.append(2)
    assert why(guards) == "Thing.seen has 2 elements and had 1"


def test_a_dict_by_tensors() -> None:
    a, b = torch.ones(2), torch.ones(2)
    groups = {a: 1.0}
    guards = guards_of(lambda: groups)
    assert why(guards) is None
    groups[a] = 2.0
    assert "changed from 1.0 to 2.0" in str(why(guards))
    groups[a] = 1.0
    groups[b] = 1.0
    assert "is new" in str(why(guards))
    del groups[a]
    assert "changed from 1.0 to nothing" in str(why(guards))


@pytest.mark.parametrize("is_read", [True, False])
def test_a_tensor_that_is_only_replaced(is_read: bool) -> None:
    net = Net()
    net.cache = torch.zeros(3)
    guards = guards_of(lambda x: net(x) * net.cache.numel(), torch.ones(2), reads=lambda _: is_read)
    kept = weakref.ref(net.cache)
    net.cache = torch.ones(3)
    assert (why(guards) is not None) == is_read
    gc.collect()
    assert (kept() is not None) == is_read
    net.cache = torch.ones(4)
    assert "Net.cache changed from a tensor of shape=(3,) to a tensor of sh" in str(why(guards))


def test_what_is_read_by_name() -> None:
    net = Net()
    net.cache = before = torch.zeros(2)

    def step(x: torch.Tensor) -> torch.Tensor:
        net.cache = net(x) + net.cache
        return net.cache

    with Recording(step, [torch.ones(2)]) as recording:
        left = step(torch.ones(2))
    seen = [each for each in recording.sightings() if each.found is before]
    assert [each.now is left for each in seen] == [True]
    found = {id(each.found) for each in recording.sightings()}
    assert {*map(id, net.linear.parameters())} < found
    moving = Moving(left, lambda other: other.shape == left.shape)
    guards = recording.guards()
    guards.settle(is_tensor, {id(before): moving})
    assert why(guards) is None
    net.cache = before
    assert why(guards) is None
    assert moving.there is before
    net.cache = torch.ones(4)
    assert "Net.cache changed" in str(why(guards))


# ---------------------------------------------------------------------- torch's modules


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.config = nn.Linear(2, 2), Thing(scale=1.0)
        self.drop = nn.Dropout(0.0)
        self.register_buffer("mean", torch.zeros(2))
        self.cache: Any = None
        self.rate, self.epoch = 0.5, 0

    def forward(self, x: Any) -> Any:
        return self.drop(self.linear(x) - self.mean) * self.config.scale * self.rate


class Other(nn.Linear):
    """Of another class."""


def put(path: str, value: Callable[[], Any]) -> Callable[[Net], None]:
    """Return what assigns a new value to an attribute, maybe of a child."""
    owner, _, name = path.rpartition(".")
    return lambda net: setattr(net.get_submodule(owner), name, value())


CHANGES: dict[str, tuple[Callable[[Net], Any], str | None]] = {
    "nothing": (lambda net: None, None),
    "an equal number": (put("rate", lambda: 0.25 * 2), None),
    "a number": (put("rate", lambda: 1.0), "Net.rate changed from 0.5 to 1.0"),
    "a number that is not read": (put("epoch", lambda: 1), None),
    "what is looked into": (lambda net: setattr(net.config, "scale", 2.0), "Thing.scale"),
    "what leads there": (put("config", lambda: Thing(scale=2.0)), "Net.config changed"),
    "what leads to the same": (put("config", lambda: Thing(scale=1.0)), None),
    "mode": (lambda net: net.eval(), "Dropout.training changed from True to False"),
    "a child": (put("linear", lambda: nn.Linear(2, 2)), "Net.linear changed"),
    "the class of a child": (put("linear.__class__", lambda: Other), "the class of a Linear"),
    "a new child": (lambda net: net.add_module("more", nn.ReLU()), None),
    "a parameter": (put("linear.bias", lambda: nn.Parameter(torch.zeros(2))), "Linear.bias"),
    "no parameter": (put("linear.bias", lambda: None), "Linear.bias changed from a tensor"),
    "a buffer": (put("mean", lambda: torch.ones(2)), "Net.mean changed"),
    "frozen": (lambda net: net.requires_grad_(False), "Linear.weight.requires_grad changed to Fal"),
    "frozen and back": (lambda net: net.requires_grad_(False).requires_grad_(True), None),
    "a hook": (lambda net: net.register_forward_hook(print), "a hook of Net was added"),
    "a hook of a child": (
        lambda net: net.linear.register_forward_pre_hook(print),
        "a hook of Linear was added",
    ),
    "a hook of a gradient": (
        lambda net: net.linear.weight.register_hook(abs),
        "a hook of Linear.weight was added",
    ),
    "another forward": (put("linear.forward", lambda: abs), "Linear.forward changed from nothing"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_of_modules(name: str) -> None:
    net, (change, expected) = Net(), CHANGES[name]
    guards = guards_of(lambda x: net(x), torch.ones(2))
    assert why(guards) is None
    change(net)
    found = why(guards)
    assert found is None if expected is None else expected in str(found)
    assert found == why(guards)  # asking changes nothing


def test_a_hook_of_all_modules() -> None:
    net = Net()
    guards = guards_of(lambda x: net(x), torch.ones(2))
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert why(guards) == "the hooks of all modules changed"
    finally:
        handle.remove()
    assert why(guards) is None


def test_an_optimizer_of_the_users() -> None:
    class Damped(torch.optim.SGD):
        own: float
        damping, unread = 0.5, 1.0

        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.data.mul_(self.damping * self.own)

    weight = torch.ones(2, requires_grad=True)
    optimizer = Damped([weight], lr=0.1)
    optimizer.own = 1.0
    guards = guards_of(lambda: optimizer.step())
    assert why(guards) is None
    Damped.unread = 2.0
    assert why(guards) is None
    optimizer.own = 2.0
    assert why(guards) == "Damped.own changed from 1.0 to 2.0"
    optimizer.own = 1.0
    Damped.damping = 0.25
    assert why(guards) == "Damped.damping changed from 0.5 to 0.25"


@pytest.mark.parametrize("is_told", [True, False])
def test_what_is_read_of_one_object_counts_for_those_it_stands_for(is_told: bool) -> None:
    first, other = (Thing(scale=1.0, unread=1.0, inner=Thing(x=1.0)) for _ in range(2))

    def step() -> float:
        return first.scaled() * first.double

    with Recording(step) as recording:
        if is_told:
            recording.alike(first, [first, other])
        step()
    guards = recording.guards()
    guards.settle(is_tensor)
    other.unread = 2.0
    assert why(guards) is None
    other.scale = 2.0
    assert why(guards) == ("Thing.scale changed from 1.0 to 2.0" if is_told else None)
    other.scale = 1.0
    other.inner.x = 2.0
    assert why(guards) == ("Thing.x changed from 1.0 to 2.0" if is_told else None)


# ---------------------------------------------------------------------- modules of Python


def by_import() -> Any:
    import a_module_of_the_users  # pyright: ignore[reportMissingImports]

    return a_module_of_the_users.scale


def by_a_name_from_there() -> Any:
    from a_module_of_the_users import scale  # pyright: ignore[reportMissingImports]

    return scale


IMPORTS: dict[str, Callable[[], Any]] = {
    "import": by_import,
    "from import": by_a_name_from_there,
    "import_module": lambda: importlib.import_module(MODULE).scale,
    "sys.modules": lambda: sys.modules[MODULE].scale,
}


@pytest.mark.parametrize("name", IMPORTS)
def test_a_module_that_the_step_imports(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = types.ModuleType(MODULE)
    module.scale, module.unread = 1.0, 1.0
    monkeypatch.setitem(sys.modules, MODULE, module)
    guards = guards_of(IMPORTS[name])
    kind: Any = type(module)
    assert kind is types.ModuleType
    module.unread = 2.0
    assert why(guards) is None
    module.scale = 2.0
    assert why(guards) == f"the global 'scale' of {MODULE} changed from 1.0 to 2.0"


# ---------------------------------------------------------------------- the recording itself

RANDOM: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "torch": (torch.Generator, lambda of: torch.rand(1, generator=of)),
    "Python": (lambda: random.Random(1), lambda of: of.random()),
    "NumPy": (lambda: np.random.default_rng(1), lambda of: of.random()),
    "NumPy's old one": (lambda: np.random.RandomState(1), lambda of: of.rand()),
    "a list's iterator": (lambda: iter([1, 2]), next),
    "a generator function": (lambda: (x for x in "ab"), next),
    "zip": (lambda: zip("ab", "cd", strict=True), next),
}


@pytest.mark.parametrize("name", RANDOM)
def test_what_is_drawn_from_is_told_of(name: str) -> None:
    make, draw = RANDOM[name]
    holder, told = Thing(old=make()), list[Any]()

    def step() -> None:
        holder.new = make()
        draw(holder.new)
        draw(holder.old)

    with Recording(step, meets=told.append):
        assert not told
        step()
    assert any(each is holder.old for each in told)
    assert all(each is not holder.new for each in told)


def _in_another_thread(call: Callable[[], Any]) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def _off_the_record(call: Callable[[], Any]) -> None:
    with off_the_record(), off_the_record():
        call()


@pytest.mark.parametrize("elsewhere", [_in_another_thread, _off_the_record])
def test_what_is_not_the_steps_is_not_recorded(elsewhere: Callable[..., None]) -> None:
    mine, others = Thing(scale=1.0), Thing(scale=1.0)

    def step() -> float:
        elsewhere(others.scaled)
        return mine.scaled()

    guards = guards_of(step)
    others.scale = 2.0
    assert why(guards) is None
    mine.scale = 2.0
    assert why(guards) == "Thing.scale changed from 1.0 to 2.0"


def test_outside_of_a_recording_all_is_off_the_record() -> None:
    with off_the_record():
        assert Thing(scale=2.0).scaled() == 2.0


def test_what_raises_off_the_record_is_noted_again_afterwards() -> None:
    mine = Thing(scale=1.0)

    def step() -> float:
        with contextlib.suppress(ValueError), off_the_record():
            raise ValueError
        return mine.scaled()

    guards = guards_of(step)
    mine.scale = 2.0
    assert why(guards) == "Thing.scale changed from 1.0 to 2.0"


def test_a_step_that_raises_leaves_nothing_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = types.ModuleType(MODULE)
    monkeypatch.setitem(sys.modules, MODULE, module)
    seen = []

    def step() -> None:
        seen.append((type(module), *vars(Thing)))
        module.scale = Thing().scaled()
        by_import()
        seen.append((type(module), *vars(Thing)))
        raise ValueError("inside")

    before = type(module), *vars(Thing)
    with pytest.raises(ValueError, match="inside"), Recording(step, [Thing()]):
        step()
    assert seen[1] != before  # it was watched
    assert (type(module), *vars(Thing)) == before
    assert gc.get_freeze_count() == 0
    with Recording(by_import) as again:  # there is a tool of monitoring left
        by_import()
    assert again.guards().broken() is None


def test_what_is_frozen_is_older_than_the_step() -> None:
    holder = Thing(scale=1.0, made=Thing(scale=1.0))
    gc.freeze()
    try:

        def step() -> float:
            holder.made = Thing(scale=2.0)
            return holder.scaled() * holder.made.scaled()

        guards = guards_of(step)
        assert gc.get_freeze_count() > 0  # as the user wants it
        holder.made.scale = 3.0
        assert why(guards) is None
        holder.scale = 2.0
        assert why(guards) == "Thing.scale changed from 1.0 to 2.0"
    finally:
        gc.unfreeze()


@pytest.mark.skipif(not hasattr(sys, "monitoring"), reason="the profiler is the recording's own")
def test_much_is_recorded_in_few_lookups() -> None:
    """Objects times names times functions would take for ever."""
    things = [Thing(number=number) for number in range(3000)]
    for one, other in itertools.pairwise(things):
        one.next = [other]
    parts = [f"def f{i}(of): return of.number + len(getattr(of, 'next', ()))" for i in range(100)]
    calls = " + ".join(f"f{i}(of)" for i in range(100))
    names: dict[str, Any] = {"things": things, "__name__": "made"}
    exec("\n".join([*parts, f"def step(): return sum({calls} for of in things)"]), names)
    starts = [0]

    def count(frame: types.FrameType, event: str, argument: Any) -> None:
        starts[0] += event == "call" and "guards" in frame.f_code.co_filename

    with Recording(names["step"]) as recording:
        sys.setprofile(count)
        names["step"]()
        sys.setprofile(None)
    assert 0 < starts[0] < 2_000_000
    guards = recording.guards()
    guards.settle(is_tensor)
    assert why(guards) is None
    things[2000].number += 1
    assert why(guards) == "Thing.number changed from 2000 to 2001"


def test_a_model_of_a_hub() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size"), 32)
    heads: dict[str, Any] = dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 2)
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **sizes, **heads))
    optimizer = torch.optim.AdamW(model.parameters())

    def step(ids: torch.Tensor) -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()

    guards = guards_of(step, torch.ones(1, 4, dtype=torch.long))
    assert why(guards) is None
    model.config.bos_token_id = 7  # which generates only
    assert why(guards) is None
    model.config.use_cache = not model.config.use_cache
    assert "LlamaConfig.use_cache changed from True to False" in str(why(guards))


# ---------------------------------------------------------------------- where values are looked up


def test_an_object_with_another_dict_is_looked_up_there() -> None:
    thing = Thing(x=1.0)
    guards = guards_of(lambda: thing.x)
    thing.__dict__ = {"x": 1.0}
    assert why(guards) is None
    thing.__dict__ = {"x": 2.0}
    assert why(guards) == "Thing.x changed from 1.0 to 2.0"


def test_a_module_with_other_parameters_is_looked_up_there() -> None:
    module = nn.Linear(1, 1)
    guards = guards_of(lambda: module.weight)
    module._parameters = dict(module._parameters)
    assert why(guards) is None
    module._parameters = {**module._parameters, "weight": nn.Parameter(torch.ones(1, 1))}
    assert str(why(guards)).startswith("Linear.weight changed from a tensor")


def test_a_step_that_gives_an_object_another_dict_is_done_again() -> None:
    thing = Thing(x=1.0)

    def step() -> None:
        thing.__dict__ = {"x": 2.0}

    with Recording(step) as recording:
        step()
    [effect] = recording.effects()
    thing.x = 1.0
    effect.do(effect.value)
    assert thing.x == 2.0
    recording.rewind()
    assert thing.x == 1.0


@pytest.mark.parametrize("made", [list, tuple, set, deque])
def test_what_a_container_is_searched_for_reads_no_part_of_it(made: Any) -> None:
    class Part:
        scale = 1.0

    thing = Thing(items=made([Part, int]))
    guards = guards_of(lambda: str in thing.items)
    Part.scale = 2.0
    assert why(guards) is None
    thing.items = made([int, str])
    assert why(guards) is not None


def test_the_keys_of_a_dict_that_is_searched_are_read_and_no_values() -> None:
    thing = Thing(items={"a": 1.0})
    guards = guards_of(lambda: "b" in thing.items)
    thing.items["a"] = 2.0
    assert why(guards) is None
    thing.items["b"] = 3.0
    assert why(guards) == "the item 'b' of Thing.items is new"


def test_a_dict_that_is_searched_and_then_handed_on_is_read_whole() -> None:
    thing = Thing(items={"a": 1.0})
    guards = guards_of(lambda: "a" in thing.items and sum(thing.items.values()))
    thing.items["a"] = 2.0
    assert why(guards) == "the item 'a' of Thing.items changed from 1.0 to 2.0"


def test_elements_that_say_what_is_equal_to_them_are_read_where_they_are_searched() -> None:
    class Like:
        def __init__(self, x: float) -> None:
            self.x = x

        def __eq__(self, other: object) -> bool:
            return self.x == other

    thing = Thing(items=[Like(1.0)])
    guards = guards_of(lambda: 1.0 in thing.items)
    thing.items[0].x = 2.0
    assert why(guards) == "Like.x changed from 1.0 to 2.0"


def test_what_is_made_anew_for_each_call_is_compared_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    thing = Thing(items=[Thing(x=float(i)) for i in range(50)], inner=Thing(x=1.0))

    def step() -> float:
        return thing.inner.x + sum(each.x for each in thing.items)

    compared: list[Any] = []
    difference = Guards._difference

    def counted(self: Guards, owner: Any, there: Any) -> Any:
        compared.append(owner)
        return difference(self, owner, there)

    guards = guards_of(step)
    monkeypatch.setattr(Guards, "_difference", counted)
    counts: list[int] = []
    for _ in range(3):
        thing.inner = Thing(x=1.0)
        compared.clear()
        assert why(guards) is None
        counts.append(len(compared))
    assert counts[0] > 50
    assert counts[1] == counts[2] < 5
    thing.items[7].x = -1.0
    assert why(guards) == "Thing.x changed from 7.0 to -1.0"
    thing.items[7].x = 7.0
    thing.inner = Thing(x=2.0)
    assert why(guards) == "Thing.inner changed from a Thing to another one"


def test_what_is_replaced_in_one_place_of_two_is_seen_later_too() -> None:
    thing = Thing(inner=Thing(x=1.0))
    other = Thing(inner=thing.inner)
    guards = guards_of(lambda: (thing.inner.x, other.inner.x))
    for _ in range(2):
        thing.inner = other.inner = Thing(x=1.0)
        assert why(guards) is None
    thing.inner = Thing(x=1.0)
    assert str(why(guards)).endswith("is no longer what it is elsewhere")


def test_what_becomes_of_an_object_that_was_replaced_is_nobodys_concern() -> None:
    thing = Thing(inner=Thing(inner=Thing(x=1.0)))
    guards = guards_of(lambda: thing.inner.inner.x)
    for _ in range(3):
        old, thing.inner = thing.inner, Thing(inner=Thing(x=1.0))
        old.inner.x = 5.0
        assert why(guards) is None
