"""make_program: a seed becomes a program."""

from __future__ import annotations

import random
from functools import lru_cache
from typing import Any

import torch

from tests.differential.choosing import CHOICES, Pool, random_placements
from tests.differential.op_table import LOCAL_FUNCTIONS, OPS
from tests.differential.programs import Leaf, Program, Step

__all__ = ["make_program", "program_of"]

# PyTorch's rules take long on three axes, so these are fewer.
MESHES = ((8,), (8,), (2, 4), (2, 4), (2, 4), (2, 2, 2))
# Few shapes: a runtime that compiles each op by itself then finds most of them compiled. The first
# two families are cut evenly by every mesh, the others by none.
FAMILIES = (
    ((8, 16), (16, 8), (16,)),
    ((4, 8, 8), (8, 8), (8,)),
    ((10, 6), (6, 10), (6,)),
    ((3, 6, 10), (10, 6), (10,)),
)
LARGEST = 1024


@lru_cache(maxsize=4096)
def make_program(seed: int) -> Program:
    """The program of a seed.

    Example:
        >>> make_program(3) == make_program(3)
        True
    """
    return program_of(random.Random(seed), seed, length=3 + seed % 5)


def program_of(chance: random.Random, seed: int, length: int) -> Program:
    """A program of `length` steps, made of the numbers that `chance` gives."""
    pool = Pool(chance, chance.choice(MESHES))
    body, matrix, vector = FAMILIES[chance.choice([0, 0, 1, 2, 3])]
    leaves = [Leaf(shape, random_placements(pool, shape)) for shape in (body, body, matrix)]
    leaves.append(Leaf(vector, random_placements(pool, vector, replicate=0.6)))
    if chance.random() < 0.5:
        shape = chance.choice([(8,), (4, 2)])
        leaves.append(Leaf(shape, random_placements(pool, shape, replicate=0.6), rows=6))
    for leaf in leaves:
        dtype = torch.int64 if leaf.rows else torch.float64
        pool.tensors.append(torch.empty(leaf.shape, dtype=dtype, device="meta"))
    steps = []
    while len(steps) < length:
        step = _next_step(pool)
        if step is not None:
            steps.append(step)
    loss = chance.choice(["partial", "full", "full", ""])
    return Program(seed, pool.mesh_shape, tuple(leaves), tuple(steps), loss)


def _next_step(pool: Pool) -> Step | None:
    choices, weights = zip(*CHOICES, strict=True)
    step = pool.chance.choices(choices, weights)[0](pool)
    if step is None:
        return None
    made = _shape_after(step, [pool.tensors[i] for i in step.inputs])
    if made.numel() > LARGEST or made.numel() == 0 or made.ndim > 4:
        return None
    pool.tensors.append(made)
    return step


def _shape_after(step: Step, given: list[Any]) -> Any:
    if step.kind == "op":
        return OPS[step.name](given, *step.params)
    if step.kind == "partial_matmul":
        return given[0] @ given[1]
    if step.kind == "local":
        return LOCAL_FUNCTIONS[step.name](given[0], *step.params[2])
    return given[0]
