"""``_foreach_*`` ops: the ordinary op, once per tensor of the lists.

torch's optimizers call these with lists of parameters. Lists are dealt out one element per call,
everything else is the same in each call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

__all__ = ["is_foreach", "num_places", "run_foreach", "writes_to_a_list"]

_PREFIX = "aten::_foreach_"
# torch.<name> where it is not the op's own name.
_NAMES: dict[str, Callable[..., Any]] = {
    "norm": lambda x, ord=2, dtype=None: torch.linalg.vector_norm(x, ord, dtype=dtype),
    "copy": lambda x, source, *_: source.to(x.dtype),
    "zero": torch.zeros_like,
    "maximum": lambda x, other: _bounded(torch.maximum, torch.clamp_min, x, other),
    "minimum": lambda x, other: _bounded(torch.minimum, torch.clamp_max, x, other),
}


def _bounded(by_tensor: Any, by_number: Any, x: torch.Tensor, other: Any) -> torch.Tensor:
    return (by_tensor if isinstance(other, torch.Tensor) else by_number)(x, other)


def is_foreach(func: Any) -> bool:
    """Tell whether `func` is a functional foreach op."""
    return func._schema.name.startswith(_PREFIX) and not func._schema.is_mutable


def writes_to_a_list(func: Any) -> bool:
    """Tell whether `func` is a foreach op that writes to its first argument."""
    name = func._schema.name
    return func._schema.is_mutable and name.startswith(_PREFIX) and name.endswith("_")


def num_places(args: Sequence[Any]) -> int:
    """Return how long the lists are that a foreach op is given; its first argument may be none."""
    return next(len(value) for value in args if isinstance(value, (list, tuple)))


def run_foreach(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Run a functional foreach op tensor by tensor.

    Args:
        func: An ``OpOverload`` of the ``_foreach_`` family.
        args: Its positional arguments.
        kwargs: Its keyword arguments.

    Returns:
        One result per tensor.
    """
    name = func._schema.name.removeprefix(_PREFIX)
    single = _NAMES.get(name) or getattr(torch, name)
    if name in ("addcmul", "addcdiv") and len(args) > 3:
        args, kwargs = args[:3], {**kwargs, "value": args[3]}
    values = kwargs.get("value")
    if isinstance(values, torch.Tensor):
        kwargs = {**kwargs, "value": values.tolist()}

    def dealt(value: Any, i: int) -> Any:
        return value[i] if isinstance(value, (list, tuple)) else value

    keyword = {"scalars": "value", "scalar": "value"} if name in ("addcmul", "addcdiv") else {}
    return [
        single(
            *(dealt(a, i) for a in args),
            **{keyword.get(k, k): dealt(v, i) for k, v in kwargs.items()},
        )
        for i in range(num_places(args))
    ]
