"""Llama 3 in plain PyTorch: RMSNorm, scaled rotary embedding, grouped queries, SwiGLU.

The parts that it shares with Mixtral are in ``decoder.py``. Parameters are called as in Hugging
Face's ``LlamaForCausalLM``, and the numbers are the same.

    >>> import torch
    >>> with torch.device("meta"):
    ...     model = Llama(ModelSizes.load("llama3-8b"))
    >>> sum(parameter.numel() for parameter in model.parameters())
    8030261248
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from xla_dtensor.model_sizes import ModelSizes
from xla_dtensor.models.decoder import DecoderForCausalLM

__all__ = ["Llama", "SwiGLU"]


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
