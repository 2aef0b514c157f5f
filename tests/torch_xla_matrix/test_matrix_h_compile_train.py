"""H and I. torch.compile of DTensor code, and training with an optimizer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import xla_dtensor as xd
import xla_dtensor.spmd as xs
from xla_dtensor.runtimes import get_runtime

R = Replicate()


@pytest.fixture
def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(8, 8)


def product(t: torch.Tensor) -> torch.Tensor:
    return (t @ t.t()).sum(0)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Any:
    yield
    torch.compiler.reset()


# ---------------------------------------------------------------- H. torch.compile


def test_dtensor_through_aot_eager(mesh: xd.DeviceMesh) -> None:
    x = torch.randn(8, 4)
    compiled = torch.compile(product, backend="aot_eager", fullgraph=True)
    result: Any = compiled(xd.distribute_tensor(x, mesh, [Shard(0), R]))
    assert isinstance(result, xd.DTensor)
    torch.testing.assert_close(result.cpu(), product(x))


@pytest.mark.only_on("torch_xla")
def test_openxla_is_refused(mesh: xd.DeviceMesh) -> None:
    x = torch.randn(8, 4)
    compiled = torch.compile(product, backend="openxla", fullgraph=True)
    with pytest.raises(xd.errors.CompileError, match="Compile the whole step with @xla_dtensor"):
        compiled(xd.distribute_tensor(x, mesh, [Shard(0), R]))
    with pytest.raises(xd.errors.CompileError, match="backend='openxla', on a graph of 1 input"):
        compiled(x.to("xla"))


def test_marked_tensor_is_compiled(dp_tp: xs.Mesh) -> None:
    x = torch.randn(8, 4)
    marked: Any = xs.mark_sharding(x.clone(), dp_tp, ("dp", None))
    compiled = torch.compile(product, backend="aot_eager")
    torch.testing.assert_close(compiled(marked).cpu(), product(x))


def test_module_training_is_compiled(mesh: xd.DeviceMesh, linear: nn.Linear) -> None:
    x = torch.randn(16, 8)
    linear(x).square().mean().backward()
    ours: Any = xd.distribute_module(copy.deepcopy(linear), mesh)
    ours.zero_grad()
    rows = xd.distribute_tensor(x, mesh, [Shard(0), R])
    torch.compile(ours, backend="aot_eager")(rows).square().mean().backward()
    for ours_, expected in zip(ours.parameters(), linear.parameters(), strict=True):
        torch.testing.assert_close(ours_.grad.cpu(), expected.grad)


# ---------------------------------------------------------------- I. training


def train(model: nn.Module, put: Callable[[torch.Tensor], Any]) -> torch.optim.Optimizer:
    """Three steps of AdamW with clipped gradients."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        optimizer.zero_grad()
        model(put(torch.randn(16, 8, generator=generator))).square().mean().backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        assert float(norm) > 0.1
        optimizer.step()
    return optimizer


def test_parameters_made_of_dtensors(mesh: xd.DeviceMesh, linear: nn.Linear) -> None:
    ours: Any = copy.deepcopy(linear)
    ours.weight = nn.Parameter(xd.distribute_tensor(ours.weight, mesh, [R, Shard(0)]))
    ours.bias = nn.Parameter(xd.distribute_tensor(ours.bias, mesh, [R, R]))
    optimizer = train(ours, lambda x: xd.distribute_tensor(x, mesh, [Shard(0), R]))
    train(linear, lambda x: x)
    torch.testing.assert_close(ours.weight.detach().cpu(), linear.weight.detach())
    state = optimizer.state[ours.weight]
    kept: list[Any] = [ours.weight, state["exp_avg"], state["exp_avg_sq"]]
    for tensor in kept:
        assert tensor.placements == (R, Shard(0))
        assert {tuple(shard.data.shape) for shard in tensor.addressable_shards()} == {(2, 8)}


def test_parameters_marked_in_place(dp_tp: xs.Mesh, linear: nn.Linear) -> None:
    ours = copy.deepcopy(linear)
    weight = ours.weight
    xs.mark_sharding(ours.weight, dp_tp, ("tp", None))
    xs.mark_sharding(ours.bias, dp_tp, (None,))
    assert ours.weight is weight
    optimizer = train(ours, lambda x: xs.mark_sharding(x, dp_tp, ("dp", None)))
    train(linear, lambda x: x)
    torch.testing.assert_close(ours.weight.detach().cpu(), linear.weight.detach())
    lies = "{devices=[4,1,2]<=[2,4]T(1,0) last_tile_dim_replicate}"
    for tensor in (ours.weight, optimizer.state[ours.weight]["exp_avg"]):
        assert str(get_runtime().op_sharding(tensor)) == lies


def test_clip_grad_norm(mesh: xd.DeviceMesh, linear: nn.Linear) -> None:
    ours: Any = xd.distribute_module(copy.deepcopy(linear), mesh)
    ours.weight = nn.Parameter(ours.weight.detach().redistribute(placements=[Shard(1), Shard(0)]))
    x = torch.randn(16, 8)
    for model in (ours, linear):
        model.zero_grad()
        model(x).square().sum().backward()
    found, expected = (nn.utils.clip_grad_norm_(m.parameters(), 1.0) for m in (ours, linear))
    assert float(found) == pytest.approx(float(expected), rel=1e-5)
    for one, other in zip(ours.parameters(), linear.parameters(), strict=True):
        torch.testing.assert_close(one.grad.cpu(), other.grad)
