"""A small Mixtral in plain PyTorch: the Llama, with two of four experts for each token.

Every expert runs on every token, and the weight of one that a token did not choose is zero. So
all shapes are known before a step runs, and both sides of `benchmarks.step` can say the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.llama_model import FeedForward, Llama, Sizes

__all__ = ["Mixtral", "MixtralSizes"]


@dataclass(frozen=True)
class MixtralSizes(Sizes):
    """The Llama's sizes, where `hidden` is one expert's, and those of the routing."""

    num_experts: int = 4
    num_chosen: int = 2


class Experts(nn.Module):
    """The Llama's feed-forward part once per expert, weighted by the routing."""

    def __init__(self, sizes: MixtralSizes) -> None:
        super().__init__()
        self.num_chosen = sizes.num_chosen
        self.gate = nn.Linear(sizes.dim, sizes.num_experts, bias=False)
        self.experts = nn.ModuleList(FeedForward(sizes) for _ in range(sizes.num_experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Takes and returns [batch, length, dim]."""
        scores = self.gate(x).float().softmax(-1)
        best, which = scores.topk(self.num_chosen, dim=-1)
        shares = (best / best.sum(-1, keepdim=True)).unsqueeze(-1)
        # [batch, length, experts]: zero for experts that a token did not choose.
        weights = (F.one_hot(which, len(self.experts)) * shares).sum(-2).to(x.dtype)
        outputs = torch.stack([expert(x) for expert in self.experts], dim=-1)
        return (outputs * weights.unsqueeze(-2)).sum(-1)


class Mixtral(Llama):
    """The whole model; takes token ids [batch, length], returns logits."""

    def __init__(self, sizes: MixtralSizes) -> None:
        super().__init__(sizes)
        for block in self.layers.values():
            block.feed_forward = Experts(sizes)
