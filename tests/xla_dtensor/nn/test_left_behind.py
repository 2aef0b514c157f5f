"""Optimizers that were made before their model was put on a mesh."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import xla_dtensor as xd
from xla_dtensor.dtensor.api import follow_parameters
from xla_dtensor.errors import DistributeError

pytestmark = pytest.mark.only_on("jax")

WAYS = ("shard_module", "distribute_module", "fully_shard", "parallelize_module")


def put(model: nn.Module, mesh: xd.DeviceMesh, way: str) -> xd.DeviceMesh:
    """Put a model on a mesh, or on an axis of it; return where its inputs are to lie."""
    if way == "shard_module":
        xd.shard_module(model, mesh, {"weight": ["dp", "tp"], "bias": [None]})
    elif way == "distribute_module":
        distribute_module(model, mesh)
    elif way == "fully_shard":
        xd.fully_shard(model, mesh=mesh["dp"])
        return mesh["dp"]
    else:
        style = ColwiseParallel(use_local_output=False)
        parallelize_module(nn.Sequential(model), mesh["tp"], {"0": style})
        return mesh["tp"]
    return mesh


class Loop:
    """A model and an optimizer, which was made first."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(8, 8).double()
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), 1e-2)
        self.x = torch.randn(8, 8).double()

    def step(self, x: torch.Tensor) -> None:
        self.model(x).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def whole(self) -> list[torch.Tensor]:
        parameters: list[Any] = list(self.model.parameters())
        return [getattr(p, "full_tensor", lambda p=p: p)().detach().cpu() for p in parameters]


@pytest.fixture
def installed() -> Any:
    xd.install()
    yield
    xd.uninstall()


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_its_step_is_an_error(mesh: xd.DeviceMesh, way: str, is_compiled: bool) -> None:
    loop = Loop()
    where = put(loop.model, mesh, way)
    x = xd.distribute_tensor(loop.x, where, [Replicate()] * where.ndim)
    step = xd.compile(loop.step) if is_compiled else loop.step
    with pytest.raises(DistributeError, match=r"AdamW was made before .* after shard_module"):
        step(x)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_it_follows_with_its_state(mesh: xd.DeviceMesh, way: str, is_compiled: bool) -> None:
    ours, plain = Loop(), Loop()
    for loop in (ours, plain):
        loop.step(loop.x)
    where = put(ours.model, mesh, way)
    follow_parameters(ours.optimizer)
    x = xd.distribute_tensor(ours.x, where, [Replicate()] * where.ndim)
    step = xd.compile(ours.step) if is_compiled else ours.step
    for _ in range(2):
        step(x)
        plain.step(plain.x)
    torch.testing.assert_close(ours.whole(), plain.whole(), rtol=0, atol=1e-12)


def test_state_of_another_shape_is_refused(mesh: xd.DeviceMesh) -> None:
    loop = Loop()
    loop.optimizer = torch.optim.Adafactor(loop.model.parameters())
    loop.step(loop.x)
    put(loop.model, mesh, "shard_module")
    with pytest.raises(DistributeError, match=r"Adafactor has made steps: it keeps a tensor of"):
        follow_parameters(loop.optimizer)


def test_one_that_trains_the_old_parameters_is_left_alone(mesh: xd.DeviceMesh) -> None:
    """A copy of the model, say, has them now."""
    loop = Loop()
    plain = copy.copy(loop.model)
    plain._parameters = dict(loop.model._parameters)
    put(loop.model, mesh, "shard_module")
    plain(loop.x).sum().backward()
    loop.optimizer.step()
