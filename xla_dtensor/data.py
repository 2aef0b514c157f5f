"""Feeding a job; see :mod:`xla_dtensor.hosts.data`."""

from __future__ import annotations

from xla_dtensor.hosts.data import (
    MpDeviceLoader,
    PackedBatches,
    ProcessPart,
    ShardedLoader,
    ShardedSampler,
    pack_sequences,
    process_part,
    shard_batch,
)

__all__ = [
    "MpDeviceLoader",
    "PackedBatches",
    "ProcessPart",
    "ShardedLoader",
    "ShardedSampler",
    "pack_sequences",
    "process_part",
    "shard_batch",
]
