"""The checkpoint benchmark runs, prints its table and stores JSON. No figure is asserted."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

WAYS = ("xla_dtensor", "background", "dcp", "dcp_dtensors", "orbax")
WAYS += ("hugging_face", "hugging_face_dcp")
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.thorough
@pytest.mark.only_on("jax")
def test_checkpoint(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "PYTHONPATH")}
    options = ["--megabytes", "16", "--rounds", "1", "--results", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.checkpoint", *options],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    stored = json.loads((tmp_path / "checkpoint.json").read_text())
    ways = [*WAYS]
    if importlib.util.find_spec("orbax") is None:
        ways.remove("orbax")
        assert stored["absent"] == ["orbax"]
        assert "orbax is not installed: left out" in done.stdout
    assert [row["way"] for row in stored["rows"]] == ways
    for row in stored["rows"]:
        assert row["save_mb_per_second"] > 0
        assert row["load_mb_per_second"] > 0
        assert 15e6 < row["state_bytes"] <= 16e6
    assert done.stdout.count(" MB/s") == 2


def test_an_unknown_way() -> None:
    from benchmarks.checkpoint import main

    with pytest.raises(SystemExit, match="way='nfs' is not timed here"):
        main(["--ways", "nfs"])
