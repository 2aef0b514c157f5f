"""What the tests of the annotation API share: a mesh, plain tensors, torch_xla's own word."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import xla_dtensor.spmd as xs
from xla_dtensor.runtimes import Runtime

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = Path(__file__).with_name("torch_xla_says.py")
TIMEOUT_SECONDS = 120
# What a session sets for itself, and what torch_xla leaves behind when it starts.
INHERITED = (
    "NPROC",
    "XLA_DISABLE_FUNCTIONALIZATION",
    "XLA_DTENSOR_CPU_DEVICES",
    "XLA_DTENSOR_RUNTIME",
    "XLA_FLAGS",
    "XLA_USE_SPMD",
)

Child = tuple[int, str, str]


@pytest.fixture
def dp_tp(runtime: Runtime) -> xs.Mesh:
    """A (dp=2, tp=4) mesh, as torch_xla's scripts make one."""
    return xs.Mesh(range(8), (2, 4), ("dp", "tp"))


@pytest.fixture
def plain(dp_tp: xs.Mesh) -> Callable[[torch.Tensor], Any]:
    """Put a CPU tensor on the devices, in place, as a plain tensor that was told nothing."""

    def put(tensor: torch.Tensor) -> torch.Tensor:
        return xs.clear_sharding(xs.mark_sharding(tensor, dp_tp, (None,) * tensor.ndim))

    return put


@pytest.fixture(scope="session")
def torch_xla_says() -> dict[str, Any]:
    """What torch_xla.distributed.spmd itself answers, asked in a process of its own."""
    if importlib.util.find_spec("torch_xla") is None:
        pytest.skip("torch_xla is not installed here")
    status, out, errors = child(PROGRAM.read_text(encoding="utf-8"))
    assert status == 0, errors
    return json.loads(out.strip().splitlines()[-1])


@pytest.fixture(scope="session")
def run_child() -> Callable[..., Child]:
    """Run a program in a process of its own: its exit status, what it printed, and its errors."""
    return child


def child(program: str, **environment: str) -> Child:
    clean = {k: v for k, v in os.environ.items() if k not in INHERITED}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=clean
        | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "PJRT_DEVICE": "CPU", "NPROC": "64"}
        | {"CPU_NUM_DEVICES": "8"}
        | environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr
