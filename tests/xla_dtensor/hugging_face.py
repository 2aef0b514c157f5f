"""Tiny models as Hugging Face's transformers builds them, unmodified, with a batch each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["MODELS", "Example", "made"]

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
