"""How the devices' parts of a value follow from placements, and whether two values agree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tests.differential.checksums import checksum, size_of
from tests.differential.plain_torch import cut

__all__ = ["agree", "parts_of", "sums_agree"]

# The checksums are kept as float32. The programs run in float64, but their gradients cancel.
RELATIVE = 2e-6
SMALLEST = 1e-9


def parts_of(value: Any, tokens: Sequence[str], mesh_shape: Sequence[int]) -> list[Any]:
    """Each device's part, by torch.chunk, axis by axis; pending axes as if reduced.

    Example:
        >>> [part.tolist() for part in parts_of(torch.arange(3), ("S0",), (2,))]
        [[0, 1], [2]]
    """
    if not mesh_shape:
        return [value]
    found = []
    for part in _cut(value, tokens[0], mesh_shape[0]):
        found += parts_of(part, tokens[1:], mesh_shape[1:])
    return found


def _cut(value: Any, token: str, size: int) -> list[Any]:
    if not token.startswith("_S"):
        return cut(value, token, size)
    # The dim was cut before, by an axis that comes later: each of those pieces is cut.
    dim, factor = (int(number) for number in token[2:].split(":"))
    pieces = [cut(piece, f"S{dim}", size) for piece in cut(value, f"S{dim}", factor)]
    return [torch.cat([piece[i] for piece in pieces], dim) for i in range(size)]


def sums_agree(sums: Sequence[float], parts: Sequence[Any]) -> bool:
    """Tell whether stored checksums are those of the parts."""
    for stored, part in zip(sums, parts, strict=True):
        expected, allowed = checksum(part), SMALLEST + RELATIVE * size_of(part)
        if expected != expected or stored != stored:
            if (expected != expected) != (stored != stored):
                return False
        elif abs(stored - expected) > allowed:
            return False
    return True


def agree(found: Any, expected: Any) -> bool:
    """Tell whether two whole values are the same, up to rounding in float64."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    found, expected = found.detach().double(), expected.detach().double()
    return torch.allclose(found, expected, rtol=1e-6, atol=1e-9, equal_nan=True)
