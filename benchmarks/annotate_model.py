"""What `benchmarks.annotate` traces: a transformer step with seven annotations in each layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

BATCH, LENGTH, DIM, HEADS = 8, 32, 128, 4

Mark = Callable[[Any, tuple[Any, ...]], Any]


def unmarked(tensor: Any, partition_spec: tuple[Any, ...]) -> Any:
    """The annotation that is none."""
    return tensor


class Block(nn.Module):
    """A pre-norm transformer block; its seven activations are marked."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.out = nn.Linear(DIM, DIM)
        self.up = nn.Linear(DIM, 4 * DIM)
        self.down = nn.Linear(4 * DIM, DIM)

    def forward(self, x: Tensor, mark: Mark) -> Tensor:
        """x: [batch, length, dim], and so the result."""
        parts = self.qkv(self.norm1(x)).view(BATCH, LENGTH, 3, HEADS, -1).unbind(2)
        q, k, v = (mark(part + 0, ("dp", None, "tp", None)).transpose(1, 2) for part in parts)
        weights = (q @ k.transpose(2, 3) / (DIM // HEADS) ** 0.5).softmax(-1)
        attended = mark((weights @ v).transpose(1, 2).flatten(2), ("dp", None, "tp"))
        x = mark(x + self.out(attended), ("dp", None, None))
        hidden = mark(self.up(self.norm2(x)), ("dp", None, "tp"))
        return mark(x + self.down(functional.gelu(hidden)), ("dp", None, None))


class Training:
    """A model with its optimizer, and the step that is traced.

    Args:
        layers: Number of blocks.
        place: Puts the model on the devices; returns it.
    """

    def __init__(self, layers: int, place: Callable[[nn.Module], nn.Module]) -> None:
        torch.manual_seed(0)
        self.blocks: Any = place(nn.ModuleList([Block() for _ in range(layers)]))
        self.optimizer = torch.optim.AdamW(self.blocks.parameters(), lr=1e-3, foreach=False)
        # The optimizer's state, made before anything is traced.
        for parameter in self.blocks.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self, x: Tensor, y: Tensor, mark: Mark) -> Tensor:
        """Forward, backward, optimizer."""
        hidden = x
        for block in self.blocks:
            hidden = block(hidden, mark)
        loss = functional.mse_loss(hidden, y)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()
