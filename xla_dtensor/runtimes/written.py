"""What a mutating op writes to, and returns: the very tensors that it wrote to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from xla_dtensor.core.errors import WriteError
from xla_dtensor.runtimes.nested import leaves

__all__ = [
    "makes_results",
    "refuse_overlap",
    "written_arguments",
    "written_targets",
    "written_values",
]

# They write one value to all elements, so it does not matter which of them share a place.
_FILLS = ("aten::fill_", "aten::zero_")


def makes_results(func: Any) -> bool:
    """Tell whether an op returns tensors of its own: batch norm writes statistics beside them."""
    return any(returned.alias_info is None for returned in func._schema.returns)


def written_targets(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the arguments that a mutating op wrote to, in the form in which the op returns them.

    Args:
        func: An ``OpOverload`` whose schema is mutable.
        args: Its arguments, as the caller passed them.
        kwargs: Its keyword arguments.

    Returns:
        None, one tensor or a tuple, as the op's schema says.
    """
    if not func._schema.returns:
        return None
    targets = written_values(func, args, kwargs)
    return targets[0] if len(targets) == 1 else tuple(targets)


def written_arguments(func: Any) -> list[str]:
    """Return the names of the arguments that an op writes to."""
    return [
        argument.name
        for argument in func._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def written_values(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the values of the arguments that an op writes to: tensors, or lists of them."""
    given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | dict(kwargs)
    return [given[name] for name in written_arguments(func)]


def refuse_overlap(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], *, fills: bool = True
) -> None:
    """Raise where elements of a target share one place: their values would overwrite each other.

    Args:
        func: An ``OpOverload`` whose schema is mutable.
        args: Its arguments.
        kwargs: Its keyword arguments.
        fills: Whether one value may be written to all of them.

    Raises:
        WriteError: A target is an expanded tensor.
    """
    if fills and func._schema.name in _FILLS:
        return
    for target in leaves(written_values(func, args, kwargs)):
        if isinstance(target, torch.Tensor) and _shares_places(target):
            raise WriteError(
                f"{func} was to write to an expanded tensor of shape={tuple(target.shape)}. "
                "Several elements share one place, and would overwrite each other in no fixed "
                "order. Call .clone() before writing."
            )


def _shares_places(tensor: torch.Tensor) -> bool:
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.numel() > 0 and any(size > 1 and step == 0 for size, step in steps)
