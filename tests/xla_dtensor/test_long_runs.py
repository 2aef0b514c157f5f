"""Many steps leave nothing behind that grows with them: no objects, no entries of caches."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import xla_dtensor as xd


@pytest.mark.only_on("jax")
@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
def test_steps_leave_no_objects(is_compiled: bool) -> None:
    """AdamW's corrections and the rate of a schedule are other floats in each step."""
    mesh = xd.init_device_mesh("xla", (2, 4))
    layers = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8))
    model: Any = xd.distribute_module(layers, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)

    def step(x: Any, y: Any) -> Any:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    run: Any = xd.compile(step) if is_compiled else step

    def train(steps: int) -> int:
        for _ in range(steps):
            batch = torch.randn(8, 16), torch.randint(0, 8, (8,))
            run(*(xd.distribute_tensor(each, mesh, [Shard(0), Replicate()]) for each in batch))
            schedule.step()
        gc.collect()
        return len(gc.get_objects())

    before = train(4)
    assert train(8) - before < 16
