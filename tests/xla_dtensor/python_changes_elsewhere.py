"""A module of the user's, with names that a step in another module reads."""

from __future__ import annotations

import torch

FACTOR = 2.0


def scaled(x: torch.Tensor) -> torch.Tensor:
    """Scale by a name of this module."""
    return x * FACTOR
