"""One number for the values of one device's tensor, sensitive to each and to their order."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

__all__ = ["checksum", "size_of"]


def checksum(tensor: torch.Tensor) -> float:
    """The sum of the values, each with a weight of its own between 1 and 2.

    Example:
        >>> checksum(torch.tensor([1.0, 0.0])) == checksum(torch.tensor([0.0, 1.0]))
        False
    """
    values = _values(tensor)
    weights = 1.0 + (np.arange(values.size) * 0.6180339887498949) % 1.0
    return float(values @ weights)


def size_of(tensor: torch.Tensor) -> float:
    """How large the terms of the checksum are: errors are relative to it."""
    return float(np.abs(_values(tensor)).sum())


def _values(tensor: torch.Tensor) -> Any:
    return tensor.detach().to(torch.float64).contiguous().numpy().reshape(-1)
