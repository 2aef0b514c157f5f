"""What Python held when a step was traced: tables of names and values, compared on every call.

A table is one object that holds values by name: the globals of a module, a variable of a function,
an object's attributes, a dict, a list. Of each it is noted which values the step found there.
Comparing is one pass over the tables; a value that is the very same object costs next to nothing,
what else there is goes to a :class:`~xla_dtensor.runtimes.premises.values.Judge`.

Invariant: a table that compares equal leads to the values that the trace saw, by the names by which
it saw them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import is_
from types import CellType
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from xla_dtensor.runtimes.premises.values import ABSENT, Change, Judge

__all__ = ["Array", "Attributes", "Cell", "Contents", "Elements", "Names", "Table", "Whole"]


class Table(Protocol):
    """Values by name, as they were found."""

    holder: Any

    def changed(self, judge: Judge) -> Change | None:
        """Return what is no longer as it was found; None if the program still holds."""
        ...

    def tensors(self) -> Sequence[torch.Tensor]:
        """Return the tensors that were found."""
        ...

    def pairs(self) -> Sequence[tuple[Any, Any]]:
        """Return what was found and what there is now, of each value."""
        ...

    def settle(self, forget: Callable[[Any], Any]) -> None:
        """Keep of each value what `forget` returns of it."""
        ...


class _Compared:
    """What all tables do: read the values there are now, and compare them.

    Args:
        holder: What holds the values.
        named: Names a value for errors, given its key.
    """

    def __init__(self, holder: Any, named: Callable[[Any], str]) -> None:
        self.holder = holder
        self._named = named
        self.keys: list[Any] = []
        self.found: list[Any] = []

    def now(self) -> list[Any]:
        raise NotImplementedError

    def add(self, key: Any, value: Any) -> None:
        """Note one more value."""
        if key not in self.keys:
            self.keys.append(key)
            self.found.append(value)

    def changed(self, judge: Judge) -> Change | None:
        now = self.now()
        if len(now) == len(self.found) and all(map(is_, now, self.found)):
            return None
        return self._difference(now, judge)

    def _difference(self, now: list[Any], judge: Judge) -> Change | None:
        for key, found, value in zip(self.keys, self.found, now, strict=True):
            if not judge.accepts(found, value):
                return Change.of(self._named(key), found, value)
        return None

    def tensors(self) -> list[torch.Tensor]:
        return [value for value in self.found if isinstance(value, torch.Tensor)]

    def pairs(self) -> list[tuple[Any, Any]]:
        now = self.now()
        return list(zip(self.found, now, strict=True)) if len(now) == len(self.found) else []

    def settle(self, forget: Callable[[Any], Any]) -> None:
        self.found = [forget(value) for value in self.found]


class Names(_Compared):
    """Some of the names in a dict: a module's globals, an object's attributes."""

    def now(self) -> list[Any]:
        """Return the values that there are now."""
        return [self.holder.get(key, ABSENT) for key in self.keys]


class Attributes(_Compared):
    """Attributes that no dict holds: slots, or what ``__getattr__`` makes."""

    def now(self) -> list[Any]:
        """Return the values that there are now."""
        return [_attribute(self.holder, key) for key in self.keys]


class Cell(_Compared):
    """A variable of the function around a step."""

    holder: CellType

    def now(self) -> list[Any]:
        """Return the values that there are now."""
        try:
            return [self.holder.cell_contents]
        except ValueError:  # deleted, or not assigned yet
            return [ABSENT]


class Whole(_Compared):
    """All that a dict holds."""

    def __init__(self, holder: dict[Any, Any], named: Callable[[Any], str]) -> None:
        super().__init__(holder, named)
        self.keys, self.found = list(holder), list(holder.values())

    def now(self) -> list[Any]:
        """Return the values that there are now."""
        return list(self.holder.values())

    def changed(self, judge: Judge) -> Change | None:
        """Compare the keys as well."""
        # By identity, for keys may be tensors, whose equality is a tensor.
        if len(self.holder) == len(self.keys) and all(map(is_, self.holder, self.keys)):
            return super().changed(judge)
        known = dict.fromkeys(self.keys)
        for key in self.holder:
            if key not in known:
                return Change(f"{self._named(key)} is new")
        for key in self.keys:
            if key not in self.holder:
                return Change(f"{self._named(key)} is gone")
        if any(not (a is b or a == b) for a, b in zip(self.holder, self.keys, strict=True)):
            return Change(f"the order of {self._named(self.keys[0])} changed")
        now = [self.holder[key] for key in self.keys]
        return self._difference(now, judge)


class Elements(NamedTuple):
    """What a NumPy array holds, rather than the array."""

    array: np.ndarray[Any, Any]


class Array:
    """The elements of a NumPy array, which can be written to in place."""

    def __init__(self, holder: np.ndarray[Any, Any], named: Callable[[Any], str]) -> None:
        self.holder = holder
        self._named = named
        self._found: np.ndarray[Any, Any] | None = holder.copy()

    def changed(self, judge: Judge) -> Change | None:
        """Return that an element is no longer as it was found."""
        found = self._found
        if found is None or np.array_equal(found.view(np.uint8), self.holder.view(np.uint8)):
            return None
        return Change(f"the elements of {self._named(None)} changed")

    def tensors(self) -> Sequence[torch.Tensor]:
        """Return nothing."""
        return ()

    def pairs(self) -> Sequence[tuple[Any, Any]]:
        """Return nothing."""
        return ()

    def settle(self, forget: Callable[[Any], Any]) -> None:
        """Compare no longer, where `forget` gives nothing: the program reads the elements anew."""
        if forget(Elements(self.holder)) is ABSENT:
            self._found = None


class Contents(_Compared):
    """All that a list, a tuple or a set holds."""

    def __init__(self, holder: Any, named: Callable[[Any], str]) -> None:
        super().__init__(holder, named)
        self.found = list(holder)
        self.keys = list(range(len(self.found)))

    def now(self) -> list[Any]:
        """Return the values that there are now."""
        return list(self.holder)

    def _difference(self, now: list[Any], judge: Judge) -> Change | None:
        if len(now) != len(self.found):
            what = f"{len(now)} elements and had {len(self.found)}"
            return Change(f"{self._named(None)} has {what}")
        return super()._difference(now, judge)


def _attribute(holder: Any, name: str) -> Any:
    try:
        return getattr(holder, name, ABSENT)
    except Exception:  # A property of the user's own may raise anything.
        return ABSENT
