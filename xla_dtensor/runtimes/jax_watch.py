"""What a program baked in from Python: modules' modes and parameters, optimizers' settings."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.modules import module as torch_module

from xla_dtensor.runtimes.jax_step_values import inner
from xla_dtensor.runtimes.optimizer_inputs import OptimizerInputs

__all__ = ["Watch", "watching"]


@dataclass
class Watch:
    """What a program baked in from Python, to notice when it no longer holds."""

    inputs: OptimizerInputs
    settings: tuple[Any, ...] = ()
    modules: dict[int, tuple[Any, bool, list[Any]]] = field(default_factory=dict)

    def see_module(self, module: torch.nn.Module, args: Any) -> None:
        """Note a module that the step calls; a forward pre-hook."""
        if id(module) not in self.modules:
            seen = (weakref.ref(module), module.training, _payloads(module))
            self.modules[id(module)] = seen

    def broken(self) -> str | None:
        """Return what has changed since the trace, None if nothing has."""
        for reference, training, payloads in self.modules.values():
            module = reference()
            if module is None:
                continue
            if module.training != training:
                return f"{type(module).__name__}.training changed to {module.training}"
            if not _same_objects(_payloads(module), payloads):
                return f"a parameter of {type(module).__name__} was replaced"
        if self.inputs.settings() != self.settings:
            return "an optimizer's hyperparameters or parameters changed"
        return None


def _payloads(module: torch.nn.Module) -> list[Any]:
    return [inner(parameter) for parameter in module._parameters.values()]


def _same_objects(now: list[Any], then: list[Any]) -> bool:
    return len(now) == len(then) and all(a is b for a, b in zip(now, then, strict=True))


@contextlib.contextmanager
def watching(watch: Watch) -> Iterator[None]:
    """Watch modules and optimizers; keep autograd in this thread, where the trace is."""
    hook = torch_module.register_module_forward_pre_hook(watch.see_module)
    try:
        with watch.inputs.active(), torch.autograd.set_multithreading_enabled(False):
            yield
    finally:
        hook.remove()
