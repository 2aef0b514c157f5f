"""A small training step that has run, for tests of what is said about running steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import xla_dtensor as xd

MEGATRON = {"0.weight": ["tp", None], "1.weight": [None, "tp"]}


def trained(
    mesh: xd.DeviceMesh,
    plan: Mapping[str, Sequence[str | None]] = MEGATRON,
    model: nn.Module | None = None,
    momentum: float = 0.9,
) -> tuple[nn.Module, xd.CompiledStep]:
    """Compiles a step of SGD on a (dp, tp) mesh and calls it twice.

    Args:
        mesh: To train on.
        plan: Axes of the parameters' dims, by name.
        model: Takes 16 features and gives 16. None: two linear layers.
        momentum: Of the optimizer.

    Returns:
        The sharded model and its step.
    """
    torch.manual_seed(0)
    if model is None:
        model = nn.Sequential(nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False))
    sharded = xd.shard_module(model, mesh, plan)
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1, momentum=momentum)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = sharded(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    compiled = xd.compile(step)
    x = xd.distribute_tensor(torch.ones(8, 16), mesh, [Shard(0), Replicate()])
    for _ in range(2):
        compiled(x)
    return sharded, compiled
