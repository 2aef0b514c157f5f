"""Tensors made like a DTensor on the meta device: they lie as it does, and meta stays meta."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import xla_dtensor as xd


@pytest.fixture
def meta(mesh: xd.DeviceMesh) -> Any:
    abstract = torch.empty(8, 4, device="meta")
    return xd.distribute_tensor(abstract, mesh, [Shard(0), Replicate()])


@pytest.mark.parametrize("device", ["cpu", "xla"])
@pytest.mark.parametrize(
    ("make", "holds"),
    [
        (torch.zeros_like, lambda t: (t == 0).all()),
        (torch.ones_like, lambda t: (t == 1).all()),
        (lambda t, **k: torch.full_like(t, 7, **k), lambda t: (t == 7).all()),
        (torch.empty_like, lambda t: t.shape == (8, 4)),
        (torch.rand_like, lambda t: ((t >= 0) & (t < 1)).all() and t.std() > 0),
        (torch.randn_like, lambda t: (t < 0).any()),
    ],
)
def test_they_lie_as_it_does(
    meta: Any, device: str, make: Callable[..., Any], holds: Callable[[torch.Tensor], bool]
) -> None:
    made = make(meta, device=device)
    assert made.placements == meta.placements
    assert {tuple(shard.data.shape) for shard in made.addressable_shards()} == {(4, 4)}
    assert holds(made.cpu())


def test_dtype(meta: Any) -> None:
    assert torch.zeros_like(meta, device="cpu", dtype=torch.int32).cpu().dtype == torch.int32


def test_meta_stays_meta(meta: Any) -> None:
    assert torch.zeros_like(meta).is_meta
    assert torch.empty_like(meta, device="meta").is_meta


def test_module_of_fully_shard(mesh: xd.DeviceMesh) -> None:
    layer: Any = xd.fully_shard(nn.Linear(4, 16, device="meta"), mesh=mesh["dp"])
    layer.to_empty(device="cpu")
    nn.init.ones_(layer.weight)
    nn.init.zeros_(layer.bias)
    assert layer.weight.placements == (Shard(0),)
    assert {tuple(shard.data.shape) for shard in layer.weight.addressable_shards()} == {(8, 4)}
    y = layer(torch.ones(2, 4))
    assert y.sum().item() == 2 * 16 * 4
    y.sum().backward()
    assert layer.weight.grad.placements == (Shard(0),)
