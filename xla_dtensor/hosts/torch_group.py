"""The job as torch.distributed sees it: rank, world size and a gloo group of its processes.

    xd.init_distributed()              2 processes of 4 devices each
    dist.get_rank(), dist.get_world_size()         0, 2 and 1, 2: processes, not devices
    dist.barrier(), dist.all_gather_object(...)    between hosts, over the network

Loggers, metrics, samplers and trainers ask torch.distributed who writes and who reads which rows.
Tensors of the mesh never go through this group: XLA moves them. A process alone is rank 0 of 1. A
group that is there already stays, and so do variables such as ``RANK``.
"""

from __future__ import annotations

import importlib
import itertools
import os
from datetime import timedelta
from typing import Any

import torch.distributed

from xla_dtensor.core.errors import RuntimeSetupError

__all__ = ["join_torch_group"]

dist: Any = torch.distributed

_KEY = "xla_dtensor/torch_store"
_groups = itertools.count()  # one may be destroyed, and another made


def join_torch_group(
    address: str | None,
    index: int,
    count: int,
    local: tuple[int, int],
    timeout_seconds: float,
) -> None:
    """Make torch.distributed's default group of a job's processes, where there is none.

    Args:
        address: "host:port" where the processes met; None for a process alone.
        index: Which process this is.
        count: How many there are.
        local: Which of those on its machine, and how many these are.
        timeout_seconds: How long to wait for the others.

    Raises:
        RuntimeSetupError: The processes do not reach each other.
    """
    if not dist.is_available() or dist.is_initialized():
        return
    if count == 1 or address is None:
        store, index, count = dist.HashStore(), 0, 1
    else:
        host = address.rpartition(":")[0].strip("[]")
        store = _store(host, index, count, timeout_seconds)
        variables = {"RANK": index, "WORLD_SIZE": count, "MASTER_ADDR": host}
        variables |= {"LOCAL_RANK": local[0], "LOCAL_WORLD_SIZE": local[1]}
        for name, number in variables.items():
            os.environ.setdefault(name, str(number))
    # Each pair of hosts connects when it has something to say, not all at once.
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    timeout = timedelta(seconds=timeout_seconds)
    try:
        dist.init_process_group("gloo", store=store, rank=index, world_size=count, timeout=timeout)
    except RuntimeError as error:
        raise RuntimeSetupError(
            f"Process {index} of {count} was to join torch.distributed's group of the job. That "
            f"failed: {error}. Set GLOO_SOCKET_IFNAME to the network interface over which the "
            "hosts reach each other, or call torch.distributed.init_process_group before."
        ) from error


def _store(host: str, index: int, count: int, timeout_seconds: float) -> Any:
    """Return the store at process 0, whose port the job's own store tells."""
    job = importlib.import_module("xla_dtensor.runtimes.jax.arrays.store").KeyValueStore.of_job()
    timeout, key = timedelta(seconds=timeout_seconds), f"{_KEY}/{next(_groups)}"
    if index == 0:
        store = dist.TCPStore(host, 0, count, True, timeout, wait_for_workers=False)
        job.put_bytes(key, str(store.port).encode())
        return store
    port = job.get_bytes(key, timeout_seconds)
    if port is None:
        raise RuntimeSetupError(
            f"Process {index} of {count} waited {timeout_seconds:.3g} s for process 0 to say where "
            "torch.distributed's store is. It did not. See its log."
        )
    return dist.TCPStore(host, int(port), count, False, timeout, wait_for_workers=False)
