"""What code reads by name, read off its syntax tree, or coarsely off its bytecode."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from xla_dtensor.runtimes.premises import reads
from xla_dtensor.runtimes.premises.reads import reads_of

FOLDER = Path(reads.__file__).parent
TABLE: dict[str, Any] = {}
GLOBAL: Any = None


def texts(chains: Iterable[Any]) -> set[str]:
    """Return chains as text."""
    return {str(chain) for chain in chains}


def looked_up(function: Callable[..., Any]) -> set[str]:
    """Return the chains that a function looks up, as text."""
    return texts(reads_of(function.__code__).looked_up)


def used(function: Callable[..., Any]) -> set[str]:
    """Return the chains whose values a function uses, as text."""
    return texts(reads_of(function.__code__).used)


def attributes(self: Any, x: Any) -> Any:
    return self.a.b.c(x)


def an_alias(self: Any) -> Any:
    config = self.config
    return config.scale + config.inner.power


def an_alias_in_a_loop(self: Any) -> Any:
    found = None
    for _ in (1, 2):
        if found:
            found.use()
        found = self.found
    return None


def items() -> Any:
    return TABLE["a"] + TABLE["b"]["c"] + GLOBAL.rows[0].name


def an_unknown_key(key: Any) -> Any:
    return TABLE[key]


def writes(self: Any, x: Any) -> None:
    self.last = x
    TABLE["k"] = x
    TABLE[x] = 3
    self.inner.last = x


def adds(self: Any) -> None:
    self.calls += 1


def a_loop_over_items(self: Any, x: Any) -> Any:
    for name, head in self.heads.items():
        x = head.project(x) * self.weights.get(name, 1.0)
    return x


def unpacked(self: Any) -> Any:
    a, (b, *rest) = self.pair
    return a.x + b.y + rest[0].z


def chosen(self: Any, flag: Any) -> Any:
    part = self.a if flag else self.b
    return (part or self.c).scale


def zipped(self: Any) -> Any:
    return [layer(x.value) for layer, x in zip(self.layers, self.inputs, strict=False)]


def by_getattr(self: Any, name: str) -> Any:
    return getattr(self, "scale"), getattr(self.config, name)  # noqa: B009


def matched(self: Any) -> Any:
    match self.mode:
        case "a":
            return self.first
        case _:
            return self.second


def shadowed(self: Any) -> Any:
    TABLE = self.own
    return TABLE["x"]


def walrus(self: Any) -> Any:
    if (found := self.cache) is not None:
        return found.value
    return None


def a_function_inside(self: Any) -> Any:
    def inner(x: Any) -> Any:
        return x * self.scale + TABLE["z"]

    return inner


def comprehensions(self: Any) -> Any:
    return [self.a for _ in self.rows], dict.fromkeys(GLOBAL.keys, self.b)


def keywords(self: Any, f: Any) -> Any:
    return f(self.a, by=self.b)


class Parent:
    def method(self) -> Any:
        return None


class Child(Parent):
    own = 1

    def method(self) -> Any:
        return super().method(), self.own


def around() -> Callable[..., Any]:
    scale, model = 2.0, TABLE

    def step(x: Any) -> Any:
        return model["loss"](x) * scale

    return step


CHAINS: dict[str, tuple[Callable[..., Any], set[str]]] = {
    "attributes": (attributes, {"self.a.b.c"}),
    "an alias": (an_alias, {"self.config.scale", "self.config.inner.power"}),
    "an alias in a loop": (an_alias_in_a_loop, {"self.found", "self.found.use"}),
    "items": (items, {"TABLE['a']", "TABLE['b']['c']", "GLOBAL.rows[0].name"}),
    "an unknown key": (an_unknown_key, {"TABLE[...]"}),
    "adds": (adds, {"self.calls"}),
    "a loop over items": (
        a_loop_over_items,
        {"self.heads[...].project", "self.weights[...]"},
    ),
    "unpacked": (unpacked, {"self.pair[...].x", "self.pair[...][...].y"}),
    "chosen": (chosen, {"self.a.scale", "self.b.scale", "self.c.scale"}),
    "zipped": (zipped, {"self.layers[...]", "self.inputs[...].value"}),
    "by getattr": (by_getattr, {"self.scale", "self.config"}),
    "matched": (matched, {"self.mode", "self.first", "self.second"}),
    "shadowed": (shadowed, {"self.own['x']"}),
    "walrus": (walrus, {"self.cache.value"}),
    "a function inside": (a_function_inside, {"self.scale", "TABLE['z']"}),
    "comprehensions": (comprehensions, {"self.rows", "self.a", "GLOBAL.keys", "self.b"}),
    "keywords": (keywords, {"self.a", "self.b"}),
    "super": (Child.method, {"self.super().method", "self.own"}),
    "around": (around(), {"model['loss']", "scale"}),
    "a lambda": (lambda x: x * TABLE["scale"].by, {"TABLE['scale'].by"}),
}


@pytest.mark.parametrize("name", CHAINS)
def test_chains(name: str) -> None:
    function, expected = CHAINS[name]
    assert expected <= looked_up(function)


def test_lambdas_of_one_line_are_told_apart() -> None:
    first, second = (lambda x: x + TABLE["p"]), (lambda x: x + TABLE["q"])
    assert ("TABLE['p']" in looked_up(first), "TABLE['q']" in looked_up(first)) == (True, False)
    assert ("TABLE['p']" in looked_up(second), "TABLE['q']" in looked_up(second)) == (False, True)


def test_a_local_is_no_global() -> None:
    assert "TABLE" not in looked_up(shadowed)


def test_what_is_used_as_a_whole() -> None:
    assert "self.a.b.c" not in used(attributes)  # called, with x
    assert {"self.config.scale", "self.config.inner.power"} <= used(an_alias)
    assert "self.config" not in used(an_alias)
    assert "self.mode" in used(matched)


def test_what_is_written_is_not_read() -> None:
    reads = reads_of(writes.__code__)
    assert texts(reads.written) == {"self.last", "TABLE['k']", "TABLE[...]", "self.inner.last"}
    assert {"self.last", "TABLE['k']", "self.inner.last"}.isdisjoint(texts(reads.looked_up))
    assert "self.calls" in texts(reads_of(adds.__code__).written)


def test_any_attribute_may_be_read() -> None:
    assert texts(reads_of(by_getattr.__code__).searched) == {"self.config"}


def test_calls_are_told_with_what_they_are_given() -> None:
    (call,) = reads_of(keywords.__code__).calls
    assert [texts(each) for each in (call.function, *call.args)] == [{"f"}, {"self.a"}]
    assert texts(call.kwargs["by"]) == {"self.b"}


def test_attributes_of_inner_functions_count() -> None:
    assert "scale" in reads_of(a_function_inside.__code__).attributes


def test_without_a_source_all_names_count() -> None:
    names: dict[str, Any] = {}
    exec("def step(self, x):\n    return self.scale * x + TABLE['a']\n", names)
    reads = reads_of(names["step"].__code__)
    assert texts(reads.used) == {"self", "x", "TABLE"}
    assert {"scale", "a"} <= reads.attributes


@pytest.mark.parametrize("minor", [12, 13, 14])
def test_other_pythons(minor: int) -> None:
    """The same chains under other versions of Python, where there is one on this machine."""
    python = _python(minor)
    if not python:
        pytest.skip(f"this machine has no Python 3.{minor}")
    # The reader needs nothing but Python: it is loaded without the packages around it.
    code = f"""
import importlib.util, sys, types
def load(name, path):
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
package = "xla_dtensor.runtimes.premises"
for name in ("xla_dtensor", "xla_dtensor.runtimes", package, "pytest"):
    sys.modules[name] = types.ModuleType(name)
for name in ("chains", "scopes", "sources", "expressions", "reader", "reads"):
    load(f"{{package}}.{{name}}", {str(FOLDER)!r} + f"/{{name}}.py")
marks = types.SimpleNamespace(parametrize=lambda *a: lambda f: f)
sys.modules["pytest"].mark = marks
tests = load("tests", {str(Path(__file__))!r})
for name in tests.CHAINS:
    tests.test_chains(name)
tests.test_lambdas_of_one_line_are_told_apart()
tests.test_what_is_written_is_not_read()
tests.test_without_a_source_all_names_count()
print("equal")
"""
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "equal\n", done.stderr


def _python(minor: int) -> str:
    find = Path(__file__).resolve().parents[4] / "tools" / "find_python.sh"
    asked = [str(find), "newest", str(minor), str(minor)]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
