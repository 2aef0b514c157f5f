"""What a function's code reads by name, read off its bytecode; nothing is run.

A *chain* is a name and what is looked up from it, one step after the other::

    def step(self, x):
        config = self.config
        return x * config.scale + TABLE["bias"] + offset

    self.config.scale       of an argument: which object it is, the caller of this module knows
    TABLE['bias']           of a global
    offset                  of a variable of the function around it

Locals are followed where a chain is assigned to them, whatever the control flow. What else is done
with a chain's value (it is passed on, looped over, indexed by a variable) ends the chain: whoever
asks has to take all of that value as read. Functions inside of the function count as its own code.

Other versions of Python have other instructions. One that is not known ends a chain, so that less
is known of how far a value is looked into, never that it is not read.
"""

from __future__ import annotations

import dis
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from types import CodeType
from typing import Any, NamedTuple

__all__ = [
    "ARGUMENT",
    "ATTRIBUTE",
    "CELL",
    "GLOBAL",
    "ITEM",
    "OVERRIDDEN",
    "Chain",
    "Reads",
    "reads_of",
]

GLOBAL, CELL, ARGUMENT = "global", "cell", "argument"
# ``super().name`` is a step of the function's first argument.
ATTRIBUTE, ITEM, OVERRIDDEN = "attribute", "item", "overridden"

_PASSES = 3  # so that a local may be assigned below of where it is used, in a loop
_GLOBALS = frozenset({"LOAD_GLOBAL", "LOAD_NAME"})
_CELLS = frozenset({"LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"})
_ATTRIBUTES = frozenset({"LOAD_ATTR", "LOAD_METHOD"})
_CONSTANTS = frozenset({"LOAD_CONST", "LOAD_SMALL_INT"})
_SUPER_ATTRIBUTES = frozenset({"LOAD_SUPER_ATTR", "LOAD_SUPER_METHOD"})
_STORES = frozenset(
    {"STORE_FAST", "STORE_DEREF", "STORE_NAME", "STORE_FAST_LOAD_FAST", "STORE_FAST_STORE_FAST"}
)
# These leave what is on top of the stack there, or concern something else.
_NOTHING = frozenset({"CACHE", "COPY", "NOP", "EXTENDED_ARG", "RESUME", "PUSH_NULL", "PRECALL"})


class Chain(NamedTuple):
    """A name and the steps from it.

    Attributes:
        root: ``GLOBAL``, ``CELL`` or ``ARGUMENT``.
        name: Of the global, the variable of the function around, or the argument.
        steps: ``(ATTRIBUTE, name)``, ``(ITEM, key)`` or ``(OVERRIDDEN, name)`` each.
    """

    root: str
    name: str
    steps: tuple[tuple[str, Any], ...] = ()

    def then(self, kind: str, key: Any) -> Chain:
        """Return the chain with one more step."""
        return self._replace(steps=(*self.steps, (kind, key)))

    def __str__(self) -> str:
        return self.name + "".join(_FORMS[kind].format(key) for kind, key in self.steps)


_FORMS = {ATTRIBUTE: ".{}", ITEM: "[{!r}]", OVERRIDDEN: ".super().{}"}


@dataclass(frozen=True)
class Reads:
    """What a piece of code reads.

    Args:
        chains: In the order in which they stand there, none twice.
        attributes: The names of all attributes that are looked up, of whatever.
    """

    chains: tuple[Chain, ...]
    attributes: frozenset[str]


@lru_cache(maxsize=10_000)
def reads_of(code: CodeType) -> Reads:
    """Return what `code` reads, functions and comprehensions inside of it included.

    Example:
        >>> def step(self, x):
        ...     config = self.config
        ...     return x * config.scale + TABLE["bias"]
        >>> [str(chain) for chain in reads_of(step.__code__).chains]
        ['self.config', 'self.config.scale', "TABLE['bias']"]
    """
    scope = _Scope.of_function(code)
    for _ in range(_PASSES):
        found = dict.fromkeys(_chains(code, scope))
    return Reads(tuple(found), frozenset(_attributes(code)))


def _attributes(code: CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if instruction.opname in _ATTRIBUTES:
            yield instruction.argval
    for inner in _functions(code):
        yield from _attributes(inner)


def _functions(code: CodeType) -> list[CodeType]:
    return [constant for constant in code.co_consts if isinstance(constant, CodeType)]


_Values = tuple[Chain, ...]
_SUPER: _Values = (Chain(GLOBAL, "super"),)


@dataclass
class _Scope:
    """What names of locals stand for: chains, or what the function around knows of them."""

    arguments: frozenset[str]
    free: frozenset[str]
    outer: _Scope | None = None
    self_name: str | None = None
    locals: dict[str, dict[Chain, None]] = field(default_factory=dict)

    @classmethod
    def of_function(cls, code: CodeType, outer: _Scope | None = None) -> _Scope:
        count = code.co_argcount + code.co_kwonlyargcount
        # An inner function's arguments are nobody's that could be known.
        names = frozenset(code.co_varnames[:count]) if outer is None else frozenset()
        self_name = code.co_varnames[0] if names and code.co_argcount else None
        return cls(names, frozenset(code.co_freevars), outer, self_name)

    def look_up(self, name: str) -> _Values:
        if name in self.free:
            if self.outer is not None:
                return self.outer.look_up(name)
            return () if name == "__class__" else (Chain(CELL, name),)
        own = (Chain(ARGUMENT, name),) if name in self.arguments else ()
        return (*own, *self.locals.get(name, {}))

    def first(self, kind: str, key: str) -> _Values:
        """Return a step of the function's first argument."""
        found = () if self.self_name is None else self.look_up(self.self_name)
        return tuple(chain.then(kind, key) for chain in found)

    def stored(self, name: str | tuple[str, str], values: _Values) -> _Values:
        """Assign to a local; return what is on top then. Python 3.13 may do two things at once."""
        first, second = (name, None) if isinstance(name, str) else name
        if first not in self.free:
            self.locals.setdefault(first, {}).update(dict.fromkeys(values))
        return () if second is None else self.look_up(second)


def _chains(code: CodeType, scope: _Scope) -> Iterator[Chain]:
    """Yield each chain where it ends."""
    top: _Values = ()  # what is on top of the stack
    under: _Values = ()  # what lies under it, where the top is a constant
    key: Any = None
    for step in dis.get_instructions(code):
        name, value = step.opname, step.argval
        if name in _NOTHING or (name == "CALL" and top == _SUPER):
            continue
        if name in _SUPER_ATTRIBUTES or (name in _ATTRIBUTES and top == _SUPER):
            top, under = scope.first(OVERRIDDEN, value), ()
        elif name in _ATTRIBUTES and not under:
            top = tuple(chain.then(ATTRIBUTE, value) for chain in top)
        elif _is_subscript(name, step.argrepr) and under:
            top, under = tuple(chain.then(ITEM, key) for chain in under), ()
        elif name in _STORES:
            top, under = scope.stored(value, top), ()
        elif name in _CONSTANTS and top:
            under, top, key = top, (), value
        elif name == "STORE_ATTR" or (name == "STORE_SUBSCR" and (under or top)):
            top, under = (), ()  # written, not read
        else:
            yield from under
            loaded = _loaded(name, value, scope)
            # Below what is loaded now may lie a container that is written at it.
            if loaded is None or step.offset not in _keys_of_writes(code):
                yield from top
            top, under = loaded or (), ()
        for inner in _made_function(name, value):
            yield from _chains(inner, _Scope.of_function(inner, scope))
    yield from (*under, *top)


def _is_subscript(name: str, text: str) -> bool:
    return name == "BINARY_SUBSCR" or (name == "BINARY_OP" and text == "[]")


def _loaded(name: str, value: Any, scope: _Scope) -> _Values | None:
    """Return the chains that an instruction puts on the stack; None if it is none that loads."""
    if name in _GLOBALS:
        return (Chain(GLOBAL, value),)
    if name in _CELLS:
        return scope.look_up(value)
    if name.startswith("LOAD_FAST"):
        # Two at once in Python 3.13: the second is on top, the first is used as it is.
        names = value if isinstance(value, tuple) else (value,)
        return scope.look_up(names[-1])
    return None


@lru_cache(maxsize=10_000)
def _keys_of_writes(code: CodeType) -> frozenset[int]:
    """Return where the key is loaded at which the container below it is written."""
    steps = [s for s in dis.get_instructions(code) if s.opname not in _NOTHING]
    pairs = itertools.pairwise(steps)
    return frozenset(a.offset for a, b in pairs if b.opname in ("STORE_SUBSCR", "DELETE_SUBSCR"))


def _made_function(name: str, value: Any) -> list[CodeType]:
    return [value] if name == "LOAD_CONST" and isinstance(value, CodeType) else []
