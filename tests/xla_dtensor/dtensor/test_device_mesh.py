"""DeviceMesh: torch's mesh type, answered from the plain mesh value."""

from __future__ import annotations

import copy
import pickle
from typing import Any, cast

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh as TorchDeviceMesh
from torch.distributed.tensor import Replicate, Shard

import xla_dtensor as xd
from xla_dtensor.dtensor.mesh import as_device_mesh
from xla_dtensor.errors import DistributeError
from xla_dtensor.runtimes import Runtime


def test_it_is_torchs_mesh(mesh: xd.DeviceMesh) -> None:
    assert isinstance(mesh, TorchDeviceMesh)
    assert mesh.device_type == "xla"
    assert mesh.mesh_dim_names == ("dp", "tp")
    assert (mesh.ndim, mesh.size(), mesh.size(1), mesh.shape) == (2, 8, 4, (2, 4))
    assert mesh.mesh.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert repr(mesh) == "DeviceMesh((dp=2, tp=4), device: 'xla')"
    assert mesh.value == xd.Mesh.arange((2, 4), ("dp", "tp"))


def test_where_the_process_is(mesh: xd.DeviceMesh) -> None:
    assert mesh.get_coordinate() == [0, 0]
    assert mesh.get_rank() == 0
    assert (mesh.get_local_rank("tp"), mesh.get_local_rank(0)) == (0, 0)
    assert mesh["tp"].get_local_rank() == 0


def test_submeshes(mesh: xd.DeviceMesh) -> None:
    tp = mesh["tp"]
    assert isinstance(tp, xd.DeviceMesh)
    assert tp.mesh.tolist() == [0, 1, 2, 3]
    assert tp.value.root == mesh.value
    assert mesh["tp"] is tp
    assert mesh["dp", "tp"] is mesh
    assert mesh["tp", "dp"].mesh.tolist() == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert tp._get_root_mesh() == mesh
    with pytest.raises(ValueError, match="ep"):
        mesh["ep"]


def test_a_tensor_on_a_submesh_lies_on_the_whole_mesh(mesh: xd.DeviceMesh) -> None:
    d = xd.distribute_tensor(torch.arange(8), mesh["tp"], [Shard(0)])
    assert d.placements == (Shard(0),)
    assert [s.device_id for s in d.addressable_shards()] == list(range(8))
    assert [s.data.tolist() for s in d.addressable_shards()][3:5] == [[6, 7], [0, 1]]
    moved = d.redistribute(mesh, [Shard(0), Replicate()])
    assert torch.equal(moved.cpu(), torch.arange(8))
    assert d.redistribute(mesh["dp"], [Shard(0)]).device_mesh == mesh["dp"]


def test_equal_meshes_are_one(mesh: xd.DeviceMesh) -> None:
    again = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
    other = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "ep"))
    stock = TorchDeviceMesh("xla", torch.arange(8).view(2, 4), mesh_dim_names=("dp", "tp"))
    assert again is mesh
    assert hash(again) == hash(mesh)
    assert mesh != other
    assert mesh != mesh["tp"]
    assert as_device_mesh(mesh.value) is mesh
    assert as_device_mesh(stock) is mesh
    assert copy.deepcopy(mesh) is mesh
    assert pickle.loads(pickle.dumps(mesh)) is mesh
    assert pickle.loads(pickle.dumps(mesh["tp"])) is mesh["tp"]


def test_unnamed_axes_and_axes_of_size_one(runtime: Runtime) -> None:
    unnamed = xd.init_device_mesh("xla", (4, 1, 2))
    assert unnamed.mesh_dim_names is None
    x = torch.randn(8, 4)
    d = xd.distribute_tensor(x, unnamed, [Shard(0), Shard(0), Shard(1)])
    assert d.placements == (Shard(0), Shard(0), Shard(1))
    assert str(d.xla_sharding()) == "{devices=[4,2]<=[8]}"
    assert torch.equal(d.cpu(), x)
    assert cast("Any", d + 1).placements == d.placements


def test_one_device_mesh_is_refused_or_works(runtime: Runtime) -> None:
    if runtime.name == "torch_xla":
        # Its programs run on all devices.
        with pytest.raises(DistributeError, match="Pass a mesh over all devices"):
            xd.init_device_mesh("xla", (1,))
        return
    d = xd.distribute_tensor(torch.arange(3), xd.init_device_mesh("xla", (1,)), [Shard(0)])
    assert d.sum().item() == 3


def test_local_rank_of_several_axes_is_refused(mesh: xd.DeviceMesh) -> None:
    with pytest.raises(RuntimeError, match="Pass mesh_dim, an axis name or number"):
        mesh.get_local_rank()


def test_stock_mesh_of_another_type_is_refused() -> None:
    class Stock(TorchDeviceMesh):
        def __init__(self) -> None:
            pass

        device_type = "cuda"  # pyright: ignore[reportAssignmentType]

    with pytest.raises(DistributeError, match="device_type='cuda' was passed"):
        as_device_mesh(Stock())
