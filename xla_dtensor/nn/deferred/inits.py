"""Which functions initialise a model, and in which order.

First each module's own, submodules first, as constructors run: ``reset_parameters()``, or
``_reset_parameters()`` of ``nn.MultiheadAttention`` and ``nn.Transformer``. A model of Hugging
Face, which may be part of another one, ends its constructor with ``_init_weights(module)`` for each
module in it that no inner model has initialised. Last comes the caller's function.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from xla_dtensor.core.errors import ArgumentTypeError, DistributeError

__all__ = ["check_init", "initialisations"]


def check_init(model: nn.Module, init: Any) -> None:
    """Refuse an `init` that is none, or a model that needs one.

    Args:
        model: The model.
        init: None, False, a function, or the name of a method of the model.

    Raises:
        ArgumentTypeError: None of these.
        DistributeError: No such method, or a model whose constructor cannot be known.
    """
    if isinstance(init, str):
        if not callable(getattr(model, init, None)):
            raise DistributeError(
                f"materialize was called with init={init!r}. A {type(model).__name__} has no such "
                "method. Pass the name of a method of the model, or a function of one module."
            )
    elif init is None:
        owner = next((m for m in model.modules() if _is_own_style(m)), None)
        if owner is not None:
            name = type(owner).__name__
            raise DistributeError(
                f"materialize was called with init=None on a model with a {name}, which has "
                "_init_weights. It is no Hugging Face model, so what its constructor does with "
                "that method cannot be known. Pass init=model._init_weights if it is applied to "
                "every module, else a function that does what the constructor does."
            )
    elif init is not False and not callable(init):
        raise ArgumentTypeError(
            f"materialize was called with init={init!r} of type={type(init).__name__}. It says "
            "how values are made. Pass a function of one module, the name of a method of the "
            "model, False to leave values to a checkpoint, or None."
        )


def initialisations(
    model: nn.Module, init: Any, only: set[int] | None = None
) -> Iterator[tuple[nn.Module | None, Callable[[], Any]]]:
    """Yield the calls that initialise a model, in order, with the module whose own each is.

    Args:
        model: The model.
        init: As :func:`check_init` takes it.
        only: Ids of the modules whose own functions are called; all when None.
    """
    done: set[int] = set()
    owners = dict(_hugging_face_owners(model, None))
    for module in _children_first(model, set()):
        if only is None or id(module) in only:
            reset = _own_reset(module)
            if reset is not None:
                yield module, reset
        if _is_hugging_face(module):
            yield from _after_construction(module, owners, only, done)
    if isinstance(init, str):
        yield None, getattr(model, init)
    elif callable(init):
        for module in _children_first(model, set()):
            yield None, lambda module=module: init(module)


def _after_construction(
    model: nn.Module, owners: dict[int, Any], only: set[int] | None, done: set[int]
) -> Iterator[tuple[nn.Module, Callable[[], Any]]]:
    """Yield what ``post_init()`` of a model of Hugging Face calls, for modules not `done` yet."""
    for module in _children_first(model, done):
        if only is None or id(module) in only:
            owner = owners[id(module)]
            module.__dict__.pop("_is_hf_initialized", None)
            yield module, lambda owner=owner, module=module: owner._init_weights(module)


def _children_first(module: nn.Module, seen: set[int]) -> Iterator[nn.Module]:
    if id(module) in seen:
        return
    seen.add(id(module))
    for child in module.children():
        yield from _children_first(child, seen)
    yield module


def _own_reset(module: nn.Module) -> Callable[[], Any] | None:
    for name in ("reset_parameters", "_reset_parameters"):
        reset: Any = getattr(module, name, None)
        if callable(reset) and not _needs_arguments(reset):
            return reset
    return None


def _needs_arguments(function: Callable[..., Any]) -> bool:
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    return any(p.default is p.empty and p.kind not in kinds for p in parameters)


def _is_hugging_face(module: nn.Module) -> bool:
    return all(hasattr(module, name) for name in ("_init_weights", "init_weights", "post_init"))


def _is_own_style(module: nn.Module) -> bool:
    return hasattr(module, "_init_weights") and not _is_hugging_face(module)


def _hugging_face_owners(module: nn.Module, owner: Any) -> Iterator[tuple[int, Any]]:
    owner = module if _is_hugging_face(module) else owner
    if owner is not None:
        yield id(module), owner
    for child in module.children():
        yield from _hugging_face_owners(child, owner)
