"""Premises: what a traced program takes for granted of Python, and when that no longer holds.

A step is traced once, and what Python held then is in its program for good: numbers in closures,
globals and attributes, which functions and modules there were, whether a parameter wanted a
gradient. PyTorch runs the step's Python on every call. So that a compiled step gives what PyTorch
gives, a program is kept with its premises, and a call that finds one of them broken traces anew and
says why::

    beta = 0.1                                     a global of the script
    step = xd.compile(lambda x: loss(x) * beta)

    step(x)                                        traced: beta is 0.1          program A
    beta = 0.2
    step(x)                                        "the global 'beta' of __main__ changed from 0.1
                                                   to 0.2": traced anew         program B

What can be found: what the step reaches by the names in its code (``reach``), and each module that
it uses, with what the module's code reads of it, its children and hooks (``modules``). What cannot:
an attribute that only a library's code knows by name, files, clocks, and the state of objects of C.

What the step assigns itself is found the same way, and is assigned on every call (``effects``).

Invariants:

* A premise is what held before the trace, not after: a step may change a thing and change it back.
* Nothing of the user's is run to find or compare premises, but ``__getattr__``, ``__slots__`` and
  ``__eq__``.
* A premise never breaks where PyTorch's result cannot change, except that the step itself keeps
  changing what it reads. Then each call traces, and says what changed: slow, and right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from operator import is_
from types import MappingProxyType
from typing import Any

import torch

from xla_dtensor.runtimes.premises.effects import Effects
from xla_dtensor.runtimes.premises.modules import ModuleBefore, Modules, traits_of
from xla_dtensor.runtimes.premises.reach import Reach
from xla_dtensor.runtimes.premises.tables import Contents, Elements, Table
from xla_dtensor.runtimes.premises.values import ABSENT, Change, Judge, Moving, Sighting

__all__ = ["Change", "ModuleBefore", "Moving", "Premises", "Sighting"]


class Premises:
    """What one trace takes for granted.

    Args:
        reach: What the step reaches by name, taken down before the trace.
        modules: What there was of modules before the trace.
    """

    def __init__(self, reach: Reach, modules: Modules) -> None:
        self._tables = reach.tables
        self._tables_of = reach.tables_of
        self._modules = modules
        self._comparing: set[tuple[int, int]] = set()
        self.effects: Effects = reach.effects
        found = [tensor for table in self._tables for tensor in table.tensors()]
        self._traits = [(tensor, traits_of(tensor), _payload(tensor)) for tensor in found]
        owners = [*reach.objects.values(), *reach.modules.values()]
        self._owners = [each for each in owners if hasattr(each, "__dict__")]
        self._kinds = list(map(type, self._owners))
        self._judge = Judge(lambda tensor: True, self._holds_the_same)
        for module in reach.modules.values():
            modules.see(module)

    @classmethod
    def of_now(cls, step: Callable[..., Any]) -> Premises:
        """Return what a step takes for granted if it reads all that it can reach.

        Args:
            step: The step. Of modules those count that it reaches by name.
        """
        reach = Reach.of(step)
        modules_before = {id(m): ModuleBefore.of(m) for m in reach.modules.values()}
        made = cls(reach, Modules(modules_before))
        made.settle(lambda value: isinstance(value, torch.Tensor))
        return made

    def see_module(self, module: torch.nn.Module) -> None:
        """Note a module that the step calls."""
        self._modules.see(module)

    def sightings(self) -> list[Sighting]:
        """Return each name of a tensor with the one that was found there, and what is there now.

        A tensor that has several names is there several times; one name is there once.
        """
        every = [(table, each) for table in self._tables for each in table.sightings()]
        every += [(None, each) for each in self._modules.sightings()]
        # What a container holds that is no longer there, is under no name.
        gone = {id(each.found) for _, each in every if each.found is not each.now}
        kept = [each for table, each in every if table is None or id(table.holder) not in gone]
        named = {each.name: each for whole in kept for each in _flat(whole)}
        return [each for each in named.values() if isinstance(each.found, torch.Tensor)]

    def settle(
        self,
        reads: Callable[[Any], bool],
        instead: Mapping[int, Moving | torch.Tensor] = MappingProxyType({}),
    ) -> None:
        """End the trace.

        Args:
            reads: Tells whether the program reads a tensor that is older than the trace; of a NumPy
                array, whether it reads its elements anew on every call.
            instead: What is read by name, or took a tensor's place for good, by the ids of the
                tensors that were found there.
        """
        self._judge = Judge(reads, self._holds_the_same)

        def forget(value: Any) -> Any:
            if isinstance(value, Elements):
                return ABSENT if reads(value.array) else value
            if id(value) in instead:
                return instead[id(value)]
            if type(value) is tuple and any(id(each) in instead for each in value):
                return tuple(map(forget, value))
            return self._judge.forget(value)

        for owner, before in self.effects.changed_otherwise():
            self._tables.append(Contents(owner, lambda _: "a list that the step changes", before))
        self.effects.settle()
        for table in self._tables:
            table.settle(forget)
        self._modules.settle(forget)
        # Of a tensor that is not read its kind is noted.
        kept = [each for each in self._traits if reads(each[0]) and id(each[0]) not in instead]
        self._traits = kept

    def broken(self) -> Change | None:
        """Return what has changed since the trace; None if nothing has."""
        why = self._modules.changed(self._judge)
        if why is not None:
            return why
        for table in list(self._tables):
            why = table.changed(self._judge)
            if why is not None:
                return why
        if not all(map(is_, map(type, self._owners), self._kinds)):
            return Change("the class of an object changed", for_good=True)
        for tensor, traits, payload in self._traits:
            if traits_of(tensor) != traits or _payload(tensor) is not payload:
                return _changed_tensor(tensor, traits)
        return None

    def _holds_the_same(self, judge: Judge, found: Any, now: Any) -> bool | None:
        """Compare what two objects hold, the first of which was looked into.

        Where they do, what was noted of the first is the second's from now on.
        """
        tables = self._tables_of.get(id(found))
        if tables is None:
            if not self.effects.assigns_to(found):
                return None
            self.effects.moved(found, now)  # The step only writes to it.
            return True
        pair = id(found), id(now)
        if pair in self._comparing:  # a cycle
            return True
        self._comparing.add(pair)
        try:
            holders = [_holder_in(table, found, now) for table in tables]
            for table, holder in zip(tables, holders, strict=True):
                if holder is None or table.changed(judge, holder) is not None:
                    return False
            for table, holder in zip(tables, holders, strict=True):
                table.holder = holder
            self._tables_of[id(now)] = self._tables_of.pop(id(found))
            self.effects.moved(found, now)
            return True
        finally:
            self._comparing.discard(pair)


def _holder_in(table: Table, found: Any, now: Any) -> Any:
    """Return what holds a table's values in the object that took the place of its owner."""
    return now if table.holder is found else getattr(now, "__dict__", None)


def _payload(tensor: Any) -> Any:
    return getattr(tensor, "_local_tensor", tensor)


def _flat(each: Sighting) -> Iterator[Sighting]:
    """Yield the values in two containers that are built alike; else the two themselves."""
    name, found, now = each
    if found is not now and type(found) is type(now):
        is_list = isinstance(found, tuple | list) and len(found) == len(now)
        is_dict = isinstance(found, dict) and list(found) == list(now)
        if is_list or is_dict:
            keys = found if is_dict else range(len(found))
            for key in keys:
                yield from _flat(Sighting((*name, key), found[key], now[key]))
            return
    if isinstance(found, tuple):
        for key, part in enumerate(found):
            yield from _flat(Sighting((*name, key), part, part))
        return
    yield each


def _changed_tensor(tensor: torch.Tensor, traits: tuple[Any, ...]) -> Change:
    what = f"a tensor of shape={tuple(tensor.shape)}"
    if tensor.requires_grad != traits[0]:
        return Change(f"requires_grad of {what} changed to {tensor.requires_grad}")
    if traits_of(tensor) != traits:
        return Change(f"a hook of {what} was added or removed")
    return Change(f"the data of {what} was replaced", for_good=True)
