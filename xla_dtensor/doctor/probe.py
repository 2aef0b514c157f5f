"""Start one runtime in a process of its own: what crashes or hangs there does no harm here.

The child is this module run as a script. It writes what it finds to a file, not to its output,
which the libraries it imports write to as well. When the time runs out, it says where it stands.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Probe", "probe"]

_GRACE_SECONDS = 2.0
_KEPT_LINES = 10
_STACK_BEGINS = ("Fatal Python error", "Timeout (")  # As faulthandler writes it.


@dataclass(frozen=True)
class Probe:
    """What starting a runtime in a child process came to.

    Args:
        runtime: Its name.
        status: "works"; "failed" with an exception; "crashed", the process died; "timed out".
        seconds: How long it took.
        detail: What went wrong.
        num_devices: Devices of the job.
        num_addressable_devices: Those that one process reaches.
        description: What the runtime says of itself: versions, platform, settings it made.
    """

    runtime: str
    status: str
    seconds: float
    detail: str = ""
    num_devices: int | None = None
    num_addressable_devices: int | None = None
    description: Mapping[str, str] = field(default_factory=dict)

    @property
    def works(self) -> bool:
        """Whether the runtime started and computed."""
        return self.status == "works"


def probe(runtime: str, time_limit_seconds: float) -> Probe:
    """Starts a runtime in a child process, puts a sharded tensor on its devices, reads it back.

    Args:
        runtime: Name of the runtime.
        time_limit_seconds: What the child may take. It and its children are killed after that.

    Returns:
        What came of it; no exception, whatever the child does.

    Example:
        >>> probe("jax", time_limit_seconds=120).status  # doctest: +SKIP
        'works'
    """
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="xla_dtensor_probe_") as folder:
        found, errors = Path(folder, "found.json"), Path(folder, "errors.txt")
        command = [sys.executable, "-m", __name__, runtime, str(found), str(time_limit_seconds)]
        try:
            status = _run(command, errors, time_limit_seconds + _GRACE_SECONDS)
        except OSError as error:
            return Probe(runtime, "failed", time.monotonic() - start, str(error))
        seconds = round(time.monotonic() - start, 1)
        said = _last_lines(errors)
        if found.exists():
            return Probe(runtime=runtime, seconds=seconds, **json.loads(found.read_text()))
    if status is None:
        limit = f"It was stopped after {time_limit_seconds:g} s."
        return Probe(runtime, "timed out", seconds, f"{limit} It last said:\n{said}")
    return Probe(runtime, "crashed", seconds, f"{_ending(status)} It last said:\n{said}")


def _run(command: list[str], errors: Path, limit_seconds: float) -> int | None:
    """Runs a command; its exit status, or None when it had to be stopped."""
    with errors.open("wb") as output:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            return child.wait(limit_seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if child.poll() is None:
                with suppress(OSError):  # It may end by itself this very moment.
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()


def _last_lines(path: Path) -> str:
    """What the child said last, and, if it left one, the innermost frames of its Python stack."""
    text = path.read_text(encoding="utf-8", errors="replace")
    lines = [line for line in text.splitlines() if line.strip() and "<frozen " not in line]
    stacks = [i for i, line in enumerate(lines) if line.startswith(_STACK_BEGINS)]
    end = stacks[-1] if stacks else len(lines)
    kept = lines[max(0, end - _KEPT_LINES) : end] + lines[end : end + _KEPT_LINES]
    return "\n".join(kept) or "(nothing)"


def _ending(status: int) -> str:
    if status >= 0:
        return f"Its process ended with status {status}."
    try:
        return f"Its process was ended by {signal.Signals(-status).name}."
    except ValueError:
        return f"Its process was ended by signal {-status}."


def _child(runtime: str, path: str, limit_seconds: float) -> None:
    faulthandler.enable()
    faulthandler.dump_traceback_later(limit_seconds)
    try:
        found = _start(runtime)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        found = {"status": "failed", "detail": text}
    partial = Path(f"{path}.partial")
    partial.write_text(json.dumps(found), encoding="utf-8")
    partial.replace(path)
    # What matters is known. Libraries that crash or hang as they are torn down are left out.
    os._exit(0)


def _start(name: str) -> dict[str, Any]:
    import torch

    from mesh_utils import Mesh
    from xla_dtensor.core import Layout
    from xla_dtensor.runtimes import get_runtime

    runtime = get_runtime(name)
    ids, addressable = runtime.device_ids(), runtime.addressable_device_ids()
    if len(ids) == len(addressable):
        layout = Layout(Mesh(ids, (len(ids),), ("device",)), (("device",),))
        sent = torch.arange(len(ids))
        came_back = runtime.to_host(runtime.put(sent, layout))
        if not torch.equal(sent, came_back):
            text = f"Sent {sent.tolist()} to its devices, {came_back.tolist()} came back."
            return {"status": "failed", "detail": text}
    return {
        "status": "works",
        "num_devices": len(ids),
        "num_addressable_devices": len(addressable),
        "description": {key: str(value) for key, value in runtime.describe().items()},
    }


if __name__ == "__main__":
    _child(sys.argv[1], sys.argv[2], float(sys.argv[3]))
