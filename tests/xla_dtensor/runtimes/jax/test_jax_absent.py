"""A step traced without a value becomes the program that it becomes with values."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import xla_dtensor as xd
from mesh_utils import Mesh
from tests.xla_dtensor.runtimes.jax import absent_plans
from xla_dtensor.errors import CompileError
from xla_dtensor.plan.training_plan import TrainingPlan
from xla_dtensor.report import collectives
from xla_dtensor.runtimes import Runtime

# One worker: the fixture starts processes, once for all.
pytestmark = [pytest.mark.only_on("jax"), pytest.mark.xdist_group("absent plans")]

ROOT = Path(__file__).resolve().parents[4]
MESH = Mesh.arange(absent_plans.SHAPE, absent_plans.AXES)
_ENDS = (r"entry_computation_layout=.*?->.*?\}(?=, \w+=|$)", r"input_output_alias=\{.*?\) \}|$")


@pytest.fixture(scope="module")
def absent() -> dict[str, dict[str, Any]]:
    """What a process without values makes of each plan."""
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.xla_dtensor.runtimes.jax.absent_plans"],
        env={**environment, "PYTHONPATH": str(ROOT), "XLA_DTENSOR_RUNTIME": "jax"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {row["name"]: row for row in rows}


def essence(hlo: str) -> tuple[Any, ...]:
    """What goes in and out of a program, what it sends, and what it multiplies and draws.

    Not its fusions: which of two equal additions XLA fuses first depends on their numbers.
    """
    header = hlo.splitlines()[0]
    ends = [re.search(pattern, header) for pattern in _ENDS]
    assert all(ends), header
    products = re.findall(r"= (\S+) (?:dot|rng-bit-generator|custom-call)\(", hlo)
    sent = [(c.kind, c.axes, c.operand_bytes, c.result_bytes) for c in collectives(hlo, MESH)]
    return [end and end[0] for end in ends], sorted(products), sorted(sent, key=str)


@pytest.mark.thorough
@pytest.mark.parametrize("name", list(absent_plans.PLANS))
def test_it_is_the_live_program(
    runtime: Runtime, mesh: xd.DeviceMesh, absent: dict[str, dict[str, Any]], name: str
) -> None:
    plan = TrainingPlan.of(absent_plans.PLANS[name], mesh, {"device": "cpu"})
    for _ in range(3):
        plan.step(*plan.inputs)
    assert plan.step.stats()["traces"] <= 2
    ours, live = essence(absent[name]["hlo"]), essence(plan.step.hlo())
    assert ours == live
    assert len(live[2]) > 0


def test_nothing_is_held(runtime: Runtime, absent: dict[str, dict[str, Any]]) -> None:
    for row in absent.values():
        assert row["bytes"] < 1000, row["name"]  # learning rates and counters


def test_what_it_holds_has_names(runtime: Runtime, absent: dict[str, dict[str, Any]]) -> None:
    held = {name: (role, shape, layout) for name, role, shape, layout in absent["adamw"]["held"]}
    assert held["0.weight"] == ("parameter", [8, 8], "[tp, dp]")
    assert held["0.weight exp_avg"] == ("optimizer state", [8, 8], "[tp, dp]")
    assert held["2.bias"] == ("parameter", [4], "[tp]")
    assert held["0.weight step"][0] == "number"
    assert held["arguments[0]"] == ("argument", [4, 16], "[dp, -]")
    assert held["result 0"] == ("result", [], "[]")
    roles = {role for _, role, _, _ in absent["dropout"]["held"]}
    assert "random state" in roles
    assert not any(row for row in absent["adamw"]["held"] if row[1] == "other state")
    uneven = {name: shape for name, _, shape, _ in absent["uneven"]["held"]}
    assert uneven["weight"] == [4, 7]
    assert {name: role for name, role, _, _ in absent["buffer"]["held"]}["calls"] == "buffer"


def test_parameters_that_lie_nowhere_are_refused(runtime: Runtime, mesh: xd.DeviceMesh) -> None:
    def plan(mesh: xd.DeviceMesh) -> Any:
        model = torch.nn.Linear(2, 2)
        return model, model.forward, (torch.zeros(2, 2),), None

    with pytest.raises(CompileError, match="2 parameters lie nowhere, 'weight' the first"):
        TrainingPlan.of(plan, mesh, {})


def test_what_is_no_plan_is_refused(runtime: Runtime, mesh: xd.DeviceMesh) -> None:
    with pytest.raises(CompileError, match=r"gave dict where \(model, step, inputs"):
        TrainingPlan.of(lambda mesh: {}, mesh, {})

    def uneven(mesh: xd.DeviceMesh) -> Any:
        return torch.nn.ReLU(), torch.relu, (torch.zeros(2), torch.zeros(2)), (None,)

    with pytest.raises(CompileError, match="2 inputs and 1 placements"):
        TrainingPlan.of(uneven, mesh, {})
