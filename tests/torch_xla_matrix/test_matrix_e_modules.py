"""E and F. distribute_module and PyTorch's tensor-parallel plans."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import xla_dtensor as xd
from xla_dtensor.errors import UnsupportedOpError

R = Replicate()
Bytes = Callable[[Any], set[int]]


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


@pytest.fixture
def plain() -> MLP:
    torch.manual_seed(0)
    return MLP()


def host(tensor: Any) -> torch.Tensor:
    """The value of a DTensor, a LocalView that is equal everywhere, or a plain tensor."""
    return tensor.detach().cpu()


def check_training(ours: nn.Module, plain: nn.Module, x: torch.Tensor, given: Any = None) -> None:
    """Compare outputs and gradients with those of the plain module."""
    found, expected = ours(x if given is None else given), plain(x)
    torch.testing.assert_close(host(found), expected.detach())
    found.square().sum().backward()
    expected.square().sum().backward()
    for (name, parameter), other in zip(ours.named_parameters(), plain.parameters(), strict=True):
        assert parameter.grad is not None, name
        torch.testing.assert_close(host(parameter.grad), other.grad, msg=name)


# ---------------------------------------------------------------- E. distribute_module


def test_silent_module_without_partition_fn_left_on_the_host(
    mesh: xd.DeviceMesh, plain: MLP
) -> None:
    ours: Any = xd.distribute_module(copy.deepcopy(plain), mesh)
    for parameter in ours.parameters():
        assert isinstance(parameter.data, xd.DTensor)
        assert str(parameter.xla_sharding()) == "{replicated}"
    check_training(ours, plain, torch.randn(4, 8))


def column_and_row(name: str, module: nn.Module, mesh: Any) -> None:
    dim = {"up": 0, "down": 1}.get(name)
    if dim is not None:
        weight: Any = module.weight
        module.weight = nn.Parameter(xd.distribute_tensor(weight, mesh, [R, Shard(dim)]))


def test_partition_fn_and_forward(mesh: xd.DeviceMesh, plain: MLP, bytes_of: Bytes) -> None:
    ours: Any = xd.distribute_module(copy.deepcopy(plain), mesh, column_and_row)
    assert ours.up.weight.placements == (R, Shard(0))
    assert bytes_of(ours.up.weight) == {4 * 8 * 4}
    x = torch.randn(4, 8)
    given = xd.distribute_tensor(x, mesh, [Shard(0), R])
    assert ours.up(given).placements == (Shard(0), Shard(1))
    check_training(ours, plain, x, given)


@pytest.mark.usefixtures("installed")
def test_partition_fn_through_torch_itself(mesh: xd.DeviceMesh, plain: MLP) -> None:
    ours: Any = distribute_module(copy.deepcopy(plain), mesh, column_and_row)
    assert isinstance(ours.down.weight.data, xd.DTensor)
    check_training(ours, plain, torch.randn(4, 8))


def test_input_fn(mesh: xd.DeviceMesh, plain: MLP) -> None:
    seen: list[Any] = []

    def shard_batch(module: nn.Module, inputs: Any, mesh: Any) -> Any:
        seen.append(xd.distribute_tensor(inputs[0], mesh, [Shard(0), R]))
        return (seen[-1],)

    ours = xd.distribute_module(copy.deepcopy(plain), mesh, input_fn=shard_batch)
    check_training(ours, plain, torch.randn(4, 8))
    assert seen[0].placements == (Shard(0), R)


def test_output_fn_that_redistributes(mesh: xd.DeviceMesh, plain: MLP) -> None:
    def whole(module: nn.Module, outputs: Any, mesh: Any) -> Any:
        return outputs.redistribute(mesh, [R, R])

    ours: Any = xd.distribute_module(copy.deepcopy(plain), mesh, column_and_row, output_fn=whole)
    x = torch.randn(4, 8)
    given = xd.distribute_tensor(x, mesh, [Shard(0), R])
    out = ours(given)
    assert (out.placements, str(out.xla_sharding())) == ((R, R), "{replicated}")
    check_training(ours, plain, x, given)


def test_auto_policy_is_refused_not_ignored(mesh: xd.DeviceMesh, plain: MLP) -> None:
    def auto_policy(mod_name: str, mod: nn.Module, mesh: Any) -> None:
        """As torch_xla's own: a mark that does nothing when it is called."""

    with pytest.raises(UnsupportedOpError, match="XLA's auto-sharding pass is not part of"):
        xd.distribute_module(plain, mesh, auto_policy)
    assert not any(isinstance(p, xd.DTensor) for p in plain.parameters())


# ---------------------------------------------------------------- F. parallelize_module


@pytest.mark.usefixtures("installed")
def test_colwise(mesh: xd.DeviceMesh, plain: MLP, bytes_of: Bytes) -> None:
    ours: Any = copy.deepcopy(plain)
    parallelize_module(ours, mesh["tp"], {"up": ColwiseParallel(output_layouts=R)})
    assert ours.up.weight.placements == (Shard(0),)
    assert bytes_of(ours.up.weight) == {4 * 8 * 4}
    check_training(ours, plain, torch.randn(4, 8))


@pytest.mark.usefixtures("installed")
def test_rowwise(mesh: xd.DeviceMesh, plain: MLP, bytes_of: Bytes) -> None:
    ours: Any = copy.deepcopy(plain)
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(ours, mesh["tp"], plan)
    assert ours.down.weight.placements == (Shard(1),)
    assert bytes_of(ours.down.weight) == {8 * 4 * 4}
    check_training(ours, plain, torch.randn(4, 8))


@pytest.mark.usefixtures("installed")
def test_sequence_parallel(mesh: xd.DeviceMesh) -> None:
    torch.manual_seed(0)
    plain: Any = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16))
    nn.init.normal_(plain[0].weight)
    ours = copy.deepcopy(plain)
    columns = ColwiseParallel(input_layouts=Shard(1), output_layouts=R)
    parallelize_module(ours, mesh["tp"], {"0": SequenceParallel(), "1": columns})
    seen: list[Any] = []
    ours[0].register_forward_hook(lambda m, inputs, output: seen.append(output))
    x = torch.randn(2, 8, 8)
    check_training(ours, plain, x, xd.distribute_tensor(x, mesh["tp"], [Shard(1)]))
    assert seen[0].placements == (Shard(1),)


@pytest.mark.usefixtures("installed")
def test_rowwise_embedding(mesh: xd.DeviceMesh, bytes_of: Bytes) -> None:
    torch.manual_seed(0)
    plain = nn.Embedding(24, 8)
    ours: Any = copy.deepcopy(plain)
    parallelize_module(ours, mesh["tp"], RowwiseParallel(input_layouts=R))
    assert ours.weight.placements == (Shard(0),)
    assert bytes_of(ours.weight) == {6 * 8 * 4}
    check_training(ours, plain, torch.randint(0, 24, (4, 6)))


@pytest.mark.usefixtures("installed")
def test_plan_on_a_submesh_beside_a_sharded_batch(mesh: xd.DeviceMesh, plain: MLP) -> None:
    ours: Any = copy.deepcopy(plain)
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel(use_local_output=False)}
    parallelize_module(ours, mesh["tp"], plan)
    x = torch.randn(4, 8)
    given = xd.distribute_tensor(x, mesh["dp"], [Shard(0)])
    check_training(ours, plain, x, given.redistribute(mesh["tp"], [R]))
