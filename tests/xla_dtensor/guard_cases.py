"""Drawn steps that read Python's state, with changes between their calls; plain Python judges.

A case is a chain of owners (`guard_owners`) that ends in a number, read in one form each, behind a
call of some kind, and used in some way. Between its calls something changes: what is read, what
lies beside it, a function on the way. `Change.is_read` says which. Nothing here knows of guards or
of xla_dtensor, so that any recorder of what a step reads can be judged::

    case = drawn(seed)
    case.step(x)         # x * a number that Python holds
    case.change(0)       # the first of case.changes
    case.step(x)

Each call of `drawn` gives a case with state of its own. `fixed_guard_cases` has cases with names.
"""

from __future__ import annotations

import math
import random
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from string import Template
from typing import Any

from tests.xla_dtensor.guard_owners import ATTRIBUTE_READS, OWNERS, ROOTS, Read

__all__ = ["Case", "Change", "cases", "drawn"]

NUM_CHANGES = 5
VALUES = (0.0, 1.0, 2.0, 3.0, 4.0)
_FOLDER = tempfile.TemporaryDirectory(prefix="guard_cases_")

_IMPORTS = """import array, bisect, collections, contextvars, dataclasses, enum, functools
import itertools, math, operator, os, types, typing, weakref
import numpy as np
import torch
from torch import nn
"""
_BESIDE = """
LOG, COUNTERS = [], {}
def bumped(value):
    return value + 1.0 if isinstance(value, (int, float)) else value
"""


@dataclass(frozen=True)
class Change:
    """A change between two calls.

    Attributes:
        form: Its form.
        owner: The kind of what changes.
        read: The form in which the step reads that owner.
        is_read: True where it alters what the step reads, False where nobody reads it, so that it
            must not retrace, None where either will do (an equal value, a list whose length alone
            is read).
        source: What is done.
    """

    form: str
    owner: str
    read: str
    is_read: bool | None
    source: str


@dataclass(frozen=True)
class Case:
    """A step and the changes between its calls.

    Attributes:
        name: Of the seed.
        owners: The kinds of owners, from the root.
        reads: The read form of each owner behind the root.
        call: Through what kind of function they are read.
        use: What the number is used for.
        source: The module.
        changes: In order, one after each call.
    """

    name: str
    owners: tuple[str, ...]
    reads: tuple[str, ...]
    call: str
    use: str
    source: str
    changes: tuple[Change, ...]

    @cached_property
    def _module(self) -> types.ModuleType:
        _imported(f"guard_settings_{self.name}", "root, spare = None, 0\n")
        return _imported(f"guard_case_{self.name}", self.source)

    @cached_property
    def step(self) -> Callable[[Any], Any]:
        """The step, of one tensor."""
        return self._module.build()

    def change(self, number: int) -> None:
        """Do one of the changes."""
        getattr(self._module, f"change_{number}")()

    def is_read(self, number: int) -> bool | None:
        """Whether a change alters what the step reads; None where either will do."""
        return self.changes[number].is_read

    def close(self) -> None:
        """Let go of the case's modules; to be called when nobody calls the step any more."""
        for name in (f"guard_settings_{self.name}", f"guard_case_{self.name}"):
            sys.modules.pop(name, None)

    def __str__(self) -> str:
        return (
            f"seed {self.name}: {' > '.join(self.owners)} by {', '.join(self.reads) or 'name'} "
            f"through {self.call} for {self.use}"
        )


def _imported(name: str, source: str) -> types.ModuleType:
    """Write a module to a file and import it, anew each time."""
    path = Path(_FOLDER.name) / f"{name}.py"
    path.write_text(source)
    module = types.ModuleType(name)
    module.__file__ = str(path)
    sys.modules[name] = module
    exec(compile(source, str(path), "exec"), module.__dict__)
    return module


# ----------------------------------------------------------------------- calls


@dataclass(frozen=True)
class Call:
    """A function between the step and the read: ``$access`` reads ``o``, ``$e`` is the owner."""

    text: str
    prelude: str = ""
    changes: tuple[tuple[str, str], ...] = ()


_BODY = ":\n    return $access\n"
_CHANGED = "def changed(o):\n    return bumped($access)\n"
_READER = "class Reader:\n    def read(self, o):\n        return $access\nREADER = Reader()\n"
_METHOD_CHANGED = "def changed(self, o):\n    return bumped($access)\n"

CALLS: dict[str, Call] = {
    "none": Call("$inline"),
    "function": Call(
        "helper($e)",
        "def helper(o)" + _BODY + _CHANGED,
        (
            ("another function", "global helper\n    helper = changed"),
            ("another __code__", "helper.__code__ = changed.__code__"),
        ),
    ),
    "lambda": Call(
        "helper($e)",
        "helper = lambda o: $access\n" + _CHANGED,
        (("another function", "global helper\n    helper = changed"),),
    ),
    "default that is added": Call(
        "helper($e)",
        "def helper(o, plus=0.0):\n    return $access + plus\n",
        (
            ("other __defaults__", "helper.__defaults__ = (1.0,)"),
            ("an attribute of the function", "helper.calls = $n"),
        ),
    ),
    "keyword default that is added": Call(
        "helper($e)",
        "def helper(o, *, plus=0.0):\n    return $access + plus\n",
        (
            ("other __kwdefaults__", 'helper.__kwdefaults__ = {"plus": 1.0}'),
            ("item of __kwdefaults__", 'helper.__kwdefaults__["plus"] = 2.0'),
        ),
    ),
    "partial": Call(
        "helper($e)",
        "def base(o, plus):\n    return $access + plus\n"
        "helper = functools.partial(base, plus=0.0)\n",
        (
            ("item of keywords", 'helper.keywords["plus"] = 2.0'),
            ("another partial", "global helper\n    helper = functools.partial(base, plus=1.0)"),
            ("an equal partial", "global helper\n    helper = functools.partial(base, plus=0.0)"),
        ),
    ),
    "decorated": Call(
        "helper($e)",
        "def noting(function):\n    @functools.wraps(function)\n"
        "    def wrapper(*args, **kwargs):\n        return function(*args, **kwargs)\n"
        "    return wrapper\n@noting\ndef helper(o)" + _BODY + _CHANGED,
        (
            ("another function", "global helper\n    helper = noting(changed)"),
            ("cell of a wrapper", "helper.__closure__[0].cell_contents = changed"),
        ),
    ),
    "method": Call(
        "READER.read($e)",
        _READER + _METHOD_CHANGED,
        (
            ("another method", "Reader.read = changed"),
            ("method of the object", "READER.read = types.MethodType(changed, READER)"),
            ("a method that nobody calls", "Reader.unused_$n = changed"),
        ),
    ),
    "inherited method": Call(
        "READER.read($e)",
        _READER + "class Child(Reader):\n    def read(self, o):\n        return super().read(o)\n"
        "READER = Child()\n" + _METHOD_CHANGED,
        (("another method of the parent", "Reader.read = changed"),),
    ),
    "computed method": Call(
        'getattr(READER, "re" + "ad")($e)',
        _READER + _METHOD_CHANGED,
        (("another method", "Reader.read = changed"),),
    ),
    "static method": Call(
        "Reader.read($e)",
        "class Reader:\n    @staticmethod\n    def read(o):\n        return $access\n" + _CHANGED,
        (("another method", "Reader.read = staticmethod(changed)"),),
    ),
    "class method": Call(
        "Reader.read($e)",
        "class Reader:\n    plus = 0.0\n    @classmethod\n    def read(cls, o):\n"
        "        return $access + cls.plus\n",
        (("class attribute", "Reader.plus = 1.0"),),
    ),
    "callable object": Call(
        "READER($e)",
        _READER.replace("read", "__call__") + _METHOD_CHANGED,
        (("another method", "Reader.__call__ = changed"),),
    ),
    "forward": Call(
        "READER($e)",
        _READER.replace("read", "forward").replace("Reader:", "Reader(nn.Module):")
        + _METHOD_CHANGED,
        (
            ("another method", "Reader.forward = changed"),
            ("a hook", "READER.register_forward_hook(lambda m, args, out: bumped(out))"),
        ),
    ),
    "function in a table": Call(
        'HELPERS["read"]($e)',
        "def helper(o)" + _BODY + _CHANGED + 'HELPERS = {"read": helper, "unused": abs}\n',
        (
            ("item of the table", 'HELPERS["read"] = changed'),
            ("another item of the table", 'HELPERS["unused"] = round'),
        ),
    ),
    "map of a lambda": Call("list(map(lambda o: $access, [$e]))[0]"),
    "generator": Call("next($access for o in [$e])"),
    "reduce": Call("functools.reduce(lambda held, o: $access, [$e], None)"),
    "closure": Call(
        "helper($e)",
        "def making(plus):\n    def helper(o):\n        return $access + plus\n    return helper\n"
        "helper = making(0.0)\n",
        (
            ("another closure", "global helper\n    helper = making(1.0)"),
            ("contents of a cell", "helper.__closure__[0].cell_contents = 1.0"),
            ("an equal closure", "global helper\n    helper = making(0.0)"),
        ),
    ),
    "recursion": Call(
        "helper($e, 2)",
        "def helper(o, depth):\n    return helper(o, depth - 1) if depth else $access\n",
    ),
    "try": Call(
        "helper($e)",
        "def helper(o):\n    try:\n        return $access\n    finally:\n        pass\n" + _CHANGED,
        (("another function", "global helper\n    helper = changed"),),
    ),
}
# Forms of a call's changes that replace a thing by an equal one, or touch what nobody reads.
_EQUAL = ("an equal partial", "an equal closure")
_UNREAD = (
    "an attribute of the function",
    "a method that nobody calls",
    "another item of the table",
)

# ----------------------------------------------------------------------- uses

USES: dict[str, tuple[str, str]] = {
    "product": ("$v", ""),
    "branch": ("(2.0 if $v > 1.5 else 1.0)", ""),
    "truth": ("(2.0 if $v else 1.0)", ""),
    "in": ("(2.0 if $v in (2.0, 4.0) else 1.0)", ""),
    "equality": ("(2.0 if $v == 2.0 else 1.0)", ""),
    "f-string to getattr": (
        '(lambda v: getattr(Levels, f"level_{int(v) % 3}"))($v)',  # no $v inside: Python 3.11
        "class Levels:\n    level_0, level_1, level_2 = 1.0, 2.0, 3.0\n",
    ),
    "index": ("LEVELS[int($v) % 5]", "LEVELS = [1.0, 2.0, 3.0, 4.0, 5.0]\n"),
    "key": ("LEVELS.get($v, 7.0)", "LEVELS = {0.0: 1.0, 1.0: 2.0, 2.0: 3.0}\n"),
    "match": (
        "level_of($v)",
        "def level_of(v):\n    match v:\n        case 1.0 | 3.0:\n            return 2.0\n"
        "        case float():\n            return 3.0\n    return 4.0\n",
    ),
    "sqrt": ("math.sqrt(abs($v))", ""),
    "max": ("max($v, 1.5)", ""),
    "sum": ("sum([$v, 1.0])", ""),
    "sorted": ("sorted([$v, 2.5])[0]", ""),
    "map": ("sum(map(float, [$v, 1.0]))", ""),
    "zip": ("sum(a * b for a, b in zip([$v], [2.0]))", ""),
    "isinstance": ("(2.0 if isinstance($v, float) else 1.0)", ""),
    "type": ("len(type($v).__name__) * 1.0", ""),
    "format": ('(lambda v: float(f"{v:.1f}"))($v)', ""),
    "str": ("len(str($v)) * 1.0", ""),
    "sign": ("math.copysign(2.0, $v)", ""),
    "loop": ("sum(1.0 for _ in range(int($v)))", ""),
    "operator": ("operator.mul($v, 2.0)", ""),
    "bisect": ("bisect.bisect([0.5, 1.5, 2.5], $v) * 1.0", ""),
}

# ----------------------------------------------------------------------- drawing

# A weak reference may name these.
_WEAK = set(OWNERS) - {
    "named tuple",
    "tuple",
    "list",
    "dict",
    "SimpleNamespace",
    "behind a weak reference",
    "environ",
    "defaultdict",
}
_NUMBERS = {name for name, owner in OWNERS.items() if owner.numbers}
# nn.Module keeps these apart from its other attributes.
_REGISTERED = {"nn.Module", "child of nn.Module", "Parameter's attribute", "buffer"}


class _Drawing:
    """One case while it is drawn."""

    def __init__(self, seed: int) -> None:
        self.seed, self.random = seed, random.Random(seed)
        self.name, self.spare = (
            self.random.choice(("gain", "scale", "beta", "width", "rate")),
            self.random.choice(("count", "epoch", "step", "calls", "loss")),
        )
        self.root = self.pick(ROOTS)
        self.owners = self._owners()
        self.reads = [self._read(level) for level in range(len(self.owners))]
        self.call = self.pick(CALLS)
        self.use = self.pick(USES)
        self.number = 1.0
        self.missing = False

    def pick(self, choices: Any) -> str:
        return self.random.choice(sorted(choices))

    def _owners(self) -> list[str]:
        depth = self.random.choice((0, 1, 1, 1, 2, 2, 3))
        owners = [self.pick(set(OWNERS) - _NUMBERS) for _ in range(depth - 1)]
        owners += [self.pick(OWNERS)] if depth else []
        if ROOTS[self.root].weakly and not (owners and owners[0] in _WEAK):
            owners[:1] = [self.pick(_WEAK if len(owners) < 2 else _WEAK - _NUMBERS)]
        return owners

    def _read(self, level: int) -> str:
        reads = OWNERS[self.owners[level]].reads
        is_last = level == len(self.owners) - 1
        if self.owners[level] == "nn.Module" and _REGISTERED & set(self.owners[level + 1 :][:1]):
            reads = ATTRIBUTE_READS
        return self.pick([name for name, read in reads.items() if is_last or not read.ends])

    def fill(self, text: str, level: int = 0, /, **names: Any) -> str:
        """Fill a text's names in."""
        return Template(text).safe_substitute(
            name=self.name,
            spare=self.spare,
            head=self.name[:2],
            rest=self.name[2:],
            level=level,
            **names,
        )

    def read(self, level: int) -> Read:
        return OWNERS[self.owners[level]].reads[self.reads[level]]

    @property
    def ends_in(self) -> Read:
        """The read of the number."""
        return self.read(-1) if self.owners else Read("$o")

    def access(self, owner: str, start: int) -> str:
        """Read from an owner down to the number."""
        for level in range(start, len(self.owners)):
            owner = self.fill(self.read(level).text, level, o=owner)
        return owner

    def made(self, number: float, start: int = 0) -> str:
        """Make what is held at a level."""
        text = "math.nan" if math.isnan(number) else repr(number)
        for level in reversed(range(start, len(self.owners))):
            text = f"make_{level}({text})"
        return text

    def path(self, level: int) -> str:
        """The owner at a level, for changes."""
        text = "current()"
        for above in range(level):
            text = self.fill(OWNERS[self.owners[above]].path, above, o=text)
        return text

    def source(self, changes: list[Change]) -> str:
        """The module's text."""
        parts = [_IMPORTS, f"import guard_settings_{self.seed} as settings\n", _BESIDE]
        for level, kind in enumerate(self.owners):
            parts.append(self.fill(OWNERS[kind].make, level))
            parts.append(self.fill(self.read(level).prelude, level) + "\n")
        start = self.random.randint(0, len(self.owners))
        root = ROOTS[self.root]
        call, (use, prelude) = CALLS[self.call], USES[self.use]
        owner = root.read
        for level in range(start):
            owner = self.fill(self.read(level).text, level, o=owner)
        names = {
            "access": self.access("o", start),
            "e": owner,
            "inline": self.access(owner, start),
        }
        parts += [prelude, self.fill(call.prelude, 0, **names)]
        body = self.fill(use, v=self.fill(call.text, 0, **names))
        parts.append(self.fill(root.source, first=self.made(1.0), body=body))
        for number, change in enumerate(changes):
            parts.append(f"def change_{number}():\n    {change.source}\n")
        return "\n".join(parts)

    # ------------------------------------------------------------------- changes

    def change(self, n: int, is_last: bool) -> Change:
        """Draw a change; the half of them are of what nobody reads."""
        kind = self.random.choice(("number", "number", "beside", "beside", "owner", "call"))
        drawing = {
            "number": self._of_number,
            "beside": self._of_beside,
            "owner": self._of_owner,
            "call": self._of_call,
        }[kind]
        found = drawing(n)
        if is_last and self.owners and self.read(-1).index and self.random.random() < 0.5:
            level = len(self.owners) - 1
            text = self.fill(self.read(level).index, level)
            return Change("other data for the index", self.owners[-1], self.reads[-1], True, text)
        return found or self._aside(n)

    def _of_number(self, n: int) -> Change:
        """Give a level another number, an equal one, one of another type, or the one it had."""
        level = self.random.randint(-1, len(self.owners) - 1)
        if level >= 0 and not OWNERS[self.owners[level]].writes:
            level = -1
        number, how = self._number()
        if self.missing and level < len(self.owners) - 1 and self.random.random() < 0.5:
            level = len(self.owners) - 1
            level = level if OWNERS[self.owners[level]].writes else -1
        value = self.made(number, level + 1)
        is_read = None if how == "an equal value" or "item" not in self.ends_in.of.split() else True
        is_read = True if self.missing else is_read
        self.number, self.missing = number, False
        if level < 0:
            form = "rebind" if not self.owners else "another owner"
            return Change(f"{form}, {how}", self.root, "name", is_read, f"replace({value})")
        owner = OWNERS[self.owners[level]]
        form = self.pick(owner.writes)
        if level < len(self.owners) - 1:
            how = f"owner below, {how}"
        text = self.fill(owner.writes[form], level, o=self.path(level), v=value)
        return Change(f"{form}, {how}", self.owners[level], self.reads[level], is_read, text)

    def _number(self) -> tuple[float, str]:
        how = self.random.random()
        if how < 0.15:
            # A new object, not the constant itself.
            return self.number, "an equal value"
        is_float = isinstance(self.number, float) and not math.isnan(self.number)
        if how < 0.25 and is_float and "array" not in str(self.owners[-1:]):
            return int(self.number), "an equal value of another type"
        if how < 0.4 and self.number != 1.0:
            return 1.0, "back to the first"
        if how < 0.45 and self.use == "product":
            return self.random.choice((-0.0, 1e300, math.nan)), "another value"
        choices = [value for value in VALUES if value != self.number]
        return self.random.choice(choices), "another value"

    def _of_beside(self, n: int) -> Change | None:
        """Change what lies beside what is read, of an owner or a name."""
        level = self.random.randint(-1, len(self.owners) - 1)
        if self.missing:
            level = -1
        if level < 0:
            return Change("another name", self.root, "name", False, f"beside({n})")
        owner, read = OWNERS[self.owners[level]], self.reads[level]
        grows = self.random.random() < 0.4
        texts = owner.grows if grows else owner.beside
        if not texts:
            return None
        form = self.pick(texts)
        of = self.read(level).of.split()
        of_it = "size" in of if grows else "beside" in of
        text = self.fill(texts[form], level, o=self.path(level), n=n)
        is_read = None if of_it or not of else False
        return Change(form, self.owners[level], read, is_read, text)

    def _of_owner(self, n: int) -> Change | None:
        """Exchange a class or a method, or delete what is read where the form allows it."""
        if not self.owners or self.missing:
            return None
        level = self.random.randint(0, len(self.owners) - 1)
        owner, read = OWNERS[self.owners[level]], self.read(level)
        is_last = level == len(self.owners) - 1
        if is_last and owner.delete and read.default is not None:
            self.missing = True
            text = self.fill(owner.delete, level, o=self.path(level))
            return Change("delete", self.owners[level], self.reads[level], True, text)
        if not owner.replaces:
            return None
        form = self.pick(owner.replaces)
        text, part = owner.replaces[form]
        # An object's class is looked up by any read of it.
        is_read = True if part in read.of.split() else None if part == "class" else False
        text = self.fill(text, level, o=self.path(level), n=n)
        return Change(form, self.owners[level], self.reads[level], is_read, text)

    def _of_call(self, n: int) -> Change | None:
        """Change the function through which is read."""
        if not (changes := CALLS[self.call].changes):
            return None
        form, text = self.random.choice(changes)
        is_read = None if form in _EQUAL else form not in _UNREAD
        text = Template(text).safe_substitute(n=n)
        return Change(form, self.call, "call", is_read, text)

    def _aside(self, n: int) -> Change:
        """Change what has nothing to do with the step."""
        form = self.pick(_ASIDE)
        text = self.fill(_ASIDE[form], n=n)
        return Change(form, "global", "none", False, text)


_ASIDE = {
    "a log that grows": "LOG.append($n)",
    "a counter": 'COUNTERS["calls"] = $n',
    "a global of the attribute's name": 'globals()["$name"] = $n',
    "a global loop variable": 'globals()["read"] = $n',
    "a new global": 'globals()["added_$n"] = $n',
    "an attribute of torch's module": "torch.added_by_guard_cases = $n",
}


def drawn(seed: int) -> Case:
    """Draw a case; the same seed gives the same one, with state of its own.

    Args:
        seed: A number.
    """
    drawing = _Drawing(seed)
    changes = [drawing.change(n + 1, n + 1 == NUM_CHANGES) for n in range(NUM_CHANGES)]
    return Case(
        str(seed),
        (drawing.root, *drawing.owners),
        tuple(drawing.reads),
        drawing.call,
        drawing.use,
        drawing.source(changes),
        tuple(changes),
    )


def cases(seeds: range) -> Iterator[Case]:
    """Draw the cases of some seeds.

    Args:
        seeds: The seeds.
    """
    for seed in seeds:
        yield drawn(seed)
