"""Drawn steps that write to Python's state, with changes between their calls; plain Python.

A case is a way to an owner (`ROOTS`, `WAYS`), up to three deep, and one to three writes to it, each
inline or behind a call of some kind. Between calls somebody else changes the owner, or replaces it.
What a step computes depends on nothing but its argument's values and on what it reads of Python, so
that its effects may be done again with the values of the call that was recorded::

    case = drawn(seed)
    case.step(x)            # writes, and gives x times a number
    case.changes[0]()       # by somebody else
    state(case)             # all that can be reached from the step, as plain data

Each call of `drawn` gives a case with state of its own.
"""

from __future__ import annotations

import random
import sys
import tempfile
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from string import Template
from textwrap import indent
from typing import Any

__all__ = ["IMPORTS", "KINDS", "NUM_CHANGES", "Case", "Kind", "drawn"]

NUM_CHANGES = 4
_FOLDER = tempfile.TemporaryDirectory(prefix="effect_cases_")

IMPORTS = """import array, collections, contextvars, dataclasses, functools, operator, types
import numpy as np
import torch
from torch import nn

class Stopped(Exception):
    pass

class Settings:
    def __init__(self):
        self.flag, self.scale, self.name = True, 2.0, "held"

SETTINGS = Settings()
held, other, count, log = 0, 1, 0, []
"""


@dataclass(frozen=True)
class Kind:
    """A kind of owner. ``$o`` is the owner, ``$v`` a value.

    Attributes:
        make: An expression of a new one.
        writes: Statements of a step.
        changes: What somebody else does to it.
        prelude: Source that it needs.
        values: What may be stored, "any" or "number".
        declares: A statement before each write.
    """

    make: str
    writes: tuple[str, ...]
    changes: tuple[str, ...]
    prelude: str = ""
    values: str = "any"
    declares: str = ""


# ------------------------------------------------------------------------------ forms of writes

_NAMES = (
    "$o.held = $v",
    "$o.added = $v",
    "$o.other, $o.held = $v, $v",
    "setattr($o, SETTINGS.name, $v)",
    "setattr($o, 'he' + 'ld', $v)",
    "del $o.held",
    "delattr($o, 'other')",
    "$o.held = $v\ndel $o.held",
    "$o.count += 1",
    "$o.count = ($o.count + 1) % 2",
    "kept = $o.held\n$o.held = $v\n$o.held = kept",
    "$o.held, $o.other = $o.other, $o.held",
    "if SETTINGS.flag:\n    $o.held = $v",
    "if not hasattr($o, 'made'):\n    $o.made = $v",
    "for name in ('other', 'held'):\n    setattr($o, name, $v)",
    "list(map(lambda each: setattr(each, 'held', 3), [$o]))",
    "$o.log.append($v)",
    "$o.log += [$v]",
    "$o.held = $o.log",
    "$o.held = $o.other",
    "$o.held = ($o.other, 1)",
    "$o.held = $o.pal",
    "$o.log.append($o.pal)",
    "$o.table['b'] = $v",
    "$o.table.setdefault('c', $v)",
    "each = $o\neach.held = $v",
)
_IN_DICTS = (
    "object.__setattr__($o, 'held', $v)",
    "object.__delattr__($o, 'other')",
    "vars($o)['held'] = $v",
    "vars($o).update(held=$v, added=1)",
    "$o.__dict__['held'] = $v",
    "$o.__dict__.pop('held', None)",
    "operator.setitem(vars($o), 'added', $v)",
    "own = vars($o)\nown['held'] = own.pop('other', 0)",
)
_NAME_CHANGES = (
    "$o.aside = 7",
    "$o.held = 8",
    "$o.held = None",
    "$o.other = torch.ones(2)",
    "$o.other = torch.full((2,), 3.0)",
    "$o.pal = Settings()",
    "$o.count = 0",
    "$o.added = 9",
    "$o.log.append(5)",
    "$o.log = []",
    "$o.log.clear()",
    "$o.table.clear()",
    "$o.table['aside'] = 1",
    "vars($o).pop('added', None)",
)
_SLOT_CHANGES = _NAME_CHANGES[1:-1]
_FIELDS = (
    "self.held, self.other, self.count, self.log = 0, torch.zeros(2), 0, [0]; "
    "self.table, self.pal = dict(a=1), Settings()"
)
_INIT = f"    def __init__(self):\n        super().__init__()\n        {_FIELDS}\n"
_KEYWORDS = "held=0, other=torch.zeros(2), count=0, log=[0], table=dict(a=1), pal=Settings()"

_KEYS = (
    "$o['a'] = $v",
    "$o['new'] = $v",
    "$o['b'] = $v\n$o['a'] = 1",
    "$o[SETTINGS.name] = $v",
    "del $o['a']",
    "$o.pop('a', None)",
    "$o.pop('b')",
    "$o.popitem()",
    "$o.update(a=$v, new=2)",
    "$o.update([('z', $v)])",
    "$o.setdefault('new', $v)",
    "$o.setdefault('a', $v)",
    "$o.clear()",
    "$o.clear()\n$o['b'] = $v",
    "kept = $o.pop('a', 0)\n$o['a'] = kept",
    "kept = $o.get('a')\n$o['a'] = $v\n$o['a'] = kept",
    "$o['a'], $o['b'] = $o.get('b'), $o.get('a')",
    "$o['new'] = $o.get('a')",
    "$o['n'] = ($o.get('n', 0) + 1) % 2",
    "if SETTINGS.flag:\n    $o['new'] = $v",
    "operator.setitem($o, 'a', $v)",
    "table = $o\ntable['new'] = $v",
    "table = $o\ntable |= {'c': $v}",
    "for key in list($o):\n    $o[key] = 3",
)
_KEY_CHANGES = (
    "$o['aside'] = 7",
    "$o['a'] = 8",
    "$o.pop('a', None)",
    "$o.pop('new', None)",
    "$o.clear()",
    "$o.clear()\n$o.update(a=0, b=1)",
    "$o['a'] = torch.ones(2)",
    "$o['a'] = torch.full((2,), 3.0)",
    "$o['b'] = $o.pop('b', 1)",
    "$o.setdefault('new', 3)",
)
_OF_ORDERED = ("$o.move_to_end('a')", "$o.move_to_end('b', last=False)", "$o.popitem(last=False)")
_OF_C = ("dict.__setitem__($o, 'a', $v)", "dict.update($o, a=$v)")

_ELEMENTS = (
    "$o.append($v)",
    "$o.append(1)\n$o.append($v)",
    "$o.extend([$v, 2])",
    "$o.extend(each for each in (1, 2))",
    "$o.insert(0, $v)",
    "$o.pop()",
    "$o.append($v)\n$o.pop()",
    "$o.remove($o[0])",
    "$o.reverse()",
    "$o[0] = $v",
    "$o[-1] = $v",
    "$o[0], $o[1] = $o[1], $o[0]",
    "$o.clear()",
    "$o.clear()\n$o.append($v)",
    "kept = $o[0]\n$o[0] = $v\n$o[0] = kept",
    "elements = $o\nelements += [$v]",
    "elements = $o\nelements.append($v)",
    "add = $o.append\nadd($v)",
    "list(map($o.append, (1, 2)))",
    "if len($o) < 4:\n    $o.append($v)",
    "while len($o) > 2:\n    $o.pop()",
    "if SETTINGS.flag:\n    $o.append($v)",
    "del $o[0]",
)
_OF_LISTS = (
    "$o.sort(key=str)",
    "$o[:1] = [$v]",
    "$o[1:] = []",
    "$o[len($o):] = [$v]",
    "del $o[:]",
    "elements = $o\nelements *= 2",
    "$o[::2] = [3] * len($o[::2])",
)
_OF_DEQUES = ("$o.appendleft($v)", "$o.popleft()", "$o.rotate(1)", "$o.extendleft([$v, 1])")
_ELEMENT_CHANGES = (
    "$o.append(7)",
    "$o.clear()",
    "$o[0] = 8",
    "$o.clear()\n$o.extend([3, 1, 2])",
    "$o.reverse()",
    "del $o[-1]",
    "$o.insert(0, 9)",
)
_OF_SETS = (
    *(
        "$o.add($v)",
        "$o.add(1)",
        "$o.discard(1)",
        "$o.remove(2)",
        "$o.clear()",
        "$o.update({7, 8})",
    ),
    *("each = $o\neach |= {$v}", "each = $o\neach -= {1}", "$o.add(9)\n$o.discard(9)"),
    *("if 7 not in $o:\n    $o.add(7)", "$o.symmetric_difference_update({1, 5})"),
)
_SET_CHANGES = (
    *("$o.add(6)", "$o.clear()", "$o.discard(1)", "$o.add(1)"),
    "$o.clear()\n$o.update({1, 2, 3})",
)
_OF_NUMBERS = (
    *("$o[0] = $v", "$o[0] += 1", "$o[:2] = $o[1:3]", "$o[0], $o[1] = $o[1], $o[0]"),
    *("kept = $o[0]\n$o[0] = 7\n$o[0] = kept", "if SETTINGS.flag:\n    $o[1] = $v"),
    "for i in range(len($o)):\n    $o[i] = ($o[i] + 1) % 2",
)
_NUMBER_CHANGES = ("$o[0] = 8", "$o[2] = 9", "$o[0], $o[1], $o[2] = 3, 1, 2")

# ------------------------------------------------------------------------------ kinds of owners


# An older tensor that is stored where it is already is not seen on classes.
_OF_CLASSES = tuple(each for each in _NAMES if "$o.other" not in each)


def _named(make: str, prelude: str = "", more: tuple[str, ...] = _IN_DICTS) -> Kind:
    changes = _NAME_CHANGES if more else _SLOT_CHANGES
    return Kind(make, _NAMES + more, changes, prelude)


def _class(body: str, bases: str = "") -> str:
    return f"class Box{bases}:\n{body}"


_SETS_ITSELF = (
    "    def __setattr__(self, name, value):\n        super().__setattr__(name, value)\n",
    "    def __setattr__(self, name, value):\n        self.__dict__[name] = value\n",
    "    def __setattr__(self, name, value):\n"
    "        object.__setattr__(self, name, value)\n"
    "        object.__setattr__(self, 'times', getattr(self, 'times', 0) + 1)\n",
)
_PROPERTY = """    @property
    def view(self):
        return self.held
    @view.setter
    def view(self, value):
        self.held = value
        self.times = getattr(self, "times", 0) + 1 if SETTINGS.flag else 0
"""
_MODULE = _class(
    _INIT + "        self.register_buffer('buffer', torch.zeros(2))\n"
    "        self.weight = nn.Parameter(torch.ones(2))\n"
    "        self.child, self.spare = nn.Identity(), nn.ReLU()\n",
    "(nn.Module)",
)
_OF_MODULES = (
    "$o.buffer = x * 3",
    "$o.buffer = None",
    "$o.register_buffer('second', x + 3)",
    "$o.register_buffer('second', x + 3, persistent=False)",
    "del $o.buffer",
    "$o._buffers['buffer'] = x * 4",
    "$o.weight = None",
    "$o.weight.requires_grad_(False)",
    "$o.requires_grad_(not SETTINGS.flag)",
    "del $o.weight",
    "$o.held = $o.weight",
    "$o.register_parameter('more', None)",
    "$o.child, $o.spare = $o.spare, $o.child",
    "del $o.child",
    "$o.spare = None",
    "$o.train(not $o.training)",
    "$o.eval()",
    "kept = $o.child\ndel $o.child\n$o.child = kept",
    "kept = $o.weight\n$o.weight = None\n$o.weight = kept",
    "kept = $o.buffer\ndel $o.buffer\n$o.buffer = kept",
    "$o.added = $o.child",
)
_MODULE_CHANGES = (
    *("$o.buffer = torch.ones(2)", "$o.train()", "$o.weight.requires_grad_(True)"),
    *("$o.child = nn.Tanh()", "$o.aside = nn.Identity()", "$o._buffers.pop('second', None)"),
)

KINDS: dict[str, Kind] = {
    "object": _named("Box()", _class(_INIT)),
    "slots": _named(
        "Box()",
        _class("    __slots__ = 'held other count log table pal added made'.split()\n" + _INIT),
        ("object.__setattr__($o, 'held', $v)", "Box.held.__set__($o, $v)"),
    ),
    "dataclass": _named(
        "Box()",
        "@dataclasses.dataclass\n"
        + _class(
            "    held: object = 0\n    other: object = 1\n    count: int = 0\n"
            "    log: list = dataclasses.field(default_factory=lambda: [0])\n"
            "    table: dict = dataclasses.field(default_factory=lambda: dict(a=1))\n"
            "    pal: object = dataclasses.field(default_factory=Settings)\n"
        ),
    ),
    "SimpleNamespace": _named(f"types.SimpleNamespace({_KEYWORDS})"),
    "user's module": _named(
        "made_module()",
        "def made_module():\n    self = types.ModuleType('made')\n"
        f"    {_FIELDS}\n    return self\n",
        _IN_DICTS[2:],
    ),
    "function's attributes": _named(
        "made_function()",
        "def made_function():\n    def self():\n        return 0\n"
        f"    {_FIELDS}\n    return self\n",
    ),
    "class": Kind(
        "made_class()",
        (*_OF_CLASSES, "type.__setattr__($o, 'held', $v)"),
        _NAME_CHANGES[:-1],
        f"def made_class():\n    class self:\n        pass\n    {_FIELDS}\n    return self\n",
    ),
    "class of an object": Kind(
        "made_class()()",
        tuple(text.replace("$o", "type($o)") for text in _OF_CLASSES),
        tuple(text.replace("$o", "type($o)") for text in _SLOT_CHANGES),
        f"def made_class():\n    class self:\n        pass\n    {_FIELDS}\n    return self\n",
    ),
    "property": Kind(
        "Box()",
        (*_NAMES, "$o.view = $v", "setattr($o, 'view', $v)", "Box.view.fset($o, $v)"),
        _NAME_CHANGES,
        _class(_INIT + _PROPERTY),
    ),
    **{
        f"__setattr__ of its own, {number}": _named("Box()", _class(_INIT + text))
        for number, text in enumerate(_SETS_ITSELF)
    },
    "nn.Module": Kind(
        "Box()",
        (*_NAMES, *_OF_MODULES, *_OF_MODULES, *_IN_DICTS[:1]),
        _NAME_CHANGES + _MODULE_CHANGES,
        _MODULE,
    ),
    "attributes of a parameter": _named(
        "made_parameter()",
        "def made_parameter():\n    self = nn.Parameter(torch.ones(2))\n"
        f"    {_FIELDS}\n    return self\n",
        _IN_DICTS[2:6],
    ),
    "dict": Kind("dict(a=0, b=1)", _KEYS + _OF_C, _KEY_CHANGES),
    "OrderedDict": Kind("collections.OrderedDict(a=0, b=1)", _KEYS + _OF_ORDERED * 3, _KEY_CHANGES),
    "defaultdict": Kind(
        "collections.defaultdict(list, a=0, b=1)",
        (*_KEYS, "$o['lists'].append($v)", "$o['lists']"),
        _KEY_CHANGES,
    ),
    "dict of a class": Kind(
        "Table(a=0, b=1)",
        (*_KEYS, *_OF_C, "$o.held = $v"),
        _KEY_CHANGES,
        "class Table(dict):\n    def __setitem__(self, key, value):\n"
        "        super().__setitem__(key, value)\n        super().__setitem__('last', key)\n",
    ),
    "UserDict": Kind("collections.UserDict(a=0, b=1)", _KEYS, _KEY_CHANGES),
    "list": Kind("[3, 1, 2]", _ELEMENTS + _OF_LISTS, _ELEMENT_CHANGES),
    "list of a class": Kind(
        "Row([3, 1, 2])",
        (*_ELEMENTS, *_OF_LISTS, "$o.held = $v"),
        _ELEMENT_CHANGES,
        "class Row(list):\n    def append(self, value):\n        super().append(value)\n"
        "        self.times = len(self)\n",
    ),
    "deque": Kind("collections.deque([3, 1, 2])", _ELEMENTS + _OF_DEQUES, _ELEMENT_CHANGES),
    "deque with maxlen": Kind(
        "collections.deque([3, 1], maxlen=3)",
        tuple(each for each in _ELEMENTS + _OF_DEQUES if "insert" not in each),
        _ELEMENT_CHANGES[:-1],
    ),
    "set": Kind("{1, 2, 3}", _OF_SETS, _SET_CHANGES, values="number"),
    "bytearray": Kind(
        "bytearray(b'\\x03\\x01\\x02')",
        (
            *_OF_NUMBERS,
            "$o.append(1)",
            "$o.extend(b'ab')",
            "$o.pop()",
            "$o.clear()",
            "$o.reverse()",
        ),
        _NUMBER_CHANGES[:1],
        values="number",
    ),
    "array.array": Kind(
        "array.array('d', [3, 1, 2])",
        (*_OF_NUMBERS, "$o.append(1)", "$o.extend([1, 2])", "$o.pop()", "$o.reverse()"),
        _NUMBER_CHANGES[:1],
        values="number",
    ),
    "NumPy array": Kind(
        "np.array([3.0, 1.0, 2.0])",
        (
            *_OF_NUMBERS,
            "$o[:] = $v",
            "$o.fill(2)",
            "$o.sort()",
            "np.copyto($o, 4)",
            "array = $o\narray *= 2",
            "np.add($o, 1, out=$o)",
        ),
        _NUMBER_CHANGES,
        values="number",
    ),
    "array of objects": Kind(
        "np.array([3, 'a', None], dtype=object)",
        (
            "$o[0] = $v",
            "$o[0], $o[1] = $o[1], $o[0]",
            "$o[:2] = 5",
            "if SETTINGS.flag:\n    $o[1] = $v",
        ),
        _NUMBER_CHANGES,
        values="number",
    ),
    "ContextVar": Kind(
        "made_variable()",
        (
            "$o.set($v)",
            "$o.set(($o.get() + 1) % 2 if type($o.get()) is int else 0)",
            "token = $o.set($v)\n$o.reset(token)",
            "if SETTINGS.flag:\n    $o.set($v)",
        ),
        ("$o.set(0)", "$o.set('text')"),
        "def made_variable():\n    made = contextvars.ContextVar('variable', default=5)\n"
        "    made.set(0)\n    return made\n",
    ),
    "global": Kind(
        "0",
        (
            *("held = $v", "added = $v", "del held", "count += 1", "count = (count + 1) % 2"),
            *("globals()['held'] = $v", "globals().update(held=$v)", "globals().pop('held', None)"),
            *("held, other = other, held", "log.append($v)", "log += [$v]", "held = $v\ndel held"),
            *(
                "if SETTINGS.flag:\n    held = $v",
                "exec('held = 3', globals())",
                "held = log",
                "held = other",
            ),
            "kept = other\nother = $v\nother = kept",
        ),
        (
            "held = 8",
            "count = 0",
            "log.clear()",
            "log = []",
            "other = torch.ones(2)",
            "other = torch.zeros(2)",
        ),
        declares="global held, other, count, log, added",
    ),
    "cell": Kind(
        "0",
        (
            *("held = $v", "del held", "count += 1", "count = (count + 1) % 2", "log.append($v)"),
            *("held, other = other, held", "if SETTINGS.flag:\n    held = $v", "log += [$v]"),
            *(
                "held = log",
                "held = other",
                "kept = other\nother = $v\nother = kept",
                "held = $v\ndel held",
            ),
        ),
        (
            "held = 8",
            "count = 0",
            "log.clear()",
            "log = []",
            "other = torch.ones(2)",
            "other = torch.zeros(2)",
        ),
        declares="nonlocal held, other, count, log",
    ),
}

# ------------------------------------------------------------------------------ ways to an owner


@dataclass(frozen=True)
class Way:
    """What lies between an owner and the next one; ``$in`` is what it holds."""

    make: str
    path: str
    prelude: str = ""
    is_assignable: bool = True


WAYS = {
    "attribute": Way("Holder($in)", ".inner"),
    "item": Way("dict(inner=$in, aside=0)", "['inner']"),
    "element": Way("[0, $in]", "[1]"),
    "tuple": Way("(0, $in)", "[1]", is_assignable=False),
    "namespace": Way("types.SimpleNamespace(inner=$in, aside=0)", ".inner"),
    "method": Way("Holder($in)", ".get()", is_assignable=False),
    "property": Way("Holder($in)", ".view", is_assignable=False),
    "attribute of a Module": Way("ModuleHolder($in)", ".inner"),
    "partial": Way("functools.partial(print, inner=$in)", ".keywords['inner']"),
}
_HOLDERS = """
class Holder:
    def __init__(self, inner):
        self.inner, self.aside = inner, 0
    def get(self):
        return self.inner
    @property
    def view(self):
        return self.inner

class ModuleHolder(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner, self.aside = inner, 0
"""
# How a root is read, how it is replaced.
ROOTS = {
    "global": ("ROOT", "global ROOT\nROOT = $new"),
    "cell": ("root", "nonlocal root\nroot = $new"),
    "default": ("given", "function.__defaults__ = ($new,)"),
    "self": ("self.root", "trainer.root = $new"),
}
CALLS = ("none", "none", "none", "function", "nested function", "method", "exec", "generator")
_VALUES = {
    "any": (
        *("3", "'text'", "x * 2", "x + SETTINGS.scale", "x", "(x * 2, 1)", "{'r': x * 3, 'n': 1}"),
        *("[x + 1, 'a']", "SETTINGS.scale", "None", "(x, 2)", "[]", "{}"),
    ),
    "number": ("3", "5", "SETTINGS.scale + 1 > 2", "len(x)"),
}
# Numbers of the argument, and tensors that share memory with it or with one another.
_OF_ARGUMENT = {
    "any": (
        *("x.sum().item()", "[x.sum().item(), x * 2]", "{'m': x.mean().item()}"),
        *("(x.sum().item(), 1)", "x.sum().item() > 2", "[(x > 1).sum().item()]"),
        *("x.detach()", "x[1:]", "(x * 2)[:1]", "{'v': x.view(2, 1), 'p': nn.Parameter(x + 1)}"),
    ),
    "number": ("(x > 1).sum().item()",),
}
_ANYWHERE = (
    *("pass", "pass", "pass", "pass", "SETTINGS.flag = not SETTINGS.flag"),
    *("SETTINGS.scale = 3.0", "SETTINGS.scale = 2.0", "SETTINGS.aside = 1"),
)


@dataclass(frozen=True)
class Case:
    """A step and what others do between its calls.

    Attributes:
        name: Of the seed.
        source: The module's text.
        module: The module, in which what is global lies.
        step: The step, of one tensor.
        changes: In order, one after each call.
    """

    name: str
    source: str
    module: types.ModuleType
    step: Callable[[Any], Any]
    changes: tuple[Callable[[], None], ...]

    def close(self) -> None:
        """Let go of the module, when nobody calls the step any more."""
        sys.modules.pop(self.module.__name__, None)


class _Drawing:
    """Draws the parts of a case, all from one seed."""

    def __init__(self, seed: int, kind: str | None, items: bool) -> None:
        self.random = random.Random(seed)
        self.kind = kind or self.pick(list(KINDS))
        self.owner = KINDS[self.kind]
        depth = 0 if self.owner.declares else self.random.choice((0, 0, 1, 1, 2, 3))
        self.ways = [WAYS[self.pick(list(WAYS))] for _ in range(depth)]
        self.root = self.pick(list(ROOTS))
        self.writes = [
            self.pick(self.owner.writes) for _ in range(self.random.choice((1, 1, 2, 3)))
        ]
        self.calls = [self.pick(CALLS) for _ in self.writes]
        values = _VALUES[self.owner.values]
        values += _OF_ARGUMENT[self.owner.values] * 2 if items else ()
        self.values = [self.pick(values) for _ in self.writes]
        self.changes = [self.change() for _ in range(NUM_CHANGES)]
        self.where = self.random.randint(1, len(self.writes))

    def pick(self, choices: Any) -> Any:
        return self.random.choice(list(choices))

    def made(self, level: int = 0) -> str:
        """What makes the owner at a level with what is below it."""
        text = self.owner.make
        for way in reversed(self.ways[level:]):
            text = way.make.replace("$in", text)
        return text

    def path(self, level: int, root: str = "") -> str:
        return (root or ROOTS[self.root][0]) + "".join(way.path for way in self.ways[:level])

    def change(self) -> str:
        """Draw what somebody else does; ``$root`` is the root."""
        draw, depth = self.random.random(), len(self.ways)
        if draw < 0.45:
            return self.pick(_ANYWHERE)
        if draw < 0.8 or self.owner.declares:
            text = self.pick(self.owner.changes).replace("$o", self.path(depth, "$root"))
            return f"{self.owner.declares}\n{text}"
        levels = [n for n in range(1, depth + 1) if self.ways[n - 1].is_assignable]
        level = self.pick([0, *levels])
        if level == 0:
            return Template(ROOTS[self.root][1]).safe_substitute(new=self.made())
        return f"{self.path(level, '$root')} = {self.made(level)}"

    def write(self, number: int, prelude: list[str], inside: list[str]) -> str:
        """Return one write of the step; what it needs goes before it, in the module or inside."""
        text, value, call = self.writes[number], self.values[number], self.calls[number]
        owner, declares = self.path(len(self.ways)), self.owner.declares
        if call == "none" or (declares and call == "exec"):
            return text.replace("$o", owner).replace("$v", value)
        if declares.startswith("nonlocal"):
            call = "nested function"
        owner = "0" if declares else owner
        body = text.replace("$o", "o").replace("$v", "v")
        if call == "exec":
            return f"exec({body!r}, globals(), dict(v={value}, o={owner}, x=x))"
        body = f"{declares or 'pass'}\n{body}\n"
        arguments = f"({value}, {owner}, x)"
        if call == "method":
            lines = f"class Writer_{number}:\n    def write(self, v, o, x):\n"
            lines += indent(body, " " * 8)
            prelude.append(f"{lines}\nWRITER_{number} = Writer_{number}()\n")
            return f"WRITER_{number}.write{arguments}"
        lines = f"def write_{number}(v, o, x):\n" + indent(body, "    ")
        (inside if call == "nested function" else prelude).append(lines)
        called = f"write_{number}{arguments}"
        return f"list({called} for _ in [0])" if call == "generator" else called

    def source(self, fails: bool) -> str:
        """The module's text; the step may raise after some of its writes."""
        prelude, inside = [IMPORTS, _HOLDERS, self.owner.prelude], list[str]()
        statements = [self.write(number, prelude, inside) for number in range(len(self.writes))]
        if fails:
            statements.insert(self.where, "raise Stopped")
        body = "\n".join([*statements, "return x * SETTINGS.scale"])
        declares = self.owner.declares or "pass"
        start = {"self": "self, x", "default": f"x, given={self.made()}"}.get(self.root, "x")
        step = f"def step({start}):\n" + indent(f"{declares}\n{body}\n", "    ")
        lines = ["held, other, count, log = 0, 1, 0, []", f"root = {self.made()}", *inside]
        if self.root == "self":
            lines += ["class Trainer:", indent(step, "    "), "trainer = Trainer()"]
            lines += ["trainer.root = root", "function = trainer.step"]
        else:
            lines += [step, "function = step"]
        roots = {"self": "trainer.root", "default": "function.__defaults__[0]"}
        for number, text in enumerate(self.changes):
            text = text.replace("$root", roots.get(self.root, ROOTS[self.root][0]))
            lines.append(f"def change_{number}():\n" + indent(text, "    "))
        names = ", ".join(f"change_{number}" for number in range(NUM_CHANGES))
        lines.append(f"return function, ({names})")
        first = f"ROOT = {self.made()}\n" if self.root == "global" else ""
        return "\n".join([*prelude, first, "def build():", indent("\n".join(lines), "    ")])


def drawn(seed: int, fails: bool = False, kind: str | None = None, items: bool = False) -> Case:
    """Draw a case; the same arguments give the same one, with state of its own.

    Args:
        seed: A number.
        fails: Whether the step raises, after some of its writes.
        kind: The kind of owner; drawn as well if None.
        items: Whether what is stored may be numbers of the argument, and views.
    """
    source = _Drawing(seed, kind, items).source(fails)
    name = f"effect_case_{seed}"
    path = Path(_FOLDER.name) / f"{name}.py"
    path.write_text(source)
    module = types.ModuleType(name)
    module.__file__ = str(path)
    sys.modules[name] = module
    exec(compile(source, str(path), "exec"), module.__dict__)
    step, changes = module.build()
    return Case(name, source, module, step, changes)
