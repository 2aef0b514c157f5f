"""Branches on tensors in compiled steps: a program for each way, and the values of PyTorch.

What a step does where its program goes the wrong way is taken back, and done once by the program
that goes the right one: to parameters, arguments, gradients, generators, CPU tensors and in Python.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import xla_dtensor as xd
from tests.xla_dtensor.step_check_forms import BRANCHES
from xla_dtensor.errors import CheckFailedError, CompileError

pytestmark = pytest.mark.only_on("jax")


def lies(values: Any, mesh: xd.DeviceMesh) -> Any:
    return xd.distribute_tensor(torch.as_tensor(values), mesh, ("dp",))


@pytest.mark.parametrize("form", BRANCHES, ids=lambda form: form.__name__)
def test_each_way_is_a_program(mesh: xd.DeviceMesh, form: Callable[[Any], Any]) -> None:
    step: Any = xd.compile(form)
    low = -1.0 if form.__name__ != "waits" else 0.5  # it would wait for ever
    plain = (torch.arange(1.0, 9.0), torch.arange(8.0) + low, torch.arange(4.0, 12.0))
    for x in (*plain, *plain):
        assert torch.equal(step(lies(x, mesh)).cpu(), form(x))
        assert step.verify(lies(x, mesh))
    traces = step.stats()["traces"]
    for x in plain:
        step(lies(x, mesh))
    assert step.stats()["traces"] == traces


def test_one_run_tells_of_all_branches(mesh: xd.DeviceMesh) -> None:
    @xd.compile
    def step(x: Any) -> Any:
        a = x * 2 if x[0] > 0 else x - 1
        b = a * 3 if x[1] > 0 else a - 2
        return b * 5 if x[2] > 0 else b - 3

    assert step(lies(-torch.ones(8), mesh)).cpu().tolist() == [-7.0] * 8
    assert step.stats()["traces"] == 2


@pytest.mark.parametrize("name", ["cov", "svd"])
def test_torch_asks_for_several_truth_values_in_one_call(mesh: xd.DeviceMesh, name: str) -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(8, 4, generator=draw, dtype=torch.complex128)
    weights = torch.linspace(1, 2, 4, dtype=torch.float64)

    def covariance(x: Any, weights: Any) -> Any:
        return torch.cov(x.real, aweights=weights, fweights=weights.round().long())

    def gradient(x: Any, weights: Any) -> Any:
        leaf = x.detach().requires_grad_()
        factor, sizes, _ = torch.linalg.svd(leaf, full_matrices=False)
        loss = (factor.abs().square() * weights).sum() + sizes.sum()
        return torch.autograd.grad(loss, leaf)[0]

    on_mesh = xd.distribute_tensor(x, mesh, ("dp", None))
    form: Any = {"cov": covariance, "svd": gradient}[name]
    found = xd.compile(form)(on_mesh, xd.distribute_tensor(weights, mesh))
    torch.testing.assert_close(found.cpu(), form(x, weights), rtol=1e-9, atol=1e-9)
    if name == "cov":
        with pytest.raises(RuntimeError, match="weights cannot be negative"):
            xd.compile(form)(on_mesh, xd.distribute_tensor(-weights, mesh))


def test_an_error_tells_those_of_other_ways(mesh: xd.DeviceMesh) -> None:
    def step(x: Any) -> Any:
        if x.sum() > 0:
            x = x + 1
            raise KeyError("high")
        x = x - 1
        raise KeyError("low")

    with pytest.raises(KeyError, match="low") as caught:
        xd.compile(step)(lies(torch.ones(8), mesh))
    assert "if x.sum() > 0:" in "".join(caught.value.__notes__)
    assert "KeyError: 'high'" in "".join(caught.value.__notes__)


def test_a_loop_that_waits_for_a_value(mesh: xd.DeviceMesh) -> None:
    def root(x: Any) -> tuple[Any, int]:
        y, rounds = x, 0
        while (y * y - x).abs().max() > 1e-6:
            y, rounds = (y + x / y) / 2, rounds + 1
        return y, rounds

    step: Any = xd.compile(root)
    for top in (9.0, 9e4, 9.0):
        x = torch.linspace(1, top, 8, dtype=torch.float64)
        found, expected = step(lies(x, mesh)), root(x)
        torch.testing.assert_close(found[0].cpu(), expected[0], rtol=1e-12, atol=0)
        assert found[1] == expected[1]


def test_what_a_branch_costs_is_said_once(
    mesh: xd.DeviceMesh, caplog: pytest.LogCaptureFixture
) -> None:
    step: Any = xd.compile(lambda x: x * 2 if x.sum() > 0 else x * 3)
    with caplog.at_level(logging.WARNING, "xla_dtensor"):
        for sign in (1.0, -1.0, 1.0):
            step(lies([sign] * 8, mesh))
    said = [text for text in caplog.messages if "branches on a tensor" in text]
    assert len(said) == 1
    assert f"{__file__}:" in said[0]
    assert "torch.where" in said[0]
    assert "x.sum() > 0" in step.explain()
    assert "came out False" in step.stats()["reasons"][1]


@pytest.mark.thorough
def test_too_many_ways(mesh: xd.DeviceMesh) -> None:
    weight = nn.Parameter(lies([1.0] * 8, mesh))

    @xd.compile
    def step(x: Any) -> Any:
        with torch.no_grad():
            weight.mul_(2)
        for _ in range(40):
            if x.sum() > 0:
                x = x + 1
            x = -x
        return x

    with pytest.raises(CompileError, match=r"no program went the way .*if x.sum\(\) > 0"):
        step(lies([1.0] * 8, mesh))
    assert weight.detach().cpu().tolist() == [1.0] * 8


def test_an_error_of_a_way_that_no_run_goes(mesh: xd.DeviceMesh) -> None:
    def fail(x: Any) -> Any:
        raise ValueError("on purpose")

    step: Any = xd.compile(lambda x: fail(x) if x.isnan().any() else x * 2)
    for _ in range(2):
        assert step(lies([1.0] * 8, mesh)).cpu().tolist() == [2.0] * 8
    with pytest.raises(ValueError, match="on purpose"):
        step(lies([float("nan")] * 8, mesh))
    assert step(lies([1.0] * 8, mesh)).cpu().tolist() == [2.0] * 8


def test_a_check_behind_a_branch(mesh: xd.DeviceMesh) -> None:
    @xd.compile
    def step(x: Any) -> Any:
        if x.sum() > 0:
            assert x.max() < 5
            return x
        assert x.min() > -5
        return -x

    for value in (1.0, -1.0, 9.0, -9.0, 2.0, -2.0):
        x = lies([value] * 8, mesh)
        if abs(value) > 5:
            with pytest.raises(CheckFailedError, match="max" if value > 0 else "min"):
                step(x)
        else:
            assert step(x).cpu().tolist() == [abs(value)] * 8
    assert step.stats()["traces"] == 2


# ---------------------------------------------------------------------- what else a step does


class Block(nn.Module):
    """A layer that goes two ways."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x: Any) -> Any:
        out = self.linear(x)
        if out.abs().max() > 1.5:
            out = out.tanh()
        return x + out


REENTRANT = {"checkpointed": False, "checkpointed reentrantly": True}


def _trained(mesh: xd.DeviceMesh | None, seed: int, how: str) -> list[Any]:
    """Train with branches that are drawn from a seed; return all that can be seen of it.

    Args:
        mesh: Where to train the step compiled; None for plain PyTorch.
        seed: Of the branches.
        how: What the layers are in.
    """
    torch.manual_seed(seed)
    model: Any = nn.ModuleList(Block() for _ in range(3 if seed else 1))
    if mesh is not None:
        model = xd.distribute_module(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    limits = torch.rand(4, generator=torch.Generator().manual_seed(seed)).tolist()
    again = partial(checkpoint, use_reentrant=REENTRANT.get(how, False))
    on_host, seen, state = torch.zeros(()), list[Any](), {"best": 1e9}

    def step(x: Any) -> Any:
        if seed % 2 and x.mean() > 0.3 * limits[0]:
            x.mul_(0.5)
        on_host.add_(1)
        out = x * torch.rand(4, dtype=torch.float64)  # PyTorch's own numbers
        if how != "plain":
            out.requires_grad_()
        for layer in model:
            out = layer(out) if how == "plain" else again(layer, out)
        loss = out.square().mean()
        if loss < 0.5 + limits[1]:
            loss = loss * 2
            seen.append(loss.detach())
        else:
            optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if norm > 2 * limits[2]:
            optimizer.step()
            optimizer.zero_grad()
        if loss.item() < state["best"]:
            state["best"] = loss.item()
        if bool((out.abs().amax() > 3 * limits[3]).item()):
            return loss.detach(), norm
        return (loss.detach(),)

    run: Any = step if mesh is None else xd.compile(step)
    found: list[Any] = []
    for number in range(8 if seed else 3):
        size = (0.2, 1.0, 3.0)[(number + seed) % 3]
        draw = torch.Generator().manual_seed(100 * seed + number)
        x = size * torch.randn(8, 4, generator=draw, dtype=torch.float64)
        given = x if mesh is None else xd.distribute_tensor(x, mesh, ("dp", None))
        found += [*run(given), given, state["best"]]
        found += [torch.zeros(()) if p.grad is None else p.grad for p in model.parameters()]
    found += [*model.parameters(), *seen, on_host, torch.rand(3)]
    wholes = [t.full_tensor() if isinstance(t, xd.DTensor) else torch.as_tensor(t) for t in found]
    return [whole.detach().cpu() for whole in wholes]


@pytest.mark.parametrize(
    ("seed", "how"),
    [
        (0, "plain"),
        *(
            pytest.param(seed, how, marks=pytest.mark.thorough)
            for seed in range(1, 3)
            for how in ("plain", *REENTRANT)
        ),
    ],
)
def test_trainings_with_branches(mesh: xd.DeviceMesh, seed: int, how: str) -> None:
    expected, found = _trained(None, seed, how), _trained(mesh, seed, how)
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs.to(mine.dtype), rtol=1e-9, atol=1e-9)


def test_layers_of_a_scan_go_one_way(mesh: xd.DeviceMesh) -> None:
    torch.manual_seed(0)
    plain: Any = nn.Sequential(*(Block() for _ in range(3)))
    placed: Any = xd.distribute_module(copy.deepcopy(plain), mesh)
    layers: Any = xd.scan_layers(placed)
    step: Any = xd.compile(lambda x: layers(x))
    for size in (0.01, 100.0, 0.01):
        x = torch.full((8, 4), size, dtype=torch.float64)
        found = step(xd.distribute_tensor(x, mesh, ("dp", None)))
        torch.testing.assert_close(found.cpu(), plain(x), rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        layers[0].linear.weight.mul_(1e3)
    with pytest.raises(CompileError, match="a layer of scan_layers, goes one way"):
        step(xd.distribute_tensor(torch.full((8, 4), 0.01).double(), mesh, ("dp", None)))


@pytest.mark.parametrize("rows", [8, 7])
def test_a_local_view_tells_the_first_device_s_value(mesh: xd.DeviceMesh, rows: int) -> None:
    def step(x: Any) -> Any:
        view = x.to_local()
        scaled = view * 2 if view.sum() > 0 else view * 3
        return xd.DTensor.from_local(scaled, mesh, x.placements, shape=x.shape, stride=x.stride())

    compiled: Any = xd.compile(step)
    for sign in (1.0, -1.0, 1.0):
        plain = torch.cat([torch.full((4,), sign), torch.full((rows - 4,), -sign)])
        x = xd.distribute_tensor(plain, mesh, ("dp",))
        assert torch.equal(compiled(x).cpu(), step(x).cpu())
    assert compiled.stats()["traces"] == 2


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_region_that_is_computed_again_leaves_nothing(
    mesh: xd.DeviceMesh, reentrant: bool
) -> None:
    weight = nn.Parameter(xd.distribute_tensor(torch.ones(4, dtype=torch.float64), mesh))

    @xd.compile
    def step(x: Any) -> Any:
        out = checkpoint(lambda y: (y * weight).tanh(), x * weight, use_reentrant=reentrant)
        out.sum().backward()
        weight.grad = None
        return out.detach()

    for _ in range(3):
        step(xd.distribute_tensor(torch.ones(8, 4).double(), mesh, ("dp", None)))
    # On torch 2.9 the first trace of a checkpoint leaves a tensor behind, and it is traced twice.
    is_left = torch.__version__.startswith("2.9.") and not reentrant
    assert step.stats()["traces"] == 1 + is_left


def test_draws_on_the_mesh_are_those_of_one_run(mesh: xd.DeviceMesh) -> None:
    def step(x: Any) -> Any:
        noise = torch.rand_like(x)
        return noise if noise.sum() > 4 else noise + torch.rand_like(x)

    x, compiled = lies([0.0] * 8, mesh), xd.compile(step)
    found: list[list[torch.Tensor]] = []
    for run in (step, compiled):
        xd.manual_seed(1, mesh)
        found.append([run(x).cpu() for _ in range(8)])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs)
