"""Iterators that are older than a call, from which a step must not take.

What the trace takes from a data loader's iterator, say, would be what every call uses. An iterator
cannot be put back, so it is refused before the trace: as soon as the step's code takes from one.
Where an iterator tells how far it has come, it is looked at after the trace instead, as the code
that takes from it may not have run.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Sequence
from typing import Any

from xla_dtensor.core.errors import CompileError

__all__ = ["Iterators"]


class Iterators:
    """Where iterators are before a trace.

    Args:
        iterators: Those that the step's code takes from.

    Raises:
        CompileError: One of them does not tell where it is.
    """

    def __init__(self, iterators: Sequence[Iterator[Any]]) -> None:
        self._iterators = iterators
        self._before = [_place(each) for each in iterators]
        for each, place in zip(iterators, self._before, strict=True):
            if place is None:
                raise _refusal(each)

    def refuse_moves(self) -> None:
        """Raise if an iterator has moved."""
        for each, place in zip(self._iterators, self._before, strict=True):
            if _place(each) != place:
                raise _refusal(each)


def _place(iterator: Iterator[Any]) -> int | str | None:
    """Return what changes where an iterator moves; None if there is nothing that tells."""
    if isinstance(iterator, itertools.count):
        return repr(iterator)  # with the next number
    yielded = getattr(iterator, "_num_yielded", None)  # of a DataLoader
    if isinstance(yielded, int):
        return yielded
    left = operator.length_hint(iterator, -1)
    return None if left < 0 else left


def _refusal(iterator: Iterator[Any]) -> CompileError:
    return CompileError(
        "The step takes elements from an iterator that was made before the call, a "
        f"{type(iterator).__name__}. Python runs once, so each call would use what the first one "
        "took. Take from it outside of the step, `for batch in batches: step(batch)`, or pass a "
        "list of what one call uses."
    )
