"""G. Meshes, data parallelism, and what is asked of process groups that are not there."""

# torch does not list these names in __all__.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import xla_dtensor as xd
from xla_dtensor.errors import ProcessGroupError

R = Replicate()


def test_submesh_by_name(mesh: xd.DeviceMesh) -> None:
    assert mesh["tp"].mesh.tolist() == [0, 1, 2, 3]
    assert mesh["tp", "dp"].mesh.tolist() == [[0, 4], [1, 5], [2, 6], [3, 7]]
    d = xd.distribute_tensor(torch.arange(8), mesh["tp"], [Shard(0)])
    on_device = [shard.data.tolist() for shard in d.addressable_shards()]
    assert on_device == [[0, 1], [2, 3], [4, 5], [6, 7]] * 2


def test_coordinate_and_local_rank(mesh: xd.DeviceMesh) -> None:
    assert mesh.get_coordinate() == [0, 0]
    assert (mesh.get_local_rank("dp"), mesh.get_local_rank("tp")) == (0, 0)
    assert (mesh["tp"].get_local_rank(), mesh.get_rank(), mesh.size()) == (0, 0, 8)


def test_flatten(mesh: xd.DeviceMesh) -> None:
    cube = xd.init_device_mesh("xla", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    merged = cube["dp", "tp"]._flatten()
    assert cube["dp_tp"] == merged
    assert cube["pp", "dp_tp"].mesh.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert merged._get_root_mesh() == cube
    d = xd.distribute_tensor(torch.arange(8), merged, [Shard(0)])
    assert [s.data.tolist() for s in d.addressable_shards()][2:6] == [
        [4, 5],
        [6, 7],
        [0, 1],
        [2, 3],
    ]
    assert mesh._flatten("world").mesh.tolist() == list(range(8))
    assert mesh["world"] == mesh._flatten("world")


def test_groups_are_refused_with_a_way_out(mesh: xd.DeviceMesh) -> None:
    for ask in (lambda: mesh.get_group("tp"), mesh.get_all_groups, mesh["tp"].get_group):
        with pytest.raises(ProcessGroupError, match="Use redistribute, fully_shard in place of"):
            ask()


def test_mesh_as_a_context(mesh: xd.DeviceMesh) -> None:
    with mesh:
        d = xd.distribute_tensor(torch.ones(8), placements=[Shard(0), R])
        with mesh["tp"]:
            inner = xd.distribute_tensor(torch.ones(8), placements=[Shard(0)])
    assert (d.device_mesh, inner.device_mesh) == (mesh, mesh["tp"])
    with pytest.raises(ValueError, match="was called without a mesh"):
        xd.distribute_tensor(torch.ones(8))


@pytest.mark.usefixtures("installed")
def test_init_device_mesh(mesh: xd.DeviceMesh) -> None:
    assert xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp")) is mesh
    assert dist.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp")) is mesh


def test_fully_shard(mesh: xd.DeviceMesh) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    ours: Any = copy.deepcopy(plain)
    for layer in (ours[0], ours[2]):
        xd.fully_shard(layer, mesh=mesh["dp"])
    xd.fully_shard(ours, mesh=mesh["dp"])
    assert ours[0].weight.placements == (Shard(0),)
    assert ours[0].weight.xla_sharding().num_tiles(0) == 2
    x = torch.randn(4, 8)
    losses = []
    for model in (ours, plain):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    for found, expected in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.detach().cpu(), expected.detach())


def test_distributed_data_parallel_is_refused(mesh: xd.DeviceMesh) -> None:
    layer = xd.distribute_module(nn.Linear(4, 4), mesh)
    with pytest.raises(ProcessGroupError, match="fully_shard in place of DistributedDataParallel"):
        nn.parallel.DistributedDataParallel(layer, device_mesh=mesh["dp"])
    with pytest.raises(ValueError, match="Default process group has not been initialized"):
        nn.parallel.DistributedDataParallel(layer)


def test_distributed_data_parallel_replaced_by_sharded_batches(mesh: xd.DeviceMesh) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(8, 8)
    ours: Any = xd.distribute_module(copy.deepcopy(plain), mesh)
    x = torch.randn(16, 8)
    ours(xd.distribute_tensor(x, mesh, [Shard(0), Shard(0)])).square().mean().backward()
    plain(x).square().mean().backward()
    torch.testing.assert_close(ours.weight.grad.cpu(), plain.weight.grad)
