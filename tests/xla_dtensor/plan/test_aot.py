"""compile_for: requests, the process that compiles, and what comes back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mesh_utils import JobConfig, Topology, assign
from tests.libtpu import needs_libtpu
from tests.xla_dtensor.plan import aot_plans
from xla_dtensor.errors import CompileError
from xla_dtensor.plan.aot import Request, evidence_for, function_of, name_function
from xla_dtensor.report.reading import collectives

PLAN = "tests.xla_dtensor.plan.aot_plans:linear"


def test_a_function_is_found_by_its_name(tmp_path: Path) -> None:
    assert name_function(aot_plans.linear) == PLAN
    assert function_of(PLAN) is aot_plans.linear
    file = tmp_path / "own.py"
    file.write_text("class A:\n    def f(mesh):\n        return 7\n")
    assert function_of(f"{file}:A.f")(None) == 7
    assert name_function("a.b:c") == "a.b:c"


def test_what_another_process_cannot_find_is_refused(tmp_path: Path) -> None:
    def nested(mesh: Any) -> None: ...

    for function in (nested, lambda mesh: None):
        with pytest.raises(CompileError, match="cannot be imported"):
            name_function(function)
    with pytest.raises(CompileError, match=r"'plain'.* names no function"):
        name_function("plain")
    with pytest.raises(CompileError, match=r"'nowhere:f'.* No module named 'nowhere'"):
        function_of("nowhere:f")
    with pytest.raises(CompileError, match="has no attribute 'none'"):
        function_of("json:none")
    with pytest.raises(CompileError, match=r"missing\.py"):
        function_of(f"{tmp_path}/missing.py:f")


def test_a_request_comes_back_as_it_was_sent() -> None:
    request = Request(
        PLAN, {"width": 8}, "v5e:2x2", (False, False, False), (0, 1, 2, 3), (2, 2), ("a", "b"), "t"
    )
    assert Request.from_json(request.to_json()) == request
    assert json.loads(request.to_json())["function"] == PLAN
    assert request.read_topology() == Topology.parse("v5e:2x2")
    assert request.read_mesh().axis_names == ("a", "b")


def test_a_mesh_is_needed_and_has_to_fit() -> None:
    with pytest.raises(CompileError, match="without a mesh"):
        evidence_for(PLAN, "v5e:2x2")
    with pytest.raises(CompileError, match="first axis runs over the 2 slices"):
        evidence_for(PLAN, "2xv5e:2x2", {"a": 1, "b": 8})


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("preflight")


@needs_libtpu
def test_a_step_for_four_chips(cache: Path, capfd: pytest.CaptureFixture[str]) -> None:
    found = [
        evidence_for(PLAN, "v5e:2x2", {"fsdp": 4}, keywords={"width": 512}, cache=cache)
        for _ in range(2)
    ]
    assert found[0] == found[1]
    said = capfd.readouterr().err.splitlines()
    assert [line.split(": ")[1].rsplit(" (")[0] for line in said] == [
        *("trace", "lower", "compile"),
        *("trace", "lower", "found an earlier result"),
    ]
    evidence = found[0]
    weight = next(one for one in evidence.held if one.name == "weight")
    assert (weight.role, weight.device_shape, weight.chosen) == (
        "parameter",
        (128, 512),
        "[fsdp, -]",
    )
    assert evidence.flops == 2 * 2 * 64 * 512 * 512  # the product, and the weight's gradient
    assert evidence.memory is not None
    assert evidence.memory.arguments >= sum(
        one.device_bytes for one in evidence.held if one.input is not None
    )
    assert evidence.mesh == assign(Topology.parse("v5e:2x2"), (4,), axis_names=("fsdp",)).mesh
    assert evidence.versions["libtpu"]
    assert (evidence.peak_host_bytes or 0) > 1e8


@needs_libtpu
def test_a_process_that_ends_badly_is_an_error() -> None:
    with pytest.raises(CompileError, match=r"ended with signal 6 while it was at 'trace'"):
        evidence_for(aot_plans.aborting, "v5e:2x2", {"a": 4}, progress=False)


def test_limits() -> None:
    with pytest.raises(CompileError, match=r"took more than time_limit_seconds=0\.5"):
        evidence_for(aot_plans.endless, "v5e:2x2", {"a": 4}, time_limit_seconds=0.5, progress=False)
    with pytest.raises(CompileError, match="took more than memory_limit_bytes=1000"):
        evidence_for(
            aot_plans.endless, "v5e:2x2", {"a": 4}, memory_limit_bytes=1000, progress=False
        )


@needs_libtpu
@pytest.mark.skipif(not Path("/proc").exists(), reason="looks at /proc")
def test_who_compiles_ends_with_who_asked(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    code = (
        "from xla_dtensor.plan.aot import evidence_for\n"
        "from tests.xla_dtensor.plan.aot_plans import endless\n"
        f"evidence_for(endless, 'v5e:2x2', {{'a': 4}}, keywords={{'note': {str(note)!r}}})"
    )
    root = str(Path(__file__).parents[3])
    errors = tmp_path / "errors"
    with errors.open("w") as file:
        command = [sys.executable, "-c", code]
        asking = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": root}, stderr=file)
    try:
        assert within(120, note.exists), errors.read_text()
        time.sleep(0.2)
        compiling = Path("/proc") / note.read_text()
        assert compiling.exists()
    finally:
        asking.kill()
        asking.wait()
    assert within(30, lambda: not compiling.exists() or is_zombie(compiling))


def within(seconds: float, condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end and not condition():
        time.sleep(0.1)
    return condition()


def is_zombie(process: Path) -> bool:
    """Whether it has ended, and nobody has asked how."""
    return (process / "stat").read_text().rpartition(")")[2].split()[0] == "Z"


def test_a_job_has_its_mesh_and_its_flags() -> None:
    job = JobConfig.load("llama3_8b_v5e")
    with pytest.raises(CompileError, match="time_limit_seconds=0 before it began"):
        evidence_for(aot_plans.endless, job, time_limit_seconds=0, progress=False)


@needs_libtpu
def test_gradients_of_one_input_are_summed_before_they_are_reduced(cache: Path) -> None:
    """Gate and up give one sum over tp of the gradient of their input, also in half precision."""
    plan = "tests.xla_dtensor.plan.aot_plans:gated"
    evidence = evidence_for(plan, "v5e:2x2", {"dp": 2, "tp": 2}, cache=cache)
    over_tp = [
        (one.operand_bytes, one.op_name)
        for one in collectives(evidence.hlo_text, evidence.mesh)
        if one.axes == ("tp",)
    ]
    # One forward, of down; one backward, of gate and up together: 32 rows of 512 bfloat16.
    assert [size for size, _ in over_tp] == [32 * 512 * 2] * 2, over_tp
