"""distribute_tensor: what is put on a mesh has the caller's values and lies as asked."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import xla_dtensor as xd
from xla_dtensor.errors import DistributeError, UnsupportedOpError
from xla_dtensor.runtimes import Runtime

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    pytest.param(torch.complex128, marks=pytest.mark.only_on("jax")),
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]


def assert_same(distributed: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal bit by bit, with the same dtype and shape."""
    found = distributed.cpu()
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert torch.equal(found, expected)


def bytes_per_device(tensor: xd.DTensor) -> set[int]:
    return {shard.num_bytes_on_device for shard in tensor.addressable_shards()}


# ---------------------------------------------------------------- how it lies


@pytest.mark.parametrize(
    ("placements", "text", "shard"),
    [
        (None, "{replicated}", (8, 12)),
        ([Replicate(), Replicate()], "{replicated}", (8, 12)),
        ([Shard(0), Replicate()], "{devices=[2,1,4]<=[8] last_tile_dim_replicate}", (4, 12)),
        ([Shard(-1), Replicate()], "{devices=[1,2,4]<=[8] last_tile_dim_replicate}", (8, 6)),
        (
            [Replicate(), Shard(1)],
            "{devices=[1,4,2]<=[2,4]T(1,0) last_tile_dim_replicate}",
            (8, 3),
        ),
        ([Shard(0), Shard(1)], "{devices=[2,4]<=[8]}", (4, 3)),
        ([Shard(1), Shard(0)], "{devices=[4,2]<=[2,4]T(1,0)}", (2, 6)),
        ([Shard(0), Shard(0)], "{devices=[8,1]<=[8]}", (1, 12)),
        ([_StridedShard(0, split_factor=4), Shard(0)], "{devices=[8,1]<=[2,4]T(1,0)}", (1, 12)),
        (("dp", None), "{devices=[2,1,4]<=[8] last_tile_dim_replicate}", (4, 12)),
        (("tp", "dp"), "{devices=[4,2]<=[2,4]T(1,0)}", (2, 6)),
        ((("dp", "tp"), "None"), "{devices=[8,1]<=[8]}", (1, 12)),
        ((("tp", "dp"), None), "{devices=[8,1]<=[2,4]T(1,0)}", (1, 12)),
    ],
    ids=str,
)
def test_lies_as_asked(
    mesh: xd.DeviceMesh, placements: Any, text: str, shard: tuple[int, ...]
) -> None:
    x = torch.randn(8, 12)
    d = xd.distribute_tensor(x, mesh, placements)
    assert d.xla_sharding() == xd.OpSharding.parse(text)
    assert d.device_mesh is mesh
    assert d.layout is torch.strided
    assert d.mesh_layout == xd.Layout.from_placements(d.placements, 2, mesh.value)
    shards = d.addressable_shards()
    assert len(shards) == 8
    assert {tuple(s.data.shape) for s in shards} == {shard}
    assert all(torch.equal(s.data, x[s.index]) for s in shards)
    assert_same(d, x)


def test_placements_are_canonical(mesh: xd.DeviceMesh) -> None:
    x = torch.ones(4, 4)
    assert xd.distribute_tensor(x, mesh, [Shard(-1), Shard(-2)]).placements == (Shard(1), Shard(0))
    assert xd.distribute_tensor(x, mesh).placements == (Replicate(), Replicate())
    assert xd.distribute_tensor(x, mesh, (None, "dp")).placements == (Shard(1), Replicate())
    by_alias = xd.distribute_tensor(x, mesh, (None, ("tp", "dp"))).placements
    assert by_alias == (_StridedShard(1, split_factor=4), Shard(1))
    negative = [_StridedShard(-1, split_factor=4), Shard(-1)]
    assert xd.distribute_tensor(x, mesh, negative).placements == by_alias


def test_mesh_of_the_innermost_block(mesh: xd.DeviceMesh) -> None:
    flat = xd.init_device_mesh("xla", (8,), mesh_dim_names=("all",))
    x = torch.ones(8)
    with mesh:
        assert xd.distribute_tensor(x).device_mesh is mesh
        with flat:
            assert xd.distribute_tensor(x, placements=[Shard(0)]).device_mesh is flat
        assert xd.distribute_tensor(x).device_mesh is mesh
        assert xd.distribute_tensor(x, flat).device_mesh is flat
    with pytest.raises(DistributeError, match="without a mesh"):
        xd.distribute_tensor(x)


def test_mesh_value_and_stock_mesh_are_accepted(mesh: xd.DeviceMesh) -> None:
    from torch.distributed.device_mesh import DeviceMesh as TorchDeviceMesh

    x = torch.ones(8)
    stock = TorchDeviceMesh("xla", torch.arange(8).reshape(2, 4), mesh_dim_names=("dp", "tp"))
    assert xd.distribute_tensor(x, mesh.value, [Shard(0), Replicate()]).device_mesh is mesh
    assert xd.distribute_tensor(x, stock).device_mesh == mesh


def test_distributing_twice(mesh: xd.DeviceMesh) -> None:
    d = xd.distribute_tensor(torch.ones(8, 8), mesh, [Shard(0), Shard(1)])
    assert xd.distribute_tensor(d, mesh, [Shard(0), Shard(1)]) is d
    assert xd.distribute_tensor(d, mesh, [Shard(-2), Shard(-1)]) is d
    flat = xd.init_device_mesh("xla", (8,))
    for other in ((mesh, [Shard(0), Replicate()]), (mesh, None), (flat, [Shard(0)])):
        with pytest.raises(DistributeError, match=r"Call tensor\.redistribute\(mesh, placements\)"):
            xd.distribute_tensor(d, *other)


# ---------------------------------------------------------------- the source


@pytest.mark.parametrize("placements", [None, [Shard(0), Replicate()], [Shard(0), Shard(1)]])
def test_source_and_result_share_nothing(mesh: xd.DeviceMesh, placements: Any) -> None:
    x = torch.arange(32.0).reshape(8, 4)
    before = x.clone()
    d = xd.distribute_tensor(x, mesh, placements)
    x.mul_(-1)
    assert_same(d, before)
    x.copy_(before)
    d.add_(1)
    assert torch.equal(x, before)
    assert_same(d, before + 1)


def test_source_on_the_devices_is_untouched(mesh: xd.DeviceMesh) -> None:
    plain = xd.distribute_tensor(torch.arange(16.0), mesh).full_tensor()
    d = xd.distribute_tensor(plain, mesh, [Shard(0), Shard(0)])
    assert bytes_per_device(d) == {2 * 4}
    d.add_(1)
    assert_same(d, torch.arange(16.0) + 1)
    assert torch.equal(plain.cpu(), torch.arange(16.0))
    again = xd.distribute_tensor(plain, mesh)
    assert again.xla_sharding() == xd.OpSharding.replicated()


@pytest.mark.parametrize("requires_grad", [True, False])
def test_requires_grad_is_kept(mesh: xd.DeviceMesh, requires_grad: bool) -> None:
    d = xd.distribute_tensor(torch.ones(8, requires_grad=requires_grad), mesh, [Shard(0)] * 2)
    assert d.requires_grad is requires_grad
    assert d.is_leaf
    p = xd.distribute_tensor(nn.Parameter(torch.ones(8), requires_grad), mesh, [Shard(0)] * 2)
    assert p.requires_grad is requires_grad


def test_parameter(mesh: xd.DeviceMesh) -> None:
    p = nn.Parameter(xd.distribute_tensor(torch.ones(8), mesh, [Shard(0), Replicate()]))
    assert isinstance(p, nn.Parameter)
    assert isinstance(p, xd.DTensor)
    assert p.placements == (Shard(0), Replicate())
    (p * p).sum().backward()
    assert isinstance(p.grad, xd.DTensor)
    assert_same(p.grad, torch.full((8,), 2.0))


def test_views_and_strides_of_the_source(mesh: xd.DeviceMesh) -> None:
    base = torch.arange(96.0).reshape(8, 12)
    for x in (base.t(), base[1:, ::2], base[2], base[:, 1].expand(4, 8), base.flip(0)):
        d = xd.distribute_tensor(x, mesh, [Replicate(), Shard(0)])
        assert_same(d, x)
        assert d.stride() == d._local_tensor.stride()


# ---------------------------------------------------------------- dtypes and shapes


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(mesh: xd.DeviceMesh, dtype: torch.dtype) -> None:
    x = torch.arange(16).reshape(8, 2).remainder(3).to(dtype)
    d = xd.distribute_tensor(x, mesh, [Shard(0), Replicate()])
    assert d.dtype == dtype
    assert_same(d, x)
    assert bytes_per_device(d) == {x.nbytes // 2}
    assert_same(torch.cat([d, d]), torch.cat([x, x]))


@pytest.mark.only_on("torch_xla")
def test_complex128_is_refused(mesh: xd.DeviceMesh) -> None:
    with pytest.raises(UnsupportedOpError, match=r"^A tensor with dtype=torch\.complex128 and"):
        xd.distribute_tensor(torch.zeros(8, dtype=torch.complex128), mesh)
    real = xd.distribute_tensor(torch.zeros(8, dtype=torch.float64), mesh)
    with pytest.raises(UnsupportedOpError, match="Use complex64, or the JAX runtime"):
        torch.complex(real, real)


def test_integers_beyond_32_bits(mesh: xd.DeviceMesh) -> None:
    x = torch.tensor([2**40, -(2**40), 2**62 - 1, -1] * 2)
    d = xd.distribute_tensor(x, mesh, [Shard(0), Shard(0)])
    assert_same(d, x)
    assert_same(d + 1, x + 1)
    assert d[0].item() == 2**40


@pytest.mark.parametrize(
    ("shape", "placements"),
    [
        ((), [Replicate(), Replicate()]),
        ((0,), [Shard(0), Replicate()]),
        ((0, 4), [Shard(1), Shard(0)]),
        ((4, 0), [Shard(0), Shard(0)]),
        ((3,), [Replicate(), Shard(0)]),
        ((3, 5), [Shard(0), Shard(1)]),
        ((10, 7), [Shard(0), Shard(0)]),
        ((1, 1, 1), [Shard(2), Shard(0)]),
        ((9, 7), [_StridedShard(0, split_factor=4), Shard(0)]),
        ((2, 1, 3, 1, 2), [Shard(4), Shard(2)]),
    ],
    ids=str,
)
def test_shapes(mesh: xd.DeviceMesh, shape: tuple[int, ...], placements: Any) -> None:
    x = torch.randn(shape)
    d = xd.distribute_tensor(x, mesh, placements)
    assert_same(d, x)
    assert_same(d * 2, x * 2)
    torch.testing.assert_close(d.sum().cpu(), x.sum())
    rebuilt = torch.full(shape, float("nan"))
    for shard in d.addressable_shards():
        rebuilt[shard.index] = shard.data
    assert torch.equal(rebuilt, x)


def test_uneven_shards_are_xla_tiles(mesh: xd.DeviceMesh) -> None:
    d = xd.distribute_tensor(torch.arange(10), mesh, [Replicate(), Shard(0)])
    sizes = [s.data.shape[0] for s in d.addressable_shards()]
    assert sizes == [3, 3, 3, 1, 3, 3, 3, 1]
    assert bytes_per_device(d) == {3 * 8}
    assert d.shape == (10,)


# ---------------------------------------------------------------- abstract tensors


def test_meta_stays_abstract(runtime: Runtime, mesh: xd.DeviceMesh, monkeypatch: Any) -> None:
    def forbidden(*_: Any, **__: Any) -> None:
        raise AssertionError("a device was touched")

    for name in ("put", "constrain", "to_host", "run_op"):
        monkeypatch.setattr(runtime, name, forbidden)
    d = xd.distribute_tensor(torch.empty(8, 4, device="meta"), mesh, [Shard(0), Replicate()])
    w = nn.Parameter(xd.distribute_tensor(torch.empty(6, 4, device="meta"), mesh))
    assert d.is_meta
    assert repr(d) == (
        "DTensor(shape=(8, 4), dtype=float32, placements=(S(0), R), mesh=(dp=2, tp=4), "
        "local_shape=(4, 4))"
    )
    y = torch.nn.functional.linear(d, w)
    assert isinstance(y, xd.DTensor)
    assert (y.is_meta, y.shape, y.placements) == (True, (8, 6), (Shard(0), Replicate()))
    for result in (d + 1, d.redistribute(placements=[Replicate(), Shard(0)]), torch.zeros_like(d)):
        assert isinstance(result, xd.DTensor)
        assert result.is_meta
    y.sum().backward()
    assert w.grad is not None
    assert (w.grad.is_meta, w.grad.shape) == (True, (6, 4))


def test_src_data_rank_is_accepted(mesh: xd.DeviceMesh) -> None:
    x = torch.arange(8)
    assert_same(xd.distribute_tensor(x, mesh, [Shard(0), Replicate()], src_data_rank=None), x)


def test_non_leaf_is_refused(mesh: xd.DeviceMesh) -> None:
    x = torch.ones(8, requires_grad=True) * 2
    message = re.escape(
        "distribute_tensor was called with a tensor of shape=(8,) that has an autograd history. "
        "Its gradient would end at the copy, in silence. Pass a leaf tensor, or tensor.detach()."
    )
    with pytest.raises(DistributeError, match=f"^{message}$"):
        xd.distribute_tensor(x, mesh)
    assert_same(xd.distribute_tensor(x.detach(), mesh), torch.full((8,), 2.0))
