"""Drawn programs over several processes, each held to plain torch on the whole values."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard

import xla_dtensor as xd

__all__ = ["drawn"]

_MESHES = ((8,), (2, 4), (4, 2), (2, 2, 2), (1, 8), (4,), (2, 2))


class Draw:
    """One case: a mesh, a tensor's whole value, and placements; equal in every process."""

    def __init__(self, seed: int) -> None:
        self.pick = random.Random(seed)
        shape = self.pick.choice(_MESHES)
        names = ("a", "b", "c")[: len(shape)]
        self.mesh = xd.init_device_mesh("xla", shape, mesh_dim_names=names)
        if self.pick.random() < 0.3 and len(shape) > 1:
            self.mesh = self.mesh[self.pick.choice(names)]
        sizes = [self.pick.choice([1, 3, 4, 6, 8]) for _ in range(self.pick.choice([1, 2, 3]))]
        generator = torch.Generator().manual_seed(seed)
        self.value = torch.randint(-9, 9, tuple(sizes), generator=generator).double()
        self.x: Any = xd.distribute_tensor(self.value, self.mesh, self.placements())

    @property
    def is_on_mesh(self) -> bool:
        return self.mesh.get_coordinate() is not None

    def placements(self, ndim: int | None = None) -> list[Any]:
        dims = self.value.ndim if ndim is None else ndim
        return [
            self.pick.choice([Replicate(), *(Shard(dim) for dim in range(dims))])
            for _ in self.mesh.mesh.shape
        ]


def _redistributed(d: Draw) -> Any:
    return d.x.redistribute(placements=d.placements()), d.value


def _matmul(d: Draw) -> Any:
    w = d.value.reshape(-1, d.value.shape[-1])
    wd = xd.distribute_tensor(w, d.mesh, d.placements(2))
    return wd @ wd.t(), w @ w.t()


def _reduced(d: Draw) -> Any:
    dim = d.pick.randrange(d.value.ndim)
    return d.x.sum(dim) + d.x.amax(dim), d.value.sum(dim) + d.value.amax(dim)


def _gradient(d: Draw) -> Any:
    x, value = d.x.detach().requires_grad_(), d.value.clone().requires_grad_()
    for leaf in (x, value):
        (leaf * leaf).cumsum(0).sum().backward()
    return x.grad, value.grad


def _compiled(d: Draw) -> Any:
    def step(x: Any) -> Any:
        return (x * 2 - 1).relu().flip(0)

    return xd.compile(step)(d.x), step(d.value)


def _round_trip(d: Draw) -> Any:
    if any(n % 8 for n in d.value.shape):  # shards of one shape
        d.x = xd.distribute_tensor(d.value, d.mesh)
    local, placements = d.x.to_local(), d.x.placements
    made = xd.DTensor.from_local(local * 3, d.mesh, placements)
    return made, d.value * 3 if d.is_on_mesh else torch.empty(made.shape)


def _partial(d: Draw) -> Any:
    view = xd.distribute_tensor(d.value, d.mesh).to_local()
    whole = xd.DTensor.from_local(view, d.mesh, [Partial()] * d.mesh.ndim)
    if not d.is_on_mesh:
        return whole, torch.empty(0)  # as in PyTorch, it has no shard and knows no shape
    return whole.redistribute(placements=d.placements()), d.value * d.mesh.size()


def _random(d: Draw) -> Any:
    seed = d.pick.randrange(1000)
    made = []
    for placements in (d.placements(), [Replicate()] * d.mesh.ndim):
        torch.manual_seed(seed)
        made.append(xd.randn(*d.value.shape, device_mesh=d.mesh, placements=placements))
    dropped = torch.nn.functional.dropout(d.x)
    assert dropped.shape == d.x.shape
    return made[0], made[1].cpu() if d.is_on_mesh else d.value


def _written(d: Draw) -> Any:
    x, value = d.x.clone(), d.value.clone()
    for leaf in (x, value):
        leaf[0] += 2
        leaf.mul_(3)
    return x, value


def _loaded(d: Draw) -> Any:
    import io

    file = io.BytesIO()
    torch.save({"x": d.x}, file)
    file.seek(0)
    return torch.load(file)["x"], d.value


def _shards(d: Draw) -> Any:
    whole = torch.full_like(d.value, torch.nan)
    for shard in d.x.addressable_shards():
        assert torch.equal(shard.data, d.value[shard.index]), shard
        whole[shard.index] = shard.data
    mine = whole.isnan().logical_not()
    return d.x, torch.where(mine, whole, d.value)


PROGRAMS: tuple[Callable[[Draw], Any], ...] = (
    _redistributed,
    _matmul,
    _reduced,
    _gradient,
    _compiled,
    _round_trip,
    _partial,
    _random,
    _written,
    _loaded,
    _shards,
)


def drawn(cases: int, first: int = 0) -> tuple[list[str], list[int]]:
    """Run cases; what went wrong, one line each, and the generator's state after them.

    Every process runs the same ones.
    """
    wrong = []
    for seed in range(first, first + cases):
        program = PROGRAMS[seed % len(PROGRAMS)]
        draw = Draw(seed)
        where = f"seed {seed}: {program.__name__} {draw.x!r}"
        try:
            got, expected = program(draw)
            if not draw.is_on_mesh:
                fine = tuple(got.shape) == tuple(expected.shape)
            else:
                found = got.cpu()
                fine = torch.allclose(found.to(expected.dtype), expected) and (
                    found.shape == expected.shape
                )
        except Exception as error:
            wrong.append(f"{where}: {type(error).__name__}: {error}")
            continue
        if not fine:
            wrong.append(f"{where}: other values")
    return wrong, xd.get_runtime().get_rng_state().tolist()
