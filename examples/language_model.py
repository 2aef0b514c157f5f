"""A small Llama-style language model over bytes, in ordinary PyTorch.

Nothing in this file knows of meshes, shards or XLA: it is the model that a user already has, and it
trains on a CPU as it stands. ``train_lm.py`` shards it from the outside, by parameter name.

The vocabulary is the 256 byte values and one document separator. Its size, 257, is a prime, so no
mesh axis divides it: the embedding and the output projection are uneven shards on purpose.

    tokens (batch, seq) -> embedding -> [RMSNorm, attention, +, RMSNorm, SwiGLU, +] * layers
                        -> RMSNorm -> lm_head -> logits (batch, seq, 257)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["SEPARATOR", "VOCABULARY_SIZE", "LanguageModel", "ModelConfig", "next_token_loss"]

SEPARATOR = 256
VOCABULARY_SIZE = 257


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of a :class:`LanguageModel`.

    Args:
        dim: Width of the residual stream; a multiple of `heads`.
        layers: Number of transformer blocks.
        heads: Attention heads. Keys and values have as many as queries.
        ffn_multiple: Width of the hidden layer of the MLP, in multiples of `dim`.
        seq: Longest sequence, in tokens.
        rope_base: Base of the rotary embedding's geometric row of frequencies.
        norm_eps: Added to the mean square in RMSNorm.
    """

    dim: int = 128
    layers: int = 2
    heads: int = 8
    ffn_multiple: int = 3
    seq: int = 128
    rope_base: float = 10_000.0
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        if self.dim % (2 * self.heads):
            raise ValueError(
                f"A model with dim={self.dim} and heads={self.heads} was asked for. Rotary "
                "embedding turns pairs of numbers, so dim / heads has to be a whole, even number. "
                f"Pass a dim that is a multiple of {2 * self.heads}."
            )

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.dim // self.heads


class RMSNorm(nn.Module):
    """Divide by the root mean square over the last dim, in float32, and scale per channel."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return normed.to(x.dtype) * self.weight


class RotaryEmbedding(nn.Module):
    """Turn channel pairs of queries and keys by an angle that grows with the position.

    Channel i is paired with channel i + head_dim / 2, so the rotation is four real products and no
    complex numbers are needed.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, head_dim: int, seq: int, base: float) -> None:
        super().__init__()
        frequencies = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        angles = torch.outer(torch.arange(seq, dtype=torch.float32), frequencies)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Rotate `x` of shape (batch, heads, seq, head_dim)."""
        cos, sin = self.cos[: x.shape[-2]], self.sin[: x.shape[-2]]
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Attention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.wq = nn.Linear(config.dim, config.dim, bias=False)
        self.wk = nn.Linear(config.dim, config.dim, bias=False)
        self.wv = nn.Linear(config.dim, config.dim, bias=False)
        self.wo = nn.Linear(config.dim, config.dim, bias=False)
        self.rotary = RotaryEmbedding(config.head_dim, config.seq, config.rope_base)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self._split_heads(project(x)) for project in (self.wq, self.wk, self.wv))
        mixed = F.scaled_dot_product_attention(self.rotary(q), self.rotary(k), v, is_causal=True)
        return self.wo(mixed.transpose(1, 2).flatten(2))

    def _split_heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class SwiGLU(nn.Module):
    """The gated MLP of Llama: w2(silu(w1 x) * w3 x)."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden_dim, bias=False)
        self.w2 = nn.Linear(hidden_dim, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """One transformer block: attention and MLP, each behind a norm and around a residual."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(config)
        self.mlp_norm = RMSNorm(config.dim, config.norm_eps)
        self.mlp = SwiGLU(config.dim, config.ffn_multiple * config.dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class LanguageModel(nn.Module):
    """A decoder-only transformer over bytes.

    Args:
        config: Sizes. Weights are drawn from PyTorch's global generator: seed it first.

    Example:
        >>> model = LanguageModel(ModelConfig(dim=32, layers=1, heads=2, seq=8))
        >>> model(torch.zeros(4, 8, dtype=torch.int64)).shape
        torch.Size([4, 8, 257])
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY_SIZE, config.dim)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.lm_head = nn.Linear(config.dim, VOCABULARY_SIZE, bias=False)
        self._initialise()

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits of shape (batch, seq, 257) for int64 `tokens` of shape (batch, seq)."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))

    def _initialise(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
        # Small logits: the first loss is that of a blind guess, ln 257 = 5.55.
        nn.init.normal_(self.lm_head.weight, std=0.02)


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy, in nats per token.

    Batch and sequence are flattened into one dim of rows, which is how most training code writes
    it. It also suits a sharded batch: the batch is the outer factor of the rows, so each device
    keeps the rows it has, and the vocabulary stays the last dim.

    Args:
        logits: Shape (batch, seq, vocabulary).
        targets: The token that follows each position, int64 of shape (batch, seq).

    Returns:
        A scalar.

    Example:
        >>> next_token_loss(torch.zeros(2, 3, 257), torch.zeros(2, 3, dtype=torch.int64))
        tensor(5.5491)
    """
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
