"""Labels of products say what XLA does with them, whatever both factors are cut along."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import Replicate, Shard

import xla_dtensor as xd
from xla_dtensor.core import Layout
from xla_dtensor.runtimes import Runtime

R = Replicate()
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "matmul": torch.matmul,
    "linear": F.linear,
    "weight_grad": lambda *factors: torch.ops.xla_dtensor.linear_weight_grad(*factors),
}
CASES = [
    ("matmul", (16, 8), (8, 32)),
    ("matmul", (64, 8), (8, 16)),
    ("matmul", (16, 8), (8, 16)),
    ("matmul", (8, 16, 32), (32, 32)),
    ("matmul", (8, 16, 32), (32, 256)),
    ("matmul", (8, 16, 8), (8, 8, 16)),
    ("matmul", (8, 16, 8), (8, 8, 64)),
    ("matmul", (8, 64, 16), (8, 16, 8)),
    ("matmul", (16, 8), (8, 8, 32)),
    ("matmul", (1, 16, 8), (8, 8, 32)),
    ("matmul", (8, 16, 8), (1, 8, 32)),
    ("matmul", (8, 8, 1, 8, 16), (8, 1, 1, 16, 32)),
    ("matmul", (16,), (8, 16, 8)),
    ("matmul", (8, 8, 16), (16,)),
    ("linear", (8, 16, 32), (64, 32)),
    ("linear", (8, 8, 8), (128, 8)),
    ("linear", (8, 8), (16, 8)),
    ("weight_grad", (8, 16, 32), (8, 16, 64)),
    ("weight_grad", (8, 16, 64), (8, 16, 8)),
]


@pytest.fixture(scope="module")
def line(runtime: Runtime) -> xd.DeviceMesh:
    return xd.init_device_mesh("xla", (8,), mesh_dim_names=("a",))


def places(shape: tuple[int, ...]) -> list[Any]:
    return [R, *(Shard(dim) for dim, size in enumerate(shape) if size > 1)]


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "left", "right"), CASES, ids=str)
def test_the_label_of_a_product_is_what_xla_does(
    line: xd.DeviceMesh, name: str, left: tuple[int, ...], right: tuple[int, ...]
) -> None:
    factors = [torch.arange(math.prod(shape)).float().reshape(shape) for shape in (left, right)]
    differing: dict[Any, Any] = {}
    for pair in itertools.product(places(left), places(right)):
        given = [
            xd.distribute_tensor(factor, line, [place])
            for factor, place in zip(factors, pair, strict=True)
        ]
        found = FUNCTIONS[name](*given)
        summed = [R if found.placements[0].is_partial() else found.placements[0]]
        label = Layout.from_placements(summed, found.ndim, line.value).op_sharding()
        if str(found.xla_sharding()) != str(label):
            differing[pair] = (found.placements, str(found.xla_sharding()))
    assert not differing


def test_a_sum_that_both_factors_are_cut_along_is_partial(line: xd.DeviceMesh) -> None:
    def label(name: str, left: Any, right: Any, *shapes: Any) -> Any:
        x, y = (
            xd.distribute_tensor(torch.ones(shape), line, [place])
            for shape, place in zip(shapes, (left, right), strict=True)
        )
        return FUNCTIONS[name](x, y).placements[0]

    assert label("matmul", Shard(2), Shard(1), (8, 16, 8), (8, 8, 16)).is_partial()
    assert label("matmul", Shard(2), Shard(0), (8, 16, 8), (8,)).is_partial()
    assert label("linear", Shard(2), Shard(1), (8, 16, 8), (16, 8)).is_partial()
    assert label("weight_grad", Shard(0), Shard(0), (8, 16, 8), (8, 16, 16)).is_partial()
    assert label("weight_grad", Shard(1), Shard(0), (8, 16, 8), (8, 16, 16)) == R
