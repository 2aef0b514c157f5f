"""What a step can reach by name, as it is before the step is traced.

From the step's function on, each chain that its code reads (``reads``) is looked up: the values on
the way become entries of tables (``tables``), functions of the user's are gone into, with the
object that they are methods of, and so is the ``forward`` of each module that comes up::

    class Trainer:
        def step(self, x):
            return loss_of(self.model(x)) * self.weight

    tables   self.model, self.weight      attributes of a Trainer
             loss_of                      a global
    gone into   loss_of, the forward of self.model and of the modules in it

What ends a chain is taken as read: a list or a dict with all that it holds, of another object the
attributes that any of the code looks up of anything.

Libraries are not gone into: what Python, torch, JAX, NumPy and this package hold is not the user's.
Code of other packages is, a model hub's layers for instance.
"""

from __future__ import annotations

import builtins
import functools
import inspect
import types
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from xla_dtensor.runtimes.host_work.python_random import is_python_random
from xla_dtensor.runtimes.premises.libraries import is_library_file, is_of_library
from xla_dtensor.runtimes.premises.reads import (
    ARGUMENT,
    ATTRIBUTE,
    CELL,
    OVERRIDDEN,
    Chain,
    reads_of,
)
from xla_dtensor.runtimes.premises.tables import (
    Array,
    Attributes,
    Cell,
    Contents,
    Names,
    Table,
    Whole,
)
from xla_dtensor.runtimes.premises.values import ABSENT, is_plain

__all__ = ["Reach"]

_MOST_FUNCTIONS = 20_000
_MOST_ELEMENTS = 100_000
_LARGEST_ARRAY_BYTES = 4_000_000  # a copy is kept, and compared on every call
_CONTAINERS = (list, tuple, set, frozenset, dict, deque)
# Their insides are looked after elsewhere (optimizers, tensors), or are nobody's names.
_CLOSED = (
    torch.Tensor,
    torch.optim.Optimizer,
    torch.optim.lr_scheduler.LRScheduler,
    torch.Generator,
)


_NONE: Mapping[str, Any] = types.MappingProxyType({})


class Reach:
    """All that can be reached from a function, in tables.

    Attributes:
        tables: What was found, each holder once.
        objects: The objects that were looked into.
        modules: The modules that came up, in that order.
        generators: torch's generators that came up.
        randoms: Python's and NumPy's.
    """

    def __init__(self) -> None:
        self.modules: dict[int, torch.nn.Module] = {}
        self.objects: dict[int, Any] = {}
        self.generators: list[torch.Generator] = []
        self.randoms: list[Any] = []
        self._tables: dict[tuple[type, int], Table] = {}
        self._walked: set[tuple[int, int]] = set()
        self._attributes: set[str] = set()
        self._opened: dict[int, Any] = {}  # whose attributes count as read by name
        self._ended: set[int] = set()  # containers of which all is read
        self._elements = 0

    @classmethod
    def of(
        cls, function: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] = _NONE
    ) -> Reach:
        """Return what `function` can reach.

        Args:
            function: A step: a function, a method, a module, any callable.
            args: What it is called with; objects that are no tensors may be looked into.
            kwargs: The same, by name.
        """
        reach = cls()
        plain = inspect.unwrap(getattr(function, "__func__", function))
        if isinstance(plain, types.FunctionType):
            first = getattr(function, "__self__", ABSENT)
            reach._walk(plain, first, _bound_arguments(function, args, kwargs))
        reach._end(function, "the step")
        for value in (*args, *kwargs.values()):
            reach._end(value, "an argument")
        reach._open_all()
        return reach

    @property
    def tables(self) -> list[Table]:
        """All tables."""
        return list(self._tables.values())

    # ------------------------------------------------------------------ functions

    def _walk(
        self,
        function: types.FunctionType,
        first: Any = ABSENT,
        given: Mapping[str, Any] = _NONE,
    ) -> None:
        """Go into a function; `first` is its first argument, `given` others, where known."""
        function = inspect.unwrap(function)
        key = (id(function), id(first))
        code = getattr(function, "__code__", None)
        if code is None or key in self._walked or len(self._walked) >= _MOST_FUNCTIONS:
            return
        self._walked.add(key)
        if is_library_file(code.co_filename):
            return
        reads = reads_of(code)
        self._attributes |= reads.attributes
        for chain in reads.chains:
            self._follow(chain, function, first, given)
        for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._end(default, f"a default of {function.__qualname__}")

    def _follow(
        self, chain: Chain, function: types.FunctionType, first: Any, given: Mapping[str, Any]
    ) -> None:
        if chain.root == ARGUMENT and chain.name in given:
            value = given[chain.name]
        else:
            value = self._root(chain, function, first)
        steps = list(chain.steps)
        while steps and value is not ABSENT:
            kind, key = steps.pop(0)
            if kind == OVERRIDDEN:
                value = self._overridden(function, value, key)
            elif kind == ATTRIBUTE:
                value = self._attribute(value, key)
            else:
                value = self._item(value, key)
        if value is not ABSENT:
            self._end(value, str(chain))

    def _root(self, chain: Chain, function: types.FunctionType, first: Any) -> Any:
        code = function.__code__
        if chain.root == ARGUMENT:
            is_first = code.co_argcount > 0 and chain.name == code.co_varnames[0]
            return first if is_first and first is not ABSENT else ABSENT
        if chain.root == CELL:
            cell = _cell(function, chain.name)
            if cell is None:
                return ABSENT
            table = self._table(Cell, cell, lambda _: f"{chain.name!r} of {_owner(function)}")
            return self._noted(table, chain.name, table.now()[0])
        names = function.__globals__
        if chain.name not in names and hasattr(builtins, chain.name):
            return ABSENT
        where = names.get("__name__", "a module")
        table = self._table(Names, names, lambda key: f"the global {key!r} of {where}")
        return self._noted(table, chain.name, names.get(chain.name, ABSENT))

    def _overridden(self, function: types.FunctionType, owner: Any, name: str) -> Any:
        """Return ``super().name`` in a method of `owner`."""
        cell = _cell(function, "__class__")
        kinds = type(owner).__mro__
        if cell is None or cell.cell_contents not in kinds:
            return ABSENT
        for kind in kinds[kinds.index(cell.cell_contents) + 1 :]:
            if name in vars(kind):
                return _bound(vars(kind)[name], owner)
        return ABSENT

    # ------------------------------------------------------------------ steps of a chain

    def _attribute(self, owner: Any, name: str) -> Any:
        """Look up an attribute without running anything of the user's; note it."""
        if isinstance(owner, types.ModuleType):
            return self._of_python_module(owner, name)
        if isinstance(owner, torch.nn.Module):
            return self._of_module(owner, name)
        is_array = isinstance(owner, np.ndarray)
        if is_array or isinstance(owner, _CLOSED) or is_plain(owner) or is_python_random(owner):
            self._end(owner, name)
            return ABSENT
        if isinstance(owner, type):
            return self._of_class(owner, name, None)
        own = getattr(owner, "__dict__", None)
        if isinstance(own, dict):
            # An attribute of the class may be hidden by one of the object later.
            value = self._noted(self._names_of(owner, own), name, own.get(name, ABSENT))
            if value is not ABSENT:
                return value
        return self._of_class(type(owner), name, owner)

    def _of_python_module(self, module: types.ModuleType, name: str) -> Any:
        if is_library_file(getattr(module, "__file__", None)):
            return ABSENT
        table = self._table(Names, vars(module), lambda key: f"{module.__name__}.{key}")
        return self._noted(table, name, vars(module).get(name, ABSENT))

    def _of_module(self, module: torch.nn.Module, name: str) -> Any:
        own = vars(module)
        for table in (own, own["_parameters"], own["_buffers"], own["_modules"]):
            if name in table:
                return self._noted(self._names_of(module, table), name, table[name])
        self._noted(self._names_of(module, own), name, ABSENT)
        return self._of_class(type(module), name, module)

    def _of_class(self, kind: type, name: str, owner: Any) -> Any:
        """Look up what a class has under a name; `owner` is an object of it, None for itself."""
        for each in kind.__mro__:
            if name not in vars(each):
                continue
            value = vars(each)[name]
            if isinstance(value, property):
                if value.fget is not None and owner is not None:
                    self._walk(value.fget, owner)  # pyright: ignore[reportArgumentType]
                return ABSENT
            if isinstance(value, types.MemberDescriptorType) and owner is not None:
                return self._read(owner, name)
            if not callable(value) and not hasattr(value, "__get__"):
                return self._noted(self._names_of_class(each), name, value)
            return _bound(value, owner)
        if owner is not None and any("__getattr__" in vars(each) for each in kind.__mro__):
            return self._read(owner, name)
        return ABSENT

    def _read(self, owner: Any, name: str) -> Any:
        self.objects[id(owner)] = owner
        table = self._table(Attributes, owner, lambda key: f"{type(owner).__name__}.{key}")
        table.add(name, ABSENT)
        value = table.now()[table.keys.index(name)]
        table.found[table.keys.index(name)] = value
        return value

    def _item(self, owner: Any, key: Any) -> Any:
        if isinstance(owner, dict):
            self.objects[id(owner)] = owner
            table = self._table(Names, owner, lambda each: f"the item {each!r} of a dict")
            return self._noted(table, key, owner.get(key, ABSENT))
        if isinstance(owner, list | tuple):
            self._end(owner, "a list")
            inside = isinstance(key, int) and -len(owner) <= key < len(owner)
            return owner[key] if inside else ABSENT
        self._end(owner, type(owner).__name__)
        return ABSENT

    # ------------------------------------------------------------------ ends of chains

    def _end(self, value: Any, label: str) -> None:
        """Take all of a value as read."""
        if isinstance(value, torch.Generator):
            self.generators.append(value)
        elif is_python_random(value):
            self.randoms.append(value)
        elif value is ABSENT or is_plain(value) or isinstance(value, _CLOSED):
            return
        elif isinstance(value, torch.nn.Module):
            self._end_module(value)
        elif isinstance(value, types.FunctionType):
            self._walk(value)
        elif isinstance(value, types.MethodType):
            self._end_method(value)
        elif isinstance(value, functools.partial):
            for part in (value.func, *value.args, *value.keywords.values()):
                self._end(part, label)
        elif isinstance(value, _CONTAINERS):
            self._end_container(value, label)
        elif isinstance(value, np.ndarray):
            self._end_array(value, label)
        elif not isinstance(value, type | types.ModuleType | types.BuiltinFunctionType):
            self._end_object(value)

    def _end_method(self, method: types.MethodType) -> None:
        owner, function = method.__self__, method.__func__
        if isinstance(owner, torch.nn.Module):
            self._end_module(owner)
        if isinstance(function, types.FunctionType):
            self._walk(function, owner)

    def _end_module(self, module: torch.nn.Module) -> None:
        if id(module) in self.modules:
            return
        self.modules[id(module)] = module
        forward = vars(module).get("forward", type(module).forward)
        if isinstance(forward, types.MethodType):
            self._end_method(forward)
        elif isinstance(forward, types.FunctionType):
            self._walk(forward, ABSENT if "forward" in vars(module) else module)
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            for hook in hooks.values():
                self._end(hook, "a hook")
        for child in module._modules.values():
            if child is not None:
                self._end_module(child)

    def _end_container(self, value: Any, label: str) -> None:
        if id(value) in self._ended or self._elements > _MOST_ELEMENTS:
            return
        self._ended.add(id(value))
        self._elements += len(value)
        self.objects[id(value)] = value
        if isinstance(value, dict):
            elements = list(value.values())
            self._tables.setdefault(
                (Whole, id(value)), Whole(value, lambda key: f"the item {key!r} of {label}")
            )
        else:
            elements = list(value)
            if not isinstance(value, tuple | frozenset):
                self._tables.setdefault(
                    (Contents, id(value)), Contents(value, lambda key: _element(key, label))
                )
        for element in elements:
            self._end(element, label)

    def _end_array(self, value: np.ndarray[Any, Any], label: str) -> None:
        if value.dtype != object and value.nbytes <= _LARGEST_ARRAY_BYTES:
            self._table(Array, value, lambda _: f"a NumPy array, {label},")

    def _end_object(self, value: Any) -> None:
        call = inspect.getattr_static(type(value), "__call__", None)
        if isinstance(call, types.FunctionType):
            self._walk(call, value)
        if not is_of_library(type(value)):
            self._opened.setdefault(id(value), value)

    def _open_all(self) -> None:
        """Look up the attributes that the code reads of anything, of what it passes on."""
        done: dict[int, frozenset[str]] = {}
        while True:
            names = frozenset(self._attributes)
            left = [v for key, v in list(self._opened.items()) if done.get(key) != names]
            if not left:
                return
            for value in left:
                new, done[id(value)] = names - done.get(id(value), frozenset()), names
                for name in sorted(new):
                    if _may_have(value, name):
                        found = self._attribute(value, name)
                        self._end(found, f"{type(value).__name__}.{name}")

    # ------------------------------------------------------------------ tables

    def _names_of(self, owner: Any, own: Mapping[str, Any]) -> Names:
        self.objects[id(owner)] = owner
        return self._table(Names, own, lambda key: f"{type(owner).__name__}.{key}")

    def _names_of_class(self, kind: type) -> Names:
        return self._table(Names, vars(kind), lambda key: f"{kind.__name__}.{key}")

    def _table(self, kind: type, holder: Any, named: Callable[[Any], str]) -> Any:
        key = (kind, id(holder))
        if key not in self._tables:
            self._tables[key] = kind(holder, named)
        return self._tables[key]

    def _noted(self, table: Any, key: Any, value: Any) -> Any:
        table.add(key, value)
        return value


def _may_have(value: Any, name: str) -> bool:
    """Tell whether an object has an attribute, or is asked for all that it does not have."""
    asks = hasattr(type(value), "__getattr__")
    return asks or inspect.getattr_static(value, name, ABSENT) is not ABSENT


def _bound_arguments(function: Any, args: Any, kwargs: Any) -> Mapping[str, Any]:
    try:
        return inspect.signature(function).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):  # no signature; or the call is wrong, as it will say itself
        return _NONE


def _cell(function: types.FunctionType, name: str) -> types.CellType | None:
    names: Sequence[str] = function.__code__.co_freevars
    return (function.__closure__ or ())[names.index(name)] if name in names else None


def _owner(function: types.FunctionType) -> str:
    return function.__qualname__.rpartition(".<locals>.")[0] or function.__qualname__


def _bound(value: Any, owner: Any) -> Any:
    """Return what looking up a class's `value` on an object gives, where that is a function."""
    if isinstance(value, staticmethod):
        return value.__func__
    if isinstance(value, classmethod):
        return value.__func__
    if isinstance(value, types.FunctionType) and owner is not None:
        return types.MethodType(value, owner)
    return value if callable(value) else ABSENT


def _element(key: Any, label: str) -> str:
    return label if key is None else f"element {key} of {label}"
