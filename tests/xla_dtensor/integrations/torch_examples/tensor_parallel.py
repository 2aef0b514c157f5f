"""A layer cut by columns, then one by rows: the mesh as large as the world, the accelerator's."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)


class Mlp(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(12, 40)
        self.narrow = nn.Linear(40, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.narrow(self.wide(x).relu())


accelerator: Any = torch.accelerator
if accelerator.device_count() < 1:
    sys.exit("no devices")
device_type = accelerator.current_accelerator().type
world_size = int(os.environ["WORLD_SIZE"])
mesh = init_device_mesh(device_type, (world_size,))
model = Mlp().to(device_type)
plan = {"wide": ColwiseParallel(), "narrow": RowwiseParallel()}
model = parallelize_module(model, mesh, plan)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True)
losses: list[float] = []
for step in range(3):
    torch.manual_seed(step)
    x = torch.rand(20, 12, device=device_type)
    loss = model(x).square().sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.detach().item())

weights = {name: each.full_tensor() for name, each in model.state_dict().items()}
if mesh.get_rank() == 0:
    torch.save({"losses": losses, "weights": weights}, sys.argv[1])
torch.distributed.destroy_process_group()
