"""A. distribute_tensor: how a tensor lies, and what of it survives."""

# Attributes of DTensors that pyright takes for plain parameters.
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import xla_dtensor as xd
import xla_dtensor.spmd as xs
from xla_dtensor.dtensor.mesh import as_device_mesh
from xla_dtensor.errors import DistributeError
from xla_dtensor.runtimes import Runtime

R = Replicate()
Bytes = Callable[[Any], set[int]]
Whole = Callable[[Any], torch.Tensor]


def counting(*shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape)


@pytest.mark.parametrize(
    ("placements", "sharding"),
    [
        ([Shard(0), R], "{devices=[2,1,4]<=[8] last_tile_dim_replicate}"),
        ([R, Shard(-1)], "{devices=[1,4,2]<=[2,4]T(1,0) last_tile_dim_replicate}"),
        ([R, R], "{replicated}"),
        ([Shard(1), Shard(0)], "{devices=[4,2]<=[2,4]T(1,0)}"),
    ],
    ids=str,
)
def test_placements_are_how_xla_lays_it(
    mesh: xd.DeviceMesh, whole_of: Whole, placements: list[Any], sharding: str
) -> None:
    x = counting(16, 32)
    d = xd.distribute_tensor(x, mesh, placements)
    assert str(d.xla_sharding()) == sharding
    assert d.placements == tuple(Shard(1) if p == Shard(-1) else p for p in placements)
    assert torch.equal(whole_of(d), x)


def test_mesh_of_one_axis(one_axis: xd.DeviceMesh, whole_of: Whole) -> None:
    d = xd.distribute_tensor(counting(16, 4), one_axis, [Shard(0)])
    assert str(d.xla_sharding()) == "{devices=[8,1]<=[8]}"
    assert torch.equal(whole_of(d), counting(16, 4))


def test_scalar(mesh: xd.DeviceMesh) -> None:
    d = xd.distribute_tensor(torch.tensor(2.5), mesh, [R, R])
    assert (tuple(d.shape), d.item(), str(d.xla_sharding())) == ((), 2.5, "{replicated}")


def test_without_placements_it_is_replicated(mesh: xd.DeviceMesh, bytes_of: Bytes) -> None:
    d = xd.distribute_tensor(counting(4, 4), mesh)
    assert d.placements == (R, R)
    assert bytes_of(d) == {64}


def test_without_a_source_rank(mesh: xd.DeviceMesh) -> None:
    d = xd.distribute_tensor(counting(8), mesh, [Shard(0), R], src_data_rank=None)
    assert torch.equal(d.cpu(), counting(8))


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.bfloat16,
        torch.float64,
        torch.float16,
        torch.int64,
        torch.bool,
        torch.complex64,
    ],
    ids=str,
)
def test_dtypes(mesh: xd.DeviceMesh, whole_of: Whole, bytes_of: Bytes, dtype: torch.dtype) -> None:
    x = (counting(8, 4) % 7).to(dtype)
    d = xd.distribute_tensor(x, mesh, [Shard(0), Shard(1)])
    assert d.dtype == dtype
    assert torch.equal(whole_of(d), x)
    assert bytes_of(d) == {4 * x.element_size()}


def test_silent_first_axis_dropped_when_two_cut_one_dim(
    mesh: xd.DeviceMesh, bytes_of: Bytes, whole_of: Whole
) -> None:
    d = xd.distribute_tensor(counting(16, 32), mesh, [Shard(0), Shard(0)])
    assert str(d.xla_sharding()) == "{devices=[8,1]<=[8]}"
    assert d.placements == (Shard(0), Shard(0))
    assert bytes_of(d) == {2 * 32 * 4}
    assert torch.equal(whole_of(d), counting(16, 32))


def test_silent_strided_shard_read_as_plain_shard(mesh: xd.DeviceMesh, bytes_of: Bytes) -> None:
    strided = _StridedShard(0, split_factor=4)
    d = xd.distribute_tensor(torch.arange(8), mesh, [strided, Shard(0)])
    # tp is the outer cut: device 0 has row 0, device 4 (dp=1, tp=0) the row after it.
    on_device = [shard.data.item() for shard in d.addressable_shards()]
    assert on_device == [0, 2, 4, 6, 1, 3, 5, 7]
    assert type(d.placements[0]) is _StridedShard
    assert bytes_of(d) == {8}


def test_partial_is_refused(mesh: xd.DeviceMesh) -> None:
    with pytest.raises(ValueError, match=r"Partial says that a reduction is still pending"):
        xd.distribute_tensor(counting(8), mesh, [Partial(), R])


@pytest.mark.parametrize("shape", [(10, 7), (3, 5)], ids=str)
def test_uneven_dims(
    mesh: xd.DeviceMesh, whole_of: Whole, bytes_of: Bytes, shape: tuple[int, int]
) -> None:
    x = torch.randn(shape)
    d = xd.distribute_tensor(x, mesh, [R, Shard(0)])
    rows = -(-shape[0] // 4)
    sizes = [shard.data.shape[0] for shard in d.addressable_shards()][:4]
    assert sizes == [max(0, min(rows, shape[0] - rows * i)) for i in range(4)]
    assert bytes_of(d) == {rows * shape[1] * 4}
    assert torch.equal(whole_of(d), x)
    for name in ("sum", "mean", "argmax", "amin"):
        torch.testing.assert_close(getattr(torch, name)(d).cpu(), getattr(torch, name)(x))
    assert torch.equal(d.sort(0).values.cpu(), x.sort(0).values)
    torch.testing.assert_close(d.softmax(0).cpu(), x.softmax(0))


def test_silent_requires_grad_dropped(mesh: xd.DeviceMesh) -> None:
    d = xd.distribute_tensor(counting(8).requires_grad_(), mesh, [Shard(0), R])
    assert d.requires_grad
    assert d.is_leaf
    (d * 3).sum().backward()
    grad = cast("Any", d.grad)
    assert torch.equal(grad.cpu(), torch.full((8,), 3.0))


def test_silent_parameter_becomes_tensor_without_gradient(mesh: xd.DeviceMesh) -> None:
    weight = nn.Parameter(counting(8))
    made: Any = xd.distribute_tensor(weight, mesh, [Shard(0), R])
    made = nn.Parameter(made)
    assert isinstance(made, nn.Parameter)
    assert made.placements == (Shard(0), R)
    made.sum().backward()
    assert torch.equal(made.grad.cpu(), torch.ones(8))
    assert weight.grad is None


def test_silent_input_annotated_and_written_in_place(mesh: xd.DeviceMesh) -> None:
    for placements in (None, [Shard(0), R], [Shard(0), Shard(0)]):
        x = torch.zeros(8)
        d = xd.distribute_tensor(x, mesh, placements)
        d.add_(1)
        assert torch.equal(x, torch.zeros(8))
        x.sub_(1)
        assert torch.equal(d.cpu(), torch.ones(8))


def test_silent_input_on_the_devices_aliased(dp_tp: xs.Mesh, mesh: xd.DeviceMesh) -> None:
    source = xs.mark_sharding(counting(8, 4), dp_tp, (None, None)).global_tensor
    d = xd.distribute_tensor(source, mesh, [Shard(0), R])
    d.add_(1)
    assert torch.equal(source.cpu(), counting(8, 4))
    assert torch.equal(d.cpu(), counting(8, 4) + 1)


def test_silent_device_order_reported_as_ascending(runtime: Runtime) -> None:
    # A JAX program has one device order: there, one that is no mixed-radix walk of it is refused.
    ids = [[7, 6, 5, 4], [3, 2, 1, 0]]
    if runtime.name == "jax":
        backwards = xd.Mesh(ids, (2, 4), ("dp", "tp"))
        with pytest.raises(DistributeError, match="A JAX program has one device order"):
            xd.distribute_tensor(torch.arange(8), backwards, [Shard(0), R])
        ids = [[0, 2, 4, 6], [1, 3, 5, 7]]
    ordered = as_device_mesh(xd.Mesh(ids, (2, 4), ("dp", "tp")))
    d = xd.distribute_tensor(torch.arange(8), ordered, [Shard(0), Shard(0)])
    assert d.device_mesh == ordered
    assert d.device_mesh.mesh.tolist() == ids
    on_device = {shard.device_id: shard.data.item() for shard in d.addressable_shards()}
    assert [on_device[device] for row in ids for device in row] == list(range(8))
    assert torch.equal((d * 2).cpu(), torch.arange(8) * 2)


def test_mesh_smaller_than_the_world(runtime: Runtime) -> None:
    half = xd.Mesh.arange((4,), ("tp",))
    if runtime.name == "torch_xla":
        with pytest.raises(DistributeError, match="Pass a mesh over all devices"):
            xd.distribute_tensor(counting(8), half, [Shard(0)])
        return
    d = xd.distribute_tensor(counting(8), half, [Shard(0)])
    assert [shard.device_id for shard in d.addressable_shards()] == [0, 1, 2, 3]
    assert torch.equal((d + 1).cpu(), counting(8) + 1)


@pytest.mark.parametrize("device", ["cpu", "xla"])
def test_meta_tensor_and_deferred_init(mesh: xd.DeviceMesh, bytes_of: Bytes, device: str) -> None:
    def rows(name: str, module: nn.Module, mesh: Any) -> None:
        if isinstance(module, nn.Linear):
            weight = xd.distribute_tensor(module.weight, mesh, [Shard(0), Shard(0)])
            module.weight = nn.Parameter(weight)

    layer: Any = xd.distribute_module(nn.Linear(4, 16, device="meta"), mesh, rows)
    assert layer.weight.is_meta
    layer.to_empty(device=device)
    nn.init.ones_(layer.weight)
    nn.init.zeros_(layer.bias)
    assert not layer.weight.is_meta
    assert bytes_of(layer.weight) == {2 * 4 * 4}
    assert isinstance(layer.weight, nn.Parameter)
    y = layer(torch.ones(2, 4))
    assert torch.equal(y.detach().cpu(), torch.full((2, 16), 4.0))
    y.sum().backward()
    assert torch.equal(layer.weight.grad.cpu(), torch.full((16, 4), 2.0))


def test_dim_out_of_range(mesh: xd.DeviceMesh) -> None:
    with pytest.raises(DistributeError, match=r"The dim 2 does not exist. Pass a dim from -2 to 1"):
        xd.distribute_tensor(counting(8, 4), mesh, [Shard(2), R])


def test_distributing_again(mesh: xd.DeviceMesh) -> None:
    d = xd.distribute_tensor(counting(8), mesh, [Shard(0), R])
    assert xd.distribute_tensor(d, mesh, [Shard(0), R]) is d
    with pytest.raises(ValueError, match=r"Call tensor.redistribute\(mesh, placements\)"):
        xd.distribute_tensor(d, mesh, [R, Shard(0)])
