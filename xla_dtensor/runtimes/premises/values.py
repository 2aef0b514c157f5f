"""When one Python value may stand where a trace found another, and how errors name values.

A program was traced with what Python held then. On a later call a name may refer to another object;
whether the program still holds depends on what the object is:

=======================================  ===========================================================
a number, a text, a dtype, None, ...     equal, and of one type (1 and True are two things)
a tuple of such values                   value by value
a function                               the same code over values that may stand for each other
a tensor                                 the same one, if the program reads it; any other one of its
                                         kind, if the step only replaces it
a module, a class, an optimizer          the same one
a list, a dict, what is looked into      of the same type, with what may stand for each other in it
anything else                            of the same type and equal, if it says what is equal to it
=======================================  ===========================================================
"""

from __future__ import annotations

import enum
import functools
import operator
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

__all__ = ["ABSENT", "Change", "Judge", "Moving", "Sighting", "TensorLike", "described", "is_plain"]


class Change(NamedTuple):
    """What is no longer as a trace found it.

    Attributes:
        why: A text for users.
        for_good: It will not come back: a tensor was replaced.
        name: Where one tensor took the place of another, what tells this name from others.
    """

    why: str
    for_good: bool = False
    name: Any = None

    @classmethod
    def of(cls, called: str, found: Any, now: Any, name: Any = None) -> Change:
        """Describe a value that took the place of another one.

        Args:
            called: What errors call its name.
            found: The value that the trace found.
            now: The other one.
            name: What tells the name from others.
        """
        for_good = all(map(_is_object, (found, now)))
        both = isinstance(found, torch.Tensor | Moving) and isinstance(now, torch.Tensor)
        why = f"{called} changed from {described(found)} to {described(now)}"
        return cls(why, for_good, name if both else None)


class Sighting(NamedTuple):
    """What was found under a name, and what is there now.

    Attributes:
        name: What tells the name from others.
        found: The value before a trace.
        now: The value after it.
    """

    name: Any
    found: Any
    now: Any


class _Absent:
    def __repr__(self) -> str:
        return "nothing"


ABSENT: Any = _Absent()

_PLAIN = frozenset(
    {
        int,
        float,
        bool,
        complex,
        str,
        bytes,
        type(None),
        type(Ellipsis),
        range,
        slice,
        torch.dtype,
        torch.device,
        torch.layout,
        torch.memory_format,
        torch.Size,
    }
)
_NUMBERS = (enum.Enum, np.generic)
_BY_IDENTITY = (
    torch.optim.Optimizer,
    torch.Generator,
    type,
    types.ModuleType,
    types.BuiltinFunctionType,
    torch.nn.Module,
    torch.Tensor,
)
# Whose text says all that they do.
_SHOWN = (operator.itemgetter, operator.attrgetter, operator.methodcaller)
_LONGEST_TEXT = 60
_DEPTH = 6


def is_plain(value: Any) -> bool:
    """Tell whether a value is what it says: two equal ones are the same to any code.

    Example:
        >>> is_plain(0.5), is_plain(torch.float32), is_plain((1, "a")), is_plain([1])
        (True, True, True, False)
    """
    kind = type(value)
    if kind in _PLAIN or isinstance(value, _NUMBERS):
        return True
    return kind in (tuple, frozenset) and all(map(is_plain, value))


def described(value: Any) -> str:
    """Return a value as an error names it, on one line."""
    if isinstance(value, Moving):
        return described(value.tensor)
    if isinstance(value, torch.Tensor | TensorLike):
        return f"a tensor of shape={tuple(value.shape)}"
    if isinstance(value, type | types.FunctionType | types.MethodType):
        return value.__qualname__
    text = repr(value) if is_plain(value) or value is ABSENT else f"a {type(value).__name__}"
    return text if len(text) <= _LONGEST_TEXT else f"{text[: _LONGEST_TEXT - 3]}..."


@dataclass(frozen=True)
class TensorLike:
    """What is kept of a tensor that a program does not read: what any other one must be like."""

    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorLike:
        """Describe a tensor."""
        return cls(tensor.shape, tensor.dtype, tensor.requires_grad)


def _is_object(value: Any) -> bool:
    """Tell whether this is a thing of its own: one that was replaced does not come back."""
    is_function = isinstance(value, types.FunctionType | types.MethodType | type)
    return not (is_plain(value) or is_function or value is ABSENT)


@dataclass
class Moving:
    """A tensor that a program reads by name.

    Args:
        tensor: The one that is there.
        fits: Tells whether another one may be there.
    """

    tensor: torch.Tensor
    fits: Callable[[Any], bool]

    def takes(self, now: Any) -> bool:
        """Take what is there now, if it fits; return whether it does."""
        if now is not self.tensor and not self.fits(now):
            return False
        self.tensor = now
        return True


class Judge:
    """Tells whether a value may stand where a trace found another one.

    Args:
        reads: Tells whether the program reads a tensor.
        holds_the_same: Compares what two objects hold, where that was noted of the first; None
            where it was not.
    """

    def __init__(
        self,
        reads: Callable[[torch.Tensor], bool],
        holds_the_same: Callable[[Judge, Any, Any], bool | None] = lambda judge, found, now: None,
    ) -> None:
        self._reads, self._holds_the_same = reads, holds_the_same

    def forget(self, value: Any, depth: int = _DEPTH) -> Any:
        """Return what has to be kept of a value: tensors that the program does not read go."""
        if isinstance(value, torch.Tensor) and not self._reads(value):
            return TensorLike.of(value)
        if type(value) is tuple and depth and not is_plain(value):
            return tuple(self.forget(each, depth - 1) for each in value)
        return value

    def now_expected(self, found: Any, now: Any) -> Any:
        """Return what a later call has to find where `now` was accepted in place of `found`."""
        keeps = isinstance(found, TensorLike | Moving) or type(found) is tuple
        return found if keeps else now

    def accepts(self, found: Any, now: Any, depth: int = _DEPTH) -> bool:
        """Tell whether `now` may stand where the trace found `found`."""
        if found is now:
            return True
        if isinstance(found, Moving):
            return found.takes(now)
        if isinstance(found, TensorLike):
            return isinstance(now, torch.Tensor) and found == TensorLike.of(now)
        if type(found) is not type(now) or depth == 0:
            return False
        if isinstance(found, tuple) and type(found) is not torch.Size:
            pairs = zip(found, now, strict=False)
            return len(found) == len(now) and all(self.accepts(a, b, depth - 1) for a, b in pairs)
        if is_plain(found):
            return _equal(found, now)
        if isinstance(found, types.FunctionType):
            same = found.__code__ is now.__code__
            return same and self.accepts(_around(found), _around(now), depth - 1)
        if isinstance(found, types.MethodType):
            same = found.__func__ is now.__func__
            return same and self.accepts(found.__self__, now.__self__, depth - 1)
        if isinstance(found, functools.partial):
            return self.accepts(_parts(found), _parts(now), depth - 1)
        if isinstance(found, _BY_IDENTITY):
            return False
        same = self._holds_the_same(self, found, now)
        return _equal_objects(found, now) if same is None else same


def _equal_objects(found: Any, now: Any) -> bool:
    """Compare two objects of one type that nobody has looked into."""
    if isinstance(found, _SHOWN):
        return repr(found) == repr(now)
    if type(found).__eq__ is object.__eq__:
        return True
    try:
        return bool(found == now)
    except Exception:  # An equality of the user's own may raise anything.
        return False


def _around(function: types.FunctionType) -> tuple[Any, ...]:
    """Return what a function has besides its code: defaults, and the variables around it."""
    cells = []
    for cell in function.__closure__ or ():
        try:
            cells.append(cell.cell_contents)
        except ValueError:
            cells.append(ABSENT)
    named = tuple(sorted((function.__kwdefaults__ or {}).items()))
    return function.__defaults__ or (), named, tuple(cells)


def _parts(partial: functools.partial[Any]) -> tuple[Any, ...]:
    return partial.func, partial.args, tuple(sorted(partial.keywords.items()))


def _equal(a: Any, b: Any) -> bool:
    # 0.0 equals -0.0 and computes otherwise; NaN equals nothing.
    inexact = isinstance(a, float | complex | np.inexact)
    return repr(a) == repr(b) if inexact else bool(a == b)
