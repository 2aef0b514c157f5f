"""One function that is gone into: its chains, with the values that they lead to."""

from __future__ import annotations

import builtins
import sys
import types
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from xla_dtensor.runtimes.premises.arguments import Arguments, Given, Spread, spread
from xla_dtensor.runtimes.premises.chains import (
    ALL,
    ARGUMENT,
    ATTRIBUTE,
    CELL,
    EACH,
    IMPORT,
    ITEM,
    MADE,
    OVERRIDDEN,
    CallRead,
    Chain,
    Values,
)
from xla_dtensor.runtimes.premises.values import ABSENT

if TYPE_CHECKING:
    from xla_dtensor.runtimes.premises.lookups import Lookups

__all__ = ["Frame", "given_to"]


class Frame:
    """A function, and what its arguments are.

    Args:
        lookups: Looks up the steps of chains, and notes them.
        function: The function.
        given: The values of its arguments, where known.
    """

    def __init__(self, lookups: Lookups, function: types.FunctionType, given: Given) -> None:
        self._lookups = lookups
        self._function = function
        self._given = given
        self._found: dict[Chain, list[Any]] = {}

    def all_values(self, chains: Values) -> list[Any]:
        """Return what any of some chains leads to."""
        return [value for chain in sorted(chains, key=str) for value in self.values(chain.bare())]

    def values(self, chain: Chain) -> list[Any]:
        """Return what a chain leads to; each step is noted."""
        if chain not in self._found:
            self._found[chain] = self._looked_up(chain)
        return self._found[chain]

    def arguments(self, call: CallRead) -> Arguments:
        """Return what a call gives."""
        args: list[Sequence[Any]] = []
        more: list[Any] = []
        others: list[Any] = []
        kwargs = {name: self.all_values(chains) for name, chains in call.kwargs.items()}
        is_counted = True  # which position the next argument has
        for place, chains in enumerate(call.args):
            held = Spread([self.all_values(chains)])
            if place in call.stars:
                held = self._spread(chains)
            if is_counted:
                args += held.places
            else:
                more += (value for each in held.places for value in each)
            more += held.rest
            is_counted = is_counted and held.is_all
        for held in map(self._spread, call.doubles):
            for name, values in held.named.items():
                kwargs[name] = [*kwargs.get(name, ()), *values]
            others += held.rest
        return Arguments(args, kwargs, more, others)

    def _spread(self, chains: Values) -> Spread:
        """Return what ``*x`` or ``**x`` gives."""
        first = next(iter(chains), None)
        if first is not None and first.is_star and len(chains) == 1:
            return spread(self._given, first.name)
        found = (self.values(chain.then(EACH).bare()) for chain in sorted(chains, key=str))
        return Spread(rest=[value for each in found for value in each], is_all=False)

    def _looked_up(self, chain: Chain) -> list[Any]:
        if not chain.steps:
            return [value for value in self._roots(chain) if value is not ABSENT]
        before = self.values(chain._replace(steps=chain.steps[:-1]))
        kind, key = chain.steps[-1]
        found = [value for owner in before for value in self._step(owner, kind, key)]
        return [value for value in found if value is not ABSENT]

    def _step(self, owner: Any, kind: str, key: Any) -> Iterable[Any]:
        if kind == ATTRIBUTE:
            return self._lookups.attribute(owner, key)
        if kind == EACH:
            return self._lookups.elements(owner)
        if kind == ITEM:
            return () if self._is_own_setting(owner) else self._lookups.item(owner, key)
        if kind == OVERRIDDEN:
            return self._overridden(owner, key)
        assert kind == MADE
        return ()

    def _is_own_setting(self, owner: Any) -> bool:
        """Tell whether an optimizer's code reads its settings, which are lent to it."""
        first = next(iter(self._given.values()), ())
        own = first[0] if first else None
        is_optimizer = isinstance(own, torch.optim.Optimizer)
        return is_optimizer and any(owner is group for group in own.param_groups)

    def _roots(self, chain: Chain) -> Iterable[Any]:
        if chain.root == ARGUMENT:
            held = self._given.get(chain.name)
            if held is None and chain.name.endswith("]"):
                held = self._given.get(chain.name.partition("[")[0] + ALL)
            return held or ()
        if chain.root == IMPORT:
            return (sys.modules.get(chain.name, ABSENT),)
        if chain.root == CELL:
            cell = cell_of(self._function, chain.name)
            return () if cell is None else (self._lookups.cell(cell, chain.name, self._function),)
        names = self._function.__globals__
        if chain.name not in names and hasattr(builtins, chain.name):
            return (getattr(builtins, chain.name),)
        return (self._lookups.global_(names, chain.name),)

    def _overridden(self, owner: Any, name: str) -> Iterable[Any]:
        """Return ``super().name`` in a method of `owner`."""
        cell = cell_of(self._function, "__class__")
        kinds = (owner if isinstance(owner, type) else type(owner)).__mro__
        if cell is None or cell.cell_contents not in kinds:
            return ()
        later = kinds[kinds.index(cell.cell_contents) + 1 :]
        return self._lookups.of_classes(later, name, owner)

    def note_written(self, chain: Chain) -> None:
        """Note that a chain's last step is assigned to."""
        if not chain.steps:
            self._note_variable(chain)
            return
        kind, key = chain.steps[-1]
        for owner in self.values(chain._replace(steps=chain.steps[:-1])):
            self._lookups.written(owner, kind, key)

    def _note_variable(self, chain: Chain) -> None:
        cell = cell_of(self._function, chain.name) if chain.root == CELL else None
        holder = self._function.__globals__ if cell is None else cell
        self._lookups.variable_written(holder, chain.name)


def cell_of(function: types.FunctionType, name: str) -> types.CellType | None:
    """Return the cell of a variable of a function around."""
    names: Sequence[str] = function.__code__.co_freevars
    return (function.__closure__ or ())[names.index(name)] if name in names else None


def given_to(container: Any) -> list[Any]:
    """Return the elements of a container; of a dict the values."""
    return list(container.values()) if isinstance(container, dict) else list(container)
