"""What Llama and Mixtral have in common: norm, rotary embedding, attention, the stack of layers.

    tokens (batch, sequence) -> embed_tokens -> [input_layernorm, self_attn, +,
    post_attention_layernorm, mlp, +] * layers -> norm -> hidden (batch, sequence, hidden_size)

Parameters have the names of Hugging Face Transformers. Nothing here knows of meshes. The layers are
called as one module: an ``nn.ModuleList`` of a kind that runs them in turn, in whose place a loop
such as ``xla_dtensor.scan_layers`` can be put.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xla_dtensor.model_sizes import ModelSizes

__all__ = ["Attention", "Decoder", "DecoderForCausalLM", "Layers", "RMSNorm", "frequencies"]


class RMSNorm(nn.Module):
    """Divide by the root mean square over the last dim, in float32, and scale per channel."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Take and return (..., width)."""
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)


def frequencies(sizes: ModelSizes) -> list[float]:
    """Return by how much each pair of channels turns per position, in radians.

    Args:
        sizes: Of the model.

    Returns:
        head_dim / 2 numbers. With Llama 3.1's scaling, waves that are longer than the original
        sequence / low_freq_factor are stretched by `factor`, those shorter than it /
        high_freq_factor stay, and between the two they are blended linearly in turns per sequence.
    """
    half = range(0, sizes.head_dim, 2)
    plain = [sizes.rope_theta ** (-index / sizes.head_dim) for index in half]
    scaling = sizes.rope_scaling
    if scaling is None:
        return plain

    def stretched(frequency: float) -> float:
        turns = scaling.original_max_position_embeddings * frequency / (2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        kept = min(max((turns - low) / (high - low), 0.0), 1.0)
        return (1 - kept) * frequency / scaling.factor + kept * frequency

    return [stretched(frequency) for frequency in plain]


def rotary(sizes: ModelSizes, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of shape (length, head_dim).

    They are made in each call: a buffer would have no values in a model made on the meta device.
    """
    steps = torch.tensor(frequencies(sizes), dtype=torch.float32, device=like.device)
    positions = torch.arange(length, dtype=torch.float32, device=like.device)
    angles = (positions[:, None] * steps[None, :]).repeat(1, 2)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn `x` of shape (batch, heads, length, head_dim): channel i with i + head_dim / 2."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    """Causal attention in which several heads of queries share one of keys and values."""

    def __init__(self, sizes: ModelSizes) -> None:
        super().__init__()
        hidden, self.head_dim = sizes.hidden_size, sizes.head_dim
        wide = sizes.num_attention_heads * self.head_dim
        narrow = sizes.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(hidden, wide, bias=False)
        self.k_proj = nn.Linear(hidden, narrow, bias=False)
        self.v_proj = nn.Linear(hidden, narrow, bias=False)
        self.o_proj = nn.Linear(wide, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Take and return (batch, length, hidden)."""
        q, k, v = (self._heads(linear(x)) for linear in (self.q_proj, self.k_proj, self.v_proj))
        q, k = turned(q, cos, sin), turned(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class DecoderLayer(nn.Module):
    """Attention and feed-forward part, each behind a norm and around a residual."""

    def __init__(self, sizes: ModelSizes, mlp: nn.Module) -> None:
        super().__init__()
        self.self_attn = Attention(sizes)
        self.mlp = mlp
        self.input_layernorm = RMSNorm(sizes.hidden_size, sizes.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(sizes.hidden_size, sizes.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Layers(nn.ModuleList):
    """Layers that are called in turn, each with what the one before returned."""

    def forward(self, x: Any, *shared: Any) -> Any:
        """Take what the first layer takes, return what the last one does."""
        for layer in self:
            x = layer(x, *shared)
        return x


class Decoder(nn.Module):
    """Embedding, layers and the last norm."""

    def __init__(self, sizes: ModelSizes, make_mlp: Callable[[ModelSizes], nn.Module]) -> None:
        super().__init__()
        self.sizes = sizes
        self.embed_tokens = nn.Embedding(sizes.vocab_size, sizes.hidden_size)
        layers: Iterable[nn.Module] = (
            DecoderLayer(sizes, make_mlp(sizes)) for _ in range(sizes.num_hidden_layers)
        )
        self.layers: nn.ModuleList = Layers(layers)
        self.norm = RMSNorm(sizes.hidden_size, sizes.rms_norm_eps)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the hidden values, (batch, length, hidden), of `tokens` (batch, length)."""
        x = self.embed_tokens(tokens)
        cos, sin = rotary(self.sizes, tokens.shape[1], x)
        return self.norm(self.layers(x, cos, sin))


class DecoderForCausalLM(nn.Module):
    """A decoder and its output projection.

    Args:
        sizes: Of the model.
        make_mlp: Makes the feed-forward part of a layer.
    """

    def __init__(self, sizes: ModelSizes, make_mlp: Callable[[ModelSizes], nn.Module]) -> None:
        super().__init__()
        self.model = Decoder(sizes, make_mlp)
        self.lm_head = nn.Linear(sizes.hidden_size, sizes.vocab_size, bias=False)
        if sizes.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def hidden(self, tokens: Tensor) -> Tensor:
        """Return what the output projection is given, for losses that do not hold logits."""
        return self.model(tokens)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits of shape (batch, length, vocabulary) for `tokens` (batch, length)."""
        return self.lm_head(self.hidden(tokens))
