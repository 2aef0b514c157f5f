"""torch.distributed.checkpoint on DTensors: what its default planners ask a tensor, answered.

Saving offers one write item per *distinct* shard that this process can reach, wherever it lies:
replicas on several devices are one item, and what several processes offer DCP's planner takes once.
Loading hands out host buffers, because DCP writes what it reads into a CPU tensor in place; what
was written goes to the devices by itself. Reshaping a mesh needs nothing else: DCP cuts saved
chunks and wanted chunks against each other by their offsets.

Example:
    >>> import tempfile, torch, xla_dtensor as xd
    >>> import torch.distributed.checkpoint as dcp
    >>> from torch.distributed.tensor import Replicate, Shard
    >>> mesh = xd.init_device_mesh("xla", (2, 4))
    >>> saved = xd.distribute_tensor(torch.arange(8), mesh, [Replicate(), Shard(0)])
    >>> len(create_write_items("w", saved))
    4
    >>> loaded = xd.distribute_tensor(torch.zeros(8).long(), mesh, [Shard(0), Shard(0)])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = dcp.save({"w": saved}, checkpoint_id=folder, no_dist=True)
    ...     dcp.load({"w": loaded}, checkpoint_id=folder, no_dist=True)
    >>> loaded.tolist()
    [0, 1, 2, 3, 4, 5, 6, 7]
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from xla_dtensor.checkpoint_load import STATE_KEY, Load, checkpoint_lock
from xla_dtensor.checkpoint_shards import Offset, chunks_of, host_shards, real_sharding
from xla_dtensor.errors import DistributeError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

    from xla_dtensor.dtensor import DTensor

__all__ = ["create_chunk_list", "create_write_items", "get_tensor_shard"]


def create_write_items(fqn: str, tensor: DTensor) -> list[WriteItem]:
    """Return one write item per distinct shard on this process's devices.

    Args:
        fqn: The tensor's name in the checkpoint.
        tensor: The tensor to save. Its shards are read when DCP asks for them, not here.

    Returns:
        Items in the order of the first device that holds each. An empty tensor has one, of its
        whole shape, so that its name is in the checkpoint.

    Raises:
        DistributeError: A tensor on the meta device.
    """
    # Here, because it takes 0.3 s to import, and only who saves needs it.
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    _check_has_value(tensor, "saved")
    setattr(tensor, STATE_KEY, _Save())
    properties = TensorProperties(dtype=tensor.dtype, requires_grad=tensor.requires_grad)
    return [
        WriteItem(
            index=MetadataIndex(fqn, chunk.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=tensor.size()),
        )
        for chunk in chunks_of(tensor, real_sharding(tensor))
    ]


def create_chunk_list(tensor: DTensor) -> list[ChunkStorageMetadata]:
    """Return the distinct blocks of `tensor` that this process needs, and begin to load it.

    Args:
        tensor: The tensor to be overwritten. Blocks are those of its placements.

    Returns:
        One chunk per distinct block on this process's devices.

    Raises:
        DistributeError: A tensor on the meta device.
    """
    _check_has_value(tensor, "loaded")
    load = Load(tensor)
    setattr(tensor, STATE_KEY, load)
    return chunks_of(tensor, load.sharding)


def get_tensor_shard(tensor: DTensor, index: MetadataIndex) -> torch.Tensor:
    """Return one shard: its values on the host or, after `create_chunk_list`, a buffer to fill.

    Args:
        tensor: The tensor.
        index: Its `offset` is that of an item or a chunk handed out before.

    Returns:
        A CPU tensor of the shard's shape. A buffer holds the present values, and what is written
        into it in place reaches the devices before the tensor is read.

    Raises:
        DistributeError: No shard begins at that offset, or the index has none.
    """
    with checkpoint_lock:
        state = tensor.__dict__.get(STATE_KEY) or _Save()
        found = None if index.offset is None else state.shard(tensor, tuple(index.offset))
    if found is None:
        raise DistributeError(
            f"The shard at offset={None if index.offset is None else tuple(index.offset)} of "
            f"{index.fqn!r} was asked for. No shard of {tensor!r} in this process begins there. "
            "Pass an offset of __create_write_items__ or __create_chunk_list__."
        )
    return found


def _check_has_value(tensor: DTensor, verb: str) -> None:
    # Asking for the payload also finishes a load that was broken off.
    if tensor._local_tensor.is_meta:
        raise DistributeError(
            f"{tensor!r} on the meta device was to be {verb}. It has no value and no shards. "
            "Materialise it first, e.g. with module.to_empty(device=...)."
        )


class _Save:
    """Hands out each shard once per reading of the devices, which reads all shards at once.

    Only the tensor read last keeps its shards on the host, and only those not yet asked for.
    """

    _latest: _Save | None = None

    def __init__(self) -> None:
        self._left: dict[Offset, torch.Tensor] = {}
        self._version: object = None
        _Save._keep(None)

    def shard(self, tensor: DTensor, offset: Offset) -> torch.Tensor | None:
        """Return the values at an offset."""
        version = None if tensor.is_inference() else tensor._version
        if offset not in self._left or version is None or self._version != version:
            _Save._keep(self)
            self._left, self._version = host_shards(tensor._local_tensor), version
        return self._left.pop(offset, None)

    @staticmethod
    def _keep(save: _Save | None) -> None:
        if _Save._latest is not None:
            _Save._latest._left = {}
        _Save._latest = save
