"""``x[mask] = value`` on local views: the one op with a mask of the devices' own that has a shape.

What a mask picks has another size on each device, and a program has one. But a value that is the
same for all that the mask picks can be written where the mask says, without counting.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from xla_dtensor.runtimes.torch_xla_local_payload import LocalPayload

__all__ = ["is_mask", "is_masked_write", "masked_write"]

aten = torch.ops.aten
_WRITES = {aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
Run = Callable[..., Any]


def is_mask(value: object) -> bool:
    """Tell whether an index is a mask that each device has its own of."""
    return isinstance(value, LocalPayload) and value.dtype in (torch.bool, torch.uint8)


def is_masked_write(func: Any, args: Sequence[Any]) -> bool:
    """Tell whether an op writes one value wherever a mask of the devices' own says."""
    if func not in _WRITES:
        return False
    given = [index for index in args[1] if index is not None]
    if len(given) != 1 or not is_mask(given[0]):
        return False
    rest = args[0].ndim - args[1].index(given[0]) - given[0].ndim
    leading = args[2].shape[: max(0, args[2].ndim - rest)]
    return all(size == 1 for size in leading)


def masked_write(run: Run, func: Any, args: Sequence[Any], accumulate: bool = False) -> Any:
    """Run an op of :func:`is_masked_write`.

    Args:
        run: Runs an op on local payloads.
        func: The op.
        args: The tensor to write to, the indices and the value.
        accumulate: Whether the value is added.
    """
    target, indices, value = args[:3]
    lead, mask = next((at, index) for at, index in enumerate(indices) if index is not None)
    rest = target.ndim - lead - mask.ndim
    flags = run(aten.view.default, mask, [*mask.shape, *[1] * rest])
    flags = run(aten._to_copy.default, flags, dtype=torch.bool)
    while value.ndim > rest:
        value = _run_on_any(run, value)
    new = run(aten.add.Tensor, target, value) if accumulate else value
    result = run(aten.where.self, flags, new, target)
    if result.dtype != target.dtype:
        result = run(aten._to_copy.default, result, dtype=target.dtype)
    return run(aten.copy_.default, target, result) if func._schema.is_mutable else result


def _run_on_any(run: Run, value: torch.Tensor) -> torch.Tensor:
    if isinstance(value, LocalPayload):
        return run(aten.select.int, value, 0, 0)
    return value.select(0, 0)
