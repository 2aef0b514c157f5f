"""libtpu, the TPU's compiler, in a child process: it needs no TPU, and a bad mesh can abort it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from xla_dtensor.plan.aot import LIBTPU_ENVIRONMENT

__all__ = ["needs_libtpu", "run_with_libtpu"]

ROOT = Path(__file__).resolve().parents[1]

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None or importlib.util.find_spec("jax") is None,
    reason="libtpu, the TPU compiler, is not installed: pip install xla-dtensor[preflight]",
)

_FOREIGN = ("XLA_", "PJRT_", "NPROC", "TPU_", "LIBTPU_")
_ENVIRONMENT = {**LIBTPU_ENVIRONMENT, "NPROC": "64", "PYTHONPATH": str(ROOT)}


def run_with_libtpu(
    program: str, *arguments: str, folder: Path, time_limit_seconds: float = 240
) -> str:
    """Run a Python program in a process of its own.

    Args:
        program: Source text.
        *arguments: Its ``sys.argv[1:]``.
        folder: Where it runs. The project is on its path.
        time_limit_seconds: After this it is stopped, and the test fails.

    Returns:
        What it printed.
    """
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(_FOREIGN)}
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env={**inherited, **_ENVIRONMENT},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=time_limit_seconds,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
