"""The job of the examples: its parts, what the demo would find, and, slowly, the demo itself."""

from __future__ import annotations

import dataclasses
import doctest
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from examples.corpus import Corpus
from examples.train_job import Record, Windows, digest
from examples.train_job_demo import JOB, OTHER_AXES, Outcome, check, show_table
from mesh_utils import JobConfig
from mesh_utils.launch.local import local_plan

ROOT = Path(__file__).resolve().parents[2]


def test_windows_are_next_to_each_other() -> None:
    windows = Windows(Corpus(torch.arange(10)), seq=3)
    assert len(windows) == 3
    assert [inputs.tolist() for inputs, _ in windows] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert windows[2][1].tolist() == [7, 8, 9]


def test_digest_sees_every_bit() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer: Any = SimpleNamespace(state={})  # a real one takes long to import
    optimizer.state[model.weight] = {"step": torch.tensor(1.0), "exp_avg": torch.ones(2, 2)}
    before = digest(model, optimizer)
    assert before == digest(model, optimizer)
    moment = optimizer.state[model.weight]["exp_avg"]
    moment[0, 0] = torch.nextafter(moment[0, 0], torch.tensor(2.0))
    assert digest(model, optimizer) != before


def test_record_is_of_process_0(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    Record(str(path), 1).add(event="step")
    assert not path.exists()
    Record(str(path), 0).add(event="step", loss=1.5)
    assert path.read_text() == '{"event": "step", "loss": 1.5}\n'


def test_job_file() -> None:
    """It is a job for a cluster, and fits here with the axes of the demo."""
    job = JobConfig.load(JOB)
    assert job.run.command[:3] == ("python", "-m", "examples.train_job")
    assert " ".join(map(str, local_plan(job, 4, 2).axes)) == "dp=2 (2 over DCN) fsdp=2 tp=2"
    assert " ".join(map(str, local_plan(job, 2, 4, OTHER_AXES).axes)) == "dp=1 fsdp=2 tp=4"


@pytest.fixture
def runs() -> list[Outcome]:
    """Four runs in which all is well."""
    plan = local_plan(JobConfig.load(JOB), 4, 2)
    losses = {step: 5.0 - step / 10 for step in range(1, 9)}

    def some(first: int, last: int) -> dict[int, float]:
        return {step: losses[step] for step in range(first, last + 1)}

    return [
        Outcome("whole", plan, 0, "ended", losses, {3: "a", 6: "b"}, None),
        Outcome("killed", plan, 137, "process 1 was killed by", some(1, 4), {3: "a"}, None),
        Outcome("ended", plan, 75, "was told", some(4, 6), {6: "b"}, (3, "a")),
        Outcome("moved", plan, 0, "ended", some(7, 8), {8: "c"}, (6, "b")),
    ]


def test_all_is_well(runs: list[Outcome], capsys: pytest.CaptureFixture[str]) -> None:
    assert check(*runs, at=5)
    show_table(runs)
    shown = capsys.readouterr().out
    assert shown.count("PASS") == 8
    assert re.search(r"ended +4 x 2 +dp=2 \(2 over DCN\) fsdp=2 tp=2 +4-6 +75\n", shown)


@pytest.mark.parametrize(
    ("run", "change", "line"),
    [
        (0, {"status": 1}, "the job runs to its end"),
        (1, {"status": 1}, "one process is killed"),
        (1, {"reason": "process 0 was killed by"}, "one process is killed"),
        (2, {"loaded": (3, "x")}, "same mesh: the state"),
        (2, {"loaded": None}, "same mesh: the state"),
        (2, {"losses": {4: 4.6, 5: 4.5, 6: 4.4000001}}, "same mesh: 3 losses"),
        (2, {"losses": {}}, "same mesh: 0 losses"),
        (2, {"status": 0}, "SIGTERM after step 5"),
        (2, {"saved": {}}, "SIGTERM after step 5"),
        (3, {"loaded": (6, "x")}, "another mesh: the state"),
        (3, {"losses": {8: 4.2}}, "another mesh: the job goes on"),
        (3, {"losses": {7: 4.3, 8: 4.2001}}, "another mesh: 2 losses"),
        (3, {"losses": {7: 4.3, 8: float("nan")}}, "another mesh: 2 losses"),
    ],
)
def test_what_is_not_well_is_found(
    runs: list[Outcome],
    run: int,
    change: dict[str, object],
    line: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    runs[run] = dataclasses.replace(runs[run], **change)  # pyright: ignore[reportArgumentType]
    assert not check(*runs, at=5)
    assert f"FAIL {line}" in capsys.readouterr().out


@pytest.mark.thorough
def test_demo() -> None:
    """What `make demo-hosts` runs, with a smaller model and fewer steps."""
    words = ["--kill-after", "4", "--end-after", "5", "--", "--steps", "12", "--save-every", "3"]
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "examples.train_job_demo",
            *words,
            *("--dim", "32", "--layers", "1", "--seq", "32"),
        ],
        env=environment | {"PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert len(re.findall("^PASS", done.stdout, re.MULTILINE)) == 8


@pytest.mark.parametrize("module", ["train_job", "train_job_demo"])
def test_examples(module: str) -> None:
    assert doctest.testmod(importlib.import_module(f"examples.{module}")).failed == 0
