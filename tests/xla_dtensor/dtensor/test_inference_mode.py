"""torch.inference_mode: what works with plain tensors from before works with DTensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

import xla_dtensor as xd
from xla_dtensor.runtimes import Runtime

pytestmark = pytest.mark.on_runtime
VIEWS: dict[str, Callable[[Any], Any]] = {
    "detach": lambda x: x.detach(),
    "data": lambda x: x.data,
    "t": lambda x: x.t(),
    "slice": lambda x: x[2:5, 1],
    "view": lambda x: x.view(2, 4, 4),
    "chunk": lambda x: x.chunk(2)[1],
}


@pytest.fixture
def mesh(runtime: Runtime) -> xd.DeviceMesh:
    return xd.init_device_mesh("xla", (8,), mesh_dim_names=("dp",))


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("inside", [False, True])
def test_views(mesh: xd.DeviceMesh, view: str, inside: bool) -> None:
    def run(x: Any) -> Any:
        seen = VIEWS[view](x)
        seen.add_(1)
        (x * 1).detach().mul_(3)  # a result of the mode
        return seen * 2, x

    plain = torch.arange(32.0).reshape(8, 4)
    made = xd.distribute_tensor(plain, mesh, [Shard(0)])
    with torch.inference_mode():
        x = xd.distribute_tensor(plain, mesh, [Shard(0)]) if inside else made
        results = run(x)
    for found, expected in zip(results, run(plain), strict=True):
        assert torch.equal(found.full_tensor().cpu(), expected)


def test_a_module(mesh: xd.DeviceMesh) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
    x = torch.randn(16, 4)
    expected = model(x).detach()
    model[1].reset_running_stats()  # pyright: ignore[reportCallIssue]
    xd.shard_module(model, mesh, {"*.weight": None, "*.bias": None, "1.*": None})
    given = xd.distribute_tensor(x, mesh, [Shard(0)])
    with torch.inference_mode():
        out = model(given)
        state = model.state_dict()
        whole = out.full_tensor().t()
    torch.testing.assert_close(whole.cpu(), expected.t(), atol=1e-5, rtol=1e-5)
    assert set(state) == set(model.state_dict())
    # What was made there can be used later; training goes on.
    loss = (model(given) * out).sum()
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())
