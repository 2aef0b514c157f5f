"""A compiled step keeps scanned layers' state as stacks; nobody else sees that."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import xla_dtensor as xd
from tests.xla_dtensor.nn.scanned_blocks import (
    Block,
    LowRank,
    batch,
    model,
    on,
    placed,
    scanned,
    trainer,
)
from xla_dtensor.runtimes import Runtime

pytestmark = pytest.mark.only_on("jax")
Optimizers = Callable[[Any], torch.optim.Optimizer]
STEPS = 4


def groups(net: Any) -> list[dict[str, Any]]:
    """Settings of their own for one layer's norm, and none of it for the biases."""
    named = dict(net.named_parameters())
    slow = [name for name in named if name.startswith("layers.1.norm")]
    plain = [name for name in named if name.endswith("bias") and name not in slow]
    rest = [name for name in named if name not in slow and name not in plain]
    return [
        {"params": [named[n] for n in rest], "weight_decay": 0.1},
        {"params": [named[n] for n in plain], "weight_decay": 0.0},
        {"params": [named[n] for n in slow], "lr": 1e-3},
    ]


OPTIMIZERS: dict[str, Optimizers] = {
    "adamw": lambda net: torch.optim.AdamW(net.parameters(), lr=1e-2),
    "adamw foreach": lambda net: torch.optim.AdamW(net.parameters(), lr=1e-2, foreach=True),
    "adamw of groups": lambda net: torch.optim.AdamW(groups(net), lr=1e-2),
    "sgd": lambda net: torch.optim.SGD(net.parameters(), lr=1e-1, momentum=0.9, nesterov=True),
    "adafactor": lambda net: torch.optim.Adafactor(net.parameters(), lr=1e-2),
    "amsgrad": lambda net: torch.optim.Adam(
        net.parameters(), lr=1e-2, amsgrad=True, weight_decay=0.1, maximize=True
    ),
    "capturable": lambda net: torch.optim.AdamW(net.parameters(), lr=1e-2, capturable=True),
    "capturable foreach": lambda net: torch.optim.AdamW(
        net.parameters(), lr=1e-2, capturable=True, foreach=True
    ),
    "sgd without momentum": lambda net: torch.optim.SGD(net.parameters(), lr=1e-1),
    "rmsprop": lambda net: torch.optim.RMSprop(
        net.parameters(), lr=1e-3, momentum=0.9, centered=True
    ),
    "nadam": lambda net: torch.optim.NAdam(net.parameters(), lr=1e-2, weight_decay=0.1),
    "radam": lambda net: torch.optim.RAdam(net.parameters(), lr=1e-2),
    "adamax": lambda net: torch.optim.Adamax(net.parameters(), lr=1e-2),
    "adagrad": lambda net: torch.optim.Adagrad(net.parameters(), lr=1e-2, lr_decay=0.1),
    "adadelta": lambda net: torch.optim.Adadelta(net.parameters(), lr=0.5),
    "rprop": lambda net: torch.optim.Rprop(net.parameters(), lr=1e-3),
}


def host(value: torch.Tensor) -> torch.Tensor:
    return value.detach().cpu()


def check_equal(net: Any, plain: Any) -> None:
    found = dict(net.named_parameters())
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(host(found[name]), host(parameter), rtol=1e-4, atol=2e-5)


def check_equal_state(
    net: Any, optimizer: torch.optim.Optimizer, plain: Any, other: torch.optim.Optimizer
) -> None:
    for ours, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        assert list(optimizer.state[ours]) == list(other.state[theirs])
        for name, value in other.state[theirs].items():
            mine = optimizer.state[ours][name]
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(host(mine), value, rtol=1e-4, atol=2e-5)


def num_inputs(step: Any) -> int:
    entry = step.hlo().partition("ENTRY")[2]
    return len(re.findall(r"= \S+ parameter\(", entry))


# ---------------------------------------------------------------------- values


@pytest.mark.thorough
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_trains_as_plain_torch(mesh: xd.DeviceMesh, name: str) -> None:
    plain = model()
    net = placed(scanned(plain), mesh)
    theirs, ours = OPTIMIZERS[name](plain), OPTIMIZERS[name](net)
    for group in theirs.param_groups:
        group["capturable"] = False  # which is for devices only
    step = xd.compile(trainer(net, ours))
    expected = trainer(plain, theirs)
    for i in range(STEPS):
        found = step(on(mesh, batch(i)))
        assert float(found.item()) == pytest.approx(float(expected(batch(i)).item()), rel=1e-4)
    check_equal(net, plain)
    check_equal_state(net, ours, plain, theirs)


def one_cycle(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=10)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["adamw", "adamw of groups", "sgd", "nadam"])
def test_rates_and_momenta_that_change_are_read_anew(mesh: xd.DeviceMesh, name: str) -> None:
    plain = model()
    net = placed(scanned(plain), mesh)
    theirs, ours = OPTIMIZERS[name](plain), OPTIMIZERS[name](net)
    schedules = one_cycle(theirs), one_cycle(ours)
    step, expected = xd.compile(trainer(net, ours)), trainer(plain, theirs)
    for i in range(STEPS):
        step(on(mesh, batch(i)))
        expected(batch(i))
        for schedule in schedules:
            schedule.step()
    check_equal(net, plain)
    check_equal_state(net, ours, plain, theirs)


def double_a_weight(net: Any, optimizer: Any) -> None:
    with torch.no_grad():
        net.layers[1].wide.weight.mul_(2)


def write_to_a_row(net: Any, optimizer: Any) -> None:
    with torch.no_grad():
        net.layers[2].narrow.weight[1].zero_()


def load(net: Any, optimizer: Any) -> None:
    net.load_state_dict({name: value * 1.5 for name, value in net.state_dict().items()})


def swap_two_layers(net: Any, optimizer: Any) -> None:
    with torch.no_grad():
        one, other = net.layers[0].wide.weight, net.layers[2].wide.weight
        kept = one.clone()
        one.copy_(other)
        other.copy_(kept)


def reset_the_moments_of_a_layer(net: Any, optimizer: Any) -> None:
    for parameter in net.layers[1].parameters():
        for value in optimizer.state[parameter].values():
            value.zero_()


def load_the_optimizer(net: Any, optimizer: Any) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def read_everything(net: Any, optimizer: Any) -> None:
    for parameter in net.parameters():
        assert bool(torch.isfinite(host(parameter)).all())
    copy.deepcopy(net)


BETWEEN = (
    double_a_weight,
    write_to_a_row,
    load,
    swap_two_layers,
    reset_the_moments_of_a_layer,
    load_the_optimizer,
    read_everything,
)


@pytest.mark.thorough
def test_what_happens_between_steps_is_seen(mesh: xd.DeviceMesh) -> None:
    plain = model()
    net = placed(scanned(plain), mesh)
    theirs, ours = OPTIMIZERS["adamw"](plain), OPTIMIZERS["adamw"](net)
    step, expected = xd.compile(trainer(net, ours)), trainer(plain, theirs)
    for i, change in enumerate((read_everything, *BETWEEN, read_everything)):
        found = float(step(on(mesh, batch(i))).item())
        assert found == pytest.approx(float(expected(batch(i)).item()), rel=1e-4), change.__name__
        change(net, ours)
        change(plain, theirs)
        check_equal(net, plain)
        check_equal_state(net, ours, plain, theirs)
    assert step.stats()["reasons"][1:] == ("the state of an optimizer was replaced",)


def test_a_view_and_an_alias_follow(mesh: xd.DeviceMesh) -> None:
    """Both look at the parameter's storage, and were there before it became a row."""
    plain = model()
    net = placed(scanned(plain), mesh)
    weight = net.layers[1].wide.weight
    alias, view = weight.detach(), weight.detach()[:4]
    step = xd.compile(trainer(net, OPTIMIZERS["adamw"](net)))
    for i in range(STEPS):
        step(on(mesh, batch(i)))
    torch.testing.assert_close(host(alias), host(weight), rtol=0, atol=0)
    torch.testing.assert_close(host(view), host(weight)[:4], rtol=0, atol=0)
    view.zero_()
    assert not host(weight)[:4].any()


@pytest.mark.thorough
def test_two_steps_share_the_layers(mesh: xd.DeviceMesh) -> None:
    """One trains and one evaluates: both want the same stacks."""
    plain = model()
    net = placed(scanned(plain), mesh)
    train = xd.compile(trainer(net, OPTIMIZERS["sgd"](net)))
    evaluate = xd.compile(lambda x: net(x).square().mean().detach())
    expected = trainer(plain, OPTIMIZERS["sgd"](plain))
    for i in range(STEPS):
        found = float(evaluate(on(mesh, batch(9))).item())
        assert found == pytest.approx(float(plain(batch(9)).square().mean().item()), rel=1e-4)
        train(on(mesh, batch(i)))
        expected(batch(i))
    check_equal(net, plain)
    assert train.stats()["traces"] <= 2
    assert evaluate.stats()["traces"] == 1


@pytest.mark.parametrize("kept", [False, True], ids=["cleared", "kept"])
def test_gradients_that_add_up_over_calls(mesh: xd.DeviceMesh, kept: bool) -> None:
    plain = model()
    net = placed(scanned(plain), mesh)

    def accumulate(net: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        def step(x: torch.Tensor) -> torch.Tensor:
            if not kept:
                net.zero_grad()
            loss = net(x).square().mean()
            loss.backward()
            return loss.detach()

        return step

    step, expected = xd.compile(accumulate(net)), accumulate(plain)
    for i in range(STEPS):
        step(on(mesh, batch(i)))
        expected(batch(i))
    for ours, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(host(ours.grad), theirs.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "make", [functools.partial(Block, hidden=10), LowRank], ids=["uneven", "frozen"]
)
def test_uneven_and_frozen_weights(mesh: xd.DeviceMesh, make: Any) -> None:
    plain = model(make)
    net = placed(scanned(plain), mesh)

    def adamw(net: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-2)

    step = xd.compile(trainer(net, adamw(net), clip=False))
    expected = trainer(plain, adamw(plain), clip=False)
    for i in range(STEPS):
        step(on(mesh, batch(i)))
        expected(batch(i))
    check_equal(net, plain)


# ---------------------------------------------------------------------- the program


def trained(mesh: xd.DeviceMesh, count: int, name: str = "adamw") -> Any:
    net = placed(scanned(model(count=count)), mesh)
    step = xd.compile(trainer(net, OPTIMIZERS[name](net)))
    for i in range(2):
        step(on(mesh, batch(i)))
    return step


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["adamw", "sgd", "adafactor"])
def test_the_whole_step_is_as_large_for_any_depth(mesh: xd.DeviceMesh, name: str) -> None:
    few, many = trained(mesh, 3, name), trained(mesh, 7, name)
    assert num_inputs(few) == num_inputs(many)
    sizes = [step.hlo().count(" = ") for step in (few, many)]
    assert sizes[1] < 1.25 * sizes[0], sizes


def test_nothing_is_stacked_in_the_program(mesh: xd.DeviceMesh, runtime: Runtime) -> None:
    """The step takes stacks, donates them, and gives stacks back."""
    step = trained(mesh, 5)
    program = step._called()
    num_parameters, num_kinds = 6, 4  # of a block; weight, two moments and a count of each
    stacks = [slot for slot in program.slots.state if len(slot) > 1]
    assert [len(slot) for slot in stacks] == [5] * (num_parameters * num_kinds)
    memory = program.executable.memory_analysis()
    state = sum(s.size * s.dtype.itemsize for s in program.blueprint.inputs[0] if len(s.shape) > 1)
    assert memory.alias_size_in_bytes > state / 8
    assert not re.search(r"f32\[5,\S+ concatenate\(", step.hlo())


@pytest.mark.thorough
def test_memory_is_held_once(mesh: xd.DeviceMesh) -> None:
    """Reading every parameter takes the stacks apart and keeps neither form beside the other."""
    import gc

    import jax

    plain = model(count=5)
    net = placed(scanned(plain), mesh)
    step = xd.compile(trainer(net, OPTIMIZERS["adamw"](net)))
    for i in range(3):
        step(on(mesh, batch(i)))

    def held() -> int:
        gc.collect()
        return sum(a.nbytes for a in jax.live_arrays() if a.ndim > 1 and a.dtype != "uint32")

    before = held()
    read_everything(net, None)
    assert held() <= before
    step(on(mesh, batch(0)))
    assert held() <= before


@pytest.mark.thorough
def test_a_report_names_stacks_by_their_layers(mesh: xd.DeviceMesh) -> None:
    net = placed(scanned(model()), mesh)
    step: Any = xd.compile(trainer(net, OPTIMIZERS["adamw"](net)))
    for i in range(2):
        step(on(mesh, batch(i)))
    evidence = step.evidence(mesh.value, [net], title="scanned")
    held = {one.name: one for one in evidence.held}
    weight = held["layers.*.wide.weight"]
    assert (weight.role, weight.shape, weight.device_shape) == ("parameter", (16, 8), (4, 4))
    assert weight.requested == weight.chosen == "[tp, dp]"
    assert (weight.layers, weight.device_bytes) == (3, 3 * 4 * 4 * 4)
    moment = held["layers.*.wide.weight exp_avg"]
    assert (moment.role, moment.shape) == ("optimizer state", (16, 8))
    assert held["layers.*.wide.weight step"].layers == 3
    assert held["first.weight"].shape == (8, 8)
    assert weight.output is not None
    assert len({one.input for one in held.values() if one.input is not None}) == sum(
        one.input is not None for one in evidence.held
    )
    named = [one.device_bytes for one in evidence.held if one.input is not None]
    assert evidence.memory.arguments == pytest.approx(sum(named), rel=0.05)
