"""Meshes of two and three axes: groups, parts, hybrid sharding, hybrid beside tensor parallel."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

torch.set_default_dtype(torch.float64)
dist: Any = torch.distributed
DEVICE = "cuda"
SHAPE_2D, SHAPE_3D = (2, 4), (2, 2, 2)


def trained(model: Any) -> dict[str, Any]:
    """Take two steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        torch.manual_seed(step)
        model(torch.rand(16, 10)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    state: dict[str, Any] = model.state_dict()
    return {name: each.full_tensor() for name, each in state.items()}


def layers() -> nn.Sequential:
    """Return two layers, always the same."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 6))


mesh_2d = init_device_mesh(DEVICE, SHAPE_2D, mesh_dim_names=("replicate", "shard"))
sizes = [dist.get_world_size(mesh_2d.get_group(axis)) for axis in ("replicate", "shard")]
hybrid = trained(fully_shard(layers(), mesh=mesh_2d))

mesh_3d = init_device_mesh(DEVICE, SHAPE_3D, mesh_dim_names=("replicate", "shard", "tp"))
hsdp_mesh, tp_mesh = mesh_3d["replicate", "shard"], mesh_3d["tp"]
sizes += [dist.get_world_size(hsdp_mesh["shard"].get_group()), tp_mesh.size()]
plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
model: Any = parallelize_module(layers(), tp_mesh, plan)
both = trained(fully_shard(model, mesh=hsdp_mesh))
if dist.get_rank() == 0:
    torch.save({"sizes": sizes, "hybrid": hybrid, "weights": both}, sys.argv[1])
dist.destroy_process_group()
