"""What a step can reach by name, as it is before the step is traced.

From the step's function on, each chain that its code reads (``reads``) is looked up: the values on
the way become entries of tables (``tables``), functions of the user's are gone into with what they
are called with, and so is the ``forward`` of each module that is used::

    class Trainer:
        def step(self, x):
            return loss_of(self.model(x), self.config) * self.weight

    tables      self.model, self.config, self.weight     attributes of a Trainer
                loss_of                                  a global
    gone into   loss_of with self.config, the forward of self.model and of the modules in it

Of what is used as a whole everything is read: of a list or a dict all that it holds, of another
object the attributes that any of the code looks up of anything.

Libraries are not gone into: what Python, torch, JAX, NumPy and this package hold is not the user's.
Code of other packages is, a model hub's layers for instance.
"""

from __future__ import annotations

import argparse
import contextvars
import functools
import inspect
import logging
import operator
import types
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any

import numpy as np
import torch

from xla_dtensor.runtimes.host_work.python_random import is_python_random
from xla_dtensor.runtimes.opened import held_by_opened, opened_containers
from xla_dtensor.runtimes.premises.arguments import Arguments, Given, bound
from xla_dtensor.runtimes.premises.chains import CallRead, Chain
from xla_dtensor.runtimes.premises.frames import Frame, given_to
from xla_dtensor.runtimes.premises.libraries import is_library_file, is_of_library
from xla_dtensor.runtimes.premises.looking import (
    cells_of,
    forward_of,
    hooks_of,
    is_opaque,
    names_in,
)
from xla_dtensor.runtimes.premises.lookups import BUFFERS, CONTAINERS, Lookups
from xla_dtensor.runtimes.premises.reads import reads_of
from xla_dtensor.runtimes.premises.values import ABSENT, is_plain

__all__ = ["Reach"]

_MOST_FRAMES = 10_000  # calls that are told apart by what they are given
_MOST_VALUES = 100  # that an argument is followed with
_MOST_OPENED = 10_000
_CLOSED = (torch.Tensor, torch.optim.Optimizer)
_BAGS = (types.SimpleNamespace, argparse.Namespace)  # a library's class, the user's attributes
_MUTE = (logging.Logger, logging.Handler)  # which a result does not depend on
_MAKING = frozenset({"__init__", "__post_init__", "__new__"})
# Special methods that a step's result seldom depends on, and that lead far: into what writes texts.
_ASIDE = _MAKING | {
    *("__repr__", "__str__", "__format__", "__del__", "__dir__", "__sizeof__", "__hash__"),
    *("__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__getnewargs__"),
    *("__copy__", "__deepcopy__", "__init_subclass__", "__class_getitem__", "__subclasshook__"),
    *("__set_name__", "__prepare__", "__instancecheck__", "__subclasscheck__"),
}
_TAKE_NOTHING = (
    iter,
    isinstance,
    issubclass,
    type,
    id,
    hash,
    repr,
    str,
    print,
    callable,
    hasattr,
    getattr,
)
_NONE: Mapping[str, Any] = types.MappingProxyType({})


class Reach(Lookups):
    """All that can be reached from a function, in tables.

    Attributes:
        modules: The modules that are used, in that order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.modules: dict[int, torch.nn.Module] = {}
        self._walked: set[Any] = set()
        self._attributes: set[str] = set()
        self._opened: dict[int, Any] = {}  # whose attributes count as read by name
        self._to_open: list[Any] = []
        self._ended: dict[int, Any] = {}
        self._waiting: list[tuple[types.FunctionType, Given]] = []

    @classmethod
    def of(
        cls, function: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] = _NONE
    ) -> Reach:
        """Return what `function` can reach.

        Args:
            function: A step: a function, a method, a module, any callable.
            args: What it is called with; objects that are no tensors may be looked into, but for
                the fields of those that are opened.
            kwargs: The same, by name.
        """
        given = Arguments([[value] for value in args], {k: [v] for k, v in kwargs.items()})
        held = [*held_by_opened((args, kwargs)), *opened_containers((args, kwargs))]
        while True:
            reach = cls()
            reach.keep(*held)
            reach.given.update(map(id, held))
            reach._call(function, given)
            reach._finish()
            # What is found by name as well has to hold there.
            named = reach.given & {id(value) for table in reach.tables for value in table.found}
            if not named:
                return reach
            held = [each for each in held if id(each) not in named]

    def functions(self) -> list[types.FunctionType]:
        """Return the functions that were gone into."""
        numbers = {number for number, _ in self._walked}
        return [each for number, each in self._kept.items() if number in numbers]

    def _finish(self) -> None:
        """Go into all functions that came up, and open all objects, until nothing is new."""
        known: set[str] = set()
        opened: list[Any] = []
        while self._waiting or self._to_open or self._attributes > known:
            while self._waiting:
                self._walk(*self._waiting.pop())
            new, known = self._attributes - known, set(self._attributes)
            for value in opened if new else ():
                self._open(value, new)
            while self._to_open:
                opened.append(self._to_open.pop())
                self._open(opened[-1], known)

    def _open(self, value: Any, names: Set[str]) -> None:
        for name in sorted(names_in(value, names)):
            for found in self.attribute(value, name):
                self.end(found)

    # ------------------------------------------------------------------ functions

    def go_into(self, function: Any, given: Arguments | None = None) -> None:
        """Go into a function, later; `given` is what it is called with, where known."""
        names: Given = {}
        if given is not None:
            names, left = bound(function, given)
            self._all_used(left)
        is_much = any(len(values) > _MOST_VALUES for values in names.values())
        if is_much or len(self._walked) > _MOST_FRAMES:
            # Once for all calls: what it is given counts as used as a whole.
            self._all_used(value for values in names.values() for value in values)
            names = {}
        key = (id(function), tuple((n, *map(id, values)) for n, values in names.items()))
        if key not in self._walked:
            self._walked.add(key)
            self.keep(function, *(value for values in names.values() for value in values))
            self._waiting.append((function, names))

    def _walk(self, function: types.FunctionType, given: Given) -> None:
        wrapped = getattr(function, "__wrapped__", None)
        if is_library_file(function.__code__.co_filename):
            # One that a library has put around the user's, ``torch.no_grad()`` for instance.
            for value in (wrapped, *cells_of(function)):
                if isinstance(value, types.FunctionType | types.MethodType):
                    self.end(value)
            return
        reads = reads_of(function.__code__)
        self._attributes |= reads.attributes
        frame = Frame(self, function, given)
        for chain in reads.looked_up:
            frame.values(chain)
        for chain in reads.used:
            self._each(frame, chain, self.end)
        for chain in reads.searched:
            self._each(frame, chain, self.search)
        for chain in reads.written:
            frame.note_written(chain)
        for call in reads.calls:
            self._called(frame, call)
        for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self.end(default)

    def _each(self, frame: Frame, chain: Chain, do: Callable[[Any], None]) -> None:
        for value in frame.values(chain):
            do(value)

    def _called(self, frame: Frame, call: CallRead) -> None:
        given = frame.arguments(call)
        functions = frame.all_values(call.function)
        for function in functions:
            self._call(function, given)
        if not functions:
            self._all_used(given.values())

    def _all_used(self, values: Iterable[Any]) -> None:
        for value in values:
            self.end(value)

    def _call(self, function: Any, given: Arguments) -> None:
        """Take a value as called."""
        if isinstance(function, types.MethodType):
            owner, function = function.__self__, function.__func__
            given = given.after(owner)
            self._method_of(owner, function)
        elif isinstance(function, torch.nn.Module):
            self.end(function)
            given, function = given.after(function), forward_of(function)
        elif isinstance(function, functools.partial):
            args = [*([value] for value in function.args), *given.args]
            kwargs = {**{k: [v] for k, v in function.keywords.items()}, **given.kwargs}
            self._call(function.func, Arguments(args, kwargs, given.more, given.others))
            return
        elif not isinstance(function, types.FunctionType | type):
            call = inspect.getattr_static(type(function), "__call__", None)
            if isinstance(call, types.FunctionType):
                self.end(function)
                given, function = given.after(function), call
        if isinstance(function, types.FunctionType):
            inside = inspect.unwrap(function)
            for each in (function, inside):
                is_users = isinstance(each, types.FunctionType) and not is_library_file(
                    each.__code__.co_filename
                )
                if is_users:
                    self.go_into(each, given)
                    return
            self.go_into(function)
        elif isinstance(function, operator.attrgetter):
            self._attributes.update(*(name.split(".") for name in function.__reduce__()[1]))
        self.end(function)
        for value in given.values():
            if not any(function is each for each in _TAKE_NOTHING):
                self.taken_from(value)
            elif isinstance(value, type):
                continue
            self.end(value)

    def _method_of(self, owner: Any, function: Any) -> None:
        """Take a method's owner as used where a library's code does with it what it likes."""
        is_users = isinstance(function, types.FunctionType) and not is_library_file(
            function.__code__.co_filename
        )
        if not is_users:
            self.end(owner)
            if not isinstance(owner, torch.nn.Module | type):
                self.search(owner)

    # ------------------------------------------------------------------ values that are used

    def end(self, value: Any) -> None:
        """Take all of a value as read."""
        if value is ABSENT or id(value) in self._ended or is_opaque(value) or is_plain(value):
            return
        self._ended[id(value)] = value
        if isinstance(value, torch.Generator):
            self.generators.append(value)
        elif is_python_random(value):
            self.randoms.append(value)
        elif isinstance(value, torch.Tensor):
            return
        elif isinstance(value, torch.nn.Module):
            self._end_module(value)
        elif isinstance(value, types.FunctionType):
            self.go_into(value)
        elif isinstance(value, types.MethodType):
            self._end_method(value)
        elif isinstance(value, functools.partial):
            self._all_used((value.func, *value.args, *value.keywords.values()))
        elif isinstance(value, np.ndarray):
            self.array(value)
        elif isinstance(value, BUFFERS):
            self.contents(value)
        elif isinstance(value, contextvars.ContextVar):
            self.context_variable(value)
        elif isinstance(value, weakref.ReferenceType):
            self.end(value())
        elif isinstance(value, CONTAINERS):
            self.contents(value)
            for element in given_to(value):
                self.end(element)
        elif isinstance(value, type):
            self._end_class(value)
        elif not isinstance(value, types.ModuleType | types.BuiltinFunctionType):
            self._end_object(value)

    def _end_method(self, method: types.MethodType) -> None:
        owner, function = method.__self__, method.__func__
        if isinstance(function, types.FunctionType):
            self.go_into(function, Arguments([[owner]]))
        self._method_of(owner, function)

    def _end_module(self, module: torch.nn.Module) -> None:
        self.modules[id(module)] = module
        self._open_later(module)
        for forward in self.attribute(module, "forward"):
            self.end(forward)
        for hook in hooks_of(module):
            self.end(hook)
        for child in module._modules.values():
            self.end(child)
        for parameter in (*module._parameters.values(), *module._buffers.values()):
            self._open_later(parameter)
            for hook in (getattr(parameter, "_backward_hooks", None) or {}).values():
                self.end(hook)

    def _end_class(self, kind: type) -> None:
        """Take a class of the user's as made objects of."""
        if is_of_library(kind):
            return
        self._go_into_special(kind, None)
        self._open_later(kind)
        for each in kind.__mro__ if issubclass(kind, torch.autograd.Function) else ():
            for name in () if is_of_library(each) else list(vars(each)):
                for found in self.of_classes((each,), name, kind):
                    self.end(found)  # torch calls its methods.

    def _go_into_special(self, kind: type, instance: Any) -> None:
        """Go into what Python itself calls: ``__call__``, ``__mul__``, ``__iter__``."""
        given = Arguments() if instance is None else Arguments([[instance]])
        for each in kind.__mro__:
            for name, function in () if is_of_library(each) else list(vars(each).items()):
                is_made = instance is None and name in _MAKING
                is_special = name.startswith("__") and name.endswith("__") and name not in _ASIDE
                if (is_made or is_special) and isinstance(function, types.FunctionType):
                    self.go_into(function, given)

    def _end_object(self, value: Any) -> None:
        kind = type(value)
        if isinstance(value, _CLOSED):
            return
        self.end(getattr(value, "__wrapped__", None))  # what a cache is put around
        if is_of_library(kind) and not isinstance(value, _BAGS):
            if not isinstance(value, _MUTE):
                self.search(value)
            return
        self._go_into_special(kind, value)
        self._open_later(value)

    def _open_later(self, value: Any) -> None:
        """Look up each name that any of the code looks up of anything."""
        if len(self._opened) < _MOST_OPENED and id(value) not in self._opened:
            self._opened[id(value)] = value
            self._to_open.append(value)

    def search(self, value: Any) -> None:
        """Take every attribute of an object as read."""
        if isinstance(value, types.ModuleType) and is_library_file(
            getattr(value, "__file__", None) or ""
        ):
            return
        own = getattr(value, "__dict__", None)
        if isinstance(own, dict) and not isinstance(value, (*_CLOSED, torch.nn.Module)):
            self.whole(value, own)
            for each in list(own.values()):
                if not is_opaque(each) and (isinstance(each, CONTAINERS) or is_plain(each)):
                    self.end(each)
        elif isinstance(value, torch.nn.Module):
            for name in list(vars(value)):
                if not name.startswith("_"):
                    self.attribute(value, name)
        self.end(value)
