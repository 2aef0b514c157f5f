"""What a compiled step says of itself: how fast it goes, and whose ops are whose."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import xla_dtensor as xd
from xla_dtensor.errors import CompileError, UnsupportedOpError
from xla_dtensor.runtimes.state import StepClock, num_tokens


def ticking(*seconds: float) -> Callable[[], float]:
    return iter(seconds).__next__


class TestClock:
    def test_the_median_from_call_to_call(self) -> None:
        clock = StepClock(ticking(0.0, 1.0, 2.0, 10.0, 11.0))
        for _ in range(5):
            clock.start()
        found = clock.metrics(tokens=100, flops=8, peak_flops=16.0)
        assert found == {
            "step_seconds": 1.0,
            "tokens_per_second": 100.0,
            "flops_per_step": 8,
            "flops_per_second": 8.0,
            "mfu": 0.5,
        }

    def test_what_is_not_known(self) -> None:
        clock = StepClock(ticking(0.0))
        clock.start()
        assert set(clock.metrics(None, None, None).values()) == {None}

    def test_compiling_is_no_step(self) -> None:
        clock = StepClock(ticking(0.0, 1.0, 60.0, 62.0))
        clock.start()
        clock.start()
        clock.interrupt()  # The second call compiles, until 60.0.
        clock.start()
        clock.start()
        assert clock.metrics(None, None, None)["step_seconds"] == 1.5

    def test_tokens(self) -> None:
        ids = torch.zeros(4, 32, dtype=torch.int64)
        assert num_tokens([torch.ones(999), ids, ids[:2], 7, None]) == 128
        assert num_tokens([torch.ones(3)]) is None


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 8)
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return x


def training(mesh: xd.DeviceMesh) -> tuple[Any, torch.Tensor]:
    model = Model()
    xd.distribute_module(model, mesh)

    def step(ids: torch.Tensor) -> torch.Tensor:
        model.zero_grad()
        loss = model(ids).square().mean()
        loss.backward()
        return loss.detach()

    ids = xd.distribute_tensor(torch.randint(0, 32, (8, 4)), mesh, [Shard(0), Replicate()])
    return xd.compile(step), ids


def test_metrics_of_a_step(mesh: xd.DeviceMesh) -> None:
    step, ids = training(mesh)
    with pytest.raises(CompileError, match="before its first call"):
        step.metrics()
    for _ in range(4):
        step(ids)
    found = step.metrics()
    assert found["step_seconds"] > 0
    assert found["tokens_per_second"] == pytest.approx(32 / found["step_seconds"])
    doubled = step.metrics(tokens_per_step=64)
    assert doubled["tokens_per_second"] == pytest.approx(64 / doubled["step_seconds"])


@pytest.mark.only_on("jax")
def test_flops_are_those_of_the_products(mesh: xd.DeviceMesh) -> None:
    step, ids = training(mesh)
    step(ids)
    # Two products a layer, 32 rows each; backward twice that, as even the first layer's input, the
    # embedding, has a gradient.
    forward = 2 * 2 * (2 * 32 * 8 * 16)
    assert step.metrics()["flops_per_step"] == 3 * forward
    assert step.metrics()["mfu"] is None  # Nobody knows what this processor can do.


@pytest.mark.only_on("jax")
def test_flops_of_loops_and_branches(mesh: xd.DeviceMesh) -> None:
    import jax
    import jax.numpy as jnp

    from xla_dtensor.runtimes.jax.compile.inspect import flops_of

    one = 2 * 4 * 4 * 4
    x = jnp.ones((4, 4))
    looped = jax.make_jaxpr(lambda x: jax.lax.scan(lambda c, _: (c @ x, None), x, length=7)[0])(x)
    assert flops_of(looped) == 7 * one
    chosen = jax.make_jaxpr(
        lambda x: jax.lax.cond(x[0, 0] > 0, lambda x: x @ x @ x, lambda x: x @ x, x)
    )(x)
    assert flops_of(chosen) == 2 * one
    image, kernel = jnp.ones((2, 6, 8, 8)), jnp.ones((10, 3, 3, 3))
    convolved = jax.make_jaxpr(
        lambda a, k: jax.lax.conv_general_dilated(a, k, (1, 1), "VALID", feature_group_count=2)
    )(image, kernel)
    assert flops_of(convolved) == 2 * (2 * 10 * 6 * 6) * (3 * 3 * 3)


@pytest.mark.only_on("jax")
def test_ops_carry_the_names_of_their_modules(mesh: xd.DeviceMesh) -> None:
    step, ids = training(mesh)
    step(ids)
    names = set(re.findall(r'op_name="jit\(\w+\)/([^"]*)"', step.hlo()))
    for path in ("Model/embed/", "Model/layers.0/up/", "Model/layers.1/down/"):
        assert any(name.startswith(path) for name in names), (path, names)
    for path in ("backward/Model/layers.0/up/", "backward/Model/layers.1/down/"):
        assert any(name.startswith(path) for name in names), (path, names)
    # A module's products are its own: dots of the backward stand under a module.
    dots = [name for name in names if name.endswith("dot_general")]
    assert dots
    assert all("layers." in name for name in dots), dots


class Failing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise KeyError(x.shape)


@pytest.mark.only_on("jax")
def test_a_failing_module_leaves_no_scope(mesh: xd.DeviceMesh) -> None:
    failing = Failing()

    def step(x: torch.Tensor) -> torch.Tensor:
        with contextlib.suppress(KeyError):
            failing(x)
        return (x * 2).sum()

    compiled: Any = xd.compile(step)
    compiled(xd.distribute_tensor(torch.ones(8), mesh))
    assert "Failing" not in compiled.hlo()


@pytest.mark.only_on("jax")
def test_a_profile_is_written(mesh: xd.DeviceMesh, tmp_path: Path) -> None:
    step, ids = training(mesh)
    step(ids)
    with xd.profile(tmp_path):
        step(ids)
    assert list(tmp_path.rglob("*.xplane.pb"))


@pytest.mark.only_on("torch_xla")
def test_torch_xla_records_no_profile(mesh: xd.DeviceMesh, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedOpError, match="profiles"):
        xd.profile(tmp_path)
