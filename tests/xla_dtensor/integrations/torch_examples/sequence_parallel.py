"""The same layers, of which each rank has rows of its own before and after."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)

accelerator: Any = torch.accelerator
if accelerator.device_count() < 1:
    sys.exit("no devices")
device_type = accelerator.current_accelerator().type
world_size = int(os.environ["WORLD_SIZE"])
mesh = init_device_mesh(device_type, (world_size,))
model = nn.Sequential(nn.Linear(12, 40), nn.ReLU(), nn.Linear(40, 6)).to(device_type)
rows = Shard(0)
plan = {"0": ColwiseParallel(input_layouts=rows), "2": RowwiseParallel(output_layouts=rows)}
model = parallelize_module(model, mesh, plan)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True)
for _ in range(3):
    x = torch.rand(24, 12, device=device_type)
    model(x).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()

weights: dict[str, Any] = {name: each.full_tensor() for name, each in model.state_dict().items()}
if mesh.get_rank() == 0:
    torch.save({"weights": weights}, sys.argv[1])
torch.distributed.destroy_process_group()
