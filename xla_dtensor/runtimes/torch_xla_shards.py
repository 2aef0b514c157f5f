"""Shards of torch_xla payloads: those given to make a tensor of, and those read from one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from xla_dtensor.core import OpSharding
from xla_dtensor.errors import DistributeError
from xla_dtensor.runtimes.base import AddressableShard

__all__ = ["check_shards", "padded_shard", "shard_of"]


def check_shards(
    shards: Mapping[int, torch.Tensor],
    shape: Sequence[int],
    sharding: OpSharding,
    addressable: Sequence[int],
) -> None:
    """Raise when host tensors cannot be the shards of one tensor.

    Args:
        shards: One per addressable device, by device id.
        shape: Of the whole tensor.
        sharding: Of the whole tensor, relative to the root.
        addressable: The ids of the devices of this process.

    Raises:
        DistributeError: Other devices, several dtypes, or wrong shapes.
    """
    if set(shards) != set(addressable):
        raise DistributeError(
            f"A tensor was asked for from shards of the devices {sorted(shards)}. This process has "
            f"the devices {sorted(addressable)}. Pass one shard for each of these."
        )
    dtypes = {str(shard.dtype) for shard in shards.values()}
    if len(dtypes) > 1:
        raise DistributeError(
            f"A tensor was asked for from shards of dtypes={sorted(dtypes)}. A tensor has one "
            "dtype. Convert the shards to one first."
        )
    for device, shard in shards.items():
        expected = _extents(sharding.shard_index(device, shape))
        if tuple(shard.shape) != expected:
            raise DistributeError(
                f"The shard of device={device} has shape={tuple(shard.shape)}. For a tensor of "
                f"shape={tuple(shape)} under {sharding} it has {expected}. Pass that shape."
            )


def _extents(index: Sequence[slice]) -> tuple[int, ...]:
    return tuple(part.stop - part.start for part in index)


def padded_shard(shard: torch.Tensor, tile: Sequence[int]) -> torch.Tensor:
    """Return a shard on the host, with zeros at its ends up to the shape `tile`."""
    host = shard.detach().cpu().contiguous()
    if host.shape == torch.Size(tile):
        return host
    padded = host.new_zeros(tile)
    padded[tuple(map(slice, host.shape))] = host
    return padded


def shard_of(
    device_id: int, data: torch.Tensor, payload: torch.Tensor, sharding: OpSharding
) -> AddressableShard:
    """Return what a device holds of a payload: `data`, of which the padding is cut off."""
    index = sharding.shard_index(device_id, payload.shape)
    values = data[tuple(slice(0, extent) for extent in _extents(index))].contiguous()
    num_bytes = data.numel() * data.element_size()
    return AddressableShard(device_id, index, values.to(payload.dtype), num_bytes)
