"""Checkpoints of a job over any number of processes: whole or not there, checked, on any mesh.

    from xla_dtensor import checkpoint

    state = {"model": model, "optimizer": optimizer, "loader": loader, "scheduler": scheduler}
    if checkpoint.latest(folder) is not None:
        step = checkpoint.load(folder, state)
    ...
    saving = checkpoint.async_save(folder, state, step=step, keep=3)

* **Whole or not there.** Whoever looks sees a checkpoint with all its files, or the one before: see
  :mod:`xla_dtensor.hosts.checkpoint.folders`.
* **Checked.** A manifest names every tensor with shape, dtype, layout, bytes and checksums. No
  value reaches a tensor whose checksum was not right, and every refusal names the file.
* **Once.** Each distinct shard is written by one process, whatever the number of its replicas, and
  what the processes wrote is proved to be the whole of every tensor before it counts.
* **On any mesh.** A tensor is loaded as it lies in the state given, on any mesh, with any
  placements, by any number of processes.

``state`` is a nested dict of tensors, DTensors, plain values, and objects with ``state_dict`` and
``load_state_dict``; see :mod:`xla_dtensor.hosts.checkpoint.state`. The states of the random number
generators are saved beside it. In a job of several processes all of them make the same calls, with
a folder that all of them share: a path, or any URL that fsspec knows. Each checkpoint can be read
by ``torch.distributed.checkpoint.load`` as well.

Example:
    >>> import tempfile, torch, xla_dtensor as xd
    >>> from torch.distributed.tensor import Replicate, Shard
    >>> mesh = xd.init_device_mesh("xla", (2, 4))
    >>> saved = {"w": xd.distribute_tensor(torch.arange(8), mesh, [Replicate(), Shard(0)]), "n": 3}
    >>> other = xd.distribute_tensor(torch.zeros(8).long(), mesh, [Shard(0), Shard(0)])
    >>> loaded = {"w": other, "n": 0}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = save(folder, saved, step=42)
    ...     load(folder, loaded)
    42
    >>> loaded["w"].tolist(), loaded["n"]
    ([0, 1, 2, 3, 4, 5, 6, 7], 3)
"""

from __future__ import annotations

from xla_dtensor.core.errors import CheckpointError
from xla_dtensor.hosts.checkpoint.api import (
    Pending,
    async_save,
    latest,
    load,
    load_hf,
    save,
    save_hf,
    steps,
    verify,
)

__all__ = [
    "CheckpointError",
    "Pending",
    "async_save",
    "latest",
    "load",
    "load_hf",
    "save",
    "save_hf",
    "steps",
    "verify",
]
