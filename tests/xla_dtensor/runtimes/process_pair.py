"""Run a program as two processes of four CPU devices each, one mesh of eight."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

TIMEOUT_SECONDS = 300


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def answers_of(program: Path, *arguments: str) -> list[Any]:
    """Run ``python program PORT 2 ID arguments...`` twice; return each last line, read as JSON."""
    root = str(Path(__file__).parents[3])
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    environment |= {"PYTHONPATH": root, "JAX_PLATFORMS": "cpu", "NPROC": "64"}
    port = str(free_port())
    processes = [
        subprocess.Popen(
            [sys.executable, str(program), port, "2", str(i), *arguments],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    try:
        outputs = [p.communicate(timeout=TIMEOUT_SECONDS) for p in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors[-4000:]
    return [json.loads(out.splitlines()[-1]) for out, _ in outputs]
