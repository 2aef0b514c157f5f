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
  reads of the user's objects is. Where none of the user's code can run, `off_the_record`, nothing
  is noted: how torch comes to an op's shape and placements reads a thousand attributes of its own.
* What another thread assigns meanwhile to an attribute or a global is not taken for the step's.
"""

from __future__ import annotations

import builtins
import collections
import contextlib
import copy
import functools
import gc
import importlib.util
import os
import sys
import threading
import types
from collections.abc import Callable, Container, Iterable, Iterator, Sequence, Set
from typing import Any

import numpy as np
import torch

from xla_dtensor.runtimes.guards.comparing import Guards
from xla_dtensor.runtimes.guards.lent import Lending, counters_of, is_lent
from xla_dtensor.runtimes.guards.libraries import is_library_file
from xla_dtensor.runtimes.guards.objects import (
    WATCHING,
    Object,
)
from xla_dtensor.runtimes.guards.owners import (
    Effect,
    Environment,
    Names,
    Owner,
)
from xla_dtensor.runtimes.guards.sightings import parts_of, tensors_by_name
from xla_dtensor.runtimes.guards.uses import loads_of, only_of_super
from xla_dtensor.runtimes.guards.values import Sighting
from xla_dtensor.runtimes.guards.watches import Watches
from xla_dtensor.runtimes.nested import runs_as_it_is
from xla_dtensor.runtimes.new_garbage import (
    KnownObjects,
    old_objects_aside,
    show_all_objects,
    tracked_objects,
)

__all__ = ["Recording", "off_the_record"]

_ENVIRONMENT = (os.__file__, "<frozen os>", "<frozen _collections_abc>")
_LOOKUP, *_WRITES = WATCHING
_WRITES_PAST_US = frozenset({*_WRITES, "__set__", "__delete__"})
_IMPORTS = frozenset({"import_module", "__import__"})
_TOOLS = (4, 3, 5, 2, 1, 0)
_running: list[Recording] = []  # the one that notes now, last


@contextlib.contextmanager
def off_the_record() -> Iterator[None]:
    """Note nothing of what follows in this thread: a question to torch, not the step's code.

    Example:
        >>> with off_the_record():
        ...     torch.empty(3, device="meta").exp().shape
        torch.Size([3])
    """
    recording = _running[-1] if _running else None
    if recording is None:
        yield
        return
    recording.pause()
    try:
        yield
    finally:
        recording.go_on()


@runs_as_it_is
class Recording(Watches):
    """Notes what a step reads, inside of a ``with`` block.

    Args:
        step: The step.
        arguments: What it is called with.
        meets: Is told of each generator of random numbers and each iterator that is older than the
            block, before the step can draw or take from it, and of an optimizer whenever code
            other than a library's is about to read its settings or its state.
        lending: The numbers that it is lent; None for none.
    """

    def __init__(
        self,
        step: Any,
        arguments: Iterable[Any] = (),
        meets: Callable[[Any], None] = lambda source: None,
        lending: Lending | None = None,
    ) -> None:
        super().__init__(meets, Lending() if lending is None else lending)
        self._roots = (step, *(a for a in arguments if not isinstance(a, torch.Tensor)))
        self._aside = old_objects_aside()
        self._new: set[int] = set()
        self._inner: set[types.CodeType] = set()
        self._asking: list[types.CodeType] = []  # whose calls are looked at
        self._pauses: list[bool] = []  # whether it was busy before each of them
        self._monitoring: Any = getattr(sys, "monitoring", None)

    def begin(self) -> None:
        """Take all that comes to be from now on for the step's own; else the block begins that."""
        self._before = KnownObjects.of(tracked_objects())

    def __enter__(self) -> Recording:
        self._aside.__enter__()
        if self._before is None:
            self.begin()
        self._watch(torch.nn.Module)
        self._start()
        _running.append(self)
        try:
            for root in self._roots:
                self._meet(root, "an argument")
            self._drain()
        except BaseException:
            self._queue.clear()
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._is_busy = True
        try:
            self._read_alike()
            self._drain()
        finally:
            _running.remove(self)
            self._stop()
            self._new, self._before = self._recent(), None
            self._aside.__exit__(None, None, None)
            self._unwatch()
            self._lending.take_back(self._is_new)
        self._lending.check()

    def pause(self) -> None:
        """Note nothing of what follows in this thread: it is not the step's."""
        if threading.get_ident() == self._thread:
            self._pauses.append(self._is_busy)
            self._is_busy = True

    def go_on(self) -> None:
        """Note again what the step does; once for each pause."""
        if threading.get_ident() == self._thread:
            self._is_busy = self._pauses.pop()

    def effects(self, is_input: Callable[[Any], bool] = lambda array: False) -> list[Effect]:
        """Return what the step has changed; after the block.

        Args:
            is_input: Tells whether the elements of an array are written by the program itself.
        """
        all_effects: list[Effect] = []
        for owner in self._old():
            if isinstance(owner, Object):
                owner.stores |= self._written_past_us & owner.snapshot.keys()
            self._stored += owner.held_before()
            if not (isinstance(owner.holder, np.ndarray) and is_input(owner.holder)):
                effects = owner.effects()
                owner.is_changed = bool(effects)
                all_effects += effects
        self._stored += [effect.value for effect in all_effects]
        return all_effects

    def counters(self) -> set[Any]:
        """Return the names of the numbers that the step reads and changes; after the block."""
        return {name for owner in self._old() for name in counters_of(owner)}

    def rewind(self) -> None:
        """Make everything what it was before the step; after the block."""
        # The registries of a Module may have been met when the step had written to it already.
        for owner in reversed(self._old()):
            owner.rewind()

    def sightings(self, changing: Container[Any] = ()) -> list[Sighting]:
        """Return each name of a tensor with the one that was found there, and what is there now.

        A tensor that has several names is there several times; one name is there once.

        Args:
            changing: The names that were seen to be given other values.
        """
        owners = [owner for owner in self._old() if not issubclass(owner.kind, tuple)]
        return tensors_by_name(owners, changing)

    def age(self) -> Callable[[Any], bool]:
        """Return what tells whether there was an object before the step; after the block."""
        met, new = {id(owner.holder) for owner in self._old()}, self._new

        def is_older(value: Any) -> bool:
            # The collector tells; but of a tuple, which may be at an older one's address.
            is_known = gc.is_tracked(value) and type(value) is not tuple
            return id(value) in met or (is_known and id(value) not in new)

        return is_older

    def guards(self) -> Guards:
        """Return what was read; after the block."""
        owners, is_older = self._old(), self.age()
        for owner in owners:
            owner.is_whole |= owner.is_searched
        guard_owners = [
            o for o in owners if o.reads or o.is_whole or o.is_changed or isinstance(o, Object)
        ]
        # Guards forget what was not read, which a rewind needs.
        old = set(map(id, owners))
        entries = self._owners.items()
        self._owners = {key: copy.copy(owner) for key, owner in entries if id(owner) in old}
        self._lending.let_move()
        for owner in guard_owners:
            owner.parent = None
        # What the step has made itself, each run makes anew.
        return Guards(guard_owners, {id(v) for v in parts_of(self._stored) if is_older(v)})

    def _old(self) -> list[Owner]:
        """Return the owners that there were before the step ran."""
        is_new = functools.cache(self._is_new)
        return [owner for owner in self._owners.values() if not is_new(owner)]

    def _is_new(self, owner: Owner) -> bool:
        """Tell whether an owner came to be while the step ran."""
        if isinstance(owner, Environment):
            return False
        if owner.parent is not None and not _tells_its_age(owner):
            return self._is_new(owner.parent)
        return id(owner.holder) in self._new

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
        events = self._monitoring.events
        self._monitoring.set_events(self._tool, 0)
        for code in self._asking:
            self._monitoring.set_local_events(self._tool, code, 0)
        for event in (events.PY_START, events.CALL):
            self._monitoring.register_callback(self._tool, event, None)  # which would keep us alive
        self._monitoring.free_tool_id(self._tool)

    def _watch_type(self, code: types.CodeType, ways: Set[str]) -> None:
        """Look whether code calls ``type(...)`` of a number that is lent."""
        if "taken" in ways or self._monitoring is None:  # nothing tells of what
            self._lending.arithmetic.is_doubted = True
            return
        event = self._monitoring.events.CALL
        self._monitoring.register_callback(self._tool, event, self._on_call)
        self._monitoring.set_local_events(self._tool, code, event)
        self._asking.append(code)

    def _on_call(self, code: types.CodeType, offset: int, function: Any, argument: Any) -> None:
        if function is type and is_lent(argument):
            self._lending.arithmetic.is_doubted = True

    def _on_event(self, frame: types.FrameType, event: str, argument: Any) -> None:
        if event == "call":
            self._on_code(frame.f_code, frame)

    def _on_start(self, code: types.CodeType, offset: int) -> Any:
        if threading.get_ident() != self._thread:
            return None
        return None if self._on_code(code, sys._getframe(1)) else self._monitoring.DISABLE

    def _on_code(self, code: types.CodeType, frame: types.FrameType) -> bool:
        """Note what code reads; return whether to be told again when it starts."""
        file = code.co_filename
        if self._is_busy:  # What runs is ours; a library's is never asked about again.
            return file in _ENVIRONMENT or not is_library_file(file)
        if file in _ENVIRONMENT and code.co_qualname == "_Environ.__getitem__":
            self._read_variable(frame)
            return True
        if code not in self._started and not is_library_file(_file_of(frame, file)):
            if _is_imported(frame):
                return True
            self._started.add(code)
            self._is_busy = True  # What the search looks at, the step has not read.
            try:
                self._code(code, frame)
                self._drain()
            finally:
                self._is_busy = False
        return False

    def _read_variable(self, frame: types.FrameType | None) -> None:
        key = None if frame is None else frame.f_locals["key"]
        while frame is not None and frame.f_code.co_filename in _ENVIRONMENT:
            frame = frame.f_back
        if frame is not None and not is_library_file(frame.f_code.co_filename):
            owner = self._owners.setdefault(Environment, Environment(os.environ, "os.environ"))
            self._read(owner, key)

    def _code(self, code: types.CodeType, frame: types.FrameType) -> None:
        names = frame.f_globals
        self._inner.update(
            constant for constant in code.co_consts if isinstance(constant, types.CodeType)
        )
        self._past_us(code, frame)
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
        if loads.asks_for_type and self._lending.names:
            self._watch_type(code, loads.asks_for_type)
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
            for kind in [kind for kind in self._known if name in vars(kind)]:
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

    def _past_us(self, code: types.CodeType, frame: types.FrameType) -> None:
        """Take more for read and written where code looks attributes up past the classes."""
        names = {*code.co_names}
        if _LOOKUP in names and not code.co_name.startswith("__getattr"):
            # ``super().__getattribute__(name)`` looks at objects of its own class alone.
            is_of_super = only_of_super(code, _LOOKUP)
            self._take_all(frame.f_locals.get("__class__", object) if is_of_super else object)
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
