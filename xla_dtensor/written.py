"""What a mutating op returns: the very tensors that it wrote to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["written_targets"]


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
    given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | dict(kwargs)
    targets = [
        given[a.name]
        for a in func._schema.arguments
        if a.alias_info is not None and a.alias_info.is_write
    ]
    return targets[0] if len(targets) == 1 else tuple(targets)
