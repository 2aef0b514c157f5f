"""What code reads by name, read off its bytecode."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from xla_dtensor.runtimes.premises import reads
from xla_dtensor.runtimes.premises.reads import reads_of

TABLE: dict[str, Any] = {}
GLOBAL: Any = None


def chains_of(function: Callable[..., Any]) -> list[str]:
    """Return the chains of a function as text."""
    return [str(chain) for chain in reads_of(function.__code__).chains]


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
    "an unknown key": (an_unknown_key, {"TABLE"}),
    "adds": (adds, {"self.calls"}),
    "a function inside": (a_function_inside, {"self.scale", "TABLE['z']"}),
    "comprehensions": (comprehensions, {"self.rows", "self.a", "GLOBAL.keys", "self.b"}),
    "keywords": (keywords, {"self.a", "self.b"}),
    "super": (Child.method, {"self.super().method", "self.own"}),
    "around": (around(), {"model['loss']", "scale"}),
}


@pytest.mark.parametrize("name", CHAINS)
def test_chains(name: str) -> None:
    function, expected = CHAINS[name]
    assert expected <= set(chains_of(function))


def test_what_is_written_is_not_read() -> None:
    assert set(chains_of(writes)) <= {"x", "self.inner"}


def test_attributes_of_inner_functions_count() -> None:
    assert "scale" in reads_of(a_function_inside.__code__).attributes


@pytest.mark.parametrize("minor", [12, 13, 14])
def test_other_pythons(minor: int) -> None:
    """The same chains under other versions of Python, where there is one on this machine."""
    python = _python(minor)
    if python is None:
        pytest.skip(f"no Python 3.{minor} here")
    code = f"""
import importlib.util, pathlib, sys, types
def load(name, path, text=None):
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
reads = load("reads", {str(reads.__file__)!r})
for name in ("xla_dtensor", "xla_dtensor.runtimes", "xla_dtensor.runtimes.premises", "pytest"):
    sys.modules[name] = types.ModuleType(name)
sys.modules["xla_dtensor.runtimes.premises"].reads = reads
sys.modules["xla_dtensor.runtimes.premises.reads"] = reads
marks = types.SimpleNamespace(parametrize=lambda *a: lambda f: f)
sys.modules["pytest"].mark = marks
tests = load("tests", {str(Path(__file__))!r})
for name in tests.CHAINS:
    tests.test_chains(name)
tests.test_what_is_written_is_not_read()
print("equal")
"""
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "equal\n", done.stderr


def _python(minor: int) -> str | None:
    name = f"python3.{minor}"
    folders = [Path(sys.base_prefix).parent, Path("/usr/bin"), Path("/usr/local/bin")]
    for folder in folders:
        for found in (*folder.glob(f"3.{minor}*/bin/{name}"), folder / name):
            asked = [str(found), "-c", "pass"]
            if found.exists() and subprocess.run(asked, check=False).returncode == 0:
                return str(found)
    return None
