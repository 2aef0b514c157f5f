"""The loader benchmark runs, prints its table and stores JSON. No figure is asserted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import loader
from benchmarks.loader_child import WAYS

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.thorough
def test_it_runs(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.loader", "--cases", "images", "--rounds", "1"]
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "PYTHONPATH")}
    done = subprocess.run(
        [*command, "--batches", "2", "--step-milliseconds", "1", "--results", str(tmp_path)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "loader.json").read_text())["rows"]
    assert [row["way"] for row in rows] == list(WAYS)
    for row in rows:
        assert f"images   {row['way']:<13}" in done.stdout
        assert row["best_mb_per_second"] > 0
        assert row["batch_mb"] == pytest.approx(38.5, abs=0.1)
        assert row["peak_mb"] > 10


def test_an_unknown_case_is_refused() -> None:
    with pytest.raises(SystemExit, match=r"cases=\['sound'\] are not measured"):
        loader.main(["--cases", "sound"])
