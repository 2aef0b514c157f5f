"""Which blocks of a DTensor this process can reach, and their values on the host.

A block is an *index*, one slice per dim, and is known by its *offset*, the first element along each
dim: shards of one sharding never begin at the same element unless they are the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeAlias

import torch

from xla_dtensor.core import OpSharding
from xla_dtensor.runtimes.registry import get_runtime

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    from xla_dtensor.dtensor import DTensor

__all__ = [
    "Index",
    "Offset",
    "chunks_of",
    "device_indices",
    "distinct_indices",
    "extents_of",
    "host_shards",
    "offset_of",
    "real_sharding",
]

Index: TypeAlias = tuple[slice, ...]
Offset: TypeAlias = tuple[int, ...]


def real_sharding(tensor: DTensor) -> OpSharding:
    """Return how the tensor really lies."""
    return get_runtime().op_sharding(tensor._local_tensor)


def device_indices(tensor: DTensor, sharding: OpSharding) -> dict[int, Index]:
    """What each device of the mesh that this process reaches holds."""
    runtime = get_runtime()
    order = runtime.root(tensor._spec.mesh.value).device_ids.ravel().tolist()
    position = {int(device): place for place, device in enumerate(order)}
    devices = sorted(set(runtime.addressable_device_ids()) & set(position))
    return {d: sharding.shard_index(position[d], tuple(tensor.shape)) for d in devices}


def chunks_of(tensor: DTensor, sharding: OpSharding) -> list[ChunkStorageMetadata]:
    """Return the distinct blocks as DCP's chunks; one of the whole shape for an empty tensor."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    if tensor.numel() == 0:
        zeros = torch.Size([0] * tensor.ndim)
        return [ChunkStorageMetadata(offsets=zeros, sizes=tensor.size())]
    distinct = distinct_indices(device_indices(tensor, sharding).values())
    return [
        ChunkStorageMetadata(offsets=torch.Size(offset), sizes=torch.Size(extents_of(index)))
        for offset, index in distinct.items()
    ]


def distinct_indices(indices: Iterable[Index]) -> dict[Offset, Index]:
    """The non-empty ones, each once, by offset."""
    result: dict[Offset, Index] = {}
    for index in indices:
        if all(extents_of(index)):
            result.setdefault(offset_of(index), index)
    return result


def offset_of(index: Index) -> Offset:
    """Return the first element along each dim."""
    return tuple(int(part.start) for part in index)


def extents_of(index: Index) -> tuple[int, ...]:
    """Return the number of elements along each dim."""
    return tuple(int(part.stop - part.start) for part in index)


def host_shards(payload: torch.Tensor) -> dict[Offset, torch.Tensor]:
    """The distinct shards of this process, from the first device that holds each."""
    if payload.numel() == 0:
        return {(0,) * payload.ndim: torch.empty(payload.shape, dtype=payload.dtype)}
    shards = get_runtime().addressable_shards(payload)
    first = {offset_of(s.index): s.data for s in reversed(shards) if all(extents_of(s.index))}
    return {offset: data.detach() for offset, data in first.items()}
