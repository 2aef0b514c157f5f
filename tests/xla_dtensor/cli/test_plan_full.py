"""``python -m xla_dtensor plan JOB``: compiled for chips that are not here."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.libtpu import needs_libtpu
from xla_dtensor.cli import main
from xla_dtensor.report import Evidence
from xla_dtensor.report.compile_report import CompileReport

JOB = """
name: small
accelerator: v5e:2x2
model: tests.xla_dtensor.aot_plans:for_job
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
def test_what_does_not_fit_is_reported_with_its_causes(tmp_path: Path) -> None:
    """12 GiB go in and 12 come out of a chip of 16."""
    job, out = tmp_path / "large.yaml", tmp_path / "out"
    job.write_text(JOB.replace(":for_job", ":large_results"))
    assert main(["plan", str(job), "--no-cache", "--out", str(out)]) == 1
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
