"""A model that no host holds whole gets its values: the same on any number of processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import xla_dtensor as xd
from tests.hosts import Hosts
from tests.xla_dtensor import host_tasks_init as tasks

pytestmark = pytest.mark.only_on("jax")
_TASKS = "tests.xla_dtensor.host_tasks_init"


@pytest.mark.parametrize("rng", ["device", "torch"])
def test_the_same_on_any_number_of_processes(
    hosts: Callable[..., Hosts], mesh: xd.DeviceMesh, rng: Any
) -> None:
    alone = tasks.materialized(rng, (2, 4))
    for processes, devices, shape in ((2, 4, (2, 4)), (4, 2, (4, 2))):
        found = hosts(processes, devices).run(f"{_TASKS}:materialized", rng=rng, mesh_shape=shape)
        for each in found:
            assert each["checksums"] == alone["checksums"]
            assert each["tied"]
            assert each["parts"] == [(48 // shape[0], 24 // shape[1])] * devices


@pytest.mark.parametrize("rng", ["device", "torch"])
def test_all_processes_hear_of_unequal_seeds(hosts: Callable[..., Hosts], rng: Any) -> None:
    for message in hosts(2, 4).run(f"{_TASKS}:unequal_seeds", rng=rng):
        assert "would draw different numbers" in message


@pytest.fixture
def four() -> Iterator[Hosts]:
    """Four processes of their own: memory that others used must not be in the way."""
    group = Hosts(4, 2, MALLOC_ARENA_MAX="2", MALLOC_MMAP_THRESHOLD_="65536")
    yield group
    group.close()


@pytest.mark.thorough
@pytest.mark.parametrize("rng", ["device", "torch"])
def test_no_process_holds_more_than_its_part(four: Hosts, rng: Any) -> None:
    # 400 MB in 25 matrices of 16 MB, over 4 processes.
    found = four.run(f"{_TASKS}:memory", rng=rng, layers=25, width=2000, timeout_seconds=300)
    for each in found:
        print(rng, {name: round(value, 1) for name, value in each.items()})
    for each in found:
        part = each["model"] / 4
        assert each["model"] == pytest.approx(400)
        assert each["after"] - each["before"] >= 0.8 * part
        # Its part, and at a time one matrix on the host and what draws it: not the model.
        assert each["peak"] - each["before"] < part + 60
        assert each["peak"] - each["before"] < each["model"] / 2


@pytest.mark.thorough
def test_the_whole_would_be_seen() -> None:
    """The measure can fail: one process that holds the model whole."""
    group = Hosts(1, 2)
    try:
        each = group.run(f"{_TASKS}:memory", rng="device", layers=25, width=2000)[0]
    finally:
        group.close()
    assert each["peak"] - each["before"] > 300


def test_an_eager_model_is_the_torch_one(mesh: xd.DeviceMesh) -> None:
    torch.manual_seed(3)
    eager: nn.Module = tasks.Net()
    assert tasks.materialized("torch", (2, 4))["checksums"] == tasks.checksums(eager)
