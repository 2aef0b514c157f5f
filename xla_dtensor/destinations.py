"""Can the destinations of a write hold its result? Asked of PyTorch, on stand-ins.

In-place ops and ops with ``out=`` keep their destination: the object, its shape, dtype and
placements. A result that does not fit is an error. PyTorch raises as well where it would have to
cast or broadcast, and makes ``out`` another shape, with a warning, where that does not fit: here
that is an error too, because ``out`` lies on the mesh as it was told to.

Each description of arguments is asked about once.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from xla_dtensor.errors import WriteError
from xla_dtensor.nested import map_nested
from xla_dtensor.runtimes.registry import get_runtime
from xla_dtensor.written import refuse_overlap

__all__ = ["check_destinations"]

# What PyTorch raises of a destination; a stand-in may raise other things that do not matter.
_REFUSALS = ("can't be cast to", "doesn't match the broadcast shape")
_checked: set[Any] = set()
_CHECKED_LIMIT = 50_000


def check_destinations(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], key: Sequence[Any]
) -> None:
    """Raise when an op that writes has a result that its destinations cannot hold.

    Args:
        func: An ``OpOverload`` whose schema is mutable.
        args: Its arguments.
        kwargs: Its keyword arguments.
        key: What tells this call apart from others, shapes and dtypes included.

    Raises:
        WriteError: The result has another shape, or a dtype that PyTorch does not cast; or the
            destination is an expanded tensor.
    """
    try:
        whole = tuple(key)
        if whole in _checked:
            return
    except TypeError:  # an argument that has no hash
        whole = None
    _check(func, args, kwargs)
    if whole is not None:
        if len(_checked) >= _CHECKED_LIMIT:
            _checked.clear()
        _checked.add(whole)


def _check(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    # torch_xla adds up what is written to elements that share a place.
    refuse_overlap(func, args, kwargs, fills=get_runtime().has_strides)
    if func.namespace != "aten" or torch.Tag.nondeterministic_seeded in func.tags:
        return
    outs = {a.name: kwargs[a.name] for a in func._schema.arguments if a.is_out and a.name in kwargs}
    # PyTorch's meta kernels know of shapes, and cast where those for values refuse. An op may raise
    # anything on values that are not its own: such errors say nothing.
    for stand_in in (_on_meta, _small):
        found = map_nested(stand_in, (tuple(args), dict(kwargs)))
        # An empty destination takes any shape without a warning.
        empty = map_nested(lambda v, make=stand_in: _emptied(make(v)), outs)
        error = _error_of(func, found[0], {**found[1], **empty})
        if error is not None and any(refusal in str(error) for refusal in _REFUSALS):
            raise WriteError(
                f"{func} was called on DTensors: {error}. An op that writes keeps the shape and "
                "dtype of its destination. Use the op that returns its result, or cast first."
            )
        if error is None and stand_in is _on_meta:
            for name, given in outs.items():
                _check_shapes(func, name, given, empty[name])


def _error_of(func: Any, args: Any, kwargs: Any) -> Exception | None:
    try:
        with _disable_current_modes(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            func(*args, **kwargs)
    except Exception as error:
        # With its traceback it would keep every frame up to here alive, and itself among them: a
        # cycle, whose collection would clear the gradients that some frame refers to.
        return error.with_traceback(None)
    return None


def _check_shapes(func: Any, name: str, given: Any, after: Any) -> None:
    if isinstance(given, (list, tuple)):
        for one, other in zip(given, after, strict=True):
            _check_shapes(func, name, one, other)
    elif isinstance(given, torch.Tensor) and given.shape != after.shape:
        raise WriteError(
            f"{func} was called with {name}= of shape={tuple(given.shape)}, and its result has "
            f"shape={tuple(after.shape)}. A destination lies on the mesh as it was told to, and "
            "keeps its shape. Pass one of the result's shape, or use the result without out=."
        )


def _on_meta(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _small(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.ones([min(size, 1) for size in value.shape], dtype=value.dtype)


def _emptied(value: Any) -> Any:
    return value.new_empty(0) if isinstance(value, torch.Tensor) else value
