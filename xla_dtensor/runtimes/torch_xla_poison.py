"""An index on the devices that a tensor does not have reads or writes NaN on torch_xla.

XLA has no error for it: it takes the nearest row, or writes nothing. To look at the values first
would run all that is pending, so that what comes out tells instead::

    rows[i]         i = [3, 8] of 8 rows: the second row is NaN
    loss(x, target), rows.index_add(0, i, more): NaN altogether

Invariants:

* What is right stays as it is; reads are told apart element by element, without a collective.
* Of whole numbers, which have no NaN, the smallest is read. Writes of them are left out.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from xla_dtensor.runtimes.index_bounds import BOUNDS, Bound

__all__ = ["poison"]

aten = torch.ops.aten
_READS = (
    *(aten.index.Tensor, aten.index_select.default, aten.gather.default),
    *(aten.take.default, aten.embedding.default),
)


def poison(functional: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Any:
    """Return the result of an op of ``BOUNDS``, NaN where an index was out of range.

    Args:
        functional: The op, or the form of it that writes to nothing.
        args: Its arguments, host tensors among them as they were given.
        kwargs: Its keyword arguments.
        result: What it returned: payloads. One that was written to is written to again.
    """
    if torch._C._current_graph_task_id() != -1:  # pyright: ignore[reportPrivateImportUsage]
        return result
    found = BOUNDS[functional](*args, **kwargs)
    bounds = [b for b in found if b.what == "index" and b.index.numel() and _is_on_devices(b.index)]
    first = result[0] if isinstance(result, list | tuple) else result
    if not bounds or (functional not in _READS and not _has_nan(first)):
        return result
    is_right = functools.reduce(operator.and_, map(_in_range, bounds))
    if functional in _READS and not _has_masks(args[1]):
        is_right = _spread_over_reads(functional, args, is_right)
    else:
        is_right = is_right.all()
    is_written = first is args[0]
    value = (first.masked_fill_ if is_written else first.masked_fill)(~is_right, _worst(first))
    if is_written:
        return result
    return type(result)([value, *result[1:]]) if isinstance(result, list | tuple) else value


def _is_on_devices(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "xla"


def _has_nan(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _worst(tensor: torch.Tensor) -> Any:
    if _has_nan(tensor):
        return float("nan")
    return False if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).min


def _in_range(bound: Bound) -> torch.Tensor:
    is_right = (bound.index >= bound.low) & (bound.index < bound.high)
    return is_right if bound.ignored is None else is_right | (bound.index == bound.ignored)


def _has_masks(indices: Any) -> bool:
    return isinstance(indices, list | tuple) and any(
        index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices
    )


def _spread_over_reads(
    functional: Any, args: Sequence[Any], is_right: torch.Tensor
) -> torch.Tensor:
    """Return what is right of the indices as what is right of the values read by them."""
    if functional is aten.embedding.default:
        return is_right.unsqueeze(-1)
    ndim = args[0].ndim
    if functional is aten.index_select.default:
        return is_right.reshape((-1, *[1] * (ndim - 1 - args[1] % ndim)) if ndim else ())
    if functional is aten.index.Tensor:
        places = [place for place, index in enumerate(args[1]) if index is not None]
        side_by_side = places == list(range(places[0], places[-1] + 1))
        behind = ndim - len(places) - (places[0] if side_by_side else 0)
        return is_right[(..., *[None] * behind)]
    return is_right
