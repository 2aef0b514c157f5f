"""Steps that communicate what nobody asked for are refused before they run."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import xla_dtensor as xd
from xla_dtensor.debug.explicit import ExplicitRedistributionContext
from xla_dtensor.errors import ArgumentTypeError, ImplicitRedistributionError, UnsupportedOpError
from xla_dtensor.runtimes import Runtime

pytestmark = pytest.mark.usefixtures("runtime")
on_jax = pytest.mark.only_on("jax")
ROWS = [Shard(0), Replicate()]
MEGATRON = {"up.weight": ["tp", None], "down.weight": [None, "tp"]}
COLUMNS_TWICE = {"up.weight": ["tp", None], "down.weight": ["tp", None]}


class Mlp(nn.Module):
    """An MLP that redistributes its hidden or its last activations, if told so."""

    def __init__(self, hidden: bool = False, last: bool = False) -> None:
        super().__init__()
        self.up = nn.Linear(16, 32, bias=False)
        self.down = nn.Linear(32, 16, bias=False)
        self.hidden, self.last = hidden, last

    def forward(self, x: Any) -> Any:
        x = x.redistribute(placements=ROWS)  # its gradient is summed over tp here
        h: Any = torch.relu(self.up(x))
        y: Any = self.down(h.redistribute(placements=ROWS) if self.hidden else h)
        return y.redistribute(placements=ROWS) if self.last else y


def batch(mesh: xd.DeviceMesh, requires_grad: bool = False) -> Any:
    x = xd.distribute_tensor(torch.ones(8, 16), mesh, ROWS)
    return x.requires_grad_(requires_grad)


def made(mesh: xd.DeviceMesh, plan: dict[str, Any], **redistributes: bool) -> Any:
    torch.manual_seed(0)
    return xd.shard_module(Mlp(**redistributes), mesh, plan)


def training(model: nn.Module) -> Callable[[Any], Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Any) -> Any:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def found_by(call: Callable[[], Any], **allowed: Any) -> list[Any]:
    """What the context finds; nothing if it lets the call through."""
    try:
        with ExplicitRedistributionContext(**allowed):
            call()
    except ImplicitRedistributionError as error:
        return list(error.found)
    return []


@on_jax
def test_a_pending_sum_has_to_be_redistributed(mesh: xd.DeviceMesh) -> None:
    x = batch(mesh)
    explicit = xd.compile(made(mesh, MEGATRON, last=True))
    with ExplicitRedistributionContext():
        explicit(x)
        explicit(x)  # from the cache
    implicit = made(mesh, MEGATRON)
    step = xd.compile(lambda x: implicit(x).relu())
    (sum_of_down,) = found_by(lambda: step(x))
    assert (sum_of_down.kind, sum_of_down.axes) == ("all-reduce", ("tp",))
    assert (sum_of_down.origin.module, sum_of_down.origin.phase) == ("down", "forward")
    assert sum_of_down.bytes == 4 * 16 * 4
    assert sum_of_down.origin.source.file.endswith("test_explicit_redistribution.py")
    step(x)  # outside of the context it runs
    with ExplicitRedistributionContext(), ExplicitRedistributionContext(enable=False):
        step(x)
    assert len(found_by(lambda: step(x))) == 1  # compiled already, and refused again


@on_jax
def test_a_wrong_plan_is_refused_and_the_same_gather_asked_for_is_not(mesh: xd.DeviceMesh) -> None:
    x = batch(mesh)
    wrong = xd.compile(made(mesh, COLUMNS_TWICE, last=True))
    found = found_by(lambda: wrong(x))
    # The weight, and the hidden activations of two rows of devices.
    assert [one.bytes for one in found] == [16 * 32 * 4, 4 * 32 * 4]
    assert {(one.kind, one.axes) for one in found} == {("all-gather", ("tp",))}
    # XLA of JAX 0.12 names what it gathers by who made it, an older one by who takes it.
    assert [one.origin.module for one in found] in (["down", "down"], ["down", "Mlp"])
    asked = xd.compile(made(mesh, COLUMNS_TWICE, hidden=True))
    assert found_by(lambda: asked(x)) == []


@on_jax
def test_a_training_step_and_what_is_allowed(mesh: xd.DeviceMesh) -> None:
    x = batch(mesh, requires_grad=True)
    step = xd.compile(training(made(mesh, MEGATRON, last=True)))
    found = found_by(lambda: step(x))
    # Gradients of both weights over dp, and the loss. The sum over tp of the gradient of what goes
    # into `up` is that of the redistribute before it.
    assert {(one.axes, one.origin.phase) for one in found} == {
        *((("dp",), "backward"), (("dp",), "forward"))
    }
    assert sorted(one.bytes for one in found) == [4, 512, 512]
    rest = found_by(lambda: step(x), gradients=("dp",))
    assert [one.bytes for one in rest] == [4]
    assert found_by(lambda: step(x), gradients=("dp",), below_bytes=8) == []
    assert len(found_by(lambda: step(x), gradients=("tp",), below_bytes=8)) == 2
    assert found_by(lambda: step(x), kinds=("all-reduce",)) == []
    left = found_by(lambda: step(x), modules=("up",))
    assert {one.origin.module for one in left} == {"down", None}


@on_jax
def test_a_wrong_plan_is_seen_through_allowances(mesh: xd.DeviceMesh) -> None:
    step = xd.compile(training(made(mesh, COLUMNS_TWICE, last=True)))
    x = batch(mesh, requires_grad=True)
    found = found_by(lambda: step(x), gradients=("dp",), below_bytes=8)
    assert ("all-gather", ("tp",), "down") in {(o.kind, o.axes, o.origin.module) for o in found}


@on_jax
def test_fully_shard_asks_for_its_gathers(mesh: xd.DeviceMesh) -> None:
    model: Any = nn.Sequential(nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False))
    flat = xd.init_device_mesh("xla", (8,), mesh_dim_names=("fsdp",))
    for layer in model:
        xd.fully_shard(layer, mesh=flat)
    x = xd.distribute_tensor(torch.ones(16, 16), flat, [Shard(0)])
    step = xd.compile(training(model))
    assert found_by(lambda: step(x), below_bytes=8) == []
    # The same sharding without fully_shard: nobody asks, and XLA gathers or sums as it likes.
    torch.manual_seed(0)
    bare = xd.shard_module(
        nn.Sequential(nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False)),
        flat,
        {"0.weight": ["fsdp", None], "1.weight": ["fsdp", None]},
    )
    unasked = xd.compile(training(bare))
    assert {"all-gather"} <= {one.kind for one in found_by(lambda: unasked(x), below_bytes=8)}


@on_jax
def test_full_tensor_and_annotations_ask(mesh: xd.DeviceMesh) -> None:
    x = xd.distribute_tensor(torch.ones(16, 16), mesh, [Shard(0), Shard(1)])
    whole = xd.compile(lambda x: x.full_tensor() * 2)
    assert found_by(lambda: whole(x)) == []
    moved = xd.compile(lambda x: (x * 3).redistribute(placements=[Shard(1), Shard(0)]) + 1)
    assert found_by(lambda: moved(x)) == []
    total = xd.compile(lambda x: x.sum())
    sums = found_by(lambda: total(x))
    assert {(one.kind, one.origin.op) for one in sums} == {("all-reduce", "reduce_sum")}
    assert {axis for one in sums for axis in one.axes} == {"dp", "tp"}


@on_jax
def test_the_message_and_warn(mesh: xd.DeviceMesh, caplog: pytest.LogCaptureFixture) -> None:
    x = batch(mesh)

    def total(x: Any) -> Any:
        return x.sum()

    step = xd.compile(total)
    message = (
        r"The compiled step .*total was called in an ExplicitRedistributionContext\. It runs 1 "
        r"collective that nobody asked for, 4 bytes on each device: all-reduce over dp, 4 bytes: "
        r"no module \(forward\), reduce_sum, .*test_explicit_redistribution\.py:\d+\. Call "
    )
    with pytest.raises(ImplicitRedistributionError, match=message), ExplicitRedistributionContext():
        step(x)
    logged = caplog.at_level(logging.WARNING, logger="xla_dtensor")
    with logged, ExplicitRedistributionContext(mode="warn"):
        assert step(x).item() == 128
    assert "that nobody asked for" in caplog.text


@on_jax
def test_a_step_without_arguments(mesh: xd.DeviceMesh) -> None:
    x: Any = xd.distribute_tensor(torch.ones(8, 8), mesh, [Replicate(), Shard(1)])
    w: Any = xd.distribute_tensor(torch.ones(8, 8), mesh, [Replicate(), Shard(0)])
    copies = [Replicate(), Replicate()]
    asked = xd.compile(lambda: (x @ w).redistribute(placements=copies).relu())
    assert found_by(asked) == []
    assert found_by(asked, mesh=mesh) == []
    (left,) = found_by(xd.compile(lambda: (x @ w).relu()), mesh=mesh)
    assert (left.kind, left.axes) == ("all-reduce", ("tp",))


@on_jax
def test_a_refused_step_has_left_nothing_behind(mesh: xd.DeviceMesh) -> None:
    model = made(mesh, MEGATRON)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x: Any) -> Any:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    compiled, x = xd.compile(step), batch(mesh)
    before = model.up.weight.full_tensor().cpu()
    assert found_by(lambda: compiled(x))
    assert torch.equal(model.up.weight.full_tensor().cpu(), before)
    assert not optimizer.state
    compiled(x)
    assert not torch.equal(model.up.weight.full_tensor().cpu(), before)


def test_refusals(runtime: Runtime) -> None:
    with pytest.raises(ArgumentTypeError, match="mode='log'"):
        ExplicitRedistributionContext(mode="log")  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match="no collective 'gather'"):
        ExplicitRedistributionContext(kinds=("gather",))
    if runtime.name == "torch_xla":
        with pytest.raises(UnsupportedOpError, match="programs carry no names"):
            ExplicitRedistributionContext().__enter__()
