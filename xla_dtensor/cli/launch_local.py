"""``launch --local N``: the processes of a job on this machine, on virtual CPU devices.

Each process gets the command and the variables that a launcher gives it on a cluster: XLA flags,
the job, the coordinator's address, how many processes there are and which one it is. What differs
is what has to: ``JAX_PLATFORMS=cpu``, the number of virtual devices, and the scaled-down axes.

How a run ends decides the exit status:

====================================  ==========================================================
all processes end well                0
they were told to end, and saved      75: start the job again
a process fails                       its status, or 128 + the signal that killed it; the others
                                      are ended, and what failed is said with its last lines
it takes longer than ``--timeout``    124, as timeout(1) has it
a signal, and a process fails to end  128 + the signal
====================================  ==========================================================
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO

from mesh_utils.job import JobConfig
from mesh_utils.launch import work_environment
from mesh_utils.launch.local import LocalPlan
from mesh_utils.launch.variables import COMPILE_CACHE, LOCAL_AXES, axes_text
from mesh_utils.launch.work import PREEMPTED

__all__ = ["LocalRun", "local_environment"]

TIMED_OUT = 124
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_LAST_LINES = 8
_SECONDS_AFTER_A_FAILURE = 5.0
_XLA_DEVICES = re.compile(r"--xla_force_host_platform_device_count=\d+\s*")


def local_environment(
    job: JobConfig, plan: LocalPlan, process: int, address: str, env: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables of one process, besides those of this one.

    Args:
        job: The job.
        plan: How it runs here.
        process: Which process, from 0.
        address: "host:port" of process 0.
        env: Further variables, which win over those of the job file.

    Returns:
        Values by name.

    Raises:
        JobError: Variables that a launcher refuses.

    Example:
        >>> from mesh_utils.launch.local import local_plan
        >>> job = JobConfig.load("llama3_70b_v5p_2slices")
        >>> there = local_environment(job, local_plan(job, 4, 2), 3, "127.0.0.1:8476", {})
        >>> there["JAX_PROCESS_ID"], there["JAX_PARTITION_INDEX"], there["XLA_DTENSOR_LOCAL_AXES"]
        ('3', '1', '{dp: {dcn: 2}, fsdp: {ici: 2}, tp: {ici: 2}}')
    """
    shipped = work_environment(job, env)
    shipped.pop(COMPILE_CACHE, None)  # off on CPUs: a program is compiled for the very processor
    here = {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(plan.devices),
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_NUM_PROCESSES": str(plan.processes),
        "JAX_PROCESS_ID": str(process),
        LOCAL_AXES: axes_text(plan.axes),
    }
    if plan.slices > 1:
        here["JAX_PARTITION_INDEX"] = str(plan.slice_of(process))
    return shipped | here


@dataclass
class _Process:
    """One process of the run."""

    index: int
    child: subprocess.Popen[bytes]
    last: deque[str] = field(default_factory=lambda: deque(maxlen=_LAST_LINES))
    status: int | None = None
    reader: threading.Thread | None = None

    def send(self, number: int, *, to_group: bool = False) -> None:
        """Send a signal, if it still runs."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if to_group:
                os.killpg(self.child.pid, number)
            elif self.status is None:
                self.child.send_signal(number)


class LocalRun:
    """A job's processes on this machine, from start to end.

    Args:
        job: The job.
        plan: How it runs here.
        command: The words of the command.
        logs: The folder for the processes' output, process_<n>.log each.
        env: Further variables.
        grace_seconds: From a signal until processes are killed; the job's when None.
        timeout_seconds: When all are ended; never when None.
        show: Where lines go, with the number of their process before them; stdout when None.
    """

    def __init__(
        self,
        job: JobConfig,
        plan: LocalPlan,
        command: Sequence[str],
        *,
        logs: Path,
        env: Mapping[str, str] | None = None,
        grace_seconds: float | None = None,
        timeout_seconds: float | None = None,
        show: Callable[[str], None] | None = None,
    ) -> None:
        self.job, self.plan, self.command, self.logs = job, plan, tuple(command), logs
        self.env = dict(env or {})
        self.grace_seconds = job.run.grace_seconds if grace_seconds is None else grace_seconds
        self.timeout_seconds = timeout_seconds
        self.reason = ""
        self.last_lines: tuple[str, ...] = ()
        self._show = show or _print
        self._processes: list[_Process] = []
        self._ended: queue.Queue[_Process] = queue.Queue()
        self._signal: signal.Signals | None = None
        self._kill_at: float | None = None
        self._failed: _Process | None = None
        self._started = time.monotonic()

    def run(self) -> int:
        """Start the processes, wait for them, and say how they ended.

        Returns:
            The exit status; ``reason`` says in words what it is for, and ``last_lines`` has those
            of a process that failed.
        """
        self.logs.mkdir(parents=True, exist_ok=True)
        with self._signals_forwarded():
            try:
                self._start()
                timed_out = self._wait()
            finally:
                for process in self._processes:  # what they started themselves, too
                    process.send(signal.SIGKILL, to_group=True)
        for process in self._processes:
            if process.reader is not None:
                process.reader.join(timeout=5)
        return self._outcome(timed_out)

    def send(self, number: int, *, process: int | None = None) -> None:
        """Send a signal to the processes, or to one of them; from any thread.

        Sent to one of them, what it does to that one is a failure like any other.

        Args:
            number: The signal.
            process: Which process; all of them, as if the launcher had got the signal, when None.
        """
        if process is None:
            self._forward(number, None)
        else:
            self._processes[process].send(number)

    # ------------------------------------------------------------------ starting

    def _start(self) -> None:
        address = f"127.0.0.1:{_free_port()}"
        die_with_us = _death_signal()
        for index in range(self.plan.processes):
            variables = local_environment(self.job, self.plan, index, address, self.env)
            child = subprocess.Popen(
                self.command,
                env=_surroundings() | variables,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C of the terminal reaches this process only
                preexec_fn=die_with_us,
            )
            self._processes.append(_Process(index, child))
        for process in self._processes:
            process.reader = threading.Thread(target=self._read, args=(process,), daemon=True)
            process.reader.start()
            threading.Thread(target=self._reap, args=(process,), daemon=True).start()

    def _read(self, process: _Process) -> None:
        pipe = process.child.stdout
        assert pipe is not None
        with pipe, (self.logs / f"process_{process.index}.log").open("wb") as log:
            for line in _lines(pipe):
                log.write(line)
                log.flush()
                text = line.decode(errors="replace").rstrip("\n")
                process.last.append(text)
                self._show(f"[{process.index}] {text}")

    def _reap(self, process: _Process) -> None:
        process.status = process.child.wait()
        self._ended.put(process)

    # ------------------------------------------------------------------ running

    def _wait(self) -> bool:
        """Wait until all have ended; whether that took too long."""
        running, timed_out = len(self._processes), False
        while running:
            moment = time.monotonic()
            if self._kill_at is not None and moment >= self._kill_at:
                self._kill_at = None
                for process in self._processes:
                    process.send(signal.SIGKILL)
            late = (
                self.timeout_seconds is not None and moment - self._started > self.timeout_seconds
            )
            if late and not timed_out:
                timed_out = True
                self._end_all(signal.SIGTERM, _SECONDS_AFTER_A_FAILURE)
            try:
                process = self._ended.get(timeout=0.1)
            except queue.Empty:
                continue
            running -= 1
            if process.status == PREEMPTED:
                self._kill_at = self._kill_at or time.monotonic() + self.grace_seconds
            elif process.status and not (self._failed or self._signal or timed_out):
                self._failed = process
                self._end_all(signal.SIGTERM, _SECONDS_AFTER_A_FAILURE)
        return timed_out

    def _end_all(self, number: int, seconds: float) -> None:
        """Tell all to end, and kill them some time after."""
        for process in self._processes:
            process.send(number)
        self._kill_at = time.monotonic() + seconds

    @contextlib.contextmanager
    def _signals_forwarded(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        handlers = {number: signal.signal(number, self._forward) for number in _FORWARDED}
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._signal is signal.SIGINT:
            self._end_all(signal.SIGKILL, 0.0)
            return
        self._signal = signal.Signals(number)
        self._end_all(number, self.grace_seconds)

    # ------------------------------------------------------------------ ending

    def _outcome(self, timed_out: bool) -> int:
        seconds = time.monotonic() - self._started
        statuses = {process.index: process.status for process in self._processes}
        bad = [process for process in self._processes if process.status not in (0, PREEMPTED)]
        where = f"logs are in {self.logs}"
        if timed_out:
            self.reason = f"took longer than {self.timeout_seconds:g} s and was ended; {where}"
            return TIMED_OUT
        if self._failed is not None:
            self.reason = (
                f"process {self._failed.index} {_ending(self._failed.status)} after {seconds:.1f} "
                f"s, and the others were ended; {where}"
            )
            self.last_lines = tuple(self._failed.last)
            return _exit_status(self._failed.status)
        if bad and self._signal is not None:
            listed = ", ".join(
                f"process {process.index} {_ending(process.status)}" for process in bad
            )
            self.reason = f"got {self._signal.name}: {listed}; {where}"
            return 128 + self._signal
        if PREEMPTED in statuses.values():
            self.reason = f"was told to end, and has saved; start it again to go on; {where}"
            return PREEMPTED
        self.reason = f"ended after {seconds:.1f} s; {where}"
        return 0


def _ending(status: int | None) -> str:
    if status is not None and status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"ended with status {status}"


def _exit_status(status: int | None) -> int:
    if status is None:
        return 1
    return 128 - status if status < 0 else status


def _lines(pipe: IO[bytes]) -> Iterator[bytes]:
    """Lines as they come; the last may lack its end."""
    for line in iter(pipe.readline, b""):
        yield line if line.endswith(b"\n") else line + b"\n"


def _surroundings() -> dict[str, str]:
    """This process's variables, without those that would change the job's devices."""
    variables = dict(os.environ)
    flags = _XLA_DEVICES.sub("", variables.pop("XLA_FLAGS", "")).strip()
    if flags:
        variables["XLA_FLAGS"] = flags
    # XLA:CPU's collectives can starve its threads where there are more devices than cores.
    variables.setdefault("NPROC", "64")
    variables.setdefault("PYTHONUNBUFFERED", "1")
    # `python` is the one that runs this, also where its environment was not activated.
    variables["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{variables.get('PATH', '')}"
    return variables


def _death_signal() -> Callable[[], None] | None:
    """What makes a child get SIGKILL when this process dies, even of a SIGKILL; None if nothing."""
    if not sys.platform.startswith("linux"):
        return None
    prctl, set_death_signal = ctypes.CDLL(None).prctl, 1  # looked up before any fork
    return lambda: prctl(set_death_signal, signal.SIGKILL) and None


def _free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


def _print(line: str) -> None:
    sys.stdout.write(f"{line}\n")  # in one piece: several threads write
    sys.stdout.flush()
