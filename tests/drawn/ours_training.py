"""The words of a drawn training on DTensors: to shard a network, to compile a step."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import xla_dtensor as xd
from tests.drawn.training import TRAINING_WORDS, Net

__all__ = ["training_words"]


def training_words(mesh: Any) -> dict[str, Any]:
    """The words of a training on a mesh."""
    xd.install()  # parallelize_module and checkpoint are torch's own

    def sharded(model: Net, how: str, *, checkpoint: bool, seed: int) -> tuple[Net, Any]:
        model.checkpoints = checkpoint
        _HOW[how](model, mesh, random.Random(seed))
        model.seen = xd.distribute_tensor(model.seen, mesh)
        return model, torch.clone if how in ("both", "fully_shard") else put

    def put(value: torch.Tensor) -> Any:
        rows = [Replicate() if name == "tp" else Shard(0) for name in mesh.mesh_dim_names]
        return xd.distribute_tensor(value, mesh, rows)

    return {
        **TRAINING_WORDS,
        "sharded": sharded,
        "compiled": xd.compile,
        "narrow": lambda: torch.autocast(mesh.device_type, torch.bfloat16),
    }


def _annotated(model: Net, mesh: Any, chance: random.Random) -> None:
    """Each parameter lies anyhow."""
    seen: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in seen:
                dims = [*range(parameter.ndim), None]
                drawn = [chance.choice(dims) for _ in mesh.shape]
                lying = [Replicate() if dim is None else Shard(dim) for dim in drawn]
                placed = xd.distribute_tensor(parameter.detach(), mesh, lying)
                seen[id(parameter)] = nn.Parameter(placed)
            module.register_parameter(name, seen[id(parameter)])
    xd.distribute_module(model, mesh)


def _fully_sharded(model: Net, mesh: Any, chance: random.Random) -> None:
    for layer in model.layers:
        xd.fully_shard(layer, mesh=mesh)
    xd.fully_shard(model, mesh=mesh, reshard_after_forward=chance.random() < 0.5)


def _tensor_parallel(model: Net, mesh: Any, to_local: bool) -> None:
    rows = RowwiseParallel(use_local_output=to_local)
    for layer in model.layers:
        gate = {} if layer.gate is None else {"gate": ColwiseParallel()}
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": rows, **gate})


def _tensor_parallel_only(model: Net, mesh: Any, _: random.Random) -> None:
    _tensor_parallel(model, mesh, to_local=False)
    xd.distribute_module(model, mesh)


def _both(model: Net, mesh: Any, _: random.Random) -> None:
    _tensor_parallel(model, mesh["tp"], to_local=True)
    for layer in model.layers:
        xd.fully_shard(layer, mesh=mesh["dp"])
    xd.fully_shard(model, mesh=mesh["dp"])


def _scanned(model: Net, mesh: Any, chance: random.Random) -> None:
    blocks = nn.ModuleList(model.layers)
    model.layers = xd.scan_layers(blocks, remat=chance.choice(("full", "none")))
    dims = chance.choice(([None, "tp"], ["dp", None], ["tp", "dp"]))
    xd.shard_module(model, mesh, {"layers.*.up.weight": dims}, unmatched="replicate")


_HOW = {
    "annotated": _annotated,
    "fully_shard": _fully_sharded,
    "tensor": _tensor_parallel_only,
    "both": _both,
    "scan": _scanned,
}
