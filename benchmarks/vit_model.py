"""A small vision transformer in plain PyTorch: patches by a linear map, pre-norm blocks, a mean.

Queries, keys and values have a weight each, so that heads can be cut over a mesh axis without
cutting through the three of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["ViT", "ViTSizes"]


@dataclass(frozen=True)
class ViTSizes:
    """The sizes of the model and of its batch."""

    image: int = 64
    patch: int = 8
    channels: int = 3
    dim: int = 256
    num_heads: int = 8
    hidden: int = 1024
    num_layers: int = 4
    classes: int = 256
    batch: int = 16


class Embedding(nn.Module):
    """Cuts images into patches, projects them, and adds where each patch lies."""

    def __init__(self, sizes: ViTSizes) -> None:
        super().__init__()
        self.patch = sizes.patch
        self.patches = nn.Linear(sizes.channels * sizes.patch**2, sizes.dim)
        num_patches = (sizes.image // sizes.patch) ** 2
        self.position = nn.Parameter(torch.randn(num_patches, sizes.dim) * 0.02)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Takes [batch, channels, image, image], returns [batch, patches, dim]."""
        batch, channels, height, width = images.shape
        rows, columns, side = height // self.patch, width // self.patch, self.patch
        cut = images.view(batch, channels, rows, side, columns, side).permute(0, 2, 4, 1, 3, 5)
        return self.patches(cut.reshape(batch, rows * columns, -1)) + self.position


class Attention(nn.Module):
    """Every patch attends to every patch."""

    def __init__(self, sizes: ViTSizes) -> None:
        super().__init__()
        self.head_dim = sizes.dim // sizes.num_heads
        self.wq = nn.Linear(sizes.dim, sizes.dim)
        self.wk = nn.Linear(sizes.dim, sizes.dim)
        self.wv = nn.Linear(sizes.dim, sizes.dim)
        self.wo = nn.Linear(sizes.dim, sizes.dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Takes and returns [batch, patches, dim]."""
        batch, length, _ = x.shape
        q, k, v = (
            linear(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
            for linear in (self.wq, self.wk, self.wv)
        )
        o = F.scaled_dot_product_attention(q, k, v)
        return self.wo(o.transpose(1, 2).contiguous().view(batch, length, -1))


class FeedForward(nn.Module):
    """Two linear layers with GELU between them."""

    def __init__(self, sizes: ViTSizes) -> None:
        super().__init__()
        self.w1 = nn.Linear(sizes.dim, sizes.hidden)
        self.w2 = nn.Linear(sizes.hidden, sizes.dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Takes and returns [batch, patches, dim]."""
        return self.w2(F.gelu(self.w1(x)))


class Block(nn.Module):
    """One layer."""

    def __init__(self, sizes: ViTSizes) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(sizes.dim, eps=1e-6)
        self.attention = Attention(sizes)
        self.ffn_norm = nn.LayerNorm(sizes.dim, eps=1e-6)
        self.feed_forward = FeedForward(sizes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Adds attention, then the feed-forward part."""
        h = x + self.attention(self.attention_norm(x))
        return h + self.feed_forward(self.ffn_norm(h))


class ViT(nn.Module):
    """The whole model; takes images [batch, channels, image, image], returns logits."""

    def __init__(self, sizes: ViTSizes) -> None:
        super().__init__()
        self.embedding = Embedding(sizes)
        self.layers = nn.ModuleDict({str(i): Block(sizes) for i in range(sizes.num_layers)})
        self.norm = nn.LayerNorm(sizes.dim, eps=1e-6)
        self.output = nn.Linear(sizes.dim, sizes.classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Returns the logits, [batch, classes]."""
        h = self.embedding(images)
        for layer in self.layers.values():
            h = layer(h)
        return self.output(self.norm(h.mean(1)))
