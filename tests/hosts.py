"""Processes of a job on this machine, kept for many tests: each has its own virtual CPU devices.

    hosts = Hosts(processes=2, devices=4)
    hosts.run("tests.xla_dtensor.host_tasks:sum_of_rows", rows=8)     what each process returns
    hosts.close()

Starting a process takes seconds (torch, JAX), so a group serves all tests of its shape: see the
fixture `hosts`. A task is a function of a module under tests/; it is called in every process with
the same arguments, and must leave nothing behind. Tasks of processes that the test kills get a
group of their own.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import traceback
from pathlib import Path
from typing import Any, BinaryIO

__all__ = ["QUICK_COMPILER", "HostError", "Hosts", "free_port"]

# Halves the time that XLA:CPU takes for a small program: LLVM does not optimize it. The partitioner
# has done its part before; the demo and the README run without it.
QUICK_COMPILER = "--xla_backend_optimization_level=0"

_ROOT = Path(__file__).parents[1]
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG


class HostError(RuntimeError):
    """A process failed or ended; the message holds its traceback or its last words."""


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class Hosts:
    """A group of processes of one job.

    Args:
        processes: How many.
        devices: Virtual CPU devices of each.
        **environment: Variables of theirs besides those of this process.
    """

    def __init__(self, processes: int, devices: int, **environment: str) -> None:
        self.processes, self.devices = processes, devices
        self.closed = False
        address = f"127.0.0.1:{free_port()}"
        variables = {
            k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "PYTEST_CURRENT_TEST")
        }
        variables |= {
            "NPROC": "64",
            "XLA_FLAGS": QUICK_COMPILER,
            "JAX_PLATFORMS": "cpu",
            "XLA_DTENSOR_RUNTIME": "jax",
            "PYTHONPATH": str(_ROOT),
            **environment,
        }
        self.words = [tempfile.TemporaryFile() for _ in range(processes)]  # noqa: SIM115
        self.children = [
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "tests.hosts",
                    address,
                    str(processes),
                    str(i),
                    str(devices),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self.words[i],
                cwd=_ROOT,
                env=variables,
                start_new_session=True,
            )
            for i in range(processes)
        ]

    def run(self, task: str, *, timeout_seconds: float = 180, **arguments: Any) -> list[Any]:
        """Call a function in every process and return what each gives, by process.

        Args:
            task: "module:function".
            timeout_seconds: After this all processes are killed.
            **arguments: Its arguments; they are pickled.

        Raises:
            HostError: One raised, ended, or all took too long.
        """
        outcomes: list[Any] = [None] * self.processes

        def ask(index: int) -> None:
            try:
                outcomes[index] = self._ask(index, (task, arguments))
            except (OSError, EOFError, ValueError) as error:
                outcomes[index] = (None, f"ended: {error}")

        threads = [
            threading.Thread(target=ask, args=(i,), daemon=True) for i in range(self.processes)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout_seconds)
        late = [i for i, thread in enumerate(threads) if thread.is_alive()]
        if late:
            said = "\n".join(self.last_words(i) for i in late)
            self.close()
            raise HostError(
                f"{task} did not end in {timeout_seconds} s in the processes {late}\n{said}"
            )
        failed = [
            f"process {i}: {text}" + (f"\n{self.last_words(i)}" if good is None else "")
            for i, (good, text) in enumerate(outcomes)
            if not good
        ]
        if failed:
            raise HostError("\n".join(failed))
        return [value for _, value in outcomes]

    def _ask(self, index: int, request: Any) -> Any:
        child = self.children[index]
        assert child.stdin is not None
        assert child.stdout is not None
        _send(child.stdin, request)
        return _receive(child.stdout)

    def last_words(self, index: int, size: int = 4000) -> str:
        """The end of what a process wrote to stderr."""
        file = self.words[index]
        file.flush()
        end = os.fstat(file.fileno()).st_size
        return os.pread(file.fileno(), size, max(0, end - size)).decode(errors="replace")

    def kill(self, index: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to a process."""
        self.children[index].send_signal(number)

    def close(self) -> None:
        """End all processes."""
        self.closed = True
        for child in self.children:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
        for child in self.children:
            child.wait()
            for pipe in (child.stdin, child.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()
        for file in self.words:
            file.close()


def _send(stream: BinaryIO | Any, value: Any) -> None:
    data = pickle.dumps(value)
    stream.write(struct.pack("<Q", len(data)) + data)
    stream.flush()


def _receive(stream: BinaryIO | Any) -> Any:
    head = stream.read(8)
    if len(head) < 8:
        raise EOFError("no answer")
    return pickle.loads(stream.read(struct.unpack("<Q", head)[0]))


def _serve(address: str, count: int, index: int, devices: int) -> None:
    """The loop of a child: join the others, then do tasks until stdin ends."""
    if sys.platform == "linux":  # a child that waits in a collective does not see its stdin end
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what tasks print goes to stderr
    import xla_dtensor as xd

    xd.init_distributed(address, count, index, num_cpu_devices=devices)
    while True:
        try:
            task, arguments = _receive(sys.stdin.buffer)
        except EOFError:
            os._exit(0)  # without the barrier of a shutdown: others may be gone
        try:
            module, _, name = task.partition(":")
            outcome = True, getattr(importlib.import_module(module), name)(**arguments)
        except BaseException:
            outcome = False, traceback.format_exc()
        _send(answers, outcome)


if __name__ == "__main__":
    _serve(sys.argv[1], *map(int, sys.argv[2:5]))
