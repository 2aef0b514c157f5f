"""The stored reports of docs/reports, and the page that leads to them."""

from __future__ import annotations

import pytest

from benchmarks.preflight import CASES, FILES, REPORTS, Case, index
from xla_dtensor.report.compile_report import CompileReport


def test_the_page_is_what_the_reports_say() -> None:
    assert (REPORTS / "README.md").read_text(encoding="utf-8") == index(REPORTS)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_stored_report(case: Case) -> None:
    folder = REPORTS / case.name
    report = CompileReport.from_json((folder / "report.json").read_text(encoding="utf-8"))
    assert all((folder / name).exists() for name in FILES)
    share = report.attribution.share
    assert share is not None
    assert share >= 0.95
    assert report.memory.total_bytes > 0
    assert report.memory.unexplained_bytes == 0
    assert report.unread == ()
    assert "--no-cache" not in report.command
    assert report.command.startswith(f"python -m xla_dtensor plan {case.words[0]}")
