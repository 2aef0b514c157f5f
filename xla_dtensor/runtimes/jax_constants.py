"""Whose the constants of a trace are: a step names no tensor, it just uses what it finds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from xla_dtensor.runtimes.jax_tensor import Storage
    from xla_dtensor.runtimes.jax_trace import Trace

__all__ = ["TracedProgram", "traced_program"]


class TracedProgram(NamedTuple):
    """A trace that takes its constants as inputs.

    Attributes:
        jaxpr: The trace.
        owners: The storage of each of its constants; None for one that is no storage's.
        constants: The values of the latter.
    """

    jaxpr: Any
    owners: list[Storage | None]
    constants: list[Any]


def traced_program(closed: Any, rows: Sequence[Storage], trace: Trace) -> TracedProgram:
    """Find the owners of a trace's constants.

    Args:
        closed: What JAX traced. Its last arguments stand for `rows`; those of them that the step
            used become constants, and the others are left out.
        rows: Storages that were rows of a stack before the trace.
        trace: What the step touched.
    """
    jaxpr = closed.jaxpr
    num_arguments = len(jaxpr.invars) - len(rows)
    of_rows = dict(zip(rows, jaxpr.invars[num_arguments:], strict=True))
    # In the order of their first use: programs must come out alike in every process.
    used = [storage for storage in trace.captured if storage in trace.taken]
    owner = {id(array): storage for storage, array in trace.captured.items()}
    owners = [owner.get(id(constant)) for constant in closed.consts]
    constants = [c for c, s in zip(closed.consts, owners, strict=True) if s is None]
    jaxpr = jaxpr.replace(
        constvars=[*jaxpr.constvars, *(of_rows[storage] for storage in used)],
        invars=jaxpr.invars[:num_arguments],
    )
    return TracedProgram(jaxpr, [*owners, *used], constants)
