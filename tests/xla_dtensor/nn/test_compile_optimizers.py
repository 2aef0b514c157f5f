"""Every optimizer and scheduler in a compiled step: equal to plain PyTorch, without retraces."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.distributed.tensor import Replicate, Shard
from torch.optim import lr_scheduler

import xla_dtensor as xd
from xla_dtensor.errors import CompileError

STEPS = 8
Make = Callable[[Any], Any]


def one_cycle(optimizer: Any) -> Any:
    return lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=STEPS + 2)


def decaying(optimizer: Any) -> Any:
    return lr_scheduler.ExponentialLR(optimizer, 0.7)


CASES: dict[str, tuple[Make, Make]] = {
    "adamw": (lambda p: optim.AdamW(p, lr=1e-2), decaying),
    "adamw, the rate a tensor": (
        lambda p: optim.AdamW(p, lr=torch.tensor(1e-2), foreach=False),
        decaying,
    ),
    "adamw, betas cycle": (lambda p: optim.AdamW(p, lr=1e-2), one_cycle),
    "sgd, momentum cycles": (
        lambda p: optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=1e-2),
        one_cycle,
    ),
    "adafactor": (lambda p: optim.Adafactor(p, lr=1e-2), decaying),
    "adafactor, foreach": (lambda p: optim.Adafactor(p, lr=1e-2, foreach=True), decaying),
    "rmsprop": (lambda p: optim.RMSprop(p, lr=1e-3, momentum=0.9, centered=True), decaying),
    "adagrad": (lambda p: optim.Adagrad(p, lr=1e-2, lr_decay=0.1), decaying),
    "nadam": (lambda p: optim.NAdam(p, lr=1e-2), decaying),
    "adamax": (lambda p: optim.Adamax(p, lr=1e-2), decaying),
    "adamax, capturable": (lambda p: optim.Adamax(p, lr=1e-2, capturable=True), decaying),
    "adamax, capturable foreach": (
        lambda p: optim.Adamax(p, lr=1e-2, capturable=True, foreach=True),
        decaying,
    ),
    "adadelta": (lambda p: optim.Adadelta(p, lr=1e-1), decaying),
    "rprop": (lambda p: optim.Rprop(p, lr=1e-2), decaying),
    "radam": (lambda p: optim.RAdam(p, lr=1e-2), decaying),
    # Rectified from the sixth step on, as float64 says; float32 says from the fifth.
    "radam of a slow average": (
        lambda p: optim.RAdam(p, lr=1e-2, betas=(0.9, 0.9995)),
        decaying,
    ),
    "asgd": (lambda p: optim.ASGD(p, lr=1e-2, t0=2.0), decaying),
    "asgd, foreach": (lambda p: optim.ASGD(p, lr=1e-2, t0=2.0, foreach=True), decaying),
}
TOLERANCE = {name: 1e-5 for name in CASES if "capturable" in name}


def model_and_batch() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        return model, torch.randn(16, 8), torch.randn(16, 8)


def distributed(model: nn.Module, mesh: xd.DeviceMesh) -> nn.Module:
    def place(name: str, module: nn.Module, mesh: Any) -> None:
        for kind, parameter in list(module.named_parameters(recurse=False)):
            lies: Any = xd.distribute_tensor(parameter, mesh, [Replicate(), Shard(0)])
            setattr(module, kind, nn.Parameter(lies))

    return xd.distribute_module(model, mesh, place)


def training(model: nn.Module, make: Make, schedule: Make) -> tuple[Any, Any]:
    optimizer = make(model.parameters())
    if not isinstance(next(model.parameters()), xd.DTensor):
        for group in optimizer.param_groups:
            group["capturable"] = False  # which is for devices only

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step, schedule(optimizer)


def trained(mesh: xd.DeviceMesh, make: Make, schedule: Make) -> tuple[list[float], Any, Any]:
    """Losses, parameters and the compiled step after training on `mesh`."""
    model, x, y = model_and_batch()
    step, scheduler = training(distributed(model, mesh), make, schedule)
    compiled = xd.compile(step)
    batch = [xd.distribute_tensor(t, mesh, [Shard(0), Replicate()]) for t in (x, y)]
    losses = []
    for _ in range(STEPS):
        losses.append(compiled(*batch).item())
        scheduler.step()
    return losses, [p.full_tensor().cpu() for p in model.parameters()], compiled  # pyright: ignore


def trained_plainly(make: Make, schedule: Make) -> tuple[list[float], list[torch.Tensor]]:
    model, x, y = model_and_batch()
    step, scheduler = training(model, make, schedule)
    losses = []
    for _ in range(STEPS):
        losses.append(step(x, y).item())
        scheduler.step()
    return losses, list(model.parameters())


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(0))


# All of one group, which one call of an op treats together.
KINDS: dict[str, Any] = {
    "both axes": (drawn(8, 8), [Shard(0), Shard(1)]),
    "of half": (drawn(8, 4, dtype=torch.bfloat16), [Replicate(), Shard(0)]),
    "of doubles": (drawn(6, 5, dtype=torch.float64), [Shard(1), Shard(0)]),
    "complex": (drawn(4, 4, dtype=torch.complex64), [Shard(0), Replicate()]),
    "one number": (drawn(), [Replicate(), Replicate()]),
    "on one axis": (drawn(3, 7), [Shard(1)]),
    "without a gradient": (drawn(8), [Shard(0), Replicate()]),
}


@pytest.mark.only_on("jax")
@pytest.mark.parametrize("name", ["adamw", "sgd, momentum cycles", "rprop", "asgd"])
def test_parameters_of_all_kinds_are_one_group(mesh: xd.DeviceMesh, name: str) -> None:
    plain = {kind: nn.Parameter(tensor.clone()) for kind, (tensor, _) in KINDS.items()}
    ours = {
        kind: nn.Parameter(
            xd.distribute_tensor(tensor, mesh if len(lies) > 1 else mesh["tp"], lies)
        )
        for kind, (tensor, lies) in KINDS.items()
    }

    def step_of(parameters: dict[str, Any]) -> Any:
        optimizer = CASES[name][0](parameters.values())

        def step() -> None:
            for kind, parameter in parameters.items():
                if kind != "without a gradient":
                    (parameter.abs() ** 2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    plain_step, compiled = step_of(plain), xd.compile(step_of(ours))
    for _ in range(3):
        plain_step()
        compiled()
    for kind, parameter in ours.items():
        assert list(parameter.placements) == KINDS[kind][1], kind  # pyright: ignore
        given = parameter.full_tensor().cpu().detach()  # pyright: ignore
        torch.testing.assert_close(given, plain[kind].detach())
    assert compiled.stats()["traces"] == 1


class OfAnotherLibrary(optim.Optimizer):
    """What it does with `foreach` is its own: here nothing that works."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "foreach": None})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            if group["foreach"]:
                raise NotImplementedError
            for parameter in group["params"]:
                parameter.sub_(group["lr"] * parameter.grad)


@pytest.mark.only_on("jax")
def test_another_librarys_optimizer_keeps_its_form(mesh: xd.DeviceMesh) -> None:
    losses, _, _ = trained(mesh, OfAnotherLibrary, decaying)
    wanted, _ = trained_plainly(OfAnotherLibrary, decaying)
    assert losses == pytest.approx(wanted, abs=1e-6)


@pytest.mark.thorough
@pytest.mark.only_on("jax")
@pytest.mark.parametrize("name", CASES)
def test_training_equals_plain_pytorch(mesh: xd.DeviceMesh, name: str) -> None:
    losses, parameters, compiled = trained(mesh, *CASES[name])
    wanted, wanted_parameters = trained_plainly(*CASES[name])
    tolerance = TOLERANCE.get(name, 1e-6)
    assert losses == pytest.approx(wanted, abs=tolerance)
    for given, expected in zip(parameters, wanted_parameters, strict=True):
        torch.testing.assert_close(given, expected.detach(), atol=tolerance, rtol=0)
    # A setting that was seen to change is an input from then on.
    assert compiled.stats()["traces"] == (2 if "cycle" in name else 1)


@pytest.mark.only_on("jax")
@pytest.mark.parametrize("make", [optim.AdamW, lambda p: optim.SGD(p, lr=0.1, momentum=0.9)])
@pytest.mark.parametrize("dampening", [0.0, 0.5])
def test_gradients_that_are_dropped_first_cost_no_trace(
    mesh: xd.DeviceMesh, make: Make, dampening: float
) -> None:
    """As in most loops: the first call finds no gradients, later ones do."""
    losses, stats = [], {}
    for is_plain in (True, False):
        model, x, y = model_and_batch()
        optimizer = make((model if is_plain else distributed(model, mesh)).parameters())
        if "momentum" in optimizer.defaults:
            optimizer.param_groups[0]["dampening"] = dampening

        def step(x: Any, y: Any, model: Any = model, optimizer: Any = optimizer) -> Any:
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        run = step if is_plain else xd.compile(step)
        batch = (x, y) if is_plain else [xd.distribute_tensor(t, mesh) for t in (x, y)]
        losses.append([run(*batch).item() for _ in range(4)])
        stats = {} if is_plain else run.stats()
    assert losses[1] == pytest.approx(losses[0], abs=1e-6)
    # With dampening the first momentum is the gradient, and no value of zeros comes to that.
    makes_state = dampening and make is not optim.AdamW
    assert stats["traces"] == (2 if makes_state else 1), stats["reasons"]


@pytest.mark.only_on("jax")
def test_a_gradient_that_is_asked_for_before_it_is_dropped_counts(mesh: xd.DeviceMesh) -> None:
    weight = nn.Parameter(xd.distribute_tensor(torch.ones(4), mesh))
    held: list[bool] = []

    def step(x: torch.Tensor) -> torch.Tensor:
        has_one = weight.grad is not None
        weight.grad = None
        (weight * x).sum().backward()
        held.append(has_one)
        return x * (2.0 if has_one else 1.0)

    compiled, x = xd.compile(step), xd.distribute_tensor(torch.ones(4), mesh)
    assert [compiled(x).full_tensor()[0].item() for _ in range(3)] == [1.0, 2.0, 2.0]  # pyright: ignore
    assert held == [False, True, True]
    weight.grad = None
    assert compiled(x).full_tensor()[0].item() == 1.0  # pyright: ignore
    assert compiled.stats()["traces"] == 2


@pytest.mark.only_on("torch_xla")
@pytest.mark.parametrize("name", ["adamw", "sgd, momentum cycles"])
def test_training_equals_plain_pytorch_lazily(mesh: xd.DeviceMesh, name: str) -> None:
    # Not Adafactor: torch_xla traces anew on every call, and Adafactor reads values.
    losses, parameters, _ = trained(mesh, *CASES[name])
    wanted, wanted_parameters = trained_plainly(*CASES[name])
    assert losses == pytest.approx(wanted, abs=1e-5)
    for given, expected in zip(parameters, wanted_parameters, strict=True):
        torch.testing.assert_close(given, expected.detach(), atol=1e-5, rtol=0)


@pytest.mark.only_on("jax")
@pytest.mark.parametrize("foreach", [None, True])
def test_capturable_counters_stay_on_the_devices(mesh: xd.DeviceMesh, foreach: bool | None) -> None:
    losses, _, compiled = trained(
        mesh, lambda p: optim.AdamW(p, lr=1e-2, capturable=True, foreach=foreach), decaying
    )
    wanted, _ = trained_plainly(lambda p: optim.AdamW(p, lr=1e-2), decaying)
    assert losses == pytest.approx(wanted, abs=1e-5)
    assert compiled.stats()["traces"] <= 2


@pytest.mark.only_on("jax")
def test_a_setting_that_changes_once_costs_one_trace(mesh: xd.DeviceMesh) -> None:
    """Weight decay is baked in, and a branch; once it changes it is an input, branch and all."""
    model, x, y = model_and_batch()
    plain = copy.deepcopy(model)
    optimizers = []

    def make(parameters: Any) -> Any:
        optimizers.append(optim.SGD(parameters, lr=1e-1, weight_decay=0.5))
        return optimizers[-1]

    step, _ = training(distributed(model, mesh), make, decaying)
    plain_step, _ = training(plain, make, decaying)
    compiled = xd.compile(step)
    for decay in (0.5, 0.5, 0.25, 0.125, 0.0625, 0.0, 0.5, 0.25):
        for optimizer in optimizers:
            optimizer.param_groups[0]["weight_decay"] = decay
        assert compiled(x, y).item() == pytest.approx(plain_step(x, y).item(), abs=1e-6)
    reasons = compiled.stats()["reasons"]
    assert reasons[1] == "an optimizer's weight_decay changed"
    # `if weight_decay != 0` is answered anew at 0.0; at 0.5 the program of before serves again.
    assert reasons[2:] == ("what the step asks of a number changed",)


@pytest.mark.only_on("jax")
def test_a_setting_changed_inside_the_step_is_refused(mesh: xd.DeviceMesh) -> None:
    model, x, y = model_and_batch()
    optimizer = optim.SGD(distributed(model, mesh).parameters(), lr=1e-1)
    scheduler = decaying(optimizer)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss.detach()

    with pytest.raises(CompileError, match=r"learning rate changed from 0\.1"):
        xd.compile(step)(x, y)


@pytest.mark.only_on("jax")
def test_an_optimizer_that_needs_a_number_as_its_own_is_traced_for_each(
    mesh: xd.DeviceMesh,
) -> None:
    """One of its own, which makes a float of the rate that it is lent."""

    class Reader(optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.grad.mul_(float(group["lr"]))
            return super().step(closure)

    def twice(optimizer: Any) -> Any:
        return lr_scheduler.StepLR(optimizer, STEPS // 2)

    losses, parameters, compiled = trained(mesh, lambda p: Reader(p, lr=0.5), twice)
    expected, plain = trained_plainly(lambda p: Reader(p, lr=0.5), twice)
    assert losses == pytest.approx(expected, abs=1e-5)
    assert compiled.stats()["traces"] == 2
    for found, parameter in zip(parameters, plain, strict=True):
        torch.testing.assert_close(found, parameter.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.only_on("jax")
def test_a_number_that_only_the_program_knows_is_refused(mesh: xd.DeviceMesh) -> None:
    """And leaves the optimizer as it was."""

    class Keeping(optim.SGD):
        def step(self, closure: Any = None) -> Any:
            self.param_groups[0]["norm"] = self.param_groups[0]["params"][0].grad.norm().item()
            return super().step(closure)

    model, x, y = model_and_batch()
    model = distributed(model, mesh)
    step, scheduler = training(model, lambda p: Keeping(p, lr=0.5), decaying)
    with pytest.raises(CompileError, match="stores a number under 'norm' that only the compiled"):
        xd.compile(step)(x, y)
    assert "norm" not in scheduler.optimizer.param_groups[0]


@pytest.mark.only_on("jax")
def test_a_program_does_not_keep_what_other_optimizers_have(mesh: xd.DeviceMesh) -> None:
    """Nor what its own had: a trace takes down the state of all that live."""
    weight: Any = nn.Parameter(xd.distribute_tensor(torch.ones(8), mesh))
    other: Any = nn.Parameter(xd.distribute_tensor(torch.ones(8), mesh))
    optimizer, of_other = optim.AdamW([weight]), optim.AdamW([other])
    other.grad = torch.ones_like(other)
    of_other.step()
    moments = weakref.ref(of_other.state[other]["exp_avg"])

    def step() -> None:
        weight.sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    compiled = xd.compile(step)
    for _ in range(3):
        compiled()
    del other, of_other
    gc.collect()
    assert moments() is None


class CountingInAGroup(optim.Optimizer):
    """Keeps a count that its owner fills, a tensor on the host, as a setting of its own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "step": torch.tensor(1.0)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter -= parameter.grad * (group["lr"] / group["step"])


@pytest.mark.only_on("jax")
def test_a_setting_that_is_called_step(mesh: xd.DeviceMesh) -> None:
    weight = nn.Parameter(xd.distribute_tensor(torch.ones(4), mesh))
    optimizer, expected = CountingInAGroup([weight]), 1.0

    @xd.compile
    def step() -> None:
        optimizer.zero_grad()
        weight.square().sum().backward()
        optimizer.step()

    for count in range(1, 4):
        optimizer.param_groups[0]["step"].fill_(float(count))
        step()
        expected -= 2 * expected * 0.1 / count
        assert weight.detach().cpu().tolist() == pytest.approx([expected] * 4)
