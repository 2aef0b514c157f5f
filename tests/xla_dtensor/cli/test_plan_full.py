"""``python -m xla_dtensor plan JOB``: compiled for chips that are not here."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import pytest

from mesh_utils import JobConfig, JobError
from tests.libtpu import needs_libtpu
from xla_dtensor.cli import main
from xla_dtensor.cli.plan import add_plan
from xla_dtensor.cli.plan_flags import check_at_hand, flag_lines, flagged, reports_too_much
from xla_dtensor.plan.aot import python_path
from xla_dtensor.report import Evidence
from xla_dtensor.report.compile_report import CompileReport
from xla_dtensor.versions import Installed

JOB = """
name: small
accelerator: v5e:2x2
model: tests.xla_dtensor.plan.aot_plans:for_job
axes:
  fsdp: {ici: 4}
sharding:
  parameters: {weight: [fsdp, null]}
"""


@needs_libtpu
def test_a_job_with_a_model_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    job, out = tmp_path / "small.yaml", tmp_path / "out"
    job.write_text(JOB)
    assert main(["plan", str(job), "--out", str(out)]) == 0
    shown = capsys.readouterr()
    quick, full = shown.out.index("own model"), shown.out.index("small: tests.xla_dtensor")
    assert quick < full
    assert "compile" in shown.err
    report = CompileReport.of(Evidence.load(out))
    assert report.to_json() + "\n" == (out / "report.json").read_text()
    assert report.fits
    assert report.command == f"python -m xla_dtensor plan {job}"
    assert {path.name for path in out.iterdir()} >= {"report.html", "report.md", "program.hlo.gz"}

    assert main(["plan", str(job), "--json"]) == 0
    assert CompileReport.from_json(capsys.readouterr().out) == report


def test_what_does_not_fit_is_not_compiled(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "llama3_8b_v6e_8", "--model", "llama3-405b"]) == 1
    shown = capsys.readouterr()
    assert "CANNOT FIT" in shown.out
    assert not shown.err


def test_refusals(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["plan", "llama3_8b_v5e", "--optimizer", "sgd"]) == 2
    assert "trained by one of adamw, adamw-bf16" in capsys.readouterr().err
    assert main(["plan", "llama3_8b_v5e", "--time-limit", "0"]) == 2
    assert "It took more than time_limit_seconds=0" in capsys.readouterr().err


@needs_libtpu
@pytest.mark.thorough
def test_a_sweep_compiles_the_best(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    job, out = tmp_path / "small.yaml", tmp_path / "out"
    job.write_text(JOB.replace("{ici: 4}", "{ici: 4}\n  other: {ici: 1}"))
    words = ["plan", str(job), "--sweep", "fsdp=*,other=*", "--best", "1", "--out", str(out)]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "1 compiled by libtpu" in shown
    assert "found: fsdp=" in shown
    report = CompileReport.of(Evidence.load(out))
    assert report.fits
    assert "--sweep" in report.command


@needs_libtpu
@pytest.mark.thorough
def test_what_does_not_fit_is_reported_with_its_causes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """12 GiB go in and 12 come out of a chip of 16."""
    job, out = tmp_path / "large.yaml", tmp_path / "out"
    job.write_text(JOB.replace(":for_job", ":large_results"))
    assert main(["plan", str(job), "--no-cache", "--out", str(out)]) == 1
    if not reports_too_much(None):
        said = capsys.readouterr().err
        assert said.count(": compile (") == 1
        assert "(24.06G) exceeds available HBM (15.75G)" in said
        return
    report = CompileReport.of(Evidence.load(out))
    assert report.fits is False
    assert report.findings[0].code == "does-not-fit"
    kinds = [cause.kind for cause in report.memory.causes]
    assert kinds[:2] == ["argument", "result"]
    assert len(kinds) == len(set(kinds)) == 3


@needs_libtpu
@pytest.mark.thorough
def test_where_libtpu_gives_no_program_its_words_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = tmp_path / "large.yaml"
    job.write_text(JOB.replace(":for_job", ":large_temporaries"))
    assert main(["plan", str(job), "--no-cache"]) == 1
    shown = capsys.readouterr().err
    assert "DOES NOT FIT, says libtpu" in shown
    assert "exceeds available HBM (15.75G)" in shown


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_plan(parser.add_subparsers())
    return parser.parse_args(["plan", "llama3_8b_v5e", *words])


def test_sets_that_are_slow_to_compile_are_left_out() -> None:
    job = JobConfig.load("llama3_8b_v5e")
    assert flagged(job, options()).flag_sets == ("latency-hiding", "reduce-scatter-layout")
    first = next(flag_lines(job, options()))
    assert first.startswith("XLA flags left out: dense-vmem, slow to compile (Llama 3 8B, 4 layers")
    assert first.endswith(" without). --all-flags compiles what launch runs.")
    assert flagged(job, options("--all-flags")).xla_flags() == job.xla_flags()
    assert not any("left out" in line for line in flag_lines(job, options("--all-flags")))
    fewer = options("--without-flags", "dense-vmem", "--without-flags", "latency-hiding")
    assert flagged(job, fewer).flag_sets == ("reduce-scatter-layout",)
    assert not any("left out" in line for line in flag_lines(job, fewer))


def test_a_libtpu_that_is_not_of_its_jax() -> None:
    job = JobConfig.load("llama3_8b_v5e")
    pins = {"jax": "==0.0.50.*"}
    good = Installed({"jax": "0.12.0.1", "libtpu": "0.0.50.1"}, pins)
    assert check_at_hand(job, good) == []
    with pytest.raises(JobError) as caught:
        check_at_hand(job, Installed({"jax": "0.12.0.1", "libtpu": "0.0.42.1"}, pins))
    assert str(caught.value) == (
        "Job 'llama3-8b-v5e' was to be compiled with jax 0.12.0.1 and libtpu 0.0.42.1. They do not "
        "belong together: this jax pins libtpu==0.0.50.*. "
        "Install it with pip install 'jax[tpu]==0.12.0.1'."
    )
    assert check_at_hand(job, Installed({"jax": "0.12.0.1", "libtpu": None}, pins)) == []
    assert check_at_hand(JobConfig.load("llama3_8b_h100"), good) == []


def test_a_libtpu_that_nobody_tried() -> None:
    newest = Installed({"jax": "0.13.0", "libtpu": "0.0.99.1"}, {"jax": "==0.0.99.*"})
    (note,) = check_at_hand(JobConfig.load("llama3_70b_v5p"), newest)
    assert note.startswith("note: the set of XLA flags latency-hiding was not tried with libtpu")


def test_the_libtpu_of_another_interpreter() -> None:
    here, there = (
        list(flag_lines(JobConfig.load("llama3_8b_v5e"), options(*words)))
        for words in ((), ("--python", sys.executable))
    )
    assert here == there


@needs_libtpu
def test_a_flag_that_libtpu_does_not_know(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = tmp_path / "small.yaml"
    job.write_text(JOB + "xla_flags: {flags: {xla_tpu_gone: true}}\n")
    assert main(["plan", str(job), "--no-cache"]) == 2
    said = capsys.readouterr().err
    assert "was to be compiled with the XLA flag xla_tpu_gone. The libtpu at hand does not" in said
    assert "Leave it out of xla_flags: flags" in said


def test_another_interpreter_gets_none_of_this_ones_packages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "path", ["", *sys.path, "/users/modules"])
    folders = python_path().split(os.pathsep)
    assert folders[0] == os.getcwd()
    assert folders[-1] == "/users/modules"
    for own in (sys.prefix, sys.base_prefix):
        assert not any(Path(folder).is_relative_to(own) for folder in folders[1:])
