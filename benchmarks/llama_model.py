"""A small Llama, as torchtitan writes it, its tensor-parallel plan, and the same plan by hand.

The plan is torchtitan's, for `parallelize_module`: tensor parallel weights, activations cut along
the sequence between the layers. `annotate_by_hand` says the same at the same boundaries with
`distribute_tensor` and `redistribute`, on the whole mesh, with nothing local in between.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

__all__ = ["Llama", "Sizes", "annotate_by_hand", "apply_plan"]


@dataclass(frozen=True)
class Sizes:
    """The sizes of the model and of its batch."""

    vocabulary: int = 512
    dim: int = 128
    num_heads: int = 8
    num_kv_heads: int = 4
    hidden: int = 384
    num_layers: int = 2
    batch: int = 8
    length: int = 32


class Attention(nn.Module):
    """Grouped-query attention with rotary embeddings."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.head_dim = sizes.dim // sizes.num_heads
        self.repeats = sizes.num_heads // sizes.num_kv_heads
        self.wq = nn.Linear(sizes.dim, sizes.num_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(sizes.dim, sizes.num_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(sizes.dim, sizes.num_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(sizes.num_heads * self.head_dim, sizes.dim, bias=False)

    def forward(self, x: torch.Tensor, rotary: torch.Tensor) -> torch.Tensor:
        """Attends over the whole sequence; the number of heads is that of the weights' part."""
        batch, length, _ = x.shape
        q = self.wq(x).view(batch, length, -1, self.head_dim)
        k = self.wk(x).view(batch, length, -1, self.head_dim)
        v = self.wv(x).view(batch, length, -1, self.head_dim)
        q, k = rotated(q, rotary), rotated(k, rotary)
        k, v = repeated(k, self.repeats), repeated(v, self.repeats)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(o.transpose(1, 2).contiguous().view(batch, length, -1))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.w1 = nn.Linear(sizes.dim, sizes.hidden, bias=False)
        self.w2 = nn.Linear(sizes.hidden, sizes.dim, bias=False)
        self.w3 = nn.Linear(sizes.dim, sizes.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Gates, then projects back."""
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """One layer."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.attention = Attention(sizes)
        self.feed_forward = FeedForward(sizes)
        self.attention_norm = nn.RMSNorm(sizes.dim, eps=1e-5)
        self.ffn_norm = nn.RMSNorm(sizes.dim, eps=1e-5)

    def forward(self, x: torch.Tensor, rotary: torch.Tensor) -> torch.Tensor:
        """Adds attention, then the feed-forward part."""
        h = x + self.attention(self.attention_norm(x), rotary)
        return h + self.feed_forward(self.ffn_norm(h))


class Llama(nn.Module):
    """The whole model; takes token ids [batch, length], returns logits."""

    rotary: torch.Tensor

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(sizes.vocabulary, sizes.dim)
        table = rotary_table(sizes.dim // sizes.num_heads, sizes.length)
        self.register_buffer("rotary", table, persistent=False)
        self.layers = nn.ModuleDict({str(i): Block(sizes) for i in range(sizes.num_layers)})
        self.norm = nn.RMSNorm(sizes.dim, eps=1e-5)
        self.output = nn.Linear(sizes.dim, sizes.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns the logits."""
        h = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            h = layer(h, self.rotary)
        return self.output(self.norm(h))


def rotary_table(head_dim: int, length: int, theta: float = 500000.0) -> torch.Tensor:
    """Cosines and sines: [2, length, head_dim]. Real, as torch_xla's complex numbers stay whole."""
    steps = 1.0 / theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
    angles = torch.outer(torch.arange(length).float(), steps).repeat(1, 2)
    return torch.stack((angles.cos(), angles.sin()))


def rotated(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Applies the rotary embedding to [batch, length, heads, head_dim]."""
    cos, sin = table[:, : x.shape[1]].unsqueeze(2)
    front, back = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-back, front), dim=-1) * sin


def repeated(x: torch.Tensor, times: int) -> torch.Tensor:
    """Gives each query head its key or value head: [batch, length, heads * times, head_dim]."""
    batch, length, heads, head_dim = x.shape
    if times == 1:
        return x
    wide = x[:, :, :, None, :].expand(batch, length, heads, times, head_dim)
    return wide.reshape(batch, length, heads * times, head_dim)


# ---------------------------------------------------------------------- torchtitan's plan


def apply_plan(model: Any, tp_mesh: Any, *, loss_parallel: bool) -> None:
    """Parallelizes the model with PyTorch's own styles, as torchtitan does.

    Args:
        model: A `Llama`.
        tp_mesh: The tensor-parallel axis.
        loss_parallel: Whether the logits stay cut along the vocabulary.
    """
    parallelize_module(
        model,
        tp_mesh,
        {
            "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "output": ColwiseParallel(
                input_layouts=Shard(1),
                output_layouts=Shard(-1) if loss_parallel else Replicate(),
                use_local_output=not loss_parallel,
            ),
        },
    )
    # PyTorch's annotation has room for one input, though it takes as many as there are.
    before, after = (Shard(1), None), (Replicate(), None)
    attention_input = PrepareModuleInput(
        input_layouts=before,  # pyright: ignore[reportArgumentType]
        desired_input_layouts=after,  # pyright: ignore[reportArgumentType]
    )
    for block in model.layers.values():
        plan: Any = {
            "attention_norm": SequenceParallel(),
            "attention": attention_input,
            "attention.wq": ColwiseParallel(),
            "attention.wk": ColwiseParallel(),
            "attention.wv": ColwiseParallel(),
            "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
            "ffn_norm": SequenceParallel(),
            "feed_forward": PrepareModuleInput(
                input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
            ),
            "feed_forward.w1": ColwiseParallel(),
            "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
            "feed_forward.w3": ColwiseParallel(),
        }
        parallelize_module(block, tp_mesh, plan)


# ---------------------------------------------------------------------- the same by hand

_CUT = {
    **dict.fromkeys(("wq", "wk", "wv", "w1", "w3", "output", "tok_embeddings"), 0),
    **dict.fromkeys(("wo", "w2"), 1),
}


def annotate_by_hand(model: Any, mesh: Any, *, loss_parallel: bool) -> None:
    """Distributes the weights over the mesh and annotates the activations where the plan does.

    Args:
        model: A `Llama`, called with a DTensor of token ids on `mesh`.
        mesh: The (dp, tp) mesh.
        loss_parallel: Whether the logits stay cut along the vocabulary.
    """
    from xla_dtensor import distribute_module

    def place(name: str, module: nn.Module, mesh: Any) -> None:
        from xla_dtensor import distribute_tensor

        leaf = name.rpartition(".")[2]
        if leaf in _CUT:
            placements = [Replicate(), Shard(_CUT[leaf])]
            weight: Any = distribute_tensor(module.weight, mesh, placements)  # pyright: ignore
            module.weight = nn.Parameter(weight)

    distribute_module(model, mesh, place)
    cut = (Shard(0), Shard(1))
    whole = (Shard(0), Replicate())
    columns = (Shard(0), Shard(2))
    _annotate_output(model.tok_embeddings, cut)
    for block in model.layers.values():
        for norm, inner in (
            (block.attention_norm, block.attention),
            (block.ffn_norm, block.feed_forward),
        ):
            _annotate_output(norm, cut)
            _annotate_input(inner, whole)
        attention, feed_forward = block.attention, block.feed_forward
        for linear in (attention.wq, attention.wk, attention.wv, feed_forward.w1, feed_forward.w3):
            _annotate_output(linear, columns)
        for linear in (attention.wo, feed_forward.w2):
            _annotate_input(linear, columns)
            _annotate_output(linear, cut)
    _annotate_output(model.norm, cut)
    _annotate_input(model.output, whole)
    _annotate_output(model.output, columns if loss_parallel else whole)


def _annotate_output(module: nn.Module, placements: Any) -> None:
    def annotate(_module: Any, _given: Any, result: Any) -> Any:
        return result.redistribute(placements=placements)

    module.register_forward_hook(annotate)


def _annotate_input(module: nn.Module, placements: Any) -> None:
    def annotate(_module: Any, given: Any) -> Any:
        return (given[0].redistribute(placements=placements), *given[1:])

    module.register_forward_pre_hook(annotate)
