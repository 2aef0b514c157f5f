"""The benchmarked step in PyTorch: a plain model, the same annotated, and an ordinary step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Placement, Replicate, Shard

from benchmarks.llama_model import Llama
from benchmarks.mixtral_model import Mixtral, MixtralSizes
from benchmarks.resnet_model import ResNet, ResNetSizes
from benchmarks.step_plan import ACTIVATIONS, AXES, BETAS, CLIP, DECAY, EPS, RATE, axes_of
from benchmarks.step_sizes import AnySizes
from benchmarks.vit_model import ViT, ViTSizes

__all__ = ["Batch", "annotated", "kept_outputs", "made", "placements_of", "training_step"]

Batch = tuple[torch.Tensor, torch.Tensor]
Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def made(sizes: AnySizes, seed: int = 0) -> tuple[Any, Batch]:
    """Returns a model and a batch (inputs, targets), the same for the same seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if isinstance(sizes, ViTSizes | ResNetSizes):
            images = torch.randn(sizes.batch, sizes.channels, sizes.image, sizes.image)
            model = ViT(sizes) if isinstance(sizes, ViTSizes) else ResNet(sizes)
            return model, (images, torch.randint(0, sizes.classes, (sizes.batch,)))
        shape = (sizes.batch, sizes.length)
        tokens, targets = (torch.randint(0, sizes.vocabulary, shape) for _ in range(2))
        model = Mixtral(sizes) if isinstance(sizes, MixtralSizes) else Llama(sizes)
        return model, (tokens, targets)


def placements_of(axes: Sequence[str | None]) -> list[Placement]:
    """Returns placements over the axes dp and tp from the axis of each dim."""
    return [Shard(axes.index(axis)) if axis in axes else Replicate() for axis in AXES]


def kept_outputs(model: Any) -> Iterator[tuple[Any, str]]:
    """Yields the modules whose output the plan places, and where: a key of ``ACTIVATIONS``."""
    if isinstance(model, ResNet):
        for module in (model.stem, *model.layers.values()):
            yield module, "features"
        yield model.output, "classes"
        return
    yield (model.embedding if isinstance(model, ViT) else model.tok_embeddings), "residual"
    for block in model.layers.values():
        yield block.attention, "residual"
        yield block.feed_forward, "residual"
    yield model.output, ("classes" if isinstance(model, ViT) else "logits")


def annotated(model: Any, mesh: Any) -> Any:
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
    for module, name in kept_outputs(model):
        _keep(module, placements_of(ACTIVATIONS[name]))
    return model


def _keep(module: nn.Module, placements: list[Placement]) -> None:
    def keep(_module: Any, _given: Any, result: Any) -> Any:
        return result.redistribute(placements=placements)

    module.register_forward_hook(keep)


def training_step(model: nn.Module, **options: Any) -> Step:
    """Returns an ordinary PyTorch step: forward, backward, clipping, AdamW.

    Args:
        model: Takes inputs, returns logits.
        **options: More arguments of AdamW.
    """
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=RATE, betas=BETAS, eps=EPS, weight_decay=DECAY, **options
    )

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = model(inputs).flatten(0, -2).float()
        loss = F.cross_entropy(logits, targets.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step
