"""What a mutating op returns: the very tensors that it wrote to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["makes_results", "written_arguments", "written_targets", "written_values"]


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
