"""Programs that differ between processes are found before they hang.

Every process of a job has to run the same programs in the same order. Where a shape, a branch or
the number of steps differs, XLA's collectives wait for each other and nothing says why. So the
processes compare fingerprints through the job's key-value store, without any device:

==============  =============================================================================
mode            what is compared
==============  =============================================================================
"first"         each compiled step, when it is compiled; each gather of a tensor to the hosts
"every"         each run of a step and each eager op too: slow, for finding a mistake
"off"           nothing
==============  =============================================================================

The mode is "first", or what ``XLA_DTENSOR_PROGRAM_CHECKS`` says, or that of `program_checks`.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from xla_dtensor.errors import ArgumentTypeError
from xla_dtensor.runtimes.registry import get_runtime
from xla_dtensor.runtimes.same_program import MODES, checks

__all__ = ["check_same_program", "program_checks"]


def check_same_program(what: str, value: object = "") -> None:
    """Compare with the other processes at this point of the program. All have to call it.

    Args:
        what: What is compared, for the message: "the job's configuration".
        value: Compared by its ``repr``, which has to be equal in every process.

    Raises:
        ProgramMismatchError: Another process has another value, is at another check, has ended,
            or does not come.

    Example:
        >>> check_same_program("batch size", 32)  # a process alone has nothing to compare
    """
    found = checks()
    if found is not None:
        text = repr(value)
        found.compare(
            f"the check of {what!r}", hashlib.sha256(text.encode()).hexdigest(), text=lambda: text
        )


@contextmanager
def program_checks(mode: str) -> Iterator[None]:
    """Say how often processes compare their programs, for the time of a block.

    All processes have to enter and leave it at the same point.

    Args:
        mode: "off", "first" or "every"; see :mod:`xla_dtensor.program_check`.

    Raises:
        ArgumentTypeError: Another mode.

    Example:
        >>> with program_checks("every"):
        ...     pass
    """
    if mode not in MODES:
        raise ArgumentTypeError(
            f"program_checks was called with mode={mode!r}. It says when processes compare their "
            f"programs. Pass one of {', '.join(MODES)}."
        )
    found = checks()
    if found is None:
        yield
        return
    before, comparing = found.mode, nullcontext()
    if mode == "every" and before != mode:
        jax_same_program: Any = importlib.import_module("xla_dtensor.runtimes.jax_same_program")
        comparing = jax_same_program.checking_every_op(get_runtime())
    with comparing:
        found.mode = mode
        try:
            yield
        finally:
            found.mode = before
