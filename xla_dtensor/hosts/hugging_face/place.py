"""Giving a module's tensor its values, tile by tile: no more than one tile is on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import Replicate

from xla_dtensor.core import Layout, LayoutError
from xla_dtensor.dtensor.dcp import Index, device_indices, extents_of, offset_of
from xla_dtensor.dtensor.dtensor import DTensor
from xla_dtensor.dtensor.mesh import is_off_mesh
from xla_dtensor.hosts.hugging_face.module import Slot
from xla_dtensor.hosts.hugging_face.windows import whole
from xla_dtensor.runtimes.registry import get_runtime

__all__ = ["Reader", "blocks_of", "give_values"]

Reader = Callable[[Index, torch.Tensor], object]
"""Fills a CPU tensor with a part of a tensor: the part, one slice per dim, and what to fill."""


def give_values(slot: Slot, dtype: torch.dtype, read: Reader) -> None:
    """Give a tensor of a module its values.

    A tensor that has values gets the new ones in place. One on the meta device, or of another
    dtype, gets another content: see :meth:`xla_dtensor.hosts.hugging_face.module.Slot.replace`.

    Args:
        slot: The tensor. A DTensor's tiles go to the devices of this process; what lies on devices
            of other processes only is left to these.
        dtype: The dtype that it is to have.
        read: Called with each part that is wanted; with a replicated one once.
    """
    tensor = slot.tensor
    in_place = tensor.dtype == dtype and not tensor.is_meta
    with torch.no_grad():
        if isinstance(tensor, DTensor):
            if is_off_mesh(tensor._spec.mesh):
                return
            value = _distributed(tensor, dtype, read)
        elif in_place and tensor.device.type == "cpu" and tensor.is_contiguous():
            read(whole(tensor.shape), tensor.detach())
            torch.autograd.graph.increment_version(tensor)
            return
        else:
            value = torch.empty(tensor.shape, dtype=dtype)
            read(whole(tensor.shape), value)
        if in_place:
            tensor.copy_(value)
            return
    slot.replace(
        value if isinstance(tensor, DTensor) or tensor.is_meta else value.to(tensor.device)
    )


def blocks_of(tensor: torch.Tensor) -> list[Index]:
    """Return the distinct parts of a tensor that this process holds."""
    if not isinstance(tensor, DTensor):
        return [whole(tensor.shape)]
    if is_off_mesh(tensor._spec.mesh):
        return []
    return list({offset_of(index): index for index in _indices(tensor).values()}.values())


def _placements(tensor: DTensor) -> tuple[Any, ...]:
    """Return how the tensor lies once no reduction is pending."""
    return tuple(Replicate() if p.is_partial() else p for p in tensor._spec.placements)


def _layout(tensor: DTensor) -> Layout:
    """Return the tensor's placements, as far as XLA has them."""
    mesh = tensor._spec.mesh.value
    layout = Layout.from_placements(_placements(tensor), tensor.ndim, mesh)
    try:
        layout.op_sharding(get_runtime().root(mesh))
    except LayoutError:  # a label of PyTorch's propagator that no sharding of XLA's expresses
        return Layout.replicated(mesh, tensor.ndim)
    return layout


def _indices(tensor: DTensor) -> dict[int, Index]:
    layout = _layout(tensor)
    return device_indices(tensor, layout.op_sharding(get_runtime().root(layout.mesh)))


def _distributed(tensor: DTensor, dtype: torch.dtype, read: Reader) -> DTensor:
    runtime, layout, shape = get_runtime(), _layout(tensor), tuple(tensor.shape)
    if shape and tensor.numel():
        tiles = _Tiles(_indices(tensor), dtype, read)
        payload = runtime.from_shards(tiles, shape, layout)
    else:  # a number, or nothing: there are no tiles
        value = torch.empty(shape, dtype=dtype)
        read(whole(shape), value)
        payload = runtime.put(value, layout)
    return DTensor._wrapping(payload, tensor._spec.mesh, _placements(tensor))


class _Tiles(Mapping[int, torch.Tensor]):
    """Device -> its tile, read when it is asked for; devices that hold the same come together."""

    def __init__(self, indices: Mapping[int, Index], dtype: torch.dtype, read: Reader) -> None:
        self._indices = dict(sorted(indices.items(), key=lambda item: offset_of(item[1])))
        self._dtype, self._read = dtype, read
        self._last: tuple[Index, torch.Tensor] | None = None

    def __getitem__(self, device: int) -> torch.Tensor:
        index = self._indices[device]
        if self._last is None or self._last[0] != index:
            self._last = None  # let it go before the next one takes memory
            tile = torch.empty(extents_of(index), dtype=self._dtype)
            if tile.numel():
                self._read(index, tile)
            self._last = index, tile
        return self._last[1]

    def __iter__(self) -> Iterator[int]:
        return iter(self._indices)

    def __len__(self) -> int:
        return len(self._indices)
