"""Numbers of Python among an op's arguments, where a trace is lent them (``guards.lent``).

A lent number stays one where an op takes a scalar: there it is an input of the program. Where an op
takes a size, a dim or an index, the op is given what the number is now, which the trace takes for
granted. An op on plain CPU tensors is done anew for each call, with what the number is then.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any

import torch

from xla_dtensor.runtimes.nested import map_nested

__all__ = ["as_now", "in_use", "settled", "stand_in", "stands_for"]

in_use = False  # whether a trace at hand is lent any: ops ask it
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
    return (
        tuple(v if place in places else map_nested(_now, v) for place, v in enumerate(args)),
        {name: v if name in names else map_nested(_now, v) for name, v in kwargs.items()},
    )


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
