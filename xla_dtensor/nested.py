"""Map over the arguments of an op: tensors in tuples, lists and dicts, nothing else.

Every op of every DTensor passes through here several times, and torch's general pytrees cost ten
microseconds a time where these few lines cost half of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["leaves", "map_nested"]


def map_nested(function: Callable[[Any], Any], value: Any) -> Any:
    """Return `value` with `function` applied to everything that is no tuple, list or dict.

    Args:
        function: Called once per leaf.
        value: Arguments of an op. Subclasses, such as torch.Size, are leaves.

    Returns:
        The same structure.

    Example:
        >>> map_nested(lambda v: v + 1, (1, [2, 3], {"a": 4}))
        (2, [3, 4], {'a': 5})
    """
    kind = type(value)
    if kind is tuple:
        return tuple([map_nested(function, v) for v in value])
    if kind is list:
        return [map_nested(function, v) for v in value]
    if kind is dict:
        return {k: map_nested(function, v) for k, v in value.items()}
    return function(value)


def leaves(value: Any) -> Iterator[Any]:
    """Yield everything in `value` that is no tuple, list or dict.

    Example:
        >>> list(leaves((1, [2, {"a": 3}])))
        [1, 2, 3]
    """
    kind = type(value)
    if kind is tuple or kind is list:
        for v in value:
            yield from leaves(v)
    elif kind is dict:
        for v in value.values():
            yield from leaves(v)
    else:
        yield value
