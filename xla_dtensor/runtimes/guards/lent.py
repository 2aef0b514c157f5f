"""Python's numbers that change between calls, which a trace takes for inputs.

A number that a step reads is part of its program, until it was seen to change. Then the next trace
is lent another object in its place, which computes as the number does, and notes how::

    self.calls += 1                      call 1    traced with 3, which is part of the program
    scale = min(1.0, self.calls / 10)    call 2    4: traced anew, with a lent 4
    return x * scale                     call 3    5: Python computes 0.5 of it, which the program
                                                   of call 2 is given

====================================  ==============================================================
arithmetic, ``round``, ``math.floor`` another lent number, which each call computes anew, in Python
a comparison, ``if``, ``int(n)``      what it is now: the answer is a guard
a text of it, a pickle                the same
a tensor and a number, ``x * n``      an input of the program
``isinstance(n, int)``                as of the number
a key of a dict, ``type(n) is int``,  the trace is given up, and made again with the number itself
an int of more than 64 bits
====================================  ==============================================================

Invariants:

* What a call computes is what Python computes of the numbers that are there when it begins.
* A result is of the type that it had in the trace; the call is traced anew where it is not.
"""

from __future__ import annotations

import functools
import math
import operator
import types
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence, Set
from typing import Any

import numpy as np
import torch

from xla_dtensor.core.errors import CompileError
from xla_dtensor.runtimes import scalars
from xla_dtensor.runtimes.guards.objects import ClassNames, Object
from xla_dtensor.runtimes.guards.owners import Cell, Names, Owner
from xla_dtensor.runtimes.guards.values import Moving

__all__ = [
    "ARGUMENTS",
    "Arithmetic",
    "Lending",
    "LentFloat",
    "LentInt",
    "is_lent",
    "is_number",
]

ARGUMENTS = "arguments"  # whose names are this and their places

_NUMBERS = (int, float)
_LIMIT = 2**63
_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "lshift", "rshift")
_BITWISE = ("and", "or", "xor")
_COMPARING = ("eq", "ne", "lt", "le", "gt", "ge")
_UNARY: dict[str, Callable[[Any], Any]] = {
    "neg": operator.neg,
    "pos": operator.pos,
    "abs": operator.abs,
    "invert": operator.invert,
    "trunc": math.trunc,
    "floor": math.floor,
    "ceil": math.ceil,
}
_ASKING: dict[str, Callable[..., Any]] = {
    "bool": bool,
    "int": int,
    "index": operator.index,
    "float": float,
    "str": str,
    "repr": repr,
    "format": format,
}


def is_number(value: Any) -> bool:
    """Tell whether a value may be lent: an int of at most 64 bits, or a float.

    Example:
        >>> is_number(3), is_number(0.5), is_number(True), is_number("3")
        (True, True, False, False)
    """
    return type(value) is float or (type(value) is int and -_LIMIT <= value < _LIMIT)


class Arithmetic:
    """What Python computes of lent numbers, in order, and what each came to in the last call.

    Args:
        node: Makes what the program knows a number by, given what returns it.
        ask: Is told what the trace takes for granted: a question, and the answer.

    Attributes:
        is_doubted: Whether the step may have seen that a number is lent.

    Example:
        >>> numbers = Arithmetic()
        >>> calls = Moving(3, fits=is_number)
        >>> half = numbers.lend(calls) / 2
        >>> calls.there = 4
        >>> numbers.compute()
        >>> numbers.now(half)
        2.0
    """

    def __init__(
        self,
        node: Callable[[Callable[[], Any]], Any] = lambda now: now,
        ask: Callable[[Callable[[], Any], Any], None] = lambda question, answer: None,
    ) -> None:
        self._node, self._ask, self.is_doubted = node, ask, False
        self._steps: list[Callable[[], Any]] = []
        self._values: list[Any] = []
        self._known: dict[Hashable, Any] = {}

    def lend(self, moving: Moving) -> Any:
        """Return a number that stands for the one that is read by name."""
        lent = self._number(lambda: moving.there)
        lent.moving = moving
        return lent

    def now(self, number: Any) -> Any:
        """Return what a number, lent or not, is in this call."""
        return self._values[number.place] if is_lent(number) else number

    def apply(self, function: Callable[..., Any], *operands: Any) -> Any:
        """Return what a function of Python's makes of numbers; of a truth value, the answer."""
        key = self._key(function, operands)
        if key not in self._known:
            result = self._step(function, operands)()
            if type(result) is bool:
                return self.answer(function, *operands)
            if not is_number(result):
                self.is_doubted = True
                raise TypeError(f"{function.__name__} gives a {type(result).__name__}")
            self._known[key] = self._number(self._step(function, operands))
        return self._known[key]

    def answer(self, function: Callable[..., Any], *operands: Any) -> Any:
        """Return what a function makes of numbers now, which the trace takes for granted."""
        question = self._step(function, operands)
        key, answer = self._key(function, operands), question()
        if key not in self._known:
            self._known[key] = answer
            self._ask(question, answer)
        return answer

    def compute(self) -> None:
        """Compute all numbers anew.

        Raises:
            Exception: What Python raises where it computes.
            TypeError: One is of another type than it was, or too large for a program.
        """
        for place, step in enumerate(self._steps):
            result = step()
            if type(result) is not type(self._values[place]) or not is_number(result):
                raise TypeError(f"a {type(result).__name__} that a program has no place for")
            self._values[place] = result

    def settle(self) -> None:
        """End the trace: nothing more is asked."""
        self._known = {}

    def _step(self, function: Callable[..., Any], operands: Sequence[Any]) -> Callable[[], Any]:
        values = self._values
        places = [operand.place if is_lent(operand) else None for operand in operands]
        pairs = list(zip(places, operands, strict=True))
        return lambda: function(*(o if place is None else values[place] for place, o in pairs))

    def _key(self, function: Callable[..., Any], operands: Sequence[Any]) -> Hashable:
        # 0.0 and -0.0 are equal, and so are 1 and True.
        parts = ((type(o), o.place if is_lent(o) else repr(o)) for o in operands)
        return function, *parts

    def _number(self, step: Callable[[], Any]) -> Any:
        value, values, place = step(), self._values, len(self._values)
        self._steps.append(step)
        values.append(value)
        kind = LentInt if type(value) is int else LentFloat
        return kind(self._node(lambda: values[place]), self, place)


class _Lent:
    """What lent numbers of both types do."""

    node: Any
    arithmetic: Arithmetic
    place: int
    moving: Moving | None = None  # of one that is lent, and not computed of others

    def __init__(self, node: Any, arithmetic: Arithmetic, place: int) -> None:
        self.node, self.arithmetic, self.place = node, arithmetic, place

    def __hash__(self) -> int:
        self.arithmetic.is_doubted = True  # Somebody may catch it.
        raise TypeError("a number that is lent to a trace has no hash")

    def __divmod__(self, operand: Any) -> Any:
        return self // operand, self % operand  # pyright: ignore[reportOperatorIssue]

    def __rdivmod__(self, operand: Any) -> Any:
        return operand // self, operand % self

    def __round__(self, ndigits: Any = None) -> Any:
        return self.arithmetic.apply(round, self, ndigits)

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return np.asarray(self.arithmetic.answer(_itself, self), dtype)

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: Any) -> Any:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        return type(self).kind, (self.arithmetic.answer(_itself, self),)  # pyright: ignore


def _itself(number: Any) -> Any:
    return number


def _with_operators(kind: Any) -> Any:
    """Give a class Python's operators for numbers, with numbers and with what item() gives."""

    def define(name: str, function: Callable[..., Any], *, is_swapped: bool = False) -> None:
        def method(self: Any, operand: Any) -> Any:
            operands = (operand, self) if is_swapped else (self, operand)
            if is_lent(operand) or type(operand) in (*_NUMBERS, bool):
                return self.arithmetic.apply(function, *operands)
            if isinstance(operand, torch.SymFloat | torch.SymInt):
                return function(*map(_of_program, operands))
            return NotImplemented

        setattr(kind, name, method)

    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        setattr(kind, name, getattr(kind.kind, name))
    for name in (*_BINARY, *_BITWISE):
        function = getattr(operator, f"__{name}__")
        define(f"__{name}__", function)
        define(f"__r{name}__", function, is_swapped=True)
    for name in _COMPARING:
        define(f"__{name}__", getattr(operator, name))
    for name, function in _UNARY.items():
        setattr(kind, f"__{name}__", lambda self, f=function: self.arithmetic.apply(f, self))
    for name in (name for name in dir(kind) if name.startswith("__sym_")):  # torch.sym_max
        setattr(kind, name, lambda self, *o, n=name: getattr(_of_program(self), n)(*o))
    for name in (name for name in dir(kind.kind) if not name.startswith("_")):
        get = operator.attrgetter(name)
        setattr(kind, name, property(lambda self, g=get: g(self.arithmetic.answer(_itself, self))))
    for name, function in _ASKING.items():
        setattr(
            kind, f"__{name}__", lambda self, *o, f=function: self.arithmetic.answer(f, self, *o)
        )
    return kind


def _of_program(number: Any) -> Any:
    """Return a traced number as one of torch's own classes."""
    if not is_lent(number):
        return number
    kind: Any = torch.SymInt if type(number) is LentInt else torch.SymFloat
    return kind(number.node)


@_with_operators
class LentInt(_Lent, torch.SymInt):
    """An int that is lent."""

    kind = int
    __class__ = property(lambda self: int)  # pyright: ignore


@_with_operators
class LentFloat(_Lent, torch.SymFloat):
    """A float that is lent."""

    kind = float
    __class__ = property(lambda self: float)  # pyright: ignore


del LentFloat.__index__


def is_lent(value: Any) -> bool:
    """Tell whether a value is a lent number."""
    return type(value) is LentInt or type(value) is LentFloat


_OF_MATH = {n: v for n, v in vars(math).items() if isinstance(v, types.BuiltinFunctionType)}


def _taking_lent(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def apply(*numbers: Any, **options: Any) -> Any:
        lent = next((number for number in numbers if is_lent(number)), None)
        if lent is None or options:
            return function(*numbers, **options)
        return lent.arithmetic.apply(function, *numbers)

    return apply


_OF_LENT = {name: _taking_lent(function) for name, function in _OF_MATH.items()}


def _set_math(functions: Mapping[str, Callable[..., Any]]) -> None:
    names: Any = vars(math)
    names.update(functions)


_WRITABLE = (Names, Object, ClassNames, Cell)


def counters_of(owner: Owner) -> Iterator[Any]:
    """Yield the names of the numbers that a step has read of an owner, and changed."""
    for key in owner.reads if isinstance(owner, _WRITABLE) else ():
        before, now = owner.snapshot.get(key), owner.look_up(key)
        is_other = is_number(now) and (type(now) is not type(before) or now != before)
        if is_number(before) and (is_other or isinstance(now, torch.SymInt | torch.SymFloat)):
            yield owner.name(key)


class Lending:
    """The numbers that one trace is lent; Python's ``math`` computes with them meanwhile.

    Args:
        names: The names that were seen to change.
        arithmetic: Computes what becomes of them.
    """

    def __init__(self, names: Set[Any] = frozenset(), arithmetic: Arithmetic | None = None) -> None:
        self.names = frozenset(names)
        self.arithmetic = Arithmetic() if arithmetic is None else arithmetic
        self._keys = {name[1] for name in names if isinstance(name, tuple) and len(name) == 2}
        self._is_used = False
        self._entries: list[tuple[Owner, Any, Any]] = []
        self._arguments: list[tuple[int, Moving]] = []

    def __bool__(self) -> bool:
        """Whether any was lent."""
        return self._is_used

    def meet(self, owner: Owner) -> None:
        """Lend what an owner holds, which was copied just now."""
        for key in self._keys.intersection(owner.snapshot):
            value = owner.snapshot[key]
            if owner.name(key) not in self.names or not isinstance(owner, _WRITABLE):
                continue
            if is_lent(value) and value.moving is not None:  # by another owner of the same
                self._take(owner, key, value)
            elif is_number(value):
                lent = self._lent(value)
                owner.put(key, lent)
                self._take(owner, key, lent)

    def argument(self, place: int, value: Any) -> Any:
        """Return what the step is given for one of its arguments: a lent number, if that is lent.

        Args:
            place: Of the argument.
            value: The argument.
        """
        if not is_number(value) or (ARGUMENTS, place) not in self.names:
            return value
        lent = self._lent(value)
        self._arguments.append((place, lent.moving))
        return lent

    def give(self, arguments: Sequence[Any]) -> None:
        """Say what the arguments are that are lent, before a call looks whether the program fits.

        Args:
            arguments: All, of the types that those of the trace had.
        """
        for place, moving in self._arguments:
            moving.there = arguments[place]

    def lends(self, owner: Owner, key: Any) -> bool:
        """Tell whether a number of an owner's is lent."""
        return any(entry[0] is owner and entry[1] == key for entry in self._entries)

    def take_back(self, is_new: Callable[[Owner], bool]) -> None:
        """Put the numbers where they were, but where the step has put others.

        Args:
            is_new: Tells whether an owner came to be while the step ran, at an older one's address.
        """
        scalars.in_use = False
        _set_math(_OF_MATH)
        for owner, key, lent in self._entries:
            if owner.look_up(key) is lent and not is_new(owner):
                owner.put(key, lent.moving.there)

    def check(self) -> None:
        """Raise where the step may have seen that numbers are lent.

        Raises:
            CompileError: It may.
        """
        if self and self.arithmetic.is_doubted:
            raise CompileError("What the step does may tell a lent number from others.")

    def let_move(self) -> None:
        """Let other numbers be where these were."""
        for owner, key, lent in self._entries:
            owner.snapshot = {**owner.snapshot, key: lent.moving}

    def settle(self) -> None:
        """End the trace."""
        self._entries = []
        self.arithmetic.settle()

    def _lent(self, number: Any) -> Any:
        moving = Moving(number, functools.partial(_is_of, type(number)))
        self._is_used = scalars.in_use = True
        _set_math(_OF_LENT)
        return self.arithmetic.lend(moving)

    def _take(self, owner: Owner, key: Any, lent: Any) -> None:
        owner.snapshot[key] = lent.moving.there
        self._entries.append((owner, key, lent))


def _is_of(kind: type, value: Any) -> bool:
    return type(value) is kind
