"""Blocks that the tests of scan_layers run, and plain torch's answer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.utils.checkpoint import checkpoint

import xla_dtensor as xd

DIM = 8
PLAN = {"**.wide.weight": ["tp", "dp"], "**.narrow.weight": ["dp", "tp"], "**.wide.bias": ["tp"]}


class Block(nn.Module):
    """A norm, an attention without projections and an MLP, around residuals."""

    def __init__(self, dropout: float = 0.0, hidden: int = 2 * DIM) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.wide = nn.Linear(DIM, hidden)
        self.narrow = nn.Linear(hidden, DIM)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, bias: Any = None, *, scale: float = 1.0) -> torch.Tensor:
        y = self.norm(x)
        y = y if bias is None else y + bias
        x = x + F.scaled_dot_product_attention(y, y, y, is_causal=True)
        hidden = xd.checkpoint_name(F.gelu(self.wide(y)), "hidden")
        return x + scale * self.dropout(self.narrow(hidden))


class Pair(nn.Module):
    """Two tensors in, two out; the second is no number that has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(DIM, DIM)

    def forward(self, state: tuple[torch.Tensor, torch.Tensor]) -> Any:
        x, count = state
        return x + torch.tanh(self.wide(x)), count + 1


class Doubling(torch.autograd.Function):
    """The identity, whose gradient is twice what it should be."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return 2 * grads[0]


class Odd(Block):
    """What JAX would differentiate otherwise: an own backward, in-place writes, a checkpoint."""

    def forward(self, x: torch.Tensor, bias: Any = None, *, scale: float = 1.0) -> torch.Tensor:
        x.mul_(0.9)  # the layer's own input
        normed = Doubling.apply(self.norm(x))
        y: Any = checkpoint(self.wide, normed, use_reentrant=False)
        y[..., ::2].mul_(0.5)
        return self.narrow(y).add_(x).clamp(min=-2)


class LowRank(nn.Module):
    """A frozen linear with a low-rank correction."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(DIM, DIM).requires_grad_(False)
        self.down, self.up = nn.Linear(DIM, 2, bias=False), nn.Linear(2, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.wide(x) + self.up(self.down(x)))


class Model(nn.Module):
    """Layers with something before and behind them."""

    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.layers = layers

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        x = self.first(x)
        if isinstance(self.layers, xd.ScannedLayers):
            return self.layers(x, *args, **kwargs)
        for layer in self.layers:
            x = layer(x, *args, **kwargs)
        return x


def model(make: Callable[[], nn.Module] = Block, count: int = 3) -> Any:
    torch.manual_seed(0)
    return Model(nn.ModuleList(make() for _ in range(count)))


def scanned(plain: Any, remat: Any = "full") -> Any:
    made = copy.deepcopy(plain)
    made.layers = xd.scan_layers(made.layers, remat)
    return made


def placed(plain: Any, mesh: Any) -> Any:
    names = [name for name, _ in plain.named_parameters()]
    rules = {k: v for k, v in PLAN.items() if any(n.endswith(k.removeprefix("**")) for n in names)}
    return xd.shard_module(plain, mesh, rules, unmatched="replicate")


def batch(seed: int = 1) -> torch.Tensor:
    return torch.randn(4, 6, DIM, generator=torch.Generator().manual_seed(seed))


def on(mesh: Any, value: torch.Tensor) -> Any:
    return xd.distribute_tensor(value, mesh, [Shard(0), Replicate()])


def trainer(net: Any, optimizer: torch.optim.Optimizer, *, clip: bool = True) -> Any:
    """A step of training; returns the loss."""

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = net(x).square().mean()
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


@dataclass
class Trained:
    losses: list[float]
    parameters: dict[str, torch.Tensor]
    step: Any


def train(
    net: nn.Module, put: Callable[[torch.Tensor], Any], *, compiled: bool, steps: int = 3
) -> Trained:
    """Train for a few steps, with AdamW; return losses and what the parameters are."""
    chosen = [p for p in net.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(chosen, lr=1e-2)
    step = trainer(net, optimizer, clip=False)
    run = xd.compile(step) if compiled else step
    losses = [float(run(put(batch(i))).item()) for i in range(steps)]
    found = {name: p.detach().cpu() for name, p in net.named_parameters()}
    return Trained(losses, found, run)
