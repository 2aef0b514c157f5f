"""What a step changes in Python's own objects, kept so that a failed trace leaves nothing behind.

While a step is traced, its tensors hold tracers. Storages are given their arrays back by the trace;
this module does the rest: gradients that ``backward`` hung on parameters, entries that an optimizer
made in its ``state``, modules' buffers and parameters that were replaced, and settings of param
groups. A step closes over all of these without listing them, so they are found among the objects
that Python's garbage collector knows.

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

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from xla_dtensor.runtimes.live_objects import live_objects

__all__ = ["PythonState"]


@dataclass(frozen=True)
class PythonState:
    """Gradients, optimizer state, buffers and parameters, as they were. Holds them alive."""

    gradients: list[tuple[torch.Tensor, torch.Tensor | None]]
    tables: list[tuple[dict[Any, Any], dict[Any, Any]]]

    @classmethod
    def now(cls) -> PythonState:
        """Take down what holds at present."""
        state = cls([], [])
        readers: dict[type, Callable[[Any], None] | None] = {}
        for found in live_objects(torch.Tensor, torch.optim.Optimizer, torch.nn.Module):
            kind = type(found)
            if kind not in readers:
                readers[kind] = state._reader(kind)
            reader = readers[kind]
            if reader is not None:
                reader(found)
        return state

    def _reader(self, kind: type) -> Callable[[Any], None] | None:
        if issubclass(kind, torch.Tensor):
            return self._read_tensor
        if issubclass(kind, torch.optim.Optimizer):
            return self._read_optimizer
        return self._read_module if issubclass(kind, torch.nn.Module) else None

    def _read_tensor(self, tensor: torch.Tensor) -> None:
        try:
            if tensor.requires_grad and tensor.is_leaf:
                self.gradients.append((tensor, tensor.grad))
        except RuntimeError:  # A view whose base was written where autograd could not follow.
            return

    def _read_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        tables = (optimizer.state, *optimizer.state.values(), *optimizer.param_groups)
        self.tables.extend((table, dict(table)) for table in tables)

    def _read_module(self, module: torch.nn.Module) -> None:
        fields = vars(module)  # One that is being made may have no tables yet.
        for table in (fields.get("_buffers"), fields.get("_parameters")):
            if table:
                self.tables.append((table, dict(table)))

    def restore(self) -> None:
        """Make it so again."""
        for tensor, grad in self.gradients:
            if tensor.grad is not grad:
                tensor.grad = grad
        for table, entries in self.tables:
            if len(table) != len(entries) or any(table[k] is not v for k, v in entries.items()):
                table.clear()
                table.update(entries)
