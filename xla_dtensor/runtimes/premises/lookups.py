"""The steps of chains on values: looked up without running anything of the user's, and noted."""

from __future__ import annotations

import array
import contextvars
import inspect
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from xla_dtensor.runtimes.host_work.python_random import is_python_random
from xla_dtensor.runtimes.premises.arguments import Arguments
from xla_dtensor.runtimes.premises.chains import ATTRIBUTE
from xla_dtensor.runtimes.premises.effects import Effects
from xla_dtensor.runtimes.premises.frames import given_to
from xla_dtensor.runtimes.premises.libraries import is_library_file, is_of_library
from xla_dtensor.runtimes.premises.tables import (
    Array,
    Attributes,
    Cell,
    Contents,
    Names,
    Table,
    Variable,
    Whole,
)
from xla_dtensor.runtimes.premises.values import ABSENT, is_plain

__all__ = ["BUFFERS", "CONTAINERS", "Lookups"]

CONTAINERS = (list, tuple, set, frozenset, dict, deque)
BUFFERS = (bytearray, memoryview, array.array)
_MODULE_TABLES = ("_parameters", "_buffers", "_modules")
_LARGEST_ARRAY_BYTES = 4_000_000  # a copy is kept, and compared on every call
# Methods that add to a container and read nothing of it.
_ADDING = frozenset({"append", "extend", "add", "appendleft", "update", "insert", "clear"})


class Lookups:
    """What was looked up, in tables.

    Attributes:
        tables: What was found, each holder once.
        objects: The objects that were looked into.
        tables_of: The tables that belong to an object, by its id.
        effects: What the step assigns to.
        generators: torch's generators that came up.
        randoms: Python's and NumPy's.
        iterators: Those that the step takes elements from.
        given: The ids of what holds the fields of arguments, which are inputs.
    """

    def __init__(self) -> None:
        self.objects: dict[int, Any] = {}
        self.tables_of: dict[int, list[Table]] = {}
        self.effects = Effects()
        self.generators: list[torch.Generator] = []
        self.randoms: list[Any] = []
        self.iterators: list[Iterator[Any]] = []
        self.given: set[int] = set()
        self._tables: dict[tuple[type, int], Table] = {}
        self._kept: dict[int, Any] = {}

    @property
    def tables(self) -> list[Table]:
        """All tables."""
        return list(self._tables.values())

    def keep(self, *values: Any) -> None:
        """Keep objects alive, so that their ids stay theirs."""
        self._kept.update((id(value), value) for value in values)

    def go_into(self, function: Any, given: Arguments | None = None) -> None:
        """Go into a function that a lookup runs; see ``Reach``."""
        raise NotImplementedError

    def end(self, value: Any) -> None:
        """Take all of a value as read; see ``Reach``."""
        raise NotImplementedError

    # ------------------------------------------------------------------ roots

    def cell(self, cell: types.CellType, name: str, function: types.FunctionType) -> Any:
        """Look up a variable of the function around."""
        owner = function.__qualname__.rpartition(".<locals>.")[0] or function.__qualname__
        table = self._table(Cell, cell, lambda _: f"{name!r} of {owner}")
        return self._noted(table, name, table.now(cell)[0])

    def global_(self, names: dict[str, Any], name: str) -> Any:
        """Look up a global."""
        where = names.get("__name__", "a module")
        table = self._table(Names, names, lambda key: f"the global {key!r} of {where}")
        return self._noted(table, name, names.get(name, ABSENT))

    # ------------------------------------------------------------------ steps

    def attribute(self, owner: Any, name: str) -> Iterable[Any]:
        """Look up an attribute."""
        if isinstance(owner, types.ModuleType):
            return (self._of_python_module(owner, name),)
        if isinstance(owner, CONTAINERS) and not hasattr(owner, "__dict__"):
            return self._of_container(owner, name)
        if is_plain(owner) or is_python_random(owner) or isinstance(owner, np.ndarray):
            self.end(owner)
            return ()
        if isinstance(owner, type):
            return self.of_classes(owner.__mro__, name, owner)
        own = getattr(owner, "__dict__", None)
        if isinstance(owner, torch.Tensor):
            if not isinstance(own, dict) or name not in own or name.startswith("_"):
                return ()
            return (self._noted(self._names_of(owner, own), name, own[name]),)
        if isinstance(owner, CONTAINERS):
            self.contents(owner)
        if isinstance(owner, torch.nn.Module):
            for table in (vars(owner).get(kind) for kind in _MODULE_TABLES):
                if table is not None and name in table:
                    return (self._noted(self._names_of(owner, table), name, table[name]),)
        if isinstance(own, dict):
            # An attribute of the class may be hidden by one of the object later.
            value = self._noted(self._names_of(owner, own), name, own.get(name, ABSENT))
            if value is not ABSENT:
                return (value,)
        return self.of_classes(type(owner).__mro__, name, owner)

    def _of_python_module(self, module: types.ModuleType, name: str) -> Any:
        table = self._table(Names, vars(module), lambda key: f"{module.__name__}.{key}")
        return self._noted(table, name, vars(module).get(name, ABSENT))

    def _of_container(self, owner: Any, name: str) -> Iterable[Any]:
        if not hasattr(owner, name):
            return ()  # A local may stand for several things.
        if name in _ADDING:
            self.effects.container(owner)
        else:
            self.contents(owner)
        return (getattr(owner, name),)

    def of_classes(self, kinds: Iterable[type], name: str, owner: Any) -> Iterable[Any]:
        """Look up what classes have under a name, for an object or a class `owner`."""
        instance = None if isinstance(owner, type) else owner
        for kind in kinds:
            if name not in vars(kind):
                if not is_of_library(kind):
                    self._noted(self._names_of_class(kind), name, ABSENT)
                continue
            value = vars(kind)[name]
            if not is_of_library(kind) and not isinstance(value, types.MemberDescriptorType):
                self._noted(self._names_of_class(kind), name, value)
            return self._bound(value, kind, owner, instance, name)
        if instance is not None and _asks(type(owner)):
            return (self._read(owner, name),)
        return ()

    def _bound(self, value: Any, kind: type, owner: Any, instance: Any, name: str) -> Iterable[Any]:
        """Return what looking up a class's value gives."""
        if isinstance(value, staticmethod):
            return (value.__func__,)
        if isinstance(value, classmethod):
            of = owner if isinstance(owner, type) else type(owner)
            return (types.MethodType(value.__func__, of),)
        if isinstance(value, types.FunctionType):
            if isinstance(owner, type):
                self._users_class_of(owner, value)
                return (value,)
            return (types.MethodType(value, instance),)
        getter = getattr(value, "fget", None) or getattr(value, "func", None)
        if isinstance(getter, types.FunctionType):
            # Of a class, objects may be made; what a property returns is its code's to read.
            self.go_into(getter, None if instance is None else Arguments([[instance]]))
            return ()
        if isinstance(value, types.MemberDescriptorType):
            return () if instance is None else (self._read(owner, name),)
        if hasattr(type(value), "__get__") and not callable(value):
            getter = inspect.getattr_static(type(value), "__get__")
            if isinstance(getter, types.FunctionType):
                self.go_into(getter, Arguments([[value], [owner]]))
            self.end(value)
            return ()
        # What a method of C reads of its owner nobody knows.
        if isinstance(value, types.MethodDescriptorType) and instance is not None:
            self.end(instance)
        if isinstance(value, types.ClassMethodDescriptorType):
            self.end(owner if isinstance(owner, type) else type(owner))
        return (value,)

    def _users_class_of(self, kind: type, function: types.FunctionType) -> None:
        """Take a user's class as used whose inherited code calls its methods."""
        if is_library_file(function.__code__.co_filename) and not is_of_library(kind):
            self.end(kind)

    def _read(self, owner: Any, name: str) -> Any:
        """Ask the object itself: nobody else knows what is under the name."""
        self.objects[id(owner)] = owner
        table = self._table(Attributes, owner, lambda key: f"{type(owner).__name__}.{key}")
        return table.read(name)

    def item(self, owner: Any, key: Any) -> Iterable[Any]:
        """Look up an item by a constant key."""
        if isinstance(owner, dict):
            self.objects[id(owner)] = owner
            table = self._table(Names, owner, lambda each: f"the item {each!r} of a dict")
            return (self._noted(table, key, owner.get(key, ABSENT)),)
        if isinstance(owner, list | tuple | deque):
            self.contents(owner)
            inside = isinstance(key, int) and -len(owner) <= key < len(owner)
            return (owner[key],) if inside else ()
        if isinstance(owner, torch.nn.Module):
            return self._child(owner, key)
        if hasattr(type(owner), "__getitem__"):
            self.end(owner)
        return ()

    def _child(self, module: torch.nn.Module, key: Any) -> Iterable[Any]:
        """Look up an item of a module that holds others, or parameters."""
        children = list(self.elements(module))
        if isinstance(key, int) and -len(children) <= key < len(children):
            return (children[key],)
        named = (module._modules.get(str(key)), module._parameters.get(str(key)))
        found = [value for value in named if value is not None]
        if not found:
            self.end(module)
        return found

    def elements(self, owner: Any) -> Iterable[Any]:
        """Look up all elements, whatever they are called by."""
        if isinstance(owner, CONTAINERS):
            self.contents(owner)
            return given_to(owner)
        if isinstance(owner, torch.nn.Module):
            children: list[Any] = []
            for kind in ("_modules", "_parameters"):
                self.contents(vars(owner)[kind], f"{type(owner).__name__}")
                children += vars(owner)[kind].values()
            return children
        self.taken_from(owner)
        if hasattr(type(owner), "__iter__") or hasattr(type(owner), "__getitem__"):
            self.end(owner)
        return ()

    def taken_from(self, owner: Any) -> None:
        """Note that an iterator gives elements; one of the user's own classes by its code."""
        if isinstance(owner, Iterator) and is_of_library(type(owner)):
            self.keep(owner)
            self.iterators.append(owner)

    # ------------------------------------------------------------------ all of a value

    def contents(self, value: Any, label: str = "") -> None:
        """Note what a container holds."""
        if isinstance(value, tuple | frozenset):
            return  # They are compared where they are held.
        self.objects[id(value)] = value
        kind = label or f"a {type(value).__name__}"
        if isinstance(value, dict):
            self._table(Whole, value, lambda key: f"the item {key!r} of {kind}")
        else:
            self._table(Contents, value, lambda key: _element(key, kind))

    def whole(self, owner: Any, own: dict[str, Any]) -> None:
        """Note all attributes of an object."""
        self.objects[id(owner)] = owner
        self._table(Whole, own, lambda key: f"{type(owner).__name__}.{key}", owner)

    def context_variable(self, value: contextvars.ContextVar[Any]) -> None:
        """Note what a context variable is set to."""
        self.end(
            self._table(Variable, value, lambda _: f"the {value.name!r} of the context").read()
        )

    def array(self, value: np.ndarray[Any, Any]) -> None:
        """Note the elements of an array."""
        self.objects[id(value)] = value
        if value.dtype == object:
            self._table(Contents, value, lambda key: _element(key, "a NumPy array"))
        elif value.nbytes <= _LARGEST_ARRAY_BYTES:
            self._table(Array, value, lambda _: "a NumPy array")

    # ------------------------------------------------------------------ what is assigned to

    def written(self, owner: Any, kind: str, key: Any) -> None:
        """Note that an attribute or an item of a value is assigned to."""
        if isinstance(owner, CONTAINERS):
            self.effects.container(owner)
        elif kind != ATTRIBUTE:
            return  # An item of another object, or of what a call has made.
        elif isinstance(owner, types.ModuleType):
            self.effects.variable(vars(owner), key)
        elif not (isinstance(owner, torch.Tensor) and hasattr(torch.Tensor, key)):
            # What torch gives tensors, their gradient say, is no attribute of Python's.
            self.effects.attribute(owner, key)

    def variable_written(self, holder: Any, name: str) -> None:
        """Note that a global or a variable of a function around is assigned to."""
        self.effects.variable(holder, name)

    # ------------------------------------------------------------------ tables

    def _names_of(self, owner: Any, own: Mapping[str, Any]) -> Names:
        self.objects[id(owner)] = owner
        return self._table(Names, own, lambda key: f"{type(owner).__name__}.{key}", owner)

    def _names_of_class(self, kind: type) -> Names:
        return self._table(Names, vars(kind), lambda key: f"{kind.__name__}.{key}", kind, id(kind))

    def _table(
        self,
        kind: type,
        holder: Any,
        named: Callable[[Any], str],
        owner: Any = None,
        identity: int | None = None,
    ) -> Any:
        """Return a table of a holder; `owner` is the object that it belongs to, if another."""
        key = (kind, id(holder) if identity is None else identity)
        if id(holder) in self.given:
            return kind(holder, named)  # An input's, which nobody keeps.
        if key not in self._tables:
            table = self._tables[key] = kind(holder, named)
            self.keep(holder, owner)
            self.tables_of.setdefault(id(holder if owner is None else owner), []).append(table)
        return self._tables[key]

    def _noted(self, table: Any, key: Any, value: Any) -> Any:
        table.add(key, value)
        return value


def _asks(kind: type) -> bool:
    return any("__getattr__" in vars(each) and not is_of_library(each) for each in kind.__mro__)


def _element(key: Any, label: str) -> str:
    return label if key is None else f"element {key} of {label}"
