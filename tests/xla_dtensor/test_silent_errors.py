"""What torch_xla 2.9 alone, or JAX alone, gets wrong without an error is right here.

Each test is named after one such case. Where both could be wrong in silence, bytes on the devices
are counted: an annotation that says one thing while memory says another does not pass.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import xla_dtensor as xd
from xla_dtensor.dtensor.mesh import as_device_mesh
from xla_dtensor.errors import DistributeError
from xla_dtensor.runtimes import Runtime

R = Replicate()
REVERSED = [[7, 6, 5, 4], [3, 2, 1, 0]]


def bytes_per_device(tensor: xd.DTensor) -> set[int]:
    return {shard.num_bytes_on_device for shard in tensor.addressable_shards()}


# ---------------------------------------------------------------- A. distribute_tensor


def test_two_axes_on_one_dim_is_eight_ways_not_four(mesh: xd.DeviceMesh) -> None:
    x = torch.arange(16 * 32.0).reshape(16, 32)
    d = xd.distribute_tensor(x, mesh, [Shard(0), Shard(0)])
    assert str(d.xla_sharding()) == "{devices=[8,1]<=[8]}"
    assert bytes_per_device(d) == {2 * 32 * 4}
    assert d.placements == (Shard(0), Shard(0))


def test_strided_shard_is_not_a_plain_shard(mesh: xd.DeviceMesh) -> None:
    d = xd.distribute_tensor(torch.arange(8), mesh, [_StridedShard(0, split_factor=4), Shard(0)])
    # tp is the outer cut: device 0 has row 0, device 4 (dp=1, tp=0) the row after it.
    assert [s.data.tolist() for s in d.addressable_shards()] == [
        [r] for r in (0, 2, 4, 6, 1, 3, 5, 7)
    ]
    assert type(d.placements[0]) is _StridedShard
    assert d.placements[0].split_factor == 4


def test_mesh_in_a_mixed_radix_order_is_kept(mesh: xd.DeviceMesh) -> None:
    crossed = as_device_mesh(xd.Mesh([[0, 4], [1, 5], [2, 6], [3, 7]], (4, 2), ("tp", "dp")))
    d = xd.distribute_tensor(torch.arange(8), crossed, [Shard(0), Shard(0)])
    assert d.device_mesh == crossed
    assert d.device_mesh.mesh.tolist() == [[0, 4], [1, 5], [2, 6], [3, 7]]
    on_device = {s.device_id: s.data.item() for s in d.addressable_shards()}
    assert on_device == {0: 0, 4: 1, 1: 2, 5: 3, 2: 4, 6: 5, 3: 6, 7: 7}
    assert torch.equal((d + 1).cpu(), torch.arange(8) + 1)


@pytest.mark.only_on("torch_xla")
def test_mesh_in_any_order_is_kept(runtime: Runtime) -> None:
    assert_reversed_order_is_kept()


def assert_reversed_order_is_kept() -> None:
    """Values, devices and the mesh's own order, on a mesh whose devices count down."""
    backwards = as_device_mesh(xd.Mesh(REVERSED, (2, 4), ("dp", "tp")))
    d = xd.distribute_tensor(torch.arange(16).reshape(2, 8), backwards, [Shard(0), Shard(1)])
    assert d.device_mesh == backwards
    assert d.device_mesh.mesh.tolist() == REVERSED
    on_device = {s.device_id: s.data.flatten().tolist() for s in d.addressable_shards()}
    assert on_device[7] == [0, 1]
    assert on_device[4] == [6, 7]
    assert on_device[0] == [14, 15]
    assert (d * 2).sum().item() == 240
    assert (d @ d.t()).cpu().tolist() == [[140, 364], [364, 1100]]


@pytest.mark.only_on("jax")
def test_second_device_order_of_a_process_is_refused(mesh: xd.DeviceMesh) -> None:
    backwards = xd.Mesh(REVERSED, (2, 4), ("dp", "tp"))
    with pytest.raises(DistributeError, match=r"A JAX program has one device order"):
        xd.distribute_tensor(torch.arange(8), backwards, [Shard(0), R])


@pytest.mark.only_on("jax")
def test_first_device_order_of_a_process_may_be_any(runtime: Runtime) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import xla_dtensor as xd\n"
        "xd.get_runtime('jax', num_cpu_devices=8)\n"
        "import test_silent_errors\n"
        "test_silent_errors.assert_reversed_order_is_kept()\n"
        "print('kept')\n"
    )
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "NPROC": "64", "XLA_FLAGS": ""}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, str(Path(__file__).parent)],
        env=environment,
        cwd=root,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.stdout.strip() == "kept", done.stderr[-2000:]


def test_requires_grad_and_parameter_are_kept(mesh: xd.DeviceMesh) -> None:
    d = xd.distribute_tensor(torch.ones(8, requires_grad=True), mesh, [Shard(0), R])
    p = nn.Parameter(d.detach())
    assert d.requires_grad
    assert p.requires_grad
    (d.sum() + p.sum()).backward()
    assert d.grad is not None
    assert p.grad is not None


def test_in_place_write_leaves_the_callers_tensor(mesh: xd.DeviceMesh) -> None:
    for placements in (None, [Shard(0), R], [Shard(0), Shard(0)]):
        x = torch.zeros(8)
        d = xd.distribute_tensor(x, mesh, placements)
        d.add_(1)
        assert x.sum() == 0
        x.sub_(1)
        assert d.sum().item() == 8


def test_mesh_smaller_than_the_job_is_used_or_refused(runtime: Runtime) -> None:
    half = xd.Mesh.arange((4,), ("tp",))
    if runtime.name == "jax":
        d = xd.distribute_tensor(torch.arange(8), half, [Shard(0)])
        assert [s.device_id for s in d.addressable_shards()] == [0, 1, 2, 3]
        assert (d + d).sum().item() == 56
        return
    with pytest.raises(DistributeError, match="Pass a mesh over all devices"):
        xd.distribute_tensor(torch.arange(8), half, [Shard(0)])


# ---------------------------------------------------------------- B. redistribute


def test_redistribute_leaves_its_source_where_it_was(mesh: xd.DeviceMesh) -> None:
    d = xd.distribute_tensor(torch.randn(8, 16), mesh, [Shard(0), R])
    before, size = d.xla_sharding(), bytes_per_device(d)
    moved = d.redistribute(mesh, [Shard(1), Shard(1)])
    assert str(moved.xla_sharding()) == "{devices=[1,8]<=[8]}"
    assert (d.xla_sharding(), bytes_per_device(d)) == (before, size)
    moved.zero_()
    assert d.abs().sum().item() > 0


def test_redistribute_of_an_activation_keeps_autograd(mesh: xd.DeviceMesh) -> None:
    p = cast("Any", nn.Parameter(xd.distribute_tensor(torch.ones(8, 4), mesh, [Shard(0), R])))
    y = (p * 3).redistribute(placements=[R, Shard(1)])
    assert y.requires_grad
    y.sum().backward()
    assert torch.equal(p.grad.cpu(), torch.full((8, 4), 3.0))


# ---------------------------------------------------------------- C. placements


def test_named_axes_are_not_taken_for_replicate(mesh: xd.DeviceMesh) -> None:
    x = torch.randn(8, 8)
    assert xd.distribute_tensor(x, mesh, ("dp", None)).placements == (Shard(0), R)
    assert xd.distribute_tensor(x, mesh, (None, "tp")).placements == (R, Shard(1))
    both = xd.distribute_tensor(x, mesh, (("dp", "tp"), None))
    assert both.placements == (Shard(0), Shard(0))
    assert bytes_per_device(both) == {8 * 4}


@pytest.mark.parametrize(
    "function",
    [
        lambda d: d + 1,
        lambda d: d.detach(),
        lambda d: d.data,
        lambda d: d.to(torch.float64),
        lambda d: d.clone(),
        lambda d: nn.Parameter(d),
    ],
)
def test_placements_of_any_result_can_be_read(mesh: xd.DeviceMesh, function: Any) -> None:
    result = function(xd.distribute_tensor(torch.randn(8, 4), mesh, [Shard(0), Shard(1)]))
    assert result.placements == (Shard(0), Shard(1))
    assert result.device_mesh is mesh


def test_shape_follows_in_place_views(mesh: xd.DeviceMesh) -> None:
    x = torch.randn(8, 16)
    d = xd.distribute_tensor(x, mesh, [Shard(0), Shard(1)])
    assert d.t_() is d
    assert (d.shape, d.placements) == ((16, 8), (Shard(1), Shard(0)))
    assert torch.equal(d.cpu(), x.t())
    d.unsqueeze_(0)
    assert (d.shape, d.placements) == ((1, 16, 8), (Shard(2), Shard(1)))
    d.squeeze_(0).transpose_(0, 1)
    assert d.placements == (Shard(0), Shard(1))
    assert torch.equal((d + 1).cpu(), x + 1)


def test_optimizer_state_is_not_made_replicated(mesh: xd.DeviceMesh) -> None:
    d = xd.distribute_tensor(torch.randn(16, 8), mesh, [Shard(0), Shard(0)])
    made: list[Any] = [torch.zeros_like(d), torch.empty_like(d), torch.rand_like(d)]
    for like in made:
        assert like.xla_sharding() == d.xla_sharding()
        assert bytes_per_device(like) == {2 * 8 * 4}


# ---------------------------------------------------------------- H. programs


def test_programs_that_differ_in_what_stands_where_are_two(mesh: xd.DeviceMesh) -> None:
    hosts = [torch.arange(16.0).reshape(4, 4), torch.eye(4) + 2]
    x, y = (xd.distribute_tensor(host, mesh, [Shard(0), R]) for host in hosts)
    a, b = hosts
    for ours, theirs in (
        (lambda: x + x * y, a + a * b),
        (lambda: y + x * y, b + a * b),
        (lambda: x @ y @ x, a @ b @ a),
        (lambda: x @ y @ y, a @ b @ b),
    ):
        found: Any = ours()
        assert torch.equal(found.full_tensor().cpu(), theirs)


# ---------------------------------------------------------------- JAX's own


def test_int64_is_not_narrowed(mesh: xd.DeviceMesh) -> None:
    x = torch.tensor([2**40, 2**62, -(2**40), 1] * 2)
    d = xd.distribute_tensor(x, mesh, [Shard(0), Shard(0)])
    doubled = xd.compile(lambda t: t + t)(d)
    for found, expected in ((d, x), (d + d, x + x), (doubled, x + x)):
        assert found.dtype == torch.int64
        assert torch.equal(found.cpu(), expected)
    assert d.sum().dtype == torch.int64


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8], ids=str)
def test_integer_division_is_exact(mesh: xd.DeviceMesh, dtype: torch.dtype) -> None:
    # torch_xla divides integers in float32.
    limits = torch.iinfo(dtype)
    x = torch.tensor([limits.max, limits.min, limits.max // 3, 7, -7, 6, -6, 0], dtype=dtype)
    y = torch.tensor([3, 3, -7, 2, 2, 3, -3, 5], dtype=dtype)
    d = xd.distribute_tensor(x, mesh, [Shard(0), Shard(0)])
    for rounding in ("floor", "trunc"):
        for divisor in (y, 3, -7):
            found = torch.div(d, divisor, rounding_mode=rounding)
            assert torch.equal(found.cpu(), torch.div(x, divisor, rounding_mode=rounding))
    assert torch.equal((d // 3).cpu(), x // 3)
    d //= 3
    assert torch.equal(d.cpu(), x // 3)


def test_maximum_over_all_dims_is_one_number(mesh: xd.DeviceMesh) -> None:
    # torch_xla returns the input of amax and amin without dims unchanged.
    d = xd.distribute_tensor(torch.arange(12.0).view(3, 4) - 20, mesh, [R, Shard(0)])
    assert (d.amax().tolist(), d.amin().tolist()) == (-9, -20)
    assert d.amax(keepdim=True).tolist() == [[-9]]
    assert d.amax((0, 1)).tolist() == -9


def test_float64_is_not_narrowed(mesh: xd.DeviceMesh) -> None:
    x = torch.full((8,), 1 / 3, dtype=torch.float64)
    d = xd.distribute_tensor(x, mesh, [Shard(0), R])
    assert (d + 1e-12).cpu().tolist() == (x + 1e-12).tolist() != x.tolist()


def test_large_uneven_embedding_is_really_sharded(mesh: xd.DeviceMesh) -> None:
    x = torch.randn(50257, 64)
    d = xd.distribute_tensor(x, mesh, [R, Shard(0)])
    rows = -(-50257 // 4)
    assert bytes_per_device(d) == {rows * 64 * 4}
    assert [s.data.shape[0] for s in d.addressable_shards()][:4] == [rows] * 3 + [50257 - 3 * rows]
    tokens = torch.tensor([0, 12565, 50256, 37695])
    assert torch.equal(nn.functional.embedding(tokens, d).cpu(), x[tokens])


@pytest.mark.parametrize("shape", [(10, 6), (3, 5), (9, 2)], ids=str)
@pytest.mark.parametrize("placements", [[R, Shard(0)], [Shard(0), Shard(0)]], ids=str)
def test_uneven_constraint_in_a_program_is_not_dropped(
    mesh: xd.DeviceMesh, shape: tuple[int, int], placements: Any
) -> None:
    x = torch.randn(shape)
    step = xd.compile(lambda t: (t * 2).redistribute(placements=placements))
    result = step(xd.distribute_tensor(x, mesh))
    parts = 4 if placements[0] == R else 8
    asked = xd.Layout.from_placements(placements, 2, mesh.value)
    assert result.placements == tuple(placements)
    assert result.xla_sharding() == asked.op_sharding(xd.Mesh.arange((8,)))
    assert bytes_per_device(result) == {-(-shape[0] // parts) * shape[1] * 4}
    torch.testing.assert_close(result.cpu(), x * 2)


def test_uneven_result_of_ordinary_ops_is_right(mesh: xd.DeviceMesh) -> None:
    # Padding must not reach sums, means or maxima.
    x = -torch.rand(10, 7) - 1
    d = xd.distribute_tensor(x, mesh, [Shard(1), Shard(0)])
    for name in ("sum", "mean", "amax", "amin", "argmax", "std", "prod"):
        found = getattr(torch, name)(d).cpu()
        torch.testing.assert_close(found, getattr(torch, name)(x), msg=name)
    torch.testing.assert_close(d.softmax(0).cpu(), x.softmax(0))
    torch.testing.assert_close((d.t() @ d).cpu(), x.t() @ x)
    assert torch.equal(d.sort(0).values.cpu(), x.sort(0).values)
