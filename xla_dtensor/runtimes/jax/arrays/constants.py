"""Whose the constants of a trace are: a step names no tensor, it just uses what it finds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from xla_dtensor.runtimes.jax.arrays.private import constants_of, inputs_only

if TYPE_CHECKING:
    from xla_dtensor.runtimes.jax.arrays.storage import Storage
    from xla_dtensor.runtimes.jax.arrays.trace import Trace

__all__ = ["TracedProgram", "traced_program"]


class TracedProgram(NamedTuple):
    """A trace that takes its constants as inputs.

    Attributes:
        jaxpr: The trace; its constants are its first inputs.
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
    values = constants_of(closed)
    jaxpr = inputs_only(closed)
    constants, arguments = jaxpr.invars[: len(values)], jaxpr.invars[len(values) :]
    num_arguments = len(arguments) - len(rows)
    of_rows = dict(zip(rows, arguments[num_arguments:], strict=True))
    # In the order of their first use: programs must come out alike in every process.
    used = [storage for storage in trace.captured if storage in trace.captured_rows]
    owner = {id(array): storage for storage, array in trace.captured.items()}
    owners = [owner.get(id(constant)) for constant in values]
    jaxpr = jaxpr.replace(
        invars=[*constants, *(of_rows[storage] for storage in used), *arguments[:num_arguments]]
    )
    unowned = [constant for constant, owner in zip(values, owners, strict=True) if owner is None]
    return TracedProgram(jaxpr, [*owners, *used], unowned)
