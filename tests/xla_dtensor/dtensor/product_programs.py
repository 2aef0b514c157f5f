"""Programs of products, whose gradients are compared with PyTorch's on each device.

    python -m tests.xla_dtensor.dtensor.product_programs jax 20 0      the runtime, how many, which

runs those that were found wrong on four mesh axes on 16 devices of a runtime, and 20 drawn ones.
"""

from __future__ import annotations

import os
import random as drawing
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import Replicate, Shard

import xla_dtensor as xd
from tests.hosts import QUICK_COMPILER

__all__ = ["PROGRAMS", "Placements", "attention", "check_gradients", "gathered", "random"]

Placements = Sequence[Any]


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def gathered(tensor: Any) -> torch.Tensor:
    """Return the whole, put together from what each device has."""
    whole = torch.full(tuple(tensor.shape), torch.nan, dtype=tensor.dtype)
    for shard in tensor.addressable_shards():
        whole[shard.index] = shard.data
    return whole


def two_layers(x: Any, w: Any, bias: Any) -> Any:
    hidden = F.gelu(F.linear(x, w, bias))
    return (F.linear(hidden, w) ** 2).mean() + (x.mT @ x).tanh().mean()


def attention(x: Any, to_keys: Any, to_out: Any, to_words: Any, words: Any) -> Any:
    scores = torch.einsum("btd,bsd->bts", x, F.linear(x, to_keys))
    hidden = F.linear(scores.softmax(-1) @ x, to_out)
    return F.cross_entropy(F.linear(hidden, to_words).flatten(0, 1), words.flatten())


def heads(x: Any, to_both: Any, to_out: Any) -> Any:
    split = F.linear(x, to_both).unflatten(-1, (4, 4)).transpose(1, 2)
    keys, values = split.split(2, dim=-1)
    queries = x.unflatten(-1, (4, 2)).transpose(1, 2)
    mixed = torch.matmul(torch.matmul(queries, keys.mT).softmax(-1), values)
    return (F.linear(mixed.transpose(1, 2).flatten(2), to_out) ** 2).mean()


# What is computed, and the shapes of what it is given.
PROGRAMS: dict[Callable[..., Any], tuple[tuple[int, ...], ...]] = {
    two_layers: ((16, 8), (8, 8), (8,)),
    attention: ((8, 8, 8), (8, 8), (8, 8), (16, 8), (8, 8)),
    heads: ((8, 8, 8), (16, 8), (8, 8)),
}


def given_to(program: Callable[..., Any]) -> list[torch.Tensor]:
    values = [random(*shape) for shape in PROGRAMS[program]]
    if program is attention:
        values[-1] = torch.arange(64).reshape(8, 8) % 16
    return values


def check_gradients(
    cube: xd.DeviceMesh,
    program: Callable[..., Any],
    placements: Sequence[Placements],
    compiled: bool,
) -> None:
    values = given_to(program)
    plain = [v.clone().requires_grad_(v.is_floating_point()) for v in values]
    program(*plain).backward()
    placed = [
        xd.distribute_tensor(value, cube, each).requires_grad_(value.is_floating_point())
        for value, each in zip(values, placements, strict=True)
    ]

    def step() -> None:
        program(*placed).full_tensor().backward()

    (xd.compile(step) if compiled else step)()
    placed[0].detach().cpu()  # the gradients are computed by the way, and read afterwards
    for mine, wanted in zip(placed, plain, strict=True):
        if wanted.grad is not None:
            error = (gathered(mine.grad) - wanted.grad).abs().max()
            assert error < 1e-12, placements


# (program, how what it is given lies on four axes, whether it was compiled)
_FOUND = [
    (two_layers, ("0-01", "0-10", "0---"), False),  # on torch_xla, the first product
    (attention, ("01--", "-101", "0110", "0-1-", "1111"), True),  # on JAX: rows and columns by b
    (attention, ("2-10", "--0-", "-001", "-010", "--1-"), False),  # on JAX, op by op
]


def _main(runtime: str, drawn: int, seed: int) -> None:
    os.environ.update(NPROC="64", JAX_PLATFORMS="cpu")
    os.environ["XLA_FLAGS"] = QUICK_COMPILER
    xd.get_runtime(runtime, num_cpu_devices=16)
    mesh = xd.init_device_mesh("xla", (2, 2, 2, 2), mesh_dim_names=("a", "b", "c", "d"))
    told = [
        (program, [[Replicate() if p == "-" else Shard(int(p)) for p in each] for each in lies], c)
        for program, lies, c in _FOUND
    ]
    chosen = drawing.Random(seed)
    for _ in range(drawn):
        program = chosen.choice(list(PROGRAMS))
        places = [
            [Replicate(), *(Shard(dim) for dim in range(len(shape)))] for shape in PROGRAMS[program]
        ]
        lies = [[chosen.choice(each) for _ in range(4)] for each in places]
        told.append((program, lies, chosen.random() < 0.5))
    for program, lies, compiled in told:
        check_gradients(mesh, program, lies, compiled)
    print(len(told), "programs")


if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
