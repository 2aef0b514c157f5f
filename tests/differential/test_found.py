"""What random programs have found, each as a short test of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import xla_dtensor as xd
from tests.differential.differences import differences
from tests.differential.explained import explain
from tests.differential.generating import make_program

# By seed: what was wrong in its program.
FOUND = {
    722: "a gradient that came back strided was cut as if it were not",
    1028: "equal parts of a maximum each got its whole gradient",
    1183: "equal parts of a maximum each got its whole gradient",
    1259: "equal parts of a maximum each got its whole gradient",
}


@pytest.mark.parametrize("seed", FOUND)
@pytest.mark.filterwarnings("ignore")
def test_programs_that_once_differed(seed: int, mesh: xd.DeviceMesh) -> None:
    own = xd.init_device_mesh("xla", make_program(seed).mesh_shape)
    assert [str(d) for d in differences(seed, own) if explain(d) is None] == []


def test_a_strided_gradient_of_from_local(mesh: xd.DeviceMesh) -> None:
    """Rows cut by dp and then tp get back their own gradient from a tensor cut the other way."""
    x: Any = xd.distribute_tensor(torch.zeros(8, 2), mesh, [Shard(0), Shard(0)]).requires_grad_()
    made = xd.DTensor.from_local(x.to_local(), mesh, [Shard(0), Shard(0)])
    weight = torch.arange(16.0).reshape(8, 2)
    strided = [_StridedShard(0, split_factor=4), Shard(0)]
    made.backward(xd.distribute_tensor(weight, mesh, strided))
    assert torch.equal(x.grad.cpu(), weight)


@pytest.mark.parametrize("op", ["max", "min"])
def test_equal_parts_of_an_extreme_share_its_gradient(mesh: xd.DeviceMesh, op: str) -> None:
    x: Any = xd.distribute_tensor(torch.ones(8), mesh, [Replicate(), Shard(0)]).requires_grad_()
    parts = x.to_local(grad_placements=[Partial(), Shard(0)]) * 2
    xd.DTensor.from_local(parts, mesh, [Partial(op), Shard(0)]).sum().backward()
    assert torch.equal(x.grad.cpu(), torch.full((8,), 2.0))
