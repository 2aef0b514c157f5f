"""What a step changes in Python's own objects, kept so that a failed trace leaves nothing behind.

While a step is traced, its tensors hold tracers. Storages are given their arrays back by the trace;
this module does what no Python of a step is seen to do: gradients that ``backward`` hung on
parameters, entries that an optimizer made in its ``state``, settings of param groups. A step closes
over all of these without listing them, so they are found among the objects that Python's garbage
collector knows.

Example:
    >>> import torch
    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> before = PythonState.now()
    >>> weight.sum().backward()
    >>> before.restore()
    >>> weight.grad is None
    True
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from xla_dtensor.runtimes.host_work.tape import is_host, memory_key
from xla_dtensor.runtimes.live_objects import live_objects

__all__ = ["PythonState"]


@dataclass(frozen=True)
class PythonState:
    """Gradients and optimizer state as they were. Holds them alive.

    Args:
        gradients: Leaves that require a gradient, with the one that they had.
        tables: Dicts, with what they held.
        host_memories: The memories of plain CPU tensors, as ``memory_key`` tells them apart.
    """

    gradients: list[tuple[torch.Tensor, torch.Tensor | None]]
    tables: list[tuple[dict[Any, Any], dict[Any, Any]]]
    host_memories: set[int] = field(default_factory=set)

    @classmethod
    def now(cls) -> PythonState:
        """Take down what holds at present."""
        state = cls([], [])
        readers: dict[type, Callable[[Any], None] | None] = {}
        for instance in live_objects(torch.Tensor, torch.optim.Optimizer):
            kind = type(instance)
            if kind not in readers:
                readers[kind] = state._reader(kind)
            reader = readers[kind]
            if reader is not None:
                reader(instance)
        return state

    def _reader(self, kind: type) -> Callable[[Any], None] | None:
        if issubclass(kind, torch.Tensor):
            return self._read_tensor
        return self._read_optimizer if issubclass(kind, torch.optim.Optimizer) else None

    def _read_tensor(self, tensor: torch.Tensor) -> None:
        # A view whose base was written where autograd could not follow raises, and so does what
        # torch.func has wrapped: a failed transform leaves that in its traceback.
        with contextlib.suppress(RuntimeError):
            if is_host(tensor):
                self.host_memories.add(memory_key(tensor))
            if tensor.requires_grad and tensor.is_leaf:
                self.gradients.append((tensor, tensor.grad))

    def _read_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        tables: list[Any] = [optimizer.state, *optimizer.param_groups]
        seen: set[int] = set()
        while tables:
            table = tables.pop()
            if isinstance(table, dict) and id(table) not in seen:
                seen.add(id(table))
                self.tables.append((table, dict(table)))
                tables += table.values()

    def restore(self) -> None:
        """Make it so again."""
        for tensor, grad in self.gradients:
            if tensor.grad is not grad:
                tensor.grad = grad
        for table, entries in self.tables:
            if len(table) != len(entries) or any(table[k] is not v for k, v in entries.items()):
                table.clear()
                table.update(entries)
