"""Tiny models as Hugging Face's transformers builds them, unmodified, with a batch each."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Placement, Replicate, Shard

import xla_dtensor as xd

__all__ = [
    "MODELS",
    "Example",
    "Trained",
    "distributed",
    "made",
    "steps_beside_pytorch",
    "training",
]

VOCABULARY = 128
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
}


@dataclass(frozen=True)
class Example:
    """A model and what it trains on.

    Args:
        model: In training mode.
        batches: The first dim of every tensor is the batch.
        loss: From the model and a batch.
    """

    model: Any
    batches: list[tuple[torch.Tensor, torch.Tensor]]
    loss: Callable[..., torch.Tensor]


def _of_tokens(model: Any, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return model(input_ids=tokens, labels=labels).loss


def _of_pixels(model: Any, pixels: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return model(pixel_values=pixels, labels=labels).loss


def _llama(hf: Any) -> Any:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**_SIZES))


def _gpt2(hf: Any) -> Any:
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = hf.GPT2Config(
        vocab_size=VOCABULARY, n_embd=64, n_layer=2, n_head=8, n_positions=64, **dropout
    )
    return hf.GPT2LMHeadModel(config)


def _mixtral(hf: Any) -> Any:
    config = hf.MixtralConfig(
        **_SIZES, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True
    )
    return hf.MixtralForCausalLM(config)


def _t5(hf: Any) -> Any:
    config = hf.T5Config(
        vocab_size=VOCABULARY,
        d_model=64,
        d_kv=8,
        d_ff=128,
        num_layers=2,
        num_heads=8,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return hf.T5ForConditionalGeneration(config)


def _vit(hf: Any) -> Any:
    config = hf.ViTConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=8,
        intermediate_size=128,
        image_size=32,
        patch_size=8,
        num_labels=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return hf.ViTForImageClassification(config)


MODELS: dict[str, Callable[[Any], Any]] = {
    "llama": _llama,
    "gpt2": _gpt2,
    "mixtral": _mixtral,
    "t5": _t5,
    "vit": _vit,
}


def made(name: str, hf: Any) -> Example:
    """Return one of `MODELS`, always the same.

    Args:
        name: Its name.
        hf: The package transformers.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = MODELS[name](hf).train()
        if name == "vit":
            images = [(torch.randn(8, 3, 32, 32), torch.randint(0, 16, (8,))) for _ in range(3)]
            return Example(model, images, _of_pixels)
        texts = [torch.randint(1, VOCABULARY, (8, 24)) for _ in range(3)]
        return Example(model, [(text, text.clone()) for text in texts], _of_tokens)


def lying(parameter: torch.Tensor) -> list[Placement]:
    """Cut every matrix over both axes where its sizes divide; XLA has to make sense of the rest."""
    cut: list[Placement] = [Replicate(), Replicate()]
    if parameter.ndim >= 2:
        for axis, (dim, size) in enumerate(((parameter.ndim - 1, 2), (parameter.ndim - 2, 4))):
            if parameter.shape[dim] % size == 0:
                cut[axis] = Shard(dim)
    return cut


def distributed(model: Any, mesh: xd.DeviceMesh) -> Any:
    """Put a model's parameters on a (2, 4) mesh."""

    def place(name: str, module: nn.Module, mesh: Any) -> None:
        for kind, parameter in list(module.named_parameters(recurse=False)):
            lies: Any = xd.distribute_tensor(parameter, mesh, lying(parameter))
            setattr(module, kind, nn.Parameter(lies))

    xd.distribute_module(model, mesh, place)
    model.tie_weights()
    return model


def training(example: Example, model: Any, steps: int) -> tuple[Any, Any]:
    """Return a step of training and the scheduler of its rate."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)

    def step(*batch: torch.Tensor) -> torch.Tensor:
        loss = example.loss(model, *batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step, scheduler


@dataclass(frozen=True)
class Trained:
    """What became of a model and of its twin in plain PyTorch.

    Args:
        losses: Of each step.
        wanted: The twin's.
        parameters: How far each parameter is from the twin's at most, by its path.
        traces: How often the step was traced.
    """

    losses: list[float]
    wanted: list[float]
    parameters: dict[str, float]
    traces: int


def steps_in_float64(name: str, steps: int) -> Trained:
    """Do the same as :func:`steps_beside_pytorch` in float64, in a process of its own."""
    torch.set_default_dtype(torch.float64)
    return steps_beside_pytorch(name, steps)


def steps_beside_pytorch(name: str, steps: int) -> Trained:
    """Train one of `MODELS` in a compiled step on a (2, 4) mesh, and its twin in plain PyTorch.

    Args:
        name: Its name.
        steps: How many.
    """
    import transformers

    mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
    example = made(name, transformers)
    plain = copy.deepcopy(example.model)
    model = distributed(example.model, mesh)
    step, scheduler = training(example, model, steps)
    plain_step, plain_scheduler = training(example, plain, steps)
    compiled: Any = xd.compile(step)
    losses, wanted = [], []
    for i in range(steps):
        batch = example.batches[i % len(example.batches)]
        cut = [xd.distribute_tensor(t, mesh, [Shard(0), Replicate()]) for t in batch]
        losses.append(compiled(*cut).item())
        wanted.append(plain_step(*batch).item())
        scheduler.step()
        plain_scheduler.step()
    pairs = zip(model.named_parameters(), plain.parameters(), strict=True)
    apart = {
        path: float((given.full_tensor().cpu() - expected).detach().abs().max())
        for (path, given), expected in pairs
    }
    return Trained(losses, wanted, apart, compiled.stats()["traces"])
