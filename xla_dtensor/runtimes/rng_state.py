"""The state of a runtime's random number generator, as a tensor: eight bytes on the host.

What the number means is the runtime's own affair; that it is one number, and how it is packed, is
the same on all.
"""

from __future__ import annotations

from typing import Any

import torch

from xla_dtensor.errors import ArgumentTypeError

__all__ = ["pack_state", "unpack_state"]


def pack_state(number: int) -> torch.Tensor:
    """Return a number, taken modulo 2**64, as a uint8 tensor of shape (8,)."""
    number %= 2**64
    signed = number - 2**64 if number >= 2**63 else number
    return torch.tensor([signed], dtype=torch.int64).view(torch.uint8)


def unpack_state(state: Any) -> int:
    """Return the number that :func:`pack_state` packed.

    Raises:
        ArgumentTypeError: Not a uint8 tensor of shape (8,).
    """
    if type(state) is not torch.Tensor or (state.dtype, *state.shape) != (torch.uint8, 8):
        found = f"{state.dtype}{list(state.shape)}" if isinstance(state, torch.Tensor) else state
        raise ArgumentTypeError(
            f"A random number generator was given state={found!r} of type={type(state).__name__}. "
            "Its state is a plain uint8 tensor of shape (8,), and belongs to one runtime. Pass "
            "what get_rng_state() or get_states() returned."
        )
    return int(state.cpu().contiguous().view(torch.int64).item()) % 2**64
