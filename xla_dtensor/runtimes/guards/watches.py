"""Objects, classes and modules whose attributes a step looks up and assigns, seen as it does.

For the length of a trace the special methods of the classes that are met note what they are called
for, and a module of the user's is of another class. What goes past them is found by the names in
the code (``recording``): then all that was met counts as read, or as written.
"""

from __future__ import annotations

import os
import sys
import threading
import types
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn.modules import module as torch_module

from xla_dtensor.core.errors import CompileError
from xla_dtensor.runtimes.guards.lent import Lending
from xla_dtensor.runtimes.guards.libraries import is_library_file
from xla_dtensor.runtimes.guards.objects import (
    OF_OPTIMIZERS,
    WATCHING,
    Answers,
    ClassNames,
    Object,
    dict_of,
    is_watched,
)
from xla_dtensor.runtimes.guards.owners import (
    Elements,
    Items,
    Owner,
)
from xla_dtensor.runtimes.guards.reads import Reads
from xla_dtensor.runtimes.guards.uses import takes_only_parameters, use_behind
from xla_dtensor.runtimes.guards.values import ABSENT

_MODULE_FILE = torch_module.__file__
_LOOKUP, *_WRITES = WATCHING
_STATE = ("__reduce__", "__reduce_ex__", "__getstate__")  # for copies, of all attributes


__all__ = ["Watches"]


class Watches(Reads):
    """See the module."""

    def __init__(self, meets: Callable[[Any], None], lending: Lending) -> None:
        super().__init__(meets, lending)
        self._methods: dict[types.CodeType, list[tuple[type, str]]] = defaultdict(list)
        # By class and name, what was there before, ABSENT for nothing.
        self._watched: dict[tuple[type, str], Any] = {}
        self._twins: list[tuple[Any, Any]] = []
        self._known: set[type] = set()
        self._unseen: set[type] = set()  # whose attributes are assigned past us
        self._modules: list[tuple[types.ModuleType, type]] = []
        self._is_busy = False
        self._stored: list[Any] = []  # by the step
        self._takes_classes = False
        self._whole_kinds: list[type] = []
        self._written_past_us: set[str] = set()
        self._thread = threading.get_ident()

    def _unwatch(self) -> None:
        """Make classes and modules what they were."""
        for (kind, name), original in self._watched.items():
            if original is ABSENT:
                type.__delattr__(kind, name)
            else:
                type.__setattr__(kind, name, original)
        for module, kind in self._modules:
            module.__class__ = kind

    def alike(self, first: Any, others: Iterable[Any]) -> None:
        """Take what the step reads of an object for read of others, whose place it takes.

        Args:
            first: The object that the step's code runs with.
            others: Objects that hold the same.
        """
        self._is_busy = True
        try:
            for twin in others:
                self._meet(twin, type(twin).__name__)
                self._twins.append((first, twin))
            self._drain()
        finally:
            self._is_busy = False

    def _read_alike(self) -> None:
        seen: set[tuple[int, int]] = set()
        while self._twins:
            first, second = self._twins.pop()
            owner = self._owners.get((Object, id(first)))
            if owner is None or first is second or (id(first), id(second)) in seen:
                continue
            seen.add((id(first), id(second)))
            twin = self._object(second)
            for key in owner.reads:
                if self._lending.lends(owner, key):
                    raise CompileError(f"{owner.named(key)} is one number for several layers.")
                self._read(twin, key)
                pair = owner.snapshot.get(key), twin.snapshot.get(key)
                self._twins += [pair] if is_watched(type(pair[0])) else []

    def _object(self, holder: Any, of: Owner | None = None) -> Owner:
        owner = self._owners.get((Object, id(holder)))
        if owner is not None:
            return owner
        kind = type(holder)
        self._watch(kind)
        owner = self._owner(holder, Object, kind.__name__, of=of)
        if kind not in self._unseen and not self._written_past_us:
            owner.writes = set()
        for base, make in ((dict, Items), (list | tuple | set | deque, Elements)):
            if isinstance(holder, base):
                self._read_whole(self._owner(holder, make, kind.__name__, of=owner))
        if any(
            ancestor is whole_kind for whole_kind in self._whole_kinds for ancestor in kind.__mro__
        ):
            self._all_of(owner)
        if self._takes_classes:
            self._class(kind)
        return owner

    def _take_all(self, kind: type = object) -> None:
        """Take all objects of a class for read: code looks attributes up past the classes."""
        self._whole_kinds.append(kind)
        for owner in [owner for owner in self._owners.values() if isinstance(owner, Object)]:
            if any(base is kind for base in type(owner.holder).__mro__):
                self._all_of(owner)

    def _all_of(self, owner: Owner) -> None:
        self._read_whole(owner)
        owner.writes = None
        self._class(type(owner.holder))

    def _watch(self, kind: type) -> None:
        """Let reads and writes of a class's objects be noted."""
        for base in kind.__mro__:
            if base not in self._known and is_watched(base):
                self._known.add(base)
                self._note_methods(base)
                if not _is_of_torch(base):
                    self._class_owner(base)
        for name in WATCHING:
            owner = next(ancestor for ancestor in kind.__mro__ if name in vars(ancestor))
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

        def method(self: Any, name: str, *arguments: Any) -> Any:
            note(self, name, is_lookup, not arguments)
            return usual(self, name, *arguments)

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
        for name, attribute in list(vars(kind).items()):
            function = getattr(attribute, "__func__", None) or getattr(attribute, "fget", None)
            function = function or getattr(attribute, "func", attribute)
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
        if is_read and owner is not None:
            # What the step itself has put there is none of what was there before.
            is_own = name in (owner.writes or ()) and name in (dict_of(holder) or ())
            if is_own or owner.is_whole or owner.reads.get(name):
                return
        self._is_busy = True
        try:
            owner = self._object(holder) if owner is None else owner
            if owner.ignores(name):
                return
            if is_read:
                self._note_first(owner, name)
            else:
                self._assigned(owner, name, is_deleted)
            self._drain()
        finally:
            self._is_busy = False

    def _assigned(self, owner: Owner, name: str, is_deleted: bool) -> None:
        if name == "__dict__":  # by which all attributes are assigned
            self._read_whole(owner)
            owner.writes = None
            return
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
            code = frame.f_code
            takes_parameters = name == "param_groups" and takes_only_parameters(code)
            if not (is_library_file(code.co_filename) or takes_parameters):
                self._meets(holder)
            return
        lookups = (self._watched.get((ancestor, _LOOKUP), ABSENT) for ancestor in kind.__mro__)
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
        for base in kind.__mro__:
            if is_watched(base):
                self._read(self._class_owner(base), name)
                if name in vars(base):
                    break

    def _is_answered(self, kind: type, name: str) -> bool:
        """Tell whether a class's own ``__getattr__`` gives a name."""
        answers = getattr(kind, "__getattr__", None)
        if answers is None or answers is torch.nn.Module.__getattr__:
            return False
        return not any(name in vars(base) for base in kind.__mro__)

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
        for base in (*kind.__mro__, *meta.__mro__):
            if is_watched(base) and not _is_of_torch(base):
                owner = self._class_owner(base)
                if not owner.is_whole:
                    owner.is_whole = True
                    for name, attribute in list(owner.snapshot.items()):
                        if callable(attribute) or not name.startswith("__"):
                            self._read(owner, name)

    def _take_classes(self) -> None:
        """Take the classes of all objects for read: code looks their attributes up."""
        if not self._takes_classes:
            self._takes_classes = True
            self._classes_below(object)

    def _classes_below(self, base: type) -> None:
        objects = [owner for owner in self._owners.values() if isinstance(owner, Object)]
        for kind in {owner.kind for owner in objects if issubclass(owner.kind, base)}:
            self._class(kind)

    def _module(self, module: types.ModuleType) -> None:
        names = vars(module)
        if _is_library(module) or any(
            watched_module is module for watched_module, _ in self._modules
        ):
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


def _is_of_torch(kind: type) -> bool:
    return str(kind.__module__).partition(".")[0] == "torch"


def _is_ours(file: str) -> bool:
    return is_library_file(file) and f"{os.sep}xla_dtensor{os.sep}" in file


def _is_library(module: types.ModuleType) -> bool:
    file, root = getattr(module, "__file__", None), module.__name__.partition(".")[0]
    return is_library_file(file) if file else root in sys.stdlib_module_names
