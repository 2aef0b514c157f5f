"""Checkpoints are killed, cut short and damaged at drawn points; see `host_tasks_checkpoint_kill`.

The trials run without devices, in a process that forks: a process of a job that is killed is one
that wrote some of its file, whatever it computed with. Jobs of several processes are killed in
`test_checkpoint_processes`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
KINDS = ("killed_saving", "killed_loading", "power_cut", "full_disk", "damaged", "slow_writer")


def trials(folder: Path, count: int, seed: int) -> dict[str, int]:
    """Make trials, and return how often what happened."""
    module = "tests.xla_dtensor.host_tasks_checkpoint_kill"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", module, str(folder), str(count), str(seed)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    outcomes: dict[str, int] = json.loads(done.stdout)
    assert sum(outcomes.values()) == count
    for kind in KINDS:
        assert any(outcome.startswith(kind) for outcome in outcomes)
    return outcomes


@pytest.mark.thorough
def test_no_checkpoint_is_lost_and_no_damaged_one_is_loaded(tmp_path: Path) -> None:
    trials(tmp_path, 36, 0)


@pytest.mark.thorough
def test_the_same_at_many_points(tmp_path: Path) -> None:
    outcomes = trials(tmp_path, 360, 1)
    # Points lie before and after the moment that counts, and all kinds of damage were drawn.
    for kind in ("killed_saving", "power_cut", "slow_writer"):
        assert outcomes[f"{kind}: saved"]
        assert outcomes[f"{kind}: not saved"]
    for how in ("truncated", "flipped", "missing"):
        assert outcomes[f"damaged: {how}, refused"]
