"""The demo as a user runs it: its checks pass, and it prints what the README shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

# One worker: the demo runs once for all of them.
pytestmark = [pytest.mark.on_runtime, pytest.mark.xdist_group("demo")]
ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_SECONDS = 600


@pytest.fixture(scope="module")
def output(request: pytest.FixtureRequest) -> str:
    """What 20 steps of the demo print, on the session's runtime."""
    runtime = str(request.config.getoption("--runtime"))
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    environment.pop("XLA_FLAGS", None)
    done = subprocess.run(
        [sys.executable, "-m", "examples.train_lm", "--runtime", runtime, "--steps", "20"],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def rows(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


def test_both_checks_pass(output: str) -> None:
    assert len(re.findall("^PASS", output, re.MULTILINE)) == 2
    assert "FAIL" not in output


def test_the_losses_equal_plain_pytorch(output: str) -> None:
    found = re.search(r"max \|difference\| = (\S+)", output)
    assert found is not None
    assert float(found[1]) <= 1e-4


def test_the_step_communicates_over_both_axes(output: str) -> None:
    table = output.split("communication in one step")[1]
    axes = {row[1] for row in rows(table) if row and row[0].startswith("all-")}
    assert {"dp", "tp"} <= axes


def test_the_parameters_are_the_readmes(output: str) -> None:
    shown = readme_block()
    parameters = [row for row in shown if row and "weight" in row[0]]
    assert len(parameters) >= 4
    assert all(row in rows(output) for row in parameters)


@pytest.mark.only_on("jax")
def test_the_whole_table_is_the_readmes(output: str) -> None:
    assert [row for row in readme_block() if row not in rows(output)] == []


def readme_block() -> list[list[str]]:
    text = (ROOT / "README.md").read_text()
    (block,) = re.findall(r"^```text\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return rows(block)
