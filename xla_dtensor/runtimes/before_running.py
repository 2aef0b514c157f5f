"""Checks of compiled programs before they run, as a context of the calling thread.

The layers above open one around calls of compiled steps; a runtime that can read its traces calls
`check` with each program that is about to run. What the check raises ends the call, and the program
does not run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from xla_dtensor.report.asked_communication import AskedFor

__all__ = ["ProgramToCheck", "check", "checking"]


@dataclass(frozen=True, eq=False)
class ProgramToCheck:
    """A program that is about to run.

    Attributes:
        name: of the step.
        hlo: Returns the partitioned program's text.
        asked: Returns the redistributes of its trace.
        arguments: The leaves of the call's arguments.
    """

    name: str
    hlo: Callable[[], str]
    asked: Callable[[], tuple[AskedFor, ...]]
    arguments: Sequence[Any]


Check = Callable[[ProgramToCheck], None]
_active: ContextVar[Check | None] = ContextVar("xla_dtensor.program_check", default=None)


@contextmanager
def checking(each: Check | None) -> Iterator[None]:
    """Let `each` be called with every program before it runs; None switches an outer one off."""
    token = _active.set(each)
    try:
        yield
    finally:
        _active.reset(token)


def check(program: Callable[[], ProgramToCheck]) -> None:
    """Check a program, if somebody wants that.

    Args:
        program: Makes what is checked; called only then.
    """
    each = _active.get()
    if each is not None:
        each(program())
