"""What Python held when a step was traced: tables of names and values, compared on every call.

A table is one object that holds values by name: the globals of a module, a variable of a function,
an object's attributes, a dict, a list. Of each it is noted which values the step found there.
Comparing is one pass over the tables; a value that is the very same object costs next to nothing,
what else there is goes to a :class:`~xla_dtensor.runtimes.premises.values.Judge`.

Invariant: a table that compares equal leads to the values that the trace saw, by the names by which
it saw them. Where another object was accepted in the place of one, its tables are that one's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import is_
from types import CellType, MethodType
from typing import Any, NamedTuple

import numpy as np
import torch

from xla_dtensor.runtimes.premises.values import (
    ABSENT,
    Change,
    Judge,
    Sighting,
    is_plain,
)

__all__ = [
    "Array",
    "Attributes",
    "Cell",
    "Contents",
    "Elements",
    "Names",
    "Table",
    "Variable",
    "Whole",
]


class Table:
    """Values by name, as they were found.

    Args:
        holder: What holds the values.
        named: Names a value for errors, given its key.
    """

    def __init__(self, holder: Any, named: Callable[[Any], str]) -> None:
        self.holder = holder
        self._named = named
        self.keys: list[Any] = []
        self.found: list[Any] = []

    def now(self, holder: Any) -> list[Any]:
        """Return the values that a holder has."""
        raise NotImplementedError

    def add(self, key: Any, value: Any) -> None:
        """Note one more value."""
        if key not in self.keys:
            self.keys.append(key)
            self.found.append(value)

    def changed(self, judge: Judge, holder: Any = None) -> Change | None:
        """Return what is no longer as it was found; None if the program still holds.

        Args:
            judge: Tells whether other values may stand in the place of those that were found.
            holder: What took the place of the table's holder; None for nothing.
        """
        now = self.now(self.holder if holder is None else holder)
        if len(now) == len(self.found) and all(map(is_, now, self.found)):
            return None
        return self._difference(now, judge)

    def _difference(self, now: list[Any], judge: Judge) -> Change | None:
        for place, (key, value) in enumerate(zip(self.keys, now, strict=True)):
            found = self.found[place]
            if not judge.accepts(found, value):
                return Change.of(self._named(key), found, value, (id(self.holder), key))
            self.found[place] = judge.now_expected(found, value)
        return None

    def sightings(self) -> Iterable[Sighting]:
        """Return what was found and what there is now, of each value."""
        now = self.now(self.holder)
        if len(now) != len(self.found):
            return []
        names = ((id(self.holder), key) for key in self.keys)
        return [Sighting(*each) for each in zip(names, self.found, now, strict=True)]

    def tensors(self) -> Sequence[torch.Tensor]:
        """Return the tensors that were found."""
        return [value for value in self.found if isinstance(value, torch.Tensor)]

    def settle(self, forget: Callable[[Any], Any]) -> None:
        """Keep of each value what `forget` returns of it."""
        self.found = [forget(value) for value in self.found]


class Names(Table):
    """Some of the names in a dict: a module's globals, an object's attributes."""

    def now(self, holder: Any) -> list[Any]:
        """Return the values that there are now."""
        return [holder.get(key, ABSENT) for key in self.keys]


class Attributes(Table):
    """Attributes that no dict holds: slots, or what ``__getattr__`` makes."""

    def now(self, holder: Any) -> list[Any]:
        """Return the values that there are now."""
        return [_attribute(holder, key) for key in self.keys]

    def read(self, name: str) -> Any:
        """Look an attribute up, and note it, unless it is made anew for each who asks."""
        value = _attribute(self.holder, name)
        if not is_plain(value) and not _is_same(_attribute(self.holder, name), value):
            return ABSENT
        self.add(name, value)
        return value


class Cell(Table):
    """A variable of the function around a step."""

    def now(self, holder: CellType) -> list[Any]:
        """Return the value that there is now."""
        try:
            return [holder.cell_contents]
        except ValueError:  # deleted, or not assigned yet
            return [ABSENT]


class Variable(Table):
    """What a context variable is set to."""

    def now(self, holder: Any) -> list[Any]:
        """Return the value that there is now."""
        return [holder.get(ABSENT)] if self.keys else []

    def read(self) -> Any:
        """Look it up, and note it."""
        self.add(None, self.holder.get(ABSENT))
        return self.found[0]


class Whole(Table):
    """All that a dict holds."""

    def __init__(self, holder: dict[Any, Any], named: Callable[[Any], str]) -> None:
        super().__init__(holder, named)
        self.keys, self.found = list(holder), list(holder.values())

    def now(self, holder: dict[Any, Any]) -> list[Any]:
        """Return the values that there are now."""
        return list(holder.values())

    def changed(self, judge: Judge, holder: Any = None) -> Change | None:
        """Compare the keys as well."""
        holder = self.holder if holder is None else holder
        # By identity, for keys may be tensors, whose equality is a tensor.
        if len(holder) == len(self.keys) and all(map(is_, holder, self.keys)):
            return super().changed(judge, holder)
        known = dict.fromkeys(self.keys)
        for key in holder:
            if key not in known:
                return Change(f"{self._named(key)} is new")
        for key in self.keys:
            if key not in holder:
                return Change(f"{self._named(key)} is gone")
        if any(not (a is b or a == b) for a, b in zip(holder, self.keys, strict=True)):
            return Change(f"the order of {self._named(self.keys[0])} changed")
        return self._difference([holder[key] for key in self.keys], judge)


class Contents(Table):
    """All that a list, a tuple or a set holds."""

    def __init__(self, holder: Any, named: Callable[[Any], str], found: Any = None) -> None:
        super().__init__(holder, named)
        self.found = list(holder) if found is None else found
        self.keys = list(range(len(self.found)))

    def now(self, holder: Any) -> list[Any]:
        """Return the values that there are now."""
        return list(holder)

    def _difference(self, now: list[Any], judge: Judge) -> Change | None:
        if len(now) != len(self.found):
            what = f"{len(now)} elements and had {len(self.found)}"
            return Change(f"{self._named(None)} has {what}")
        return super()._difference(now, judge)


class Elements(NamedTuple):
    """What a NumPy array holds, rather than the array."""

    array: np.ndarray[Any, Any]


class Array(Table):
    """The elements of a NumPy array, which can be written to in place."""

    def __init__(self, holder: np.ndarray[Any, Any], named: Callable[[Any], str]) -> None:
        super().__init__(holder, named)
        self._copy: np.ndarray[Any, Any] | None = holder.copy()

    def changed(self, judge: Judge, holder: Any = None) -> Change | None:
        """Return that an element is no longer as it was found."""
        now, copy = self.holder if holder is None else holder, self._copy
        if copy is None and holder is None:
            return None
        if copy is not None and _same_elements(now, copy):
            return None
        return Change(f"the elements of {self._named(None)} changed")

    def now(self, holder: Any) -> list[Any]:
        """Return nothing: elements are no values that could be looked into."""
        return []

    def settle(self, forget: Callable[[Any], Any]) -> None:
        """Compare no longer, where `forget` gives nothing: the program reads the elements anew.

        What the step itself has written to is not written to by the program, and breaks next time.
        """
        is_unread = forget(Elements(self.holder)) is ABSENT
        if is_unread and self._copy is not None and _same_elements(self.holder, self._copy):
            self._copy = None


def _same_elements(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


def _is_same(a: Any, b: Any) -> bool:
    if isinstance(a, MethodType) and isinstance(b, MethodType):
        return a.__func__ is b.__func__ and a.__self__ is b.__self__
    return a is b


def _attribute(holder: Any, name: str) -> Any:
    try:
        return getattr(holder, name, ABSENT)
    except Exception:  # A property of the user's own may raise anything.
        return ABSENT
