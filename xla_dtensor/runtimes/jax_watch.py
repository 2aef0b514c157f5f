"""What a program baked in from Python: modules' modes and parameters, optimizers' settings."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.modules import module as torch_module
from torch.nn.utils import clip_grad

from xla_dtensor.runtimes.jax_numbers import NumbersMeetTensors
from xla_dtensor.runtimes.jax_step_values import inner
from xla_dtensor.runtimes.jax_traced_stacks import lanes_of
from xla_dtensor.runtimes.optimizer_inputs import OptimizerInputs
from xla_dtensor.runtimes.torch_own import put_back

__all__ = ["Watch", "see_modules", "watching"]

_ASKS_FOR_LISTS = "_has_foreach_support"

_current: Watch | None = None


@dataclass
class Watch:
    """What a program baked in from Python, to notice when it no longer holds."""

    inputs: OptimizerInputs
    answers: list[tuple[Callable[[], Any], bool]] = field(default_factory=list)
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
                return f"a parameter or buffer of {type(module).__name__} was replaced"
        if self.inputs.parameters_changed():
            return "an optimizer was given other parameters"
        if self.inputs.state_replaced():
            return "the state of an optimizer was replaced"
        changed = self.inputs.changed()
        if changed:
            return f"an optimizer's {', '.join(changed)} changed"
        if any(bool(ask()) != answer for ask, answer in self.answers):
            return "a number that the step branches on changed"
        return None

    def settle(self, answers: list[tuple[Callable[[], Any], bool]]) -> None:
        """Remember what holds at the end of the trace.

        Args:
            answers: What the step asked about numbers that Python knows.
        """
        self.inputs.settle()
        self.answers = answers


def _payloads(module: torch.nn.Module) -> list[Any]:
    return [inner(t) for t in (*module._parameters.values(), *module._buffers.values())]


def _same_objects(now: list[Any], then: list[Any]) -> bool:
    return len(now) == len(then) and all(a is b for a, b in zip(now, then, strict=True))


@contextlib.contextmanager
def watching(watch: Watch) -> Iterator[None]:
    """Watch modules and optimizers; keep autograd in this thread, where the trace is."""
    global _current
    put_back()
    hook = torch_module.register_module_forward_pre_hook(watch.see_module)
    _current = watch
    try:
        single_threaded = torch.autograd.set_multithreading_enabled(False)
        with watch.inputs.active(), single_threaded, NumbersMeetTensors(), _clipping_rows():
            yield
    finally:
        hook.remove()
        _current = None


@contextlib.contextmanager
def _clipping_rows() -> Iterator[None]:
    """Let torch clip gradients that are rows by lists, as it does on devices that it knows."""
    names = clip_grad.__dict__
    usual = names[_ASKS_FOR_LISTS]

    def may_take_lists(tensors: list[torch.Tensor], device: torch.device) -> bool:
        return usual(tensors, device) or bool(lanes_of([tensors]))

    names[_ASKS_FOR_LISTS] = may_take_lists
    try:
        yield
    finally:
        names[_ASKS_FOR_LISTS] = usual


def see_modules(modules: Iterable[torch.nn.Module]) -> None:
    """Note modules that the step uses without calling them, or with other parameters than theirs.

    To be called before those are swapped; does nothing outside of a step's trace.
    """
    for module in modules if _current is not None else ():
        _current.see_module(module, ())  # pyright: ignore[reportOptionalMemberAccess]
