"""fully_shard without a mesh, from the meta device, saved whole and read again in two ways."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

dist: Any = torch.distributed
accelerator: Any = torch.accelerator
VOCABULARY, WIDTH = 32, 16


class Block(nn.Module):
    """Two layers beside a straight way."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Words, places, blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(8, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block(), Block()])
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.output(x).float()


def sharded(options: dict[str, Any]) -> Any:
    """Return the model, without memory."""
    with torch.device("meta"):
        model: Any = Model()
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    assert FSDPModule in type(model).__mro__
    for parameter in model.parameters():
        assert parameter.placements == (Shard(0),)
    model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1]])
    model.blocks[1].set_modules_to_backward_prefetch([model.blocks[0]])
    return model


def load_by_dtensor(model: Any, whole: dict[str, torch.Tensor]) -> None:
    """Distribute each tensor as its parameter is."""
    parts: dict[str, Any] = {}
    for name, meta in model.state_dict().items():
        part = distribute_tensor(whole[name], meta.device_mesh, meta.placements)
        parts[name] = nn.Parameter(part)
    model.load_state_dict(parts, strict=False, assign=True)


def save_by_dtensor(model: Any) -> dict[str, torch.Tensor]:
    """Return whole tensors on the host."""
    assert all(isinstance(each, DTensor) for each in model.state_dict().values())
    return {name: each.full_tensor().cpu() for name, each in model.state_dict().items()}


def train(model: Any, optimizer: torch.optim.Optimizer, device: torch.device) -> list[float]:
    """Take two steps."""
    losses: list[float] = []
    for step in range(2):
        torch.manual_seed(step)
        model.unshard()
        tokens = torch.randint(0, VOCABULARY, (16, 8), device=device)
        loss = model(tokens).logsumexp(-1).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.1)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().item())
    return losses


def main(result: str, weights: str, param_dtype: str) -> None:
    """Train from saved weights, save, and train on from what was saved."""
    if not accelerator.is_available() or accelerator.device_count() < 1:
        sys.exit("no devices")
    rank = int(os.environ["LOCAL_RANK"])
    device = torch.device(f"{accelerator.current_accelerator()}:{rank}")
    accelerator.device_index(rank)
    backend = dist.get_default_backend_for_device(device)
    dist.init_process_group(backend=backend, device_id=device)
    dtype = getattr(torch, param_dtype)
    options = {"mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)}

    model = sharded(options)
    load_by_dtensor(model, torch.load(weights, mmap=True, weights_only=True, map_location="cpu"))
    model.unshard()
    assert model.output.weight.dtype == dtype
    model.reshard()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = train(model, optimizer, device)

    everything = StateDictOptions(full_state_dict=True, cpu_offload=True)
    kept = get_model_state_dict(model, options=everything)
    assert {type(each) for each in kept.values()} == (
        {torch.Tensor} if dist.get_rank() == 0 else set()
    )
    moments = get_optimizer_state_dict(model, optimizer, options=everything)
    second = sharded(options)
    second.to_empty(device=device)
    whole = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(second, kept, options=whole)
    optimizer = torch.optim.Adam(second.parameters(), lr=1e-2)
    set_optimizer_state_dict(second, optimizer, moments, options=whole)
    losses += train(second, optimizer, device)

    values = save_by_dtensor(second)
    if dist.get_rank() == 0:
        torch.save({"losses": losses, "weights": values}, Path(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
