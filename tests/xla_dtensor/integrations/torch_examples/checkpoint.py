"""A model and its optimizer, saved and loaded by torch.distributed.checkpoint as one object."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed.checkpoint
import torch.multiprocessing
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard

torch.set_default_dtype(torch.float64)
dist: Any = torch.distributed
dcp: Any = torch.distributed.checkpoint
mp: Any = torch.multiprocessing
accelerator: Any = torch.accelerator


class Application(Stateful):
    """What is saved."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        """Return the states of both."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the states of both."""
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optimizer"],
        )


def application(seed: int, device: torch.device) -> Application:
    """Return a model after one step."""
    torch.manual_seed(seed)
    model: Any = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8)).to(device)
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.rand(8, 16, device=device)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return Application(model, optimizer)


def values(state: Any) -> Any:
    """Return weights and moments as tensors."""
    if isinstance(state, dict):
        parts: dict[str, Any] = state
        return {key: values(each) for key, each in parts.items() if key != "param_groups"}
    return state.full_tensor() if hasattr(state, "full_tensor") else state


def run(rank: int, world_size: int, result: str, folder: str) -> None:
    """Save, load into a model on the devices, and into plain tensors."""
    os.environ.setdefault("MASTER_ADDR", "localhost")
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    accelerator.set_device_index(rank)
    device = accelerator.current_accelerator()
    first, second = application(1, device), application(2, device)
    dcp.save({"app": first}, checkpoint_id=folder)
    dcp.load({"app": second}, checkpoint_id=folder)
    shapes = {name: each.shape for name, each in first.model.state_dict().items()}
    plain = {f"app.model.{name}": torch.zeros(shape) for name, shape in shapes.items()}
    dcp.load(plain, checkpoint_id=folder)
    saved, loaded = (values(each.state_dict()) for each in (first, second))
    if rank == 0:
        torch.save({"saved": saved, "loaded": loaded, "plain": plain}, result)
    dist.destroy_process_group()


if __name__ == "__main__":
    world_size = accelerator.device_count()
    mp.spawn(run, args=(world_size, *sys.argv[1:]), nprocs=world_size, join=True)
