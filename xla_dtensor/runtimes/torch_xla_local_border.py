"""The way into a local view and out of it on torch_xla: from a global tensor to a stack, and back.

In a manual region nothing moves at the border, so that is the way: in as the layout says, out with
one row for each device. (16, 8) as [dp, tp] on (dp=2, tp=4) is the stack (8, 8, 2).

A region over some axes says nothing of the others, and a tensor that is known to be cut along them
is to stay so. There the stack is the tensor reshaped: (16, 8) as [dp, tp] with a region over (tp,)
is (16, 4, 2), with the dim of tp in front (4, 16, 2), annotated as [tp, dp, -].
"""

from __future__ import annotations

from functools import lru_cache
from math import prod

import numpy as np
import torch

from mesh_utils import Axis
from xla_dtensor.core import Layout, ManualRegion, OpSharding
from xla_dtensor.core.entries import entry_axis
from xla_dtensor.runtimes.torch_xla_local_payload import (
    Known,
    LocalPayload,
    enter_tile,
    leave_tile,
)
from xla_dtensor.runtimes.torch_xla_manual_nodes import entered, left
from xla_dtensor.runtimes.torch_xla_payload import functionalization
from xla_dtensor.runtimes.torch_xla_sharding import to_annotation, xlac

__all__ = ["enter", "leave"]


def enter(
    payload: torch.Tensor,
    layout: Layout,
    region: ManualRegion,
    sharding: OpSharding,
    annotation: OpSharding | None,
) -> LocalPayload:
    """Return each device's shard of a payload.

    Args:
        payload: A global payload; it stays as it is.
        layout: Names axes of the region, which divide the shape.
        region: The axes along which the devices are counted.
        sharding: The layout's, relative to the root.
        annotation: What the payload was told last.
    """
    inner = None
    if not region.is_whole and annotation is not None and payload.numel():
        shape = tuple(payload.shape)
        inner = _sharding_of_stack(annotation, sharding, shape, layout, region)
    copied = len(region.copied_axes(layout)) == len(region.axes)
    if inner is None and copied and not region.is_whole:
        # The same on every device: as it lies along the other axes.
        with functionalization():
            count = prod(region.sizes)
            whole = payload.unsqueeze(0).expand(count, *payload.shape).clone()
        return LocalPayload(whole, region)
    if inner is None:
        return LocalPayload(leave_tile(entered(payload, sharding), region), region)
    with functionalization():
        stack = _cut(payload, layout, region).clone()
        xlac()._xla_annotate_custom_sharding(stack, to_annotation(inner))
    return LocalPayload(stack, region)


def leave(
    local: LocalPayload, layout: Layout, sharding: OpSharding, cuts: Known = ()
) -> tuple[torch.Tensor, OpSharding | None]:
    """Return the payload whose shards are `local`, and how it lies; None where XLA chooses.

    Args:
        local: What each device has.
        layout: Names axes of the region; along the others all devices have the same.
        sharding: The layout's with the cuts, relative to the root.
        cuts: How the local tensors are cut along other axes.
    """
    if local._region.is_whole or local._region.copied_axes(layout):
        return left(enter_tile(local, cuts), sharding), sharding
    with functionalization():
        return _joined(local, layout), None


def _axes_of(layout: Layout, dim: int) -> list[Axis]:
    axes = [entry_axis(entry) for entry in layout.dims[dim]]
    return [axis for axis in axes if axis is not None]


def _cut(payload: torch.Tensor, layout: Layout, region: ManualRegion) -> torch.Tensor:
    place, split = _split_dims(layout, region, tuple(payload.shape))
    found = payload.reshape(split)
    for axis in region.axes:
        if axis not in place:
            place[axis] = found.ndim
            found = found.unsqueeze(-1)
    front = [place[axis] for axis in region.axes]
    rest = [dim for dim in range(found.ndim) if dim not in front]
    found = found.permute(*front, *rest)
    tile = found.shape[len(front) :]
    return found.expand(*region.sizes, *tile).reshape(prod(region.sizes), *tile)


def _joined(local: LocalPayload, layout: Layout) -> torch.Tensor:
    region = local._region
    shape = layout.get_global_shape(tuple(local.shape))
    place, split = _split_dims(layout, region, shape)
    front = [place[axis] for axis in region.axes]
    order = [*front, *(dim for dim in range(len(split)) if dim not in front)]
    stack = local._stack.reshape(*region.sizes, *local.shape)
    return stack.permute(*(order.index(dim) for dim in range(len(split)))).reshape(shape).clone()


def _split_dims(
    layout: Layout, region: ManualRegion, shape: tuple[int, ...]
) -> tuple[dict[Axis, int], list[int]]:
    """A shape with dims of their own for the axes, and where these are."""
    place: dict[Axis, int] = {}
    split: list[int] = []
    for dim, size in enumerate(shape):
        for axis in _axes_of(layout, dim):
            place[axis] = len(split)
            split.append(region.mesh.size(axis))
        split.append(size // prod(region.mesh.size(axis) for axis in _axes_of(layout, dim)))
    return place, split


@lru_cache(1024)
def _sharding_of_stack(
    annotation: OpSharding,
    sharding: OpSharding,
    shape: tuple[int, ...],
    layout: Layout,
    region: ManualRegion,
) -> OpSharding | None:
    """How the stack lies of a tensor that is cut along other axes besides; None if it is not."""
    count = region.mesh.root.size()
    whole = [annotation.shard_index(device, shape) for device in range(count)]
    outer = [sharding.shard_index(device, shape) for device in range(count)]
    tile = sharding.shape_per_tile(shape)
    parts = [annotation.num_tiles(dim) for dim in range(len(shape))]
    pieces = [max(part // sharding.num_tiles(dim), 1) for dim, part in enumerate(parts)]
    even = all(size % piece == 0 for size, piece in zip(tile, pieces, strict=True))
    if max(pieces, default=1) == 1 or not even:
        return None
    places: dict[tuple[int, ...], list[int]] = {}
    for device in range(count):
        at = dict(zip(region.mesh.axis_names, region.mesh.coordinates(device), strict=True))
        row = int(np.ravel_multi_index([int(at[axis]) for axis in region.axes], region.sizes))
        inner = []
        for dim, (own, cut) in enumerate(zip(whole[device], outer[device], strict=True)):
            size = tile[dim] // pieces[dim]
            if own.stop - own.start != size or not cut.start <= own.start < cut.stop:
                return None
            inner.append((own.start - cut.start) // size)
        places.setdefault((row, *inner), []).append(device)
    copies = len(next(iter(places.values())))
    dims = (prod(region.sizes), *pieces)
    if len(places) != prod(dims) or any(len(same) != copies for same in places.values()):
        return None
    assignment = np.zeros((*dims, copies), dtype=np.int64)
    for place, devices in places.items():
        assignment[place] = devices
    if copies == 1:
        return OpSharding.from_assignment(assignment[..., 0])
    return OpSharding.from_assignment(assignment, ("replicated",))
