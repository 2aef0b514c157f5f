"""Models that get their values on the mesh, for tests in one process and in several."""

from __future__ import annotations

import gc
import resource
import time
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import xla_dtensor as xd
from xla_dtensor.errors import RngStateError

__all__ = ["Net", "checksums", "materialized", "memory", "sharded", "unequal_seeds"]


class Net(nn.Module):
    """Layers of many kinds, with even and uneven shapes, tied weights and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(48, 24, padding_idx=3)
        self.linear = nn.Linear(24, 33)
        self.norm = nn.BatchNorm1d(33)
        self.attention = nn.MultiheadAttention(24, 4)
        self.head = nn.Linear(24, 48, bias=False)
        self.head.weight = self.embedding.weight
        self.linear.bias.requires_grad_(False)


def sharded(model: nn.Module, mesh: Any) -> nn.Module:
    """Put a model on a mesh of two axes: matrices cut over both, vectors over the first."""
    placements = {1: [Shard(0), Replicate()], 2: [Shard(0), Shard(1)]}
    made: dict[int, Any] = {}
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            if id(parameter) not in made:
                lies = placements.get(parameter.ndim, [Replicate(), Shard(0)])
                put = xd.distribute_tensor(parameter.detach(), mesh, lies)
                made[id(parameter)] = nn.Parameter(put, parameter.requires_grad)
            module._parameters[name] = made[id(parameter)]
    return xd.distribute_module(model, mesh)


def checksums(model: nn.Module) -> dict[str, int]:
    """A number per tensor that tells its bytes. All processes call this alike."""
    found: dict[str, int] = {}
    for name, tensor in model.state_dict().items():
        whole = tensor.cpu().contiguous().reshape(-1).view(torch.uint8)
        found[name] = zlib.crc32(whole.numpy().tobytes())
    return found


def materialized(rng: Any, mesh_shape: tuple[int, int]) -> dict[str, Any]:
    """Materialise the model, with seed 3; what it holds, and the shapes of this process's parts."""
    mesh = xd.init_device_mesh("xla", mesh_shape, mesh_dim_names=("dp", "tp"))
    with torch.device("meta"):
        model: Any = Net()
    model = xd.materialize(sharded(model, mesh), seed=3, rng=rng)
    shards = model.head.weight.addressable_shards()
    return {
        "checksums": checksums(model),
        "parts": [tuple(shard.data.shape) for shard in shards],
        "tied": model.head.weight is model.embedding.weight,
    }


def unequal_seeds(rng: Any) -> str:
    """What each process is told when the seeds differ."""
    import jax

    mesh = xd.init_device_mesh("xla", (8,), mesh_dim_names=("dp",))
    with torch.device("meta"):
        model = xd.fully_shard(nn.Linear(8, 8), mesh=mesh)
    try:
        xd.materialize(model, seed=jax.process_index(), rng=rng)
    except RngStateError as error:
        return str(error)
    return ""


def memory(rng: Any, layers: int, width: int) -> dict[str, float]:
    """MB of this process before and at most during a materialisation, and its seconds.

    The model is so many square matrices, cut over all devices.
    """
    devices = len(xd.get_runtime().device_ids())
    mesh = xd.init_device_mesh("xla", (devices,), mesh_dim_names=("dp",))
    # What is made once per process, programs and libraries, is not the model's.
    with torch.device("meta"):
        small = xd.fully_shard(nn.Linear(width, width), mesh=mesh)
    xd.materialize(small, seed=0, rng=rng)
    del small
    gc.collect()
    with torch.device("meta"):
        model: Any = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    xd.fully_shard(model, mesh=mesh)
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before, start = _status("VmRSS"), time.perf_counter()
    xd.materialize(model, seed=0, rng=rng)
    xd.get_runtime().synchronize()
    seconds = time.perf_counter() - start
    total = sum(p.numel() * p.itemsize for p in model.parameters()) / 1e6
    return {
        "model": total,
        "before": before,
        "after": _status("VmRSS"),
        "peak": _status("VmHWM"),
        "ever": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6,
        "seconds": seconds,
    }


def _status(name: str) -> float:
    text = Path("/proc/self/status").read_text()
    line = next(line for line in text.splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024 / 1e6
