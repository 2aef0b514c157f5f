"""How the processes of a job agree on a checkpoint: one round of questions to the first process.

A round has two halves. Every process contributes something; the first process decides on all of
it; every process gets the decision. If any of them fails, all of them raise, and say which one it
was and why, so nobody waits for a process that has given up. What is exchanged is small, and goes
through the key-value store of the job's coordination service: no process group is needed, and no
program of the devices is in the way.
"""

from __future__ import annotations

import importlib
import itertools
import json
from collections.abc import Callable
from typing import Any

from xla_dtensor.core.errors import CheckpointError
from xla_dtensor.runtimes.registry import current_runtime

__all__ = ["Exchange"]

_rounds = itertools.count()


class Exchange:
    """The agreements of one save or load. All processes have to make them in the same order.

    Args:
        timeout_seconds: How long to wait for the slowest process.

    Attributes:
        index: This process's place.
        count: How many processes there are.
    """

    def __init__(self, timeout_seconds: float) -> None:
        self._store = _store_of_job()
        self._timeout_seconds = timeout_seconds
        self._name = f"xla_dtensor/checkpoint/{next(_rounds)}"
        self.index = 0 if self._store is None else self._store.index
        self.count = 1 if self._store is None else self._store.count

    def agree(
        self,
        what: str,
        contribute: Callable[[], Any],
        decide: Callable[[list[Any]], Any],
    ) -> Any:
        """Let every process contribute and the first decide, and return the decision.

        Args:
            what: A name for this round, for messages: "begin", "write".
            contribute: Gives what JSON can say. Called in every process.
            decide: Called in the first process with all contributions, by process.

        Raises:
            CheckpointError: One of the processes failed, or was not heard of in time.
        """
        if self._store is None:
            return decide([contribute()])
        own_error: BaseException | None = None
        try:
            contribution: dict[str, Any] = {"value": contribute()}
        except BaseException as error:
            own_error, contribution = error, {"error": f"{error}"}
        if self.index:
            self._put(f"{what}/{self.index}", contribution)
            if own_error is not None and not isinstance(own_error, Exception):
                raise own_error
            outcome = self._decision(what)
        else:
            outcome, own_error = self._collect_and_decide(what, contribution, decide, own_error)
        if own_error is not None:
            raise own_error
        if "error" in outcome:
            raise CheckpointError(outcome["error"])
        return outcome["value"]

    def _collect_and_decide(
        self,
        what: str,
        contribution: Any,
        decide: Callable[[list[Any]], Any],
        own_error: BaseException | None,
    ) -> tuple[dict[str, Any], BaseException | None]:
        outcome: dict[str, Any] = {}
        try:
            contributions = [contribution]
            contributions += [self._contribution_of(what, i) for i in range(1, self.count)]
            errors = {i: s["error"] for i, s in enumerate(contributions) if "error" in s}
            if errors:
                index, text = next(iter(errors.items()))
                outcome = {"error": f"In process {index} of {self.count}: {text}"}
            else:
                outcome = {"value": decide([s["value"] for s in contributions])}
        except BaseException as error:
            own_error = own_error or error
            outcome = {"error": f"In process 0 of {self.count}: {own_error}"}
        self._put(f"{what}/decision", outcome)
        return outcome, own_error

    def _put(self, name: str, message: Any) -> None:
        text = json.dumps(message).encode()
        self._store.put_bytes(f"{self._name}/{name}", text, overwrite=False)

    def _contribution_of(self, what: str, index: int) -> Any:
        key = f"{self._name}/{what}/{index}"
        message = self._store.get_bytes(key, self._timeout_seconds)
        if message is None:
            return {"error": self._late_text(what, index)}
        self._store.drop(key)
        return json.loads(message)

    def _decision(self, what: str) -> Any:
        # The first process may itself have waited as long before it decides.
        timeout_seconds = 2 * self._timeout_seconds + 30
        message = self._store.get_bytes(f"{self._name}/{what}/decision", timeout_seconds)
        return {"error": self._late_text(what, 0)} if message is None else json.loads(message)

    def _late_text(self, what: str, index: int) -> str:
        return (
            f"The step {what!r} of a checkpoint waited for process {index}. It was not heard of "
            f"within timeout_seconds={self._timeout_seconds:g}. Look into its log; if its file "
            "system is slow, pass a longer timeout_seconds."
        )


def _store_of_job() -> Any:
    """Return the key-value store of ``runtimes/jax/arrays/store.py``; None for a process alone."""
    runtime = current_runtime()
    if runtime is None or set(runtime.device_ids()) == set(runtime.addressable_device_ids()):
        return None
    if runtime.name != "jax":
        raise CheckpointError(
            f"A checkpoint was asked for in one of several processes on the runtime "
            f"{runtime.name!r}. Only on 'jax' can they agree on one. Use the runtime 'jax' for "
            "jobs of several processes."
        )
    return importlib.import_module("xla_dtensor.runtimes.jax.arrays.store").KeyValueStore.of_job()
