"""What a mutating op writes to, and returns: the very tensors that it wrote to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from xla_dtensor.core.errors import WriteError
from xla_dtensor.runtimes.nested import leaves

__all__ = [
    "makes_results",
    "may_overlap",
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
    arguments = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | dict(
        kwargs
    )
    return [arguments[name] for name in written_arguments(func)]


def refuse_overlap(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], *, fills: bool = True
) -> None:
    """Raise where elements of a target share one place: their values would overwrite each other.

    Args:
        func: An ``OpOverload`` whose schema is mutable.
        args: Its arguments.
        kwargs: Its keyword arguments.
        fills: Whether one value may be written to all of them, and other values to elements that
            interleave.

    Raises:
        WriteError: A target is expanded, or a view of windows that overlap.
    """
    if fills and func._schema.name in _FILLS:
        return
    overlaps = _overlaps if fills else may_overlap
    for target in leaves(written_values(func, args, kwargs)):
        if isinstance(target, torch.Tensor) and overlaps(target.shape, target.stride()):
            raise WriteError(
                f"{func} was to write to a view of shape={tuple(target.shape)} and "
                f"strides={target.stride()}. Several of its elements may share one place, and "
                "would overwrite each other in no fixed order. Call .clone() before writing."
            )


def may_overlap(size: Sequence[int], stride: Sequence[int]) -> bool:
    """Tell whether two elements of a strided view may share one place; some interleave instead.

    Example:
        >>> may_overlap((2, 3), (3, 1)), may_overlap((2, 3), (1, 1)), may_overlap((2, 3), (3, 2))
        (False, True, True)
    """
    if 0 in size:
        return False
    reach = 0
    for step, extent in sorted(zip(stride, size, strict=True)):
        if extent > 1 and step <= reach:
            return True
        reach += (extent - 1) * step
    return False


def _overlaps(size: Sequence[int], stride: Sequence[int]) -> bool:
    if not may_overlap(size, stride):
        return False
    if any(extent > 1 and step == 0 for extent, step in zip(size, stride, strict=True)):
        return True
    places = np.zeros((), np.int64)
    for extent, step in zip(size, stride, strict=True):
        places = places[..., None] + step * np.arange(extent)
    return np.unique(places).size < places.size
