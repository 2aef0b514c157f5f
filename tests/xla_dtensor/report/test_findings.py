"""Findings about state, logs and layouts; those about traffic are in test_plans.py."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mesh_utils import Mesh, Topology, assign
from xla_dtensor.report.finding import Finding
from xla_dtensor.report.findings import findings
from xla_dtensor.report.memory import free_axes, is_sharded_over, is_vocabulary, memory_report
from xla_dtensor.report.report import CompilerMemory, Evidence, Held

V5E = Topology.parse("v5e:4x4")
MESH = assign(V5E, (4, 4), axis_names=("fsdp", "tp")).mesh
GIB = 2**30
WHOLE, BOTH = "Replicate(), Replicate()", "Shard(0), Shard(1)"


def weight(name: str, shape: tuple[int, int], layout: str = BOTH) -> Held:
    part = shape if layout == WHOLE else (shape[0] // 4, shape[1] // 4)
    return Held(name, "parameter", shape, "f32", part, layout, layout)


def moments(held: Held) -> tuple[Held, ...]:
    names = [f"{held.name} exp_avg", f"{held.name} exp_avg_sq"]
    return (held, *(replace(held, name=name, role="optimizer state") for name in names))


LAYERS = tuple(
    each for layer in range(4) for each in moments(weight(f"layers.{layer}.w", (8192, 8192)))
)


def step(*held: Held, memory: CompilerMemory | None = None) -> Evidence:
    return Evidence("a step", "HloModule m, num_partitions=16", MESH, V5E, held, memory)


def codes(found: tuple[Finding, ...]) -> list[str]:
    return [each.code for each in found]


def of(one: Evidence) -> tuple[Finding, ...]:
    return findings(one, memory_report(one))


def test_a_plan_that_shards_everything_has_no_findings() -> None:
    assert of(step(*LAYERS)) == ()


def test_what_does_not_fit_comes_first_with_its_causes() -> None:
    memory = CompilerMemory(6 * GIB, 0, 0, 14 * GIB, GIB)
    first, *_ = of(step(*LAYERS, memory=memory))
    assert (first.severity, first.code) == ("error", "does-not-fit")
    assert "15.8 GiB" in first.detail
    assert "(1) Temporaries: 14.0 GiB" in first.detail
    assert "(3)" in first.detail
    assert "backward" in first.fix


def test_one_large_tensor_held_whole_among_sharded_ones() -> None:
    odd = moments(weight("layers.0.odd", (8192, 4096), WHOLE))
    (found,) = of(step(*LAYERS, *odd))
    assert found.code == "tensor-unsharded"
    assert "layers.*.odd" in found.title
    assert "384 MiB" in found.detail
    assert "16 shards" in found.detail
    assert "fsdp, tp" in found.fix


def test_layers_alike_are_one_finding() -> None:
    odd = [
        each for n in range(3) for each in moments(weight(f"layers.{n}.odd", (8192, 4096), WHOLE))
    ]
    (found,) = of(step(*LAYERS, *odd))
    assert found.detail.startswith("3 of them")


@pytest.mark.parametrize(
    "small",
    [
        weight("norm", (1, 8192), WHOLE),  # too small to matter
        Held("odd", "parameter", (8191, 8191), "f32", (8191, 8191), WHOLE),  # nothing divides it
        Held("half", "parameter", (8192, 4096), "f32", (1024, 4096)),  # a bit less than the others
    ],
)
def test_what_is_rightly_less_sharded(small: Held) -> None:
    assert of(step(*LAYERS, small)) == ()


def test_plain_data_parallelism_is_right_until_it_fills_the_memory() -> None:
    small = moments(weight("w", (8192, 2048), WHOLE))
    assert of(step(*small)) == ()
    large = [each for n in range(24) for each in moments(weight(f"w{n}", (8192, 2048), WHOLE))]
    found = of(step(*large))
    assert "state-unsharded" in codes(found)
    assert "fully_shard" in next(each.fix for each in found if each.code == "state-unsharded")


def test_hybrid_sharding_is_right() -> None:
    """All over fsdp, none over tp."""
    held = [
        replace(one, device_shape=(2048, 8192), requested="Shard(0), Replicate()", chosen=None)
        for one in LAYERS
    ]
    assert of(step(*held)) == ()


def test_a_layout_that_is_not_the_one_asked_for() -> None:
    other = [replace(one, chosen="Shard(0),  Replicate()") for one in LAYERS[:2]]
    (one, two) = of(step(*LAYERS[2:], *other))
    assert {one.code, two.code} == {"sharding-differs"}
    assert BOTH in one.detail
    assert "Shard(0), Replicate()" in one.detail
    same = replace(LAYERS[0], chosen="Shard(0),   Shard(1)")
    assert of(step(*LAYERS[1:], same)) == ()


def test_axes_of_size_one_are_noted() -> None:
    one = replace(step(), mesh=assign(V5E, (1, 16, 1), axis_names=("pp", "dp", "tp")).mesh)
    (found,) = of(one)
    assert (found.severity, found.code) == ("note", "axis-of-size-1")
    assert "pp, tp have size 1" in found.title


LOG = (
    "2026 W spmd_partitioner.cc:652] [SPMD] Involuntary full rematerialization. The compiler "
    "cannot go from sharding {devices=[4,4]<=[16]} to {devices=[1,16]<=[16]} efficiently for HLO "
    "operation %add.1 = bf16[8,8]{1,0} add(%a, %b), "
    'metadata={op_name="jit(f)/Model/head/add"}. As the last\n'
)


def test_the_compilers_warning_is_found_in_its_log() -> None:
    one = replace(step(), attributes={"compiler_log": f"noise\n{LOG}{LOG}more noise"})
    (found,) = of(one)
    assert found.code == "full-rematerialization"
    assert "add.1" in found.title
    assert "{devices=[4,4]<=[16]} to {devices=[1,16]<=[16]}" in found.detail
    assert found.origin is not None
    assert found.origin.module == "head"


def test_findings_read_well() -> None:
    finding = Finding("note", "a-code", "Title", "Detail.", "Fix.")
    assert str(finding) == "note: Title. Detail. Fix. [a-code]"


def test_layouts_that_nobody_knows_are_told_by_their_parts() -> None:
    mesh = Mesh.arange((2, 4), ("dp", "tp"))
    held = Held("w", "parameter", (8, 4), "f32", (2, 4))
    assert is_sharded_over(held, "tp", mesh)
    assert not is_sharded_over(held, "pp", mesh)
    assert free_axes(held, mesh) == ("dp", "tp")
    assert not is_vocabulary(Held("up", "parameter", (53248, 16384), "bf16", (1, 1)))
    assert not is_vocabulary(Held("b", "parameter", (128256,), "bf16", (1,)))


def test_moments_that_lie_otherwise_than_their_parameters() -> None:
    """The optimizer was made before the parameters were sharded."""
    whole = [
        replace(one, device_shape=one.shape, requested=WHOLE, chosen=WHOLE)
        if one.role == "optimizer state"
        else one
        for one in LAYERS
    ]
    (found,) = of(step(*whole))
    assert found.code == "optimizer-state-unsharded"
    assert "8 arrays take 2.00 GiB" in found.detail
    assert "in 16, they would take 128 MiB" in found.detail
    assert "after shard_module" in found.fix


def test_moments_in_more_shards_than_their_parameters_are_right() -> None:
    """ZeRO-1: parameters are whole, moments are not."""
    zero = [
        replace(one, device_shape=one.shape, requested=WHOLE, chosen=WHOLE)
        if one.role == "parameter"
        else one
        for one in LAYERS[:3]
    ]
    assert "optimizer-state-unsharded" not in codes(of(step(*zero)))


def tokens(layout: str, part: tuple[int, int]) -> Held:
    return Held("tokens", "argument", (64, 128), "s32", part, layout, layout, input=0)


def cut_over_fsdp(name: str) -> Held:
    return Held(name, "parameter", (8192, 8192), "f32", (2048, 8192), "[fsdp, -]", "[fsdp, -]")


PROGRAM = """HloModule m, num_partitions=16

ENTRY %main (p: f32[2048,8192]) -> f32[8192,8192] {
  %p = f32[2048,8192]{1,0} parameter(0)
  ROOT %g = f32[8192,8192]{1,0} all-gather(%p), channel_id=1, replica_groups=GROUPS, \
dimensions={0}, use_global_device_ids=true, metadata={op_name="jit(step)/Model/layers.0/mlp/dot"}
}
"""
OVER_FSDP = "{{0,4,8,12},{1,5,9,13},{2,6,10,14},{3,7,11,15}}"


def fsdp_step(*held: Held) -> Evidence:
    """A weight is gathered over fsdp, the first axis of 4 x 4 devices in order."""
    mesh = Mesh.arange((4, 4), ("fsdp", "tp"))
    return Evidence("a step", PROGRAM.replace("GROUPS", OVER_FSDP), mesh, None, held)


def test_a_batch_that_is_whole_over_the_axis_of_fsdp() -> None:
    weight = cut_over_fsdp("layers.0.w")
    kept = Held("layers.0.v", "parameter", (64, 64), "f32", (64, 16), "[-, tp]", "[-, tp]")
    (found,) = findings(fsdp_step(weight, kept, tokens("[-, -]", (64, 128))))
    assert found.code == "batch-replicated"
    assert "all 4 devices of axis fsdp" in found.title
    assert findings(fsdp_step(weight, kept, tokens("[fsdp, -]", (16, 128)))) == ()
    # A sequence that is cut over it is as good.
    assert findings(fsdp_step(weight, kept, tokens("[-, fsdp]", (64, 32)))) == ()


def test_an_axis_that_cuts_nothing() -> None:
    weight = cut_over_fsdp("layers.0.w")
    (found,) = findings(fsdp_step(weight, tokens("[fsdp, -]", (16, 128))))
    assert found.code == "axis-idle"
    assert "Axis tp cuts nothing: its 4 devices compute the same" in found.title
    # Where nobody says what goes in, nothing is said of it.
    assert findings(fsdp_step(weight)) == ()
