"""Seeding a mesh, and the trackers of random states."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh as TorchDeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.utils.checkpoint import checkpoint

import xla_dtensor as xd
from xla_dtensor.dtensor import random as rng
from xla_dtensor.dtensor.random import OffsetBasedRNGTracker, RNGStatesTracker
from xla_dtensor.errors import (
    ArgumentTypeError,
    CompileError,
    DistributeError,
    MeshRankError,
    RngStateError,
)
from xla_dtensor.runtimes import Runtime
from xla_dtensor.runtimes.state import follow_torch_seed, pack_state, unpack_state


@pytest.fixture
def x(mesh: xd.DeviceMesh) -> Any:
    return xd.distribute_tensor(torch.ones(16, 8), mesh, [Shard(0), Replicate()])


@pytest.fixture
def cpu_mesh(tmp_path: Path) -> Iterator[TorchDeviceMesh]:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    yield TorchDeviceMesh("cpu", [0])
    torch.distributed.destroy_process_group()


def draw(x: Any) -> torch.Tensor:
    return torch.rand_like(x).cpu()


# ---------------------------------------------------------------------- seeding


def test_manual_seed_seeds_the_mesh_and_torch(mesh: xd.DeviceMesh, x: Any) -> None:
    values = []
    for seed in (1, 1, 2):
        xd.manual_seed(seed, mesh)
        values.append((draw(x), torch.rand(4)))
    assert torch.equal(values[0][0], values[1][0])
    assert torch.equal(values[0][1], values[1][1])
    assert not torch.equal(values[0][0], values[2][0])


def test_manual_seed_takes_a_submesh_and_any_seed_of_64_bits(mesh: xd.DeviceMesh, x: Any) -> None:
    found = []
    for seed in (-1, -2, 2**64 - 5, 2**32, 0):
        xd.manual_seed(seed, mesh["tp"])
        found.append(draw(x))
        xd.manual_seed(seed=seed, device_mesh=mesh.value)
        assert torch.equal(draw(x), found[-1])
    assert len({tuple(values.flatten().tolist()) for values in found}) == len(found)


def test_a_mesh_of_xla_is_supported(mesh: xd.DeviceMesh) -> None:
    assert xd.is_rng_supported_mesh(mesh)
    assert xd.is_rng_supported_mesh(mesh["dp"])
    assert xd.is_rng_supported_mesh(mesh.value)


def test_a_cpu_mesh_gets_torchs_warnings(cpu_mesh: TorchDeviceMesh) -> None:
    random, manual = (
        f"DTensor {what} may not have complete support on cpu device mesh"
        for what in ("random operators", re.escape("manual_seed()"))
    )
    with pytest.warns(UserWarning, match=random):
        assert not xd.is_rng_supported_mesh(cpu_mesh)
    before = torch.get_rng_state()
    with pytest.warns(UserWarning, match=manual), pytest.warns(UserWarning, match=random):
        xd.manual_seed(0, cpu_mesh)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_process_outside_the_mesh_is_refused(
    mesh: xd.DeviceMesh, monkeypatch: pytest.MonkeyPatch, x: Any, runtime: Runtime
) -> None:
    before = runtime.get_rng_state()
    monkeypatch.setattr(xd.DeviceMesh, "get_coordinate", lambda self: None)
    with pytest.raises(MeshRankError, match="requires the current rank to be a part of the device"):
        xd.manual_seed(0, mesh)
    assert issubclass(MeshRankError, RuntimeError)
    assert torch.equal(runtime.get_rng_state(), before)


def test_what_is_no_mesh_is_refused() -> None:
    for call in (xd.is_rng_supported_mesh, lambda mesh: xd.manual_seed(0, mesh)):
        with pytest.raises(ArgumentTypeError, match="an object of type=int was passed"):
            call(3)


def test_seeding_a_mesh_makes_its_tracker(
    mesh: xd.DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rng, "_rng_tracker", None)
    xd.manual_seed(0, mesh)
    tracker: Any = rng._rng_tracker
    assert isinstance(tracker, OffsetBasedRNGTracker)
    xd.manual_seed(1, mesh)
    assert rng._rng_tracker is tracker


# ---------------------------------------------------------------------- the runtime's state


def test_a_state_that_is_put_back_repeats(runtime: Runtime, x: Any) -> None:
    state = runtime.get_rng_state()
    assert (state.dtype, tuple(state.shape)) == (torch.uint8, (8,))
    first = draw(x)
    assert not torch.equal(runtime.get_rng_state(), state)
    runtime.set_rng_state(state)
    assert torch.equal(draw(x), first)


def test_all_states_put_back_repeat_and_go_on(runtime: Runtime, x: Any) -> None:
    states = torch.get_rng_state(), runtime.get_rng_state()
    first = [draw(x) for _ in range(2)]
    torch.set_rng_state(states[0])
    runtime.set_rng_state(states[1])
    again = [draw(x) for _ in range(4)]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=False))
    assert not any(torch.equal(a, b) for a in first for b in again[2:])


def test_a_state_of_another_kind_is_refused(runtime: Runtime) -> None:
    for state in (torch.get_rng_state(), torch.zeros(8), torch.zeros(2, 4, dtype=torch.uint8), 3):
        with pytest.raises(ArgumentTypeError, match=r"a plain uint8 tensor of shape \(8,\)"):
            runtime.set_rng_state(state)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("number", [0, 1, 2**63 - 1, 2**63, 2**64 - 1])
def test_a_packed_state_is_read_back(number: int) -> None:
    assert unpack_state(pack_state(number)) == number


def test_a_data_loaders_worker_does_not_seed_the_devices(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = runtime.get_rng_state()
    with monkeypatch.context() as worker:
        worker.setattr(os, "getpid", lambda: -1)
        torch.manual_seed(0)
    assert torch.equal(runtime.get_rng_state(), before)
    torch.manual_seed(0)
    assert not torch.equal(runtime.get_rng_state(), before)


def test_there_is_no_device_of_the_backend_that_hears_of_seeds(runtime: Runtime) -> None:
    ear = getattr(torch, torch._C._get_privateuse1_backend_name())
    assert (ear.is_available(), ear.is_initialized(), ear.device_count()) == (False, False, 0)


def test_another_packages_backend_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    other = ModuleType("other")
    name = torch._C._get_privateuse1_backend_name()
    monkeypatch.setattr(torch, name, other, raising=False)
    with caplog.at_level("WARNING", logger="xla_dtensor"):
        assert not follow_torch_seed(lambda seed: None)
    assert "torch.manual_seed does not reach" in caplog.text
    assert not hasattr(other, "manual_seed_all")


# ---------------------------------------------------------------------- torch's tracker


def test_a_region_without_generator_draws_the_devices_numbers(mesh: xd.DeviceMesh, x: Any) -> None:
    xd.manual_seed(0, mesh)
    expected = [draw(x) for _ in range(2)]
    xd.manual_seed(0, mesh)
    tracker = OffsetBasedRNGTracker(mesh)
    for enabled, values in zip((True, False), expected, strict=True):
        tracker.distribute_region_enabled = enabled
        assert tracker.distribute_region_enabled is enabled
        with tracker._distribute_region(x._spec):
            assert torch.equal(draw(x), values)


def test_a_region_draws_from_its_generator(mesh: xd.DeviceMesh, x: Any, runtime: Runtime) -> None:
    tracker = OffsetBasedRNGTracker(mesh)
    before, values = runtime.get_rng_state(), []
    for seed in (7, 7, 8):
        generator = torch.Generator().manual_seed(seed)
        for _ in range(2):
            with tracker._distribute_region(x._spec, generator=generator):
                # Read behind the region: torch_xla's own generator advances with each program.
                drawn = torch.rand_like(x)
            values.append(drawn)
    assert torch.equal(runtime.get_rng_state(), before)
    found = [value.cpu() for value in values]
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])
    assert not torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[4])


def test_the_trackers_device_state(mesh: xd.DeviceMesh, x: Any) -> None:
    tracker = OffsetBasedRNGTracker(device_mesh=mesh, run_state_sync=False)
    state = tracker._get_device_state()
    first = draw(x)
    tracker._set_device_state(state)
    assert torch.equal(draw(x), first)
    tracker._manual_seed(3)
    first = draw(x)
    xd.manual_seed(3, mesh)
    assert torch.equal(draw(x), first)


def test_states_that_differ_by_process_are_made_one(
    mesh: xd.DeviceMesh,
    runtime: Runtime,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(type(runtime), "first_process_state", lambda self: pack_state(77))
    with caplog.at_level("WARNING", logger="xla_dtensor"):
        OffsetBasedRNGTracker(mesh)
    assert "take over the first one's random state" in caplog.text
    assert torch.equal(runtime.get_rng_state(), pack_state(77))


def test_the_tracker_refuses_a_cpu_mesh(cpu_mesh: TorchDeviceMesh, runtime: Runtime) -> None:
    with pytest.raises(DistributeError, match="device_type='cpu' was passed"):
        OffsetBasedRNGTracker(cpu_mesh)


# ---------------------------------------------------------------------- named states


@pytest.fixture
def tracker(runtime: Runtime) -> RNGStatesTracker:
    made = RNGStatesTracker()
    made.add("model-parallel-rng", 11)
    made.add("other", 12)
    return made


def test_named_states_go_on_by_themselves(
    tracker: RNGStatesTracker, x: Any, mesh: xd.DeviceMesh
) -> None:
    def named(name: str) -> Any:
        with tracker.fork(name):
            return torch.rand_like(x)

    xd.manual_seed(0, mesh)
    plain = [torch.rand_like(x) for _ in range(2)]
    values = [named("other"), named("other"), named("model-parallel-rng")]
    found = [value.cpu() for value in (*plain, *values)]
    assert all(not torch.equal(a, b) for i, a in enumerate(found) for b in found[:i])

    xd.manual_seed(0, mesh)
    again = RNGStatesTracker()
    again.add("other", 12)
    tracker = again
    mixed = [torch.rand_like(x), named("other"), torch.rand_like(x), named("other")]
    mixed = [value.cpu() for value in mixed]
    assert torch.equal(torch.stack(mixed), torch.stack([found[i] for i in (0, 2, 1, 3)]))


def test_named_states_are_saved_and_put_back(tracker: RNGStatesTracker, x: Any) -> None:
    def values() -> list[torch.Tensor]:
        drawn = []
        for name in ("other", "model-parallel-rng", "other"):
            with tracker.fork(name):
                drawn.append(torch.rand_like(x))
        return [value.cpu() for value in drawn]

    states, cpu = tracker.get_states(), torch.get_rng_state()
    first = values()
    assert not torch.equal(tracker.get_states()["other"], states["other"])
    torch.set_rng_state(cpu)
    tracker.set_states(states)
    assert all(torch.equal(a, b) for a, b in zip(values(), first, strict=True))
    assert not any(torch.equal(a, b) for a in values() for b in first)
    fresh = RNGStatesTracker()
    fresh.set_states(states)
    tracker = fresh
    assert all(torch.equal(a, b) for a, b in zip(values(), first, strict=True))


def test_a_compiled_step_forks(tracker: RNGStatesTracker, x: Any) -> None:
    def draws(x: Any) -> Any:
        with tracker.fork():
            named = torch.rand_like(x)
        return named, torch.rand_like(x)

    step = xd.compile(draws)
    step(x)
    step(x)
    traced, states = step.stats()["traces"], tracker.get_states()
    found = [[value.cpu() for value in step(x)] for _ in range(2)]
    assert not torch.equal(found[0][0], found[1][0])
    assert not torch.equal(found[0][0], found[0][1])
    tracker.set_states(states)
    again = [value.cpu() for value in step(x)]
    assert torch.equal(again[0], found[0][0])
    assert not torch.equal(again[1], found[0][1])
    assert step.stats()["traces"] == traced


@pytest.mark.only_on("jax")
def test_a_compiled_step_forks_what_was_added_anew(x: Any) -> None:
    tracker = RNGStatesTracker()
    tracker.add("named", 5)

    def step(x: Any) -> Any:
        with tracker.fork("named"):
            return torch.rand_like(x)

    compiled, found = xd.compile(step), []
    for _ in range(3):
        found.append([compiled(x).cpu(), compiled(x).cpu()])
        tracker.reset()
        tracker.add("named", 5)
    torch.testing.assert_close(found[1:], found[:1] * 2)
    assert not torch.equal(*found[0])


@pytest.mark.only_on("jax")
def test_a_state_cannot_be_read_in_a_program(x: Any, runtime: Runtime) -> None:
    def step(x: Any) -> Any:
        runtime.get_rng_state()
        return x

    with pytest.raises(CompileError, match="random number generator's state"):
        xd.compile(step)(x)


@pytest.mark.parametrize("compiled", [False, True])
def test_checkpoint_repeats_a_fork(tracker: RNGStatesTracker, x: Any, compiled: bool) -> None:
    def block(x: Any) -> Any:
        x = F.dropout(x, 0.5)
        with tracker.fork():
            return F.dropout(x, 0.5).sin()

    def step(x: Any) -> Any:
        y: Any = checkpoint(block, x, use_reentrant=False)
        return y.detach(), torch.autograd.grad(y.sum(), x)[0]

    run = xd.compile(step) if compiled else step
    results = [run(x.requires_grad_()) for _ in range(3)]
    kept = [y.cpu() != 0 for y, _ in results]
    assert all(torch.equal(k, grad.cpu() != 0) for k, (_, grad) in zip(kept, results, strict=True))
    assert not torch.equal(kept[0], kept[1])
    assert not torch.equal(kept[1], kept[2])


def test_seeding_torch_leaves_named_states_where_they_are(
    tracker: RNGStatesTracker, x: Any
) -> None:
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        with tracker.fork():
            drawn = torch.rand_like(x)
        found.append(drawn.cpu())
    assert not torch.equal(*found)


def test_names_and_seeds_are_used_once(tracker: RNGStatesTracker) -> None:
    with pytest.raises(RngStateError, match="The seed 11 already exists"):
        tracker.add("third", 11)
    with pytest.raises(RngStateError, match="The state 'other' already exists"):
        tracker.add("other", 13)
    with (
        pytest.raises(RngStateError, match="The state 'third' is not added"),
        tracker.fork("third"),
    ):
        pass
    assert tracker.is_initialized()
    tracker.reset()
    assert not tracker.is_initialized()
    tracker.add("other", 11)


def test_a_fork_ends_with_an_error(tracker: RNGStatesTracker, x: Any, mesh: Any) -> None:
    xd.manual_seed(0, mesh)
    expected = draw(x)
    xd.manual_seed(0, mesh)
    with pytest.raises(KeyError), tracker.fork():
        raise KeyError
    assert torch.equal(draw(x), expected)
