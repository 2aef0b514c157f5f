"""What the processes that feed one mesh tell each other: a small value from each, in rounds.

All of them have to come to each round. A round costs about a millisecond, in whatever thread asks,
and uses neither the devices nor the network between them: values go through the coordination
service of the job. On one process a round is the process's own value.
"""

from __future__ import annotations

import hashlib
import importlib
import pickle
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from mesh_utils import Mesh
from xla_dtensor.core.errors import DataError, FeedMismatchError
from xla_dtensor.runtimes.registry import get_runtime

__all__ = ["Exchange", "exchange_name", "feeding_processes", "own_process", "process_of_device"]

_SLICE_SECONDS = 1.0
_GRACE_SECONDS = 10.0


@lru_cache(maxsize=64)
def _process_of_device(devices: tuple[int, ...]) -> dict[int, int]:
    runtime = get_runtime()
    attributes, own = runtime.device_attributes(), set(runtime.addressable_device_ids())
    return {  # where the platform does not say who holds a device: 0 is this process, 1 another
        device: int(fields.get("process_index", device not in own))
        for device, fields in zip(devices, attributes, strict=True)
    }


def process_of_device() -> dict[int, int]:
    """Return the process that holds each device, by device id."""
    return _process_of_device(tuple(sorted(get_runtime().device_ids())))


def feeding_processes(mesh: Mesh) -> tuple[int, ...]:
    """Return the processes that hold a device of the mesh's root, in order."""
    root, processes = get_runtime().root(mesh), process_of_device()
    return tuple(sorted({processes[int(device)] for device in root.device_ids.ravel()}))


def own_process() -> int:
    """Return which of the job's processes this is."""
    return process_of_device()[get_runtime().addressable_device_ids()[0]]


def exchange_name(mesh: Mesh) -> str:
    """Return a text that is equal in all processes for equal meshes, and only for those."""
    text = repr((mesh.axis_names, mesh.mesh_shape, mesh.device_ids.tolist()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Exchange:
    """Rounds in which each process that feeds a mesh says something.

    The first of them reads what the others say, and publishes all of it, equal things once: a round
    of n processes is 3 n requests to the service, each small.

    Args:
        name: Equal in all processes, and used once.
        mesh: The mesh.
        timeout_seconds: How long to wait for the others in a round.
    """

    def __init__(self, name: str, mesh: Mesh, timeout_seconds: float) -> None:
        self.processes, self.own = feeding_processes(mesh), own_process()
        self.timeout_seconds = timeout_seconds
        self._is_leader = self.own == self.processes[0]
        self._store: Any = None
        if len(self.processes) > 1 and get_runtime().name == "jax":
            store = importlib.import_module("xla_dtensor.runtimes.jax.arrays.store")
            self._store = store.KeyValueStore.of_job()
        self._name, self._round = name, 0

    @property
    def is_alone(self) -> bool:
        """Whether no other process answers: there is none, or the runtime carries nothing."""
        return self._store is None

    def all(
        self, message: bytes, what: str, stopped: Callable[[], bool] = lambda: False
    ) -> dict[int, bytes]:
        """Say something, and return what each process says in this round, by process.

        Args:
            message: What this process says.
            what: What the round is about, for the message.
            stopped: Asked every second while others are waited for; True gives up.

        Raises:
            FeedMismatchError: A process did not come in time.
            DataError: Stopped.
        """
        if self._store is None:
            return {self.own: message}
        self._round += 1
        if self._is_leader:
            outcome = self._collect(message, what, stopped)
            self._store.put_bytes(self._key("all"), pickle.dumps(outcome))
        else:
            self._store.put_bytes(self._key(self.own), message)
            # Later than the leader gives up, so that it can say whom it waited for.
            seconds, leader = self.timeout_seconds + _GRACE_SECONDS, self.processes[0]
            answer = self._wait("all", leader, seconds, what, stopped)
            outcome = ([], leader) if answer is None else pickle.loads(answer)
        messages, late = outcome
        if late is not None:
            raise FeedMismatchError(
                f"Process {self.own} waited {self.timeout_seconds:g} s for process {late} to say "
                f"{what}. It did not come: it failed, is slower than that, or does not call this. "
                "Call shard_batch and loaders alike in all processes of the mesh, or raise "
                "timeout_seconds."
            )
        # Everyone has come to this round, so everyone has read what was said in the one before.
        if self._round > 1:
            self._store.drop(self._key("all" if self._is_leader else self.own, -1))
        return {process: answer for answer, processes in messages for process in processes}

    def fail(self, message: bytes) -> None:
        """Say something in place of coming to the next round, which this process will not do."""
        if self._store is not None and self._is_leader:
            outcome = ([(message, [self.own])], None)
            self._store.put_bytes(self._key("all", 1), pickle.dumps(outcome))
        elif self._store is not None:
            self._store.put_bytes(self._key(self.own, 1), message)

    def _collect(
        self, message: bytes, what: str, stopped: Callable[[], bool]
    ) -> tuple[list[tuple[bytes, list[int]]], int | None]:
        """Read what each process says; the second is one that did not come."""
        senders: dict[bytes, list[int]] = {message: [self.own]}
        end = time.monotonic() + self.timeout_seconds
        for process in self.processes[1:]:
            answer = self._wait(process, process, end - time.monotonic(), what, stopped)
            if answer is None:
                return [], process
            senders.setdefault(answer, []).append(process)
        return list(senders.items()), None

    def _key(self, who: int | str, later: int = 0) -> str:
        return f"xla_dtensor/feed/{self._name}/{self._round + later}/{who}"

    def _wait(
        self, who: int | str, process: int, seconds: float, what: str, stopped: Callable[[], bool]
    ) -> bytes | None:
        end = time.monotonic() + seconds
        while True:
            slice_seconds = min(_SLICE_SECONDS, end - time.monotonic())
            answer = self._store.get_bytes(self._key(who), max(slice_seconds, 0.001))
            if answer is not None or slice_seconds <= 0:
                return answer
            if stopped():
                raise DataError(
                    f"Process {self.own} waited for process {process} to say {what}. Its loader "
                    "was closed meanwhile. Close loaders in all processes alike."
                )
