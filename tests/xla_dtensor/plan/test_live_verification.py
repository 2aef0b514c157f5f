"""A prediction against a step that runs here, on either runtime."""

from __future__ import annotations

import pytest

import xla_dtensor as xd
from tests.xla_dtensor.trained_steps import MEGATRON, trained
from xla_dtensor.errors import ArgumentTypeError, CompileError
from xla_dtensor.plan.live import device_memories, report_of
from xla_dtensor.runtimes import Runtime

pytestmark = pytest.mark.usefixtures("runtime")
GATHERING = {"0.weight": ["tp", None], "1.weight": ["tp", None]}


def test_a_job_against_its_own_report_and_another_plan(mesh: xd.DeviceMesh) -> None:
    model, step = trained(mesh, MEGATRON)
    predicted = report_of(step, mesh, model)
    outcome = predicted.verify(step, mesh, model)
    assert (outcome.status, outcome.new, outcome.missing) == (0, (), ()), str(outcome)
    other_model, other = trained(mesh, GATHERING)
    outcome = predicted.verify(other, mesh, other_model)
    assert outcome.status == 1
    assert ("all-gather", ("tp",)) in {(line.kind, line.axes) for line in outcome.new}
    assert any(check.name == "all-gather over tp" for check in outcome.differing)


@pytest.mark.only_on("jax")
def test_layouts_that_differ_are_named(mesh: xd.DeviceMesh) -> None:
    model, step = trained(mesh, MEGATRON)
    other_model, other = trained(mesh, GATHERING)
    outcome = report_of(step, mesh, model).verify(other, mesh, other_model)
    assert ("1.weight (parameter)", "[-, tp]", "[tp, -]") in outcome.layouts
    # Both plans hold as much; what differs is what is moved.
    assert "memory by role" not in {check.group for check in outcome.differing}


def test_virtual_devices_do_not_say_what_they_use(runtime: Runtime) -> None:
    assert device_memories(runtime.memory_statistics()) == ()


def test_what_devices_say_is_read() -> None:
    said = {1: {"bytes_limit": 9}, 0: {"peak_bytes_in_use": 7, "bytes_in_use": 5, "num_allocs": 3}}
    first, second = device_memories(said)
    assert (first.device, first.peak, first.in_use, first.limit) == (0, 7, 5, None)
    assert (second.device, second.peak, second.limit) == (1, None, 9)


def test_refusals(mesh: xd.DeviceMesh) -> None:
    _, step = trained(mesh, MEGATRON)
    predicted = report_of(step, mesh)
    with pytest.raises(ArgumentTypeError, match="of type=int"):
        predicted.verify(3, mesh)
    with pytest.raises(CompileError):
        predicted.verify(xd.compile(lambda x: x), mesh)
