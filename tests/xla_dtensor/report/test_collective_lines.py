"""Collectives as lines of a report: summed, paired, with their network."""

from __future__ import annotations

import pytest

from mesh_utils import Mesh
from tests.xla_dtensor.report.sample_evidence import GOLDEN
from xla_dtensor.report import collectives
from xla_dtensor.report.finding import CollectiveLine, collective_lines, starred

SUM = (
    "f32[1000]{{0}} all-reduce(%p), channel_id=1, replica_groups={groups}, "
    "use_global_device_ids=true, "
    'metadata={{op_name="{name}" source_file="m.py" source_line={line}}}'
)


def lines(*sums: tuple[str, str, int], slices: list[int] | None = None) -> list[CollectiveLine]:
    """Lines of a program of 8 devices with all-reduces: groups, op name and line of source."""
    text = ["HloModule m, num_partitions=8", "", "ENTRY %main (p: f32[1000]) -> f32[1000] {"]
    text.append("  %p = f32[1000]{0} parameter(0)")
    for i, (groups, name, line) in enumerate(sums):
        text.append(f"  %c.{i} = {SUM.format(groups=groups, name=name, line=line)}")
    mesh = Mesh.arange((2, 4), ("dp", "tp"))
    return list(collective_lines(collectives("\n".join([*text, "}"]), mesh, slices), slices, 8))


INNER, OUTER = "[2,4]<=[8]", "[4,2]<=[2,4]T(1,0)"


def test_layers_that_differ_in_their_number_are_one_line() -> None:
    found = lines(
        (INNER, "jit(f)/Llama/layers.0/mlp/dot_general", 7),
        (INNER, "jit(f)/Llama/layers.1/mlp/dot_general", 7),
    )
    (line,) = found
    assert (line.count, line.executions, line.bytes_each, line.bytes_per_device) == (
        *(2, 2, 4000, 8000),
    )
    assert line.origin.module == "layers.*.mlp"
    assert line.is_attributed


@pytest.mark.parametrize(
    "other",
    [
        (INNER, "jit(f)/Llama/layers.1/mlp/dot_general", 8),
        (OUTER, "jit(f)/Llama/layers.1/mlp/dot_general", 7),
        (INNER, "jit(f)/Llama/layers.1/attention/dot_general", 7),
        (INNER, "jit(f)/backward/Llama/layers.1/mlp/dot_general", 7),
    ],
)
def test_what_differs_stays_apart(other: tuple[str, str, int]) -> None:
    found = lines((INNER, "jit(f)/Llama/layers.0/mlp/dot_general", 7), other)
    assert [line.count for line in found] == [1, 1]
    assert sum(line.bytes_per_device for line in found) == 8000


def test_one_layer_keeps_its_number() -> None:
    (line,) = lines((INNER, "jit(f)/Llama/layers.3/mlp/dot_general", 7))
    assert line.origin.module == "layers.3.mlp"


@pytest.mark.parametrize(
    ("groups", "network"), [(INNER, "ICI"), (OUTER, "DCN"), ("[1,8]<=[8]", "DCN")]
)
def test_one_program_over_two_slices_talks_over_dcn_where_its_groups_cross(
    groups: str, network: str
) -> None:
    (line,) = lines((groups, "jit(f)/add", 1), slices=[0] * 4 + [1] * 4)
    assert line.network == network


def test_a_group_of_one_moves_nothing() -> None:
    (line,) = lines(("{{0},{1},{2},{3},{4},{5},{6},{7}}", "jit(f)/add", 1))
    assert (line.axes, line.network, line.moves) == ((), "-", False)


def test_a_send_and_its_recv_between_slices_are_one_collective() -> None:
    slices = [place // 16 for place in range(32)]
    text = (GOLDEN / "tpu_two_slices.hlo").read_text()
    found = collectives(text, Mesh.arange((8, 4), ("dp", "tp")), slices)
    assert [item.kind for item in found].count("send") == 2
    made = collective_lines(found, slices, 16)
    over_dcn = [line for line in made if line.network == "DCN"]
    # Hand count: 256 x 256 of f32 are gathered, 8 x 8 x 128 of f32 are summed.
    assert [(line.kind, line.axes, line.bytes_per_device) for line in over_dcn] == [
        ("all-gather", ("dp:(1)2",), 256 * 256 * 4),
        ("all-reduce", ("dp:(1)2",), 8 * 8 * 128 * 4),
    ]
    assert {line.network for line in made} == {"ICI", "DCN"}


def test_loops_count_as_often_as_they_run() -> None:
    text = (GOLDEN / "tpu_v5e_train.hlo").read_text()
    found = collectives(text, Mesh.arange((4, 4), ("dp", "tp")))
    made = collective_lines(found)
    assert sum(line.bytes_per_device for line in made) == sum(4 * c.payload_bytes for c in found)
    assert {line.executions for line in made} == {4}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("layers.0.w", "layers.*.w"),
        ("a/layers.12/3/w2", "a/layers.*/*/w2"),
        ("w1.weight exp_avg", "w1.weight exp_avg"),
        ("", ""),
    ],
)
def test_starred(name: str, expected: str) -> None:
    assert starred(name) == expected
