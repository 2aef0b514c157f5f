"""What a step assigns in Python: names, items and what it appends, to be assigned on every call.

PyTorch runs ``self.loss = loss`` and ``history.append(loss)`` each time. A compiled step runs them
while it is traced, so what they changed is found by comparing, and done again after each run of the
program with what that run has computed.

Invariants:

* Only names that the step's code assigns to are compared, so what others change meanwhile is not
  taken for the step's.
* An effect is on the object that has the name at the time: where another object was accepted in the
  place of one (``moved``), the effects are on that one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import CellType
from typing import Any

import torch

from xla_dtensor.runtimes.premises.values import ABSENT

__all__ = ["Effect", "Effects"]

_REGISTRIES = ("_parameters", "_buffers", "_modules")


@dataclass(frozen=True)
class Effect:
    """One change.

    Args:
        do: Makes it, given a value.
        value: The value that the trace gave.
    """

    do: Callable[[Any], None]
    value: Any


@dataclass
class _Owner:
    """What is assigned to.

    Args:
        object: An object, a module's globals, the cell of a variable, a list or a dict.
        names: The names in it that are assigned to, with what they stood for.
        contents: Of a container, what it held.
    """

    object: Any
    names: dict[str, Any] = field(default_factory=dict)
    contents: Any = None


class Effects:
    """The names that a step assigns to, with what they held before."""

    def __init__(self) -> None:
        self._owners: dict[int, _Owner] = {}

    def _owner(self, owner: Any) -> _Owner:
        return self._owners.setdefault(id(owner), _Owner(owner))

    def attribute(self, owner: Any, name: str) -> None:
        """Note that an object's attribute is assigned to."""
        self._owner(owner).names.setdefault(name, _attribute_of_owner(owner, name))

    def variable(self, holder: CellType | dict[str, Any], name: str) -> None:
        """Note that a global, or a variable of a function around, is assigned to."""
        self._owner(holder).names.setdefault(name, _variable(holder, name))

    def container(self, owner: Any) -> None:
        """Note that a list or a dict is written to."""
        if not isinstance(owner, list | dict | deque):
            return
        known = self._owner(owner)
        if known.contents is None:
            known.contents = dict(owner) if isinstance(owner, dict) else list(owner)

    def assigns_to(self, owner: Any) -> bool:
        """Tell whether an object is assigned to."""
        return id(owner) in self._owners

    def moved(self, before: Any, owner: Any) -> None:
        """Let the effects on one object be on another one, which took its place."""
        known = self._owners.pop(id(before), None)
        if known is not None:
            known.object = owner
            self._owners[id(owner)] = known

    def rewinder(self) -> Callable[[], None]:
        """Return what makes all that is assigned to hold again what it holds now."""
        owners = [(o.object, dict(o.names), o.contents) for o in self._owners.values()]

        def rewind() -> None:
            for owner, names, contents in owners:
                for name, before in names.items():
                    _put_back(owner, name, before)
                if contents is not None and not _is_same(owner, contents):
                    owner.clear()
                    (owner.update if isinstance(owner, dict) else owner.extend)(contents)

        return rewind

    def found(self) -> list[Effect]:
        """Return what was changed since."""
        return [effect for owner in self._owners.values() for effect in _effects_on(owner)]

    def changed_otherwise(self) -> list[tuple[Any, Any]]:
        """Return lists that were changed by more than what was appended, with what they held."""
        lists = [each for each in self._owners.values() if isinstance(each.contents, list)]
        return [(each.object, each.contents) for each in lists if not _begins_with(each)]

    def settle(self) -> None:
        """End the trace: what there was before is kept no longer."""
        for owner in self._owners.values():
            owner.contents, owner.names = None, dict.fromkeys(owner.names)


def _effects_on(owner: _Owner) -> Iterator[Effect]:
    holds = type(owner.object) in (dict, CellType)
    look_up, assign = (_variable, _set_variable) if holds else (_attribute_of_owner, setattr)
    for name, before in owner.names.items():
        now = look_up(owner.object, name)
        if now is not before and now is not ABSENT:
            yield Effect(lambda value, n=name: assign(owner.object, n, value), now)
    if isinstance(owner.contents, dict):
        for key, now in owner.object.items():
            if owner.contents.get(key, ABSENT) is not now:
                yield Effect(lambda value, k=key: owner.object.__setitem__(k, value), now)
    elif owner.contents is not None and _begins_with(owner):
        new = list(owner.object)[len(owner.contents) :]
        if new:
            yield Effect(lambda values: owner.object.extend(values), new)


def _put_back(owner: Any, name: str, before: Any) -> None:
    holds = type(owner) in (dict, CellType)
    now = (_variable if holds else _attribute_of_owner)(owner, name)
    if now is before:
        return
    if before is not ABSENT:
        (_set_variable if holds else setattr)(owner, name, before)
    elif isinstance(owner, dict):
        del owner[name]
    elif isinstance(owner, CellType):
        del owner.cell_contents
    else:
        delattr(owner, name)


def _is_same(container: Any, contents: Any) -> bool:
    if isinstance(contents, dict):
        return list(container) == list(contents) and all(
            container[key] is value for key, value in contents.items()
        )
    pairs = zip(container, contents, strict=False)
    return len(container) == len(contents) and all(now is was for now, was in pairs)


def _begins_with(owner: _Owner) -> bool:
    """Tell whether a list still begins with what it held before the trace."""
    pairs = zip(owner.object, owner.contents, strict=False)
    return len(owner.object) >= len(owner.contents) and all(now is was for now, was in pairs)


def _attribute_of_owner(owner: Any, name: str) -> Any:
    own = getattr(owner, "__dict__", {})
    is_module = isinstance(owner, torch.nn.Module)
    for table in (own, *(own.get(kind, {}) for kind in _REGISTRIES if is_module)):
        if name in table:
            return table[name]
    if not hasattr(type(owner), "__slots__"):
        return ABSENT
    try:
        return object.__getattribute__(owner, name)
    except AttributeError:
        return ABSENT


def _variable(holder: Any, name: str) -> Any:
    if isinstance(holder, dict):
        return holder.get(name, ABSENT)
    try:
        return holder.cell_contents
    except ValueError:
        return ABSENT


def _set_variable(holder: Any, name: str, value: Any) -> None:
    if isinstance(holder, dict):
        holder[name] = value
    else:
        holder.cell_contents = value
