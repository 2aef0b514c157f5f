"""fully_shard beside other axes: meshes split twice, dp_mesh_dims; checkpointing; factors."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import xla_dtensor as xd
from xla_dtensor.errors import DistributeError, UnsupportedOpError

R = Replicate()
PLAN = {"0": ColwiseParallel(), "2": RowwiseParallel()}


@pytest.fixture
def plain(mesh: xd.DeviceMesh) -> Iterator[nn.Sequential]:
    xd.install()
    torch.manual_seed(0)
    yield nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    xd.uninstall()


def check_gradients(ours: Any, plain: Any, x: Any) -> None:
    plain(torch.ones(8, 8)).square().sum().backward()
    ours(x).square().sum().backward()
    for found, expected in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.grad.full_tensor().cpu(), expected.grad)


def test_axes_of_two_splits_of_the_devices(plain: nn.Sequential) -> None:
    world = xd.init_device_mesh("xla", (8,), mesh_dim_names=("world",))
    loading = world._unflatten(0, (1, 2, 4), ("pp", "batch", "tp"))
    dense = world._unflatten(0, (1, 2, 4), ("replicate", "fsdp", "tp"))
    ours: Any = copy.deepcopy(plain)
    parallelize_module(ours, loading["tp"], PLAN)
    xd.fully_shard(ours, mesh=dense["fsdp"])
    weight = ours[2].weight
    assert weight.device_mesh.mesh_dim_names == ("fsdp", "tp")
    assert weight.placements == (Shard(0), Shard(1))
    assert {shard.num_bytes_on_device for shard in weight.addressable_shards()} == {8 * 16 * 4 // 8}
    check_gradients(ours, plain, torch.ones(8, 8))


def test_labels_beside_axes_of_size_one() -> None:
    """A batch's rows are still known to be cut over `dp` where a mesh has an axis of size 1."""
    mesh = xd.init_device_mesh("xla", (1, 2, 4), mesh_dim_names=("pp", "dp", "tp"))
    x = xd.distribute_tensor(torch.ones(8, 4, 4), mesh["dp", "tp"], [Shard(0), Shard(1)])
    on_tp: Any = x.redistribute(mesh["tp"], [Shard(1)])
    assert on_tp.square().placements == (Shard(1),)
    assert on_tp.mul(2).xla_sharding().num_tiles(0) == 2


def dims(shard: tuple[str, ...], replicate: tuple[str, ...] = ()) -> Any:
    """torch's DataParallelMeshDims, which older versions lack."""
    return SimpleNamespace(shard_names=shard, replicate_names=replicate)


def test_parameters_on_all_axes(plain: nn.Sequential, mesh: xd.DeviceMesh) -> None:
    ours: Any = copy.deepcopy(plain)
    cuts = {"0.weight": Shard(0), "0.bias": Shard(0), "2.weight": Shard(1), "2.bias": R}
    for name, cut in cuts.items():
        module, _, last = name.rpartition(".")
        value = xd.distribute_tensor(plain.get_parameter(name).detach(), mesh, [R, cut])
        setattr(ours.get_submodule(module), last, nn.Parameter(value))
    xd.fully_shard(ours, mesh=mesh, dp_mesh_dims=dims(("dp",)))
    assert ours[2].weight.placements == (Shard(0), Shard(1))
    seen: list[Any] = []
    ours[2].register_forward_pre_hook(lambda module, _: seen.append(module.weight))
    x = xd.distribute_tensor(torch.ones(8, 8), mesh, [Shard(0), R])
    check_gradients(ours, plain, x)
    assert seen[0].placements == (R, Shard(1))
    assert seen[0].device_mesh == mesh


def test_local_parts_of_them_have_parts_of_a_gradient(mesh: xd.DeviceMesh) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            value = xd.distribute_tensor(torch.ones(8, 4), mesh, [R, Shard(0)])
            self.weight = nn.Parameter(value)

        def forward(self, x: Any) -> Any:
            weight: Any = self.weight
            scaled = weight.to_local().sum() * x.to_local()
            return xd.DTensor.from_local(scaled.sum(), mesh, [Partial(), Partial()])

    model: Any = xd.fully_shard(Own(), mesh=mesh, dp_mesh_dims=dims(("dp",)))
    model(xd.distribute_tensor(torch.arange(4.0), mesh, [Shard(0), R])).backward()
    assert torch.equal(model.weight.grad.full_tensor().cpu(), torch.full((8, 4), 6.0))


def test_refused_dims(mesh: xd.DeviceMesh) -> None:
    with pytest.raises(DistributeError, match="Name one axis each, and merge axes"):
        xd.fully_shard(nn.Linear(8, 8), mesh=mesh, dp_mesh_dims=dims(("dp", "tp")))
    layer: Any = nn.Linear(8, 8, bias=False)
    layer.weight = nn.Parameter(xd.distribute_tensor(torch.ones(8, 8), mesh, [Shard(1), R]))
    with pytest.raises(DistributeError, match=r"Pass parameters that are Replicate\(\) there"):
        xd.fully_shard(layer, mesh=mesh, dp_mesh_dims=dims(("dp",)))


@pytest.mark.parametrize("reshard", [True, False])
def test_a_checkpointed_module_has_its_parameters_twice(
    plain: nn.Sequential, mesh: xd.DeviceMesh, reshard: bool
) -> None:
    ours: Any = copy.deepcopy(plain)
    parallelize_module(ours, mesh["tp"], PLAN)
    seen: list[Any] = []
    ours[2].register_forward_pre_hook(lambda module, _: seen.append(module.weight.placements))
    ours = nn.Sequential(checkpoint_wrapper(ours))
    xd.fully_shard(ours[0], mesh=mesh["dp"], reshard_after_forward=reshard)
    xd.fully_shard(ours, mesh=mesh["dp"])
    check_gradients(ours, plain, torch.ones(8, 8))
    assert seen == [(Shard(1),), (Shard(1),)]


def test_a_factor_of_one_divides_nothing(plain: nn.Sequential, mesh: xd.DeviceMesh) -> None:
    """The loss is one over the global batch: a sum's gradient is the sum's."""
    ours: Any = xd.fully_shard(copy.deepcopy(plain), mesh=mesh["dp"])
    ours.set_gradient_divide_factor(1.0)
    check_gradients(ours, plain, torch.ones(8, 8))


def test_modules_that_torch_compiles(mesh: xd.DeviceMesh) -> None:
    layer = nn.Linear(8, 8)
    layer.compile(backend="eager")
    with pytest.raises(UnsupportedOpError, match=r"which torch.compile cannot trace. Leave"):
        xd.fully_shard(layer, mesh=mesh["dp"])
