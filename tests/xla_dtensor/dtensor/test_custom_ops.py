"""Ops that users define by `torch.library.custom_op`: values, gradients, writes, what is read."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Shard
from torch.utils._pytree import tree_map

import xla_dtensor as xd
from xla_dtensor.runtimes import Runtime

settings = SimpleNamespace(times=1)


@torch.library.custom_op("xla_dtensor_test::tiled", mutates_args=())
def tiled(x: torch.Tensor) -> torch.Tensor:
    """`settings.times` copies, one after another."""
    return torch.cat([x] * settings.times)


@tiled.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty((x.shape[0] * settings.times, *x.shape[1:]))


def _sum_of_copies(context: Any, grad: torch.Tensor) -> torch.Tensor:
    return grad.unflatten(0, (settings.times, -1)).sum(0)


tiled.register_autograd(_sum_of_copies)


@torch.library.custom_op("xla_dtensor_test::scale_and_add_", mutates_args=("x",))
def scale_and_add_(x: torch.Tensor, factor: float) -> None:
    """Write `factor * x + settings.times`."""
    x.mul_(factor).add_(settings.times)


@torch.library.custom_op("xla_dtensor_test::sin_cos", mutates_args=())
def sin_cos(x: torch.Tensor, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Two results."""
    return x.sin() * scale, x.cos() * scale


@sin_cos.register_fake
def _(x: torch.Tensor, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


def gradient(x: torch.Tensor) -> torch.Tensor:
    """The derivative through a custom op's own rule."""
    x = x.detach().clone().requires_grad_()
    tiled(x).square().sum().backward()
    assert x.grad is not None
    return x.grad


def written(x: torch.Tensor) -> torch.Tensor:
    """What a custom op writes to."""
    x = x.clone()
    scale_and_add_(x, 2.0)
    return x


@pytest.fixture(autouse=True)
def _one_copy() -> None:
    settings.times = 1


CALLS: list[Callable[[torch.Tensor], Any]] = [
    lambda x: tiled(x) * 2,
    gradient,
    lambda x: sin_cos(x, scale=3.0),
    lambda x: sin_cos(x[1:])[1],
]


@pytest.mark.parametrize("compiled", [False, True])
def test_values_follow_what_the_op_reads(mesh: xd.DeviceMesh, compiled: bool) -> None:
    """Its shape rule and its kernel read a setting: eager and compiled calls see it change."""
    whole = torch.linspace(-1, 1, 8)
    x = xd.distribute_tensor(whole, mesh, [Shard(0), Shard(0)])

    def every_call(x: torch.Tensor) -> list[Any]:
        return [call(x) for call in CALLS]

    tiled(x)  # what was asked before a step is compiled must not stand for what it finds
    step: Any = xd.compile(every_call) if compiled else every_call
    for settings.times in (1, 2):
        expected = every_call(whole)
        found = tree_map(lambda t: t.full_tensor().cpu(), step(x))
        torch.testing.assert_close(found, expected)


def test_writes(mesh: xd.DeviceMesh, runtime: Runtime) -> None:
    whole = torch.linspace(-1, 1, 8)
    x = xd.distribute_tensor(whole, mesh, [Shard(0), Shard(0)])
    # On torch_xla the op runs on the host, which a compiled step refuses.
    calls: list[Any] = [written, xd.compile(written)] if runtime.name == "jax" else [written]
    for settings.times in (1, 2):
        for call in calls:
            torch.testing.assert_close(call(x).full_tensor().cpu(), written(whole))


@pytest.mark.parametrize("compiled", [False, True])
def test_default_dtype_of_results_is_the_one_in_force(mesh: xd.DeviceMesh, compiled: bool) -> None:
    """Of ints torch makes floats of the default dtype, which a program may change."""
    whole = torch.arange(8)

    def floats(x: torch.Tensor) -> list[torch.Tensor]:
        return [x / 3, x.exp(), torch.sigmoid(x), torch.ones_like(x) * 0.1, torch.softmax(x / 1, 0)]

    x = xd.distribute_tensor(whole, mesh, [Shard(0), Shard(0)])
    step: Any = xd.compile(floats) if compiled else floats
    before = torch.get_default_dtype()
    try:
        for dtype in (torch.float32, torch.float64, torch.float32):
            torch.set_default_dtype(dtype)
            for found, expected in zip(step(x), floats(whole), strict=True):
                assert found.dtype == found.to_local().dtype == expected.dtype == dtype
                torch.testing.assert_close(found.full_tensor().cpu(), expected)
    finally:
        torch.set_default_dtype(before)
