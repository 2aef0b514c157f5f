"""Writes by index that XLA's partitioner would abort on, or get wrong, said with even shapes.

XLA may cut the indices of a scatter as it cuts the tensor that is written to. Where it cuts them
unevenly, it pads them with a 32-bit -1, but torch_xla's are 64-bit: a failed check ends the
process. Where it cuts only the new values unevenly, some are written in the wrong place, in
silence.

Sizes that all devices divide are never cut unevenly. So the points are flattened, if they have to
be, and padded to such a size: by writing the last one again, or by adding zero to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from xla_dtensor.core import OpSharding
from xla_dtensor.runtimes.torch_xla_sharding import (
    cut_unevenly,
    parse_annotation,
    to_annotation,
    xlac,
)

__all__ = [
    "annotated",
    "assign",
    "cut_evenly",
    "evenly",
    "into_front",
    "put_points",
    "round_up",
    "whole",
]


def round_up(size: int) -> int:
    """Return the next size that all devices divide."""
    return size + -size % xlac()._xla_num_global_devices()


def evenly(shape: Sequence[int]) -> bool:
    """Tell whether XLA can only cut `shape` evenly; of a single point it may make a dim."""
    return len(shape) > 0 and all(size == round_up(size) for size in shape)


def cut_evenly(tensor: torch.Tensor) -> bool:
    """Tell whether `tensor` is known to be cut evenly: by its sizes, or by its annotation."""
    if evenly(tensor.shape):
        return True
    annotation = xlac()._get_xla_sharding_spec(tensor) if tensor.numel() else ""
    if not annotation:
        return False
    sharding = parse_annotation(annotation)
    return not (sharding.is_tiled and cut_unevenly(tensor, sharding))


def assign(to: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Copy `value` into `to`, which keeps its sharding: `copy_` alone takes that of the source."""
    sharding = xlac()._get_xla_op_sharding(to)
    to.copy_(value)
    if sharding is not None:
        xlac()._xla_annotate_custom_sharding(to, sharding)
    return to


def annotated(tensor: torch.Tensor, sharding: OpSharding) -> torch.Tensor:
    """Return `tensor`, annotated; its own node in the graph, as in the runtime's `constrain`."""
    if tensor.numel() == 0:
        return tensor
    result = tensor.clone()
    xlac()._xla_annotate_custom_sharding(result, to_annotation(sharding))
    return result


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor`, whole on every device."""
    return annotated(tensor, OpSharding.replicated())


def put_points(
    x: torch.Tensor,
    points: Sequence[torch.Tensor],
    values: torch.Tensor,
    accumulate: bool,
    in_place: bool,
) -> torch.Tensor:
    """Write `values` at points along the first dims.

    Args:
        x: What is written to.
        points: Indices along dim 0, 1, ..., all of one shape.
        values: One for each point and place along the other dims of `x`.
        accumulate: Add instead of setting.
        in_place: Write into `x` instead of a copy.

    Returns:
        `x`, or the copy.
    """
    rest = x.shape[len(points) :]
    shape = [size for size in points[0].shape if size > 1]
    if not evenly(shape):
        shape = [math.prod(shape)]
    points = [point.reshape(shape) for point in points]
    values = values.reshape(*shape, *rest)
    lack = round_up(shape[0]) - shape[0]
    if lack:
        points = [_repeat_last(point, lack) for point in points]
        if accumulate:
            padding = [0, 0] * len(rest) + [0, lack]
            values = torch.constant_pad_nd(values, padding)
        else:
            values = _repeat_last(values, lack)
    write: Callable[..., torch.Tensor] = x.index_put_ if in_place else x.index_put
    return write(tuple(points), values, accumulate)


def into_front(
    x: torch.Tensor,
    dims: Sequence[int],
    points: Sequence[torch.Tensor],
    values: torch.Tensor,
    accumulate: bool,
    in_place: bool,
) -> torch.Tensor:
    """As :func:`put_points`, with indices along any `dims`; `values` as if these came first."""
    order = [*dims, *(dim for dim in range(x.ndim) if dim not in dims)]
    written = put_points(x.permute(order), points, values, accumulate, in_place)
    return x if in_place else written.permute([order.index(dim) for dim in range(x.ndim)])


def _repeat_last(values: torch.Tensor, times: int) -> torch.Tensor:
    return torch.cat([values, values[-1:].expand(times, *values.shape[1:])])
