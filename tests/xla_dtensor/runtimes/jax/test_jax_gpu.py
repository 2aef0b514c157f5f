"""On NVIDIA GPUs: drawn calls and trainings against plain PyTorch, precision, cuDNN's attention.

`make gpu-check` runs these. This session's JAX has virtual CPU devices, so each test is a process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[4]
PARTS = 8
MOST_SECONDS = 900


def run_on_gpus(*arguments: str) -> subprocess.CompletedProcess[str]:
    variables = {
        **{name: value for name, value in os.environ.items() if name != "XLA_FLAGS"},
        "JAX_PLATFORMS": "cuda",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    command = [sys.executable, "-W", "ignore", "-m", *arguments]
    return subprocess.run(
        command,
        cwd=ROOT,
        env=variables,
        capture_output=True,
        text=True,
        timeout=MOST_SECONDS,
        check=False,
    )


@pytest.mark.parametrize("part", range(1, PARTS + 1))
def test_calls_are_right_or_refused(part: int, tmp_path: Path) -> None:
    """Every op that is drawn, in float32, as on CPU devices."""
    calls = ["--calls", "all", "--dtypes", "float32", f"--part={part}/{PARTS}"]
    _judge(*calls, notes=tmp_path / "calls.jsonl")


@pytest.mark.parametrize("first", range(0, 8, 2))
def test_trainings_are_right(first: int, tmp_path: Path) -> None:
    _judge("--trainings", f"{first}:{first + 2}", notes=tmp_path / "trainings.jsonl")


def _judge(*jobs: str, notes: Path) -> None:
    ended = run_on_gpus("tests.drawn.run", "--platform=cuda", *jobs, f"--notes={notes}")
    assert ended.returncode == 0, ended.stdout + ended.stderr[-2000:]
    kinds = {json.loads(line).get("kind") for line in notes.read_text().splitlines()}
    assert "right" in kinds
    assert "unclear" not in kinds, ended.stdout


@cache
def measured() -> dict[str, Any]:
    ended = run_on_gpus("tests.xla_dtensor.runtimes.jax.gpu_child")
    assert ended.returncode == 0, ended.stderr[-4000:]
    return json.loads(ended.stdout.splitlines()[-1])


def test_float32_products_are_in_full_precision() -> None:
    assert measured()["product_error"] < 2e-6  # tensor cores' tf32 has 3e-4


def test_attention_is_cudnns_and_right() -> None:
    """Forward and backward are a kernel each."""
    assert measured()["attention_kernels"] >= 2
    assert measured()["attention_error"] < 1e-2
