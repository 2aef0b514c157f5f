"""A prediction against what a job does: what passes, what does not, and what is said of it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from mesh_utils import Mesh
from tests.xla_dtensor.report.sample_evidence import GIB, evidence, mlp_evidence
from xla_dtensor.report import CompileReport, DeviceMemory, ReportError, Tolerances, verify
from xla_dtensor.report.report import Evidence
from xla_dtensor.report.verification import Check

GATHER = (
    "\n  %gather{channel} = f32[1024]{{0}} all-gather(%p), channel_id={channel}, "
    "replica_groups=[2,4]<=[8], dimensions={{0}}, use_global_device_ids=true, "
    'metadata={{op_name="jit(s)/{module}/dot_general"}}'
)
REDUCE = (
    "\n  %sum = f32[256]{0} all-reduce(%p), channel_id=7, replica_groups=[4,2]<=[2,4]T(1,0), "
    'use_global_device_ids=true, metadata={op_name="jit(s)/backward/Net/up/dot_general"}'
)
SMALL = (
    "\n  %two = f32[2]{0} constant({0, 0})\n  %small = f32[2]{0} all-reduce(%two), channel_id=9, "
    "replica_groups=[1,8]<=[8], "
    "use_global_device_ids=true"
)


def program(*lines: str, elements: int = 256) -> CompileReport:
    """The report of a small program on dp=2, tp=4."""
    body = "".join(lines).replace("f32[256]", f"f32[{elements}]")
    text = (
        "HloModule m, num_partitions=8\n\nENTRY %main (p: f32[256]) -> f32[256] {\n"
        f"  %p = f32[256]{{0}} parameter(0){body}\n  ROOT %r = f32[256]{{0}} copy(%p)\n}}"
    )
    return CompileReport.of(Evidence("a step", text, Mesh.arange((2, 4), ("dp", "tp"))))


def gather(module: str = "Net/up", channel: int = 1) -> str:
    return GATHER.format(module=module, channel=channel)


def test_a_job_that_is_its_prediction_passes() -> None:
    report = CompileReport.of(evidence())
    found = verify(report, report)
    assert (found.status, found.differing, found.new, found.missing) == (0, (), (), ())
    roles = [check.name for check in found.checks if check.group == "memory by role"]
    assert roles == ["parameters", "optimizer state", "arguments"]
    assert "As predicted" in found.to_markdown()


def test_memory_by_role_is_exact_and_totals_have_a_tolerance() -> None:
    before = evidence()
    weight = before.held[0]
    grown = replace(weight, device_shape=(weight.device_shape[0] + 1, *weight.device_shape[1:]))
    after = replace(before, held=(grown, *before.held[1:]))
    found = verify(CompileReport.of(before), CompileReport.of(after))
    assert [check.name for check in found.differing] == ["parameters"]
    row = weight.device_shape[1] * 2
    assert (found.differing[0].measured or 0) - (found.differing[0].predicted or 0) == row
    assert verify(CompileReport.of(before), CompileReport.of(after), (), Tolerances(0.1)).passed

    more = CompileReport.of(evidence(temporaries=4 * GIB))
    found = verify(CompileReport.of(before), more)
    assert [check.name for check in found.differing] == ["in all", "temporaries"]
    assert found.status == 1
    assert "temporaries | 3.00 GiB | 4.00 GiB | +1.00 GiB (+33.3 %)" in " ".join(
        found.to_markdown().split()
    )


def test_new_missing_and_changed_collectives_are_listed() -> None:
    before = program(gather(), REDUCE)
    found = verify(before, program(gather(), gather("Net/down", 2), REDUCE))
    (new,) = found.new
    assert (new.kind, new.axes, new.origin.module) == ("all-gather", ("tp",), "down")
    assert new.bytes_per_device == 4096
    assert [check.name for check in found.differing] == ["all-gather over tp", "in all"]
    text = " ".join(found.to_markdown().split())
    assert "New collectives" in text
    assert "Missing" not in text
    assert "| all-gather | tp | forward | down: dot_general |" in text

    found = verify(before, program(gather()))
    assert [line.kind for line in found.missing] == ["all-reduce"]
    assert not found.new
    assert [c.name for c in found.differing] == ["all-reduce over dp", "in all"]

    found = verify(before, program(gather(), REDUCE, elements=512))
    (change,) = found.changed
    assert (change.before.bytes_per_device, change.after.bytes_per_device) == (1024, 2048)
    assert "Collectives that move other bytes" in found.to_markdown()


def test_a_kind_that_is_small_beside_all_may_be_new() -> None:
    before, after = program(gather()), program(gather(), SMALL)
    found = verify(before, after)
    assert found.passed
    assert len(found.new) == 1
    assert not verify(before, after, (), Tolerances(communication=0.0)).passed


def test_another_mesh_fails_and_other_versions_are_listed() -> None:
    before = CompileReport.of(mlp_evidence())
    after = replace(before, versions={"jax": "0.11"}, options={"xla_flag": "false"})
    found = verify(before, after)
    assert found.passed
    assert ("version of jax", "-", "0.11") in found.words
    assert "option xla" in found.to_markdown()
    one = CompileReport.of(Evidence("a", "HloModule m", Mesh.arange((2, 4), ("dp", "tp"))))
    other = CompileReport.of(Evidence("a", "HloModule m", Mesh.arange((4, 2), ("dp", "tp"))))
    found = verify(one, other)
    assert found.status == 1
    assert not found.differing
    assert "is for the mesh dp = 2, tp = 4, the job has dp = 4, tp = 2" in found.to_markdown()


def test_the_memory_of_the_devices() -> None:
    report = CompileReport.of(evidence())
    total = report.memory.total_bytes
    fine = [DeviceMemory(i, total // 2, limit=2 * total) for i in range(4)]
    assert verify(report, report, fine).passed
    found = verify(report, report, [*fine, DeviceMemory(4, int(total * 1.2), limit=2 * total)])
    assert [check.name for check in found.differing] == ["the most in use, on device 4"]
    found = verify(report, report, [DeviceMemory(0, total // 2, limit=total - 1)])
    assert [check.name for check in found.differing] == ["needed, of what device 0 has"]
    assert any("The devices do not say" in words for words in verify(report, report).unknown)


def test_what_one_side_does_not_know_fails_nothing() -> None:
    whole = CompileReport.of(evidence())
    bare = CompileReport.of(replace(evidence(), held=(), memory=None, flops=None))
    found = verify(whole, bare)
    assert found.passed
    unknown = {check.name for check in found.checks if check.outcome == "unknown"}
    assert {"parameters", "in all", "temporaries", "of one step"} <= unknown
    assert any("names no tensors" in words for words in found.unknown)


def test_json_has_outcomes_and_the_status() -> None:
    found = verify(program(gather()), program())
    data = json.loads(found.to_json())
    assert data["status"] == 1
    assert {check["outcome"] for check in data["checks"]} == {"differs", "unknown"}
    assert data["missing"][0]["origin"]["module"] == "up"


@pytest.mark.parametrize(
    ("predicted", "measured", "one_sided", "outcome"),
    [
        (100.0, 105.0, False, "same"),
        (100.0, 106.0, False, "differs"),
        (100.0, 94.0, False, "differs"),
        (100.0, 10.0, True, "same"),
        (0.0, 1.0, False, "differs"),
        (0.0, 0.0, False, "same"),
        (None, 1.0, False, "unknown"),
    ],
)
def test_a_check(
    predicted: float | None, measured: float | None, one_sided: bool, outcome: str
) -> None:
    check = Check("group", "name", predicted, measured, 0.05, one_sided=one_sided)
    assert check.outcome == outcome


@pytest.mark.parametrize("share", [-0.1, float("nan"), float("inf")])
def test_a_tolerance_is_a_share(share: float) -> None:
    with pytest.raises(ReportError, match="tolerance total="):
        Tolerances(total=share)


def test_a_method_of_the_report() -> None:
    report = CompileReport.of(evidence())
    assert report.verify(report).status == 0
    worse = CompileReport.of(evidence(temporaries=9 * GIB))
    assert report.verify(worse, tolerances=Tolerances(total=9, temporaries=9)).passed
    assert not report.verify(worse).passed
