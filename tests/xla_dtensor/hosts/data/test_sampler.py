"""The order of a data set, and the rows of it that a process reads."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard

import xla_dtensor as xd
from xla_dtensor.errors import DataError
from xla_dtensor.hosts.data.sampler import shuffled

ROWS = [Shard(0), Replicate()]


@settings(deadline=None)
@given(st.integers(1, 500) | st.integers(65_530, 70_000), st.integers(-9, 2**70), st.integers(0, 9))
def test_an_order_is_a_permutation(length: int, seed: int, epoch: int) -> None:
    order = shuffled(np.arange(length), length, seed, epoch)
    assert np.array_equal(np.sort(order), np.arange(length))


def test_orders_differ_and_stay() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        return shuffled(np.arange(9), 9, seed, epoch).tolist()

    assert order(0, 0) == [4, 8, 0, 1, 7, 6, 2, 5, 3]
    assert order(0, 1) != order(1, 0) != order(0, 0)
    large = shuffled(np.arange(5), 10**12, 3, 1)
    assert large.tolist()[:3] == [858699356055, 148797858395, 560024622446]


@pytest.mark.parametrize("length", [2_000, 200_000])
def test_an_order_looks_random(length: int) -> None:
    order = shuffled(np.arange(length), length, 0, 0)
    assert abs(np.corrcoef(np.arange(length), order)[0, 1]) < 0.06
    assert np.mean(np.diff(order) == 1) < 0.01
    halves = order[: length // 2] < length // 2
    assert abs(halves.mean() - 0.5) < 0.05


def test_batches(mesh: xd.DeviceMesh) -> None:
    def batches(**options: Any) -> list[list[int]]:
        return list(xd.ShardedSampler(range(10), 4, mesh, ROWS, **options))

    assert batches(shuffle=False) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert batches(shuffle=False, last="pad")[2] == [8, 9]
    assert sorted(chain.from_iterable(batches(last="pad"))) == list(range(10))
    assert batches(seed=1) != batches(seed=2)
    with pytest.raises(DataError, match=r"makes 2 whole batches and leaves 2 rows\. Pass another"):
        batches(last="error")
    with pytest.raises(DataError, match=r"makes 0 whole batches and leaves 3 rows\. Pass another"):
        xd.ShardedSampler(3, 4, mesh, ROWS)


def test_placements_of_all_kinds(mesh: xd.DeviceMesh) -> None:
    for placements in (None, ROWS, ("dp", None), {"x": [ROWS]}, [Shard(1), Shard(2)]):
        sampler = xd.ShardedSampler(8, 8, mesh, placements, shuffle=False)
        assert list(sampler) == [list(range(8))]


def test_going_on(mesh: xd.DeviceMesh) -> None:
    sampler = xd.ShardedSampler(20, 4, mesh, ROWS, seed=2)
    sampler.set_epoch(3)
    everything = list(sampler)
    sampler.load_state_dict({**sampler.state_dict(), "batch": 3})
    assert list(sampler) == everything[3:]
    assert list(sampler) == everything
