"""What a call gives a function: each argument's values by its name, ``*args`` taken apart.

Decorators hand on what they are given by ``*args, **kwargs``. So the values behind a star are known
by position and by name as far as the call tells them, under names of their own::

    def wrapper(self, *args, **kwargs): ...      called as wrapper(m, x, *more, mode=k)

    self              m
    args              x and all of more          whatever is taken from it
    args[0]           x
    args[...]         all of more                what else it holds
    kwargs            k
    kwargs['mode']    k

Invariant: a value that a call gives goes under a name, or is returned as left over. None is lost.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from xla_dtensor.runtimes.premises.chains import ALL

__all__ = ["Arguments", "Given", "Spread", "bound", "spread"]

Given = Mapping[str, Sequence[Any]]  # what each argument may be


@dataclass(frozen=True)
class Arguments:
    """What a call gives.

    Args:
        args: What each positional argument may be.
        kwargs: What each keyword argument may be.
        more: What any further positional argument may be.
        others: What any other keyword argument may be.
    """

    args: Sequence[Sequence[Any]] = ()
    kwargs: Given = field(default_factory=dict)
    more: Sequence[Any] = ()
    others: Sequence[Any] = ()

    def after(self, first: Any) -> Arguments:
        """Return the same behind one more positional argument."""
        return Arguments([[first], *self.args], self.kwargs, self.more, self.others)

    def values(self) -> Iterator[Any]:
        """Yield all that is given."""
        for values in (*self.args, *self.kwargs.values(), self.more, self.others):
            yield from values


def bound(function: types.FunctionType, given: Arguments) -> tuple[dict[str, list[Any]], list[Any]]:
    """Return the values of a function's arguments by name, and those that it does not take.

    Example:
        >>> def wrapper(self, *args, **kwargs): ...
        >>> bound(wrapper, Arguments([["m"], ["x"]], {"mode": ["k"]}, more=["y"]))[0]
        {'self': ['m'], 'args': ['x', 'y'], 'args[0]': ['x'], 'args[...]': ['y'],
        'kwargs': ['k'], "kwargs['mode']": ['k'], 'kwargs[...]': []}
    """
    code = function.__code__
    places, end = code.co_argcount, code.co_argcount + code.co_kwonlyargcount
    found: dict[str, list[Any]] = {}
    for place, name in enumerate(code.co_varnames[:end]):
        if place < min(places, len(given.args)):
            found[name] = [*given.args[place]]
        elif name in given.kwargs and place >= code.co_posonlyargcount:
            found[name] = [*given.kwargs[name]]
        else:
            more = given.more if place < places else ()
            found[name] = [*more, *(given.others if place >= code.co_posonlyargcount else ())]
    named = code.co_varnames[code.co_posonlyargcount : end]
    further = dict(enumerate(given.args[places:]))
    unnamed = {name: each for name, each in given.kwargs.items() if name not in named}
    for flag, held, rest in (
        (inspect.CO_VARARGS, further, given.more),
        (inspect.CO_VARKEYWORDS, unnamed, given.others),
    ):
        if code.co_flags & flag:
            found.update(_behind_star(code.co_varnames[end], held, rest))
            end += 1
    taken = {id(value) for values in found.values() for value in values}
    return found, [value for value in given.values() if id(value) not in taken]


def _behind_star(
    name: str, held: Mapping[Any, Sequence[Any]], rest: Sequence[Any]
) -> Iterator[tuple[str, list[Any]]]:
    yield name, [*(value for each in held.values() for value in each), *rest]
    for key, values in held.items():
        yield f"{name}[{key!r}]", [*values]
    yield name + ALL, [*rest]


@dataclass(frozen=True)
class Spread:
    """What ``*x`` or ``**x`` gives to a call.

    Args:
        places: What it gives by position.
        named: What it gives by name.
        rest: What it gives besides.
        is_all: Whether it gives nothing besides.
    """

    places: Sequence[Sequence[Any]] = ()
    named: Given = field(default_factory=dict)
    rest: Sequence[Any] = ()
    is_all: bool = True


def spread(given: Given, name: str) -> Spread:
    """Return what an argument with a star of a function holds, of which `given` is known."""
    places: list[Sequence[Any]] = []
    while (key := f"{name}[{len(places)}]") in given:
        places.append(given[key])
    start = f"{name}['"
    named = {key[len(start) : -2]: each for key, each in given.items() if key.startswith(start)}
    rest = given.get(name + ALL, ())
    return Spread(places, named, rest, is_all=name in given and not rest)
