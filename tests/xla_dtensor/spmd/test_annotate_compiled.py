"""Annotations inside a compiled step: their effect in the HLO, no retrace, right values."""

# torch types .grad as optional and a module's attributes as tensors or modules.
# pyright: reportOptionalMemberAccess=false, reportArgumentType=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportReturnType=false
# pyright: reportIndexIssue=false, reportOptionalSubscript=false, reportOptionalIterable=false
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import xla_dtensor as xd
import xla_dtensor.spmd as xs
from xla_dtensor.errors import DistributeError
from xla_dtensor.runtimes import Runtime, get_runtime

Plain = Callable[[torch.Tensor], Any]
Shapes = list[tuple[int, ...]]


def counting(*shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape)


def lies(tensor: torch.Tensor) -> str:
    payload = tensor._local_tensor if isinstance(tensor, xd.DTensor) else tensor
    return str(get_runtime().op_sharding(payload))


def per_device(step: Any) -> tuple[Shapes, Shapes]:
    """The shapes that one device's program takes and returns, scalars left out."""
    (line,) = [text for text in step.hlo().splitlines() if "entry_computation_layout" in text]
    taken, _, returned = line.partition("entry_computation_layout={")[2].partition(")->")
    returned = re.sub(r"(\]\{[\d,]*\}\)?)\}.*", r"\1", returned)
    return shapes(taken), shapes(returned)


def shapes(text: str) -> Shapes:
    found = re.findall(r"[a-z]+\d+\[([\d,]+)\]", text)
    each = [tuple(map(int, dims.split(","))) for dims in found]
    return [shape for shape in each if 0 not in shape]  # torch_xla's step marks its program so


def called(step: Any, *args: Any, times: int = 3) -> Any:
    for _ in range(times - 1):
        step(*args)
    return step(*args)


# ---------------------------------------------------------------- arguments


def test_a_plain_cpu_argument(dp_tp: xs.Mesh) -> None:
    @xd.compile
    def step(x: torch.Tensor) -> Any:
        return xs.mark_sharding(x, dp_tp, ("dp", "tp")) @ torch.eye(24)

    # A shape of its own: torch_xla compiles equal programs once, whichever test they are of.
    result = called(step, counting(40, 24))
    assert torch.equal(result.cpu(), counting(40, 24))
    assert step.stats()["traces"] == 1
    assert (20, 6) in per_device(step)[0]
    for _ in range(2):
        step(counting(40, 24))
    assert step.stats()["traces"] == 1


def test_a_dtensor_argument(runtime: Runtime, mesh: xd.DeviceMesh, dp_tp: xs.Mesh) -> None:
    @xd.compile
    def step(x: Any) -> Any:
        marked = xs.mark_sharding(x, dp_tp, (None, "tp"))
        assert marked is x
        assert x.placements == (Replicate(), Shard(1))
        return marked * 2

    x = xd.distribute_tensor(counting(8, 4), mesh, None)
    result = called(step, x)
    assert torch.equal(result.cpu(), counting(8, 4) * 2)
    assert lies(result) == "{devices=[1,4,2]<=[2,4]T(1,0) last_tile_dim_replicate}"
    assert (8, 1) in per_device(step)[1]
    if runtime.name == "jax":
        # The annotation was the step's; outside, tensor and label are as they were.
        assert step.stats()["traces"] == 1
        assert (type(x), x.placements) == (xd.DTensor, (Replicate(), Replicate()))
        assert lies(x) == "{replicated}"
    else:
        # torch_xla's annotation is the tensor's: one more trace, with the argument cut.
        assert step.stats()["traces"] == 2
        assert x.placements == (Replicate(), Shard(1))
        assert lies(x) == lies(result)


def test_an_argument_that_was_told_otherwise(mesh: xd.DeviceMesh, dp_tp: xs.Mesh) -> None:
    x = xd.distribute_tensor(counting(8, 4), mesh, [Shard(0), Replicate()])

    @xd.compile
    def wrong(x: Any) -> Any:
        return xs.mark_sharding(x, dp_tp, (None, "tp")) * 2

    with pytest.raises(DistributeError, match="Existing annotation must be cleared first"):
        wrong(x)
    assert type(x) is xd.DTensor
    assert x.placements == (Shard(0), Replicate())

    @xd.compile
    def right(x: Any) -> Any:
        xs.clear_sharding(x)
        return xs.mark_sharding(x, dp_tp, (None, "tp")) * 2

    result = called(right, x)
    assert lies(result) == "{devices=[1,4,2]<=[2,4]T(1,0) last_tile_dim_replicate}"
    assert torch.equal(result.cpu(), counting(8, 4) * 2)
    assert torch.equal(x.cpu(), counting(8, 4))


# ---------------------------------------------------------------- activations and views


@pytest.mark.parametrize("kind", ["dtensor", "plain"])
def test_an_activation(mesh: xd.DeviceMesh, dp_tp: xs.Mesh, plain: Plain, kind: str) -> None:
    @xd.compile
    def step(x: Any) -> Any:
        hidden = x @ x.t()
        marked = xs.mark_sharding(hidden, dp_tp, ("dp", "tp"))
        return hidden, marked + 1

    # Another size for each kind: torch_xla writes the HLO of a program only once.
    rows = {"dtensor": 8, "plain": 16}[kind]
    x = counting(rows, 4)
    given = plain(x.clone()) if kind == "plain" else xd.distribute_tensor(x, mesh, None)
    hidden, after = called(step, given)
    assert torch.equal(hidden.cpu(), x @ x.t())
    assert torch.equal(after.cpu(), x @ x.t() + 1)
    assert lies(hidden) == lies(after) == "{devices=[2,4]<=[8]}"
    assert per_device(step) == ([(rows, 4)], [(rows // 2, rows // 4)] * 2)
    assert step.stats()["traces"] == 1
    assert lies(given) == "{replicated}"


def test_an_uneven_activation(mesh: xd.DeviceMesh, dp_tp: xs.Mesh) -> None:
    @xd.compile
    def step(x: Any) -> Any:
        return xs.mark_sharding(x * 2, dp_tp, ("tp", None))

    result = called(step, xd.distribute_tensor(counting(10, 4), mesh, None))
    assert torch.equal(result.cpu(), counting(10, 4) * 2)
    assert [s.data.shape for s in result.local_shards] == [(3, 4)] * 8
    assert step.stats()["traces"] == 1


def test_a_view(mesh: xd.DeviceMesh, dp_tp: xs.Mesh) -> None:
    @xd.compile
    def step(x: Any) -> Any:
        view = xs.mark_sharding(x[:4], dp_tp, ("dp", None))
        return view * 1, x.sum()

    x = xd.distribute_tensor(counting(8, 4), mesh, None)
    part, total = called(step, x)
    assert torch.equal(part.cpu(), counting(8, 4)[:4])
    assert total.item() == counting(8, 4).sum()
    assert lies(part) == "{devices=[2,1,4]<=[8] last_tile_dim_replicate}"
    assert (2, 4) in per_device(step)[1]
    assert lies(x) == "{replicated}"
    assert step.stats()["traces"] == 1


def test_a_write_through_an_annotated_view(mesh: xd.DeviceMesh, dp_tp: xs.Mesh) -> None:
    @xd.compile
    def step(x: Any) -> Any:
        whole = x * 1
        xs.mark_sharding(whole[:4], dp_tp, ("dp", None)).add_(100)
        return whole

    expected = counting(8, 4)
    expected[:4] += 100
    given = xd.distribute_tensor(counting(8, 4), mesh, None)
    assert torch.equal(called(step, given).cpu(), expected)


# ---------------------------------------------------------------- what the step captures


@pytest.mark.parametrize("kind", ["dtensor", "plain"])
def test_a_captured_parameter(
    runtime: Runtime, mesh: xd.DeviceMesh, dp_tp: xs.Mesh, plain: Plain, kind: str
) -> None:
    rows = {"dtensor": 4, "plain": 8}[kind]
    layer = nn.Linear(8, 8)
    expected = layer(torch.ones(rows, 8)).detach()
    if kind == "dtensor":
        layer = xd.distribute_module(layer, mesh)
    else:
        for parameter in layer.parameters():
            plain(parameter)
    weight, was = layer.weight, type(layer.weight)

    @xd.compile
    def step(x: Any) -> Any:
        xs.mark_sharding(layer.weight, dp_tp, ("tp", None))
        return layer(x)

    result = called(step, xd.distribute_tensor(torch.ones(rows, 8), mesh, None))
    torch.testing.assert_close(result.detach().cpu(), expected)
    assert lies(result) == "{devices=[1,4,2]<=[2,4]T(1,0) last_tile_dim_replicate}"
    assert per_device(step)[1] == [(rows, 2)]
    assert layer.weight is weight
    if runtime.name == "jax":
        assert step.stats()["traces"] == 1
        assert type(weight) is was
        assert lies(weight) == "{replicated}"
    else:
        assert step.stats()["traces"] == 2
        assert lies(weight) == "{devices=[4,1,2]<=[2,4]T(1,0) last_tile_dim_replicate}"


def test_a_captured_parameter_that_the_step_trains(
    runtime: Runtime, mesh: xd.DeviceMesh, dp_tp: xs.Mesh
) -> None:
    torch.manual_seed(0)
    reference, ours = nn.Linear(8, 8), nn.Linear(8, 8)
    ours.load_state_dict(reference.state_dict())
    ours = xd.distribute_module(ours, mesh)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (ours, reference)]

    def train(model: nn.Module, optimizer: Any, x: Any) -> Any:
        optimizer.zero_grad()
        if model is ours:
            xs.mark_sharding(ours.weight, dp_tp, ("tp", None))
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    step = xd.compile(lambda x: train(ours, optimizers[0], x))
    for _ in range(3):
        x = torch.randn(4, 8)
        loss = step(xd.distribute_tensor(x, mesh, None))
        assert loss.item() == pytest.approx(train(reference, optimizers[1], x).item(), rel=1e-5)
    torch.testing.assert_close(ours.weight.detach().cpu(), reference.weight.detach())
    if runtime.name == "jax":
        assert lies(ours.weight) == "{replicated}"


def test_a_captured_cpu_tensor(mesh: xd.DeviceMesh, dp_tp: xs.Mesh) -> None:
    offsets = counting(8)

    @xd.compile
    def step(x: Any) -> Any:
        xs.mark_sharding(offsets, dp_tp, ("tp",))
        return x + offsets

    result = called(step, xd.distribute_tensor(torch.ones(8), mesh, None), times=4)
    assert torch.equal(result.cpu(), counting(8) + 1)
    assert torch.equal(offsets.cpu(), counting(8))
    assert step.stats()["traces"] <= 2


# ---------------------------------------------------------------- clearing, gradients, errors


def test_clearing_inside(mesh: xd.DeviceMesh, dp_tp: xs.Mesh) -> None:
    @xd.compile
    def step(x: Any) -> Any:
        hidden = xs.mark_sharding(x @ x.t(), dp_tp, ("dp", "tp"))
        return xs.clear_sharding(hidden) + 1

    x = counting(8, 4)
    result = called(step, xd.distribute_tensor(x, mesh, None))
    assert torch.equal(result.cpu(), x @ x.t() + 1)
    assert per_device(step) == ([(8, 4)], [(8, 8)])
    assert step.stats()["traces"] == 1


def test_gradients_of_an_activation(mesh: xd.DeviceMesh, dp_tp: xs.Mesh) -> None:
    @xd.compile
    def step(x: Any) -> Any:
        marked = xs.mark_sharding_with_gradients(x * 1, dp_tp, ("dp", "tp"))
        (grad,) = torch.autograd.grad((marked**3).sum(), x, create_graph=True)
        (twice,) = torch.autograd.grad(grad.sum(), x)
        return marked, grad, twice

    leaf = xd.distribute_tensor(counting(8, 4), mesh, None).requires_grad_()
    marked, grad, twice = called(step, leaf)
    assert per_device(step) == ([(8, 4)], [(4, 1)] * 3)
    assert lies(marked) == lies(grad) == lies(twice) == "{devices=[2,4]<=[8]}"
    torch.testing.assert_close(grad.detach().cpu(), 3 * counting(8, 4) ** 2)
    torch.testing.assert_close(twice.detach().cpu(), 6 * counting(8, 4))
    assert step.stats()["traces"] == 1


def test_a_step_that_fails_leaves_all_as_it_was(
    runtime: Runtime, mesh: xd.DeviceMesh, dp_tp: xs.Mesh
) -> None:
    x = xd.distribute_tensor(counting(8, 4), mesh, None)

    @xd.compile
    def step(x: Any) -> Any:
        xs.mark_sharding(x, dp_tp, ("dp", None))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        step(x)
    assert torch.equal(x.cpu(), counting(8, 4))
    if runtime.name == "jax":
        assert (type(x), x.placements) == (xd.DTensor, (Replicate(), Replicate()))
        assert xs.mark_sharding(x, dp_tp, (None, "tp")).local_shards[0].data.shape == (8, 1)


def test_training_with_annotated_inputs(mesh: xd.DeviceMesh, dp_tp: xs.Mesh) -> None:
    torch.manual_seed(0)
    ours, reference = nn.Linear(8, 8), nn.Linear(8, 8)
    reference.load_state_dict(ours.state_dict())
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (ours, reference)]
    xs.mark_sharding(ours.weight, dp_tp, ("tp", "dp"))
    xs.mark_sharding(ours.bias, dp_tp, ("tp",))

    @xd.compile
    def step(x: torch.Tensor) -> Any:
        optimizers[0].zero_grad()
        xs.mark_sharding(x, dp_tp, ("dp", None))
        loss = ours(x).square().sum()
        loss.backward()
        optimizers[0].step()
        return loss

    for _ in range(4):
        x = torch.randn(4, 8)
        loss = step(x.clone())
        optimizers[1].zero_grad()
        expected = reference(x).square().sum()
        expected.backward()
        optimizers[1].step()
        assert loss.item() == pytest.approx(expected.item(), rel=1e-4)
    torch.testing.assert_close(ours.weight.detach().cpu(), reference.weight.detach())
    assert lies(ours.weight) == "{devices=[4,2]<=[2,4]T(1,0)}"
    # On torch_xla the second call finds optimizer state.
    assert step.stats()["traces"] == (1 if xd.get_runtime().name == "jax" else 2)
