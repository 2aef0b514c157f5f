"""Stacks of storages: each storage has its value, however they came together and apart."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import xla_dtensor as xd

pytestmark = [pytest.mark.only_on("jax"), pytest.mark.usefixtures("runtime")]


def placed(values: list[float], spec: Any, mesh: xd.DeviceMesh) -> list[Any]:
    """Storages of one value each."""
    import torch

    tensors = [xd.distribute_tensor(torch.full((8, 4), v), mesh, spec) for v in values]
    payloads: list[Any] = [tensor._local_tensor for tensor in tensors]
    return [payload._storage for payload in payloads]


def values_of(storages: list[Any]) -> list[float]:
    return [float(np.asarray(s.array)[0, 0]) for s in storages]


LAYOUTS = [("tp", "dp"), (None, "tp"), (None, None)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_rows_lie_as_they_did(mesh: xd.DeviceMesh, layout: Any) -> None:
    from xla_dtensor.runtimes.jax.compile.layers.stacks import stack_of

    storages = placed([0.0, 1.0, 2.0], layout, mesh)
    before = [s.array.sharding for s in storages]
    stack = stack_of(storages)
    assert stack.array.shape == (3, 8, 4)
    assert stack.array.sharding.shard_shape((3, 8, 4)) == (3, *before[0].shard_shape((8, 4)))
    assert [s.lies for s in storages] == before
    assert stack_of(storages) is stack, "nothing is stacked twice"
    assert values_of(storages) == [0.0, 1.0, 2.0]
    assert [s.array.sharding for s in storages] == before
    assert all(s.row is None for s in storages)


def test_a_written_row_leaves_and_the_others_stay_right(mesh: xd.DeviceMesh) -> None:
    from xla_dtensor.runtimes.jax.compile.layers.stacks import stack_of

    storages = placed([0.0, 1.0, 2.0], ("tp", None), mesh)
    stack = stack_of(storages)
    storages[1].array = storages[1].array * 0 + 9
    again = stack_of(storages)
    assert again is not stack
    assert values_of(storages) == [0.0, 9.0, 2.0]


def test_a_storage_in_two_stacks_is_a_row_of_the_last(mesh: xd.DeviceMesh) -> None:
    from xla_dtensor.runtimes.jax.compile.layers.stacks import stack_of

    storages = placed([0.0, 1.0, 2.0, 3.0], ("tp", None), mesh)
    stack_of(storages[:3])
    turned = stack_of([storages[2], storages[1]])
    assert np.asarray(turned.array)[:, 0, 0].tolist() == [2.0, 1.0]
    assert storages[1].row == (turned, 1)
    assert values_of(storages) == [0.0, 1.0, 2.0, 3.0]


def test_a_stack_outlives_a_storage_and_is_freed_with_the_last(mesh: xd.DeviceMesh) -> None:
    from xla_dtensor.runtimes.jax.compile.layers.stacks import stack_of

    storages = placed([0.0, 1.0], ("tp", None), mesh)
    stack = weakref.ref(stack_of(storages))
    kept = storages.pop()
    storages.clear()
    gc.collect()
    assert values_of([kept]) == [1.0]
    gc.collect()
    assert stack() is None


def test_what_a_program_returns_with_its_rows_sharded(mesh: xd.DeviceMesh) -> None:
    """XLA may lay a new stack over the devices as it likes, layer by layer too."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    from xla_dtensor.runtimes.jax.compile.layers.stacks import give_stack

    storages = placed([0.0, 0.0], (None, None), mesh)
    lies = storages[0].array.sharding
    axis = lies.mesh.axis_names[0]
    array = jax.device_put(
        np.stack([np.full((8, 4), 5.0), np.full((8, 4), 6.0)]),
        NamedSharding(lies.mesh, PartitionSpec(axis)),
    )
    give_stack(array, storages)
    assert values_of(storages) == [5.0, 6.0]


def test_tiles_are_stacked_one_device_at_a_time(
    mesh: xd.DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with several processes, which cannot all be asked to run a program."""
    from xla_dtensor.runtimes.jax.compile.layers import stacks as jax_stacks

    storages = placed([3.0, 4.0], ("tp", "dp"), mesh)
    lies = storages[0].array.sharding
    monkeypatch.setattr(jax_stacks, "_is_here", lambda sharding: False)
    for name in ("_writer", "_reader", "_maker"):
        monkeypatch.delattr(jax_stacks, name)
    stack = jax_stacks.stack_of(storages)
    assert np.asarray(stack.array)[:, 0, 0].tolist() == [3.0, 4.0]
    assert values_of(storages) == [3.0, 4.0]
    assert all(s.array.sharding == lies for s in storages)


ACTIONS = ("stack", "part", "read", "write", "turned")


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 3)), max_size=8))
def test_whatever_happens_each_storage_has_its_value(
    mesh: xd.DeviceMesh, actions: list[tuple[str, int]]
) -> None:
    from xla_dtensor.runtimes.jax.compile.layers.stacks import stack_of

    storages = placed([0.0, 1.0, 2.0, 3.0], ("tp", None), mesh)
    expected = [0.0, 1.0, 2.0, 3.0]
    for turn, (action, i) in enumerate(actions):
        if action == "stack":
            stack_of(storages)
        elif action == "part":
            stack_of([storages[i], storages[(i + 1) % 4]])
        elif action == "turned":
            found = stack_of(storages[i:] + storages[:i])
            assert np.asarray(found.array)[:, 0, 0].tolist() == expected[i:] + expected[:i]
        elif action == "read":
            assert values_of([storages[i]]) == [expected[i]]
        else:
            expected[i] = 10.0 + turn
            storages[i].array = storages[i].array * 0 + expected[i]
    assert values_of(storages) == expected
