"""B. from_local, to_local, full_tensor and redistribute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.tensor as torch_tensor
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

import xla_dtensor as xd
import xla_dtensor.spmd as xs
from xla_dtensor.errors import LocalViewError
from xla_dtensor.runtimes import get_runtime

R = Replicate()
ROWS_ON_DP = "{devices=[2,1,4]<=[8] last_tile_dim_replicate}"
COLUMNS_ON_TP = "{devices=[1,4,2]<=[2,4]T(1,0) last_tile_dim_replicate}"


def counting(*shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape)


@pytest.fixture
def rows(mesh: xd.DeviceMesh) -> xd.DTensor:
    """An (8, 4) tensor with its rows on dp."""
    return xd.distribute_tensor(counting(8, 4), mesh, [Shard(0), R])


def test_from_local_of_a_host_tensor(mesh: xd.DeviceMesh) -> None:
    d = xd.DTensor.from_local(counting(2, 3), mesh, [R, R])
    assert torch.equal(d.cpu(), counting(2, 3))
    shards = {device: torch.full((1, 3), float(device)) for device in range(8)}
    view = xd.LocalView.from_shards(shards, mesh)
    stacked = xd.DTensor.from_local(view, mesh, [Shard(0), Shard(0)])
    assert str(stacked.xla_sharding()) == "{devices=[8,1]<=[8]}"
    assert torch.equal(stacked.cpu(), torch.arange(8.0)[:, None].expand(8, 3))
    with pytest.raises(ValueError, match="same_on_every_device=True"):
        xd.DTensor.from_local(counting(2, 3), mesh, [Shard(0), R])


def test_from_local_of_a_device_tensor(mesh: xd.DeviceMesh, rows: xd.DTensor) -> None:
    view = rows.to_local() + 1
    again = xd.DTensor.from_local(view, mesh, [Shard(0), R])
    assert again.shape == (8, 4)
    assert torch.equal(again.cpu(), counting(8, 4) + 1)
    partial = xd.DTensor.from_local(view, mesh, [Partial(), R])
    expected = counting(8, 4)[:4] + counting(8, 4)[4:] + 2
    assert torch.equal(partial.redistribute(placements=[R, R]).cpu(), expected)


@pytest.mark.usefixtures("installed")
def test_from_local_of_torch_itself(mesh: xd.DeviceMesh, rows: xd.DTensor) -> None:
    again = torch_tensor.DTensor.from_local(rows.to_local(), mesh, [Shard(0), R])
    assert type(again) is xd.DTensor
    assert torch.equal(again.cpu(), counting(8, 4))


def test_from_local_with_run_check(mesh: xd.DeviceMesh, rows: xd.DTensor) -> None:
    view = rows.to_local()
    with pytest.raises(LocalViewError):
        xd.DTensor.from_local(view, mesh, [R, R])
    first = xd.DTensor.from_local(view, mesh, [R, R], run_check=True)
    assert torch.equal(first.cpu(), counting(8, 4)[:4])


def test_to_local(mesh: xd.DeviceMesh) -> None:
    d: Any = xd.distribute_tensor(counting(8, 4), mesh, [Shard(0), Shard(1)]).requires_grad_()
    local = d.to_local()
    assert (tuple(local.shape), tuple(d.local_shape)) == ((4, 1), (4, 1))
    assert torch.equal(local.detach().cpu(), counting(8, 4)[:4, :1])
    (local * 2).sum().backward()
    assert torch.equal(d.grad.cpu(), torch.full((8, 4), 2.0))


def test_full_tensor(rows: xd.DTensor) -> None:
    full = rows.full_tensor()
    assert not isinstance(full, xd.DTensor)
    assert str(get_runtime().op_sharding(full)) == "{replicated}"
    assert torch.equal(full.cpu(), counting(8, 4))


def test_redistribute_by_placements(rows: xd.DTensor) -> None:
    moved = rows.redistribute(placements=[R, Shard(1)])
    assert str(moved.xla_sharding()) == COLUMNS_ON_TP
    assert torch.equal(moved.cpu(), counting(8, 4))


def test_redistribute_to_a_device_mesh(rows: xd.DTensor, one_axis: xd.DeviceMesh) -> None:
    moved = rows.redistribute(one_axis, [Shard(0)])
    assert moved.device_mesh == one_axis
    assert str(moved.xla_sharding()) == "{devices=[8,1]<=[8]}"
    assert torch.equal(moved.cpu(), counting(8, 4))


def test_silent_redistribute_changes_its_source(rows: xd.DTensor, dp_tp: xs.Mesh) -> None:
    moved = rows.redistribute(dp_tp, [R, Shard(1)])
    assert str(moved.xla_sharding()) == COLUMNS_ON_TP
    assert str(rows.xla_sharding()) == ROWS_ON_DP
    assert rows.placements == (Shard(0), R)
    assert {tuple(s.data.shape) for s in rows.addressable_shards()} == {(4, 4)}
    moved.zero_()
    assert torch.equal(rows.cpu(), counting(8, 4))


def test_silent_redistribute_drops_an_axis_when_two_cut_one_dim(
    rows: xd.DTensor, bytes_of: Callable[[Any], set[int]]
) -> None:
    moved = rows.redistribute(placements=[Shard(0), Shard(0)])
    assert str(moved.xla_sharding()) == "{devices=[8,1]<=[8]}"
    assert bytes_of(moved) == {4 * 4}
    assert torch.equal(moved.cpu(), counting(8, 4))


def test_silent_redistribute_of_an_activation_drops_autograd(mesh: xd.DeviceMesh) -> None:
    weight: Any = nn.Parameter(xd.distribute_tensor(counting(8, 4), mesh, [Shard(0), R]))
    moved = (weight * 2).redistribute(placements=[R, Shard(1)])
    assert moved.requires_grad
    assert moved.grad_fn is not None
    (moved * counting(8, 4)).sum().backward()
    assert torch.equal(weight.grad.cpu(), counting(8, 4) * 2)


def test_silent_asynchronous_redistribute_only_clones(rows: xd.DTensor) -> None:
    moved = rows.redistribute(placements=[R, Shard(1)], async_op=True)
    assert str(moved.xla_sharding()) == COLUMNS_ON_TP
    assert torch.equal(moved.cpu(), counting(8, 4))
