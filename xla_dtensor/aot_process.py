"""The process that compiles for a machine that is not here: started, watched, ended."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from xla_dtensor.errors import CompileError
from xla_dtensor.host_memory import host_bytes

__all__ = ["LIBTPU_ENVIRONMENT", "CompilingProcess", "python_path"]

_POLL_SECONDS = 0.2

# libtpu neither looks for a TPU nor asks the cloud about one, and shares the machine.
LIBTPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "JAX_PLATFORMS": "cpu",
    "TF_CPP_MIN_LOG_LEVEL": "2",
}
_OF_SEVERAL_SLICES = (
    "That is libtpu's own fault. For several slices set its flag "
    "xla_tpu_enable_sunk_dcn_allreduce_done_with_host_reduction to false, as a job with the set "
    "'dcn' does; else try other flags or another mesh. What it says last:"
)
# What libtpu prints of itself when it falls: addresses, and where it would send a report.
_DUMP = re.compile(r"\s*@ |https://symbolize|[EF]\d{4} .*\] RAW: |\*\*\* SIG|PC: @")
_UNKNOWN_FLAG = re.compile(r"Unknown command line flag '?(\w+)")
_FOREIGN = ("XLA_", "PJRT_", "NPROC", "LIBTPU_", "TPU_")


def python_path() -> str:
    """Return PYTHONPATH for a process of another interpreter: where this one finds users' modules.

    This interpreter's library and installed packages are no part of it. The other one has its own,
    and may be of another version.
    """
    own = (sys.prefix, sys.base_prefix)
    users = (path for path in sys.path if not any(Path(path).is_relative_to(each) for each in own))
    return os.pathsep.join([os.getcwd(), *filter(None, users)])


class CompilingProcess:
    """A process that compiles, from its start on.

    Args:
        python: Its interpreter.
        folder: Where its request is, and where its evidence will be.
        environment: What it has besides this process's environment.
    """

    def __init__(self, python: str, folder: Path, environment: Mapping[str, str]) -> None:
        self._command = [python, "-m", "xla_dtensor.aot_child", str(folder)]
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(_FOREIGN)}
        self._said = folder / "said.txt"
        self._errors = folder / "errors.txt"
        with self._said.open("wb") as said, self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                self._command,
                env={**inherited, **environment, "PYTHONPATH": python_path()},
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=errors,
                start_new_session=True,
            )

    def wait(
        self, seconds: float | None, most_bytes: int | None, progress: bool, title: str
    ) -> None:
        """Wait until it has ended well.

        Args:
            seconds: The most time it may take; None for any.
            most_bytes: The most memory it may hold; None for any.
            progress: Whether to say on stderr what it is doing.
            title: What it compiles, for people.

        Raises:
            CompileError: It has not, or it has reached a limit.
        """
        start, shown = time.monotonic(), 0
        try:
            while self._process.poll() is None:
                time.sleep(_POLL_SECONDS)
                shown = self._show(shown, start, title) if progress else 0
                if seconds is not None and time.monotonic() - start > seconds:
                    self._refuse(title, f"It took more than time_limit_seconds={seconds:g}")
                if most_bytes is not None and self._bytes() > most_bytes:
                    self._refuse(title, f"It took more than memory_limit_bytes={most_bytes}")
        finally:
            self._end()
        if self._process.returncode:
            self._fail(title)

    def _show(self, shown: int, start: float, title: str) -> int:
        parts = self._said.read_text(encoding="utf-8", errors="replace").splitlines()
        for part in parts[shown:]:
            sys.stderr.write(f"{title}: {part} ({time.monotonic() - start:.0f} s)\n")
        return len(parts)

    def _bytes(self) -> int:
        return host_bytes("VmRSS", self._process.pid) or 0

    def _end(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _last(self) -> str:
        parts = self._said.read_text(encoding="utf-8", errors="replace").split("\n")
        done = [part for part in parts if part]
        return f" while it was at {done[-1]!r}" if done else " before it began"

    def _refuse(self, title: str, why: str) -> None:
        raise CompileError(
            f"{title!r} was being compiled in a process of its own. {why}{self._last()}, and was "
            "ended. Raise the limit, or compile a smaller step: layers as one loop (scan_layers) "
            "take a fraction of both."
        )

    def _fail(self, title: str) -> None:
        status = self._process.returncode
        how = f"signal {-status}" if status < 0 else f"status {status}"
        said = self._errors.read_text(encoding="utf-8", errors="replace").strip()
        flag = _UNKNOWN_FLAG.search(said)
        if flag:
            raise CompileError(
                f"{title!r} was to be compiled with the XLA flag {flag[1]}. The libtpu at hand "
                "does not know it. Leave it out of xla_flags: flags, or compile with a libtpu that "
                "does (--python names the interpreter of its environment)."
            )
        last = [line for line in said.splitlines() if not _DUMP.match(line)][-12:]
        hint = _OF_SEVERAL_SLICES if -status == signal.SIGSEGV else "Mend what it says last:"
        raise CompileError(
            f"{title!r} was being compiled in a process of its own. It ended with {how}"
            f"{self._last()}. {hint}\n" + "\n".join(last)
        )
