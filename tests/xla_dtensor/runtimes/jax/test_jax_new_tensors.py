"""What an op makes of nothing, zeros or random numbers, is nowhere whole: a device makes its part.

XLA would make it on one device, which does not hold what a mesh of them does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

import xla_dtensor as xd
from xla_dtensor.runtimes.jax import runtime
from xla_dtensor.runtimes.jax.arrays import sharding, storage

pytestmark = pytest.mark.only_on("jax")
SHAPE = (8, 24)
MAKERS: dict[str, Callable[[Any], Any]] = {
    "zeros_like": torch.zeros_like,
    "ones_like": torch.ones_like,
    "full_like": lambda x: torch.full_like(x, 2.5),
    "empty_like": torch.empty_like,
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randint_like": lambda x: torch.randint_like(x, 3, 9),
    "fill_": lambda x: x.fill_(3.0),
    "zero_": lambda x: x.zero_(),
    "normal_": lambda x: x.normal_(1, 2),
    "uniform_": lambda x: x.uniform_(-1, 2),
    "log_normal_": lambda x: x.log_normal_(),
    "cauchy_": lambda x: x.cauchy_(),
    "exponential_": lambda x: x.exponential_(2.0),
    "geometric_": lambda x: x.geometric_(0.4),
    "bernoulli_": lambda x: x.bernoulli_(0.3),
    "random_": lambda x: x.random_(4, 90),
    "dropout": lambda x: nn.functional.dropout(x, 0.5),
    "trunc_normal_": nn.init.trunc_normal_,
    "kaiming_uniform_": nn.init.kaiming_uniform_,
}


@pytest.mark.parametrize("name", MAKERS)
def test_no_device_has_all_of_it(
    mesh: xd.DeviceMesh, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    whole: list[Any] = []
    place: Any = sharding.place

    def noting(array: Any, lies: Any) -> Any:
        on_one = len(array.sharding.device_set) == 1 or array.sharding.is_fully_replicated
        whole.extend([array.sharding] if on_one and array.shape == SHAPE else [])
        return place(array, lies)

    x = xd.distribute_tensor(torch.ones(SHAPE), mesh, [Shard(1), Shard(0)])
    replicated = xd.distribute_tensor(torch.ones(SHAPE), mesh)
    for module in (runtime, storage):
        monkeypatch.setattr(module, "place", noting)
    xd.manual_seed(5, mesh)
    made = MAKERS[name](x)
    assert not whole
    monkeypatch.undo()
    # The numbers are those of a tensor that is not cut.
    xd.manual_seed(5, mesh)
    expected = MAKERS[name](replicated)
    torch.testing.assert_close(made.cpu(), expected.cpu(), rtol=1e-6, atol=1e-6)
    assert made.placements == x.placements


def test_uneven_tensors_and_views_are_as_before(mesh: xd.DeviceMesh) -> None:
    uneven = xd.distribute_tensor(torch.ones(5, 3), mesh, ("tp", None))
    assert torch.equal(torch.zeros_like(uneven).cpu(), torch.zeros(5, 3))
    x = xd.distribute_tensor(torch.ones(8, 4), mesh, ("tp", None))
    x[2:6].fill_(7.0)
    x.t()[1].zero_()
    expected = torch.ones(8, 4)
    expected[2:6], expected[:, 1] = 7.0, 0.0
    assert torch.equal(x.cpu(), expected)
