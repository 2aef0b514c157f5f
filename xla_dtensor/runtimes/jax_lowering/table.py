"""The table of our own lowerings, and the decorator that fills it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["TABLE", "Lowering", "lower"]


@dataclass(frozen=True)
class Lowering:
    """A function on arrays; with `wants_meta` it is also given torch's answer as ``meta=``."""

    function: Callable[..., Any]
    wants_meta: bool = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


TABLE: dict[Any, Lowering] = {}


def lower(
    *ops: Any, wants_meta: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as the lowering of each of `ops`."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        TABLE.update(dict.fromkeys(ops, Lowering(function, wants_meta)))
        return function

    return register
