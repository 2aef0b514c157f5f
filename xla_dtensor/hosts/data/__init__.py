"""Feeding: each process reads only what its devices need, and together they make global DTensors.

    rows = [Shard(0), Replicate()]                                  on a mesh (dp, tp)
    sampler = ShardedSampler(data, 64, mesh, rows, seed=1)          64 rows in a global batch
    loader = ShardedLoader(DataLoader(data, batch_sampler=sampler), mesh, rows)
    for batch in loader: ...                                        global DTensors, on the devices
    loader.state_dict()                                             for any number of processes

On one process all of it works the same, and is just a loader.
"""

from __future__ import annotations

from xla_dtensor.hosts.data.batch import shard_batch
from xla_dtensor.hosts.data.loader import MpDeviceLoader, ShardedLoader
from xla_dtensor.hosts.data.packing import PackedBatches, pack_sequences
from xla_dtensor.hosts.data.part import ProcessPart, process_part
from xla_dtensor.hosts.data.sampler import ShardedSampler

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
