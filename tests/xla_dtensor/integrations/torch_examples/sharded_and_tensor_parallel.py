"""A decoder, sequence and tensor parallel over one axis, fully sharded over the other."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
VOCABULARY, WIDTH, HEADS = 32, 16, 4


class Attention(nn.Module):
    """Heads, as many as the width that comes has."""

    def __init__(self) -> None:
        super().__init__()
        self.wq = nn.Linear(WIDTH, WIDTH, bias=False)
        self.wk = nn.Linear(WIDTH, WIDTH, bias=False)
        self.wv = nn.Linear(WIDTH, WIDTH, bias=False)
        self.wo = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        shape = (x.shape[0], x.shape[1], -1, WIDTH // HEADS)
        q, k, v = (w(x).view(shape).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.wo(mixed.transpose(1, 2).reshape(*shape[:2], -1))


class Block(nn.Module):
    """Attention and a gated pair of layers, both beside a straight way."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention = Attention()
        self.gate = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), None)
        return x + self.down(F.silu(self.gate(self.norm(x))))


class Decoder(nn.Module):
    """Two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.RMSNorm(WIDTH)
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.output(self.norm(x))


accelerator: Any = torch.accelerator
if not accelerator.is_available() or accelerator.device_count() < 1:
    sys.exit("no devices")
rank = int(os.environ["RANK"])
world_size = int(os.environ["WORLD_SIZE"])
tp_size = 2 if world_size % 2 == 0 else 1
device_type = accelerator.current_accelerator().type
mesh = init_device_mesh(device_type, (world_size // tp_size, tp_size), mesh_dim_names=("dp", "tp"))
tp_mesh, dp_mesh = mesh["tp"], mesh["dp"]

model = Decoder().to(device_type)
outer: dict[str, Any] = {
    "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "output": ColwiseParallel(
        input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
    ),
}
model = parallelize_module(model, tp_mesh, outer)
blocks: Any = model.blocks
for block in blocks:
    plan: dict[str, Any] = {
        "attention_norm": SequenceParallel(),
        "attention": PrepareModuleInput(
            input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)
        ),
        "attention.wq": ColwiseParallel(),
        "attention.wk": ColwiseParallel(),
        "attention.wv": ColwiseParallel(),
        "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "gate": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }
    parallelize_module(block, tp_mesh, plan)
    fully_shard(block, mesh=dp_mesh)
fully_shard(model, mesh=dp_mesh)

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
losses: list[float] = []
for step in range(3):
    torch.manual_seed(step)
    tokens = torch.randint(VOCABULARY, (8, 9), device=device_type)
    with loss_parallel():
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.detach().item())

weights = {name: each.full_tensor() for name, each in model.state_dict().items()}
if rank == 0:
    torch.save({"losses": losses, "weights": weights}, sys.argv[1])
torch.distributed.destroy_process_group()
