"""The modules that a step calls: their attributes, parameters, children and hooks, as found.

A model has hundreds of modules, and they are compared on every call of a compiled step. So they are
compared as one long list of objects, in which each has to be the same one; only where one is not,
it is found out whose it is, and whether it may stand there.

Invariant: what was found is what held before the step was traced. A step may set an attribute and
set it back (``discriminator.requires_grad_(False)``), and is then traced once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch

from xla_dtensor.runtimes.premises.values import ABSENT, Change, Judge

__all__ = ["ModuleBefore", "Modules"]

_TENSORS = ("_parameters", "_buffers")
_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)
_TABLES = (*_TENSORS, "_modules", *_HOOKS)


@dataclass(frozen=True)
class ModuleBefore:
    """A module as it was.

    Args:
        attributes: Of the module itself, its tables among them.
        tables: What its tables held: parameters, buffers, children and hooks, by the tables' names.
        payloads: Of its parameters and buffers, which ``tensor.data = other`` may replace.
    """

    attributes: dict[str, Any]
    tables: dict[str, dict[str, Any]]
    payloads: dict[str, dict[str, Any]]

    @classmethod
    def of(cls, module: torch.nn.Module) -> ModuleBefore:
        """Take down a module; one that is being made may have no tables yet."""
        own = vars(module)
        tables = {name: dict(own[name]) for name in _TABLES if name in own}
        payloads = {
            kind: {name: _payload(tensor) for name, tensor in tables.get(kind, {}).items()}
            for kind in _TENSORS
        }
        return cls(dict(own), tables, payloads)


def _payload(tensor: Any) -> Any:
    return getattr(tensor, "_local_tensor", tensor)


class Modules:
    """The modules that a step calls.

    Args:
        before: Every module that there was before the step was traced, by id.
        requiring: The ids of the tensors that required a gradient then.
    """

    def __init__(self, before: Mapping[int, ModuleBefore], requiring: Iterable[int]) -> None:
        self._before = before
        self._requiring = frozenset(requiring)
        self._modules: dict[int, tuple[torch.nn.Module, ModuleBefore]] = {}
        self._dicts: list[dict[str, Any]] = []
        self._found: list[Any] = []
        self._tensors: list[dict[str, Any]] = []
        self._payloads: list[Any] = []
        self._parameters: list[dict[str, Any]] = []
        self._flags: list[bool] = []

    def see(self, module: torch.nn.Module) -> None:
        """Note a module that the step uses; one that the step has made is none of these."""
        key = id(module)
        before = self._before.get(key)
        if before is None or key in self._modules:
            return
        self._modules[key] = (module, before)
        own = vars(module)
        others = [name for name in before.tables if name not in _TENSORS]
        self._dicts += [own, *(own[name] for name in others)]
        self._found += before.attributes.values()
        for name in others:
            self._found += before.tables[name].values()
        for name in _TENSORS:
            self._tensors.append(own[name])
            self._payloads += before.payloads[name].values()
        self._parameters.append(own["_parameters"])
        parameters = before.tables.get("_parameters", {}).values()
        self._flags += [id(each) in self._requiring for each in parameters if each is not None]

    def pairs(self) -> Iterator[tuple[Any, Any]]:
        """Yield what was found and what there is now: of attributes, parameters and buffers."""
        for module, before in self._modules.values():
            own = vars(module)
            yield from _pairs(before.attributes, own)
            for name in _TENSORS:
                yield from _pairs(before.tables.get(name, {}), own[name])

    def settle(self, forget: Callable[[Any], Any]) -> None:
        """End the trace.

        Args:
            forget: Returns what has to be kept of a value, to compare others with it.
        """
        self._before = {}
        self._found = [forget(value) for value in self._found]
        self._payloads = []
        for _, before in self._modules.values():
            for name, value in before.attributes.items():
                before.attributes[name] = forget(value)
            for kind in _TENSORS:
                self._settle_tensors(before.tables.get(kind, {}), before.payloads[kind], forget)
                self._payloads += before.payloads[kind].values()

    def _settle_tensors(self, tensors: Any, payloads: Any, forget: Callable[[Any], Any]) -> None:
        for name, tensor in tensors.items():
            kept = forget(tensor)
            if isinstance(kept, torch.Tensor) and kept is not tensor:  # one that took its place
                tensors[name], payloads[name] = kept, _payload(kept)

    def changed(self, judge: Judge) -> Change | None:
        """Return what is no longer as it was found; None if the program still holds."""
        now = [value for table in self._dicts for value in table.values()]
        same = len(now) == len(self._found) and all(map(is_, now, self._found))
        tensors = [tensor for table in self._tensors for tensor in table.values()]
        payloads = [_payload(tensor) for tensor in tensors]
        same = same and len(payloads) == len(self._payloads)
        same = same and all(map(is_, payloads, self._payloads))
        parameters = [each for table in self._parameters for each in table.values()]
        if same and [p.requires_grad for p in parameters if p is not None] == self._flags:
            return None
        why = self._difference(judge)
        if why is None:
            self._found = now  # So that the next call finds these very objects.
        return why

    def _difference(self, judge: Judge) -> Change | None:
        for module, before in self._modules.values():
            own, kind = vars(module), type(module).__name__
            found = _in_table(own, before.attributes, judge, kind)
            if found is not None:
                return found
            for name, table in before.tables.items():
                if name in _TENSORS:
                    why = self._in_tensors(own[name], table, before.payloads[name], kind)
                else:
                    hook = f"a hook of {kind}" if name in _HOOKS else None
                    why = _in_table(own[name], table, judge, kind, hook)
                if why is not None:
                    return why
        return None

    def _in_tensors(self, now: Any, found: Any, payloads: Any, kind: str) -> Change | None:
        for name in (*found, *(name for name in now if name not in found)):
            was, is_now = found.get(name, ABSENT), now.get(name, ABSENT)
            if payloads.get(name, ABSENT) is not _payload(is_now):
                return Change(f"a parameter or buffer was replaced: {kind}.{name}", for_good=True)
            if isinstance(was, torch.nn.Parameter):
                flag = id(was) in self._requiring
                if is_now.requires_grad != flag:
                    return Change(f"{kind}.{name}.requires_grad changed to {not flag}")
        return None


def _pairs(found: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    return ((value, now.get(name, ABSENT)) for name, value in found.items())


def _in_table(
    now: Any, found: Any, judge: Judge, kind: str, called: str | None = None
) -> Change | None:
    for name in (*found, *(name for name in now if name not in found)):
        was, is_now = found.get(name, ABSENT), now.get(name, ABSENT)
        if not judge.accepts(was, is_now):
            return Change.of(called or f"{kind}.{name}", was, is_now)
    return None
