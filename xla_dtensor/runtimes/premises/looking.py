"""Looking at functions, modules and objects without running anything of theirs."""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator, Set
from typing import Any

import torch

from xla_dtensor.runtimes.premises.libraries import is_of_library

__all__ = ["cells_of", "forward_of", "hooks_of", "is_opaque", "names_in"]


_EVERY_MODULE = frozenset(vars(torch.nn.Module()))


def forward_of(module: torch.nn.Module) -> Any:
    """Return a module's own ``forward``, else its class's."""
    return vars(module).get("forward", inspect.getattr_static(type(module), "forward", None))


def hooks_of(module: torch.nn.Module) -> Iterator[Any]:
    """Yield the hooks of a module's calls."""
    for table in (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    ):
        yield from table.values()


def cells_of(function: types.FunctionType) -> Iterator[Any]:
    """Yield what the variables around a function stand for."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:
            continue


def names_in(value: Any, names: Set[str]) -> Set[str]:
    """Return which of some attributes an object has; all of them where it answers to any name."""
    kind, own = type(value), getattr(value, "__dict__", None)
    if isinstance(value, torch.Tensor):
        return names & {*(own or ())}
    if isinstance(value, type):
        return names & {*_of_class(value)}
    if isinstance(value, torch.nn.Module):
        # Its methods count where they are called; what it is itself is compared with the modules.
        return names & ({*vars(value)} | {*_settings(kind)}) - _EVERY_MODULE
    if hasattr(kind, "__getattr__"):
        return names
    return names & {*_of_class(kind), *(own if isinstance(own, dict) else ())}


def _settings(kind: type) -> Iterator[str]:
    for each in kind.__mro__:
        if not is_of_library(each):
            yield from (n for n, v in list(vars(each).items()) if not inspect.isroutine(v))


def is_opaque(value: Any) -> bool:
    """Tell whether a library's code runs wherever an object is looked at: proxies, old names."""
    looks_up = inspect.getattr_static(type(value), "__getattribute__")
    return isinstance(looks_up, types.FunctionType) and is_of_library(type(value))


def _of_class(kind: type) -> Iterator[str]:
    for each in kind.__mro__:
        yield from list(vars(each))
