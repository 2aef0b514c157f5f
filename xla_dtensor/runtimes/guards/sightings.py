"""The tensors that a step found, each by the one name that the next call finds it under.

::

    self.count = state                a tensor that is an attribute: named by it
    self.batch = {"x": x, "y": y}     set anew before each call: x is `batch`, `x` of `self`, and
                                      not `x` of this dict, which the next call does not find

A container, or an object of the user's, is looked into by the name that it is under where another
one takes its place: the step itself puts one there, or the name was seen to change between calls.

Invariant: a tensor that the next call can find in two ways has two names here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any

import torch

from xla_dtensor.runtimes.guards.objects import Object, attribute_of, is_watched
from xla_dtensor.runtimes.guards.owners import Elements, Items, Owner
from xla_dtensor.runtimes.guards.values import ABSENT, Sighting, is_plain

__all__ = ["parts_of", "tensors_by_name"]

_ONE_THING = (torch.Tensor, torch.nn.Module, torch.optim.Optimizer, type)


def tensors_by_name(owners: Sequence[Owner], changing: Container[Any]) -> list[Sighting]:
    """Return each name of a tensor with the one that was found there, and what is there now.

    Args:
        owners: What there was before the step, but tuples, which are looked into by name.
        changing: The names that were seen to be given other values.
    """
    names = _Names(owners, changing)
    every = [(owner, sighting) for owner in owners for sighting in owner.sightings()]
    # What a container holds that the next call does not find, has no name by it.
    gone_now = [entry.found for _, entry in every if names.is_replaced(entry)]
    gone = {id(value) for value in names.parts_of(gone_now)}
    # What lives on tells by itself what it holds.
    alive = {id(owner.holder) for owner in owners} - gone
    there = [
        entry.now
        for owner, entry in every
        if id(owner.holder) in alive and entry.name not in changing
    ]
    gone -= {id(value) for value in names.parts_of(there, but=alive)}
    live = [sighting for owner, sighting in every if id(owner.holder) not in gone]
    named = {part.name: part for sighting in live for part in names.inside(sighting)}
    return [sighting for sighting in named.values() if isinstance(sighting.found, torch.Tensor)]


def parts_of(values: Iterable[Any]) -> list[Any]:
    """Return values, and what is in containers among them."""
    return _Names((), ()).parts_of(values)


class _Names:
    """Looks into containers and objects."""

    def __init__(self, owners: Sequence[Owner], changing: Container[Any]) -> None:
        self._changing = changing
        self._known = {id(o.holder): o for o in owners if isinstance(o, Object)}
        self._known |= {id(o.holder): o for o in owners if isinstance(o, Items | Elements)}

    def is_replaced(self, sighting: Sighting) -> bool:
        """Tell whether the next call finds another value under the name."""
        return sighting.found is not sighting.now or sighting.name in self._changing

    def inside(self, sighting: Sighting, is_open: bool = False) -> Iterator[Sighting]:
        """Yield what two values hold, under this name; the two where they are one thing."""
        name, found, now = sighting
        is_open |= self.is_replaced(sighting)
        held = self._held(found) if is_open or isinstance(found, tuple) else None
        if held is None:
            yield sighting
            return
        for key, part in held.items():
            part_now = _at(now, key) if type(now) is type(found) else ABSENT
            yield from self.inside(Sighting((*name, key), part, part_now), is_open)

    def parts_of(self, values: Iterable[Any], but: Container[int] = ()) -> list[Any]:
        """Return values, and what is in containers and known objects among them.

        Args:
            values: The values.
            but: The ids of those that nobody looks into.
        """
        parts: dict[int, Any] = {}
        stack = list(values)
        while stack:
            value = stack.pop()
            if id(value) in parts or is_plain(value):
                continue
            parts[id(value)] = value
            if id(value) in but:
                continue
            if isinstance(value, dict):
                stack += value.values()
            elif isinstance(value, list | tuple | set | deque):
                stack += value
            elif self._is_object(value):
                stack += self._known[id(value)].snapshot.values()
        return [*parts.values()]

    def _held(self, found: Any) -> dict[Any, Any] | None:
        """Return what was found in a value, by key; None for one thing."""
        is_container = isinstance(found, dict | list | tuple)
        if not is_container and not self._is_object(found):
            return None
        owner = self._known.get(id(found))
        if owner is not None:
            return {key: owner.snapshot.get(key, ABSENT) for key in owner.reads}
        return found if isinstance(found, dict) else dict(enumerate(found))

    def _is_object(self, value: Any) -> bool:
        """Tell whether this is an object of the user's whose attributes are all that it holds."""
        is_known = isinstance(self._known.get(id(value)), Object) and is_watched(type(value))
        return is_known and not isinstance(value, _ONE_THING)


def _at(value: Any, key: Any) -> Any:
    """Return what a value holds now."""
    if isinstance(value, dict):
        return dict.get(value, key, ABSENT)
    if isinstance(value, list | tuple):
        return value[key] if key < len(value) else ABSENT
    return attribute_of(value, key)
