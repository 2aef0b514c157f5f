"""The modules that a step uses: what their code reads of them, parameters, children and hooks.

A model has hundreds of modules, and they are compared on every call of a compiled step. So they are
compared as one long list of objects, in which each has to be the same one; only where one is not,
it is found out whose it is, and whether it may stand there.

Invariant: what was found is what held before the step was traced. A step may set an attribute and
set it back (``discriminator.requires_grad_(False)``), and is then traced once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import is_
from typing import Any

import torch
from torch.nn.modules import module as torch_module

from xla_dtensor.runtimes.premises.sources import all_names
from xla_dtensor.runtimes.premises.values import ABSENT, Change, Judge, Moving, Sighting

__all__ = ["ModuleBefore", "Modules", "global_hooks", "traits_of"]

_TENSORS = ("_parameters", "_buffers")
_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)
_TABLES = (*_TENSORS, "_modules", *_HOOKS)
_GLOBAL_HOOKS = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)
_ASKS_FOR_ANY = frozenset({"__dict__", "vars", "__getattribute__"})
_OWN_TABLES = frozenset(vars(torch.nn.Module())) - {"training"}


@dataclass(frozen=True)
class ModuleBefore:
    """A module as it was.

    Args:
        attributes: Of the module itself, its tables among them.
        tables: What its tables held: parameters, buffers, children and hooks, by the tables' names.
        payloads: Of its parameters and buffers, which ``tensor.data = other`` may replace.
        traits: Of its parameters, in their order.
    """

    attributes: dict[str, Any]
    tables: dict[str, dict[str, Any]]
    payloads: dict[str, dict[str, Any]]
    traits: list[Any]

    @classmethod
    def of(cls, module: torch.nn.Module) -> ModuleBefore:
        """Take down a module; one that is being made may have no tables yet."""
        own = vars(module)
        tables = {name: dict(own[name]) for name in _TABLES if name in own}
        payloads = {
            kind: {name: _payload(tensor) for name, tensor in tables.get(kind, {}).items()}
            for kind in _TENSORS
        }
        return cls(dict(own), tables, payloads, _traits(tables.get("_parameters", {}).values()))

    def only(self, names: Iterable[str]) -> ModuleBefore:
        """Return a copy of it, of the module's own attributes with some only."""
        attributes = {name: self.attributes.get(name, ABSENT) for name in names}
        tables = {kind: dict(table) for kind, table in self.tables.items()}
        payloads = {kind: dict(table) for kind, table in self.payloads.items()}
        return ModuleBefore(attributes, tables, payloads, self.traits)


class Modules:
    """The modules that a step uses.

    Args:
        before: Every module that there was before the step was traced, by id.
    """

    def __init__(self, before: Mapping[int, ModuleBefore]) -> None:
        self._before = before
        self._modules: dict[int, tuple[torch.nn.Module, ModuleBefore, Sequence[str]]] = {}
        self._names: list[tuple[dict[str, Any], Sequence[str]]] = []
        self._dicts: list[dict[str, Any]] = []
        self._tensors: list[dict[str, Any]] = []
        self._parameters: list[dict[str, Any]] = []
        self._seen: list[Any] = []  # what the last call found
        self._global = global_hooks()

    def see(self, module: torch.nn.Module) -> None:
        """Note a module that the step uses; one that the step has made is none of these."""
        key = id(module)
        before = self._before.get(key)
        if before is None or key in self._modules:
            return
        read = _names_read_by(type(module))
        every = {**before.attributes, **vars(module)}
        names = [n for n in every if n not in _OWN_TABLES and (read is None or n in read)]
        self._modules[key] = (module, before.only(names), names)
        own = vars(module)
        self._names.append((own, names))
        self._dicts += [own[name] for name in before.tables if name not in _TENSORS]
        self._tensors += [own[name] for name in _TENSORS]
        self._parameters.append(own["_parameters"])

    def settle(self, forget: Callable[[Any], Any]) -> None:
        """End the trace.

        Args:
            forget: Returns what has to be kept of a value, to compare others with it.
        """
        self._before = {}
        for _, before, names in self._modules.values():
            for name in names:
                before.attributes[name] = forget(before.attributes[name])
            for kind in _TENSORS:
                _settle_tensors(before.tables.get(kind, {}), before.payloads[kind], forget)

    def sightings(self) -> Iterator[Sighting]:
        """Yield what was found and what there is now: of attributes, parameters and buffers."""
        for module, before, names in self._modules.values():
            own = vars(module)
            for name in names:
                found = before.attributes[name]
                yield Sighting((id(own), name), found, own.get(name, ABSENT))
            for kind in _TENSORS:
                table = own[kind]
                for name, found in before.tables.get(kind, {}).items():
                    yield Sighting((id(table), name), found, table.get(name, ABSENT))

    def changed(self, judge: Judge) -> Change | None:
        """Return what is no longer as it was found; None if the program still holds."""
        now = self._now()
        same = len(now) == len(self._seen) and all(map(is_, now, self._seen))
        traits = [trait for table in self._parameters for trait in _traits(table.values())]
        found = [trait for _, before, _ in self._modules.values() for trait in before.traits]
        if same and traits == found and self._seen:
            return _hooks_changed(self._global)
        why = self._difference(judge) or _hooks_changed(self._global)
        if why is None:
            self._seen = now
        return why

    def _now(self) -> list[Any]:
        names = [own.get(name, ABSENT) for own, each in self._names for name in each]
        tables = [value for table in self._dicts for value in table.values()]
        keys = [key for table in self._dicts for key in table]
        payloads = [_payload(value) for table in self._tensors for value in table.values()]
        return [*names, *tables, *keys, *payloads]

    def _difference(self, judge: Judge) -> Change | None:
        for module, before, names in self._modules.values():
            own, kind = vars(module), type(module).__name__
            for name in names:
                found, now = before.attributes[name], own.get(name, ABSENT)
                if not judge.accepts(found, now):
                    return Change.of(f"{kind}.{name}", found, now, (id(own), name))
                before.attributes[name] = judge.now_expected(found, now)
            for name, table in before.tables.items():
                if name in _TENSORS:
                    why = _in_tensors(own[name], table, before.payloads[name], kind)
                else:
                    hook = f"a hook of {kind}" if name in _HOOKS else None
                    why = _in_table(own[name], table, judge, kind, hook)
                if why is not None:
                    return why
            why = _in_traits(own["_parameters"], before, kind)
            if why is not None:
                return why
        return None


def traits_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return what of a tensor, besides its values, a backward pass depends on."""
    hooks = tensor._backward_hooks
    later = getattr(tensor, "_post_accumulate_grad_hooks", None)
    return tensor.requires_grad, tuple(hooks) if hooks else (), tuple(later) if later else ()


def _traits(parameters: Iterable[Any]) -> list[Any]:
    return [None if each is None else traits_of(each) for each in parameters]


def _payload(tensor: Any) -> Any:
    return getattr(tensor, "_local_tensor", tensor)


@lru_cache(maxsize=10_000)
def _names_read_by(kind: type) -> frozenset[str] | None:
    """Return the names that a module's own code may read of it; None for any."""
    names = {"training", "forward"}
    for each in kind.__mro__:
        if each in (torch.nn.Module, object):
            continue
        found = all_names(each)
        if found & _ASKS_FOR_ANY:
            return None
        names |= found
    return frozenset(names)


def _settle_tensors(tensors: Any, payloads: Any, forget: Callable[[Any], Any]) -> None:
    for name, tensor in tensors.items():
        kept = forget(tensor)
        if isinstance(kept, Moving):
            tensors[name] = payloads[name] = kept


def global_hooks() -> list[tuple[Any, ...]]:
    """Return the hooks that torch calls for every module."""
    return [tuple(getattr(torch_module, name)) for name in _GLOBAL_HOOKS]


def _hooks_changed(found: list[tuple[Any, ...]]) -> Change | None:
    return None if global_hooks() == found else Change("the hooks of all modules changed")


def _in_tensors(now: Any, found: Any, payloads: Any, kind: str) -> Change | None:
    for name in (*found, *(name for name in now if name not in found)):
        expected, is_now = payloads.get(name, ABSENT), now.get(name, ABSENT)
        fits = expected.takes(is_now) if isinstance(expected, Moving) else False
        if not fits and expected is not _payload(is_now):
            why = f"a parameter or buffer was replaced: {kind}.{name}"
            is_buffer = not isinstance(is_now, torch.nn.Parameter)
            return Change(why, for_good=True, name=(id(now), name) if is_buffer else None)
    return None if list(now) == list(found) else Change(f"the order of {kind}'s tensors changed")


def _in_traits(now: Any, before: ModuleBefore, kind: str) -> Change | None:
    for (name, tensor), found in zip(now.items(), before.traits, strict=True):
        if tensor is None or traits_of(tensor) == found:
            continue
        if tensor.requires_grad != found[0]:
            return Change(f"{kind}.{name}.requires_grad changed to {tensor.requires_grad}")
        return Change(f"a hook of the tensor {kind}.{name} was added or removed")
    return None


def _in_table(
    now: Any, found: Any, judge: Judge, kind: str, called: str | None = None
) -> Change | None:
    for name in (*found, *(name for name in now if name not in found)):
        was, is_now = found.get(name, ABSENT), now.get(name, ABSENT)
        if not judge.accepts(was, is_now):
            return Change.of(called or f"{kind}.{name}", was, is_now)
    return None if list(now) == list(found) else Change(f"the order of {kind}'s parts changed")
