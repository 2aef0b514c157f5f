"""The Llama step compiled by libtpu: the plan communicates as hand annotations do."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
# docs/decisions/llama_plan.md has the excess.
FACTOR = 1.05


@pytest.mark.thorough
@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None or importlib.util.find_spec("jax") is None,
    reason="libtpu, the TPU compiler, is not installed: pip install xla-dtensor[preflight]",
)
def test_bytes_of_the_plan_and_by_hand(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.llama_plan", "--runtimes", "jax"]
    # The test session's own settings would reach a child that starts a runtime differently.
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "PYTHONPATH")}
    done = subprocess.run(
        [*command, "--results", str(tmp_path)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "jax, compiled by libtpu" in done.stdout
    rows = json.loads((tmp_path / "llama_plan.json").read_text())["rows"]
    by_libtpu = {row["variant"]: row for row in rows if row["compiler"] == "libtpu"}
    assert all(row["gradient_error"] < 1e-5 and row["loss_error"] < 1e-5 for row in rows)
    for loss in ("", ", loss parallel"):
        ours, theirs = (moved(by_libtpu[f"{said}{loss}"]) for said in ("plan", "by hand"))
        assert 0 < ours <= FACTOR * theirs


def moved(row: dict[str, Any]) -> int:
    return sum(one["bytes"] for one in row["collectives"])


def test_an_unknown_runtime_is_refused(tmp_path: Path) -> None:
    from benchmarks.llama_plan import main

    with pytest.raises(SystemExit, match="runtime='tpu' is not known"):
        main(["--runtimes", "tpu", "--results", str(tmp_path)])
