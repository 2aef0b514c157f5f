"""What a step has read so far, and what follows from the reading of a value.

A value that is read is *met*: what code of C may do with it unseen counts as read, and its parts
are met in turn. A container is read whole, a tensor with its hooks, a function with its defaults
and the variables around it once it runs. Of an object nothing is read by that: its class is watched
(``watches``).
"""

from __future__ import annotations

import array
import contextvars
import ctypes
import enum
import functools
import gc
import threading
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from xla_dtensor.core.errors import CompileError
from xla_dtensor.runtimes.guards.lent import Lending
from xla_dtensor.runtimes.guards.libraries import is_library_file, is_of_library
from xla_dtensor.runtimes.guards.objects import (
    Fields,
    Object,
    dict_of,
    is_watched,
)
from xla_dtensor.runtimes.guards.owners import (
    Cell,
    ContextValue,
    Elements,
    Globals,
    Hooks,
    Items,
    Memo,
    Memory,
    Names,
    Owner,
    Traits,
)
from xla_dtensor.runtimes.guards.uses import ADDS, Use, loads_of
from xla_dtensor.runtimes.guards.values import ABSENT, is_plain
from xla_dtensor.runtimes.host_work.python_random import is_python_random
from xla_dtensor.runtimes.new_garbage import (
    KnownObjects,
    tracked_ids,
)

_MOST_OWNERS = 200_000
_DICTS = (dict, OrderedDict, defaultdict, types.MappingProxyType)
_HOOKS = tuple(f"._{when}_hooks" for when in ("forward", "forward_pre", "backward", "backward_pre"))
_LISTS = (list, tuple, deque, set, frozenset)
_BY_ITEMS = (dict, OrderedDict, defaultdict, list, tuple, deque, set)
_WALKERS = (
    *(zip, map, enumerate, reversed, filter),
    *(type({}.keys()), type({}.values()), type({}.items())),
)
_BOUND = (types.BuiltinMethodType, types.MethodWrapperType)
_BUFFERS = (np.ndarray, array.array, bytearray, memoryview, ctypes.c_int.__mro__[2])
_ADDED_TO = (list, deque, set)
_FUNCTION = ("__code__", "__defaults__", "__kwdefaults__")
_PARTIAL = ("func", "args", "keywords")
_CALLED = (types.FunctionType, types.MethodType, functools.partial, functools._lru_cache_wrapper)


__all__ = ["Reads"]


class Reads:
    """The owners that a step has met.

    Args:
        meets: Is told of each generator of random numbers and each iterator that is older than the
            step, before the step can draw or take from it, and of an optimizer whenever code
            other than a library's is about to read its settings or its state.
        lending: The numbers that it is lent.
    """

    def __init__(self, meets: Callable[[Any], None], lending: Lending) -> None:
        self._meets, self._lending = meets, lending
        self._owners: dict[Any, Owner] = {}
        self._queue: list[tuple[Any, str, Owner | None]] = []
        self._before: KnownObjects | None = None
        self._functions: dict[types.CodeType, list[types.FunctionType]] = defaultdict(list)
        self._started: set[types.CodeType] = set()

    def _object(self, holder: Any, of: Owner | None = None) -> Owner:
        raise NotImplementedError

    def _class(self, kind: type) -> None:
        raise NotImplementedError

    def _module(self, module: types.ModuleType) -> None:
        raise NotImplementedError

    def _globals(self, names: dict[str, Any]) -> Owner:
        owner = self._owners.get((Globals, id(names)))
        if owner is None:
            owner = self._owner(names, Globals, str(names.get("__name__", "__main__")))
            owner.writes = set()
        return owner

    def _owner(
        self, holder: Any, make: Callable[..., Owner], label: str, *more: Any, of: Any = None
    ) -> Owner:
        """Return the owner that an object is; it is copied when it comes up first.

        Args:
            holder: The object.
            make: The kind of owner.
            label: What messages call it.
            *more: Further arguments of the kind.
            of: The owner through which it was met.
        """
        key = make, id(holder)
        owner = self._owners.get(key)
        if owner is None:
            if len(self._owners) > _MOST_OWNERS:
                raise CompileError(
                    f"The step reads more than {_MOST_OWNERS} objects of Python, the last one "
                    f"{label}. A compiled step compares on each call what it has read. Hand it a "
                    "tensor or a NumPy array in place of lists and dicts of this size."
                )
            owner = self._owners[key] = make(holder, label, *more)
            owner.parent = of
            self._lending.meet(owner)
        return owner

    def _read(self, owner: Owner, key: Any) -> None:
        """Note that a value was read, and what follows from that."""
        if owner.reads.get(key):
            return
        owner.reads[key] = True
        value = owner.snapshot.get(key, ABSENT)
        if value is not ABSENT:
            self._queue.append((value, owner.named(key), owner))

    def _read_whole(self, owner: Owner) -> None:
        if not owner.is_whole:
            owner.is_whole = True
            for key in list(owner.snapshot):
                self._read(owner, key)
                if isinstance(owner, Items) and not is_plain(key):
                    self._meet(key, f"a key of {owner.label}", owner)

    def _load(self, owner: Owner, key: Any, uses: Sequence[Use | None], frame: Any = None) -> None:
        """Note that a value was loaded, which is then used in some ways."""
        if owner.reads.get(key):
            return
        value = owner.snapshot.get(key, ABSENT)
        parts = self._parts(value, uses, frame)
        if parts is None:
            self._read(owner, key)
            return
        owner.reads[key] = False
        is_bag = type(value) is types.SimpleNamespace
        make = Object if is_bag else Items if isinstance(value, dict) else Elements
        part = self._owner(value, make, owner.named(key), of=owner)
        part.is_searched |= Use("search") in uses
        for part_key, then in parts:
            if then == Use("write", part_key):
                part.stores.add(part_key)
            elif then == Use("search"):
                part.reads.setdefault(part_key, False)
            else:
                self._load(part, part_key, [then], frame)

    def _parts(
        self, value: Any, uses: Sequence[Use | None], frame: Any
    ) -> list[tuple[Any, Use | None]] | None:
        """Return the keys that are read of a container, with their uses; None for all of it."""
        is_bag = type(value) is types.SimpleNamespace
        if not is_bag and type(value) not in _BY_ITEMS:
            return None
        contents: Any = value
        keys: list[tuple[Any, Use | None]] = []
        for use in uses:
            kind, key, then = use or Use("all")
            if kind == "search" and not is_bag and all(map(_is_compared_alone, contents)):
                places = () if isinstance(value, dict) else range(len(contents))
                keys += [(place, use) for place in places]
                continue
            if kind in ("local", "write local") and frame is not None and key in frame.f_locals:
                kind = "item" if kind == "local" else "write"
                key = frame.f_locals[key]
            is_number = type(key) is int and key >= 0
            fits = {
                "attribute": is_bag,
                "write": not is_bag,
                "write local": not is_bag,
                "assign": is_bag,
                "get": isinstance(value, dict),
                "item": is_number if isinstance(value, list | tuple) else isinstance(value, dict),
            }
            if not fits.get(kind) or not is_plain(key):
                return None
            if kind not in ("write", "write local", "assign"):
                keys.append((key, then))
            elif kind == "write" and (isinstance(value, dict) or is_number) and key is not None:
                keys.append((key, Use("write", key)))
            elif kind != "assign" and (key is not None or not isinstance(value, list)):
                keys.append((ABSENT, Use("write", ABSENT)))
        return keys

    def _meet(self, value: Any, label: str, of: Owner | None = None) -> None:
        self._queue.append((value, label, of))

    def _drain(self) -> None:
        while self._queue:
            self._value(*self._queue.pop())

    def _value(self, value: Any, label: str, of: Owner | None) -> None:
        """Note a value that the step read: what it may do with it unseen counts as read."""
        kind = type(value)
        if _has_no_parts(value):
            return
        if isinstance(value, torch.Tensor):
            self._tensor(value, label, of)
        elif kind in _DICTS:
            make = Hooks if label.endswith(_HOOKS) else Items
            self._read_whole(self._owner(value, make, label, of=of))
        elif kind in _LISTS:
            self._read_whole(self._owner(value, Elements, label, of=of))
        elif kind is types.FunctionType:
            self._function(value, of)
        elif kind is types.MethodType:
            self._meet(value.__self__, label, of)
            self._meet(value.__func__, label, of)
        elif isinstance(value, _BOUND) and not isinstance(value.__self__, types.ModuleType):
            self._bound(value, label, of)
        elif isinstance(value, staticmethod | classmethod):
            self._meet(value.__func__, label, of)
        elif isinstance(value, property):
            self._meet(value.fget, label, of)
        elif isinstance(value, functools.partial):
            self._read_whole(self._owner(value, Fields, label, _PARTIAL, of=of))
        elif isinstance(value, types.ModuleType):
            self._module(value)
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, weakref.ref):
            self._meet(weakref.ref.__call__(value), label, of)
        elif kind in weakref.ProxyTypes:  # which look like iterators
            self._meet(value.__repr__.__self__, label, of)
        elif kind is contextvars.ContextVar:
            self._read_whole(self._owner(value, ContextValue, label, of=of))
        elif isinstance(value, np.ndarray) and value.dtype.hasobject:
            self._read_whole(self._owner(value, Elements, label, of=of))
        elif isinstance(value, _BUFFERS):
            self._read_whole(self._owner(value, Memory, label, of=of))
            if is_watched(kind):
                self._object(value, of)
        elif kind is types.SimpleNamespace:
            self._read_whole(self._owner(value, Object, label, of=of))
        elif isinstance(value, torch.Generator) or is_python_random(value):
            self._tell(value)
        elif isinstance(value, Iterator) and is_of_library(kind):
            self._tell(value)
            for referent in gc.get_referents(value) if isinstance(value, _WALKERS) else ():
                self._meet(referent, label, of)
        elif isinstance(value, functools._lru_cache_wrapper):
            for referent in gc.get_referents(value):
                if type(referent) is dict and referent is not vars(value):
                    self._read_whole(self._owner(referent, Memo, label, of=of))
                else:
                    self._meet(referent, label, of)
        elif isinstance(value, _WALKERS):
            for referent in gc.get_referents(value):
                self._meet(referent, label, of)
        elif isinstance(value, threading.local):
            self._read_whole(self._owner(vars(value), Names, label, of=of))
        elif is_watched(kind):
            self._object(value, of)

    def _tell(self, source: Any) -> None:
        """Tell of what a step takes from where that is older than the step."""
        if id(source) not in self._recent():
            self._meets(source)

    def _bound(self, method: Any, label: str, of: Owner | None) -> None:
        """Note a method of C: what it does to its object is not seen."""
        holder = method.__self__
        if method.__name__ in ADDS and isinstance(holder, _ADDED_TO):
            self._owner(holder, Elements, label, of=of)  # which reads nothing
        else:
            self._meet(holder, label, of)

    def _tensor(self, tensor: torch.Tensor, label: str, of: Owner | None) -> None:
        self._read(self._owner(tensor, Traits, label, of=of), None)
        own = dict_of(tensor)
        is_payload = str(type(tensor).__module__).startswith("xla_dtensor.runtimes.")
        if own is not None and not is_payload:
            self._read_whole(self._owner(own, Names, label, of=of))

    def _function(self, function: types.FunctionType, of: Owner | None = None) -> None:
        key = Fields, id(function)
        is_library = is_library_file(function.__code__.co_filename)
        if key in self._owners or (is_library and not function.__closure__):
            return
        owner = self._owner(function, Fields, function.__qualname__, _FUNCTION, of=of)
        around = function.__qualname__.rpartition(".<locals>.")[0] or function.__qualname__
        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            self._owner(cell, Cell, f"the variable {name!r} of {around}", of=owner)
        if is_library:
            self._decorator(function)
            return
        self._functions[function.__code__].append(function)
        own = function.__dict__
        self._read_whole(self._owner(own, Names, function.__qualname__, of=owner))
        if function.__code__ in self._started:
            self._activate(function)

    def _decorator(self, function: types.FunctionType) -> None:
        """Note a function of a library's that may call one of the user's."""
        self._read_whole(self._owners[Fields, id(function)])
        for cell in function.__closure__ or ():
            owner = self._owners[Cell, id(cell)]
            owner.reads[None] = True
            contents = owner.snapshot[None]
            if isinstance(contents, _CALLED):
                self._meet(contents, owner.label, owner)

    def _activate(self, function: types.FunctionType) -> None:
        """Note what a function reads that runs: its defaults, the variables around it."""
        owner = self._owners[Fields, id(function)]
        if owner.is_whole:
            return
        self._read_whole(owner)
        loads = loads_of(function.__code__)
        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            if name != "__class__":
                owner, is_stored = self._owners[Cell, id(cell)], name in loads.stores
                owner.stores |= {None} if is_stored else set()
                uses = loads.cells.get(name, [] if is_stored else [None])
                if uses:
                    self._load(owner, None, uses)

    def _recent(self) -> set[int]:
        """Return the ids of what came to be since the step began."""
        return tracked_ids(self._before)


def _is_compared_alone(value: Any) -> bool:
    """Tell whether to compare a value reads nothing else: a plain one, or a class."""
    return is_plain(value) or (isinstance(value, type) and type(value).__eq__ is type.__eq__)


def _has_no_parts(value: Any) -> bool:
    if isinstance(value, enum.Enum):
        return False
    if type(value) in (tuple, frozenset):
        return all(map(_has_no_parts, value))
    return is_plain(value) or value is ABSENT
