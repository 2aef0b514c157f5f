"""A prediction against a step that runs here, on either runtime."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import xla_dtensor as xd
from xla_dtensor.errors import ArgumentTypeError, CompileError
from xla_dtensor.live_report import report_of
from xla_dtensor.live_verification import device_memories
from xla_dtensor.runtimes import Runtime

pytestmark = pytest.mark.usefixtures("runtime")
MEGATRON = {"0.weight": ["tp", None], "1.weight": [None, "tp"]}
GATHERING = {"0.weight": ["tp", None], "1.weight": ["tp", None]}


def trained(mesh: xd.DeviceMesh, plan: dict[str, list[str | None]]) -> tuple[nn.Module, object]:
    """A step of two layers, compiled, after two calls."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False))
    model = xd.shard_module(layers, mesh, plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    compiled = xd.compile(step)
    x = xd.distribute_tensor(torch.ones(8, 16), mesh, [Shard(0), Replicate()])
    for _ in range(2):
        compiled(x)
    return model, compiled


def test_a_job_against_its_own_report_and_another_plan(mesh: xd.DeviceMesh) -> None:
    model, step = trained(mesh, MEGATRON)
    predicted = report_of(step, mesh, model)  # type: ignore[arg-type]
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
    outcome = report_of(step, mesh, model).verify(other, mesh, other_model)  # type: ignore[arg-type]
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
    predicted = report_of(step, mesh)  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match="of type=int"):
        predicted.verify(3, mesh)
    with pytest.raises(CompileError):
        predicted.verify(xd.compile(lambda x: x), mesh)
