"""No device and no host makes a whole parameter: the programs and the buffers are looked at."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

import xla_dtensor as xd
from xla_dtensor.nn.deferred import blocks


def made(mesh: xd.DeviceMesh, rng: Any) -> None:
    model = nn.Linear(64, 256, bias=False, device="meta")
    put = xd.distribute_tensor(model.weight.detach(), mesh, [Shard(1), Shard(0)])
    model.weight = nn.Parameter(put)

    def init(module: Any) -> None:
        nn.init.trunc_normal_(module.weight)

    xd.materialize(model, seed=0, rng=rng, init=init)


@pytest.mark.only_on("jax")
def test_programs_of_a_draw_know_its_tile_only(
    mesh: xd.DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    import jax

    texts: list[str] = []
    compiled = jax.jit

    def seen(function: Any, **options: Any) -> Any:
        program = compiled(function, **options)

        def call(*args: Any) -> Any:
            texts.append(program.lower(*args).compile().as_text() or "")
            return program(*args)

        return call

    from xla_dtensor.runtimes.jax import runtime as jax_making

    for cached in (jax_making._drawer, jax_making._filler):
        cached.cache_clear()
    monkeypatch.setattr(jax_making.jax, "jit", seen)
    try:
        made(mesh, "device")
    finally:
        for cached in (jax_making._drawer, jax_making._filler):
            cached.cache_clear()
    shapes = set(re.findall(r"[fu]32\[[\d,]+\]", "\n".join(texts)))
    assert "f32[64,32]" in shapes  # 256 over tp=4, 64 over dp=2
    assert not {"f32[256,64]", "u32[256,64]", "u32[16384]"} & shapes
    assert not re.search(r"all-gather|all-to-all|collective", "\n".join(texts))


def test_buffers_of_the_host_are_a_part_and_a_run(
    mesh: xd.DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    empty = torch.empty

    class Watched:
        """torch, with its allocations of blocks written down."""

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

        def empty(self, *size: Any, **options: Any) -> torch.Tensor:
            values = empty(*size, **options)
            sizes.append(values.numel())
            return values

    monkeypatch.setattr(blocks, "RUN", 1024)
    monkeypatch.setattr(blocks, "torch", Watched())
    made(mesh, "torch")
    tile = 64 * 256 // 8
    assert sizes
    assert max(sizes) == max(tile, 1024)
