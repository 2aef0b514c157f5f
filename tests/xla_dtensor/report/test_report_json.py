"""Reports as JSON: exact, versioned, described."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from tests.documents import ROOT
from tests.xla_dtensor.report.sample_evidence import evidence
from xla_dtensor.report import ReportError
from xla_dtensor.report.compile_report import SCHEMA, CompileReport, schema

STORED_SCHEMA = ROOT / "docs" / "compile_report.schema.json"
HOSTILE = '"</script>\x00\n\u2028\ud800\N{GRINNING FACE}'


@pytest.mark.parametrize("program", ["tpu_v5e_train", "tpu_two_slices"])
def test_what_comes_back_is_what_went(program: str) -> None:
    report = CompileReport.of(evidence(program))
    assert CompileReport.from_json(report.to_json()) == report
    assert CompileReport.from_json(report.to_json()).to_html() == report.to_html()


def test_hostile_words_and_numbers_come_back() -> None:
    report = replace(
        CompileReport.of(evidence()),
        title=HOSTILE,
        options={HOSTILE: HOSTILE},
        flops=float("inf"),
        peak_host_bytes=2**70,
    )
    assert CompileReport.from_json(report.to_json()) == report


def data() -> dict[str, Any]:
    return json.loads(CompileReport.of(evidence()).to_json())


def test_the_summary_says_what_properties_say() -> None:
    report = CompileReport.of(evidence())
    summary = data()["summary"]
    assert summary["fits"] is True
    assert summary["total_bytes"] == report.memory.total_bytes
    assert summary["collective_bytes_per_device"] == report.collective_bytes
    assert summary["attributed_share"] == 1


def test_other_schemas_are_refused() -> None:
    for number in (SCHEMA + 1, 0, "1", None):
        with pytest.raises(ReportError, match=rf"schema={number}. This version reads schemas 1 to"):
            CompileReport.from_json(json.dumps(data() | {"schema": number}))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no json", "is no JSON"),
        ("[]", "format is not"),
        ('{"schema": 1}', "format is not"),
        ('{"format": "xla_dtensor compile report", "schema": 1}', "report = None"),
    ],
)
def test_what_is_no_report_is_refused(text: str, message: str) -> None:
    with pytest.raises(ReportError, match=message):
        CompileReport.from_json(text)


def test_a_member_of_a_newer_version_is_refused() -> None:
    stored = data()
    stored["report"]["memory"]["colour"] = 1
    with pytest.raises(ReportError, match=r"report\.memory has 'colour'"):
        CompileReport.from_json(json.dumps(stored))


def test_the_stored_schema_is_that_of_the_code() -> None:
    """If this fails, write it anew; and let SCHEMA grow if old files would be misread."""
    assert json.loads(STORED_SCHEMA.read_text(encoding="utf-8")) == schema()


def test_the_schema_describes_what_is_written() -> None:
    described = schema()
    report = described["properties"]["report"]
    assert set(data()["report"]) == set(report["properties"])
    assert set(data()["report"]["memory"]) == set(described["$defs"]["MemoryReport"]["properties"])
