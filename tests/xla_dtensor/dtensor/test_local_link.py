"""A local view and its DTensor are one memory: what is written to one is seen in the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

import xla_dtensor as xd
from xla_dtensor import DeviceMesh, LocalView, distribute_tensor
from xla_dtensor.errors import LocalViewError

VALUE = torch.arange(32.0).reshape(8, 4) + 1


def rows(mesh: DeviceMesh, value: torch.Tensor = VALUE) -> Any:
    return distribute_tensor(value, mesh, [Shard(0), Replicate()])


def check_same(x: Any, view: Any, expected: torch.Tensor, dim: int = 0) -> None:
    """Both sides hold `expected`, of which each device along dp has a half."""
    assert torch.equal((x.detach() if x.requires_grad else x).cpu(), expected)
    halves = [half for half in expected.chunk(2, dim) for _ in range(4)]
    for shard, half in zip(view.detach().addressable_shards(), halves, strict=True):
        assert torch.equal(shard.data, half)


# name -> (writes to a local tensor of shape (4, 4), the same for both halves)
LOCAL_WRITES: dict[str, Callable[[Any], Any]] = {
    "zero_": lambda v: v.zero_(),
    "mul_": lambda v: v.mul_(2),
    "+=": lambda v: v.__iadd__(1),
    "a row": lambda v: v[1].fill_(7),
    "an item": lambda v: v.__setitem__((slice(1, 3), 0), 5.0),
    "a view of a view": lambda v: v.t()[1:][0].view(2, 2)[1].neg_(),
    "a part of split": lambda v: v.split(2)[1].zero_(),
    "each of unbind": lambda v: [row.add_(i) for i, row in enumerate(v.unbind(0))],
    "a chunk": lambda v: v.chunk(2, 1)[0].sqrt_(),
    "an expanded row": lambda v: v.copy_(v[:1].expand(4, 4)),
    "detached": lambda v: v.detach().neg_(),
    ".data": lambda v: v.data.mul_(3),
    "index_put_": lambda v: v.index_put_((torch.tensor([0, 2]),), torch.tensor(9.0)),
    "index_add_": lambda v: v.index_add_(0, torch.tensor([0, 0]), torch.ones(2, 4)),
    "scatter_": lambda v: v.scatter_(0, torch.zeros(1, 4, dtype=torch.long), -1.0),
    "masked_fill_": lambda v: v.masked_fill_(v > 20, 0.0),
    "clamp_": lambda v: v.clamp_(max=9),
    "out=": lambda v: torch.mul(v, 2, out=v),
    "foreach": lambda v: torch._foreach_add_([v], 2.0),  # pyright: ignore
    "copy_ of a host tensor": lambda v: v.copy_(torch.ones(4, 4)),
    "after t_": lambda v: v.t_()[1].zero_(),
    "after unsqueeze_": lambda v: v.unsqueeze_(0)[0, 1].zero_(),
    "init": lambda v: nn.init.ones_(v),
}


@pytest.mark.parametrize("name", LOCAL_WRITES)
def test_writes_to_the_view_reach_the_dtensor(mesh: DeviceMesh, name: str) -> None:
    x, expected = rows(mesh), VALUE.clone()
    view, write = x.to_local(), LOCAL_WRITES[name]
    for half in expected.chunk(2):
        write(half)
    write(view)
    check_same(x, x.to_local(), expected)
    assert x.placements == (Shard(0), Replicate())


GLOBAL_WRITES: dict[str, Callable[[Any], Any]] = {
    "add_": lambda x: x.add_(1),
    "a part": lambda x: x[2:7].zero_(),
    "detached": lambda x: x.detach().mul_(2),
    ".data": lambda x: x.data.mul_(2),
    "a view": lambda x: x.t()[1].neg_(),
    "copy_": lambda x: x.copy_(torch.ones(8, 4)),
    "foreach": lambda x: torch._foreach_mul_([x], 3.0),  # pyright: ignore
    "through another view": lambda x: x.to_local().zero_() if hasattr(x, "to_local") else x.zero_(),
}


@pytest.mark.parametrize("name", GLOBAL_WRITES)
def test_writes_to_the_dtensor_reach_its_views(mesh: DeviceMesh, name: str) -> None:
    x, expected = rows(mesh), VALUE.clone()
    view, other = x.to_local(), x.to_local()
    column = view[:, 1]
    GLOBAL_WRITES[name](x)
    GLOBAL_WRITES[name](expected)
    check_same(x, view, expected)
    check_same(x, other, expected)
    check_same(x[:, 1], column, expected[:, 1])


def test_two_views(mesh: DeviceMesh) -> None:
    x = rows(mesh)
    one, two = x.to_local(), x.to_local()
    one[0].zero_()
    two.mul_(2)
    one.add_(1)
    expected = VALUE.clone()
    expected[[0, 4]] = 0
    expected = expected * 2 + 1
    check_same(x, one, expected)
    check_same(x, two, expected)


def test_a_clone_is_on_its_own(mesh: DeviceMesh) -> None:
    x = rows(mesh)
    view = x.to_local()
    copied, computed = view.clone(), view * 1
    copied.zero_()
    computed.zero_()
    check_same(x, view, VALUE)
    x.zero_()
    assert copied.sum().item() == 0
    assert (view.clone() + 1).sum().item() == 16


PLACEMENTS: dict[str, Any] = {
    "uneven": (Replicate(), Shard(0)),
    "both axes": (Shard(0), Shard(0)),
    "two dims": (Shard(1), Shard(0)),
    "replicated": (Replicate(), Replicate()),
    "sharded twice, the other way": (Shard(1), Shard(1)),
}


@pytest.mark.parametrize("name", PLACEMENTS)
def test_every_way_to_lie(mesh: DeviceMesh, name: str) -> None:
    value = torch.arange(30.0).reshape(10, 3)
    x: Any = distribute_tensor(value, mesh, PLACEMENTS[name])
    view = x.to_local()
    view.mul_(2)
    assert torch.equal(x.cpu(), value * 2)
    x.add_(1)
    moved: Any = distribute_tensor(value * 2 + 1, mesh, PLACEMENTS[name])
    expected = moved.to_local()
    for found, wanted in zip(view.addressable_shards(), expected.addressable_shards(), strict=True):
        assert torch.equal(found.data, wanted.data)


def test_a_sum_in_parts(mesh: DeviceMesh) -> None:
    """Writing to the parts of a Partial writes their sum."""
    parts = LocalView.from_shards([torch.full((2,), float(i)) for i in range(8)], mesh)
    x: Any = xd.DTensor.from_local(parts, mesh, [Partial(), Partial()])
    view = x.to_local()
    view.add_(1)
    assert x.full_tensor().tolist() == [36.0, 36.0]


def test_optimizers(mesh: DeviceMesh) -> None:
    x: Any = nn.Parameter(rows(mesh))
    recorded, detached = x.to_local(), x.detach().to_local()
    for kind in (torch.optim.SGD, torch.optim.AdamW):
        optimizer = kind([x], lr=0.5)
        optimizer.zero_grad()
        x.sum().backward()
        optimizer.step()
        now = x.detach().cpu()
        assert not torch.equal(now, VALUE)
        check_same(x, recorded, now)
        check_same(x, detached, now)


def test_compiled_steps(mesh: DeviceMesh) -> None:
    """Later calls only launch the program; views made before see what it wrote."""
    x: Any = nn.Parameter(rows(mesh))
    view, optimizer = x.detach().to_local(), torch.optim.SGD([x], lr=1.0)

    def train() -> None:
        optimizer.zero_grad()
        x.sum().backward()
        optimizer.step()

    step = xd.compile(train)
    for count in range(1, 4):
        step()
        check_same(x, view, VALUE - count)


def test_writes_inside_a_compiled_step(mesh: DeviceMesh) -> None:
    x = rows(mesh)
    view = x.to_local()

    def double(y: Any) -> Any:
        local = y.to_local()
        local[0].mul_(2)
        y.add_(1)
        return local.sum(1)

    step, expected = xd.compile(double), VALUE.clone()
    for _ in range(3):
        found = step(x)
        expected[[0, 4]] *= 2
        expected += 1
        check_same(x, view, expected)
        assert torch.equal(found.cpu(), expected[:4].sum(1))


def test_a_view_as_the_argument_of_a_compiled_step(mesh: DeviceMesh) -> None:
    x = rows(mesh)
    view = x.to_local()
    step = xd.compile(lambda v: v.sum())
    for count in range(3):
        assert step(view).item() == (VALUE[:4] + count).sum().item()
        x.add_(1)


@pytest.mark.parametrize("made_inside", [True, False])
@pytest.mark.parametrize("local", [True, False])
def test_inference_mode(mesh: DeviceMesh, made_inside: bool, local: bool) -> None:
    """Tensors of inference mode count no versions."""
    x = rows(mesh)
    view = x.to_local()
    with torch.inference_mode():
        if made_inside:
            x = rows(mesh)
            view = x.to_local()
        (view if local else x).mul_(2)
        check_same(x, view, VALUE * 2)
        (view if local else x).add_(1)
    check_same(x, view, VALUE * 2 + 1)


def test_assigning_data_takes_the_memory_away(mesh: DeviceMesh) -> None:
    x = rows(mesh)
    view = x.to_local()
    x.data = rows(mesh, VALUE * 10)
    view.zero_()
    assert torch.equal(x.cpu(), VALUE * 10)
    assert view.sum().item() == 0


# ---------------------------------------------------------------------- with gradients


def test_parameters_are_written_under_no_grad(mesh: DeviceMesh) -> None:
    """`to_local()` of a parameter records; what init and load functions write must arrive."""
    x: Any = nn.Parameter(rows(mesh))
    nn.init.ones_(x.to_local())
    check_same(x, x.to_local(), torch.ones(8, 4))
    view = (x * 1).to_local()
    with torch.no_grad():
        x.to_local().copy_(torch.full((4, 4), 5.0))
        view.zero_()
    check_same(x, x.to_local(), torch.full((8, 4), 5.0))
    assert view.sum().item() == 0


def test_recorded_views_are_not_written(mesh: DeviceMesh) -> None:
    x: Any = nn.Parameter(rows(mesh))
    view = x.to_local()
    with pytest.raises(LocalViewError) as raised:
        view.mul_(2)
    assert str(raised.value) == (
        "aten.mul_.Tensor was called to write to LocalView(local_shape=(4, 4), dtype=float32, "
        "varying=('dp',), mesh=(dp=2, tp=4), requires_grad=True), the memory of a DTensor, while "
        "gradients are recorded. The write would override the gradient of to_local(). Call clone() "
        "on it first, or write under torch.no_grad()."
    )
    with pytest.raises(LocalViewError, match="while gradients are recorded"):
        view[0] = 1.0
    check_same(x, view, VALUE)
    view.clone().mul_(view).sum().backward()
    assert torch.equal(x.grad.cpu(), 2 * VALUE)


def test_values_that_differ_where_the_dtensor_is_replicated(mesh: DeviceMesh) -> None:
    x: Any = rows(mesh)
    other: Any = distribute_tensor(VALUE, mesh)
    view = other.to_local()
    with pytest.raises(LocalViewError) as raised:
        view[:4].copy_(x.to_local())
    assert str(raised.value) == (
        "A local view was written in place with values that differ along the axes ['dp'], where "
        "its DTensor is Replicate. The DTensor has one value there. Write values that are equal on "
        "these devices, or use clone() first."
    )
    with pytest.raises(LocalViewError, match="differ along the axes"):
        view.uniform_()
    # Nothing was written to either side.
    assert view.varying == frozenset()
    assert torch.equal(other.cpu(), VALUE)
    assert all(torch.equal(shard.data, VALUE) for shard in view.addressable_shards())
