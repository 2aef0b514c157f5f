"""C and D. What placements say of a result, and tensors made on a mesh or like a DTensor."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.tensor as torch_tensor
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import xla_dtensor as xd
import xla_dtensor.spmd as xs

R = Replicate()
Bytes = Callable[[Any], set[int]]

OPS: dict[str, Callable[[Any], Any]] = {
    "op": lambda d: d + 1,
    "detach": lambda d: d.detach(),
    "data": lambda d: d.data,
    "to": lambda d: d.to(torch.float64),
    "clone": lambda d: d.clone(),
    "Parameter": lambda d: nn.Parameter(d),
}


def counting(*shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape)


@pytest.mark.parametrize("name", OPS)
def test_placements_of_results(mesh: xd.DeviceMesh, name: str) -> None:
    result = OPS[name](xd.distribute_tensor(counting(8, 4), mesh, [Shard(0), Shard(1)]))
    assert result.placements == (Shard(0), Shard(1))
    assert result.device_mesh == mesh
    assert tuple(result.local_shape) == (4, 1)


def test_placements_after_the_value_is_computed(
    mesh: xd.DeviceMesh, whole_of: Callable[[Any], torch.Tensor]
) -> None:
    d = xd.distribute_tensor(counting(8, 4), mesh, [Shard(0), R])
    with xd.strict_placements():
        result: Any = d * 2
    assert torch.equal(whole_of(result), counting(8, 4) * 2)
    assert result.placements == (Shard(0), R)
    assert result.xla_sharding() == d.xla_sharding()


@pytest.mark.parametrize(
    ("entries", "placements"),
    [(("dp", None), (Shard(0), R)), ((None, "tp"), (R, Shard(1))), (("tp", "dp"), None)],
    ids=str,
)
def test_silent_named_axes_reported_as_replicated(
    dp_tp: xs.Mesh, bytes_of: Bytes, entries: Any, placements: Any
) -> None:
    marked = xs.mark_sharding(counting(8, 8), dp_tp, entries)
    expected = placements or (Shard(1), Shard(0))
    assert marked.placements == expected
    parts = [size for size, placement in zip((2, 4), expected, strict=True) if placement != R]
    assert bytes_of(marked) == {8 * 8 * 4 // math.prod(parts)}


def test_silent_tuples_of_axes_reported_as_replicated(dp_tp: xs.Mesh, bytes_of: Bytes) -> None:
    for entries in (((0, 1), None), (("dp", "tp"), None)):
        marked = xs.mark_sharding(counting(8, 4), dp_tp, entries)
        assert marked.placements == (Shard(0), Shard(0))
        assert bytes_of(marked) == {4 * 4}


def test_silent_view_in_place_changes_the_shape_but_not_the_data(mesh: xd.DeviceMesh) -> None:
    d = xd.distribute_tensor(counting(8, 4), mesh, [Shard(0), R])
    assert d.t_() is d
    assert (d.shape, d.placements) == ((4, 8), (Shard(1), R))
    assert torch.equal(d.cpu(), counting(8, 4).t())
    assert torch.equal((d + 1).cpu(), counting(8, 4).t() + 1)
    for shard in d.addressable_shards():
        assert torch.equal(shard.data, counting(8, 4).t()[shard.index])


# ---------------------------------------------------------------- D. factories

VALUES: dict[str, Callable[[torch.Tensor], bool]] = {
    "ones": lambda t: bool((t == 1).all()),
    "zeros": lambda t: bool((t == 0).all()),
    "full": lambda t: bool((t == 7).all()),
    "rand": lambda t: bool(((t >= 0) & (t < 1)).all()) and len(t.unique()) > 900,
    "randn": lambda t: bool(t.mean().abs() < 0.2 and 0.8 < t.std() < 1.2),
    "empty": lambda t: t.shape == (32, 32),
}


@pytest.mark.parametrize("name", VALUES)
def test_factories(mesh: xd.DeviceMesh, bytes_of: Bytes, name: str) -> None:
    arguments = ((32, 32), 7.0) if name == "full" else ((32, 32),)
    d = getattr(xd, name)(*arguments, device_mesh=mesh, placements=[Shard(0), Shard(0)])
    assert d.placements == (Shard(0), Shard(0))
    assert bytes_of(d) == {4 * 32 * 4}
    assert VALUES[name](d.cpu())


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("name", VALUES)
def test_factories_of_torch_itself(mesh: xd.DeviceMesh, name: str) -> None:
    arguments = ((32, 32), 7.0) if name == "full" else ((32, 32),)
    make = getattr(torch_tensor, name)
    d = make(*arguments, device_mesh=mesh, placements=[R, Shard(1)])
    assert type(d) is xd.DTensor
    assert d.xla_sharding().num_tiles(1) == 4
    assert VALUES[name](d.cpu())


def test_silent_zeros_like_replicated(mesh: xd.DeviceMesh, bytes_of: Bytes) -> None:
    d = xd.distribute_tensor(counting(8, 4), mesh, [Shard(0), R])
    made: Any = torch.zeros_like(d)
    assert made.placements == (Shard(0), R)
    assert made.xla_sharding() == d.xla_sharding()
    assert bytes_of(made) == {4 * 4 * 4}
    assert torch.equal(made.cpu(), torch.zeros(8, 4))
