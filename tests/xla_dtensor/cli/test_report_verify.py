"""``python -m xla_dtensor report A --verify B``: what it prints, and its status."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.xla_dtensor.report.sample_evidence import GIB, evidence
from xla_dtensor import cli
from xla_dtensor.report.compile_report import CompileReport


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Evidence of a prediction, and the report of a job with more temporaries."""
    place = tmp_path_factory.mktemp("verify")
    evidence().save(place / "predicted")
    (place / "job.json").write_text(CompileReport.of(evidence(temporaries=4 * GIB)).to_json())
    return place


def run(folder: Path, *options: str) -> int:
    job = ["--verify", str(folder / "job.json")]
    return cli.main(["report", str(folder / "predicted"), *job, *options])


def test_it_differs_until_the_tolerance_is_wide(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(folder) == 1
    assert "NOT as predicted: 2 of" in capsys.readouterr().out
    assert run(folder, "--tolerance", "total=0.5", "--tolerance", "temporaries=0.5") == 0
    assert "As predicted" in capsys.readouterr().out
    assert run(folder, "--quiet") == 1
    assert len(capsys.readouterr().out.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("speed=0.1", "--tolerance 'speed=0.1'. That is no name"),
        ("total=much", "--tolerance 'total=much'"),
        ("total=-1", "the tolerance total=-1.0"),
    ],
)
def test_refusals(
    folder: Path, words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(folder, "--tolerance", words) == 2
    assert message in capsys.readouterr().err
