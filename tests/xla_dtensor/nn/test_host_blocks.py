"""Values made run by run on the host: what torch draws at once, in blocks that devices hold.

No device and no host makes a whole parameter: the programs and the buffers are looked at.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import xla_dtensor as xd
from xla_dtensor.nn import host_blocks
from xla_dtensor.nn.host_blocks import HostBlocks, boxes, runs

DRAWS: dict[str, Callable[[torch.Tensor], Any]] = {
    "normal": lambda t: t.normal_(0.1, 0.02),
    "uniform": lambda t: t.uniform_(-0.3, 0.7),
    "exponential": lambda t: t.exponential_(2.0),
    "bernoulli": lambda t: t.bernoulli_(0.3),
    "random": lambda t: t.random_(100),
    "cauchy": lambda t: t.cauchy_(),
    "log_normal": lambda t: t.log_normal_(),
    "geometric": lambda t: t.geometric_(0.3),
}


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_torch_draws_run_by_run_what_it_draws_at_once(name: str, dtype: torch.dtype) -> None:
    """What the whole torch mode stands on; a torch that draws otherwise is found here."""
    for numel in (1, 15, 16, 17, 33, 4099, 100_003):
        for size in (16, 48, 4096):
            torch.manual_seed(3)
            whole = torch.empty(numel, dtype=dtype)
            DRAWS[name](whole)
            state = torch.get_rng_state()
            torch.manual_seed(3)
            parts = torch.empty(numel, dtype=dtype)
            for start, stop in runs(numel, size):
                DRAWS[name](parts[start:stop])
            assert torch.equal(whole, parts), (numel, size)
            assert torch.equal(state, torch.get_rng_state()), (numel, size)


@given(st.lists(st.integers(1, 5), max_size=4), st.data())
@settings(deadline=None)
def test_boxes_make_up_a_run(shape: list[int], data: st.DataObject) -> None:
    numel = math.prod(shape)
    stop = data.draw(st.integers(0, numel))
    start = data.draw(st.integers(0, stop))
    counted = torch.arange(numel).reshape(shape)
    found = list(boxes(start, stop, shape))
    parts = [counted[index].reshape(-1) for index, _, _ in found]
    assert torch.cat([*parts, torch.empty(0).long()]).tolist() == list(range(start, stop))
    assert [b - a for _, a, b in found] == [part.numel() for part in parts]
    assert len(found) <= max(2 * len(shape) - 1, 1)


@pytest.mark.parametrize("shape", [(), (10,), (7, 9), (8, 4, 3), (0, 4)], ids=str)
def test_blocks_become_the_tensor(
    mesh: xd.DeviceMesh, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_blocks, "RUN", 16)
    lies = [
        [Replicate(), Replicate()],
        [Shard(0), Replicate()],
        [Replicate(), Shard(len(shape) - 1)],
    ]
    for placements in lies if shape else lies[:1]:
        tensor = xd.zeros(shape, device_mesh=mesh, placements=placements)
        blocks = HostBlocks(tensor)
        for start, stop in runs(math.prod(shape)):
            blocks.write(start, torch.arange(start, stop).float())
        made = tensor.rewrapped(blocks.payload())
        assert torch.equal(made.cpu(), torch.arange(math.prod(shape)).float().reshape(shape))


def test_a_process_holds_its_blocks_once(mesh: xd.DeviceMesh) -> None:
    tensor = xd.zeros(8, 6, device_mesh=mesh, placements=[Shard(0), Replicate()])
    assert sorted(HostBlocks(tensor).buffers) == [(0, 0), (4, 0)]


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

    monkeypatch.setattr(host_blocks, "RUN", 1024)
    monkeypatch.setattr(host_blocks, "torch", Watched())
    made(mesh, "torch")
    tile = 64 * 256 // 8
    assert sizes
    assert max(sizes) == max(tile, 1024)
