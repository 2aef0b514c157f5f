"""Stored programs of both runtimes, against tables written by hand from reading them.

jax_cpu_*        JAX on 8 CPU devices, mesh dp=2, tp=4
torch_xla_cpu_*  torch_xla 2.9 on 8 CPU devices, the same mesh, from a dump
tpu_*            compiled ahead of time for TPU: a 4-layer MLP train step with lax.scan on v5e 4x4
                 (dp=4, tp=4) and v5p 4x4x4 (dp=16, tp=4), and one collective after the other on two
                 v5e 4x4 slices (dp=8, tp=4)

Computations without collectives and some attributes were cut out.
"""

from pathlib import Path

import pytest

from mesh_utils import Mesh
from xla_dtensor.report import (
    Collective,
    collectives,
    num_partitions,
    render_collectives,
    summarize,
)
from xla_dtensor.report import collective as program_axes

GOLDEN = Path(__file__).parent / "golden"
DP_TP = ("dp", "tp")
MIB = 2**20

# kind, axes, bytes in, bytes out, executions, op name's end, source line
CPU_TABLES = {
    "jax_cpu_matmul": [("all-reduce", ("tp",), 1024, 1024, 1, "dot_general", 10)],
    "jax_cpu_scan": [("all-reduce", ("tp",), 2048, 2048, 5, "dot_general", 18)],
    "jax_cpu_primitives": [
        ("all-reduce", ("dp",), 512, 512, 1, "psum", 8),
        ("all-gather", ("dp", "tp"), 512, 4096, 1, "all_gather", 8),
        ("reduce-scatter", ("tp",), 512, 128, 1, "reduce_scatter", 9),
        ("collective-permute", ("tp",), 512, 512, 1, "ppermute", 11),
        ("all-reduce", ("dp", "tp"), 1024, 1024, 1, "psum", 12),  # two operands
        ("all-to-all", ("dp",), 512, 512, 1, "all_to_all", 10),  # two operands
    ],
    "torch_xla_cpu_mlp": [
        ("all-gather", ("dp",), 4096, 8192, 1, None, None),
        ("all-gather", ("dp",), 4096, 8192, 1, None, None),
        ("all-reduce", ("tp",), 2048, 2048, 1, None, None),
    ],
}

# name, kind, axes, bytes in, bytes out; each runs 4 times, once a layer
V5E_TRAIN = [
    ("all-gather.27", "all-gather", ("dp",), MIB // 2, 2 * MIB),
    ("all-gather.54", "all-gather", ("dp",), MIB // 2, 2 * MIB),
    ("all-reduce.12", "all-reduce", ("tp",), MIB // 2, MIB // 2),
    ("all-gather.41", "all-gather", ("dp",), MIB // 2, 2 * MIB),
    ("all-gather.47", "all-gather", ("dp",), MIB // 2, 2 * MIB),
    ("all-reduce.14", "reduce-scatter", ("dp",), 2 * MIB, MIB // 2),
    ("all-reduce.13", "reduce-scatter", ("dp",), 2 * MIB, MIB // 2),
    ("all-reduce.15", "all-reduce", ("tp",), MIB // 2, MIB // 2),
]
V5P_TRAIN = [
    ("all-gather.15", "all-gather", ("dp",), MIB // 8, 2 * MIB),
    ("all-gather.14", "all-gather", ("dp",), MIB // 8, 2 * MIB),
    ("all-reduce.12", "all-reduce", ("tp",), MIB // 2, MIB // 2),
    ("all-reduce.13", "reduce-scatter", ("dp",), 4 * MIB, MIB // 4),  # two gradients at once
    ("all-gather.16", "all-gather", ("dp",), MIB // 8, 2 * MIB),
    ("all-gather.17", "all-gather", ("dp",), MIB // 8, 2 * MIB),
    ("all-reduce.14", "all-reduce", ("tp",), MIB // 2, MIB // 2),
]

TWO_SLICES = [
    ("send.1", "send", ("dp:(1)2",), MIB // 8, 0),
    ("reduce-scatter.2", "reduce-scatter", ("dp:(2)4",), MIB // 8, MIB // 32),
    ("send", "send", ("dp:(1)2",), MIB // 32, 0),
    ("recv", "recv", ("dp:(1)2",), 0, MIB // 32),
    ("recv.1", "recv", ("dp:(1)2",), 0, MIB // 4),
    ("all-gather.19", "all-gather", ("tp",), MIB // 8, MIB // 2),
    ("all-gather.20", "all-gather", ("dp:(2)4",), MIB // 32, MIB // 8),
    ("collective-permute-start", "collective-permute", ("tp",), MIB // 8, MIB // 8),
    ("all-to-all", "all-to-all", ("tp",), MIB // 8, MIB // 8),
    ("all-reduce.1", "all-reduce", ("tp",), MIB // 8, MIB // 8),
    ("reduce-scatter.1", "reduce-scatter", ("tp",), MIB // 2, MIB // 8),
    ("all-gather.21", "all-gather", ("dp:(2)4",), MIB // 4, MIB),
]


def read(name: str) -> str:
    return (GOLDEN / f"{name}.hlo").read_text()


def row(item: Collective) -> tuple[object, ...]:
    return item.name, item.kind, item.axes, item.operand_bytes, item.result_bytes


@pytest.mark.parametrize("name", CPU_TABLES)
def test_cpu_programs_have_the_collectives_read_by_hand(name):
    text = read(name)
    found = [
        (
            *row(item)[1:],
            item.executions,
            item.op_name and item.op_name.rpartition("/")[2],
            item.source_line,
        )
        for item in collectives(text, Mesh.arange((2, 4), DP_TP))
    ]
    assert found == CPU_TABLES[name]
    assert num_partitions(text) == 8


def test_a_scan_is_a_loop_and_its_collective_is_in_it():
    (item,) = collectives(read("jax_cpu_scan"))
    assert item.in_loop
    assert item.computation == "region_0.1_spmd"
    assert (item.source_file, item.channel_id, item.use_global_device_ids) == ("train.py", 1, True)
    assert [str(line) for line in item.source] == [
        "train.py:18",
        "train.py:19",
        "train.py:7",
        "train.py:20",
    ]
    assert str(item.operands[0]) == "f32[8,64]"


def test_a_permute_keeps_its_pairs():
    item = collectives(read("jax_cpu_primitives"))[3]
    assert item.source_target_pairs == ((0, 1), (1, 2), (2, 3), (4, 5), (5, 6), (6, 7))
    assert item.replica_groups is None


def test_a_tpu_train_step_on_v5e():
    """Three of its all-gathers are spread over fusions, printed 3, 4 and 4 times."""
    text = read("tpu_v5e_train")
    found = collectives(text, Mesh.arange((4, 4), DP_TP))
    assert [row(item) for item in found] == V5E_TRAIN
    assert {(item.in_loop, item.executions) for item in found} == {(True, 4)}
    assert [item.name for item in found if item.is_async] == [
        "all-gather.27",
        "all-gather.41",
        "all-gather.47",
    ]
    assert text.count(" all-gather(") == 11


def test_a_tpu_train_step_on_v5p():
    found = collectives(read("tpu_v5p_train"), Mesh.arange((16, 4), DP_TP))
    assert [row(item) for item in found] == V5P_TRAIN
    assert {(item.in_loop, item.executions) for item in found} == {(True, 4)}
    # A fusion's collective has no metadata of its own.
    assert found[3].op_name == "jit(loss)/transpose(jvp())/while/body/closed_call/dot_general"
    assert found[3].source_line == 19


def test_the_summary_of_a_tpu_train_step():
    found = collectives(read("tpu_v5p_train"), Mesh.arange((16, 4), DP_TP))
    assert render_collectives(summarize(found)).splitlines() == [
        "collective      mesh axes  count  MB per device",
        "all-gather      dp            16         33.554",
        "reduce-scatter  dp             4         16.777",
        "all-reduce      tp             8          4.194",
    ]


def test_two_slices_with_their_granules():
    """Dp runs over 2 slices of 4: what XLA made of it says which part goes where."""
    granules = [place // 16 for place in range(32)]
    found = collectives(read("tpu_two_slices"), Mesh.arange((8, 4), DP_TP), granules)
    assert [row(item) for item in found] == TWO_SLICES
    assert dict(found[0].frontend_attributes)["_xla_megascale_transfer_type"] == "ALL_GATHER"


def test_two_slices_without_granules_are_not_guessed():
    found = collectives(read("tpu_two_slices"), Mesh.arange((8, 4), DP_TP))
    assert {item.axes for item in found} == {None}
    assert [row(item)[3:] for item in found] == [expected[3:] for expected in TWO_SLICES]


SENDS_NOTHING = {"plan_heads"}  # attention whose heads lie apart


@pytest.mark.parametrize("name", sorted(path.stem for path in GOLDEN.glob("*.hlo")))
def test_every_program_reads_without_a_mesh(name):
    found = collectives(read(name))
    assert bool(found) == (name not in SENDS_NOTHING)
    assert all(item.axes is None and item.payload_bytes > 0 for item in found)


@pytest.mark.parametrize("wrong", ["swapped", "none", "all"])
def test_the_tables_notice_a_wrong_attribution(monkeypatch, wrong):
    """The tests above can fail: each of them does, with a namer that is wrong."""
    right = program_axes.group_axes

    def wrong_axes(groups, mesh):
        swap = {"dp": "tp", "tp": "dp"}
        axes = tuple(swap.get(str(axis), axis) for axis in right(groups, mesh) or ())
        return {"swapped": axes, "none": None, "all": mesh.axis_names}[wrong]

    monkeypatch.setattr(program_axes, "group_axes", wrong_axes)
    for name in CPU_TABLES:
        with pytest.raises(AssertionError):
            test_cpu_programs_have_the_collectives_read_by_hand(name)
    for test in (test_a_tpu_train_step_on_v5e, test_a_tpu_train_step_on_v5p):
        with pytest.raises(AssertionError):
            test()


@pytest.mark.parametrize("name", [*CPU_TABLES, "tpu_v5p_train"])
def test_another_mesh_gives_other_axes(name):
    """The axes come from the groups: on the transposed mesh no attribution stays the same."""
    shape = (16, 4) if name.startswith("tpu") else (2, 4)
    right = collectives(read(name), Mesh.arange(shape, DP_TP))
    wrong = collectives(read(name), Mesh.arange(shape[::-1], DP_TP))
    assert all(
        one.axes != other.axes
        for one, other in zip(right, wrong, strict=True)
        if one.axes != DP_TP and one.source_target_pairs == ()
    )
