"""Name what each module computes, so that a profile and the HLO say whose an op is.

While a step is traced, every module call opens a scope of the compiler: ops of
``model.layers[0].attention`` are called ``Llama/layers.0/attention/...``, and what an optimizer's
step computes ``optimizer/...``. The backward calls no modules: its ops have the names of the
forward's, after ``backward`` (``jax_sources``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.nn.modules import module as torch_module
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

__all__ = ["named_from", "naming_modules"]

Scope = Callable[[str], AbstractContextManager[Any]]

_paths: dict[int, str] = {}


class _Names:
    """The modules that are being called, outermost first, and their names within their parents."""

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self._open: list[tuple[str, AbstractContextManager[Any]]] = []
        self._local: dict[int, str] = {}

    def enter(self, module: torch.nn.Module, args: Any) -> None:
        """Open a module's scope; a forward pre-hook."""
        name = self._local.get(id(module)) or _paths.get(id(module)) or type(module).__name__
        for child_name, child in module.named_children():
            self._name(child_name, child)
        scope = self._scope(name)
        scope.__enter__()
        self._open.append((name, scope))

    def leave(self, module: torch.nn.Module, args: Any, result: Any) -> None:
        """Close it; a forward hook, called after an exception too."""
        if self._open:
            self._open.pop()[1].__exit__(None, None, None)

    def enter_optimizer(self, *_: Any) -> None:
        """Open an optimizer's scope; a pre-hook of its step."""
        scope = self._scope("optimizer")
        scope.__enter__()
        self._open.append(("optimizer", scope))

    def leave_optimizer(self, *_: Any) -> None:
        """Close it; a post-hook of its step."""
        if self._open and self._open[-1][0] == "optimizer":
            self._open.pop()[1].__exit__(None, None, None)

    def close(self) -> None:
        """Close what is still open."""
        while self._open:
            self._open.pop()[1].__exit__(None, None, None)

    def _name(self, name: str, module: torch.nn.Module) -> None:
        self._local[id(module)] = name
        if isinstance(module, torch.nn.ModuleList | torch.nn.ModuleDict):  # Never called itself.
            for child_name, child in module.named_children():
                self._name(f"{name}.{child_name}", child)


@contextlib.contextmanager
def named_from(models: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Let a module that no other module calls have its path in a model, not its class's name.

    A step that calls ``model.encoder(x)`` has ops of ``encoder`` then, and not of ``Encoder``.

    Args:
        models: The models that paths begin at.
    """
    before = dict(_paths)
    _paths.update((id(one), path) for m in models for path, one in m.named_modules() if path)
    try:
        yield
    finally:
        _paths.clear()
        _paths.update(before)


@contextlib.contextmanager
def naming_modules(scope: Scope) -> Iterator[None]:
    """Open a scope for each module that is called inside.

    Args:
        scope: Makes the compiler's scope of a name; scopes nest.
    """
    names = _Names(scope)
    handles = [
        torch_module.register_module_forward_pre_hook(names.enter),
        torch_module.register_module_forward_hook(names.leave, always_call=True),
        register_optimizer_step_pre_hook(names.enter_optimizer),
        register_optimizer_step_post_hook(names.leave_optimizer),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        names.close()
