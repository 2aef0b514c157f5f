"""A trace that only one process of a job makes, noticed before the others wait for it for ever.

::

    process 0   call 12 of train    its program holds: runs it, and waits in its collectives
    process 1   call 12 of train    the global 'scale' changed there: traces anew

A process that traces anew says so in the job's key-value store, and a thread of each process looks
there once a second. Where a process has run that call by the program that it had, both are told:
the one that traces while it waits for the others to compare programs, the other one at its next
call. A process that waits in a collective comes to none: it ends after some seconds, with the same
words.

Nothing is asked on a call that traces nothing. Where all processes trace, nothing happens.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from typing import Any

from xla_dtensor.core.errors import ProgramMismatchError
from xla_dtensor.runtimes.same_program import LONE_TRACE, Store

__all__ = ["LoneTraces"]

_logger = logging.getLogger("xla_dtensor")
_NOTICE = f"{LONE_TRACE}/notice"
_BETWEEN_LOOKS_SECONDS = 1.0
_LAST_CHANCE_SECONDS = 5.0


class LoneTraces:
    """What this process has run and traced, beside what others trace.

    Args:
        store: The job's key-value store.
        seconds: Between two looks at it.
    """

    def __init__(self, store: Store, seconds: float = _BETWEEN_LOOKS_SECONDS) -> None:
        self._store, self._seconds = store, seconds
        self._lock = threading.Lock()
        self._runs: dict[str, int] = {}
        self._traces: set[tuple[str, int]] = set()
        self._notice: Any = None
        self._is_told = False
        threading.Thread(target=self._look, name="xla_dtensor traces", daemon=True).start()

    def note_run(self, step: str, number: int) -> None:
        """Note that a call is about to be run by a program that was there.

        Args:
            step: What the step is called in all processes.
            number: Of the call.

        Raises:
            ProgramMismatchError: Another process traces that call anew.
        """
        with self._lock:
            self._runs[step] = number
            refusal = self._refusal()
            self._is_told = self._is_told or bool(refusal)
        if refusal:
            self._store.put(LONE_TRACE, refusal)
            raise ProgramMismatchError(refusal)

    def note_trace(self, step: str, number: int, why: str) -> None:
        """Note that a call is about to be traced.

        Args:
            step: What the step is called in all processes.
            number: Of the call.
            why: The reason.
        """
        with self._lock:
            self._traces.add((step, number))
        notice = {"step": step, "number": number, "why": why, "process": self._store.index}
        self._store.put(_NOTICE, json.dumps(notice))

    def _refusal(self) -> str:
        """Return what is to be said of the newest notice; "" where it is none of this process's."""
        notice = self._notice
        if notice is None or notice["process"] == self._store.index:
            return ""
        call = notice["step"], notice["number"]
        if call in self._traces or self._runs.get(call[0], 0) < call[1]:
            return ""
        return (
            f"Process {notice['process']} traces call {call[1]} of {call[0]} anew: "
            f"{notice['why']}. Process {self._store.index} runs that call by the program that it "
            "has, for there nothing has changed. They would run two programs, and wait for each "
            "other for ever. Change what a step reads alike in every process, or pass it as a "
            "tensor."
        )

    def _look(self) -> None:
        seen = None
        while True:
            time.sleep(self._seconds)
            try:
                text = self._store.peek(_NOTICE)
            except Exception:  # The job is over.
                return
            if text is None or text == seen:
                continue
            seen = text
            with self._lock:
                self._notice = json.loads(text)
                refusal = self._refusal()
            if refusal:
                self._tell(refusal)
                return

    def _tell(self, refusal: str) -> None:
        self._store.put(LONE_TRACE, refusal)
        _logger.error(refusal)
        time.sleep(_LAST_CHANCE_SECONDS)
        if not self._is_told:  # The main thread waits in a collective to which nobody comes.
            sys.stderr.write(f"{refusal}\nThis process ends, for it waits in vain.\n")
            sys.stderr.flush()
            os._exit(1)
