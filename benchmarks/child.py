"""Run a benchmark's child process and read the rows that it prints.

A process runs one runtime, so what is timed runs in children: each prints one JSON object per line,
and whatever else it likes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

__all__ = ["ON_CPU", "ChildFailedError", "child_rows"]

ON_CPU = {"JAX_PLATFORMS": "cpu", "PJRT_DEVICE": "CPU"}
_ROOT = Path(__file__).resolve().parents[1]


class ChildFailedError(RuntimeError):
    """A child process ended before it had measured everything."""


def child_rows(
    module: str, *options: str, advice: str, environment: Mapping[str, str] = ON_CPU
) -> Iterator[dict[str, Any]]:
    """Yields the rows of a child as they come.

    Args:
        module: The module in `benchmarks` that the child runs.
        *options: Its arguments.
        advice: What to do when it fails: the end of the error's message.
        environment: Variables that it gets besides this process's.

    Raises:
        ChildFailedError: It ended with another status than 0.
    """
    command = [sys.executable, "-m", f"benchmarks.{module}", *options]
    variables = {**os.environ, **environment}
    with subprocess.Popen(
        command, cwd=_ROOT, env=variables, stdout=subprocess.PIPE, text=True
    ) as child:
        for line in child.stdout or ():
            if line.startswith("{"):
                yield json.loads(line)
    if child.returncode:
        raise ChildFailedError(
            f"The child process `{module} {' '.join(options)}` ended with "
            f"status={child.returncode}. What it printed stands above. {advice}"
        )
