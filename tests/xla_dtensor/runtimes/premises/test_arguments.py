"""What is handed on by ``*args`` and ``**kwargs`` is followed: drawn wrappers around a reader."""

from __future__ import annotations

import functools
from types import FunctionType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.xla_dtensor.runtimes.premises.test_premises import premises_of, run_source, why
from xla_dtensor.runtimes.premises.arguments import Arguments, bound

# Each wraps the function below it, `inner(x, owner, *, config)`, which reads `owner` and `config`.
WRAPPERS = {
    "stars": "def {name}(*args, **kwargs):\n    return {inner}(*args, **kwargs)",
    "own": "def {name}(x, *args, **kwargs):\n    return {inner}(x, *args, **kwargs)",
    "keyword": "def {name}(x, owner, **kwargs):\n"
    "    return {inner}(x, owner, config=kwargs['config'])",
    "items": "def {name}(*args, **kwargs):\n"
    "    return {inner}(args[0], args[1], config=kwargs['config'])",
    "last": "def {name}(*args, **kwargs):\n"
    "    return {inner}(args[0], args[-1], config=kwargs['config'])",
    "unpacked": "def {name}(*args, **kwargs):\n"
    "    first, *rest = args\n    return {inner}(first, *rest, **kwargs)",
    "two unpacked": "def {name}(*args, **kwargs):\n"
    "    x, owner = args\n    return {inner}(x, owner, **kwargs)",
    "sliced": "def {name}(*args, **kwargs):\n    return {inner}(args[0], *args[1:], **kwargs)",
    "added": "def {name}(x, *args, **kwargs):\n    return {inner}(*((x,) + args), **kwargs)",
    "list": "def {name}(*args, **kwargs):\n"
    "    every = list(args)\n    return {inner}(*every, **kwargs)",
    "made": "def {name}(*args, **kwargs):\n"
    "    every = [each for each in args]\n    return {inner}(*every, **kwargs)",
    "mapped": "def {name}(*args, **kwargs):\n"
    "    return {inner}(*map(lambda each: each, args), **kwargs)",
    "popped": "def {name}(*args, **kwargs):\n"
    "    config = kwargs.pop('config')\n    return {inner}(*args, config=config, **kwargs)",
    "asked": "def {name}(*args, **kwargs):\n"
    "    config = kwargs.get('config', None)\n    return {inner}(*args, config=config)",
    "merged": "def {name}(*args, **kwargs):\n"
    "    every = {{**kwargs}}\n    return {inner}(*args, **every)",
    "dict": "def {name}(*args, config):\n"
    "    every = dict(config=config)\n    return {inner}(*args, **every)",
    "renamed": "def {name}(*args, **kwargs):\n"
    "    kwargs['setting'] = kwargs.pop('config')\n"
    "    if 'setting' in kwargs and len(args):\n"
    "        kwargs['config'] = kwargs.pop('setting')\n"
    "    return {inner}(*args, **kwargs)",
    "chosen": "def {name}(*args, **kwargs):\n"
    "    kept = {{key: each for key, each in kwargs.items() if key}}\n"
    "    return {inner}(*args, **kept)",
    "method": "class {name}_class:\n"
    "    def __call__(self, *args, **kwargs):\n        return {inner}(*args, **kwargs)\n"
    "{name} = {name}_class()",
    "partial": "def {name}_(*args, **kwargs):\n    return {inner}(*args, **kwargs)\n"
    "{name} = functools.partial({name}_)",
    "wraps": "def {name}_decorator(function):\n"
    "    @functools.wraps(function)\n"
    "    def wrapper(*args, **kwargs):\n        return function(*args, **kwargs)\n"
    "    return wrapper\n"
    "{name} = {name}_decorator({inner})",
    "lambda": "{name} = lambda *args, **kwargs: {inner}(*args, **kwargs)",
    "property": "class {name}_class:\n"
    "    @property\n    def call(self):\n        return {inner}\n"
    "def {name}(*args, **kwargs):\n    return {name}_class().call(*args, **kwargs)",
}
READER = """
def by_name(x, owner, *, config):
    return x * owner.held.number * config.other.number
def reader(x, *args, **kwargs):
    return by_name(x=x, owner=args[0], **kwargs)
"""
CALLS = {
    "global": "def step(x):\n    return {outer}(x, OWNER, config=CONFIG)",
    "starred": "def step(x):\n    return {outer}(*[x, OWNER], **{{'config': CONFIG}})",
    "in a tuple": "PAIR = (OWNER,)\ndef step(x):\n    return {outer}(x, *PAIR, config=CONFIG)",
    "in a dict": "KEYS = {{'config': CONFIG}}\ndef step(x):\n    return {outer}(x, OWNER, **KEYS)",
    "method": "class Owner(Object):\n"
    "    def step(self, x):\n        return {outer}(x, self, config=CONFIG)\n"
    "OWNER = Owner()\nOWNER.held = Object()\nstep = OWNER.step",
    "module": "class Model(torch.nn.Module):\n"
    "    def forward(self, x):\n        return {outer}(x, self, config=CONFIG)\n"
    "OWNER = Model()\nOWNER.held = Object()\ndef step(x):\n    return OWNER(x)",
}
SETUP = """import functools
import torch
class Object:
    def __init__(self):
        self.number, self.unread = 2, 3
OWNER, CONFIG = Object(), Object()
OWNER.held, CONFIG.other = Object(), Object()
"""


@settings(max_examples=200, deadline=None)
@given(
    wrappers=st.lists(st.sampled_from(sorted(WRAPPERS)), max_size=4),
    call=st.sampled_from(sorted(CALLS)),
)
def test_what_is_handed_on_is_followed(wrappers: list[str], call: str) -> None:
    names = run_step(wrappers, call)
    step, owner, config = names["step"], names["OWNER"], names["CONFIG"]
    for changed in (owner.held, config.other):
        premises = premises_of(step)
        before = step(5)
        changed.unread += 1
        assert step(5) == before
        assert why(premises) is None
        changed.number += 1
        assert step(5) != before
        assert f"{type(changed).__name__}.number changed" in str(why(premises))


def run_step(wrappers: list[str], call: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "users_module"}
    inner, parts = "reader", [SETUP, READER]
    for number, kind in enumerate(wrappers):
        name = f"wrapper_{number}"
        parts.append(WRAPPERS[kind].format(name=name, inner=inner))
        inner = name
    run_source("\n".join([*parts, CALLS[call].format(outer=inner)]), names)
    return names


def taking(signature: str) -> FunctionType:
    names: dict[str, Any] = {}
    exec(f"def function({signature}): ...", names)
    return names["function"]


@pytest.mark.parametrize(
    "signature",
    ["a, b", "a, /, b=9", "a, *, b=9", "*args", "a, *args, b=9, **kwargs", "**kwargs", "a, b, *c"],
)
def test_values_go_where_python_puts_them(signature: str) -> None:
    function = taking(signature)
    for args, kwargs in (((1, 2), {}), ((1,), {"b": 2}), ((), {"a": 1, "b": 2}), ((1, 2, 3), {})):
        names: dict[str, Any] = {}
        exec(f"def function({signature}): return locals()", names)
        given = Arguments([[each] for each in args], {key: [each] for key, each in kwargs.items()})
        found, left = bound(function, given)
        try:
            expected = names["function"](*args, **kwargs)
        except TypeError:
            continue
        assert not left
        for name, value in expected.items():
            if isinstance(value, tuple | dict):
                flat = list(value.values() if isinstance(value, dict) else value)
                assert found[name] == flat
                keys = value if isinstance(value, dict) else range(len(value))
                assert all(found[f"{name}[{key!r}]"] == [value[key]] for key in keys)
            elif name in kwargs or value in args:
                assert found[name] == [value]


@settings(max_examples=200, deadline=None)
@given(
    signature=st.sampled_from(["a, b", "a, /, b", "a, *, b=2", "*args", "a, *c, **d", "**d", ""]),
    counts=st.tuples(*[st.integers(0, 3)] * 4),
)
def test_no_value_is_lost(signature: str, counts: tuple[int, ...]) -> None:
    values = iter(range(100))
    parts = [[next(values) for _ in range(count)] for count in counts]
    places, named, more, others = parts
    kwargs = {name: [value] for name, value in zip("bez", named, strict=False)}
    given = Arguments([[each] for each in places], kwargs, more, others)
    found, left = bound(taking(signature), given)
    kept = {*functools.reduce(list.__add__, found.values(), []), *left}
    assert kept == set(given.values())
