"""Iterators that are older than a call, from which a step must not take.

What the trace takes from a data loader's iterator, say, would be what every call uses. An iterator
cannot be put back, so a step that reads one is refused before it can take from it. Where one tells
how far it has come, it is looked at after the trace instead, as nothing may have been taken.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator
from typing import Any

from xla_dtensor.core.errors import CompileError

__all__ = ["Iterators"]


class Iterators:
    """Where iterators were when a step met them."""

    def __init__(self) -> None:
        self._before: list[tuple[Iterator[Any], int | str]] = []

    def note(self, iterator: Iterator[Any]) -> None:
        """Note where an iterator is.

        Raises:
            CompileError: It does not tell.
        """
        place = _place(iterator)
        if place is None:
            raise _refusal(iterator)
        self._before.append((iterator, place))

    def refuse_moves(self) -> None:
        """Raise if an iterator has moved."""
        for iterator, place in self._before:
            if _place(iterator) != place:
                raise _refusal(iterator)


def _place(iterator: Iterator[Any]) -> int | str | None:
    """Return what changes where an iterator moves; None if there is nothing that tells."""
    if isinstance(iterator, itertools.count):
        return repr(iterator)  # with the next number
    yielded = getattr(iterator, "_num_yielded", None)  # of a DataLoader
    if isinstance(yielded, int):
        return yielded
    length = operator.length_hint(iterator, -1)
    return None if length < 0 else length


def _refusal(iterator: Iterator[Any]) -> CompileError:
    return CompileError(
        "The step takes elements from an iterator that was made before the call, a "
        f"{type(iterator).__name__}. Python runs once, so each call would use what the first one "
        "took. Take from it outside of the step, `for batch in batches: step(batch)`, or pass a "
        "list of what one call uses."
    )
