"""How the processes of a JAX job agree on when to end: JAX's own preemption service.

Its part of each process catches SIGTERM in C++, tells the coordination service, and when one has
been told, all of them compare how often they have asked, and settle on one count that none has
reached yet. Nothing crosses the network before a signal comes.
"""

from __future__ import annotations

from typing import Any

from jax._src import distributed

__all__ = ["is_joined", "meet", "reached"]

_asked = [0]  # how often, since this process joined: the service keeps one count per process


def is_joined() -> bool:
    """Whether this process is one of several of a job, and the service runs."""
    state: Any = distributed.global_state
    manager = state.preemption_sync_manager
    return state.client is not None and manager is not None and (state.num_processes or 1) > 1


def reached() -> bool:
    """Ask once more; true where all processes settled on this count."""
    manager: Any = distributed.global_state.preemption_sync_manager
    _asked[0] += 1
    return bool(manager.reached_sync_point(_asked[0]))


def meet(seconds: float) -> None:
    """Wait until all processes have come.

    Raises:
        RuntimeError: They did not, in time.
    """
    client: Any = distributed.global_state.client
    client.wait_at_barrier("xla_dtensor/preempted", int(seconds * 1000))
