"""Slices of dims that are cut: by a step, and such that leave shards alone (strided_slices.md)."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

import xla_dtensor as xd
from xla_dtensor.runtimes import Runtime

R, S0 = Replicate(), Shard(0)
CUTS = [(R, R), (S0, R), (R, S0), (S0, S0)]
# Wrong before: 5 of 10 rows in 2 pieces, 6 of 12 in 4, 3 of 8 by 3; one row by a step.
KNOWN = [(10, 0, 2, 1, 0), (12, 0, 2, 2, 0), (8, 0, 3, 1, 1), (2, 1, 3, 1, 2)]


def drawn(seed: int) -> tuple[int, int, int, int, int]:
    """Draw a size, a start, a step, and the cuts of the tensor and of the slice."""
    rng = random.Random(seed)
    size = rng.randint(2, 26)
    return size, rng.randrange(min(size, 4)), rng.randint(2, 5), rng.randrange(4), rng.randrange(4)


def everything(x: Any, new: Any, weight: Any, start: int, step: int, cut: Any) -> list[Any]:
    """Read a slice of `x`, differentiate it, write into it, and into it by its own values."""
    taken = x[start::step]
    if isinstance(taken, xd.DTensor):
        taken = taken.redistribute(placements=cut)
    (grad,) = torch.autograd.grad((taken * taken * weight).sum(), x)
    written, scaled = x.detach() * 1, x.detach() * 1
    written[start::step] = new
    scaled[start::step].mul_(new)
    return [taken, grad, written, scaled]


def check(mesh: xd.DeviceMesh, is_compiled: bool, case: tuple[int, int, int, int, int]) -> None:
    size, start, step, cut, cut_of_slice = case
    x, new = torch.arange(1.0, size + 1), torch.arange(1.0, size + 1)[start::step] * 100
    placements = CUTS[cut_of_slice]

    def run(x: Any, new: Any) -> list[Any]:
        results = everything(x, new, new, start, step, placements)
        if not isinstance(x, xd.DTensor):
            return results
        return [results[0], *(each.redistribute(placements=CUTS[cut]) for each in results[1:])]

    expected = run(x.clone().requires_grad_(), new)
    step_of = xd.compile(run) if is_compiled else run
    found = step_of(
        xd.distribute_tensor(x, mesh, CUTS[cut]).requires_grad_(),
        xd.distribute_tensor(new, mesh, placements),
    )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.full_tensor().detach().cpu(), other.detach())


@pytest.mark.parametrize("case", KNOWN)
def test_what_was_wrong(mesh: xd.DeviceMesh, runtime: Runtime, case: Any) -> None:
    check(mesh, runtime.name == "jax", case)


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(6))
def test_drawn_slices(mesh: xd.DeviceMesh, runtime: Runtime, seed: int) -> None:
    for number in range(8):
        check(mesh, runtime.name == "jax" and number % 2 == 0, drawn(8 * seed + number))


SHORTER = {
    "slice": lambda x: [x[:-1], x],
    "base_first": lambda x: [x, x[:-1]],
    "select": lambda x: [x[0], x],
    "split": lambda x: [*x.split((len(x) - 1, 1)), x],
    "unsafe_split": lambda x: [*torch.unsafe_split_with_sizes(x, (len(x) - 1, 1)), x],
    "unbind": lambda x: [x.unbind()[0], x],
}


@pytest.mark.parametrize("is_compiled", [True, False])
@pytest.mark.parametrize("name", SHORTER)
def test_slices_that_leave_shards_as_they_are(
    mesh: xd.DeviceMesh, name: str, is_compiled: bool
) -> None:
    """Both are gathered in one program: XLA took the one for the other, and failed."""

    def step(x: Any) -> list[Any]:
        parts = SHORTER[name](x)
        whole = [p.redistribute(placements=(R, R)) for p in parts if isinstance(p, xd.DTensor)]
        return whole or parts

    for rows in (5, 16):
        x = torch.arange(3.0 * rows).reshape(rows, 3)
        sharded = xd.distribute_tensor(x, mesh, (S0, S0))
        found = (xd.compile(step) if is_compiled else step)(sharded)
        found = [each.full_tensor() for each in found]
        for one, other in zip(found, step(x), strict=True):
            assert torch.equal(one.cpu(), other)
