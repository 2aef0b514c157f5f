"""torch.save and torch.load give back values, mesh, placements and parameterhood."""

from __future__ import annotations

import io
import pickle
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import xla_dtensor as xd

R = Replicate()


def through_file(value: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer)


@pytest.mark.parametrize("trip", [through_file, lambda v: pickle.loads(pickle.dumps(v))])
@pytest.mark.parametrize(
    "placements",
    [
        [R, R],
        [Shard(0), Shard(1)],
        [Shard(0), Shard(0)],
        [_StridedShard(0, split_factor=4), Shard(0)],
    ],
    ids=str,
)
def test_round_trip(mesh: xd.DeviceMesh, placements: Any, trip: Any) -> None:
    x = torch.randn(9, 7)
    d = xd.distribute_tensor(x, mesh, placements)
    again = trip(d)
    assert type(again) is xd.DTensor
    assert [*map(repr, again.placements)] == [*map(repr, d.placements)]
    assert again.device_mesh is mesh
    assert again.xla_sharding() == d.xla_sharding()
    assert torch.equal(again.cpu(), x)
    again.zero_()
    assert torch.equal(d.cpu(), x)


def test_parameters_and_gradients(mesh: xd.DeviceMesh) -> None:
    p = nn.Parameter(xd.distribute_tensor(torch.ones(8), mesh, [Shard(0), R]))
    frozen = nn.Parameter(xd.distribute_tensor(torch.ones(8), mesh), requires_grad=False)
    leaf = xd.distribute_tensor(torch.ones(8, requires_grad=True), mesh)
    q, f, g = through_file([p, frozen, leaf])
    assert [isinstance(t, nn.Parameter) for t in (q, f, g)] == [True, True, False]
    assert [t.requires_grad for t in (q, f, g)] == [True, False, True]
    assert q.placements == (Shard(0), R)


def test_module_and_optimizer(mesh: xd.DeviceMesh) -> None:
    module = xd.distribute_module(nn.Linear(4, 8), mesh)
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    state, moments = through_file([module.state_dict(), optimizer.state_dict()])
    other = xd.distribute_module(nn.Linear(4, 8), mesh)
    other.load_state_dict(state)
    torch.optim.AdamW(other.parameters()).load_state_dict(moments)
    weights = [cast("Any", m).weight for m in (other, module)]
    assert torch.equal(weights[0].cpu(), weights[1].cpu())
    assert torch.equal(
        moments["state"][0]["exp_avg"].cpu(), optimizer.state_dict()["state"][0]["exp_avg"].cpu()
    )


def test_shared_tensors_stay_shared(mesh: xd.DeviceMesh) -> None:
    d = xd.distribute_tensor(torch.ones(8), mesh)
    a, b = through_file([d, d])
    assert a is b


def test_submesh_pending_label_and_meta(mesh: xd.DeviceMesh) -> None:
    on_tp = through_file(xd.distribute_tensor(torch.arange(8), mesh["tp"], [Shard(0)]))
    assert on_tp.device_mesh == mesh["tp"]
    assert torch.equal(on_tp.cpu(), torch.arange(8))
    total = through_file(xd.distribute_tensor(torch.ones(8, 4), mesh, [Shard(0), R]).sum(0))
    assert total.placements == (Partial(), R)
    assert total.tolist() == [8.0] * 4
    meta = xd.distribute_tensor(torch.empty(8, device="meta"), mesh, [Shard(0), R])
    again = through_file(meta)
    assert (again.is_meta, again.placements) == (True, (Shard(0), R))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_dtypes(mesh: xd.DeviceMesh, dtype: torch.dtype) -> None:
    x = torch.tensor([0, 1, 3, 2]).to(dtype)
    again = through_file(xd.distribute_tensor(x, mesh, [R, Shard(0)]))
    assert again.dtype == dtype
    assert torch.equal(again.cpu(), x)
