"""A pytest plugin that writes down how each test ended, and by which exception.

It is loaded by ``-p tools.mutants.recorder``, and writes to the file that ``MUTANT_RECORD`` names
a JSON list of ``{"test": node id, "outcome": ..., "error": class, "text": first line}``. An outcome
is `passed`, `failed` (the test's own call), `broken` (a fixture, or the file itself) or `skipped`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

_RECORDS: list[dict[str, str]] = []


def _add(test: str, outcome: str, error: str = "", text: str = "") -> None:
    first = next(iter(text.splitlines()), "")
    _RECORDS.append({"test": test, "outcome": outcome, "error": error, "text": first[:300]})


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[Any]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note a test's phase: its call, or a fixture that failed or skipped."""
    report = yield
    error = type(call.excinfo.value).__name__ if call.excinfo else ""
    text = str(call.excinfo.value) if call.excinfo else ""
    if report.when == "call":
        _add(item.nodeid, report.outcome, error, text)
    elif report.failed:
        _add(item.nodeid, "broken", error, text)
    elif report.skipped:
        _add(item.nodeid, "skipped", error, text)
    return report


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Note a file that could not be read."""
    if report.failed:
        _add(report.nodeid, "broken", "CollectError", str(report.longrepr).strip()[-300:])


def pytest_sessionfinish() -> None:
    """Write the notes."""
    Path(os.environ["MUTANT_RECORD"]).write_text(json.dumps(_RECORDS), "utf-8")
