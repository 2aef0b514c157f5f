"""The training step of `benchmarks.step_jax` in PyTorch: a plain model, then an annotated one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Placement, Replicate, Shard

from benchmarks.llama_model import Llama, Sizes
from benchmarks.step_plan import ACTIVATIONS, AXES, BETAS, CLIP, DECAY, EPS, RATE, axes_of

__all__ = ["annotated", "made", "placements_of", "training_step"]


def made(sizes: Sizes, seed: int = 0) -> tuple[Llama, torch.Tensor, torch.Tensor]:
    """Returns a model and a batch, the same for the same seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        shape = (sizes.batch, sizes.length)
        tokens, targets = (torch.randint(0, sizes.vocabulary, shape) for _ in range(2))
        return Llama(sizes), tokens, targets


def placements_of(axes: Sequence[str | None]) -> list[Placement]:
    """Returns placements over the axes dp and tp from the axis of each dim."""
    return [Shard(axes.index(axis)) if axis in axes else Replicate() for axis in AXES]


def annotated(model: Llama, mesh: Any) -> Llama:
    """Distributes the parameters, and keeps activations where the plan says.

    Args:
        model: Changed in place.
        mesh: Axes dp and tp.
    """
    import xla_dtensor as xd

    def place(name: str, module: nn.Module, mesh: Any) -> None:
        for kind, parameter in list(module.named_parameters(recurse=False)):
            placements = placements_of(axes_of(f"{name}.{kind}"))
            lies: Any = xd.distribute_tensor(parameter, mesh, placements)
            setattr(module, kind, nn.Parameter(lies))

    xd.distribute_module(model, mesh, place)
    _keep(model.tok_embeddings, "residual")
    for block in model.layers.values():
        _keep(block.attention, "residual")
        _keep(block.feed_forward, "residual")
    _keep(model.output, "logits")
    return model


def _keep(module: Any, place: str) -> None:
    placements = placements_of(ACTIVATIONS[place])
    module.register_forward_hook(lambda _m, _a, out: out.redistribute(placements=placements))


def training_step(model: nn.Module) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Returns an ordinary PyTorch step: forward, backward, clipping, AdamW."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=RATE, betas=BETAS, eps=EPS, weight_decay=DECAY
    )

    def step(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step
