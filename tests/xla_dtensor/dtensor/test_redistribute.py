"""redistribute and full_tensor: the same values elsewhere; the source stays what it was."""

from __future__ import annotations

import itertools
import re
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import xla_dtensor as xd
from xla_dtensor.dtensor.mesh import as_device_mesh
from xla_dtensor.dtensor.redistribute import as_plain
from xla_dtensor.errors import DistributeError, RedistributeError

R = Replicate()
LAYOUTS = [
    ([R, R], "{replicated}"),
    ([Shard(0), R], "{devices=[2,1,4]<=[8] last_tile_dim_replicate}"),
    ([R, Shard(1)], "{devices=[1,4,2]<=[2,4]T(1,0) last_tile_dim_replicate}"),
    ([Shard(1), Shard(0)], "{devices=[4,2]<=[2,4]T(1,0)}"),
    ([Shard(0), Shard(0)], "{devices=[8,1]<=[8]}"),
    ([_StridedShard(0, split_factor=4), Shard(0)], "{devices=[8,1]<=[2,4]T(1,0)}"),
    ([Shard(-1), Shard(-1)], "{devices=[1,8]<=[8]}"),
    (("tp", "dp"), "{devices=[4,2]<=[2,4]T(1,0)}"),
]


def parameter(tensor: xd.DTensor) -> Any:
    return nn.Parameter(tensor)


@pytest.mark.parametrize("shape", [(8, 16), (5, 7)], ids=["even", "uneven"])
@pytest.mark.parametrize(("target", "text"), LAYOUTS, ids=str)
def test_targets(mesh: xd.DeviceMesh, target: Any, text: str, shape: tuple[int, int]) -> None:
    x = torch.randn(shape)
    source = xd.distribute_tensor(x, mesh, [Shard(0), Shard(1)])
    before = source.xla_sharding()
    moved = source.redistribute(placements=target)
    assert moved.xla_sharding() == xd.OpSharding.parse(text)
    assert moved.mesh_layout.op_sharding(xd.Mesh.arange((8,))) == xd.OpSharding.parse(text)
    assert torch.equal(moved.cpu(), x)
    assert all(torch.equal(s.data, x[s.index]) for s in moved.addressable_shards())
    assert source.placements == (Shard(0), Shard(1))
    assert source.xla_sharding() == before
    assert torch.equal(source.cpu(), x)


@pytest.mark.parametrize(("target", "_"), LAYOUTS, ids=str)
def test_result_shares_nothing_with_the_source(mesh: xd.DeviceMesh, target: Any, _: str) -> None:
    x = torch.randn(8, 16)
    source = xd.distribute_tensor(x, mesh, [Shard(0), Shard(0)])
    moved = source.redistribute(placements=target)
    moved.add_(1)
    assert torch.equal(source.cpu(), x)
    source.zero_()
    assert torch.equal(moved.cpu(), x + 1)


def test_full_tensor_of_a_replicated_tensor_shares_nothing(mesh: xd.DeviceMesh) -> None:
    d = xd.distribute_tensor(torch.zeros(4), mesh)
    d.full_tensor().add_(1)
    assert torch.equal(d.cpu(), torch.zeros(4))


def test_torch_2_9_equality_of_strided_shards_is_not_used(mesh: xd.DeviceMesh) -> None:
    # There, _StridedShard(0) == Shard(0), with one hash: nothing may be looked up by it.
    strided = [_StridedShard(0, split_factor=4), Shard(0)]
    a = xd.distribute_tensor(torch.arange(8), mesh, strided)
    b = xd.distribute_tensor(torch.arange(8), mesh, [Shard(0), Shard(0)])
    assert [s.data.item() for s in a.addressable_shards()] == [0, 2, 4, 6, 1, 3, 5, 7]
    assert [s.data.item() for s in b.addressable_shards()] == [0, 1, 2, 3, 4, 5, 6, 7]
    for d in (a, b):
        made: list[Any] = [d + 1, -d, d.detach(), torch.zeros_like(d), d.unsqueeze(1).squeeze(1)]
        for same in made:
            assert same.mesh_layout == d.mesh_layout
            assert same.xla_sharding() == d.xla_sharding()
    assert type(cast("Any", b * 2).placements[0]) is Shard
    with pytest.raises(DistributeError, match="lies on a mesh already, otherwise than asked"):
        xd.distribute_tensor(a, mesh, [Shard(0), Shard(0)])
    with pytest.raises(DistributeError, match="lies on a mesh already, otherwise than asked"):
        xd.distribute_tensor(b, mesh, strided)
    assert xd.distribute_tensor(a, mesh, strided) is a


def test_another_mesh_over_the_same_devices(mesh: xd.DeviceMesh) -> None:
    x = torch.randn(8, 4)
    flat = xd.init_device_mesh("xla", (8,), mesh_dim_names=("all",))
    cube = xd.init_device_mesh("xla", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
    crossed = xd.Mesh([[0, 4], [1, 5], [2, 6], [3, 7]], (4, 2), ("tp", "dp"))
    p = parameter(xd.distribute_tensor(x, mesh, [Shard(0), R]))
    total = torch.zeros(())
    for other, placements, text in (
        (flat, [Shard(0)], "{devices=[8,1]<=[8]}"),
        (cube, [R, Shard(0), Shard(1)], None),
        (crossed, [Shard(0), Shard(1)], "{devices=[4,2]<=[2,4]T(1,0)}"),
    ):
        moved = p.redistribute(other, placements)
        assert moved.device_mesh == as_device_mesh(other)
        assert text is None or moved.xla_sharding() == xd.OpSharding.parse(text)
        assert torch.equal(moved.cpu(), x)
        total = total + moved.square().sum()
    total.backward()
    assert p.grad.device_mesh is mesh
    assert p.grad.placements == (Shard(0), R)
    torch.testing.assert_close(p.grad.cpu(), 6 * x)


@pytest.mark.parametrize("target", [[R, R], [R, Shard(1)], [Shard(0), Shard(0)]], ids=str)
def test_gradient(mesh: xd.DeviceMesh, target: Any) -> None:
    x, scale = torch.randn(8, 12), torch.randn(8, 12)
    p = parameter(xd.distribute_tensor(x, mesh, [Shard(0), Shard(1)]))
    (p.redistribute(placements=target) * scale).sum().backward()
    assert p.grad.placements == (Shard(0), Shard(1))
    assert p.grad.xla_sharding() == p.xla_sharding()
    assert torch.equal(p.grad.cpu(), scale)


def test_a_pending_label_becomes_whole(mesh: xd.DeviceMesh) -> None:
    x = torch.randn(8, 12)
    p = parameter(xd.distribute_tensor(x, mesh, [Shard(0), Shard(1)]))
    total = p.sum(1)
    assert total.placements == (Shard(0), Partial())
    moved = total.redistribute(placements=[R, R])
    torch.testing.assert_close(moved.cpu(), x.sum(1))
    moved.square().sum().backward()
    torch.testing.assert_close(p.grad.cpu(), (2 * x.sum(1, keepdim=True)).expand(8, 12))


def test_dtypes_of_the_two_passes(mesh: xd.DeviceMesh) -> None:
    p = parameter(xd.distribute_tensor(torch.ones(8), mesh, [Shard(0), R]))
    moved = p.redistribute(
        placements=[R, R], forward_dtype=torch.bfloat16, backward_dtype=torch.float32
    )
    assert moved.dtype == torch.bfloat16
    (moved * 3).sum().backward()
    assert p.grad.dtype == torch.float32
    assert torch.equal(p.grad.cpu(), torch.full((8,), 3.0))


def test_async_op_is_accepted(mesh: xd.DeviceMesh) -> None:
    d = xd.distribute_tensor(torch.arange(8), mesh, [Shard(0), R])
    assert torch.equal(d.redistribute(placements=[R, R], async_op=True).cpu(), torch.arange(8))


@pytest.mark.parametrize("target", [[Partial(), R], [R, Partial("max")]], ids=str)
def test_partial_is_refused(mesh: xd.DeviceMesh, target: Any) -> None:
    d = xd.distribute_tensor(torch.ones(8), mesh, [Shard(0), R])
    with pytest.raises(RedistributeError, match=r"^redistribute was called with Partial\("):
        d.redistribute(placements=target)
    with pytest.raises(RuntimeError):  # as in torch
        d.redistribute(placements=target)


def test_placements_are_needed(mesh: xd.DeviceMesh) -> None:
    d = xd.distribute_tensor(torch.ones(8), mesh, [Shard(0), R])
    with pytest.raises(RuntimeError, match="without placements"):
        d.redistribute()


MESHES = {1: (8,), 2: (2, 4), 3: (2, 2, 2)}
KINDS = (R, Shard(0), Shard(1))
PAIRS = [
    (ndim, source, target)
    for ndim in MESHES
    for source in itertools.product(KINDS, repeat=ndim)
    for target in itertools.product(KINDS, repeat=ndim)
]


SHORT, LONG = PAIRS[:90] + PAIRS[90::17], [p for p in PAIRS[90:] if p not in PAIRS[90::17]]


@pytest.mark.parametrize("pairs", [SHORT, pytest.param(LONG, marks=pytest.mark.thorough)])
def test_every_pair_of_placements(mesh: xd.DeviceMesh, pairs: Any) -> None:
    x = torch.arange(64.0).reshape(8, 8)
    for ndim, source, target in pairs:
        on = xd.init_device_mesh("xla", MESHES[ndim])
        d = xd.distribute_tensor(x, on, list(source))
        moved = d.redistribute(placements=list(target))
        assert moved.placements == target
        assert moved.xla_sharding() == moved.mesh_layout.op_sharding(mesh.value)
        assert all(torch.equal(s.data, x[s.index]) for s in moved.addressable_shards())


def test_dtypes_of_value_and_gradient(mesh: xd.DeviceMesh) -> None:
    p = parameter(xd.distribute_tensor(torch.randn(8), mesh, [Shard(0), R]))
    moved = p.redistribute(
        placements=[R, R], forward_dtype=torch.bfloat16, backward_dtype=torch.float32
    )
    assert moved.dtype == torch.bfloat16
    moved.sum().backward()
    assert p.grad.dtype == torch.float32
    assert p.grad.placements == (Shard(0), R)


class TestOnASubmesh:
    """What is known of the axes that are not spoken of is kept."""

    def test_rows_stay_sharded_over_the_other_axis(self, mesh: xd.DeviceMesh) -> None:
        x = torch.randn(8, 16)
        d = xd.distribute_tensor(x, mesh, [Shard(0), Shard(1)])
        moved = d.redistribute(mesh["tp"], [R])
        assert moved.placements == (R,)
        assert str(moved.xla_sharding()) == "{devices=[2,1,4]<=[8] last_tile_dim_replicate}"
        doubled: Any = moved * 2
        again = doubled.redistribute(placements=[Shard(1)])
        assert str(again.xla_sharding()) == "{devices=[2,4]<=[8]}"
        assert torch.equal(again.cpu(), x * 2)

    def test_of_a_batch_from_an_op_between_submeshes(self, mesh: xd.DeviceMesh) -> None:
        w = xd.distribute_tensor(torch.randn(16, 16), mesh["tp"], [Shard(0)])
        x = xd.distribute_tensor(torch.randn(8, 16), mesh["dp"], [Shard(0)])
        y: Any = torch.mm(x.redistribute(mesh["tp"], [R]), w.t())
        assert (y.placements, y.device_mesh) == ((Shard(1),), mesh["tp"])
        assert str(y.redistribute(placements=[R]).xla_sharding()) == (
            "{devices=[2,1,4]<=[8] last_tile_dim_replicate}"
        )

    def test_in_a_program(self, mesh: xd.DeviceMesh) -> None:
        x = xd.distribute_tensor(torch.randn(8, 16), mesh, [Shard(0), R])
        w = xd.distribute_tensor(torch.randn(16, 16), mesh["tp"], [Shard(0)])

        @xd.compile
        def step(x: Any) -> Any:
            return (x.redistribute(mesh["tp"], [R]) @ w.t()).redistribute(placements=[R])

        y = step(x)
        torch.testing.assert_close(y.cpu(), x.cpu() @ w.cpu().t())
        assert str(y.xla_sharding()) == "{devices=[2,1,4]<=[8] last_tile_dim_replicate}"
        # The weight is gathered along tp, or the result; the batch of 8 rows is not.
        assert re.findall(r"= f32\[(\d+),16\]\S* all-gather", step.hlo()) in (["16"], ["4"])


@pytest.mark.parametrize("placements", [[R, R], [Shard(0), Shard(0)], [R, Shard(1)]], ids=str)
def test_full_tensor(mesh: xd.DeviceMesh, placements: Any) -> None:
    x = torch.randn(5, 7)
    p = parameter(xd.distribute_tensor(x, mesh, placements))
    full = p.full_tensor()
    assert not isinstance(full, xd.DTensor)
    assert full.shape == x.shape
    assert torch.equal(full.detach().cpu(), x)
    (full * 2).sum().backward()
    assert isinstance(p.grad, xd.DTensor)
    assert p.grad.placements == p.placements
    assert torch.equal(p.grad.cpu(), torch.full((5, 7), 2.0))


def test_gradient_of_full_tensor_lies_as_asked(mesh: xd.DeviceMesh) -> None:
    d = xd.distribute_tensor(torch.ones(8, 4), mesh).requires_grad_()
    moved, seen = cast("Any", d + 0), []
    moved.register_hook(lambda grad: seen.append((grad.placements, str(grad.xla_sharding()))))
    asked = moved.full_tensor(grad_placements=[Shard(0), Shard(0)])
    (asked * 2).sum().backward()
    # The hook sees what left full_tensor's own redistribute: the placements of its source.
    assert seen == [((R, R), "{replicated}")]
    assert d.grad is not None
    assert torch.equal(d.grad.cpu(), torch.full((8, 4), 2.0))


def test_full_tensor_in_the_middle_of_a_graph(mesh: xd.DeviceMesh) -> None:
    x = torch.randn(8, 4)
    p = parameter(xd.distribute_tensor(x, mesh, [Shard(0), Shard(1)]))
    full = p.sigmoid().full_tensor()
    weight = torch.randn(4, 3).to(full.device).requires_grad_()
    (full @ weight).square().sum().backward()
    plain, plain_weight = x.clone().requires_grad_(), weight.detach().cpu().requires_grad_()
    (plain.sigmoid() @ plain_weight).square().sum().backward()
    torch.testing.assert_close(p.grad.cpu(), plain.grad)
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad.cpu(), plain_weight.grad)

    def test_through_local_views(self, mesh: xd.DeviceMesh) -> None:
        x = xd.distribute_tensor(torch.randn(8, 4, 16), mesh, [Shard(0), Shard(2)])
        on_tp: Any = x.redistribute(mesh["tp"], [Shard(2)])
        view = on_tp.to_local().transpose(1, 2).contiguous().relu()
        back: Any = xd.DTensor.from_local(view, mesh["tp"], [Shard(1)])
        assert str(back.xla_sharding()) == "{devices=[2,4,1]<=[8]}"
        gathered = back.redistribute(placements=[R])
        assert str(gathered.xla_sharding()) == "{devices=[2,1,1,4]<=[8] last_tile_dim_replicate}"
        assert torch.equal(gathered.cpu(), x.cpu().transpose(1, 2).relu())

    def test_of_a_plain_batch(self, mesh: xd.DeviceMesh) -> None:
        batch = xd.distribute_tensor(torch.randn(8, 16), mesh, [Shard(0), R])
        plain = as_plain(batch)
        d: Any = xd.DTensor.from_local(plain, mesh["tp"], [R])
        moved = d.redistribute(placements=[Shard(1)])
        assert str(moved.xla_sharding()) == "{devices=[2,4]<=[8]}"
