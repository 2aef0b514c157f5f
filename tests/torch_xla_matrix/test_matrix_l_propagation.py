"""L. Where torch_xla's propagation gives up an axis: batch and head dims that are flattened.

Here linear, matmul, einsum and attention reach XLA whole, so that each device computes the heads
that it has; in a local region as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import local_map

import xla_dtensor as xd
from xla_dtensor.report import collectives

R = Replicate()

OPS: dict[str, Callable[..., Any]] = {
    "q @ k.T": lambda q, k, w: q @ k.transpose(-1, -2),
    "scaled_dot_product_attention": lambda q, k, w: F.scaled_dot_product_attention(q, k, k),
    "einsum": lambda q, k, w: torch.einsum("bhqd,bhkd->bhqk", q, k),
    "linear": lambda q, k, w: F.linear(q, w),
}


@pytest.fixture
def arguments() -> list[torch.Tensor]:
    return [torch.randn(4, 8, 16, 6), torch.randn(4, 8, 16, 6), torch.randn(6, 6)]


def distributed(arguments: list[torch.Tensor], mesh: xd.DeviceMesh) -> list[Any]:
    *heads, weight = arguments
    given: list[Any] = [xd.distribute_tensor(t, mesh, [Shard(0), Shard(1)]) for t in heads]
    return [*given, xd.distribute_tensor(weight, mesh)]


def check_kept(found: Any, expected: torch.Tensor) -> None:
    assert str(found.xla_sharding()) == "{devices=[2,4,1,1]<=[8]}"
    assert {tuple(s.data.shape[:2]) for s in found.addressable_shards()} == {(2, 2)}
    torch.testing.assert_close(found.detach().cpu(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", OPS)
def test_head_axis_is_kept(
    mesh: xd.DeviceMesh, arguments: list[torch.Tensor], name: str, compiled: bool
) -> None:
    step: Any = xd.compile(OPS[name]) if compiled else OPS[name]
    check_kept(step(*distributed(arguments, mesh)), OPS[name](*arguments))


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("name", OPS)
def test_head_axis_is_kept_in_a_local_region(
    mesh: xd.DeviceMesh, arguments: list[torch.Tensor], name: str
) -> None:
    heads = [Shard(0), Shard(1)]
    mapped: Any = local_map(OPS[name], heads, (heads, heads, [R, R]))
    step: Any = xd.compile(lambda *given: mapped(*given))
    given = distributed(arguments, mesh)
    check_kept(step(*given), OPS[name](*arguments))
    assert collectives(step.hlo()) == ()


def test_values_without_a_local_region(mesh: xd.DeviceMesh, arguments: list[torch.Tensor]) -> None:
    for name, op in OPS.items():
        found = op(*distributed(arguments, mesh))
        torch.testing.assert_close(
            found.cpu(), op(*arguments), rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )
