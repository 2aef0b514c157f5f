"""Sweeps, the smallest slice, the largest batch, and the modelled traffic, against sums by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from mesh_utils import JobConfig, find_chip
from mesh_utils.errors import JobError, MeshError
from xla_dtensor.plan.estimate import Batch, quick_plan
from xla_dtensor.plan.model_sizes import ModelSizes
from xla_dtensor.plan.sweep import (
    QuickCase,
    gathered_bytes,
    max_batch,
    quick_sweep,
    smallest_slice,
    traffic,
)

Moved = dict[tuple[str, str], float]


def moved(
    weights: dict[str, tuple[tuple[int, ...], list[object]]], batch: Batch, model: str | None = None
) -> Moved:
    listed = [(name, shape, "bf16") for name, (shape, _) in weights.items()]
    rules = {name: entries for name, (_, entries) in weights.items()}
    plan = quick_plan(listed, rules, batch.sizes)
    sizes = None if model is None else ModelSizes.load(model)
    found = traffic(plan, batch, sizes)
    return {(one.axis, one.collective): one.size_bytes for one in found}


def test_fsdp_gathers_twice_and_scatters_once() -> None:
    batch = Batch(8, 16, ("dp", "fsdp"), (), {"dp": 2, "fsdp": 4})
    found = moved({"a.layers.0.w": ((64, 32), [None, "fsdp"])}, batch)
    whole = 64 * 32 * 2
    assert found == {
        ("fsdp", "all-gather"): 2 * whole,
        ("fsdp", "reduce-scatter"): whole,
        ("dp", "all-reduce"): whole / 4,
    }


def test_padding_is_moved_too() -> None:
    batch = Batch(4, 16, ("fsdp",), (), {"fsdp": 4})
    found = moved({"w": ((10, 3), ["fsdp", None])}, batch)
    assert found[("fsdp", "reduce-scatter")] == 12 * 3 * 2


def test_two_axes_gather_one_after_the_other() -> None:
    batch = Batch(8, 16, ("a", "b"), (), {"a": 2, "b": 4})
    found = moved({"w": ((64, 32), [["a", "b"], None])}, batch)
    assert found[("b", "all-gather")] == 2 * 64 * 32 * 2 / 2
    assert found[("a", "all-gather")] == 2 * 64 * 32 * 2


def test_tensor_parallelism_reduces_activations() -> None:
    batch = Batch(8, 16, ("fsdp",), (), {"fsdp": 4, "tp": 2})
    weights: dict[str, tuple[tuple[int, ...], list[object]]] = {
        "m.layers.0.up": ((64, 32), ["tp", None]),
        "m.layers.0.down": ((32, 64), [None, "tp"]),
        "m.head": ((100, 32), ["tp", None]),
    }
    found = moved(weights, batch)
    tokens = 2 * 16 * 2  # on a device, in bytes per channel
    assert found[("tp", "all-reduce")] == 3 * tokens * 32 + tokens * 32
    # What is cut over tp is reduced over fsdp in parts.
    assert found[("fsdp", "all-reduce")] == (64 * 32 + 32 * 64 + 100 * 32) * 2 / 2


def test_experts_send_tokens() -> None:
    batch = Batch(8, 16, ("fsdp", "ep"), (), {"fsdp": 2, "ep": 4})
    weights: dict[str, tuple[tuple[int, ...], list[object]]] = {
        "m.layers.0.mlp.experts.gate_up_proj": ((8, 128, 32), ["ep", None, "fsdp"]),
        "m.layers.0.mlp.experts.down_proj": ((8, 32, 64), ["ep", "fsdp", None]),
    }
    found = moved(weights, batch, "mixtral-tiny")
    # Two choices with 1.25 places each, there and back, forward, again and backward.
    assert found[("ep", "all-to-all")] == 6 * 1.25 * 2 * (16 * 32 * 2)
    assert found[("fsdp", "reduce-scatter")] == (8 * 128 * 32 + 8 * 32 * 64) * 2 / 4
    assert ("ep", "all-gather") not in found


def test_cut_sequences_gather_keys_and_values() -> None:
    batch = Batch(2, 16, ("dp",), ("cp",), {"dp": 2, "cp": 4})
    found = moved({"w": ((4, 4), [None, None])}, batch, "llama-tiny")
    keys = 2 * 4 * 4 * 2 * 16  # both, heads, width, bytes, tokens of a whole sequence
    assert found[("cp", "all-gather")] == 2 * 2 * keys
    assert gathered_bytes((), "cp") == 0


def test_axes_of_one_device_move_nothing() -> None:
    assert moved({"w": ((4, 4), ["fsdp", None])}, Batch(1, 8, ("fsdp",), (), {"fsdp": 1})) == {}


@pytest.fixture(scope="module")
def case() -> QuickCase:
    return QuickCase.of(JobConfig.load("llama3_70b_v5p"))


def test_sweep(case: QuickCase) -> None:
    found = quick_sweep(case, "fsdp=*,tp=*")
    assert {math.prod(axis.size for axis in mesh.axes) for mesh in found} == {512}
    assert len({mesh.axes for mesh in found}) == 10
    kept = [mesh for mesh in found if mesh.refused is None]
    assert list(found[: len(kept)]) == kept
    assert [mesh.total_seconds for mesh in kept] == sorted(mesh.total_seconds for mesh in kept)
    assert str(found[0].axes[0]) == "fsdp=512"
    # By hand: 3 times the matrices over 6 links of 100 GB/s, and norms of which all have a copy.
    matrices = 2 * (70_553_706_496 - 161 * 8192)
    by_hand = 511 / 512 * (3 * matrices + 2 * 161 * 8192 * 2) / 600e9
    assert found[0].total_seconds == pytest.approx(by_hand)
    assert "does not fit with this batch" in str(found[-1].refused)


def test_sweep_keeps_axes_that_are_not_named(case: QuickCase) -> None:
    (only,) = quick_sweep(case, "fsdp=*")
    assert [str(axis) for axis in only.axes] == ["fsdp=128", "tp=4"]
    job = JobConfig.load("llama3_70b_v5p_2slices")
    swept = quick_sweep(QuickCase.of(job), "fsdp=*,tp=2")
    assert [str(axis) for axis in swept[0].axes] == ["dp=2 (2 over DCN)", "fsdp=256", "tp=2"]


def test_meshes_that_are_refused_say_why() -> None:
    small = QuickCase.of(JobConfig.load("llama3_8b_v6e_8"), "llama3-405b")
    (mesh,) = quick_sweep(small, "fsdp=*")
    assert str(mesh.refused).startswith("cannot fit: 101,470,601,216 of parameters + ")
    odd = quick_sweep(QuickCase.of(JobConfig.load("llama3_8b_v6e_8")), "fsdp=*", sequences=9)
    assert odd[0].refused == "a batch of 9 cannot be cut into 8"
    experts = quick_sweep(QuickCase.of(JobConfig.load("mixtral_8x7b_v5p")), "fsdp=4,ep=32")
    assert "is 8 long and cut into 32" in str(experts[0].refused)


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("dp=*", r"'dp=\*' was asked for for job .* It has no axis 'dp'\. Pass "),
        ("fsdp=x", r"'x' is no size of axis 'fsdp'\. Pass such as"),
        ("fsdp=0", r"'0' is no size of axis 'fsdp'\."),
        ("fsdp=*,tp=3", r"512 devices of a slice\. No mesh has those sizes\. Pass sizes that"),
    ],
)
def test_patterns_that_cannot_be(case: QuickCase, pattern: str, text: str) -> None:
    with pytest.raises(JobError, match=text):
        quick_sweep(case, pattern)


@pytest.mark.parametrize(
    ("job", "chip"),
    [("llama3_8b_v5e", "v5e"), ("llama3_70b_v5p", "v6e"), ("llama3_8b_v5e", "h100")],
)
def test_smallest_slice(job: str, chip: str) -> None:
    case = QuickCase.of(JobConfig.load(job))
    found = smallest_slice(case, chip)
    assert found is not None
    fitting, estimate = found
    assert not estimate.batch_cannot_fit
    assert fitting.chip.name == chip
    size = math.prod(fitting.topology().shape)
    fitting.check_valid()
    # Nothing fits on half of it: each device would have to hold about twice as much.
    for shape in find_chip(chip).slices.shapes:
        if math.prod(shape) == size // 2 and fitting.topology().torus_rank:
            name = f"{chip}:{'x'.join(map(str, shape[: fitting.chip.torus_rank]))}"
            axes = tuple(
                replace(axis, ici=axis.ici // 2)
                if axis.ici == max(a.ici for a in fitting.axes)
                else axis
                for axis in fitting.axes
            )
            half = replace(fitting, accelerator=name, axes=axes)
            assert replace(case, job=half).estimate().batch_cannot_fit


def test_no_slice_is_large_enough() -> None:
    case = QuickCase.of(JobConfig.load("llama3_405b_v5p_4slices"))
    assert smallest_slice(case, "v2") is None
    with pytest.raises(MeshError, match="'v9' was asked for"):
        smallest_slice(case, "v9")


def test_max_batch() -> None:
    case = QuickCase.of(JobConfig.load("llama3_8b_v5e"))
    found = max_batch(case)
    assert found is not None
    count, estimate = found
    assert not estimate.batch_cannot_fit
    assert case.estimate(count + 1).batch_cannot_fit
    large = QuickCase.of(JobConfig.load("llama3_405b_v6e_2slices"), sequence=65536)
    assert max_batch(large) is None
    assert max_batch(replace(case, sizes=None)) is None


def test_a_job_without_a_model(case: QuickCase) -> None:
    with pytest.raises(JobError, match=r"It names no model\. Write model: llama3-8b"):
        QuickCase.of(replace(case.job, model=None))


def test_a_job_without_rules(case: QuickCase) -> None:
    found = replace(case, job=replace(case.job, sharding=None)).estimate()
    assert found.cannot_fit
    assert len(found.replicated) == 723
