"""Reports of steps that run here."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import xla_dtensor as xd
from tests.xla_dtensor import trained_steps
from xla_dtensor.errors import ArgumentTypeError, CompileError
from xla_dtensor.plan.live import evidence_of, report_of
from xla_dtensor.report import Evidence
from xla_dtensor.runtimes import Runtime

pytestmark = pytest.mark.usefixtures("runtime")


@pytest.fixture(scope="module")
def trained(mesh: xd.DeviceMesh) -> tuple[nn.Module, xd.CompiledStep]:
    """A tensor-parallel layer, after two steps."""
    return trained_steps.trained(mesh)


def test_collectives_have_axes_on_both_runtimes(
    mesh: xd.DeviceMesh, trained: tuple[nn.Module, xd.CompiledStep]
) -> None:
    report = report_of(trained[1], mesh, trained[0], title="two layers")
    assert report.title == "two layers"
    assert {("all-reduce", ("tp",))} <= {(line.kind, line.axes) for line in report.collectives}
    assert all(line.axes for line in report.collectives), report.collectives
    assert report.fits is None  # nobody knows how much memory a virtual CPU device has
    assert "two layers" in report.to_markdown()


@pytest.mark.only_on("jax")
def test_tensors_have_names_and_bytes(
    mesh: xd.DeviceMesh, trained: tuple[nn.Module, xd.CompiledStep]
) -> None:
    evidence = evidence_of(trained[1], mesh, trained[0])
    held = {one.name: one for one in evidence.held}
    weight, momentum = held["0.weight"], held["0.weight momentum_buffer"]
    assert (weight.role, weight.device_shape, weight.chosen) == ("parameter", (8, 16), "[tp, -]")
    assert (momentum.role, momentum.device_bytes) == ("optimizer state", 8 * 16 * 4)
    assert [one.role for one in evidence.held if one.shape == (8, 16)] == ["argument"]
    assert evidence.memory is not None
    inputs = [one for one in evidence.held if one.input is not None]
    assert evidence.memory.arguments == sum(one.device_bytes for one in inputs)
    assert evidence.flops == 2 * 8 * 16 * 32 * (2 + 3)  # forward twice; no gradient of the input


@pytest.mark.only_on("jax")
def test_every_byte_is_somebodys(
    mesh: xd.DeviceMesh, trained: tuple[nn.Module, xd.CompiledStep]
) -> None:
    report = report_of(trained[1], mesh, trained[0])
    assert report.attribution.share == 1.0
    modules = {line.origin.module for line in report.collectives}
    assert modules == {"1", None}  # the second layer's sum over tp; the loss, outside the model


def test_it_is_the_same_after_a_file(
    mesh: xd.DeviceMesh, trained: tuple[nn.Module, xd.CompiledStep], tmp_path: object
) -> None:
    evidence = evidence_of(trained[1], mesh, trained[0])
    evidence.save(str(tmp_path))
    assert Evidence.load(str(tmp_path)) == evidence


def test_refusals(runtime: Runtime, mesh: xd.DeviceMesh) -> None:
    with pytest.raises(ArgumentTypeError, match="of type=int"):
        report_of(3, mesh)  # type: ignore[arg-type]
    with pytest.raises(CompileError):
        report_of(xd.compile(lambda x: x), mesh)


def test_axes_have_the_names_of_the_mesh_that_was_passed(runtime: Runtime) -> None:
    """Another mesh over the same devices was made before, and gave the program its order."""
    xd.zeros(8, device_mesh=xd.init_device_mesh("xla", (8,)), placements=[Shard(0)])
    mesh = xd.init_device_mesh("xla", (4, 2), mesh_dim_names=("rows", "columns"))
    total = xd.compile(lambda x: x.sum().redistribute(mesh, [Replicate(), Replicate()]))
    total(xd.distribute_tensor(torch.ones(8, 8), mesh, [Replicate(), Shard(1)]))
    assert {line.axes for line in report_of(total, mesh).collectives} == {("columns",)}
