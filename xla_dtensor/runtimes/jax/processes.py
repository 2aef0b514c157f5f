"""How a process joins the others under JAX: its coordination service, and gloo between CPUs.

JAX's own detection of a cluster (Slurm, Open MPI, TPU pods on Compute Engine and GKE) is asked
here. Which devices a process takes: all of its machine's, or, where several processes of the job
share a machine and see the same GPUs, an equal part of them each.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from typing import Any

import jax

from xla_dtensor.core.errors import RuntimeSetupError
from xla_dtensor.runtimes.jax.arrays.private import devices_have_started, job, present_cluster

__all__ = ["detected", "facts", "has_started", "join", "joined", "own_gpus"]

_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
_VISIBLE = "CUDA_VISIBLE_DEVICES"


def has_started() -> bool:
    """Tell whether JAX has its devices: from then on no process can join."""
    return devices_have_started()


def joined() -> tuple[str | None, int, int] | None:
    """Return the address, count and index that JAX was initialized with; None if it was not."""
    mine = job()
    return None if mine is None else (mine.address, mine.num_processes, mine.process_id)


def detected(timeout_seconds: float) -> dict[str, Any]:
    """Return what JAX's cluster detection finds, in the names of `Place`; empty for nothing.

    Raises:
        RuntimeSetupError: It knows the cluster, and cannot read it.
    """
    cluster = present_cluster()
    if cluster is None:
        return {}
    port = os.environ.get("JAX_COORDINATOR_PORT")
    try:
        count, index = cluster.num_processes(), cluster.process_id()
        step = os.environ.get("SLURM_STEP_NUM_TASKS", "")
        if cluster.name == "slurm" and step.isdecimal():
            count = int(step)  # a step of a job may be smaller than the job
        # Nobody is to be asked where there is one process only.
        alone = count <= 1
        address = None if alone else cluster.coordinator_address(int(timeout_seconds), port)
        local = cluster.local_process_id()
    except Exception as error:
        raise RuntimeSetupError(
            f"init_distributed asked JAX's cluster detection, which found {cluster.name!r} and "
            f"then failed: {error}. What it reads there is not complete. Pass coordinator_address, "
            "num_processes and process_id."
        ) from error
    return {
        "coordinator_address": address,
        "count": count,
        "index": index,
        "local_index": local,
        "found_by": f"JAX's detection of {cluster.name!r}",
    }


def facts() -> dict[str, Any]:
    """Return what processes that meet have to know of this one's JAX."""
    return {"must_agree": {"jax": jax.__version__}, "gpus": visible_gpus()}


def visible_gpus() -> list[str]:
    """Return the NVIDIA GPUs that this process may use, by what CUDA calls them; none on CPU."""
    platforms = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
    if platforms and not {"cuda", "gpu"} & set(platforms.split(",")):
        return []
    listed = os.environ.get(_VISIBLE)
    if listed is not None:
        return [name.strip() for name in listed.split(",") if name.strip() not in ("", "-1")]
    return [str(i) for i in range(len(glob.glob("/proc/driver/nvidia/gpus/*")))]


def own_gpus(gpus: Sequence[str], local_index: int, local_count: int) -> list[int] | None:
    """Return which of the visible GPUs are this process's, as positions; None for all.

    Args:
        gpus: The GPUs that each process on this machine sees.
        local_index: This process's number among those on the machine.
        local_count: How many there are.

    Raises:
        RuntimeSetupError: The GPUs cannot be shared out evenly.

    Example:
        >>> own_gpus(["0", "1", "2", "3"], 1, 2)
        [2, 3]
    """
    if len(gpus) <= 1 or local_count <= 1:
        return None
    if len(gpus) % local_count or not 0 <= local_index < local_count:
        raise RuntimeSetupError(
            f"init_distributed found {local_count} processes on this machine, and {len(gpus)} "
            f"GPUs ({','.join(gpus)}) that each of them sees. They cannot be shared out evenly. "
            f"Start one process per GPU or per machine, or set {_VISIBLE} for each, or pass "
            "local_device_ids=."
        )
    share = len(gpus) // local_count
    return list(range(local_index * share, (local_index + 1) * share))


def set_memory_fraction(fraction: float | None) -> None:
    """Let XLA take this part of a GPU's memory, unless the environment says another."""
    if fraction is None:
        return
    if not 0 < fraction <= 1:
        raise RuntimeSetupError(
            f"init_distributed was given memory_fraction={fraction}. It is the part of a GPU's "
            "memory that XLA takes at the start. Pass a number above 0 and up to 1; JAX's own "
            "default is 0.75."
        )
    os.environ.setdefault(_FRACTION, str(fraction))


def join(
    address: str,
    count: int,
    index: int,
    *,
    local_device_ids: Sequence[int] | None,
    timeout_seconds: float,
    heartbeat_seconds: int,
) -> None:
    """Join. All processes are known to be on their way: nobody waits for one that never comes."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(
            address,
            count,
            index,
            None if local_device_ids is None else list(local_device_ids),
            "deactivate",
            initialization_timeout=max(1, int(timeout_seconds)),
            heartbeat_timeout_seconds=heartbeat_seconds,
        )
    except (RuntimeError, ValueError) as error:
        raise RuntimeSetupError(
            f"Process {index} of {count} came to {address}, and JAX could not start its "
            f"coordination there: {error}. The port may have been taken in between, or not be "
            "reachable by gRPC. Pass another port, and check the proxy variables."
        ) from error
