"""CompileReport: what is in it, made from stored programs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mesh_utils import Mesh
from tests.xla_dtensor.report.sample_evidence import GIB, WEIGHT, evidence
from xla_dtensor.report import Evidence, EvidenceError
from xla_dtensor.report.compile_report import CompileReport
from xla_dtensor.report.render import markdown_text
from xla_dtensor.report.report import MeshAxis


@pytest.fixture(scope="module")
def report() -> CompileReport:
    return CompileReport.of(evidence())


@pytest.fixture(scope="module")
def two_slices() -> CompileReport:
    return CompileReport.of(evidence("tpu_two_slices"))


def test_the_collectives_of_a_training_step(report: CompileReport) -> None:
    by_axes = {
        axes: sum(line.bytes_per_device for line in report.collectives if line.axes == axes)
        for axes in {line.axes for line in report.collectives}
    }
    # Hand count, 4 layers: 4 all-gathers and 2 reduce-scatters of 2 MiB, 2 all-reduces of 0.5 MiB.
    assert by_axes == {("dp",): 4 * 6 * 2**21, ("tp",): 4 * 2 * 2**19}
    assert report.collective_bytes == 4 * 13 * 2**20
    assert {line.network for line in report.collectives} == {"ICI"}
    assert {line.origin.phase for line in report.collectives} == {"forward", "backward"}
    assert report.attribution.share == 1
    assert report.attribution.rest == ()


def test_what_has_no_line_of_source_is_listed(two_slices: CompileReport) -> None:
    assert two_slices.attribution.share == 0
    assert two_slices.attribution.rest == two_slices.collectives
    assert two_slices.mesh == (MeshAxis("dp", 8, 2), MeshAxis("tp", 4, 1))
    assert two_slices.machine.slices == 2
    assert "2 slices of 16 chips (4 x 4)" in two_slices.machine.words
    assert {line.network for line in two_slices.collectives} == {"ICI", "DCN"}


def test_equal_layers_are_one_line_and_lose_no_byte(report: CompileReport) -> None:
    held = evidence().held
    assert sum(line.count for line in report.tensors) == len(held)
    assert sum(line.total_device_bytes for line in report.tensors) == sum(
        one.device_bytes for one in held
    )
    assert sum(line.count * line.global_bytes for line in report.tensors) == sum(
        one.global_bytes for one in held
    )
    weights = next(line for line in report.tensors if line.name == "layers.*.w1.weight")
    assert (weights.count, weights.parts, weights.differs) == (2, 16, False)
    assert [line.name for line in report.tensors if line.differs] == ["embed.weight"]


def test_it_fits_or_not(report: CompileReport) -> None:
    assert report.fits is True
    large = CompileReport.of(evidence(temporaries=20 * GIB))
    assert large.fits is False
    assert "does-not-fit" in [finding.code for finding in large.findings]
    assert large.memory.total_bytes - report.memory.total_bytes == 17 * GIB


def test_facts_are_kept(report: CompileReport) -> None:
    given = evidence()
    assert report.title == given.title
    assert report.seconds == given.seconds
    assert report.versions == given.versions
    assert report.options == given.options
    assert report.command == given.command
    assert report.peak_host_bytes == 3 * GIB
    assert report.roofline is not None
    assert report.no_roofline == ""


def test_without_a_machine_much_is_not_known() -> None:
    report = CompileReport.of(replace(evidence(), topology=None))
    assert report.fits is None
    assert report.roofline is None
    assert report.no_roofline == "the machine is not known, so neither are its speeds"
    assert {line.network for line in report.collectives} == {"-"}
    assert report.machine.words == "16 devices of a machine of which nothing is known"


def test_a_loop_of_unknown_length_is_a_lower_bound() -> None:
    text = evidence().hlo_text.replace('"known_trip_count":{"n":"4"}', '"known_trip_count":{}')
    # The loop counts from a constant, which says as much: it must not be readable either.
    text = text.replace("direction=LT", "direction=NE")
    report = CompileReport.of(replace(evidence(), hlo_text=text))
    if not any(line.at_least for line in report.collectives):
        pytest.fail("the trip count could still be read: change the program of this test")
    assert "a lower bound" in " ".join(report.unread)
    assert ">=" in report.to_markdown()


def test_what_cannot_be_read_is_said() -> None:
    text = evidence().hlo_text.replace("replica_groups=[4,4]<=[16]", "replica_groups=<new>")
    assert text != evidence().hlo_text
    report = CompileReport.of(replace(evidence(), hlo_text=text))
    assert report.unread
    assert markdown_text(report.unread[0]) in report.to_markdown()
    nothing = CompileReport.of(replace(evidence(), hlo_text="no program"))
    assert nothing.collectives == ()
    assert nothing.unread


def test_contradicting_evidence_is_refused() -> None:
    with pytest.raises(EvidenceError, match="input=0"):
        CompileReport.of(replace(evidence(), held=(WEIGHT, replace(WEIGHT, output=None))))


def test_loading_a_folder_and_a_file(report: CompileReport, tmp_path: Path) -> None:
    evidence().save(tmp_path / "evidence")
    assert CompileReport.load(tmp_path / "evidence") == report
    (tmp_path / "report.json").write_text(report.to_json(), encoding="utf-8")
    assert CompileReport.load(tmp_path / "report.json") == report


def test_the_smallest_evidence() -> None:
    report = CompileReport.of(Evidence("nothing", "HloModule m", Mesh.arange((1,), ("dp",))))
    assert report.collective_bytes == 0
    assert report.attribution.share is None
    assert "No device talks to another." in report.to_markdown()
    assert report.to_html().startswith("<!DOCTYPE html>")
    assert CompileReport.from_json(report.to_json()) == report
