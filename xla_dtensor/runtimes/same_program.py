"""Do all processes run the same programs? Found out by fingerprints, before one waits in vain.

Processes that share devices have to run the same programs in the same order: a program waits in its
collectives until all have come, and where one runs another program, nobody ever says so. At a
*check* each process puts a record of what it is about to do into the job's key-value store, process
0 (of those concerned) reads the records of all, the others read that of process 0. No device takes
part. Records that differ raise in both, naming both::

    n-th check of the processes (0, 1)      process 0: "step train, (train.py:40)", digest a1
                                            process 1: "step train, (train.py:40)", digest b7

A record is dropped at the check after the next, when all have read it. Which checks there are is
said by `how_checked`; see :mod:`xla_dtensor.hosts.preemption`.
"""

from __future__ import annotations

import atexit
import base64
import contextlib
import functools
import hashlib
import json
import os
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, Protocol

from xla_dtensor.core.errors import ProgramMismatchError, RuntimeSetupError
from xla_dtensor.versions import PACKAGE_FOLDER

__all__ = [
    "LONE_TRACE",
    "Checks",
    "checks",
    "how_checked",
    "start_checks",
    "user_frame",
    "user_line",
]

MODE_VARIABLE = "XLA_DTENSOR_PROGRAM_CHECKS"
SECONDS_VARIABLE = "XLA_DTENSOR_PROGRAM_CHECK_SECONDS"
MODES = ("off", "first", "every")
_PATIENCE_SECONDS = 600.0
_SLICE_SECONDS = 2.0  # between looks whether the other has ended
_LONGEST_TEXT = 4_000_000
_PREFIX = "xla_dtensor/program"
LONE_TRACE = f"{_PREFIX}/lone trace"  # says that one process traces what another one runs
_MODELS = f"{os.sep}xla_dtensor{os.sep}models{os.sep}"


class Store(Protocol):
    """What keeps the records: ``KeyValueStore`` of ``store``."""

    index: int
    count: int

    def put(self, key: str, text: str) -> None:
        """Set a text."""
        ...

    def get(self, key: str, timeout_seconds: float) -> str | None:
        """Wait for a text."""
        ...

    def peek(self, key: str) -> str | None:
        """Return a text that is there."""
        ...

    def drop(self, key: str) -> None:
        """Take a text away."""
        ...


def how_checked() -> str:
    """Return the mode that the environment asks for; "first" where it says nothing."""
    mode = os.environ.get(MODE_VARIABLE) or "first"
    if mode not in MODES:
        raise RuntimeSetupError(
            f"The environment has {MODE_VARIABLE}={mode!r}. It says when processes compare their "
            f"programs. Set it to one of {', '.join(MODES)}, or unset it."
        )
    return mode


def user_frame() -> FrameType | None:
    """Return the innermost frame of the program that is neither this library's nor torch's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_of_a_library(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def user_line() -> str:
    """Return the line of `user_frame`."""
    frame = user_frame()
    if frame is None:
        return "no line of the program"
    return f"{frame.f_code.co_filename}:{frame.f_lineno}, in {frame.f_code.co_name}"


@functools.cache
def _is_of_a_library(name: str) -> bool:
    modules = (sys.modules.get(library) for library in ("torch", "jax"))
    folders = [os.path.dirname(str(module.__file__)) for module in modules if module is not None]
    folders = [f"{folder}{os.sep}" for folder in (str(PACKAGE_FOLDER), *folders)]
    is_inside = name.startswith((*folders, contextlib.__file__)) and _MODELS not in name
    return is_inside or name.startswith("<")


class Checks:
    """The checks of one process.

    Args:
        store: The job's key-value store.
        mode: "off", "first" or "every".
        patience_seconds: How long to wait for another process at a check.
    """

    def __init__(self, store: Store, mode: str, patience_seconds: float | None = None) -> None:
        self._store = store
        self.mode = mode
        patience = float(os.environ.get(SECONDS_VARIABLE) or _PATIENCE_SECONDS)
        self.patience_seconds = patience if patience_seconds is None else patience_seconds
        self._counts: Counter[tuple[int, ...]] = Counter()
        self._agreed: set[tuple[tuple[int, ...], str]] = set()
        self._last = "nothing that is checked"
        self.seconds = 0.0
        atexit.register(self._say_end)

    def compare(
        self,
        what: str,
        digest: str,
        group: Sequence[int] | None = None,
        text: Callable[[], str] | None = None,
    ) -> None:
        """Compare what the processes of a group are about to do.

        Args:
            what: What this one does, for the message.
            digest: Equal where it is the same.
            group: The processes; all of the job when None.
            text: Gives what the digest was made of, to be compared line by line.

        Raises:
            ProgramMismatchError: Another process does something else, or does not come.
        """
        members = tuple(range(self._store.count)) if group is None else tuple(sorted(group))
        me = self._store.index
        if me not in members or len(members) < 2:
            return
        began = time.perf_counter()
        self._counts[members] += 1
        n, processes = self._counts[members], members[1:] if me == members[0] else members[:1]
        mine = {"what": what, "digest": digest, "line": user_line()}
        self._store.put(_key(members, n, me), json.dumps(mine))
        for process in processes:
            theirs = self._theirs(members, n, process, mine)
            if theirs["digest"] != digest or theirs["what"] != what:
                self._refuse(members, n, process, mine, theirs, text)
        if n > 1:
            self._store.drop(_key(members, n - 1, me))
        self._last = _text(mine)
        self.seconds += time.perf_counter() - began

    def compare_once(
        self,
        what: str,
        digest: str,
        group: Sequence[int],
        text: Callable[[], str],
        inputs: Sequence[str] = (),
    ) -> None:
        """Compare a program that is about to be compiled, unless the group has agreed on it.

        Args:
            what: What this process does, for the message.
            digest: The program's.
            group: The processes.
            text: Gives the program's text.
            inputs: What else has to be equal for the first run, a line each.
        """
        agreement = tuple(sorted(group)), digest
        if agreement not in self._agreed:
            lines = "\n".join(inputs)
            digest_of_both = hashlib.sha256(f"{digest}{lines}".encode()).hexdigest()
            self.compare(what, digest_of_both, group, lambda: f"{lines}\n{text()}")
            self._agreed.add(agreement)

    # ------------------------------------------------------------------ the other

    def _theirs(self, members: tuple[int, ...], n: int, process: int, mine: Any) -> Any:
        deadline = time.monotonic() + self.patience_seconds
        while (seconds_left := deadline - time.monotonic()) > 0:
            text = self._store.get(_key(members, n, process), min(seconds_left, _SLICE_SECONDS))
            if text is not None:
                return json.loads(text)
            lone = self._store.peek(LONE_TRACE)
            if lone is not None:
                raise ProgramMismatchError(lone)
            ended = self._store.peek(f"{_PREFIX}/ended/{process}")
            if ended is not None:
                raise ProgramMismatchError(
                    f"{self._me()} is about to run {_text(mine)}, but process {process} has ended "
                    f"its program; its last was {ended}. All processes have to run the same "
                    "programs, as many times. See process "
                    f"{process}'s log for an error; else give all the same number of steps."
                )
        previous = self._store.peek(_key(members, n - 1, process))
        last = "nothing that is checked" if previous is None else _text(json.loads(previous))
        raise ProgramMismatchError(
            f"{self._me()} is about to run {_text(mine)}, but process {process} did not come to it "
            f"in {self.patience_seconds:.3g} s; its last was {last}. All processes have to run the "
            "same programs and to read tensors that are not whole on each alike. Look what that "
            f"one does, or wait longer by {SECONDS_VARIABLE}."
        )

    def _refuse(
        self, members: Any, n: int, process: int, mine: Any, theirs: Any, text: Any
    ) -> None:
        difference = ""
        if mine["what"] == theirs["what"]:
            difference = self._difference(members, n, process, text) if text is not None else ""
            difference = difference or "What they work on differs. "
        self._last = f"{_text(mine)}, which process {process} did not run alike"
        raise ProgramMismatchError(
            f"{self._me()} is about to run {_text(mine)}, but process {process} runs "
            f"{_text(theirs)}. {difference}All processes have to run the same programs in the "
            "same order, or they wait for each other for ever. Make shapes, arguments and the "
            "order of calls equal in every process."
        )

    def _difference(self, members: Any, n: int, process: int, text: Any) -> str:
        """Return the first line that differs; each of the two puts its text."""
        key = f"{_key(members, n, self._store.index)}/text"
        lines = text()[:_LONGEST_TEXT].splitlines()
        self._store.put(key, base64.b64encode(zlib.compress("\n".join(lines).encode())).decode())
        packed = self._store.get(f"{_key(members, n, process)}/text", 10.0)
        if packed is None:
            return ""
        there = zlib.decompress(base64.b64decode(packed)).decode().splitlines()
        for here, other_line in zip(lines, there, strict=False):
            if here != other_line:
                return f"Here: {here.strip()[:300]!r}; there: {other_line.strip()[:300]!r}. "
        return f"One has {len(lines)} lines, the other {len(there)}. "

    def _me(self) -> str:
        return f"Process {self._store.index}"

    def _say_end(self) -> None:
        try:
            self._store.put(f"{_PREFIX}/ended/{self._store.index}", self._last)
        except Exception:  # the job is over, there is nobody to tell
            return


def _key(members: tuple[int, ...], n: int, index: int) -> str:
    group = hashlib.sha256(repr(members).encode()).hexdigest()[:12]
    return f"{_PREFIX}/{group}/{n}/{index}"


def _text(record: Any) -> str:
    return f"{record['what']} ({record['line']})"


_checks: Checks | None = None


def checks() -> Checks | None:
    """Return the checks of this process; None for a process alone."""
    return _checks


def start_checks(store: Store, mode: str) -> Checks:
    """Begin to check, in the mode given."""
    global _checks
    _checks = Checks(store, mode)
    return _checks
