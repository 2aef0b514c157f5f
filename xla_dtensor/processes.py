"""The processes of a job: who they are, and how this one joins them.

    info = xd.init_distributed()          first of all, in every process
    mesh = xd.init_device_mesh(...)       over the devices of all of them

What started the processes is found out (:mod:`xla_dtensor.process_launchers`), all meet
(:mod:`xla_dtensor.process_arrival`), and the runtime's own service takes over from there.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from xla_dtensor.errors import RuntimeSetupError
from xla_dtensor.process_arrival import machine_facts, meet
from xla_dtensor.process_launchers import (
    Place,
    checked_place,
    place_from_environment,
    settled_address,
)
from xla_dtensor.runtimes.registry import (
    ENVIRONMENT_VARIABLE,
    current_runtime,
    get_runtime,
    installed_runtimes,
)

__all__ = ["ProcessInfo", "init_distributed"]


@dataclass(frozen=True, slots=True)
class ProcessInfo:
    """This process among those of its job.

    Attributes:
        index: Its place, from 0.
        count: How many there are.
        device_ids: The devices that this process holds.
        found_by: Who said so: "arguments", "JAX variables", "torchrun", "JAX's detection of
            'slurm'" (or another cluster), "jax.distributed", "torch_xla", or "nobody" for a
            process alone.
        coordinator_address: Where the processes met; None for a process alone.
    """

    index: int
    count: int
    device_ids: tuple[int, ...]
    found_by: str = "nobody"
    coordinator_address: str | None = None


_joined: tuple[tuple[Any, ...], ProcessInfo] | None = None


def init_distributed(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    local_device_ids: Sequence[int] | None = None,
    num_cpu_devices: int | None = None,
    memory_fraction: float | None = None,
    timeout_seconds: float = 300,
    heartbeat_seconds: int = 100,
) -> ProcessInfo:
    """Join the processes of a job, before anything else is done with this library.

    Without arguments it finds out itself: from ``JAX_COORDINATOR_ADDRESS``, ``JAX_NUM_PROCESSES``
    and ``JAX_PROCESS_ID``, from torchrun's variables, or by JAX's detection of Slurm, Open MPI and
    TPU pods. A process that nobody says to be one of several is alone: the runtime starts, and no
    service does. On torch_xla that runtime finds the others itself.

    Args:
        coordinator_address: "host:port" of process 0, a port that nobody listens on there.
        num_processes: How many processes there are.
        process_id: Which of them this is, from 0.
        local_device_ids: Which of this machine's GPUs are this process's. None: an equal part
            where several processes of the job share a machine and its GPUs, else all.
        num_cpu_devices: Virtual devices of this process, on CPU.
        memory_fraction: The part of a GPU's memory that XLA takes at the start, unless
            ``XLA_PYTHON_CLIENT_MEM_FRACTION`` says another.
        timeout_seconds: How long to wait for the others.
        heartbeat_seconds: After this long without a sign of a process JAX ends the others.

    Returns:
        This process among them. A second call with the same arguments returns the same.

    Raises:
        RuntimeSetupError: What is known of the processes is incomplete or contradicts itself; one
            did not come in time, which is named; the runtime has started before; or the job was
            joined with other arguments.

    Example:
        >>> info = init_distributed("host0:8476", 2, 1)  # doctest: +SKIP
    """
    global _joined
    local = None if local_device_ids is None else tuple(local_device_ids)
    asked = (coordinator_address, num_processes, process_id, local, num_cpu_devices)
    if _joined is not None:
        return _again(asked, *_joined)
    if _chosen_runtime() != "jax":
        info = _found_by_torch_xla(asked)
    else:
        jax_processes = importlib.import_module("xla_dtensor.runtimes.jax_processes")
        jax_processes.set_memory_fraction(memory_fraction)
        waits = timeout_seconds, heartbeat_seconds
        info = _joined_jax(jax_processes, asked, waits)
    _joined = asked, info
    return info


def _chosen_runtime() -> str:
    running = current_runtime()
    if running is not None:
        return running.name
    return os.environ.get(ENVIRONMENT_VARIABLE) or next(iter(installed_runtimes()), "jax")


def _again(asked: tuple[Any, ...], before: tuple[Any, ...], info: ProcessInfo) -> ProcessInfo:
    if any(value is not None and value != was for value, was in zip(asked, before, strict=True)):
        raise RuntimeSetupError(
            f"init_distributed was called again, with {_named(asked)}; the first call had "
            f"{_named(before)}. A process joins one job, once. Call it once, or with the same "
            "arguments."
        )
    return info


def _named(asked: tuple[Any, ...]) -> str:
    names = (
        "coordinator_address",
        "num_processes",
        "process_id",
        "local_device_ids",
        "num_cpu_devices",
    )
    said = [f"{n}={v!r}" for n, v in zip(names, asked, strict=True) if v is not None]
    return ", ".join(said) or "no arguments"


# ---------------------------------------------------------------------- JAX


def _joined_jax(jax: Any, asked: tuple[Any, ...], waits: tuple[float, int]) -> ProcessInfo:
    """Join under JAX; `jax` is the module ``runtimes/jax_processes.py``."""
    known = jax.joined()
    if known is not None:  # the program has called jax.distributed.initialize itself
        address, count, index = known
        same = all(a in (None, k) for a, k in zip(asked[:3], known, strict=True))
        if not same:
            raise RuntimeSetupError(
                f"init_distributed was called with {_named(asked)}, but jax.distributed runs with "
                f"coordinator_address={address!r}, num_processes={count}, process_id={index}. A "
                "process joins one job, once. Leave one of the two calls out."
            )
        place = Place(address, count, index, found_by="jax.distributed")
    else:
        place = _place(jax, asked, waits[0])
        if place.count != 1:
            place = _met_and_joined(jax, place, asked[3], waits)
    runtime = get_runtime("jax", **_options(asked[4]))
    alone = place.count == 1
    return ProcessInfo(
        place.index or 0,
        place.count or 1,
        tuple(runtime.addressable_device_ids()),
        place.found_by,
        None if alone else place.coordinator_address,
    )


def _options(num_cpu_devices: int | None) -> dict[str, Any]:
    return {} if num_cpu_devices is None else {"num_cpu_devices": num_cpu_devices}


def _place(jax: Any, asked: tuple[Any, ...], timeout_seconds: float) -> Place:
    place = place_from_environment()
    if place.found_by == "nobody" and None in asked[:3]:
        place = Place(**jax.detected(timeout_seconds))
    place = place.with_arguments(*asked[:3])
    if place == Place():
        return Place(count=1, index=0)
    place = checked_place(place)
    if place.count != 1 and (jax.has_started() or current_runtime() is not None):
        raise RuntimeSetupError(
            f"init_distributed was to join {place.count} processes (found by {place.found_by}), "
            "but JAX has started in this process. It knows its own devices only, and learns of no "
            "others any more. Call init_distributed before anything else: before the first tensor, "
            "mesh, get_runtime() and call of JAX."
        )
    return place


def _met_and_joined(
    jax: Any, place: Place, local_device_ids: Any, waits: tuple[float, int]
) -> Place:
    timeout, heartbeat = waits
    assert place.count is not None
    assert place.index is not None
    deadline = time.monotonic() + timeout
    address = settled_address(place, timeout)
    mine = machine_facts() | jax.facts()
    left = max(1.0, deadline - time.monotonic())
    facts = meet(address, place.count, place.index, mine, left)
    if local_device_ids is None:
        # Only those share GPUs that see the same ones: a container or a variable may differ.
        beside = [
            i
            for i, other in enumerate(facts)
            if (other["machine"], other["gpus"]) == (mine["machine"], mine["gpus"])
        ]
        local_device_ids = jax.own_gpus(mine["gpus"], beside.index(place.index), len(beside))
    jax.join(
        address,
        place.count,
        place.index,
        local_device_ids=local_device_ids,
        timeout_seconds=max(10.0, deadline - time.monotonic()),
        heartbeat_seconds=heartbeat,
    )
    return replace(place, coordinator_address=address)


# ---------------------------------------------------------------------- torch_xla


def _found_by_torch_xla(asked: tuple[Any, ...]) -> ProcessInfo:
    runtime = get_runtime(**({} if current_runtime() is not None else _options(asked[4])))
    module = f"xla_dtensor.runtimes.{runtime.name}_processes"
    has_its_own = importlib.util.find_spec(module) is not None
    index, count = importlib.import_module(module).index_and_count() if has_its_own else (0, 1)
    said = place_from_environment().with_arguments(*asked[:3])
    if said.count not in (None, count) or (said.index not in (None, index) and count > 1):
        raise RuntimeSetupError(
            f"init_distributed was told num_processes={said.count}, process_id={said.index} (by "
            f"{said.found_by}), but the runtime {runtime.name!r} found num_processes={count}, "
            f"process_id={index}. It finds the hosts of a TPU slice itself, and takes no address; "
            "on CPU it is one process. Start one process per TPU host, or use the runtime 'jax'."
        )
    return ProcessInfo(index, count, tuple(runtime.addressable_device_ids()), runtime.name)
