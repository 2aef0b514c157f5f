"""What differs between two reports."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.xla_dtensor.report.sample_evidence import GIB, evidence
from xla_dtensor.report.compile_report import CompileReport
from xla_dtensor.report.finding import Finding


@pytest.fixture(scope="module")
def report() -> CompileReport:
    return CompileReport.of(evidence())


def test_a_report_does_not_differ_from_itself(report: CompileReport) -> None:
    found = report.diff(report)
    assert found.is_empty
    assert found.words == ()
    assert "Nothing that the step does differs." in found.to_markdown()


def test_more_memory(report: CompileReport) -> None:
    found = report.diff(CompileReport.of(evidence(temporaries=20 * GIB)))
    changed = {one.what: one.difference for one in found.memory if one.before != one.after}
    assert changed == {"temporaries": 17 * GIB, "in all": 17 * GIB}
    assert found.fits is False
    assert [finding.code for finding in found.findings_new] == ["does-not-fit"]
    text = found.to_markdown()
    assert "| temporaries | 3.00 GiB | 20.0 GiB | +17.0 GiB | x 6.67 |" in text
    assert "## Findings that are new" in text
    back = CompileReport.of(evidence(temporaries=20 * GIB)).diff(report)
    assert [finding.code for finding in back.findings_gone] == ["does-not-fit"]


def test_other_communication(report: CompileReport) -> None:
    lines = tuple(line for line in report.collectives if line.kind != "reduce-scatter")
    moved = sum(line.bytes_per_device for line in lines)
    attribution = replace(report.attribution, total_bytes=moved)
    found = report.diff(replace(report, collectives=lines, attribution=attribution))
    changed = {
        one.what: (one.before, one.after) for one in found.collectives if one.difference != 0
    }
    assert changed == {
        "reduce-scatter over dp on ICI": (4 * 2 * 2**21, None),
        "in all": (4 * 13 * 2**20, 4 * 9 * 2**20),
    }
    assert "| reduce-scatter over dp on ICI | 16.0 MiB |        - |" in found.to_markdown()


def test_equal_findings_are_counted(report: CompileReport) -> None:
    one = Finding("note", "code", "A title", "", "")
    before = replace(report, findings=(one, one))
    after = replace(report, findings=(replace(one, title="With 3 GiB"),))
    found = before.diff(after)
    assert (len(found.findings_gone), found.findings_new) == (1, ())


def test_words_and_layouts(report: CompileReport) -> None:
    tensors = tuple(
        replace(line, chosen="Shard(0), Replicate()") if line.name == "embed.weight" else line
        for line in report.tensors
    )
    after = replace(report, versions={"jax": "0.11", "libtpu": "0.0.42"}, tensors=tensors)
    found = report.diff(after)
    assert found.words == (("version of jax", "0.10.2", "0.11"),)
    assert found.layouts == (
        ("embed.weight (parameter)", "Replicate(), Replicate()", "Shard(0), Replicate()"),
    )
    assert not found.is_empty
    assert "| version of jax | 0.10.2 | 0.11  |" in found.to_markdown()


def test_without_a_model_there_is_no_time(report: CompileReport) -> None:
    found = report.diff(replace(report, roofline=None))
    assert all(one.after is None for one in found.roofline)
    assert "| step, if everything overlaps |" in found.to_markdown()
