"""Sums of collectives, and their table."""

import pytest

from mesh_utils import Mesh
from xla_dtensor.report import CollectiveSummary, collectives, render_collectives, summarize

LINES = {
    "tp": "f32[1000]{0} all-reduce(%p), channel_id=1, replica_groups=[2,4]<=[8], "
    "use_global_device_ids=true",
    "dp": "f32[1000]{0} all-reduce(%p), channel_id=1, replica_groups=[4,2]<=[2,4]T(1,0), "
    "use_global_device_ids=true",
    "alone": "f32[1000]{0} all-reduce(%p), replica_groups={{0}}",
    "mixed": "f32[1000]{0} all-to-all(%p), channel_id=1, replica_groups={{0,5},{1,4},{2,7},{3,6}}",
    "gather": "f32[4000]{0} all-gather(%p), channel_id=1, replica_groups=[2,4]<=[8], "
    "use_global_device_ids=true",
}


def text(*names: str, loop: str = "", trips: int | None = None) -> str:
    lines = ["HloModule m, num_partitions=8", ""]
    if loop:
        lines += ["%body (p: f32[1000]) -> f32[1000] {", "  %p = f32[1000]{0} parameter(0)"]
        lines += [f"  ROOT %in_loop = {LINES[loop]}", "}", ""]
    lines += ["ENTRY %main (p: f32[1000]) -> f32[1000] {", "  %p = f32[1000]{0} parameter(0)"]
    lines += [f"  %c.{index} = {LINES[name]}" for index, name in enumerate(names)]
    if loop:
        known = f', backend_config={{"known_trip_count":{{"n":"{trips}"}}}}' if trips else ""
        lines += [f"  %w = f32[1000]{{0}} while(%p), condition=%c, body=%body{known}"]
    return "\n".join([*lines, "}"])


def summary(*names: str, loop: str = "", trips: int | None = None):
    mesh = Mesh.arange((2, 4), ("dp", "tp"))
    return summarize(collectives(text(*names, loop=loop, trips=trips), mesh))


def test_collectives_of_one_kind_and_axes_are_summed_the_most_bytes_first():
    assert summary("tp", "dp", "tp", "gather") == (
        CollectiveSummary("all-gather", ("tp",), 1, 16000),
        CollectiveSummary("all-reduce", ("tp",), 2, 8000),
        CollectiveSummary("all-reduce", ("dp",), 1, 4000),
    )


def test_a_loop_counts_as_often_as_it_runs():
    assert summary("tp", loop="tp", trips=9) == (
        CollectiveSummary("all-reduce", ("tp",), 10, 40000),
    )


def test_a_loop_of_unknown_trip_count_is_a_lower_bound():
    assert summary("tp", loop="tp") == (
        CollectiveSummary("all-reduce", ("tp",), 2, 8000, at_least=True),
    )


def test_the_table_is_aligned():
    table = render_collectives(summary("tp", "alone", "mixed", "gather", loop="dp"))
    assert table == "\n".join(
        [
            "collective  mesh axes  count  MB per device",
            "all-gather  tp             1          0.016",
            "all-reduce  -              1          0.004",
            "all-reduce  dp           >=1        >=0.004",
            "all-reduce  tp             1          0.004",
            "all-to-all  mixed          1          0.004",
        ]
    )


def test_several_axes_and_large_numbers():
    rows = [CollectiveSummary("reduce-scatter", ("dp", "tp:(1)2", 3), 12345, 1_234_567_890_123)]
    assert render_collectives(rows).splitlines()[1] == (
        "reduce-scatter  dp, tp:(1)2, 3  12345  1,234,567.890"
    )


@pytest.mark.parametrize("rows", [[], ()])
def test_a_program_without_collectives(rows):
    assert summarize(rows) == ()
    assert render_collectives(rows) == "no collectives"
