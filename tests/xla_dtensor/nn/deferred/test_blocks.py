"""Values made run by run on the host: what torch draws at once, in blocks that devices hold."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch.distributed.tensor import Replicate, Shard

import xla_dtensor as xd
from xla_dtensor.nn.deferred.blocks import HostBlocks, boxes, runs

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
    monkeypatch.setattr("xla_dtensor.nn.deferred.blocks.RUN", 16)
    lies = [
        [Replicate(), Replicate()],
        [Shard(0), Replicate()],
        [Replicate(), Shard(len(shape) - 1)],
    ]
    for placements in lies if shape else lies[:1]:
        tensor = xd.zeros(shape, device_mesh=mesh, placements=placements)
        blocks = HostBlocks(tensor)
        blocks.write_in_runs(lambda values, start: values.copy_(torch.arange(len(values)) + start))
        made = tensor.rewrapped(blocks.payload())
        assert torch.equal(made.cpu(), torch.arange(math.prod(shape)).float().reshape(shape))


def test_a_process_holds_its_blocks_once(mesh: xd.DeviceMesh) -> None:
    tensor = xd.zeros(8, 6, device_mesh=mesh, placements=[Shard(0), Replicate()])
    assert sorted(HostBlocks(tensor).buffers) == [(0, 0), (4, 0)]
