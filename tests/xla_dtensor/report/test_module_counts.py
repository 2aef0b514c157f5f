"""What each module communicates, from programs: sums, parts of combined collectives, the table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mesh_utils import Mesh
from tests.xla_dtensor.report.sample_evidence import evidence
from xla_dtensor.report import CompileReport, collectives, summarize
from xla_dtensor.report.attribution import GLOBAL, CommCounts, comm_counts, names_of, parts_of
from xla_dtensor.report.report import Evidence

COMBINED = (
    "%all = (f32[], f32[4,2]{1,0}) all-reduce(%p, %q), channel_id=1, replica_groups=[2,4]<=[8], "
    "use_global_device_ids=true, "
    'metadata={op_name="jit(s)/(reduce_sum:backward/Net/layers.1/up/dot_general)"}'
)
GATHER = (
    "%gather = f32[16,2]{1,0} all-gather(%q), channel_id=2, replica_groups=[2,4]<=[8], "
    "dimensions={0}, use_global_device_ids=true, "
    'metadata={op_name="jit(s)/Net/layers.10/up/dot_general"}'
)


def program(*lines: str) -> Evidence:
    """A program on dp=2, tp=4 with a scalar and a matrix going in."""
    text = (
        "HloModule m, num_partitions=8\n\nENTRY %main (p: f32[], q: f32[4,2]) -> f32[] {\n"
        "  %p = f32[] parameter(0)\n  %q = f32[4,2]{1,0} parameter(1)\n"
        + "".join(f"  {line}\n" for line in lines)
        + "  ROOT %r = f32[] copy(%p)\n}"
    )
    return Evidence("a step", text, Mesh.arange((2, 4), ("dp", "tp")))


@pytest.mark.parametrize("name", ["tpu_v5e_train", "tpu_two_slices"])
def test_sums_are_those_of_the_report(name: str) -> None:
    given = evidence(name)
    report = CompileReport.of(given)
    for counts in (comm_counts(given), comm_counts(report)):
        assert counts.get_total_bytes() == report.collective_bytes
        moving = [line for line in report.collectives if line.moves]
        assert counts.get_total_counts() == sum(line.executions for line in moving)
        assert sum(counts.get_comm_counts().values()) == counts.get_total_counts()
        assert sum(counts.get_comm_bytes().values()) == counts.get_total_bytes()
        # Every module has what is in it, and what is its own.
        for module in counts.root.walk():
            own = sum(part.bytes for part in module.own)
            assert module.total_bytes == own + sum(child.total_bytes for child in module.children)


def test_a_combined_collective_is_shared_and_runs_once() -> None:
    counts = comm_counts(program(COMBINED))
    assert counts.get_comm_counts() == {"all-reduce": 1}
    assert counts.get_total_bytes() == 4 + 32
    assert counts.comm_module_counts == {
        GLOBAL: {"forward": {"all-reduce": 1}, "backward": {"all-reduce": 1}},
        "layers": {"forward": {}, "backward": {"all-reduce": 1}},
        "layers.1": {"forward": {}, "backward": {"all-reduce": 1}},
        "layers.1.up": {"forward": {}, "backward": {"all-reduce": 1}},
    }
    up = counts.module("layers.1.up")
    assert up is not None
    assert (up.total_bytes, up.depth) == (32, 3)
    assert counts.module("layers.1.down") is None


def test_where_names_and_arrays_do_not_match_nothing_is_guessed() -> None:
    three = COMBINED.replace("(reduce_sum:", "(reduce_sum:mul:")
    (found,) = collectives(program(three).hlo_text)
    ((origin, size),) = parts_of(found)
    assert (origin.op, size) == ("reduce_sum", 36)


def test_layers_are_in_the_order_of_their_numbers() -> None:
    counts = comm_counts(program(GATHER, COMBINED))
    assert [module.path for module in counts.root.walk()] == [
        *(GLOBAL, "layers", "layers.1", "layers.1.up", "layers.10", "layers.10.up")
    ]
    rows = summarize(collectives(program(GATHER, COMBINED).hlo_text))
    assert counts.get_comm_counts() == {row.kind: row.count for row in rows}


def test_the_table() -> None:
    counts = comm_counts(program(GATHER, COMBINED))
    assert counts.generate_comm_debug_tracing_table(depth=1).splitlines() == [
        "module    phase     collective  mesh axes  runs  bytes",
        "Global    forward   all-gather  tp            1  128 B",
        "                    all-reduce  tp            1    4 B",
        "          backward  all-reduce  tp            1   32 B",
        "  layers  forward   all-gather  tp            1  128 B",
        "          backward  all-reduce  tp            1   32 B",
    ]
    assert str(counts).splitlines()[-1].startswith("      layers.10.up  forward   all-gather")
    short = counts.generate_comm_debug_tracing_table(noise_level=0, depth=0).splitlines()
    assert short[0].split() == ["module", "phase", "collective", "runs", "bytes"]
    assert len(short) == 4


def test_files(tmp_path: Path) -> None:
    counts = comm_counts(program(COMBINED))
    counts.log_comm_debug_tracing_table_to_file(tmp_path / "log.txt")
    assert (tmp_path / "log.txt").read_text() == str(counts)
    counts.generate_json_dump(tmp_path / "log.json")
    data = json.loads((tmp_path / "log.json").read_text())
    assert data["fqn"] == GLOBAL
    assert data["collectives_backward"] == [["all-reduce", 1]]
    assert data["children"][0]["children"][0]["bytes_backward"] == [["all-reduce", 32]]


def test_without_modules_and_without_collectives() -> None:
    bare = COMBINED.partition(", metadata")[0]
    counts: CommCounts = comm_counts(program(bare))
    assert not counts.has_modules
    assert counts.generate_comm_debug_tracing_table().endswith("everything is Global.\n")
    assert str(comm_counts(program())) == "no collectives\n"


@pytest.mark.parametrize(
    ("name", "names"),
    [
        (None, ()),
        ("jit(f)/mul", ("jit(f)/mul",)),
        ("jit(f)", ("jit(f)",)),
        ("(a/b:c)", ("a/b", "c")),
        ("jit(f)/(transpose(jvp(Net))/a:b)", ("jit(f)/transpose(jvp(Net))/a", "jit(f)/b")),
        ("broken)", ("broken)",)),
    ],
)
def test_names(name: str | None, names: tuple[str, ...]) -> None:
    assert names_of(name) == names
