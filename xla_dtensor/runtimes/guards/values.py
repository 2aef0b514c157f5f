"""Values of Python as guards know them, and how errors name them."""

from __future__ import annotations

import enum
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

__all__ = [
    "ABSENT",
    "Change",
    "Moving",
    "Sighting",
    "TensorLike",
    "described",
    "is_equal",
    "is_plain",
]


class Change(NamedTuple):
    """What is no longer as a trace found it.

    Attributes:
        why: A text for users.
        for_good: It will not come back: a tensor was replaced.
        name: Where a tensor, a number, a container or an object took the place of one of its kind,
            what tells this name from others.
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
        tensors = isinstance(found, torch.Tensor | Moving) and isinstance(now, torch.Tensor)
        containers = isinstance(found, tuple | list | dict) and type(found) is type(now)
        # Of what is read by name, and of containers, one that fits may be there again.
        objects = all(map(_is_object, (found, now)))
        for_good = objects and not containers and not isinstance(found, Moving)
        was, is_now = described(found), described(now)
        why = f"{called} changed from {was} to {is_now if is_now != was else 'another one'}"
        alike = type(found) is type(now) and (objects or type(now) in (int, float))
        return cls(why, for_good, name if tensors or containers or alike else None)


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
        *(Replicate, Shard, _StridedShard, Partial),
    }
)
_NUMBERS = (enum.Enum, np.generic)
_LONGEST_TEXT = 60


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
        return described(value.there)
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
    """A tensor, or a number, that a program reads by name.

    Args:
        there: The one that is there.
        fits: Tells whether another one may be there.
    """

    there: Any
    fits: Callable[[Any], bool]

    def takes(self, now: Any) -> bool:
        """Take what is there now, if it fits; return whether it does."""
        if now is not self.there and not self.fits(now):
            return False
        self.there = now
        return True


def is_equal(a: Any, b: Any) -> bool:
    """Tell whether two plain values are the same to any code: 1 and 1.0 are two, in a tuple too."""
    return _exact(a) == _exact(b)


def _exact(value: Any) -> Any:
    """Return what is equal for plain values only that are the same."""
    kind = type(value)
    if kind is tuple:
        return tuple(map(_exact, value))
    if kind is frozenset:
        return frozenset(map(_exact, value))
    # 0.0 equals -0.0 and computes otherwise; NaN equals nothing.
    return kind, repr(value) if isinstance(value, float | complex | np.inexact) else value
