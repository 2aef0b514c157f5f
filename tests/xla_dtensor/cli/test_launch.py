"""``python -m xla_dtensor launch``: what it prints, what it notes, what it refuses."""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from mesh_utils import JobConfig
from mesh_utils.launch import render
from xla_dtensor.cli.launch import add_launch

ROOT = Path(__file__).resolve().parents[3]


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    add_launch(parser.add_subparsers())
    asked = parser.parse_args(["launch", *arguments])
    return asked.command(asked)


def test_plain(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("tpu_configs/jobs/llama3_70b_v5p.yaml") == 0
    shown = capsys.readouterr()
    manifest = yaml.safe_load(shown.out)
    (job,) = manifest["spec"]["replicatedJobs"]
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    assert (container["image"], container["command"]) == ("IMAGE", ["python", "train.py"])
    assert "no --command, python train.py stands for it" in shown.err
    assert "no --image, IMAGE stands for it" in shown.err
    assert "note: the job does not say which libtpu will run (xla_flags: libtpu)" in shown.err
    assert "note: latency-hiding: taken by libtpu 0.0.42.1, " in shown.err


def test_everything(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--with", "slurm", "--image", "us/x:1", "--env", "A=b c", "--env", "B=d=e"]
    options = ["--option", "partition=big", "--option", "time=1:00:00"]
    command = ["--command", "python", "train.py", "--with", "a b", "--image=$x"]
    assert run("llama3_70b_h100", *arguments, *options, *command) == 0
    shown = capsys.readouterr()
    first, second = shown.err.splitlines()
    assert first.startswith("note: the job does not say which jaxlib will run")
    assert second.startswith("note: latency-hiding: taken by jaxlib 0.10.2, ")
    assert shown.out == render(
        JobConfig.load("llama3_70b_h100"),
        "slurm",
        command=command[1:],
        image="us/x:1",
        env={"A": "b c", "B": "d=e"},
        partition="big",
        time="1:00:00",
    )


def test_a_job_that_says_which_libtpu_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.yaml"
    text = "name: x\naccelerator: v5e:4x4\naxes: {dp: {ici: -1}}\nxla_flags: {libtpu: VERSION}\n"
    path.write_text(text.replace("VERSION", "0.0.50.1"))
    assert run(str(path), "--image", "x", "--command", "true") == 0
    assert capsys.readouterr().err == ""
    path.write_text(text.replace("VERSION", "0.0.99"))
    assert run(str(path), "--image", "x", "--command", "true") == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "note: the set of XLA flags latency-hiding was not tried with libtpu 0.0.99, only with "
    )
    path.write_text(text.replace("VERSION", "new"))
    assert run(str(path), "--image", "x", "--command", "true") == 2
    assert "Write such as libtpu: 0.0.50.1." in capsys.readouterr().err


def test_one_word_is_a_line_of_shell(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("llama3_8b_v5e", "--image", "x", "--command", "python 'a b.py' --n 1") == 0
    assert '- "a b.py"' in capsys.readouterr().out


def test_warnings_go_to_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("name: x\naccelerator: 2xv5e:4x4\naxes: {tp: {ici: -1, dcn: -1}}\n")
    assert run(str(path), "--with", "queued", "--command", "true") == 0
    shown = capsys.readouterr()
    assert re.match(r"warning: Job 'x' puts tp=32 across 2 slices. Modelled, .*\nnote", shown.err)
    assert shown.out.startswith("#!/bin/bash")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["llama3_70b_v5"], r"error: Job 'llama3_70b_v5' was asked for.*'llama3_70b_v5p'"),
        (["llama3_8b_v5e", "--with", "slrum"], r"error: .*no such launcher. Pass "),
        (["llama3_8b_v5e", "--with", "slurm"], r"error: .*does not start jobs on TPU v5e"),
        (["llama3_8b_v5e", "--option", "zone"], r"error: --option 'zone' was given. It names no"),
        (["llama3_8b_v5e", "--env", "=a"], r"error: --env '=a' was given"),
        (["llama3_8b_v5e", "--command", "a 'b"], r'error: --command "a \'b" was given.*no line of'),
    ],
)
def test_refusals(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert re.search(message, shown.err)


def test_document(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs" / "jobs.md").read_text(encoding="utf-8")
    lines = re.findall(r"^python -m xla_dtensor launch (.*)$", text, re.MULTILINE)
    assert len(lines) == 2
    for line in lines:
        words = [word.replace("my_job.yaml", "llama3_8b_v5e") for word in shlex.split(line)]
        assert run(*words) == 0
        said = capsys.readouterr().err.splitlines()
        assert said
        assert all("XLA flags" in line or "taken by libtpu" in line for line in said)


def test_it_starts_without_tensor_libraries() -> None:
    program = (
        "import argparse, sys\n"
        "from xla_dtensor.cli.launch import add_launch\n"
        "parser = argparse.ArgumentParser()\n"
        "add_launch(parser.add_subparsers())\n"
        "asked = parser.parse_args(['launch', 'llama3_70b_v5p'])\n"
        "assert asked.command(asked) == 0\n"
        "heavy = {'torch', 'jax', 'torch_xla', 'matplotlib'} & set(sys.modules)\n"
        "sys.exit(sorted(heavy) or 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
