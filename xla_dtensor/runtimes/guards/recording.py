"""What a step reads of Python, noted while it runs.

::

    recording = Recording(step, arguments)
    with recording:
        step(*arguments)
    effects = recording.effects()        what the step changed in Python
    guards = recording.guards()          what was read, as it was before the step changed anything

How reads are seen:

==========================  ========================================================================
attributes of objects       the classes met look attributes up by a function of ours for so long
attributes of modules       so does a module of the user's, whose class is another one for so long
globals, variables around   the code of each function that starts (``sys.monitoring``; a profiler on
                            Python 3.11) says which it loads
methods, special ones too   by the function that starts, which stands under a name of a class
what C holds or walks       a container, a class, a partial counts as read whole as soon as it is
                            read, unless the next instructions take one item (``uses``)
==========================  ========================================================================

An object is copied when the step first meets it: as a global of code that starts, as an attribute
or an element of what it had met before, as an argument. Nothing can be written to before that, so
what differs from the copies is what the step wrote, or can be put back where its trace fails.

Invariants:

* What the step could read without being seen counts as read.
* What came to be while the step ran is no state of before: it guards nothing.
* Code of libraries (Python's, torch's, JAX's, NumPy's, this package's) is not watched, but what it
  reads of the user's objects is.
* What another thread assigns meanwhile to an attribute or a global is not taken for the step's.
"""

from __future__ import annotations

import array
import builtins
import collections
import contextvars
import copy
import ctypes
import enum
import functools
import gc
import importlib.util
import os
import sys
import threading
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.modules import module as torch_module

from xla_dtensor.core.errors import CompileError
from xla_dtensor.runtimes.guards.comparing import Guards
from xla_dtensor.runtimes.guards.libraries import is_library_file, is_of_library
from xla_dtensor.runtimes.guards.owners import (
    OF_OPTIMIZERS,
    WATCHING,
    Answers,
    Cell,
    ClassNames,
    ContextValue,
    Effect,
    Elements,
    Environment,
    Fields,
    Globals,
    Items,
    Memory,
    Names,
    Object,
    Owner,
    Traits,
    dict_of,
    is_watched,
)
from xla_dtensor.runtimes.guards.uses import ADDS, Use, loads_of, use_behind
from xla_dtensor.runtimes.guards.values import ABSENT, Sighting, is_plain
from xla_dtensor.runtimes.host_work.python_random import is_python_random
from xla_dtensor.runtimes.new_garbage import (
    old_objects_aside,
    show_all_objects,
    tracked_objects,
)

__all__ = ["Recording"]

_MOST_OWNERS = 200_000
_DICTS = (dict, OrderedDict, defaultdict, types.MappingProxyType)
_LISTS = (list, tuple, deque, set, frozenset)
_BY_ITEMS = (dict, OrderedDict, defaultdict, list, tuple, deque, set)
_WALKERS = (
    *(zip, map, enumerate, reversed, filter, functools._lru_cache_wrapper),
    *(type({}.keys()), type({}.values()), type({}.items())),
)
_BOUND = (types.BuiltinMethodType, types.MethodWrapperType)
_BUFFERS = (np.ndarray, array.array, bytearray, memoryview, ctypes.c_int.__mro__[2])
_ADDED_TO = (list, deque, set)
_FUNCTION = ("__code__", "__defaults__", "__kwdefaults__")
_PARTIAL = ("func", "args", "keywords")
_MODULE_FILE = torch_module.__file__
_ENVIRONMENT = (os.__file__, "<frozen os>", "<frozen _collections_abc>")
_LOOKUP, *_WRITES = WATCHING
_CALLED = (types.FunctionType, types.MethodType, functools.partial, functools._lru_cache_wrapper)
_STATE = ("__reduce__", "__reduce_ex__", "__getstate__")  # for copies, of all attributes
_WRITES_PAST_US = frozenset({*_WRITES, "__set__", "__delete__"})
_IMPORTS = frozenset({"import_module", "__import__"})
_TOOLS = (4, 3, 5, 2, 1, 0)


class Recording:
    """Notes what a step reads, inside of a ``with`` block.

    Args:
        step: The step.
        arguments: What it is called with.
        meets: Is told of each generator of random numbers and each iterator that is older than the
            block, before the step can draw or take from it.
    """

    def __init__(
        self,
        step: Any,
        arguments: Iterable[Any] = (),
        meets: Callable[[Any], None] = lambda value: None,
    ) -> None:
        self._meets = meets
        self._roots = (step, *(a for a in arguments if not isinstance(a, torch.Tensor)))
        self._owners: dict[Any, Owner] = {}
        self._queue: list[tuple[Any, str, Owner | None]] = []
        self._aside = old_objects_aside()
        self._before: set[int] | None = None
        self._new: set[int] = set()
        self._functions: dict[types.CodeType, list[types.FunctionType]] = defaultdict(list)
        self._methods: dict[types.CodeType, list[tuple[type, str]]] = defaultdict(list)
        self._started: set[types.CodeType] = set()
        self._inner: set[types.CodeType] = set()
        # By class and name, what was there before, ABSENT for nothing.
        self._watched: dict[tuple[type, str], Any] = {}
        self._twins: list[tuple[Any, Any]] = []
        self._known: set[type] = set()
        self._unseen: set[type] = set()  # whose attributes are assigned past us
        self._modules: list[tuple[types.ModuleType, type]] = []
        self._is_busy = False
        self._monitoring: Any = getattr(sys, "monitoring", None)
        self._stored: list[Any] = []  # by the step
        self._takes_all = self._takes_classes = False
        self._written_past_us: set[str] = set()
        self._thread = threading.get_ident()

    def begin(self) -> None:
        """Take all that comes to be from now on for the step's own; else the block begins that."""
        self._before = tracked_objects()

    def __enter__(self) -> Recording:
        self._aside.__enter__()
        if self._before is None:
            self.begin()
        self._watch(torch.nn.Module)
        self._start()
        for root in self._roots:
            self._meet(root, "an argument")
        self._drain()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_busy = True
        try:
            self._read_alike()
            self._drain()
        finally:
            self._stop()
            self._new = self._recent()
            self._aside.__exit__(None, None, None)
            for (kind, name), before in self._watched.items():
                if before is ABSENT:
                    type.__delattr__(kind, name)
                else:
                    type.__setattr__(kind, name, before)
            for module, kind in self._modules:
                module.__class__ = kind

    def effects(self, is_input: Callable[[Any], bool] = lambda array: False) -> list[Effect]:
        """Return what the step has changed; after the block.

        Args:
            is_input: Tells whether the elements of an array are written by the program itself.
        """
        found: list[Effect] = []
        for owner in self._old():
            if isinstance(owner, Object):
                owner.stores |= self._written_past_us & owner.snapshot.keys()
            self._stored += owner.held_before()
            if not (isinstance(owner.holder, np.ndarray) and is_input(owner.holder)):
                effects = owner.effects()
                owner.is_changed = bool(effects)
                found += effects
        self._stored += [effect.value for effect in found]
        return found

    def rewind(self) -> None:
        """Make everything what it was before the step; after the block."""
        # The registries of a Module may have been met when the step had written to it already.
        for owner in reversed(self._old()):
            owner.rewind()

    def sightings(self) -> list[Sighting]:
        """Return each name of a tensor with the one that was found there, and what is there now.

        A tensor that has several names is there several times; one name is there once.
        """
        owners = [owner for owner in self._old() if not issubclass(owner.kind, tuple)]
        every = [(owner, each) for owner in owners for each in owner.sightings()]
        # What a container holds that is no longer there, is under no name.
        gone = {id(each.found) for _, each in every if each.found is not each.now}
        kept = [each for owner, each in every if id(owner.holder) not in gone]
        named = {each.name: each for whole in kept for each in whole.flat()}
        return [each for each in named.values() if isinstance(each.found, torch.Tensor)]

    def older(self) -> set[int]:
        """Return the ids of the objects that the step met and that there were before it."""
        return {id(owner.holder) for owner in self._old()}

    def guards(self) -> Guards:
        """Return what was read; after the block."""
        owners = self._old()
        kept = [o for o in owners if o.reads or o.is_whole or o.is_changed or isinstance(o, Object)]
        # Guards forget what was not read, which a rewind needs.
        old = set(map(id, owners))
        each = self._owners.items()
        self._owners = {key: copy.copy(owner) for key, owner in each if id(owner) in old}
        for owner in kept:
            owner.parent = None
        return Guards(kept, _parts_of(self._stored))

    def _old(self) -> list[Owner]:
        """Return the owners that there were before the step ran."""
        is_new = functools.cache(self._is_new)
        return [each for each in self._owners.values() if not is_new(each)]

    def _recent(self) -> set[int]:
        """Return the ids of what came to be since the step began."""
        return tracked_objects() - (self._before or set())

    def _is_new(self, owner: Owner) -> bool:
        """Tell whether an owner came to be while the step ran."""
        if isinstance(owner, Environment):
            return False
        if owner.parent is not None and not _tells_its_age(owner):
            return self._is_new(owner.parent)
        return id(owner.holder) in self._new

    # ------------------------------------------------------------------ code that starts

    def _start(self) -> None:
        # The collector calls these at any time; what they read is not the step's.
        self._started.update(f.__code__ for f in gc.callbacks if isinstance(f, types.FunctionType))
        monitoring = self._monitoring
        if monitoring is None:
            self._profile = sys.getprofile()
            sys.setprofile(self._on_event)
            return
        self._tool = next(tool for tool in _TOOLS if monitoring.get_tool(tool) is None)
        monitoring.use_tool_id(self._tool, "xla_dtensor")
        event = monitoring.events.PY_START
        monitoring.register_callback(self._tool, event, self._on_start)
        monitoring.set_events(self._tool, event)
        monitoring.restart_events()

    def _stop(self) -> None:
        if self._monitoring is None:
            sys.setprofile(self._profile)
            return
        self._monitoring.set_events(self._tool, 0)
        event = self._monitoring.events.PY_START
        self._monitoring.register_callback(self._tool, event, None)  # which would keep us alive
        self._monitoring.free_tool_id(self._tool)

    def _on_event(self, frame: types.FrameType, event: str, argument: Any) -> None:
        if event == "call":
            self._on_code(frame.f_code, frame)

    def _on_start(self, code: types.CodeType, offset: int) -> Any:
        if threading.get_ident() != self._thread:
            return None
        return None if self._on_code(code, sys._getframe(1)) else self._monitoring.DISABLE

    def _on_code(self, code: types.CodeType, frame: types.FrameType) -> bool:
        """Note what code reads; return whether to be told again when it starts."""
        if self._is_busy:  # What runs is ours.
            return True
        file = code.co_filename
        if file in _ENVIRONMENT and code.co_qualname == "_Environ.__getitem__":
            self._read_variable(frame)
            return True
        if code not in self._started and not is_library_file(_file_of(frame, file)):
            if _is_imported(frame):
                return True
            self._started.add(code)
            self._code(code, frame.f_globals)
            self._drain()
        return False

    def _read_variable(self, frame: types.FrameType | None) -> None:
        key = None if frame is None else frame.f_locals["key"]
        while frame is not None and frame.f_code.co_filename in _ENVIRONMENT:
            frame = frame.f_back
        if frame is not None and not is_library_file(frame.f_code.co_filename):
            owner = self._owners.setdefault(Environment, Environment(os.environ, "os.environ"))
            self._read(owner, key)

    def _code(self, code: types.CodeType, names: dict[str, Any]) -> None:
        self._inner.update(each for each in code.co_consts if isinstance(each, types.CodeType))
        self._past_us(code)
        loads = loads_of(code)
        owner = self._globals(names)
        for name, uses in loads.names.items():
            self._load(owner, name, uses)
        for name in loads.names.keys() - owner.snapshot.keys():
            self._load(self._globals(builtins.__dict__), name, loads.names[name])
        if owner.writes is not None:
            owner.writes |= loads.stores
        if "globals" in code.co_names:
            self._read_whole(owner)
            owner.writes = None
        # ``super()`` loads the class around, too.
        if loads.is_of_class or any(use is not None for use in loads.cells.get("__class__", ())):
            self._take_classes()
        self._import(loads.imports, names)
        if _IMPORTS & {*code.co_names} or {"sys", "modules"} <= {*code.co_names}:
            for module in list(sys.modules.values()):
                self._meet(module, "a module")
        for function in self._functions.get(code, ()):
            self._activate(function)
        for kind, name in self._methods.get(code, ()):
            self._read(self._class_owner(kind), name)
            if isinstance(vars(kind).get(name), classmethod):
                self._classes_below(kind)
        for name in loads.supers:
            for kind in [each for each in self._known if name in vars(each)]:
                self._read(self._class_owner(kind), name)
        self._drain()
        if {*code.co_freevars} - {"__class__"}:
            self._closures(code)

    def _closures(self, code: types.CodeType) -> None:
        """Meet the functions that run a code, if none of them is known: C holds them."""
        if code in self._functions or code in self._inner:
            return
        show_all_objects()
        for function in gc.get_referrers(code):
            if isinstance(function, types.FunctionType):
                self._function(function)

    def _take_classes(self) -> None:
        """Take the classes of all objects for read: code looks their attributes up."""
        if not self._takes_classes:
            self._takes_classes = True
            self._classes_below(object)

    def _classes_below(self, base: type) -> None:
        objects = [each for each in self._owners.values() if isinstance(each, Object)]
        for kind in {each.kind for each in objects if issubclass(each.kind, base)}:
            self._class(kind)

    def _past_us(self, code: types.CodeType) -> None:
        """Take more for read and written where code looks attributes up past the classes."""
        names = {*code.co_names}
        if _LOOKUP in names and not code.co_name.startswith("__getattr"):
            self._take_all()
        if names & {"__delattr__", "__delete__"} and code.co_name != "__delattr__":
            self._take_all()
        if names & _WRITES_PAST_US:
            self._written_past_us |= {*names, *(c for c in code.co_consts if type(c) is str)}
            for owner in self._owners.values():
                if isinstance(owner, Object):
                    owner.stores |= owner.writes or set()
                    owner.writes = None

    def _import(self, imports: Sequence[tuple[str, int]], names: dict[str, Any]) -> None:
        """Meet the modules that code imports while it runs, if they are there already."""
        package = names.get("__package__") or str(names.get("__name__")).rpartition(".")[0]
        for name, level in imports:
            full = importlib.util.resolve_name("." * level + name, package) if level else name
            parts = full.split(".")
            for end in range(1, len(parts) + 1):
                self._meet(sys.modules.get(".".join(parts[:end])), full)

    # ------------------------------------------------------------------ reads

    def _globals(self, names: dict[str, Any]) -> Owner:
        owner = self._owners.get((Globals, id(names)))
        if owner is None:
            owner = self._owner(names, Globals, str(names.get("__name__")))
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
        for each, then in parts:
            if then == Use("write", each):
                part.stores.add(each)
            else:
                self._load(part, each, [then], frame)

    def _parts(
        self, value: Any, uses: Sequence[Use | None], frame: Any
    ) -> list[tuple[Any, Use | None]] | None:
        """Return the keys that are read of a container, with their uses; None for all of it."""
        is_bag = type(value) is types.SimpleNamespace
        if not is_bag and type(value) not in _BY_ITEMS:
            return None
        keys: list[tuple[Any, Use | None]] = []
        for use in uses:
            kind, key, then = use or Use("all")
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

    # ------------------------------------------------------------------ values that are met

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
            self._read_whole(self._owner(value, Items, label, of=of))
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
            for each in gc.get_referents(value) if isinstance(value, _WALKERS) else ():
                self._meet(each, label, of)
        elif isinstance(value, _WALKERS):
            for each in gc.get_referents(value):
                self._meet(each, label, of)
        elif isinstance(value, threading.local):
            self._read_whole(self._owner(vars(value), Names, label, of=of))
        elif is_watched(kind):
            self._object(value, of)

    def _tell(self, value: Any) -> None:
        """Tell of what a step takes from where that is older than the step."""
        if id(value) not in self._recent():
            self._meets(value)

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
            value = owner.snapshot[None]
            if isinstance(value, _CALLED):
                self._meet(value, owner.label, owner)

    def _activate(self, function: types.FunctionType) -> None:
        """Note what a function reads that runs: its defaults, the variables around it."""
        owner = self._owners[Fields, id(function)]
        if owner.is_whole:
            return
        self._read_whole(owner)
        loads = loads_of(function.__code__)
        cells = loads.cells
        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            if name != "__class__":
                owner = self._owners[Cell, id(cell)]
                owner.stores |= {None} if name in loads.stores else set()
                self._load(owner, None, cells.get(name, [None]))

    # ------------------------------------------------------------------ objects and classes

    def alike(self, first: Any, others: Iterable[Any]) -> None:
        """Take what the step reads of an object for read of others, whose place it takes.

        Args:
            first: The object that the step's code runs with.
            others: Objects that hold the same.
        """
        self._is_busy = True
        try:
            for other in others:
                self._meet(other, type(other).__name__)
                self._twins.append((first, other))
            self._drain()
        finally:
            self._is_busy = False

    def _read_alike(self) -> None:
        seen: set[tuple[int, int]] = set()
        while self._twins:
            first, other = self._twins.pop()
            owner = self._owners.get((Object, id(first)))
            if owner is None or first is other or (id(first), id(other)) in seen:
                continue
            seen.add((id(first), id(other)))
            twin = self._object(other)
            for key in owner.reads:
                self._read(twin, key)
                pair = owner.snapshot.get(key), twin.snapshot.get(key)
                self._twins += [pair] if is_watched(type(pair[0])) else []

    def _object(self, value: Any, of: Owner | None = None) -> Owner:
        owner = self._owners.get((Object, id(value)))
        if owner is not None:
            return owner
        kind = type(value)
        self._watch(kind)
        owner = self._owner(value, Object, kind.__name__, of=of)
        if kind not in self._unseen and not self._written_past_us:
            owner.writes = set()
        for base, make in ((dict, Items), (list | tuple | set | deque, Elements)):
            if isinstance(value, base):
                self._read_whole(self._owner(value, make, kind.__name__, of=owner))
        if self._takes_all:
            self._all_of(owner)
        if self._takes_classes:
            self._class(kind)
        return owner

    def _take_all(self) -> None:
        """Take everything for read: code looks attributes up past the classes."""
        self._takes_all = True
        for owner in [each for each in self._owners.values() if isinstance(each, Object)]:
            self._all_of(owner)

    def _all_of(self, owner: Owner) -> None:
        self._read_whole(owner)
        owner.writes = None
        self._class(type(owner.holder))

    def _watch(self, kind: type) -> None:
        """Let reads and writes of a class's objects be noted."""
        for each in kind.__mro__:
            if each not in self._known and is_watched(each):
                self._known.add(each)
                self._note_methods(each)
                if not _is_of_torch(each):
                    self._class_owner(each)
        for name in WATCHING:
            owner = next(each for each in kind.__mro__ if name in vars(each))
            if owner is object or is_watched(owner):
                if (owner, name) not in self._watched:
                    self._replace(kind if owner is object else owner, name)
            else:
                self._unseen.add(kind)

    def _replace(self, kind: type, name: str) -> None:
        """Let one of a class's special methods note what it is called for."""
        custom = vars(kind).get(name, ABSENT)
        is_lookup, note = name == _LOOKUP, self._note
        usual = getattr(object, name) if custom is ABSENT else custom

        def method(self: Any, name: str, *value: Any) -> Any:
            note(self, name, is_lookup, not value)
            return usual(self, name, *value)

        def __getattribute__(self: Any, name: str) -> Any:
            note(self, name)
            return usual(self, name)

        try:
            # past a metaclass that refuses
            type.__setattr__(kind, name, __getattribute__ if is_lookup else method)
        except TypeError:  # A class of C++, which nothing can be noted of.
            self._unseen.add(kind)
            return
        self._watched[kind, name] = custom

    def _note_methods(self, kind: type) -> None:
        for name, value in list(vars(kind).items()):
            function = getattr(value, "__func__", None) or getattr(value, "fget", None)
            function = function or getattr(value, "func", value)
            if isinstance(function, types.FunctionType):
                self._methods[function.__code__].append((kind, name))
                if function.__code__ in self._started:
                    self._read(self._class_owner(kind), name)

    def _note(self, holder: Any, name: str, is_read: bool = True, is_deleted: bool = False) -> None:
        """Note that an attribute of an object is looked up, assigned to or deleted."""
        if threading.get_ident() != self._thread:
            owner = None if is_read else self._owners.get((Object, id(holder)))
            if owner is not None:
                owner.others.add(name)
            return
        if self._is_busy or name == "__class__":
            return
        owner = self._owners.get((Object, id(holder)))
        if is_read and owner is not None and (owner.is_whole or owner.reads.get(name)):
            return
        self._is_busy = True
        try:
            owner = self._object(holder) if owner is None else owner
            if is_read:
                self._note_first(owner, name)
            else:
                self._assigned(owner, name, is_deleted)
            self._drain()
        finally:
            self._is_busy = False

    def _assigned(self, owner: Owner, name: str, is_deleted: bool) -> None:
        # What is deleted has to be there, unless the step has put it there.
        if is_deleted and name not in (owner.writes or ()):
            self._read(owner, name)
        (owner.stores if owner.writes is None else owner.writes).add(name)

    def _note_first(self, owner: Owner, name: str) -> None:
        frame = sys._getframe(3)
        holder, kind = owner.holder, type(owner.holder)
        if name == "__dict__":
            file = frame.f_code.co_filename
            if file != _MODULE_FILE and not _is_ours(file):
                self._read_whole(owner)
                owner.writes = None
            return
        if name in _STATE:
            self._read_whole(owner)
        if isinstance(holder, torch.optim.Optimizer) and name in OF_OPTIMIZERS:
            return
        lookups = (self._watched.get((each, _LOOKUP), ABSENT) for each in kind.__mro__)
        has_own_lookup = any(lookup is not ABSENT for lookup in lookups)
        if name in owner.snapshot and not has_own_lookup:
            use = use_behind(frame.f_code, frame.f_lasti, name)
            self._load(owner, name, [use], frame)
            return
        if has_own_lookup or self._is_answered(kind, name):
            answers = self._owner(holder, Answers, kind.__name__, of=owner)
            if name not in answers.snapshot:
                answers.snapshot[name] = answers.look_up(name)
                self._read(answers, name)
            return
        owner.reads[name] = True
        for each in kind.__mro__:
            if is_watched(each):
                self._read(self._class_owner(each), name)
                if name in vars(each):
                    break

    def _is_answered(self, kind: type, name: str) -> bool:
        """Tell whether a class's own ``__getattr__`` gives a name."""
        answers = getattr(kind, "__getattr__", None)
        if answers is None or answers is torch.nn.Module.__getattr__:
            return False
        return not any(name in vars(each) for each in kind.__mro__)

    def _class_owner(self, kind: type) -> Owner:
        pairs = ((name, self._watched.get((kind, name))) for name in WATCHING)
        replaced = {name: custom for name, custom in pairs if custom is not None}
        return self._owner(kind, ClassNames, kind.__name__, replaced)

    def _class(self, kind: type) -> None:
        """Note a class that the step holds: what it looks up of it is not seen."""
        if not is_watched(kind):
            return
        self._watch(kind)
        meta: type = type(kind)
        for each in (*kind.__mro__, *meta.__mro__):
            if is_watched(each) and not _is_of_torch(each):
                owner = self._class_owner(each)
                if not owner.is_whole:
                    owner.is_whole = True
                    for name, value in list(owner.snapshot.items()):
                        if callable(value) or not name.startswith("__"):
                            self._read(owner, name)

    def _module(self, module: types.ModuleType) -> None:
        names = vars(module)
        if _is_library(module) or any(each is module for each, _ in self._modules):
            return
        owner = self._globals(names)
        kind, note, write = type(module), self._note_name, self._note_assigned

        def __getattribute__(self: Any, name: str) -> Any:
            note(owner, name)
            return kind.__getattribute__(self, name)

        def __setattr__(self: Any, name: str, value: Any) -> None:
            write(owner, name)
            kind.__setattr__(self, name, value)

        def __delattr__(self: Any, name: str) -> None:
            write(owner, name, True)
            kind.__delattr__(self, name)

        methods = __getattribute__, __setattr__, __delattr__
        watched = type(kind.__name__, (kind,), dict(zip(WATCHING, methods, strict=True)))
        module.__class__ = watched
        self._modules.append((module, kind))

    def _note_assigned(self, owner: Owner, name: str, is_deleted: bool = False) -> None:
        if self._is_busy or threading.get_ident() != self._thread:
            return
        self._is_busy = True
        try:
            self._assigned(owner, name, is_deleted)
            self._drain()
        finally:
            self._is_busy = False

    def _note_name(self, owner: Owner, name: str) -> None:
        if self._is_busy or name == "__class__" or threading.get_ident() != self._thread:
            return
        self._is_busy = True
        try:
            if name == "__dict__":
                self._read_whole(owner)
                owner.writes = None
            else:
                frame = sys._getframe(2)
                self._load(owner, name, [use_behind(frame.f_code, frame.f_lasti, name)], frame)
            self._drain()
        finally:
            self._is_busy = False


def _has_no_parts(value: Any) -> bool:
    if isinstance(value, enum.Enum):
        return False
    if type(value) in (tuple, frozenset):
        return all(map(_has_no_parts, value))
    return is_plain(value) or value is ABSENT


def _is_of_torch(kind: type) -> bool:
    return str(kind.__module__).partition(".")[0] == "torch"


def _parts_of(values: Iterable[Any]) -> set[int]:
    """Return the ids of values, and of what is in containers among them."""
    found: dict[int, Any] = {}
    left = list(values)
    while left:
        value = left.pop()
        if id(value) not in found and not is_plain(value):
            found[id(value)] = value
            if isinstance(value, dict | list | tuple | set | deque):
                left += value.values() if isinstance(value, dict) else value
    return {*found}


def _tells_its_age(owner: Owner) -> bool:
    """Tell whether the collector knows an object; an object's dict is made when it is asked for."""
    return gc.is_tracked(owner.holder) and not isinstance(owner, Names)


def _is_imported(frame: types.FrameType | None) -> bool:
    """Tell whether code runs because a module is imported for the first time."""
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


def _file_of(frame: types.FrameType, file: str) -> str:
    """Return the file of code; for what a library has made of a text, the library's."""
    if not file.startswith("<"):
        return file
    names = frame.f_globals
    is_named_tuple = str(names.get("__name__")).startswith("namedtuple_")
    return collections.__file__ if is_named_tuple else names.get("__file__") or file


def _is_ours(file: str) -> bool:
    return is_library_file(file) and f"{os.sep}xla_dtensor{os.sep}" in file


def _is_library(module: types.ModuleType) -> bool:
    file, root = getattr(module, "__file__", None), module.__name__.partition(".")[0]
    return is_library_file(file) if file else root in sys.stdlib_module_names
