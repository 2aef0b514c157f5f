"""Name what each module computes, so that a profile and the HLO say whose an op is.

While a step is traced, every module call opens a scope of the compiler: ops of
``model.layers[0].attention`` are called ``Llama/layers.0/attention/...``. The backward has no
module calls; there the gradient that reaches a module's output opens its scope, under ``backward``,
and the gradient that reaches the module's input closes it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.nn.modules import module as torch_module
from torch.utils._pytree import tree_leaves

__all__ = ["naming_modules"]

Scope = Callable[[str], AbstractContextManager[Any]]


class _Names:
    """The modules that are being called, outermost first, and their names within their parents."""

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self._open: list[tuple[str, AbstractContextManager[Any]]] = []
        self._local: dict[int, str] = {}
        self._backward: AbstractContextManager[Any] | None = None

    def enter(self, module: torch.nn.Module, args: Any) -> None:
        """Open a module's scope; a forward pre-hook."""
        name = self._local.get(id(module)) or type(module).__name__
        for child_name, child in module.named_children():
            self._name(child_name, child)
        scope = self._scope(name)
        scope.__enter__()
        self._open.append((name, scope))
        self._on_gradient(args, self._path(-1))

    def leave(self, module: torch.nn.Module, args: Any, result: Any) -> None:
        """Close it; a forward hook, called after an exception too."""
        if not self._open:
            return
        self._on_gradient(result, self._path())
        self._open.pop()[1].__exit__(None, None, None)

    def close(self) -> None:
        """Close what is still open."""
        self._backward_of(None)
        while self._open:
            self._open.pop()[1].__exit__(None, None, None)

    def _name(self, name: str, module: torch.nn.Module) -> None:
        self._local[id(module)] = name
        if isinstance(module, torch.nn.ModuleList | torch.nn.ModuleDict):  # Never called itself.
            for child_name, child in module.named_children():
                self._name(f"{name}.{child_name}", child)

    def _path(self, end: int | None = None) -> str:
        return "/".join(name for name, _ in self._open[:end])

    def _on_gradient(self, tensors: Any, path: str) -> None:
        for tensor in tree_leaves(tensors):
            if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None:
                tensor.register_hook(lambda _grad: self._backward_of(path))

    def _backward_of(self, path: str | None) -> None:
        if self._backward is not None:
            self._backward.__exit__(None, None, None)
            self._backward = None
        if path:
            self._backward = self._scope(f"backward/{path}")
            self._backward.__enter__()


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
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        names.close()
