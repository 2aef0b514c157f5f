"""Objects with attributes, and classes: what they hold, as a step met them and now.

See ``owners``. Attributes are read and written past the classes' own code, but for `Answers`.
"""

from __future__ import annotations

import array
import ctypes
import functools
import os
import sys
import threading
import types
from collections import deque
from collections.abc import Iterable, Mapping
from itertools import compress
from operator import is_
from typing import Any

import numpy as np
import torch

from xla_dtensor.runtimes.guards.libraries import guarded_names, is_module_of_users
from xla_dtensor.runtimes.guards.owners import Constant, Effect, Owner, in_order
from xla_dtensor.runtimes.guards.values import ABSENT

__all__ = [
    "OF_OPTIMIZERS",
    "WATCHING",
    "Answers",
    "ClassNames",
    "Fields",
    "Object",
    "attribute_of",
    "dict_of",
    "has_value_in_c",
    "is_watched",
    "slots_of",
]

_look_up = object.__getattribute__
WATCHING = ("__getattribute__", "__setattr__", "__delattr__")
_REGISTRIES = ("_parameters", "_buffers", "_modules")
OF_OPTIMIZERS = frozenset({"param_groups", "state"})  # which the trace looks after itself
_UNWATCHED = ("jax", "jaxlib", "numpy", "xla_dtensor", "mesh_utils", "builtins")
# Operators hold caches only, which fill as they are used; no_grad what it will put back.
_NOT_WATCHED = (
    *(torch.Tensor, torch._ops.OperatorBase, torch._ops.OpOverloadPacket),
    torch.utils._contextlib._NoParamDecoratorContextManager,  # pyright: ignore
)
_OPEN = frozenset(
    {"UserDict", "UserList", "Namespace", "Counter", "ChainMap", "OrderedDict", "defaultdict"}
    | {"WeakKeyDictionary", "WeakValueDictionary", "WeakSet"}
    | {"Enum", "IntEnum", "StrEnum", "Flag", "IntFlag"}
)
# Py_TPFLAGS_HEAPTYPE, Py_TPFLAGS_IMMUTABLETYPE, Py_TPFLAGS_MANAGED_DICT
_HEAP, _IMMUTABLE, _MANAGED = 1 << 9, 1 << 8, 1 << 4
_POINTER_BYTES = 8
_TORCH_FOLDER = f"{os.path.dirname(torch.__file__)}{os.sep}"
# Classes of C what whose objects hold is known by owners of other kinds.
_HELD_BY_OWNERS = (
    *(dict, list, tuple, set, deque, functools.partial, threading.local),
    *(np.ndarray, array.array, bytearray, memoryview, ctypes.c_int.__mro__[2]),
)


class Fields(Constant):
    """Attributes of an object of C."""

    def __init__(self, holder: Any, label: str, names: tuple[str, ...]) -> None:
        self._names = names
        super().__init__(holder, label)

    def keys_now(self) -> Iterable[Any]:
        return self._names

    def look_up(self, key: Any) -> Any:
        return attribute_of(self.holder, key)


class Answers(Constant):
    """What an object gives under names that its class looks up by code of its own."""

    def keys_now(self) -> Iterable[Any]:
        return ()

    def look_up(self, key: Any) -> Any:
        try:
            return getattr(self.holder, key, ABSENT)
        except Exception:  # The user's own lookup may raise anything.
            return ABSENT


class Object(Owner):
    """An object of a class of Python."""

    def __init__(self, holder: Any, label: str) -> None:
        self._slots = slots_of(type(holder))
        is_module = issubclass(type(holder), torch.nn.Module)
        self._registry_names = _REGISTRIES if is_module else ()
        is_optimizer = issubclass(type(holder), torch.optim.Optimizer)
        self._left_out = OF_OPTIMIZERS if is_optimizer else frozenset[str]()
        self._only = guarded_names(type(holder))
        super().__init__(holder, label)
        self._before = [(table, dict(table)) for table in self._registries()]
        self._own = list(dict_of(holder) or ())

    def entries(self) -> Iterable[tuple[Any, Any]]:
        names = {name: attribute_of(self.holder, name) for name in self._slots}
        values = {name: value for name, value in names.items() if value is not ABSENT}
        for registry in self._registries():
            values.update(registry)
        values.update(dict_of(self.holder) or {})
        return [(name, value) for name, value in values.items() if self._has(name)]

    def ignores(self, key: Any) -> bool:
        return self._only is not None and key not in self._only

    def _has(self, name: str) -> bool:
        return name not in self._left_out and not self.ignores(name)

    def named(self, key: Any) -> str:
        is_name = " " not in self.label
        return f"{self.label}.{key}" if is_name else f"the attribute {key!r} of {self.label}"

    def keys_now(self) -> Iterable[Any]:
        own = [name for name in dict_of(self.holder) or () if self._has(name)]
        slots = [name for name in self._slots if attribute_of(self.holder, name) is not ABSENT]
        return [*own, *slots, *(key for registry in self._registries() for key in registry)]

    def look_up(self, key: Any) -> Any:
        table = self.table(key)
        if table is not None and key in table:
            return table[key]
        return attribute_of(self.holder, key) if key in self._slots else ABSENT

    def table(self, key: Any) -> Mapping[Any, Any] | None:
        if key in self._slots:
            return None
        own = dict_of(self.holder)
        if own is None or key not in own:
            for registry in self._registries():
                if key in registry:
                    return registry
        return own

    def put(self, key: Any, value: Any) -> None:
        self._put(key, "", value)

    def effects(self) -> list[Effect]:
        all_effects: list[Effect] = []
        for key in dict.fromkeys((*self.changes(), *(self.writes or ()))):
            tables = zip(self._registry_names, self._registries(), strict=False)
            place = next((name for name, table in tables if key in table), "")
            put = functools.partial(self._put, key, place)
            all_effects.append(Effect(put, self.look_up(key), self.named(key)))
        return all_effects

    def held_before(self) -> list[Any]:
        writes, self.writes = self.writes, None  # which are effects
        values = super().held_before()
        self.writes = writes
        return values

    def rewind(self) -> None:
        in_registries = {key for _, registry in self._before for key in registry}
        for key in self.changes():
            value = ABSENT if key in in_registries else self.snapshot.get(key, ABSENT)
            self._put(key, "", value)
        own = dict_of(self.holder) or {}
        for key in [key for key in in_registries if key in own and key not in self._own]:
            del own[key]
        in_order(own, self._own)
        for table, contents in self._before:
            if list(table) != list(contents) or not all(
                map(is_, table.values(), contents.values())
            ):
                table.clear()
                table.update(contents)

    def _put(self, key: str, place: str, value: Any) -> None:
        """Assign a value in one of a Module's registries, or in the object itself."""
        if key in self._slots:
            if value is not ABSENT:
                object.__setattr__(self.holder, key, value)
            elif attribute_of(self.holder, key) is not ABSENT:
                object.__delattr__(self.holder, key)
            return
        own: Any = dict_of(self.holder)
        for name in ("", *self._registry_names):
            table = own if not name else own.get(name, {})
            if name == place and value is not ABSENT:
                table[key] = value
            else:
                table.pop(key, None)

    def _registries(self) -> list[dict[str, Any]]:
        own = dict_of(self.holder) or {}
        return [own[name] for name in self._registry_names if name in own]


class ClassNames(Owner):
    """What a class defines itself.

    Args:
        holder: The class.
        label: Its name.
        replaced: What stood under the names that are others while the step is watched.
    """

    def __init__(self, holder: type, label: str, replaced: Mapping[str, Any]) -> None:
        self._replaced = replaced
        self._table = vars(holder)
        super().__init__(holder, label)

    def entries(self) -> Iterable[tuple[Any, Any]]:
        values = {**vars(self.holder), **self._replaced}
        values |= {key: self.look_up(key) for key in vars(self.holder) if self._is_marked(key)}
        return [(key, value) for key, value in values.items() if value is not ABSENT]

    def keys_now(self) -> Iterable[Any]:
        return [key for key in vars(self.holder) if key not in WATCHING]

    def size(self) -> int:
        names = vars(self.holder)
        return len(names) - sum(name in names for name in WATCHING)

    def changes(self) -> list[Any]:
        return [key for key in super().changes() if not key.startswith("__")]

    def put(self, key: Any, value: Any) -> None:
        if value is not ABSENT:
            type.__setattr__(self.holder, key, value)
        elif key in vars(self.holder):
            type.__delattr__(self.holder, key)

    def look_up(self, key: Any) -> Any:
        value = vars(self.holder).get(key, ABSENT)
        if not self._is_marked(key):
            return value
        function, bases = _unmarked(value), self.holder.__mro__[1:]
        inherited = next((vars(base)[key] for base in bases if key in vars(base)), None)
        return ABSENT if function is _unmarked(inherited) else function

    def table(self, key: Any) -> Mapping[Any, Any] | None:
        return None if self._is_marked(key) else self._table

    def name(self, key: Any) -> Any:
        return id(self.holder), key  # whose table is another object for each look

    def _is_marked(self, key: Any) -> bool:
        """Tell whether a function of torch's has torch.compile's mark."""
        value = vars(self.holder).get(key)
        return _unmarked(value) is not value


def _unmarked(value: Any) -> Any:
    """Return a function of torch's past the wrapper by which torch.compile keeps off it.

    torch puts it around functions of its optimizers when torch.compile is used first, in a class
    that inherits one as well. It does what the function does. What a user wraps stays another one.
    """
    while type(value) is types.FunctionType and value.__dict__.get("_torchdynamo_disable"):
        inner = value.__dict__.get("_torchdynamo_orig_callable")
        functions = [
            function for function in (value, inner) if type(function) is types.FunctionType
        ]
        if len(functions) < 2 or not all(map(_is_of_torch, functions)):
            break
        value = inner
    return value


def _is_of_torch(function: types.FunctionType) -> bool:
    return function.__code__.co_filename.startswith(_TORCH_FOLDER)


def dict_of(value: Any) -> dict[str, Any] | None:
    """Return an object's own attributes; None where it has no dict."""
    own = attribute_of(value, "__dict__")
    return own if type(own) is dict else None


def attribute_of(value: Any, name: str) -> Any:
    """Look an attribute up past the class's own lookup."""
    try:
        return _look_up(value, name)
    except AttributeError:
        return ABSENT


@functools.lru_cache(maxsize=10_000)
def slots_of(kind: type) -> frozenset[str]:
    """Return the names of a class's slots; a class of C has none, as its values are made anew."""
    classes = (base for base in kind.__mro__ if _is_of_python(base))
    names = [entry for base in classes for entry in vars(base).items()]
    is_slot = (isinstance(attribute, types.MemberDescriptorType) for _, attribute in names)
    return frozenset(name for name, _ in compress(names, is_slot)) - {"__dict__"}


@functools.lru_cache(maxsize=10_000)
def has_value_in_c(kind: type) -> bool:
    """Tell whether a class's objects have a value that no attribute, slot or element shows.

    Args:
        kind: The class.

    Example:
        >>> class Meters(float): ...
        >>> class Point: ...
        >>> has_value_in_c(Meters), has_value_in_c(Point), has_value_in_c(torch.nn.Linear)
        (True, False, False)
    """
    if issubclass(kind, _HELD_BY_OWNERS):
        return False
    return not all(_is_of_python(base) for base in kind.__mro__ if base is not object)


def _is_of_python(kind: type) -> bool:
    """Tell whether a class adds nothing but slots, a dict and weak references to its base."""
    base, flags = kind.__base__, kind.__flags__
    if base is None or not flags & _HEAP or flags & _IMMUTABLE:
        return False
    num_pointers = sum(isinstance(v, types.MemberDescriptorType) for v in vars(kind).values())
    num_pointers += 0 < kind.__weakrefoffset__ != base.__weakrefoffset__
    num_pointers += kind.__dictoffset__ != base.__dictoffset__ and not flags & _MANAGED
    return kind.__basicsize__ == base.__basicsize__ + num_pointers * _POINTER_BYTES


@functools.lru_cache(maxsize=10_000)
def is_watched(kind: type) -> bool:
    """Tell whether reads of a class's objects are noted: it is Python's code, and the user's.

    Args:
        kind: The class.

    Example:
        >>> import decimal
        >>> is_watched(torch.nn.Linear), is_watched(decimal.Decimal), is_watched(torch.Tensor)
        (True, False, False)
    """
    flags, module = kind.__flags__, str(kind.__module__)
    root = module.partition(".")[0]
    if not flags & _HEAP or flags & _IMMUTABLE:
        return False
    if issubclass(kind, _NOT_WATCHED):
        return False
    if root in _UNWATCHED:
        return guarded_names(kind) is not None or is_module_of_users(module)
    is_of_python = root in sys.stdlib_module_names and root != "__main__"
    return kind.__name__ in _OPEN if is_of_python else True
