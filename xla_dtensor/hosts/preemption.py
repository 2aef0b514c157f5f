"""Preemption: a job is told to end, and all its processes save at the same step.

    with xd.Preemption() as preemption:
        for step in range(start, steps):
            loss = train_step(*batch)
            if preemption.reached():
                checkpoint.save(folder, state, step=step + 1)
                preemption.exit()

Schedulers send SIGTERM (Kubernetes, Slurm, torchrun, spot machines) or another signal that they
were asked for (Slurm's ``--signal=USR1@120``), and kill after a while. The signals reach the
processes at different times, some of them never. So `reached` is true in all of them after the
same call, a step or a few after the first signal: JAX's preemption service settles on it. Until a
signal comes, asking takes microseconds and nothing crosses the network.

`exit` ends the process with the status 75, the EX_TEMPFAIL of sysexits.h: "try again". The
launchers of this library start such a job again.

A process that joined others with ``init_distributed`` no longer dies of SIGTERM, whether this class
is used or not: JAX catches it.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import signal
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from types import FrameType, TracebackType
from typing import Any, NoReturn

from xla_dtensor.core.argument_types import argument_types
from xla_dtensor.core.errors import ArgumentTypeError, RuntimeSetupError
from xla_dtensor.runtimes.registry import get_runtime
from xla_dtensor.runtimes.same_program import MODES, checks

__all__ = ["EXIT_STATUS", "Preemption", "check_same_program", "program_checks"]


# -------------------------------------------------------------------------------------- Preemption

EXIT_STATUS = 75
"""The exit status of a process that was told to end, and has saved: start the job again."""

_DEFAULT = ("SIGTERM", "SIGUSR1")


@argument_types
class Preemption:
    """Says when to save and end, at the same step in all processes of the job.

    Made after ``init_distributed``, in the main thread, by every process. Signals are caught until
    the ``with`` block ends, or `close` is called.

    Args:
        signals: What tells a process to end: names or numbers. SIGTERM counts in any case where
            there are several processes.
        exit_status: What `exit` ends the process with.

    Raises:
        RuntimeSetupError: There is no such signal, it cannot be caught, or this is not the main
            thread.

    Example:
        >>> import os, signal
        >>> with Preemption(signals=["SIGUSR1"]) as preemption:
        ...     before = preemption.reached()
        ...     os.kill(os.getpid(), signal.SIGUSR1)
        ...     before, preemption.reached()
        (False, True)
    """

    def __init__(
        self, signals: Iterable[str | int] = _DEFAULT, *, exit_status: int = EXIT_STATUS
    ) -> None:
        self.exit_status = exit_status
        self._has_signal = False
        self._reached = False
        self._service = _service()
        self._handlers: dict[signal.Signals, Any] = {}
        numbers = dict.fromkeys(_read_signal(name) for name in signals)
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeSetupError(
                f"Preemption was made in thread={threading.current_thread().name!r}. Python "
                "catches signals in the main thread only. Make it there, and pass it on."
            )
        for number in numbers:
            if number is signal.SIGTERM and self._service is not None:
                continue  # JAX catches it
            try:
                self._handlers[number] = signal.signal(number, self._catch)
            except (OSError, ValueError):
                self.close()
                raise RuntimeSetupError(
                    f"Preemption was made with signals={[n.name for n in numbers]}. The "
                    f"system lets nobody catch {number.name}. Pass such as SIGTERM or SIGUSR1."
                ) from None

    def reached(self) -> bool:
        """Ask, once per step, whether to save and end now.

        Every process calls it equally often. With one process it is true from the signal on.

        Returns:
            True after the call on which all processes agreed, in each of them, and from then on.

        Raises:
            RuntimeSetupError: init_distributed was called after this was made.
        """
        if self._service is None:
            self._reached = self._reached or self._has_signal
            if self._has_signal and _service() is not None:
                raise RuntimeSetupError(
                    "Preemption was made with signals before init_distributed was called. The "
                    "other processes would not know of them. Make it after init_distributed."
                )
        elif not self._reached:
            self._reached = self._service.reached()
        return self._reached

    def exit(self, timeout_seconds: float = 60) -> NoReturn:
        """End this process, once all have come here, so that none is cut short while it saves.

        Args:
            timeout_seconds: How long to wait for the others; after that it ends all the same.

        Raises:
            SystemExit: Always, with `exit_status`. ``finally`` blocks run.
        """
        # A second signal, such as that of a launcher which ends the job when its first process
        # has gone, must not change the status.
        for number in {*self._handlers, signal.SIGTERM}:
            with contextlib.suppress(ValueError):  # not the main thread
                signal.signal(number, signal.SIG_IGN)
        self._handlers.clear()
        if self._service is not None:
            try:
                self._service.meet(timeout_seconds)
            except RuntimeError as error:
                reason = str(error).splitlines()[0][:200]
                warnings.warn(
                    f"Preemption.exit() waited timeout_seconds={timeout_seconds:g} for the other "
                    f"processes, and not all came: {reason}. This one ends now. Look at their "
                    "output, and at whether all called reached() equally often.",
                    RuntimeWarning,
                    stacklevel=2,
                )
        sys.exit(self.exit_status)

    def close(self) -> None:
        """Catch no signals from now on; what caught them before does again."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._handlers.clear()

    def __enter__(self) -> Preemption:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _catch(self, number: int, frame: FrameType | None) -> None:
        self._has_signal = True
        if self._service is not None:
            signal.raise_signal(signal.SIGTERM)  # which JAX's service waits for


def _service() -> Any:
    """JAX's part, where this process is one of several; None where it is alone."""
    if "jax" not in sys.modules:
        return None
    service = importlib.import_module("xla_dtensor.runtimes.jax.preemption")
    return service if service.is_joined() else None


def _read_signal(name: str | int) -> signal.Signals:
    try:
        return signal.Signals[name] if isinstance(name, str) else signal.Signals(name)
    except (KeyError, ValueError):
        raise RuntimeSetupError(
            f"Preemption was made with the signal {name!r}. This system has no such signal. Pass "
            "a name such as 'SIGTERM' or 'SIGUSR1', or a number of the module signal."
        ) from None


# ------------------------------- Programs that differ between processes are found before they hang
#
# Every process of a job has to run the same programs in the same order. Where a shape, a branch or
# the number of steps differs, XLA's collectives wait for each other and nothing says why. So the
# processes compare fingerprints through the job's key-value store, without any device:
#
# ==============  =============================================================================
# mode            what is compared
# ==============  =============================================================================
# "first"         each compiled step, when it is compiled; each gather of a tensor to the hosts
# "every"         each run of a step and each eager op too: slow, for finding a mistake
# "off"           nothing
# ==============  =============================================================================
#
# The mode is "first", or what ``XLA_DTENSOR_PROGRAM_CHECKS`` says, or that of `program_checks`.


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
    comparison = checks()
    if comparison is not None:
        text = repr(value)
        comparison.compare(
            f"the check of {what!r}", hashlib.sha256(text.encode()).hexdigest(), text=lambda: text
        )


@contextmanager
def program_checks(mode: str) -> Iterator[None]:
    """Say how often processes compare their programs, for the time of a block.

    All processes have to enter and leave it at the same point.

    Args:
        mode: "off", "first" or "every"; see :mod:`xla_dtensor.hosts.preemption`.

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
    comparison = checks()
    if comparison is None:
        yield
        return
    outer_mode, comparing = comparison.mode, nullcontext()
    if mode == "every" and outer_mode != mode:
        jax_same_program: Any = importlib.import_module(
            "xla_dtensor.runtimes.jax.compile.same_program"
        )
        comparing = jax_same_program.checking_every_op(get_runtime())
    with comparing:
        comparison.mode = mode
        try:
            yield
        finally:
            comparison.mode = outer_mode
