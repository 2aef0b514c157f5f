"""Objects that hold values by key: what they held when a step first met them, and what they hold.

Each kind of object is one class here. Nothing of the user's runs when an owner is copied or looked
up, except where a class looks its attributes up itself (`Object.asks`).

========================================  ==========================================================
a function's globals, a module's names    `Names`: by name
an object                                 `Object`: its dict, its slots; a Module's parameters,
                                          buffers and children by their names
a class                                   `ClassNames`: what it defines itself
a dict; a list, a tuple, a set, a deque   `Items`; `Elements`
a variable around a function              `Cell`
a function, a partial                     `Fields`: its code, defaults and attributes; its parts
a tensor                                  `Traits`: requires_grad, hooks, the data behind it
a NumPy array, array.array, bytearray     `Memory`
a ContextVar, os.environ                  `ContextValue`, `Environment`
========================================  ==========================================================
"""

from __future__ import annotations

import functools
import os
import sys
import types
from collections import deque
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch

from xla_dtensor.runtimes.premises.modules import traits_of
from xla_dtensor.runtimes.premises.values import ABSENT

__all__ = [
    "Cell",
    "ClassNames",
    "ContextValue",
    "Elements",
    "Environment",
    "Fields",
    "Items",
    "Memory",
    "Names",
    "Object",
    "Owner",
    "Traits",
    "attribute_of",
    "dict_of",
    "is_watched",
]

_look_up = object.__getattribute__
_REGISTRIES = ("_parameters", "_buffers", "_modules")
_UNWATCHED = ("jax", "jaxlib", "numpy", "xla_dtensor", "mesh_utils", "builtins")
_OPEN = frozenset(
    {"UserDict", "UserList", "Namespace", "Counter", "ChainMap", "OrderedDict", "defaultdict"}
    | {"Enum", "IntEnum", "StrEnum", "Flag", "IntFlag"}
)
_HEAP, _IMMUTABLE = 1 << 9, 1 << 8  # Py_TPFLAGS_HEAPTYPE, Py_TPFLAGS_IMMUTABLETYPE


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
        parent: The owner through which the step met it; None for none.
    """

    def __init__(self, holder: Any, label: str) -> None:
        self.holder, self.label, self.kind = holder, label, type(holder)
        self.snapshot: dict[Any, Any] = dict(self.entries())
        self.keys: list[Any] = list(self.keys_now())
        self.reads: dict[Any, bool] = {}
        self.is_whole = False
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


class _Single(Owner):
    """An owner of one value."""

    def keys_now(self) -> Iterable[Any]:
        return (None,)

    def named(self, key: Any) -> str:
        return self.label


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
        return f"{self.label}[{key!r}]"


class Elements(Owner):
    """What a list, a tuple, a deque or a set holds, by place."""

    def entries(self) -> Iterable[tuple[Any, Any]]:
        return enumerate(self._listed())

    def keys_now(self) -> Iterable[Any]:
        return range(len(self.holder))

    def look_up(self, key: Any) -> Any:
        elements = self._listed()
        return elements[key] if key < len(elements) else ABSENT

    def named(self, key: Any) -> str:
        return f"{self.label}[{key}]"

    def _listed(self) -> Any:
        """Return what can be indexed, past what a class of the user's does when it is walked."""
        if self.kind in (list, tuple, deque):
            return self.holder
        kinds: tuple[Any, ...] = (list, tuple, deque, set, frozenset)
        kind = next(kind for kind in kinds if issubclass(self.kind, kind))
        return list(kind.__iter__(self.holder))


class Cell(_Single):
    """A variable of the function around another one."""

    def look_up(self, key: Any) -> Any:
        try:
            return self.holder.cell_contents
        except ValueError:  # deleted, or not assigned yet
            return ABSENT

    def named(self, key: Any) -> str:
        return f"the variable {self.label!r}"


class Fields(Owner):
    """Attributes of an object of C."""

    def __init__(self, holder: Any, label: str, names: tuple[str, ...]) -> None:
        self._names = names
        super().__init__(holder, label)

    def keys_now(self) -> Iterable[Any]:
        return self._names

    def look_up(self, key: Any) -> Any:
        return attribute_of(self.holder, key)


class Traits(_Single):
    """What of a tensor, besides its values, a program depends on."""

    def look_up(self, key: Any) -> Any:
        payload = getattr(self.holder, "_local_tensor", None)
        return (*traits_of(self.holder), None if payload is None else id(payload))

    def named(self, key: Any) -> str:
        return f"requires_grad, a hook or the data of {self.label}"


class Memory(_Single):
    """The elements of an array."""

    def look_up(self, key: Any) -> Any:
        if isinstance(self.holder, np.ndarray):
            return self.holder.shape, self.holder.dtype.str, self.holder.tobytes()
        return bytes(self.holder)

    def named(self, key: Any) -> str:
        return f"the elements of {self.label}"


class ContextValue(_Single):
    """What a context variable is set to."""

    holder: ContextVar[Any]

    def look_up(self, key: Any) -> Any:
        return self.holder.get(ABSENT)


class Environment(Owner):
    """Variables of the process."""

    def keys_now(self) -> Iterable[Any]:
        return list(os.environ)

    def look_up(self, key: Any) -> Any:
        return os.environ.get(key, ABSENT)

    def named(self, key: Any) -> str:
        return f"os.environ[{key!r}]"


class Object(Owner):
    """An object of a class of Python.

    Attributes:
        asks: The names that its class looks up by code of its own: it is asked again.
    """

    def __init__(self, holder: Any, label: str) -> None:
        self.asks: set[str] = set()
        own = [vars(kind) for kind in type(holder).__mro__]
        self._slots = frozenset(
            name for names in own for name, value in names.items() if _is_slot(value)
        )
        self._is_module = issubclass(type(holder), torch.nn.Module)
        super().__init__(holder, label)

    def entries(self) -> Iterable[tuple[Any, Any]]:
        names = {name: attribute_of(self.holder, name) for name in self._slots}
        values = {name: value for name, value in names.items() if value is not ABSENT}
        for registry in self._registries():
            values.update(registry)
        values.update(dict_of(self.holder) or {})
        return values.items()

    def keys_now(self) -> Iterable[Any]:
        return [*(dict_of(self.holder) or ()), *(k for r in self._registries() for k in r)]

    def look_up(self, key: Any) -> Any:
        if key in self.asks:
            try:
                return getattr(self.holder, key, ABSENT)
            except Exception:  # The user's own lookup may raise anything.
                return ABSENT
        table = self.table(key)
        if table is not None and key in table:
            return table[key]
        return attribute_of(self.holder, key) if key in self._slots else ABSENT

    def table(self, key: Any) -> Mapping[Any, Any] | None:
        own = dict_of(self.holder)
        if key in self.asks or key in self._slots:
            return None
        for registry in self._registries() if own is None or key not in own else ():
            if key in registry:
                return registry
        return own

    def _registries(self) -> Iterable[dict[str, Any]]:
        own = (dict_of(self.holder) or {}) if self._is_module else {}
        return [own[name] for name in _REGISTRIES if name in own]


class ClassNames(Owner):
    """What a class defines itself.

    Args:
        holder: The class.
        label: Its name.
        replaced: What stood under a name that is another one while the step is watched.
    """

    def __init__(self, holder: type, label: str, replaced: Mapping[str, Any]) -> None:
        self._replaced = replaced
        self._table = vars(holder)
        super().__init__(holder, label)

    def entries(self) -> Iterable[tuple[Any, Any]]:
        values = {**vars(self.holder), **self._replaced}
        return [(key, value) for key, value in values.items() if value is not ABSENT]

    def keys_now(self) -> Iterable[Any]:
        return [key for key in vars(self.holder) if key != "__getattribute__"]

    def size(self) -> int:
        return len(vars(self.holder)) - ("__getattribute__" in vars(self.holder))

    def look_up(self, key: Any) -> Any:
        return vars(self.holder).get(key, ABSENT)

    def table(self, key: Any) -> Mapping[Any, Any] | None:
        return self._table


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


def _is_slot(value: Any) -> bool:
    return isinstance(value, types.MemberDescriptorType)


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
    if issubclass(kind, torch.Tensor | torch.optim.Optimizer | BaseException):
        return False
    if root in _UNWATCHED:
        return module.startswith("xla_dtensor.models")
    is_of_python = root in sys.stdlib_module_names and root != "__main__"
    return kind.__name__ in _OPEN if is_of_python else True
