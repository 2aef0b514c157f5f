"""Small plans whose traffic is known: bytes by hand, modelled seconds by hand, and findings.

The programs are those of golden_programs.py, compiled for TPU slices; they never ran.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from mesh_utils import Mesh
from tests.xla_dtensor.report.golden_programs import GOLDEN, PROGRAMS
from xla_dtensor.report.finding import Finding
from xla_dtensor.report.findings import findings
from xla_dtensor.report.reading import collectives, read_hlo
from xla_dtensor.report.report import CompilerMemory, Evidence, Held
from xla_dtensor.report.roofline import Roofline, roofline

KIB, MIB = 2**10, 2**20
V5E_LINK, V5E_DCN = 50e9, 25e9 / 8  # bytes per second, one way

WEIGHTS = tuple(f"layers.0.self_attn.{name}_proj.weight" for name in "qkv")

# What each program holds: name, global shape, one device's part, layout.
HELD = {
    "fsdp_linear": [("w", (1024, 512), (64, 512), "Shard(0)")],
    "megatron_mlp": [
        ("layers.up", (3, 1024, 2048), (3, 1024, 512), "Replicate(), Shard(2)"),
        ("layers.down", (3, 2048, 1024), (3, 512, 1024), "Replicate(), Shard(1)"),
    ],
    "ring_permute": [("w", (512, 512), (512, 512), "Replicate(), Replicate()")],
    "moe_all_to_all": [("experts", (4, 512, 512), (1, 512, 512), "Replicate(), Shard(0)")],
    "dcn_gradient": [("w", (1024, 512), (1024, 512), "Replicate()")],
    "wrong_tp_over_dcn": [
        ("layers.up", (3, 1024, 2048), (3, 1024, 1024), "Replicate(), Shard(2)"),
        ("layers.down", (3, 2048, 1024), (3, 1024, 1024), "Replicate(), Shard(1)"),
    ],
    "wrong_vocabulary": [
        ("embed.weight", (32768, 512), (32768, 512), "Replicate()"),
        ("head.weight", (512, 512), (32, 512), "Shard(0)"),
        ("layers.weight", (100, 512, 2048), (100, 32, 2048), "Shard(1)"),
    ],
    "wrong_sequence": [
        ("layers.0.mlp.up", (512, 1024), (512, 1024), "Replicate(), Replicate()"),
        ("layers.0.mlp.down", (1024, 512), (1024, 512), "Replicate(), Replicate()"),
    ],
    "wrong_rematerialization": [("w", (512, 512), (128, 512), "Replicate(), Shard(0)")],
    "context_parallel": [(name, (512, 512), (512, 512), "[-, -]") for name in WEIGHTS],
    "wrong_queries": [(name, (512, 512), (512, 512), "[-, -]") for name in WEIGHTS],
    "heads": [(name, (512, 512), (512, 128), "[-, tp]") for name in WEIGHTS],
    "wrong_heads": [(name, (512, 512), (512, 128), "[-, tp]") for name in WEIGHTS],
    "wrong_experts": [("experts.weight", (4, 512, 1024), (1, 512, 1024), "[ep, -, -]")],
}

# What goes into some of them.
GIVEN = {
    "context_parallel": ((8, 4096, 512), (2, 1024, 512), "[dp, sp, -]"),
    "wrong_queries": ((8, 4096, 512), (2, 1024, 512), "[dp, sp, -]"),
    "heads": ((8, 4096, 512), (2, 4096, 512), "[dp, -, -]"),
    "wrong_heads": ((8, 4096, 512), (2, 4096, 512), "[dp, -, -]"),
    "wrong_experts": ((4096, 4, 512), (256, 4, 512), "[dp.ep, -, -]"),
}

# Kind, axes, bytes in, bytes out, executions; worked out by hand from the shapes of the programs.
TRAFFIC = {
    "fsdp_linear": [
        # w is 1024 x 512 bfloat16: gathered for the product. Its gradient XLA for TPU sums
        # whole here (at 64 MiB too), and each device keeps its part of the sum.
        ("all-gather", ("fsdp",), MIB // 16, MIB, 1),
        ("all-reduce", ("fsdp",), MIB, MIB, 1),
    ],
    "megatron_mlp": [
        # 512 / 4 rows of 1024 bfloat16, summed over tp once for each of 3 layers.
        ("all-reduce", ("tp",), 128 * 1024 * 2, 128 * 1024 * 2, 3),
    ],
    "ring_permute": [
        # A block of 128 x 128 float32 goes to the next device, 3 times.
        ("collective-permute", ("sp",), 128 * 128 * 4, 128 * 128 * 4, 3),
    ],
    "moe_all_to_all": [
        # 256 tokens of 512 bfloat16 on each device go to their experts and come back.
        ("all-to-all", ("ep",), 256 * 512 * 2, 256 * 512 * 2, 1),
        ("all-to-all", ("ep",), 256 * 512 * 2, 256 * 512 * 2, 1),
    ],
    "dcn_gradient": [
        # The whole gradient of w: scattered over the 4 of a slice, summed over 2 slices, gathered.
        ("reduce-scatter", ("dp:(2)4",), MIB, MIB // 4, 1),
        ("send", ("dp:(1)2",), MIB // 4, 0, 1),
        ("recv", ("dp:(1)2",), 0, MIB // 4, 1),
        ("all-gather", ("dp:(2)4",), MIB // 4, MIB, 1),
    ],
    "wrong_tp_over_dcn": [
        ("send", ("tp",), 128 * 1024 * 2, 0, 3),
        ("recv", ("tp",), 0, 128 * 1024 * 2, 3),
    ],
    "wrong_sequence": [
        # 2 sequences of 8192 x 512 bfloat16, of which each device has a quarter.
        ("all-gather", ("sp",), 2 * 2048 * 512 * 2, 2 * 8192 * 512 * 2, 1),
    ],
    "wrong_vocabulary": [
        # The head, 512 x 512 bfloat16 in 16 parts of 32 rows, of which a device lacks 15. XLA
        # multiplies each part as it comes by, in two rings: one hop, then a loop of 4 turns with
        # two hops in each ring. That is 17 hops; the last of each ring brings a part for nobody.
        *[("collective-permute", ("fsdp",), 32 * 512 * 2, 32 * 512 * 2, 4)] * 4,
        ("collective-permute", ("fsdp",), 32 * 512 * 2, 32 * 512 * 2, 1),
    ],
    "wrong_rematerialization": [
        # 4096 x 512 bfloat16, of which each of 4 has a quarter, gathered whole.
        ("all-gather", ("dp",), 1024 * 512 * 2, 4096 * 512 * 2, 1),
    ],
    "context_parallel": [
        # Keys and values of 2 sequences: 8 heads of 64 bfloat16, 4096 tokens of which it has 1024.
        *[("all-gather", ("sp",), 2 * 1024 * 512 * 2, 2 * 4096 * 512 * 2, 1)] * 2,
    ],
    "heads": [],
    "wrong_queries": [
        *[("all-gather", ("sp",), 2 * 1024 * 512 * 2, 2 * 4096 * 512 * 2, 1)] * 3,
    ],
    "wrong_experts": [
        # One of 4 experts of 512 x 1024 bfloat16 is each device's own.
        ("all-gather", ("ep",), 512 * 1024 * 2, 4 * 512 * 1024 * 2, 1),
    ],
}

# Seconds on ICI by axes, and on DCN: a 2 x 2 block is a ring of two links, a line of 4 one link.
SECONDS = {
    # All of 4 x 4 without wrap: one link in each of two dims; an all-reduce goes twice.
    "fsdp_linear": ({"fsdp": (1 + 2) * 15 / 16 * MIB / (2 * V5E_LINK)}, 0.0),
    "megatron_mlp": ({"tp": 3 * 2 * 3 / 4 * 256 * KIB / (2 * V5E_LINK)}, 0.0),
    "ring_permute": ({"sp": 3 * 64 * KIB / V5E_LINK}, 0.0),
    # Each sends a quarter to the 3 others; a link carries that of a neighbour and of a diagonal.
    "moe_all_to_all": ({"ep": 2 * 256 * KIB / 2 / V5E_LINK}, 0.0),
    "dcn_gradient": (
        {"dp:(2)4": 2 * 3 / 4 * MIB / (2 * V5E_LINK)},
        2 * 1 / 2 * (MIB / 4) / V5E_DCN,
    ),
}


OLDER = ("jax_0_6_2", "jax_0_8_1")
VERSIONS = pytest.mark.parametrize("version", ["", *OLDER], ids=lambda each: each or "jax_0_10_2")


def evidence(name: str, version: str = "") -> Evidence:
    program = PROGRAMS[name]
    held = [
        Held(weight, "parameter", whole, "bf16", part, layout, layout)
        for weight, whole, part, layout in HELD[name]
    ]
    if name in GIVEN:
        whole, part, layout = GIVEN[name]
        held.append(Held("tokens", "argument", whole, "bf16", part, layout, layout))
    held += [
        replace(one, name=f"{one.name} {moment}", role="optimizer state", dtype="f32")
        for one in held
        if one.role == "parameter"
        for moment in ("exp_avg", "exp_avg_sq")
    ]
    return Evidence(
        title=name,
        hlo_text=(GOLDEN / version / f"plan_{name}.hlo").read_text(),
        mesh=program.mesh,
        topology=program.parsed,
        held=tuple(replace(one, input=at, output=at) for at, one in enumerate(held)),
        memory=CompilerMemory(0, 0, 0, 10 * MIB),
        flops=1e12,
    )


def found(name: str, version: str = "") -> tuple[Finding, ...]:
    one = evidence(name, version)
    return findings(one, None, (), modelled(one))


def modelled(one: Evidence) -> Roofline:
    made = roofline(one, collectives(one.hlo_text, one.mesh, one.granules))
    assert made is not None
    return made


@VERSIONS
@pytest.mark.parametrize("name", TRAFFIC)
def test_the_bytes_are_those_counted_by_hand(name: str, version: str) -> None:
    one = evidence(name, version)
    assert [
        (each.kind, each.axes, each.operand_bytes, each.result_bytes, each.executions)
        for each in collectives(one.hlo_text, one.mesh, one.granules)
    ] == TRAFFIC[name]


def test_the_bytes_depend_on_the_mesh() -> None:
    """The table can fail: on another mesh no axis stays the same."""
    text = evidence("megatron_mlp").hlo_text
    (item,) = collectives(text, Mesh.arange((2, 8), ("dp", "tp")))
    assert item.axes != ("tp",)


@pytest.mark.parametrize("name", SECONDS)
def test_the_modelled_seconds_are_those_worked_out_by_hand(name: str) -> None:
    model = modelled(evidence(name))
    ici, dcn = SECONDS[name]
    assert dict(model.ici_seconds) == pytest.approx(ici)
    assert model.dcn_seconds == pytest.approx(dcn)


@VERSIONS
@pytest.mark.parametrize("name", [name for name in PROGRAMS if not name.startswith("wrong")])
def test_right_plans_have_no_findings(name: str, version: str) -> None:
    if (name, version) == ("dcn_gradient", "jax_0_6_2"):
        # JAX 0.6 does not write that an op of this program is of the backward: what crosses the
        # slices may as well be an activation.
        assert [one.code for one in found(name, version)] == ["tensor-parallel-over-dcn"]
    else:
        assert found(name, version) == ()


@VERSIONS
@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("wrong_tp_over_dcn", "tensor-parallel-over-dcn"),
        ("wrong_vocabulary", "vocabulary-unsharded"),
        ("wrong_sequence", "activation-gathered"),
        ("wrong_rematerialization", "full-rematerialization"),
        ("wrong_queries", "attention-gathered"),
        ("wrong_heads", "attention-gathered"),
        ("wrong_experts", "experts-gathered"),
    ],
)
def test_each_wrong_plan_has_its_finding_and_no_other(name: str, code: str, version: str) -> None:
    (only,) = found(name, version)
    assert (only.code, only.severity) == (code, "warning")
    assert only.fix
    assert only.detail


def test_findings_say_whose_they_are_and_how_much() -> None:
    (dcn,), (gathered,) = found("wrong_tp_over_dcn"), found("wrong_sequence")
    assert dcn.origin is not None
    assert dcn.origin.module == "layers.*.mlp"
    assert "3 transfers" in dcn.detail
    assert "768 KiB" in dcn.detail
    assert "(modelled)" in dcn.detail
    assert "axis tp" in dcn.title
    assert gathered.origin is not None
    assert gathered.origin.module == "layers.0.mlp"
    assert "bf16[2,8192,512], 16.0 MiB" in gathered.detail
    assert "axis sp" in gathered.title
    (vocabulary,) = found("wrong_vocabulary")
    assert "embed.weight" in vocabulary.title
    assert "16 shards" in vocabulary.detail
    assert "over fsdp" in vocabulary.fix


def test_a_sharded_vocabulary_is_right() -> None:
    one = evidence("wrong_vocabulary")
    right = [
        replace(each, device_shape=(2048, 512), requested="Shard(0)", chosen="Shard(0)")
        if each.name.startswith("embed")
        else each
        for each in one.held
    ]
    assert findings(replace(one, held=tuple(right))) == ()


def test_megatron_with_a_sharded_sequence_is_right() -> None:
    """The gather of wrong_sequence, where the weights stay sharded over its axis."""
    one = evidence("wrong_sequence")
    kept = [replace(each, requested="Replicate(), Shard(1)", chosen=None) for each in one.held]
    assert findings(replace(one, held=tuple(kept))) == ()


@VERSIONS
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_program_is_read_whole(name: str, version: str) -> None:
    one = evidence(name, version)
    reading = read_hlo(one.hlo_text, one.mesh, one.granules)
    assert reading.unread == ()
    assert reading.collectives == collectives(one.hlo_text, one.mesh, one.granules)


@VERSIONS
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_collective_is_attributed(name: str, version: str) -> None:
    """Those too that XLA made of others: between slices none has metadata of its own."""
    one = evidence(name, version)
    for item in read_hlo(one.hlo_text, one.mesh, one.granules).collectives:
        assert item.op_name, item.name
        assert item.source, item.name
        assert item.axes
