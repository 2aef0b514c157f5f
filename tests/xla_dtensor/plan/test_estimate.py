"""The quick estimate: exact where it says so, in seconds, and without torch."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh_utils import JobConfig, Mesh, find_chip
from mesh_utils.errors import JobError
from xla_dtensor.core import Layout, local_shape
from xla_dtensor.core.dtypes import itemsize_bytes
from xla_dtensor.core.errors import RulesError
from xla_dtensor.plan.estimate import (
    ADAMW,
    OPTIMIZERS,
    ActivationBound,
    ActivationPart,
    OptimizerState,
    QuickEstimate,
    optimizer_state,
    quick_estimate,
    quick_plan,
)
from xla_dtensor.plan.sweep import QuickCase

ROOT = Path(__file__).resolve().parents[3]
AXES = {"dp": 2, "fsdp": 3, "tp": 4}


def largest_shard(shape: tuple[int, ...], entries: tuple[object, ...]) -> int:
    """Elements that the fullest device holds, padding counted, by asking each device."""
    mesh = Mesh.arange(tuple(AXES.values()), tuple(AXES))
    layout = Layout.from_aliases(entries, mesh)
    places = product(*(range(size) for size in mesh.mesh_shape))
    return max(math.prod(local_shape(layout, shape, place).padded_shape) for place in places)


@st.composite
def placed(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[object, ...], str]:
    """A shape, a rule for it, and a dtype."""
    shape = draw(st.lists(st.integers(1, 40), min_size=0, max_size=3).map(tuple))
    axes = list(draw(st.permutations(list(AXES))))
    entries: list[object] = []
    for _ in shape:
        count = draw(st.integers(0, len(axes)))
        entries.append(tuple(axes[:count]) or None)
        axes = axes[count:]
    return shape, tuple(entries), draw(st.sampled_from(["bf16", "float32", "torch.float16"]))


@given(st.lists(placed(), min_size=1, max_size=4), st.sampled_from(list(OPTIMIZERS.values())))
def test_bytes_are_those_of_the_shards(
    tensors: list[tuple[tuple[int, ...], tuple[object, ...], str]], optimizer: OptimizerState
) -> None:
    listed = [(f"w{i}", shape, dtype) for i, (shape, _, dtype) in enumerate(tensors)]
    rules = [(f"w{i}", entries) for i, (_, entries, _) in enumerate(tensors)]
    found = quick_estimate(listed, rules, AXES, optimizer=optimizer)
    elements = [largest_shard(shape, entries) for shape, entries, _ in tensors]
    widths = [itemsize_bytes(dtype) for *_, dtype in tensors]
    weights = sum(n * width for n, width in zip(elements, widths, strict=True))
    assert found.bytes_of("parameter") == found.bytes_of("gradient") == weights
    moments = sum(
        n * itemsize_bytes(moment or dtype)
        for n, (*_, dtype) in zip(elements, tensors, strict=True)
        for moment in optimizer.moments
    )
    counters = 4 * len(optimizer.counters) * len(tensors)
    assert found.bytes_of("optimizer state") == moments + counters
    assert found.exact_bytes == 2 * weights + moments + counters
    whole = sum(
        math.prod(shape) * width for (shape, *_), width in zip(tensors, widths, strict=True)
    )
    assert found.parts[0].total_bytes == whole


def estimate(**options: object) -> QuickEstimate:
    weights = [("a.layers.0.w", (64, 8), "float32"), ("norm", (8,), "float32")]
    rules = {"**.w": ["fsdp", None], "norm": [None]}
    return quick_estimate(weights, rules, {"fsdp": 4}, **options)  # pyright: ignore


def test_sums_and_proof() -> None:
    chip = find_chip("v5e")
    found = estimate(chip=chip)
    assert (found.held_bytes, found.exact_bytes) == (3 * 544 + 8, 4 * 544 + 8)
    assert not found.cannot_fit
    assert found.proof is None
    assert found.capacity_bytes == chip.usable_hbm_bytes
    weights = [("w", (1 << 20, 1 << 16), "bf16")]
    large = quick_estimate(weights, {"w": ["tp", None]}, {"tp": 8}, "v5e")
    assert large.cannot_fit
    assert large.proof == (
        "17,179,869,184 of parameters + 68,719,476,740 of optimizer state + 17,179,869,184 of "
        f"gradients = 103,079,215,108 bytes per device > {chip.usable_hbm_bytes:,}"
    )


def test_gradients_one_by_one() -> None:
    found = estimate(gradients="one by one", optimizer=optimizer_state("sgd"))
    assert found.exact_bytes == 544 + 512
    assert found.bytes_of("gradient") == 544


def test_activations_are_added_to_what_lives_beside_them() -> None:
    bound = ActivationBound((ActivationPart("inputs", 3, 1000, "because"),))
    found = estimate(activations=bound)
    # In the loop backward the norm's gradient is not counted: it may be used up, or not yet there.
    assert found.lower_bound_bytes == found.held_bytes + 512 + 3000
    tiny = ActivationBound((ActivationPart("inputs", 1, 1, "because"),))
    assert estimate(activations=tiny).lower_bound_bytes == found.exact_bytes
    alone = estimate(activations=bound, gradients="one by one")
    assert alone.lower_bound_bytes == alone.held_bytes + 3000


def test_a_chip_of_which_little_is_known() -> None:
    gpu = estimate(chip="h100")
    assert gpu.capacity_bytes == find_chip("h100").hbm_bytes
    unknown = estimate()
    assert (unknown.capacity_bytes, unknown.spare_bytes, unknown.cannot_fit) == (None, None, False)


def test_tensors() -> None:
    found = estimate()
    assert [tensor.name for tensor in found.largest(1)] == ["a.layers.0.w"]
    assert [tensor.name for tensor in found.replicated] == ["norm"]
    assert found.tensors[0].lies == "[fsdp, -]"
    one = quick_estimate([("w", (4,), "f32")], {"w": [None]}, {"fsdp": 1})
    assert one.replicated == ()


def test_tied_parameters_count_once() -> None:
    weights = [("a", (8, 4), "f32"), ("b", (8, 4), "f32")]
    found = quick_estimate(weights, {"a": ["x", None]}, {"x": 2}, same_as={"b": "a"})
    assert found.bytes_of("parameter") == 64
    assert found.parts[2].count == 3


def test_refusals() -> None:
    with pytest.raises(RulesError, match="no rule matches w"):
        quick_estimate([("w", (4,), "f32")], {}, {"x": 2})
    with pytest.raises(JobError, match=r"dtype='f7' was asked for\. .* Pass a name of torch"):
        quick_estimate([("w", (4,), "f7")], {"w": [None]}, {"x": 2})
    with pytest.raises(JobError, match=r"parameter 'w' twice\. .* Pass each once"):
        quick_plan([("w", (4,), "f32")] * 2, {"w": [None]}, {"x": 2})
    with pytest.raises(JobError, match=r"'lion' was asked for\. .* Pass one of adamw"):
        optimizer_state("lion")


def test_the_largest_job_takes_seconds() -> None:
    start = time.perf_counter()
    found = QuickCase.of(JobConfig.load("llama3_405b_v5p_4slices")).estimate()
    assert time.perf_counter() - start < 10
    exact = 405_853_388_800
    norms = 253 * 16384
    device = (exact - norms) // 512 + norms
    assert found.bytes_of("parameter") == 2 * device
    assert found.bytes_of("optimizer state") == 8 * device + 4 * 1137
    assert found.replicated[0].shape == (16384,)


def test_moments_of_other_dtypes() -> None:
    half = estimate(optimizer=OPTIMIZERS["adamw-bf16"])
    assert half.bytes_of("optimizer state") == 544 + 8
    assert replace(ADAMW, counters=()).counter_bytes == 0


def test_it_needs_no_torch(tmp_path: Path) -> None:
    for name in ("torch", "jax", "torch_xla"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('not here')")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", "xla_dtensor", "plan", "llama3_8b_v5e", "--quick"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "usable HBM" in done.stdout
