"""Numbers of Python among an op's arguments, where a trace is lent them (``guards.lent``).

A lent number stays one where an op takes a scalar: there it is an input of the program. Where an op
takes a size, a dim or an index, the op is given what the number is now, which the trace takes for
granted. So it is with a scalar that a tensor's dtype has no place for (300 beside uint8): torch
raises, or does otherwise than with others. That one has a place is taken for granted, too. An op on
plain CPU tensors is done anew for each call, with what the number is then.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any

import torch

from xla_dtensor.runtimes.nested import leaves, map_nested

__all__ = ["as_now", "in_use", "settled", "stand_in", "stands_for"]

in_use = False  # whether a trace at hand is lent any: ops ask it
_NARROW = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.float16)
_POWERS = (torch.ops.aten.pow, torch.ops.aten.pow_)
_SCALAR = re.compile("number|Tensor")  # which may be a number, too


@functools.cache
def _scalars_of(func: Any) -> tuple[frozenset[int], frozenset[str]]:
    """Return the places and names of arguments that take a scalar; others take a size, a dim."""
    arguments = [
        (place, argument.name)
        for place, argument in enumerate(func._schema.arguments)
        if _SCALAR.search(str(argument.type))
    ]
    return frozenset(place for place, _ in arguments), frozenset(name for _, name in arguments)


def settled(func: Any, args: Sequence[Any], kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return an op's arguments with what lent numbers are now, where they are no scalars.

    Args:
        func: The op.
        args: Its arguments.
        kwargs: Its keyword arguments.
    """
    places, names = _scalars_of(func)
    if not any(map(stands_for, leaves((args, kwargs)))):
        return tuple(args), kwargs
    limits = _limits(func, [*leaves(args), *kwargs.values()])

    def fitting(value: Any) -> Any:
        has_place = limits is None or not stands_for(value) or value.node.lies_within(*limits)
        return value if has_place else _now(value)

    def settle(is_scalar: bool, value: Any) -> Any:
        return map_nested(fitting if is_scalar else _now, value)

    return (
        tuple(settle(place in places, value) for place, value in enumerate(args)),
        {name: settle(name in names, value) for name, value in kwargs.items()},
    )


def _limits(func: Any, arguments: Sequence[Any]) -> tuple[int, int] | None:
    """Return the smallest and largest number that an op has a place for; None: all of 64 bits."""
    dtypes = {value.dtype for value in arguments if isinstance(value, torch.Tensor)}
    dtypes |= {value for value in arguments if isinstance(value, torch.dtype)}
    ranges = [_range(dtype) for dtype in dtypes if dtype in _NARROW]
    is_whole = all(not dtype.is_floating_point and not dtype.is_complex for dtype in dtypes)
    if is_whole and func.overloadpacket in _POWERS:  # whole numbers have no negative powers
        ranges.append((0, 2**63 - 1))
    lows, highs = zip(*ranges, strict=True) if ranges else ((), ())
    return (max(lows), min(highs)) if ranges else None


def _range(dtype: torch.dtype) -> tuple[int, int]:
    info: Any = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    return int(info.min), int(info.max)


def _now(value: Any) -> Any:
    if not stands_for(value):
        return value
    return int(value) if isinstance(value, torch.SymInt) else float(value)


def stands_for(value: Any) -> bool:
    """Tell whether an op's argument is a lent number: what went through C++ is torch's own."""
    is_traced = isinstance(value, torch.SymInt | torch.SymFloat)
    return is_traced and getattr(value.node, "is_lent", False)


def stand_in(value: Any) -> Any:
    """Return a number of its type for one that no shape and no placement depends on."""
    if isinstance(value, torch.SymFloat):
        return 0.5
    return 2 if stands_for(value) else value


def as_now(value: Any) -> Any:
    """Return what a lent number is in this call, of which nothing is taken for granted."""
    return value.node.current() if stands_for(value) else value
