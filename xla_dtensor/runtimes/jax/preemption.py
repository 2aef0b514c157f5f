"""How the processes of a JAX job agree on when to end: JAX's own preemption service.

Its part of each process catches SIGTERM in C++, tells the coordination service, and when one has
been told, all of them compare how often they have asked, and settle on one count that none has
reached yet. Nothing crosses the network before a signal comes.
"""

from __future__ import annotations

from xla_dtensor.runtimes.jax.arrays.private import job

__all__ = ["is_joined", "meet", "reached"]

_count = [0]  # how often, since this process joined: the service keeps one count per process


def is_joined() -> bool:
    """Whether this process is one of several of a job, and the service runs."""
    mine = job()
    return mine is not None and mine.preemption is not None and (mine.num_processes or 1) > 1


def reached() -> bool:
    """Ask once more; true where all processes settled on this count."""
    mine = job()
    assert mine is not None, "is_joined says so"
    _count[0] += 1
    return bool(mine.preemption.reached_sync_point(_count[0]))


def meet(seconds: float) -> None:
    """Wait until all processes have come.

    Raises:
        RuntimeError: They did not, in time.
    """
    mine = job()
    assert mine is not None, "is_joined says so"
    mine.client.wait_at_barrier("xla_dtensor/preempted", int(seconds * 1000))
