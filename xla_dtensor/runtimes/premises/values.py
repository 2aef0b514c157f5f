"""When one Python value may stand where a trace found another, and how errors name values.

A program was traced with what Python held then. On a later call a name may refer to another object;
whether the program still holds depends on what the object is:

=======================================  ===========================================================
a number, a text, a dtype, None, ...     equal, and of one type (1 and True are two things)
a tuple of such values                   value by value
a function                               the same code over values that may stand for each other
a tensor                                 the same one, if the program reads it; any other one of its
                                         kind, if the step only replaces it
a module, a class, what is looked into   the same one
anything else                            of the same type: nobody looked inside, nor does the step
=======================================  ===========================================================
"""

from __future__ import annotations

import enum
import functools
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

__all__ = ["ABSENT", "Change", "Judge", "TensorLike", "described", "is_plain"]


class Change(NamedTuple):
    """What is no longer as a trace found it.

    Attributes:
        why: A text for users.
        for_good: It will not come back: a tensor was replaced.
    """

    why: str
    for_good: bool = False

    @classmethod
    def of(cls, name: str, found: Any, now: Any) -> Change:
        """Describe a value that took the place of another one."""
        for_good = any(isinstance(value, _PASSING) for value in (found, now))
        return cls(f"{name} changed from {described(found)} to {described(now)}", for_good)


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
    type,
    types.ModuleType,
    types.BuiltinFunctionType,
    torch.nn.Module,
    torch.Tensor,
)
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


_PASSING = (torch.Tensor, TensorLike, torch.nn.Module)


class Judge:
    """Tells whether a value may stand where a trace found another one.

    Args:
        reads: Tells whether the program reads a tensor.
        looks_into: Tells whether what an object holds was noted as well.
    """

    def __init__(
        self, reads: Callable[[torch.Tensor], bool], looks_into: Callable[[Any], bool]
    ) -> None:
        self._reads, self._looks_into = reads, looks_into

    def forget(self, value: Any, depth: int = _DEPTH) -> Any:
        """Return what has to be kept of a value: tensors that the program does not read go."""
        if isinstance(value, torch.Tensor) and not self._reads(value):
            return TensorLike.of(value)
        if type(value) is tuple and depth and not is_plain(value):
            return tuple(self.forget(each, depth - 1) for each in value)
        return value

    def accepts(self, found: Any, now: Any, depth: int = _DEPTH) -> bool:
        """Tell whether `now` may stand where the trace found `found`."""
        if found is now:
            return True
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
        return not self._looks_into(found)


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
