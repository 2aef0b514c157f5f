"""Mixtral in plain PyTorch: Llama's decoder, with experts in place of the feed-forward part.

Each token goes to the experts that its router likes best. Their number per expert is not known when
a program is compiled, so each expert has a fixed number of places (its capacity) per group of
tokens, as in GShard (arXiv:2006.16668): tokens that find no place are dropped there and keep their
residual. All shapes are static, and everything is a matrix product:

    router    (batch, groups, tokens, experts)                      probabilities, in float32
    dispatch  (batch, groups, tokens, experts, places)  0 or 1      who goes where
    arrivals  (experts, batch, groups, places, hidden)              "all-to-all" where experts are
                                                                    cut over devices
    combine   dispatch * weight of each choice                      the way back

The batch stays a dim of its own, so a batch that is cut over devices stays cut. `packed`,
`arrivals`, `departures` and `unpacked` are modules that do nothing: between the outputs of two of
them tokens change places, where sharding rules say so. Groups are parts of a sequence; the dispatch
grows with their length, so they are short. Parameters are called as in Hugging Face's
``MixtralForCausalLM``, and while no token is dropped the numbers are the same.

The loss that balances experts (Switch Transformer, arXiv:2101.03961, equations 4 to 6) is per
layer. A layer returns one tensor, so its gradient is put in where the layer's output goes by, as
Megatron-LM does (MoEAuxLossAutoScaler): the gradients are those of

    loss + router_aux_loss_coef * mean over layers of balance

and the loss that is shown is without it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xla_dtensor.model_sizes import ModelSizes
from xla_dtensor.models.decoder import DecoderForCausalLM

__all__ = ["Experts", "Mixtral", "SparseMoE", "balance"]

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
        left = probabilities.detach()
        for _ in range(self.choices):  # topk, by ops that stay on the device that has the token
            choices.append((left.argmax(-1, keepdim=True) == numbers).float())
            left = left - 2 * choices[-1]
        chosen = torch.stack(choices).sum(0)
        shares = probabilities / (probabilities * chosen).sum(-1, keepdim=True)
        routes: list[Tensor] = []
        taken = torch.zeros_like(chosen[:, :, :1])
        for goes in choices:  # all first choices have their place before any second
            place = (goes * (goes.cumsum(2) - goes + taken)).sum(-1, keepdim=True)
            routes.append(goes[..., :, None] * (place == slots)[..., None, :])
            taken = taken + goes.sum(2, keepdim=True)
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
