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
it calls, with its attributes, children and hooks (``modules``). What cannot: an object that is
passed on as an argument and looked up there under a name that only a library's code knows, files,
clocks, and the state of objects of C.

Invariants:

* A premise is what held before the trace, not after: a step may change a thing and change it back.
* Nothing of the user's is run to find or compare premises, but ``__getattr__`` and ``__slots__``.
* A premise never breaks where PyTorch's result cannot change, except that the step itself keeps
  changing what it reads. Then each call traces, and says what changed: slow, and right.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from xla_dtensor.runtimes.premises.modules import ModuleBefore, Modules
from xla_dtensor.runtimes.premises.reach import Reach
from xla_dtensor.runtimes.premises.tables import Elements
from xla_dtensor.runtimes.premises.values import ABSENT, Change, Judge

__all__ = ["Change", "ModuleBefore", "Premises"]


class Premises:
    """What one trace takes for granted.

    Args:
        reach: What the step reaches by name, taken down before the trace.
        modules: What there was of modules before the trace.
    """

    def __init__(self, reach: Reach, modules: Modules) -> None:
        self._tables = reach.tables
        self._objects = reach.objects
        self._modules = modules
        self._requiring = [
            (tensor, tensor.requires_grad) for table in self._tables for tensor in table.tensors()
        ]
        self._judge = Judge(lambda tensor: True, self._looks_into)

    @classmethod
    def of_now(cls, step: Callable[..., Any]) -> Premises:
        """Return what a step takes for granted if it reads all that it can reach.

        Args:
            step: The step. Of modules those count that it reaches by name.
        """
        reach = Reach.of(step)
        modules = reach.modules.values()
        requiring = (id(p) for module in modules for p in module.parameters() if p.requires_grad)
        made = cls(reach, Modules({id(m): ModuleBefore.of(m) for m in modules}, requiring))
        for module in modules:
            made.see_module(module)
        made.settle(lambda value: isinstance(value, torch.Tensor))
        return made

    def see_module(self, module: torch.nn.Module) -> None:
        """Note a module that the step calls."""
        self._modules.see(module)

    def replaced(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the tensors in whose places others are now, with those.

        A tensor that is still somewhere, or has not the same one in all its places, is none.
        """
        pairs = [pair for table in self._tables for pair in table.pairs()]
        pairs += self._modules.pairs()
        nows: dict[int, dict[int, Any]] = {}
        for found, now in pairs:
            if isinstance(found, torch.Tensor):
                nows.setdefault(id(found), {})[id(now)] = now
        tensors = {id(found): found for found, _ in pairs}
        only = ((tensors[key], *now.values()) for key, now in nows.items() if len(now) == 1)
        return [(t, now) for t, now in only if now is not t and isinstance(now, torch.Tensor)]

    def settle(
        self,
        reads: Callable[[Any], bool],
        instead: Mapping[int, torch.Tensor] = MappingProxyType({}),
    ) -> None:
        """End the trace.

        Args:
            reads: Tells whether the program reads a tensor that is older than the trace; of a NumPy
                array, whether it reads its elements anew on every call.
            instead: By the ids of tensors that were found, those that the next call has to find.
        """
        self._judge = Judge(reads, self._looks_into)

        def forget(value: Any) -> Any:
            if isinstance(value, Elements):
                return ABSENT if reads(value.array) else value
            return instead.get(id(value)) if id(value) in instead else self._judge.forget(value)

        for table in self._tables:
            table.settle(forget)
        self._modules.settle(forget)
        # Of a tensor that is not read its kind is noted.
        self._requiring = [(tensor, flag) for tensor, flag in self._requiring if reads(tensor)]

    def broken(self) -> Change | None:
        """Return what has changed since the trace; None if nothing has."""
        why = self._modules.changed(self._judge)
        if why is not None:
            return why
        for table in self._tables:
            why = table.changed(self._judge)
            if why is not None:
                return why
        for tensor, flag in self._requiring:
            if tensor.requires_grad is not flag:
                what = f"shape={tuple(tensor.shape)} has requires_grad={not flag} now"
                return Change(f"a tensor of {what}")
        return None

    def _looks_into(self, value: Any) -> bool:
        return id(value) in self._objects
