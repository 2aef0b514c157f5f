"""Objects that hold values by key: what they held when a step first met them, and what they hold.

Each kind of object is one class here. Nothing of the user's runs when an owner is copied, looked up
or written to, except where a class looks its attributes up itself (`Answers`).

========================================  ==========================================================
a function's globals, a module's names    `Names`: by name
an object                                 `objects.Object`: its dict, its slots; a Module's
                                          parameters, buffers and children by their names
an object whose class has __getattr__     `objects.Answers`: what it gives under a name
a class                                   `objects.ClassNames`: what it defines itself
a dict; a list, a tuple, a set, a deque   `Items`; `Elements`
a variable around a function              `Cell`
a function, a partial                     `objects.Fields`: its code and defaults; its parts
a tensor                                  `Traits`: requires_grad, hooks, the data behind it
a NumPy array, array.array, bytearray     `Memory`
a ContextVar, os.environ                  `ContextValue`, `Environment`
========================================  ==========================================================

What a step changes is found by comparing an owner with its copy, and is an `Effect`: done again on
every call, as PyTorch would. What is neither a key that is set or removed nor an element that is
added, a list that is sorted say, counts as a read of the whole, and is put there as it became.
"""

from __future__ import annotations

import array
import functools
import itertools
import os
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from operator import is_
from typing import Any

import numpy as np

from xla_dtensor.runtimes.guards.values import ABSENT, Change, Sighting, described, is_plain

__all__ = [
    "TRAITS",
    "Cell",
    "Constant",
    "ContextValue",
    "Effect",
    "Elements",
    "Environment",
    "Globals",
    "Hooks",
    "Items",
    "Memory",
    "Names",
    "Owner",
    "Traits",
    "in_order",
]

TRAITS = ("requires_grad", "_backward_hooks", "_post_accumulate_grad_hooks", "_local_tensor")


@dataclass(frozen=True)
class Effect:
    """One change that a step makes.

    Args:
        do: Makes it, given a value.
        value: The value that the trace gave.
        name: What messages call it.
        swap: Puts another value in the place of the trace's; None where `do` does.
        is_contents: Whether the value is a container that was made for this alone.
    """

    do: Callable[[Any], None]
    value: Any
    name: str
    swap: Callable[[Any], None] | None = None
    is_contents: bool = False

    @property
    def replace(self) -> Callable[[Any], None]:
        """Put another value in the place of the one that the trace gave."""
        return self.do if self.swap is None else self.swap


class Owner:
    """An object that holds values by key.

    Args:
        holder: The object.
        label: What messages call it.

    Attributes:
        kind: Its class.
        snapshot: What it held when the step first met it, by key.
        keys: The keys that it had then, in order.
        reads: The keys that the step read; of a False one, only parts of the value were read.
        is_whole: Whether the step may have read all of it, so that a new key counts as well.
        is_searched: Whether the step has looked for something among its keys or elements.
        writes: The keys that the step was seen to assign; None where that cannot be seen, and
            whatever differs counts.
        stores: Keys that its code may have assigned unseen; ABSENT for any.
        others: The keys that other threads were seen to assign.
        is_changed: Whether the step has changed it.
        parent: The owner through which the step met it; None for none.
    """

    def __init__(self, holder: Any, label: str) -> None:
        self.holder, self.label, self.kind = holder, label, type(holder)
        self.snapshot: dict[Any, Any] = dict(self.entries())
        self.keys: list[Any] = list(self.keys_now())
        self.reads: dict[Any, bool] = {}
        self.is_whole = False
        self.is_searched = False
        self.writes: set[Any] | None = None
        self.stores: set[Any] = set()
        self.others: set[Any] = set()
        self.is_changed = False
        self.parent: Owner | None = None

    def entries(self) -> Iterable[tuple[Any, Any]]:
        """Return all values with their keys."""
        return [(key, self.look_up(key)) for key in self.keys_now()]

    def keys_now(self) -> Iterable[Any]:
        """Return the keys that there are at present."""
        raise NotImplementedError

    def look_up(self, key: Any) -> Any:
        """Return the present value of a key; ABSENT if there is none."""
        raise NotImplementedError

    def named(self, key: Any) -> str:
        """Return what messages call the value of a key."""
        return f"{self.label}.{key}"

    def ignores(self, key: Any) -> bool:
        """Tell whether what a key holds is nothing to a compiled step."""
        return False

    def size(self) -> int:
        """Return how many keys there are at present."""
        return len(self.holder)

    def table(self, key: Any) -> Mapping[Any, Any] | None:
        """Return the mapping in which a key is looked up; None where only `look_up` tells."""
        return None

    def beside(self, holder: Any) -> Owner:
        """Return this owner's twin of another object; only `look_up` and `keys_now` are asked."""
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin.holder = holder
        return twin

    def name(self, key: Any) -> Any:
        """Return what tells the place of a key from all others."""
        table = self.table(key)
        return id(self.holder if table is None else table), key

    def change(self, key: Any, found: Any, now: Any) -> Change:
        """Describe that something else is there now."""
        return Change.of(self.named(key), found, now, self.name(key))

    def sightings(self) -> Iterable[Sighting]:
        """Return what the step read, with what is there now."""
        for key in self.reads:
            yield Sighting(self.name(key), self.snapshot.get(key, ABSENT), self.look_up(key))

    # ------------------------------------------------------------------ what the step changed

    def put(self, key: Any, value: Any) -> None:
        """Assign a value, ABSENT for none."""
        raise NotImplementedError

    def changes(self) -> list[Any]:
        """Return the keys to which the step has given other values."""
        keys = dict.fromkeys((*self.snapshot, *self.keys_now()))
        return [
            key
            for key in keys
            if (key not in self.others if self.writes is None else key in self.writes)
            and self.look_up(key) is not self.snapshot.get(key, ABSENT)
        ]

    def effects(self) -> list[Effect]:
        """Return what the step has changed."""
        put = functools.partial
        return [Effect(put(self.put, k), self.look_up(k), self.named(k)) for k in self.changes()]

    def held_before(self) -> list[Any]:
        """Return what is there that was there before, and may have been assigned again."""
        keys = self.stores if self.writes is None else self.stores | self.writes
        pairs = [(key, self.look_up(key)) for key in keys]
        entries = [(k, v) for k, v in pairs if v is self.snapshot.get(k, ABSENT) is not ABSENT]
        # Where another value is there, the step alters it.
        self.reads |= dict.fromkeys((key for key, _ in entries), True)
        return [value for _, value in entries]

    def rewind(self) -> None:
        """Undo what the step has changed."""
        for key in self.changes():
            self.put(key, self.snapshot.get(key, ABSENT))

    def take_whole(self) -> None:
        """Take all that it held for read."""
        self.is_whole = True
        self.reads = dict.fromkeys(self.snapshot, True)


class _Single(Owner):
    """An owner of one value."""

    def keys_now(self) -> Iterable[Any]:
        return (None,)

    def named(self, key: Any) -> str:
        return self.label


class Constant(Owner):
    """An owner that no step writes to."""

    def changes(self) -> list[Any]:
        return []


class Names(Owner):
    """Names in a dict: a function's globals, a module's, a function's or a tensor's attributes."""

    def entries(self) -> Iterable[tuple[Any, Any]]:
        return dict.items(self.holder)

    def keys_now(self) -> Iterable[Any]:
        return dict.keys(self.holder)

    def look_up(self, key: Any) -> Any:
        return dict.get(self.holder, key, ABSENT)

    def table(self, key: Any) -> Mapping[Any, Any] | None:
        return self.holder if type(self.holder) is dict else None

    def put(self, key: Any, value: Any) -> None:
        if value is ABSENT:
            self.holder.pop(key, None)
        else:
            self.holder[key] = value

    def rewind(self) -> None:
        super().rewind()
        in_order(self.holder, self.keys)


class Globals(Names):
    """The globals of functions, the names of a module."""

    def rewind(self) -> None:
        Owner.rewind(self)  # Others may look names up meanwhile, whose order is nothing to anyone.

    def named(self, key: Any) -> str:
        return f"the global {key!r} of {self.label}"


class Items(Names):
    """What a dict holds, an object of a class derived from dict too."""

    def entries(self) -> Iterable[tuple[Any, Any]]:
        is_dict = isinstance(self.holder, dict)
        return dict.items(self.holder) if is_dict else self.holder.items()

    def keys_now(self) -> Iterable[Any]:
        return dict.keys(self.holder) if isinstance(self.holder, dict) else list(self.holder)

    def look_up(self, key: Any) -> Any:
        if isinstance(self.holder, dict):
            return dict.get(self.holder, key, ABSENT)
        return self.holder.get(key, ABSENT)

    def named(self, key: Any) -> str:
        return f"the item {described(key)} of {self.label}"

    def put(self, key: Any, value: Any) -> None:
        if value is ABSENT:
            self._base().pop(self.holder, key, None)
        else:
            self._base().__setitem__(self.holder, key, value)

    def effects(self) -> list[Effect]:
        changed = set(self.changes())
        contents = dict(self.entries())
        old_keys = [key for key in self.snapshot if key in contents]
        if list(contents) == old_keys + [key for key in contents if key not in self.snapshot]:
            return super().effects() if changed else []
        self.take_whole()
        return [Effect(self._fill, contents, self.label, is_contents=True)]

    def changes(self) -> list[Any]:
        return super().changes() if isinstance(self.holder, dict) else []

    def held_before(self) -> list[Any]:
        self.stores |= self.snapshot.keys() if ABSENT in self.stores else set()
        return super().held_before()

    def rewind(self) -> None:
        if self.effects():
            self._fill(self.snapshot)

    def _fill(self, contents: dict[Any, Any]) -> None:
        self._base().clear(self.holder)
        self._base().update(self.holder, contents)

    def _base(self) -> Any:
        """Return the class of C whose methods write, past those of a class of the user's."""
        return OrderedDict if isinstance(self.holder, OrderedDict) else dict


class Hooks(Items):
    """The hooks of a module, in order. Their numbers say only how often some were added before."""

    def __init__(self, holder: Any, label: str) -> None:
        super().__init__(holder, label)
        self._contents = dict(holder)

    def entries(self) -> Iterable[tuple[Any, Any]]:
        return enumerate(self.holder.values())

    def keys_now(self) -> Iterable[Any]:
        return range(len(self.holder))

    def look_up(self, key: Any) -> Any:
        return next(itertools.islice(self.holder.values(), key, None), ABSENT)

    def effects(self) -> list[Effect]:
        pairs = zip(self.holder.items(), self._contents.items(), strict=False)
        is_same = all(key == number and hook is kept for (key, hook), (number, kept) in pairs)
        if is_same and len(self.holder) == len(self._contents):
            return []
        self.take_whole()
        return [Effect(self._fill, dict(self.holder), self.label, is_contents=True)]

    def rewind(self) -> None:
        if self.effects():
            self._fill(self._contents)


class Memo(Items):
    """The results that functools.lru_cache keeps. One that is new, no step has read."""

    def keys_now(self) -> Iterable[Any]:
        return [key for key in self.holder if key in self.snapshot]


class Elements(Owner):
    """What a list, a tuple, a deque or a set holds, by place."""

    def entries(self) -> Iterable[tuple[Any, Any]]:
        return enumerate(self.elements())

    def keys_now(self) -> Iterable[Any]:
        return range(len(self.elements()))

    def look_up(self, key: Any) -> Any:
        elements = self.elements()
        return elements[key] if key < len(elements) else ABSENT

    def named(self, key: Any) -> str:
        return f"element {key} of {self.label}"

    def elements(self) -> Any:
        """Return what can be indexed, past what a class of the user's does when it is walked."""
        if self.kind in (list, tuple, deque):
            return self.holder
        if isinstance(self.holder, np.ndarray):  # of objects
            return self.holder.ravel().tolist()
        return list(self._base().__iter__(self.holder))

    def effects(self) -> list[Effect]:
        snapshot, elements = list(self.snapshot.values()), list(self.elements())
        if len(snapshot) == len(elements) and all(map(is_, snapshot, elements)):
            return []
        base = self._base()
        if base is set:
            old = {*snapshot}
            if self.holder >= old:
                new = [element for element in elements if element not in old]
                return [self._addition(new)]
        elif base is not np.ndarray:
            is_full = len(elements) == getattr(self.holder, "maxlen", None)
            starts = range(len(snapshot) + 1) if is_full else (0,)
            # Of a deque of a largest length the first ones go where elements are added.
            for start in starts:
                tail = snapshot[start:]
                if len(tail) < len(elements) and all(map(is_, tail, elements)):
                    return [self._addition(elements[len(tail) :])]
        self.take_whole()
        return [Effect(self._fill, elements, self.label, is_contents=True)]

    def _addition(self, new: list[Any]) -> Effect:
        base = self._base()

        def add(elements: Iterable[Any]) -> None:
            (base.update if base is set else base.extend)(self.holder, elements)

        def swap(elements: Iterable[Any]) -> None:
            if base is set:
                base.difference_update(self.holder, new)
            else:
                for _ in new:
                    base.pop(self.holder)
            add(elements)

        return Effect(add, new, self.label, swap, is_contents=True)

    def held_before(self) -> list[Any]:
        if ABSENT in self.stores:
            snapshot, elements = list(self.snapshot.values()), list(self.elements())
            is_same = len(snapshot) == len(elements) and all(map(is_, snapshot, elements))
            # What is added to a set may have been there.
            if is_same or (self._base() is set and all(map(is_plain, elements))):
                self.take_whole()
        self.stores.discard(ABSENT)
        return super().held_before()

    def rewind(self) -> None:
        if self.effects():
            self._fill(self.snapshot.values())

    def _fill(self, elements: Iterable[Any]) -> None:
        base = self._base()
        if base is np.ndarray:
            self.holder.flat = list(elements)
            return
        base.clear(self.holder)
        (base.update if base is set else base.extend)(self.holder, elements)

    def _base(self) -> Any:
        kinds: tuple[Any, ...] = (list, tuple, deque, set, frozenset, np.ndarray)
        return next(kind for kind in kinds if issubclass(self.kind, kind))


class Cell(_Single):
    """A variable of the function around another one."""

    def look_up(self, key: Any) -> Any:
        try:
            return self.holder.cell_contents
        except ValueError:  # deleted, or not assigned yet
            return ABSENT

    def put(self, key: Any, value: Any) -> None:
        if value is not ABSENT:
            self.holder.cell_contents = value
        elif self.look_up(key) is not ABSENT:
            del self.holder.cell_contents


class DATA:
    """The name of a tensor's data, as other names tell where a tensor is."""

    @classmethod
    def of(cls, tensor: Any) -> Any:
        """Return what tells it from all other names."""
        return id(tensor), cls


class Traits(_Single):
    """What of a tensor, besides its values, a program depends on.

    Attributes:
        fits: Tells whether the tensor may have the data that it has; None: those that it had.
    """

    fits: Callable[[Any], bool] | None = None

    def __init__(self, holder: Any, label: str) -> None:
        super().__init__(holder, label)
        self._data = getattr(holder, TRAITS[-1], None)  # else others may come to be at its address

    def look_up(self, key: Any) -> Any:
        requires_grad, hooks, later, payload = (getattr(self.holder, n, None) for n in TRAITS)
        hook_ids = tuple(hooks) if hooks else (), tuple(later) if later else ()
        data = id(payload) if self.fits is None else self.fits(self.holder)
        return requires_grad, *hook_ids, None if payload is None else data

    def let_data_move(self, fits: Callable[[Any], bool]) -> None:
        """Take other data for the same, of which the program reads the values."""
        self.fits, self._data = fits, None
        self.snapshot[None] = (*self.snapshot[None][:-1], True)

    def change(self, key: Any, found: Any, now: Any) -> Change:
        if found[0] != now[0]:
            return Change(f"{self.label}.requires_grad changed to {now[0]}")
        if found[:-1] != now[:-1]:
            return Change(f"a hook of {self.label} was added or removed")
        return Change(f"the data of {self.label} was replaced", True, DATA.of(self.holder))

    def effects(self) -> list[Effect]:
        requires_grad = self.holder.requires_grad
        name = f"{self.label}.requires_grad"
        return (
            []
            if requires_grad == self.snapshot[None][0]
            else [Effect(self._require, requires_grad, name)]
        )

    def rewind(self) -> None:
        if self.effects():
            self._require(self.snapshot[None][0])

    def _require(self, requires_grad: bool) -> None:
        if self.holder.is_leaf and self.holder.requires_grad != requires_grad:
            self.holder.requires_grad_(requires_grad)


class Memory(_Single):
    """The elements of an array."""

    def look_up(self, key: Any) -> Any:
        if isinstance(self.holder, np.ndarray):
            return self.holder.shape, self.holder.dtype.str, self.holder.tobytes()
        return bytes(self.holder)

    def named(self, key: Any) -> str:
        return f"the elements of {self.label}"

    def change(self, key: Any, found: Any, now: Any) -> Change:
        return Change(f"{self.named(key)} changed")  # their bytes tell nobody anything

    def changes(self) -> list[Any]:
        return [] if self.look_up(None) == self.snapshot[None] else [None]

    def put(self, key: Any, value: Any) -> None:
        if isinstance(self.holder, np.ndarray):
            shape, kind, content = value
            self.holder[...] = np.frombuffer(content, kind).reshape(shape)
        elif isinstance(self.holder, array.array):
            del self.holder[:]
            self.holder.frombytes(value)
        elif isinstance(self.holder, bytearray):
            self.holder[:] = value
        else:
            memoryview(self.holder).cast("B")[:] = value


class ContextValue(_Single):
    """What a context variable is set to."""

    holder: ContextVar[Any]

    def look_up(self, key: Any) -> Any:
        return self.holder.get(ABSENT)

    def put(self, key: Any, value: Any) -> None:
        if value is not ABSENT:  # It cannot be unset.
            self.holder.set(value)


class Environment(Owner):
    """Variables of the process."""

    def keys_now(self) -> Iterable[Any]:
        return list(os.environ)

    def look_up(self, key: Any) -> Any:
        return os.environ.get(key, ABSENT)

    def named(self, key: Any) -> str:
        return f"os.environ[{key!r}]"

    def put(self, key: Any, value: Any) -> None:
        if value is ABSENT:
            os.environ.pop(key, None)
        else:
            os.environ[key] = value

    def changes(self) -> list[Any]:
        variables = dict(os.environ)
        snapshot = self.snapshot
        return [
            k
            for k in {*variables, *snapshot}
            if variables.get(k, ABSENT) != snapshot.get(k, ABSENT)
        ]


def in_order(table: dict[Any, Any], keys: Iterable[Any]) -> None:
    """Put a dict's keys in an order that they had, if they are the same."""
    keys = list(keys)
    if list(table) != keys and len(table) == len(keys) and all(key in table for key in keys):
        for key in keys:
            table[key] = table.pop(key)
