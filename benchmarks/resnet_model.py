"""A small ResNet in plain PyTorch, for small images: batch norm, basic blocks, a mean.

Batch norm has running statistics, as ResNets do: buffers that a training step changes. Over a mesh
the batch is the whole one, as a global view has it; PyTorch calls that SyncBatchNorm.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["ResNet", "ResNetSizes"]


@dataclass(frozen=True)
class ResNetSizes:
    """The sizes of the model and of its batch; each stage after the first halves the image."""

    image: int = 32
    channels: int = 3
    widths: tuple[int, ...] = (32, 64, 128)
    blocks: int = 2
    classes: int = 256
    batch: int = 32

    def layers(self) -> list[tuple[int, int, int]]:
        """Returns the channels before and after each block, and its stride."""
        found: list[tuple[int, int, int]] = []
        before = self.widths[0]
        for stage, width in enumerate(self.widths):
            for block in range(self.blocks):
                found.append((before, width, 2 if stage > 0 and block == 0 else 1))
                before = width
        return found


class Stem(nn.Module):
    """The first convolution. The image is small: nothing is pooled here."""

    def __init__(self, sizes: ResNetSizes) -> None:
        super().__init__()
        self.conv = _convolution(sizes.channels, sizes.widths[0], 3, 1)
        self.norm = nn.BatchNorm2d(sizes.widths[0])

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Takes [batch, channels, image, image]."""
        return F.relu(self.norm(self.conv(images)))


class Block(nn.Module):
    """Two convolutions, and a shortcut that is a third where the shape changes."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _convolution(before, width, 3, stride)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = _convolution(width, width, 3, 1)
        self.norm2 = nn.BatchNorm2d(width)
        self.changes = before != width or stride != 1
        if self.changes:
            self.shortcut = _convolution(before, width, 1, stride)
            self.shortcut_norm = nn.BatchNorm2d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Adds what the convolutions find to the shortcut."""
        found = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(found + (self.shortcut_norm(self.shortcut(x)) if self.changes else x))


class ResNet(nn.Module):
    """The whole model; takes images [batch, channels, image, image], returns logits."""

    def __init__(self, sizes: ResNetSizes) -> None:
        super().__init__()
        self.stem = Stem(sizes)
        blocks = {str(i): Block(*shape) for i, shape in enumerate(sizes.layers())}
        self.layers = nn.ModuleDict(blocks)
        self.output = nn.Linear(sizes.widths[-1], sizes.classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Returns the logits, [batch, classes]."""
        h = self.stem(images)
        for layer in self.layers.values():
            h = layer(h)
        return self.output(h.mean((2, 3)))


def _convolution(before: int, after: int, side: int, stride: int) -> nn.Conv2d:
    return nn.Conv2d(before, after, side, stride=stride, padding=side // 2, bias=False)
