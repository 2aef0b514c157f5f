"""The random programs as data: what is put on which mesh, and the steps over a pool of tensors.

A program follows from its seed alone. Both sides build it for themselves, with
``random.Random(seed)``, so that nothing but a seed has to be stored, and a failure is reproduced by
``python -m tests.differential.show SEED``.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

__all__ = ["Leaf", "Program", "Step", "leaf_values", "placements_of", "tokens_of"]

Tokens = tuple[str, ...]


@dataclass(frozen=True)
class Leaf:
    """A tensor that is put on the mesh: float64 that requires grad, or row numbers."""

    shape: tuple[int, ...]
    placements: Tokens
    rows: int = 0  # for row numbers: how many rows there are


@dataclass(frozen=True)
class Step:
    """One line of a program: `kind` says who runs it, an op of the table or the side itself."""

    kind: str
    name: str
    inputs: tuple[int, ...]
    params: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Program:
    """Leaves and steps. Tensor number i is a leaf, then the result of a step."""

    seed: int
    mesh_shape: tuple[int, ...]
    leaves: tuple[Leaf, ...]
    steps: tuple[Step, ...]
    loss: str  # "partial", "full", or "" for a program without a backward


def leaf_values(program: Program) -> list[torch.Tensor]:
    """The values of the leaves; Python's generator gives the same ones in every version."""
    chance, made = random.Random(program.seed * 7919 + 1), []
    for leaf in program.leaves:
        count = 1
        for size in leaf.shape:
            count *= size
        if leaf.rows:
            numbers: list[Any] = [chance.randrange(leaf.rows) for _ in range(count)]
            made.append(torch.tensor(numbers, dtype=torch.int64).reshape(leaf.shape))
        else:
            numbers = [chance.uniform(-1.0, 1.0) for _ in range(count)]
            made.append(torch.tensor(numbers, dtype=torch.float64).reshape(leaf.shape))
    return made


def placements_of(tokens: Tokens) -> list[Any]:
    """("S0", "R", "Psum", "_S0:4") as PyTorch's placements."""
    return [_placement(token) for token in tokens]


def _placement(token: str) -> Any:
    if token == "R":
        return Replicate()
    if token.startswith("_S"):
        dim, factor = token[2:].split(":")
        return _StridedShard(int(dim), split_factor=int(factor))
    return Shard(int(token[1:])) if token.startswith("S") else Partial(token[1:])


def tokens_of(placements: Any) -> Tokens:
    """The reverse of :func:`placements_of`, for whatever PyTorch may answer."""
    return tuple(_token(placement) for placement in placements)


def _token(placement: Any) -> str:
    name = type(placement).__name__
    if name == "_StridedShard":
        return f"_S{placement.dim}:{placement.split_factor}"
    if name == "Shard":
        return f"S{placement.dim}"
    if name == "Replicate":
        return "R"
    return f"P{placement.reduce_op}" if name == "Partial" else f"{name}:{placement.reduce_op}"
