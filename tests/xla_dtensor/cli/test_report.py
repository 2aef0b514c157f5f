"""``python -m xla_dtensor report`` and ``diff``: what they print and write, and their statuses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.xla_dtensor.report.sample_evidence import GIB, evidence
from xla_dtensor import cli
from xla_dtensor.report.compile_report import CompileReport

ROOT = Path(__file__).resolve().parents[3]
HEAVY = ("torch", "jax", "jaxlib", "torch_xla", "torchax", "matplotlib")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with evidence of a step that fits and of one that does not."""
    place = tmp_path_factory.mktemp("reports")
    evidence().save(place / "small")
    evidence(temporaries=20 * GIB).save(place / "large")
    for name in ("small", "large"):
        (place / f"{name}.json").write_text(CompileReport.load(place / name).to_json())
    return place


@pytest.mark.parametrize(("name", "status"), [("small", 0), ("large", 1)])
def test_report(
    name: str, status: int, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [tmp_path / f"r.{kind}" for kind in ("json", "html", "md")]
    options = ["--json", str(files[0]), "--html", str(files[1]), "--markdown", str(files[2])]
    assert cli.main(["report", str(folder / name), *options]) == status
    made = CompileReport.of(evidence(temporaries=20 * GIB if status else 3 * GIB))
    assert capsys.readouterr().out == made.render()
    assert CompileReport.load(files[0]) == made
    assert files[1].read_text(encoding="utf-8") == made.to_html()
    assert files[2].read_text(encoding="utf-8") == made.to_markdown()


def test_a_stored_report_is_read_too(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(folder / "large.json"), "--quiet"]) == 1
    assert capsys.readouterr().out.startswith("DOES NOT FIT: each device needs 20.0 GiB")


def test_diff(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["diff", str(folder / "small.json"), str(folder / "large.json")]) == 1
    assert "| temporaries | 3.00 GiB | 20.0 GiB |" in capsys.readouterr().out
    assert cli.main(["diff", str(folder / "large"), str(folder / "small.json")]) == 0
    assert "Findings that are gone" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["report", "nowhere"], "'nowhere' was asked for"),
        (["report", "."], "It cannot be read"),
        (["report", "text"], "that is no JSON"),
        (["diff", "text", "nowhere"], "that is no JSON"),
        (["report", "bytes"], "can't decode byte"),
    ],
    ids=" ".join,
)
def test_refusals(
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text").write_text("no report")
    Path("bytes").write_bytes(b"\xff\xfe\xff")
    assert cli.main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error


def test_it_starts_without_torch_and_jax_in_a_second(folder: Path) -> None:
    code = (
        "import os, sys; from xla_dtensor import cli; "
        f"status = cli.main(['report', {str(folder / 'small')!r}, '--quiet']); "
        f"heavy = [name for name in {HEAVY!r} if name in sys.modules]; "
        "print(heavy, sum(os.times()[:2]), file=sys.stderr); sys.exit(status)"
    )
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=variables, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    heavy, _, seconds = done.stderr.strip().rpartition(" ")
    assert heavy == "[]"
    # Of the processor, not of the clock: other tests run at the same time.
    assert float(seconds) < 1.5
