"""The modelled time of a step, against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mesh_utils import Mesh, Topology, assign
from xla_dtensor.report.collective import Collective, axis_names
from xla_dtensor.report.reading import collectives
from xla_dtensor.report.report import CompilerMemory, Evidence, Held
from xla_dtensor.report.roofline import (
    CollectiveTimes,
    Roofline,
    hbm_bytes,
    megascale_bytes,
    roofline,
    why_no_roofline,
)

V5E = Topology.parse("v5e:4x4")
MESH = assign(V5E, (4, 4), axis_names=("dp", "tp")).mesh
WEIGHT = Held("w", "parameter", (4096, 4096), "bf16", (1024, 4096), input=0, output=0)
BATCH = Held("x", "argument", (64, 4096), "bf16", (16, 4096), input=1)
MIB = 2**20


def program(*lines: str, partitions: int = 16) -> str:
    body = "\n".join(f"  {line}" for line in lines)
    return (
        f"HloModule m, num_partitions={partitions}\n"
        "ENTRY %main (p: f32[262144]) -> f32[262144] {\n"
        f"  %p = f32[262144]{{0}} parameter(0)\n{body}\n}}\n"
    )


def step(*lines: str) -> Evidence:
    return Evidence(
        title="a step",
        hlo_text=program(*lines),
        mesh=MESH,
        topology=V5E,
        held=(WEIGHT, BATCH),
        memory=CompilerMemory(0, 0, 0, 10 * MIB),
        flops=16 * 197e12 * 0.5,
    )


def model(one: Evidence, *more: Collective) -> Roofline:
    found = roofline(one, (*collectives(one.hlo_text, one.mesh, one.granules), *more))
    assert found is not None
    return found


def test_compute_and_memory() -> None:
    """Half a second at 197 TFLOP/s; the weight in and out, the batch in, temporaries twice."""
    one = step()
    found = model(one)
    assert found.compute_seconds == pytest.approx(0.5)
    moved = 2 * 8 * MIB + 128 * 1024 + 2 * 10 * MIB
    assert found.hbm_bytes == hbm_bytes(one) == moved
    assert V5E.chip is not None
    assert V5E.chip.hbm_bytes_per_second is not None
    assert found.hbm_seconds == pytest.approx(moved / V5E.chip.hbm_bytes_per_second)
    assert (found.ici_seconds, found.dcn_seconds, found.binding) == ({}, 0.0, "compute")
    assert found.step_seconds == found.compute_seconds
    assert found.step_seconds_no_overlap == pytest.approx(found.compute_seconds + found.hbm_seconds)
    assert found.mfu == 1.0
    assert found.mfu_no_overlap == pytest.approx(0.5 / found.step_seconds_no_overlap)


def test_axes_add_up_and_bind() -> None:
    over_tp = "replica_groups=mesh['dp'=4,'tp'=4] {'tp'}, use_global_device_ids=true"
    over_dp = over_tp.replace("{'tp'}", "{'dp'}")
    one = step(
        f"%a = f32[262144]{{0}} all-reduce(%p), channel_id=1, {over_tp}",
        f"%b = f32[262144]{{0}} all-reduce(%p), channel_id=2, {over_tp}",
        f"%c = f32[262144]{{0}} all-reduce(%p), channel_id=3, {over_dp}",
    )
    found = model(replace(one, flops=1.0))
    # A block of 2 x 2 is a ring of two links of 50 GB/s.
    assert found.ici_seconds["tp"] == pytest.approx(2 * 2 * 3 / 4 * MIB / 100e9)
    assert next(iter(found.ici_seconds)) in ("tp", "dp")
    assert found.total_ici_seconds == pytest.approx(sum(found.ici_seconds.values()))
    assert found.binding in ("ICI", "HBM")
    assert found.step_seconds == max(found.hbm_seconds, found.total_ici_seconds)


def test_loops_count_as_often_as_they_run() -> None:
    line = "%a = f32[262144]{0} all-reduce(%p), channel_id=1, replica_groups=[1,16]<=[16], "
    one = step(f"{line}use_global_device_ids=true")
    (item,) = collectives(one.hlo_text, one.mesh)
    once = model(one).total_ici_seconds
    for executions, times in ((5, 5), (0, 0), (None, 1)):
        found = roofline(one, [replace(item, executions=executions)])
        assert found is not None
        assert found.total_ici_seconds == pytest.approx(times * once)
        told = any("counted once" in text for text in found.assumptions)
        assert told == (executions is None)


def test_groups_along_no_axes_have_a_time_too() -> None:
    groups = "{{0,5},{1,4},{2,7},{3,6},{8,13},{9,12},{10,15},{11,14}}"
    one = step(
        f"%a = f32[262144]{{0}} all-reduce(%p), channel_id=1, replica_groups={groups}, "
        "use_global_device_ids=true"
    )
    found = model(one)
    assert list(found.ici_seconds) == ["mixed"]
    assert found.ici_seconds["mixed"] > 0


@pytest.mark.parametrize(
    ("transfer", "moved"),
    [("ALL_REDUCE", 1.5), ("ALL_GATHER", 3), ("ALL_TO_ALL", 0.75), ("ONE_TO_ONE", 1)],
)
def test_what_goes_between_four_slices(transfer: str, moved: float) -> None:
    text = program(
        "%t = token[] after-all()",
        "%s = (f32[262144]{0}, u32[], token[]) send(%p, %t), channel_id=3, is_host_transfer=true, "
        'frontend_attributes={_xla_megascale_target="{1:4}x{0:3}",'
        f'_xla_megascale_transfer_type="{transfer}"}}',
        partitions=4,
    )
    topology = Topology.parse("4xv5e:2x2")
    mesh = assign(topology, (1, 4), (4, 1), axis_names=("dp", "tp")).mesh
    one = replace(step(), hlo_text=text, mesh=mesh, topology=topology)
    (item,) = collectives(text, mesh, one.granules)
    assert item.axes == ("dp",)
    assert megascale_bytes(item, 4) == moved * MIB
    found = model(one)
    assert found.dcn_seconds == pytest.approx(moved * MIB / (25e9 / 8))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"topology": None}, "the machine is not known"),
        ({"flops": None}, "operations of the step were not counted"),
        ({"compute_dtype": "f64"}, "peak of TPU v5e for products of f64"),
        ({"hlo_text": "no program"}, "the program cannot be read"),
        (
            {"topology": Topology.synthetic((4, 4), wrap=(False, False))},
            "the machine is not known",
        ),
    ],
)
def test_what_is_not_known_is_said(change: dict[str, object], reason: str) -> None:
    one = replace(step(), **change)  # pyright: ignore[reportArgumentType]
    assert roofline(one, ()) is None
    assert reason in (why_no_roofline(one) or "")


def test_products_of_float32_are_said_to_run_as_bfloat16() -> None:
    found = model(replace(step(), compute_dtype="f32"))
    assert any("products of f32 run at the peak of bf16" in text for text in found.assumptions)
    assert model(replace(step(), compute_dtype="s8")).compute_seconds < 0.5


def test_a_mesh_of_two_devices_on_a_chip_has_half_the_peak_each() -> None:
    topology = Topology.parse("tpu7x:2x2x1")
    mesh = assign(topology, (8,), axis_names=("dp",)).mesh
    one = replace(step(), hlo_text=program(partitions=8), mesh=mesh, topology=topology, flops=8e15)
    assert topology.chip is not None
    peak = topology.chip.peak("bf16")
    assert peak is not None
    assert model(one).compute_seconds == pytest.approx(1e15 / (peak / 2))


def test_times_need_a_topology() -> None:
    with pytest.raises(ValueError, match="without a topology"):
        CollectiveTimes(Evidence("t", "HloModule m", Mesh.arange((2,))))
    assert axis_names(()) == ""
