"""Plans that tests let another process compile."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import xla_dtensor as xd


def linear(mesh: Any, width: int = 256) -> Any:
    """A linear layer, its rows cut over the first axis."""
    with torch.device("meta"):
        model = nn.Linear(width, width, bias=False)
    xd.shard_module(model, mesh, {"weight": [mesh.mesh_dim_names[0], None]})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    batch = torch.empty(64, width, device="meta")
    return model, step, (batch,), ([Shard(0)] + [Replicate()] * (mesh.ndim - 1),)


def endless(mesh: Any, note: str | None = None) -> Any:
    """A plan that never comes; `note` is a file for the number of its process."""
    if note is not None:
        Path(note).write_text(str(os.getpid()))
    time.sleep(600)


def aborting(mesh: Any) -> Any:
    """What libtpu does about some meshes."""
    os.abort()


def for_job(job: Any) -> Any:
    """The linear layer as a job's model."""
    with torch.device("meta"):
        model = nn.Linear(256, 256, bias=False)
        batch = torch.empty(64, 256)

    def make_step(model: nn.Module, mesh: Any) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step

    return model, make_step, (batch,), ((job.axis_names, None),)


def large_temporaries(job: Any) -> Any:
    """A layer that keeps 8 results of 2 GiB on each of 4 devices: more than a v5e has."""
    return _large(65536, 8, lambda x, loss: loss)


def large_results(job: Any) -> Any:
    """A step that returns as much as it is given: 12 GiB on each of 4 devices."""
    return _large(393216, 0, lambda x, loss: x + loss)


def _large(rows: int, turns: int, result: Any) -> Any:
    width = 8192
    with torch.device("meta"):
        model = nn.Linear(width, width, bias=False)
        batch = torch.empty(4 * rows, width)

    def make_step(model: nn.Module, mesh: Any) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            y = x if turns else x[:64]
            for _ in range(max(1, turns)):
                y = torch.tanh(model(y))
            loss = y.square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return result(x, loss.detach())

        return step

    return model, make_step, (batch,), (("fsdp", None),)


class Gated(nn.Module):
    """Two projections of one input, as gate and up of an MLP are."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, 2 * width, bias=False)
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))


def gated(mesh: Any, width: int = 512) -> Any:
    """A Megatron MLP in bfloat16 after a replicated layer, forward and backward."""
    with torch.device("meta"):
        model = Gated(width).bfloat16()
    columns, rows = ["tp", None], [None, "tp"]
    plan = {"gate.weight": columns, "up.weight": columns, "down.weight": rows}
    xd.shard_module(model, mesh, {**plan, "first.weight": [None, None]})

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).float().square().mean()
        loss.backward()
        return loss

    batch = torch.empty(64, width, device="meta", dtype=torch.bfloat16)
    return model, step, (batch,), ([Shard(0), Replicate()],)
