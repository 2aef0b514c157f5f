"""Reads and writes by index of operands that are cut over different axes."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.nn import functional as F

import xla_dtensor as xd

OPS: dict[str, Callable[[Any, int, Any, Any], Any]] = {
    "gather": lambda x, dim, index, values: x.gather(dim, index),
    "scatter": lambda x, dim, index, values: x.scatter(dim, index, values),
    "sum": lambda x, dim, index, values: x.scatter_add(dim, index, values),
    "amin": lambda x, dim, index, values: x.scatter_reduce(dim, index, values, "amin"),
    "rows": lambda x, dim, index, values: x.index_select(dim, index[0]),
    "embedding": lambda x, dim, index, values: F.embedding(index % len(x), x),
    "index": lambda x, dim, index, values: x[index % len(x), values.argsort(dim) % x.shape[1]],
}
# Wrong on torch_xla before: by op, the dim, sizes, how many points along the dim, and the dims
# that axes a, b, c of size 2 cut, of the tensor, the index and the values ("." is none).
KNOWN = [
    ("amin", 0, (10, 6), 10, "10.", "111", "..."),
    ("amin", 0, (8, 8), 1, "00.", "110", "..."),
    ("gather", 0, (16, 8), 16, "01.", "111", "..."),
    ("gather", 1, (8, 8), 1, ".01", "000", "..."),
    ("scatter", 1, (8, 8), 8, "01.", "000", "..."),
    ("sum", 0, (16, 8), 16, ".11", "...", "010"),
    ("sum", 1, (16, 8), 8, "000", "1.0", "1.1"),
    ("rows", 0, (8, 8), 8, "10.", "1..", "..."),
]
Case = tuple[str, int, tuple[int, int], int, str, str, str]


def drawn(seed: int) -> Case:
    """Draw a case."""
    rng = random.Random(seed)
    dim, sizes = rng.randrange(2), rng.choice([(8, 8), (16, 8), (10, 6)])
    first, second, third = ("".join(rng.choices(".01", k=3)) for _ in range(3))
    count = rng.choice([1, sizes[dim], sizes[dim]])
    return rng.choice(list(OPS)), dim, sizes, count, first, second, third


def check(case: Case) -> None:
    name, dim, sizes, count, *cuts = case
    mesh = xd.init_device_mesh("xla", (2, 2, 2))
    generator = torch.Generator().manual_seed(1)
    x, values = torch.randn(2, *sizes, generator=generator)
    index = torch.rand(sizes, generator=generator).argsort(dim).narrow(dim, 0, count)
    operands = [x, index, values.narrow(dim, 0, count).contiguous()]
    expected = OPS[name](operands[0], dim, *operands[1:])
    on_mesh = [
        xd.distribute_tensor(
            each.contiguous(), mesh, [Replicate() if at == "." else Shard(int(at)) for at in cut]
        )
        for each, cut in zip(operands, cuts, strict=True)
    ]
    found = OPS[name](on_mesh[0], dim, *on_mesh[1:])
    torch.testing.assert_close(found.full_tensor().cpu(), expected, msg=str(case))


@pytest.mark.usefixtures("runtime")
def test_what_was_wrong_before() -> None:
    for case in KNOWN:
        check(case)


@pytest.mark.thorough
@pytest.mark.parametrize("first", range(0, 400, 100))
@pytest.mark.usefixtures("runtime")
def test_drawn_layouts(first: int) -> None:
    for seed in range(first, first + 100):
        check(drawn(seed))
