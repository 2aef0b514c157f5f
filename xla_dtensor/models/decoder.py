"""What Llama and Mixtral have in common: norm, rotary embedding, attention, the stack of layers.

    tokens (batch, sequence) -> embed_tokens -> [input_layernorm, self_attn, +,
    post_attention_layernorm, mlp, +] * layers -> norm -> hidden (batch, sequence, hidden_size)

Parameters have the names of Hugging Face Transformers. Nothing here knows of meshes. The layers are
called as one module: an ``nn.ModuleList`` of a kind that runs them in turn, in whose place a loop
such as ``xla_dtensor.scan_layers`` can be put.

Llama 3 in plain PyTorch: RMSNorm, scaled rotary embedding, grouped queries, SwiGLU.

The parts that it shares with Mixtral are in ``decoder.py``. Parameters are called as in Hugging
Face's ``LlamaForCausalLM``, and the numbers are the same.

    >>> import torch
    >>> with torch.device("meta"):
    ...     model = Llama(ModelSizes.load("llama3-8b"))
    >>> sum(parameter.numel() for parameter in model.parameters())
    8030261248
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xla_dtensor.plan.model_sizes import ModelSizes

__all__ = ["DecoderForCausalLM", "Llama", "Mixtral", "SparseMoE", "balance", "frequencies"]


# ----------------------------------------------------------- What Llama and Mixtral have in common


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
        share = min(max((turns - low) / (high - low), 0.0), 1.0)  # of what stays as it is
        return (1 - share) * frequency / scaling.factor + share * frequency

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


# ------------------------------------------------------------------------ Llama 3 in plain PyTorch


class SwiGLU(nn.Module):
    """The feed-forward part: down(silu(gate(x)) * up(x))."""

    def __init__(self, sizes: ModelSizes) -> None:
        super().__init__()
        hidden, inner = sizes.hidden_size, sizes.intermediate_size
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Take and return (..., hidden)."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Llama(DecoderForCausalLM):
    """Takes tokens (batch, length), returns logits (batch, length, vocabulary).

    Args:
        sizes: Such as ``ModelSizes.load("llama3-8b")``.

    Example:
        >>> import torch
        >>> model = Llama(ModelSizes.load("llama-tiny"))
        >>> model(torch.zeros(2, 8, dtype=torch.long)).shape
        torch.Size([2, 8, 256])
    """

    def __init__(self, sizes: ModelSizes) -> None:
        super().__init__(sizes, SwiGLU)


# ------------------------------------------------------------------------ Mixtral in plain PyTorch
#
# Llama's decoder, with experts in place of the feed-forward part.
#
# Each token goes to the experts that its router likes best. Their number per expert is not known
# when a program is compiled, so each expert has a fixed number of places (its capacity) per group
# of tokens, as in GShard (arXiv:2006.16668): tokens that find no place are dropped there and keep
# their residual. All shapes are static, and everything is a matrix product:
#
#     router    (batch, groups, tokens, experts)                      probabilities, in float32
#     dispatch  (batch, groups, tokens, experts, places)  0 or 1      who goes where
#     arrivals  (experts, batch, groups, places, hidden)              "all-to-all" where experts are
#                                                                     cut over devices
#     combine   dispatch * weight of each choice                      the way back
#
# The batch stays a dim of its own, so a batch that is cut over devices stays cut. `packed`,
# `arrivals`, `departures` and `unpacked` are modules that do nothing: between the outputs of two of
# them tokens change places, where sharding rules say so. Groups are parts of a sequence; the
# dispatch grows with their length, so they are short. Parameters are called as in Hugging Face's
# ``MixtralForCausalLM``, and while no token is dropped the numbers are the same.
#
# The loss that balances experts (Switch Transformer, arXiv:2101.03961, equations 4 to 6) is per
# layer. A layer returns one tensor, so its gradient is put in where the layer's output goes by, as
# Megatron-LM does (MoEAuxLossAutoScaler): the gradients are those of
#
#     loss + router_aux_loss_coef * mean over layers of balance
#
# and the loss that is shown is without it.

GROUP = 1024
"""Tokens of a group, at most."""


def balance(probabilities: Tensor, chosen: Tensor) -> Tensor:
    """Return the balancing loss of a layer, 1 per choice where all experts are chosen alike.

    Args:
        probabilities: Of each expert for each token, (..., experts).
        chosen: How often each token goes to each expert, 0 or 1, of the same shape.
    """
    dims = tuple(range(probabilities.ndim - 1))
    share = chosen.mean(dims) * probabilities.mean(dims)
    return probabilities.shape[-1] * share.sum()


class _WithGradientOf(torch.autograd.Function):
    """Return `x`; in the backward pass, `loss` gets the gradient 1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore
        (loss,) = ctx.saved_tensors
        return grad, torch.ones_like(loss)


class Router(nn.Module):
    """Says how much each token likes each expert."""

    def __init__(self, sizes: ModelSizes) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(sizes.num_local_experts, sizes.hidden_size))
        nn.init.normal_(self.weight, std=sizes.hidden_size**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Return probabilities in float32, (..., experts)."""
        return F.linear(x, self.weight).float().softmax(-1)


class Experts(nn.Module):
    """As many SwiGLUs, each for the tokens that arrive at it."""

    def __init__(self, sizes: ModelSizes) -> None:
        super().__init__()
        experts, hidden = sizes.num_local_experts, sizes.hidden_size
        inner = sizes.intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * inner, hidden))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, inner))
        nn.init.normal_(self.gate_up_proj, std=hidden**-0.5)
        nn.init.normal_(self.down_proj, std=inner**-0.5)
        self.packed, self.arrivals = nn.Identity(), nn.Identity()
        self.departures, self.unpacked = nn.Identity(), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Take and return (experts, batch, groups, places, hidden)."""
        x = self.arrivals(self.packed(x))
        gate, up = torch.einsum("ebnch,eih->ebnci", x, self.gate_up_proj).chunk(2, -1)
        x = torch.einsum("ebnci,ehi->ebnch", F.silu(gate) * up, self.down_proj)
        return self.unpacked(self.departures(x))


class SparseMoE(nn.Module):
    """The feed-forward part: a router and experts.

    Args:
        sizes: Of the model.
        capacity: Places of an expert, in multiples of what it needs if all are chosen alike; None
            for as many that no token is ever dropped.
    """

    def __init__(self, sizes: ModelSizes, capacity: float | None = 1.25) -> None:
        super().__init__()
        self.capacity = capacity
        self.choices = sizes.num_experts_per_tok
        self.loss_weight = sizes.router_aux_loss_coef / sizes.num_hidden_layers
        self.gate = Router(sizes)
        self.experts = Experts(sizes)

    def forward(self, x: Tensor) -> Tensor:
        """Take and return (batch, length, hidden)."""
        length = x.shape[1]
        group = _group(length)
        grouped = x.unflatten(1, (length // group, group))
        probabilities = self.gate(grouped)
        dispatch, combine, chosen = self._routes(probabilities)
        arriving = torch.einsum("bntec,bnth->ebnch", dispatch.to(x.dtype), grouped)
        leaving = self.experts(arriving)
        mixed = torch.einsum("bntec,ebnch->bnth", combine.to(x.dtype), leaving).flatten(1, 2)
        if not (self.training and torch.is_grad_enabled()):
            return mixed
        return _WithGradientOf.apply(mixed, self.loss_weight * balance(probabilities, chosen))  # pyright: ignore

    def places(self, group: int, experts: int) -> int:
        """Return how many tokens of a group find a place at an expert."""
        if self.capacity is None:
            return group  # a token goes to an expert once
        return min(group, math.ceil(self.capacity * group * self.choices / experts))

    def _routes(self, probabilities: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return dispatch, combine and who was chosen, from (batch, groups, tokens, experts)."""
        tokens, experts = probabilities.shape[-2:]
        places = self.places(tokens, experts)
        numbers = torch.arange(experts, device=probabilities.device)
        slots = torch.arange(places, device=probabilities.device)
        choices: list[Tensor] = []
        scores = probabilities.detach()
        for _ in range(self.choices):  # topk, by ops that stay on the device that has the token
            choices.append((scores.argmax(-1, keepdim=True) == numbers).float())
            scores = scores - 2 * choices[-1]
        chosen = torch.stack(choices).sum(0)
        shares = probabilities / (probabilities * chosen).sum(-1, keepdim=True)
        routes: list[Tensor] = []
        used = torch.zeros_like(chosen[:, :, :1])
        for goes in choices:  # all first choices have their place before any second
            place = (goes * (goes.cumsum(2) - goes + used)).sum(-1, keepdim=True)
            routes.append(goes[..., :, None] * (place == slots)[..., None, :])
            used = used + goes.sum(2, keepdim=True)
        dispatch = torch.stack(routes).sum(0)
        return dispatch, dispatch * shares[..., None], chosen


def _group(length: int) -> int:
    """Return the longest group of at most `GROUP` tokens that a sequence is made of."""
    return next(size for size in range(min(GROUP, length), 0, -1) if length % size == 0)


class Mixtral(DecoderForCausalLM):
    """Takes tokens (batch, length), returns logits (batch, length, vocabulary).

    Args:
        sizes: Such as ``ModelSizes.load("mixtral-8x7b")``.
        capacity: See :class:`SparseMoE`.

    Example:
        >>> model = Mixtral(ModelSizes.load("mixtral-tiny"))
        >>> model(torch.zeros(2, 8, dtype=torch.long)).shape
        torch.Size([2, 8, 256])
    """

    def __init__(self, sizes: ModelSizes, capacity: float | None = 1.25) -> None:
        super().__init__(sizes, lambda sizes: SparseMoE(sizes, capacity))
