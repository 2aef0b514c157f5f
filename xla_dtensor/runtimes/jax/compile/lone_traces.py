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

Numbers of Python that are inputs (a learning rate, a counter) have to be the same everywhere, too,
and nobody would wait. Each process sums up those of its calls, and the threads compare the sums of
every `_CALLS_PER_SUM`-th call with those of process 0.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
import zlib
from collections import deque
from collections.abc import Sequence
from typing import Any

from xla_dtensor.core.errors import ProgramMismatchError
from xla_dtensor.runtimes.same_program import LONE_TRACE, Store

__all__ = ["LoneTraces"]

_logger = logging.getLogger("xla_dtensor")
_NOTICE = f"{LONE_TRACE}/notice"
_SUMS = f"{LONE_TRACE}/numbers"
_DIFFER = f"{_SUMS}/differ"
_CALLS_PER_SUM = 8
_SUMS_KEPT = 1000
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
        self._sum_of: dict[str, int] = {}
        self._sums: deque[tuple[str, int, int]] = deque(maxlen=_SUMS_KEPT)
        self._differ = ""
        threading.Thread(target=self._look, name="xla_dtensor traces", daemon=True).start()

    def note_run(self, step: str, number: int, inputs: Sequence[Any] = ()) -> None:
        """Note that a call is about to be run by a program that was there.

        Args:
            step: What the step is called in all processes.
            number: Of the call.
            inputs: The numbers of Python that it is given.

        Raises:
            ProgramMismatchError: Another process traces that call anew, or has given an earlier one
                other numbers.
        """
        with self._lock:
            self._runs[step] = number
            text = repr(inputs).encode()
            self._sum_of[step] = zlib.crc32(text, self._sum_of.get(step, 0)) if inputs else 0
            if number % _CALLS_PER_SUM == 0 and inputs:
                self._sums.append((step, number, self._sum_of[step]))
            refusal = self._differ or self._refusal()
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
                self._differ = self._compare_sums()
            except Exception:  # The job is over.
                return
            if self._differ:
                self._tell(self._differ)
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

    def _compare_sums(self) -> str:
        """Say which call was given other numbers than in process 0; "" for none."""
        with self._lock:
            sums = list(self._sums)
        if self._store.index == 0:
            if sums:
                self._store.put(_SUMS, json.dumps(sums))
            return self._store.peek(_DIFFER) or ""
        own = {(step, number): total for step, number, total in sums}
        for step, number, total in json.loads(self._store.peek(_SUMS) or "[]") if own else ():
            if own.get((step, number), total) != total:
                refusal = (
                    f"Numbers of Python are inputs of {step}, a learning rate or a counter, and "
                    f"process {self._store.index} has given others to one of its calls up to call "
                    f"{number} than process 0. A program has one value of each. Change what a step "
                    "reads alike in every process."
                )
                self._store.put(_DIFFER, refusal)
                return refusal
        return ""

    def _tell(self, refusal: str) -> None:
        self._store.put(LONE_TRACE, refusal)
        _logger.error(refusal)
        time.sleep(_LAST_CHANCE_SECONDS)
        if not self._is_told:  # The main thread waits in a collective to which nobody comes.
            sys.stderr.write(f"{refusal}\nThis process ends, for it waits in vain.\n")
            sys.stderr.flush()
            os._exit(1)
