"""The memory of one device by role, against figures of libtpu and by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh_utils import Mesh, Topology
from mesh_utils.hardware import find_chip
from xla_dtensor.report import CompilerMemory, Evidence, Held
from xla_dtensor.report.memory import MemoryReport, capacity_bytes, memory_report

GOLDEN = Path(__file__).parent / "golden_memory"
MESH = Mesh(list(range(4)), (4,), ("dp",))

# bf16[300,70]{0,1} in tiles of 8 x 128: 384 x 72 elements; bf16[70,5]{0,1}: 128 x 8;
# s8[3,1,7,130] in tiles of 8 x 128: 3 x 8 x 256. The results f32[300,5]{0,1}: 384 x 8; s32[70]:
# 128.
ODD = (
    Held("a", "parameter", (300, 70), "bf16", (300, 70), input=0),
    Held("b", "argument", (70, 5), "bf16", (70, 5), input=1),
    Held("c", "optimizer state", (3, 1, 7, 130), "s8", (3, 1, 7, 130), input=2, output=1),
    Held("product", "result", (300, 5), "f32", (300, 5), output=0),
    Held("sums", "result", (70,), "s32", (70,), output=2),
)


def odd(**changes: object) -> Evidence:
    evidence = Evidence(
        title="a test",
        hlo_text=(GOLDEN / "v5e_odd_shapes.hlo").read_text(encoding="utf-8"),
        mesh=MESH,
        topology=Topology.parse("v5e:2x2"),
        held=ODD,
        memory=CompilerMemory(63488, 19456, 6144, 0, 60416),
    )
    return replace(evidence, **changes)  # type: ignore[arg-type]


def by_role(report: MemoryReport) -> dict[str, tuple[int, int, int]]:
    return {part.role: (part.count, part.device_bytes, part.padding_bytes) for part in report.parts}


def test_roles_and_padding_by_hand() -> None:
    report = memory_report(odd())
    assert by_role(report) == {
        "parameter": (1, 42000, 384 * 72 * 2 - 42000),
        "optimizer state": (1, 2730, 6144 - 2730),
        "argument": (1, 700, 2048 - 700),
        "result": (2, 6280, 384 * 8 * 4 + 512 - 6280),
        "table of results": (1, 512, 0),
    }
    assert report.unexplained_bytes == 0
    assert report.total_bytes == 63488 + 19456 - 6144 + 60416
    assert (report.temporaries_bytes, report.code_bytes) == (0, 60416)
    assert report.padding_bytes == 13296 + 3414 + 1348 + 6520
    assert (report.from_compiler, report.not_read, report.outside_bytes) == (True, "", 0)


def test_the_largest_arrays_come_first() -> None:
    report = memory_report(odd())
    found = [(one.name, one.kind, one.shape, one.bytes) for one in report.largest[:2]]
    assert found == [
        ("a", "parameter", "bf16[300,70]", 55296),
        ("product", "result", "f32[300,5]", 12288),
    ]


def test_what_cannot_be_explained_is_shown() -> None:
    said = CompilerMemory(63488 + 1000, 19456 + 7, 6144 - 10, 0, 60416)
    report = memory_report(odd(memory=said))
    assert (report.differences.arguments, report.differences.aliased) == (1000, -10)
    # 512 + 7 bytes are no table: 3 addresses in words.
    assert report.differences.results == 512 + 7
    assert report.unexplained_bytes == report.differences.total == 1000 + 519 + 10
    assert report.total_bytes == said.total_bytes


def test_state_that_is_not_updated_in_place_is_there_twice() -> None:
    text = odd().hlo_text.replace("input_output_alias={ {1}: (2, {}, may-alias) }, ", "")
    report = memory_report(odd(hlo_text=text, memory=CompilerMemory(63488, 19456, 0, 0, 0)))
    assert by_role(report)["state not updated in place"] == (1, 2730, 6144 - 2730)
    assert report.unexplained_bytes == 0


def test_what_nobody_names_is_listed() -> None:
    report = memory_report(odd(held=ODD[1:]))
    assert by_role(report)["unnamed"] == (1, 42000, 13296)
    assert report.unexplained_bytes == 0


def test_a_dropped_input_is_still_on_the_device() -> None:
    dropped = Held("unused", "frozen parameter", (64, 64), "f32", (16, 64))
    report = memory_report(odd(held=(*ODD, dropped)))
    assert by_role(report)["frozen parameter"] == (1, 4096, 0)
    assert (report.outside_bytes, report.unexplained_bytes) == (4096, 0)
    assert report.total_bytes == memory_report(odd()).total_bytes + 4096


def test_the_hosts_memory_is_not_the_devices() -> None:
    first = "(bf16[300,70]{0,1:T(8,128)(2,1)}, "
    text = odd().hlo_text.replace(first, first.replace(")}", ")S(5)}"), 1)
    report = memory_report(odd(hlo_text=text, memory=CompilerMemory(8192, 19456, 6144, 0, 0)))
    part = report.parts[0]
    assert (part.role, part.device_bytes, part.memory_bytes) == ("parameter", 42000, 0)
    assert report.unexplained_bytes == 0


def test_a_silent_compiler() -> None:
    report = memory_report(odd(memory=None))
    assert (report.from_compiler, report.unexplained_bytes) == (False, 0)
    assert report.total_bytes == 63488 + 19456 - 512 - 6144


def test_programs_that_cannot_be_read_are_reported() -> None:
    report = memory_report(odd(hlo_text="HloModule m"))
    assert report.not_read == "The program's text has no schedule."
    assert by_role(report)["parameter"] == (1, 42000, 0)
    assert report.total_bytes == odd().memory.total_bytes  # type: ignore[union-attr]
    broken = memory_report(odd(hlo_text="HloModule m, entry_computation_layout={(f32[8]"))
    assert "It names no result" in broken.not_read


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("v5e_chain", CompilerMemory(270532608, 512, 0, 403403264, 2904576)),
        ("v5p_chain_step", CompilerMemory(13631488, 9437760, 9437184, 38172768, 5545984)),
        ("v5p_scan", CompilerMemory(12582912, 16777760, 0, 264600704, 3180032)),
        ("v5p_scan_remat", CompilerMemory(12582912, 16777760, 0, 71760960, 3708928)),
    ],
)
def test_nothing_is_left_over_of_what_libtpu_says(name: str, said: CompilerMemory) -> None:
    text = (GOLDEN / f"{name}.hlo").read_text(encoding="utf-8")
    report = memory_report(odd(hlo_text=text, held=(), memory=said))
    assert report.unexplained_bytes == 0
    assert report.total_bytes == said.total_bytes
    estimate = report.estimated_temporaries_bytes
    assert estimate is not None
    assert 0.78 * said.temporaries < estimate <= said.temporaries
    first = next(one for one in report.largest if one.kind == "temporary")
    assert first.origin is not None
    assert not report.not_read


def test_what_fits_and_what_does_not() -> None:
    capacity = int(15.75 * 2**30)
    assert memory_report(odd()).spare_bytes == capacity - memory_report(odd()).total_bytes
    said = CompilerMemory(63488, 19456, 6144, capacity - 63488 - 19456 + 6144)
    exact = memory_report(odd(memory=said))
    assert (exact.fits, exact.spare_bytes, exact.causes) == (True, 0, ())
    over = memory_report(odd(memory=replace(said, code=1)))
    assert (over.fits, over.spare_bytes) == (False, -1)
    kinds = [cause.kind for cause in over.causes]
    assert kinds == ["temporaries", "parameter", "padding of layouts"]
    assert over.causes[1].text == (
        "Parameter: 41.0 KiB in 1 array; the largest is a bf16[300,70], 54.0 KiB."
    )
    unknown = memory_report(odd(topology=None))
    assert (unknown.fits, unknown.spare_bytes, unknown.causes) == (None, None, ())


@pytest.mark.parametrize("name", ["v5e:2x2", "v5p:2x2x1", "tpu7x:2x2x1", "v3:2x2"])
def test_the_capacity_is_that_of_one_device(name: str) -> None:
    chip = find_chip(name.partition(":")[0])
    assert capacity_bytes(odd(topology=Topology.parse(name))) == chip.usable_hbm_bytes


@given(st.data())
def test_damaged_programs_never_stop_the_report(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(["v5e_odd_shapes", "v5p_scan_remat"]))
    lines = (GOLDEN / f"{name}.hlo").read_text(encoding="utf-8").splitlines()
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.sampled_from([0, data.draw(st.integers(0, len(lines) - 1))]))
        line = lines[place]
        cut = data.draw(st.integers(0 if place else 30, len(line)))
        end = data.draw(st.integers(cut, min(len(line), cut + 40)))
        lines[place] = line[:cut] + data.draw(st.text("(){}[]%,=a1:", max_size=4)) + line[end:]
    report = memory_report(odd(hlo_text="\n".join(lines)))
    logical = dict.fromkeys((one.role for one in ODD), 0)
    for one in ODD:
        logical[one.role] += one.device_bytes
    found = {part.role: part.device_bytes for part in report.parts}
    assert {role: found[role] for role in logical} == logical
    assert report.total_bytes == 63488 + 19456 - 6144 + 60416


def test_equal_arrays_of_layers_crowd_out_nothing() -> None:
    """60 layers, 2 moments each, all larger than what else there is: 2 groups, then the rest."""
    mesh = Mesh([0, 1], (2,), ("dp",))
    held = [
        Held(f"layers.{layer}.w {moment}", "optimizer state", (64, 64), "f32", (32, 64))
        for layer in range(60)
        for moment in ("exp_avg", "exp_avg_sq")
    ]
    held.append(Held("norm", "parameter", (64,), "f32", (64,)))
    report = memory_report(Evidence("a step", "HloModule m", mesh, held=tuple(held)))
    assert len(report.largest) == 121
    assert report.largest[-1].name == "norm"
    assert report.largest[0].bytes == 32 * 64 * 4
