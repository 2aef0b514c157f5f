"""What the processes of a job hand each other, without any device: JAX's coordination service.

The service is the one that ``jax.distributed.initialize`` starts. Nothing runs on the devices, so a
thread may use it while a step runs.
"""

from __future__ import annotations

from typing import Any

import jax

from xla_dtensor.runtimes.jax.arrays.private import Job, job

__all__ = ["KeyValueStore"]

_PART_BYTES = 1 << 19  # a message of the service's transport is limited to a few MB


class KeyValueStore:
    """Texts and bytes by key, seen by all processes of the job.

    A key holds one of the two; bytes may be of any length.

    Args:
        job: The job of this process.

    Attributes:
        index: This process's place.
        count: How many processes there are.
    """

    def __init__(self, job: Job) -> None:
        self._client = job.client
        self.index = job.process_id
        self.count = job.num_processes

    @classmethod
    def of_job(cls) -> KeyValueStore | None:
        """Return the job's store; None for a process alone."""
        joined = job()
        return None if joined is None else cls(joined)

    def put(self, key: str, text: str) -> None:
        """Set a text."""
        self._client.key_value_set(key, text, allow_overwrite=True)

    def get(self, key: str, timeout_seconds: float) -> str | None:
        """Return a text, waiting for it; None if it does not come in time."""
        return self._get_in_time(self._client.blocking_key_value_get, key, timeout_seconds)

    def peek(self, key: str) -> str | None:
        """Return a text that is there; None if it is not."""
        try:
            return self._client.key_value_try_get(key)
        except jax.errors.JaxRuntimeError:
            return None

    def put_bytes(self, key: str, content: bytes, *, overwrite: bool = True) -> None:
        """Set bytes, in parts that the service takes."""
        parts = [content[i : i + _PART_BYTES] for i in range(0, len(content), _PART_BYTES)] or [b""]
        parts[0] = len(parts).to_bytes(4, "little") + parts[0]
        for number, part in reversed(list(enumerate(parts))):  # the head, last: all is there then
            self._client.key_value_set_bytes(f"{key}/{number}", part, allow_overwrite=overwrite)

    def get_bytes(self, key: str, timeout_seconds: float) -> bytes | None:
        """Return bytes, waiting for them; None if they do not come in time."""
        get = self._client.blocking_key_value_get_bytes
        head = self._get_in_time(get, f"{key}/0", timeout_seconds)
        if head is None:
            return None
        count = int.from_bytes(head[:4], "little")
        parts = [self._get_in_time(get, f"{key}/{n}", timeout_seconds) for n in range(1, count)]
        return None if None in parts else b"".join([head[4:], *parts])

    def drop(self, key: str) -> None:
        """Take away what a key holds."""
        self._client.key_value_delete(key)

    def _get_in_time(self, get: Any, key: str, timeout_seconds: float) -> Any:
        try:
            return get(key, max(1, int(timeout_seconds * 1000)))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" in str(error) or "NOT_FOUND" in str(error):
                return None
            raise
