"""SkipDTensorDispatch: which ops act on local tensors, what they give, and what is left alone."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

import xla_dtensor as xd
from xla_dtensor import DeviceMesh, DTensor, LocalView, SkipDTensorDispatch, distribute_tensor
from xla_dtensor.errors import ArgumentTypeError, LocalViewError
from xla_dtensor.report import collectives
from xla_dtensor.runtimes import Runtime

R = Replicate()
VALUE = torch.arange(32.0).reshape(8, 4)


def put(mesh: DeviceMesh, value: torch.Tensor = VALUE) -> Any:
    """Rows on dp, columns on tp: every device has a 4 x 1 block of VALUE."""
    return distribute_tensor(value, mesh, [Shard(0), Shard(1)])


def blocks(value: torch.Tensor = VALUE) -> list[torch.Tensor]:
    return [block for rows in value.chunk(2, 0) for block in rows.chunk(4, 1)]


def check_local(found: Any, expected: list[torch.Tensor]) -> None:
    assert type(found) is LocalView
    for shard, block in zip(found.addressable_shards(), expected, strict=True):
        torch.testing.assert_close(shard.data, block)


OPS: dict[str, Any] = {
    "method": lambda t: t.exp(),
    "function": torch.tanh,
    "operator": lambda t: t + 1,
    "reflected": lambda t: 1 - t,
    "comparison": lambda t: t > 3,
    "reduction": lambda t: t.sum(),
    "reduction_of_dim": lambda t: t.amax(0),
    "matmul": lambda t: t @ t.mT,
    "attribute": lambda t: t.T,
    "index": lambda t: t[1:3],
    "functional": lambda t: F.normalize(t, dim=0),
    "several": lambda t: torch.cat([t, t * 2]),
    "made_like": torch.ones_like,
    "conversion": lambda t: t.to(torch.int64),
    "copy": lambda t: t.clone(),
    "same": lambda t: t.contiguous(),
    "softmax": lambda t: torch.softmax(t, 0),
    "keyword": lambda t: torch.add(input=t, other=t),
    "twice": lambda t: t * t,
    "nothing_changes": lambda t: t.to(torch.float32),
}


@pytest.mark.parametrize("name", OPS)
def test_ops_act_on_local_tensors(mesh: DeviceMesh, name: str) -> None:
    x, op = put(mesh), OPS[name]
    with SkipDTensorDispatch():
        found = op(x)
    check_local(found, [op(block) for block in blocks()])
    assert type(op(x)) is DTensor
    assert torch.equal(x.cpu(), VALUE)


def test_several_results(mesh: DeviceMesh) -> None:
    x = put(mesh)
    with SkipDTensorDispatch():
        values, places = x.max(0)
        first, second = x.chunk(2)
    check_local(values, [block.max(0).values for block in blocks()])
    check_local(places, [block.max(0).indices for block in blocks()])
    check_local(first, [block[:2] for block in blocks()])
    check_local(second, [block[2:] for block in blocks()])


def test_other_tensors_beside_it(mesh: DeviceMesh) -> None:
    x, plain = put(mesh), torch.arange(4.0)[:, None]
    with SkipDTensorDispatch():
        check_local(x * plain, [block * plain for block in blocks()])
        check_local(x + x.to_local(), [block * 2 for block in blocks()])
        assert torch.equal(plain + 1, torch.arange(1.0, 5.0)[:, None])
        made = torch.zeros(2)
    assert type(made) is torch.Tensor


def test_without_dtensors_nothing_changes(mesh: DeviceMesh) -> None:
    layer, x = nn.Linear(3, 2), torch.ones(2, 3)
    expected = layer(x)
    with SkipDTensorDispatch():
        assert torch.equal(layer(x), expected)
        x += 1
    assert x.tolist() == [[2.0] * 3] * 2


def test_what_is_no_op_speaks_of_the_whole(mesh: DeviceMesh) -> None:
    x = put(mesh)
    with SkipDTensorDispatch():
        assert (x.shape, x.size(0), x.numel(), len(x), x.dim()) == ((8, 4), 8, 32, 8, 2)
        assert (x.dtype, x.is_floating_point(), x.requires_grad) == (torch.float32, True, False)
        assert "DTensor(shape=(8, 4)" in repr(x)
        assert torch.equal(x.cpu(), VALUE)
        assert torch.equal(x.full_tensor().cpu(), VALUE)
        moved = x.redistribute(placements=[R, Shard(0)], forward_dtype=torch.float64)
        assert moved.xla_sharding() == moved.mesh_layout.op_sharding()
        assert torch.equal(moved.cpu(), VALUE.double())
        parameter = nn.Parameter(x)
        assert torch.equal(put(mesh).cpu(), VALUE)
    assert isinstance(parameter, DTensor)


def test_copies_and_sums_of_the_package(mesh: DeviceMesh) -> None:
    import copy

    with SkipDTensorDispatch():
        copied = copy.deepcopy(put(mesh))
        again = DTensor(put(mesh).to_local() + 1, mesh, [Shard(0), Shard(1)])
    assert type(copied) is DTensor
    assert torch.equal(copied.cpu(), VALUE)
    assert torch.equal(again.cpu(), VALUE + 1)


# ---------------------------------------------------------------------- in place

WRITES: dict[str, Any] = {
    "method": lambda t: t.mul_(3),
    "twice": lambda t: t.add_(t),
    "function": torch.relu_,
    "fill": lambda t: t.fill_(2.5),
    "zero": lambda t: t.zero_(),
    "copy": lambda t: t.copy_(torch.full((4, 1), 7.0)),
    "chained": lambda t: t.mul_(2).add_(1).clamp_(max=20),
}


@pytest.mark.parametrize("name", WRITES)
def test_writes_reach_the_dtensor(mesh: DeviceMesh, name: str) -> None:
    x, write = put(mesh), WRITES[name]
    with SkipDTensorDispatch():
        assert write(x) is x
    assert type(x) is DTensor
    assert x.placements == (Shard(0), Shard(1))
    expected = [write(block.clone()) for block in blocks()]
    whole = torch.cat([torch.cat(expected[:4], 1), torch.cat(expected[4:], 1)])
    assert torch.equal(x.cpu(), whole)


def test_augmented_assignment_keeps_the_dtensor(mesh: DeviceMesh) -> None:
    x = total = put(mesh)
    with SkipDTensorDispatch():
        total += 1
        total *= total
        total[0] = -1.0  # the first row of each device
    assert total is x
    expected = (VALUE + 1) ** 2
    expected[0] = expected[4] = -1.0
    assert torch.equal(x.cpu(), expected)


def test_out(mesh: DeviceMesh) -> None:
    x, out = put(mesh), put(mesh)
    with SkipDTensorDispatch():
        assert torch.add(x, 1, out=out) is out
    assert torch.equal(out.cpu(), VALUE + 1)


def test_lists_of_tensors(mesh: DeviceMesh) -> None:
    x, y, foreach = put(mesh), put(mesh), vars(torch)
    with SkipDTensorDispatch():
        foreach["_foreach_mul_"]([x, y], 2.0)
        sums: Any = foreach["_foreach_add"]([x, y], 1.0)
    assert torch.equal(x.cpu(), VALUE * 2)
    assert torch.equal(y.cpu(), VALUE * 2)
    check_local(sums[1], [block * 2 + 1 for block in blocks()])


def test_writes_where_gradients_are_recorded(mesh: DeviceMesh) -> None:
    x = put(mesh).requires_grad_()
    with SkipDTensorDispatch(), pytest.raises(LocalViewError, match="while gradients are recorded"):
        x.add_(1)
    with SkipDTensorDispatch(), torch.no_grad():
        x.add_(1)
    assert torch.equal(x.detach().cpu(), VALUE + 1)


def test_writes_that_a_copy_cannot_hold(mesh: DeviceMesh) -> None:
    x, other = distribute_tensor(torch.zeros(4, 1), mesh), put(mesh)
    with SkipDTensorDispatch(), pytest.raises(LocalViewError, match="where its DTensor is Repl"):
        x.add_(other)
    assert torch.equal(x.cpu(), torch.zeros(4, 1))


@pytest.mark.parametrize("name", ["t_", "squeeze_", "unsqueeze_", "transpose_"])
def test_writes_that_reshape(mesh: DeviceMesh, name: str) -> None:
    x = put(mesh)
    dims = {"t_": (), "squeeze_": (), "unsqueeze_": (0,), "transpose_": (0, 1)}[name]
    with SkipDTensorDispatch(), pytest.raises(LocalViewError) as raised:
        getattr(x, name)(*dims)
    assert str(raised.value) == (
        f"{name} was called on {x!r} inside SkipDTensorDispatch. It would change the shape of the "
        "local tensor, and the DTensor's placements would no longer fit. Pass "
        f"no_skip={{{name!r}}}, or use {name[:-1]}, which returns a local view."
    )
    assert torch.equal(x.cpu(), VALUE)
    with SkipDTensorDispatch({name}):
        getattr(x, name)(*dims)
    assert torch.equal(x.cpu(), getattr(VALUE.clone(), name)(*dims))


# ---------------------------------------------------------------------- what is listed


@pytest.mark.parametrize(
    "listed", [torch.sum, torch.Tensor.sum, "sum", torch.ops.aten.sum, torch.ops.aten.sum.default]
)
def test_listed_ops(mesh: DeviceMesh, listed: Any) -> None:
    x = put(mesh)
    for call in (lambda: x.sum(), lambda: torch.sum(x)):
        with SkipDTensorDispatch(no_skip={listed}):
            found = call()
            assert type(x.mean()) is LocalView
        assert type(found) is DTensor
        assert found.item() == VALUE.sum().item()


def test_lists_tell_add_from_add_in_place(mesh: DeviceMesh) -> None:
    x = put(mesh)
    with SkipDTensorDispatch(["add", torch.nn.functional.relu]):
        assert type(x + 1) is DTensor
        assert type(F.relu(x)) is DTensor
        assert type(torch.relu(x.to_local())) is LocalView
        assert x.add_(1) is x
        assert type(x - 1) is LocalView


def test_blocks_nest(mesh: DeviceMesh) -> None:
    x = put(mesh)

    def kinds() -> list[Any]:
        return [type(op(x)) for op in (torch.exp, torch.sin, torch.cos)]

    with SkipDTensorDispatch({"exp"}):
        assert kinds() == [DTensor, LocalView, LocalView]
        with SkipDTensorDispatch({torch.sin}) as inner:
            assert kinds() == [DTensor, DTensor, LocalView]
            with SkipDTensorDispatch():
                assert kinds() == [DTensor, DTensor, LocalView]
            with inner:
                assert kinds() == [DTensor, DTensor, LocalView]
        assert kinds() == [DTensor, LocalView, LocalView]
    assert kinds() == [DTensor] * 3


def test_an_exception_ends_the_block(mesh: DeviceMesh) -> None:
    x = put(mesh)
    with pytest.raises(KeyError), SkipDTensorDispatch({"exp"}), SkipDTensorDispatch({"sin"}):
        raise KeyError
    assert type(x.exp()) is type(x * 2) is DTensor
    with SkipDTensorDispatch():
        assert type(x.exp()) is LocalView
        with pytest.raises(IndexError), SkipDTensorDispatch({"exp"}):
            x.sum(5)
        assert type(x.exp()) is LocalView


def test_other_threads_are_left_alone(mesh: DeviceMesh) -> None:
    x, found = put(mesh), []
    with SkipDTensorDispatch():
        thread = threading.Thread(target=lambda: found.append(type(x + 1)))
        thread.start()
        thread.join()
    assert found == [DTensor]


@pytest.mark.parametrize(
    ("no_skip", "text"),
    [
        ("add", "no_skip='add'. It takes a collection of functions and names. Pass a set"),
        (torch.add, "It takes a collection of functions and names"),
        ([3], "with 3 in no_skip. An op is known by the name of a function"),
        ([""], "with '' in no_skip"),
    ],
)
def test_bad_lists(no_skip: Any, text: str) -> None:
    with pytest.raises(ArgumentTypeError, match=text):
        SkipDTensorDispatch(no_skip)


# ---------------------------------------------------------------------- training


def test_gradients_come_back(mesh: DeviceMesh) -> None:
    x = put(mesh).requires_grad_()
    with SkipDTensorDispatch():
        part = (x * x).sum()
        total = DTensor(part, mesh, [Partial(), Partial()])
        total.backward()
        assert type(x.grad) is DTensor
    assert total.item() == (VALUE**2).sum().item()
    assert torch.equal(x.grad.cpu(), VALUE * 2)
    assert x.grad.placements == x.placements


def test_backward_passes_of_the_whole(mesh: DeviceMesh) -> None:
    x = put(mesh).requires_grad_()
    loss = (x.redistribute(placements=[R, R], backward_dtype=torch.float64) ** 2).sum()
    with SkipDTensorDispatch():
        torch.autograd.backward(loss)
        (grad,) = torch.autograd.grad((x * put(mesh)).sum(), [x])
    assert torch.equal(x.grad.cpu(), VALUE * 2)
    assert type(grad) is DTensor
    assert torch.equal(grad.cpu(), VALUE)


@pytest.mark.parametrize("no_skip", [None, {torch.zeros_like}], ids=["local_state", "dtensors"])
@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_optimizers(mesh: DeviceMesh, kind: str, no_skip: Any) -> None:
    options = {"lr": 0.1, "weight_decay": 0.1} | ({"momentum": 0.9} if kind == "SGD" else {})
    draw = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    sharded = nn.Parameter(put(mesh, draw))
    plain = nn.Parameter(draw.clone())
    ours = getattr(torch.optim, kind)([sharded], **options)
    theirs = getattr(torch.optim, kind)([plain], **options)
    for _ in range(3):
        (plain**3).sum().backward()
        theirs.step()
        theirs.zero_grad()
        (sharded**3).sum().backward()
        with SkipDTensorDispatch(no_skip):
            ours.step()
            ours.zero_grad()
    torch.testing.assert_close(sharded.detach().cpu(), plain.detach())
    assert sharded.placements == (Shard(0), Shard(1))  # pyright: ignore
    if kind == "AdamW":
        made = DTensor if no_skip else LocalView
        assert {type(v) for v in ours.state[sharded].values()} == {torch.Tensor, made}


def test_nothing_is_communicated(mesh: DeviceMesh, runtime: Runtime) -> None:
    """An update whose sum over rows would need an all-reduce, as one program."""
    x = put(mesh)

    def update(t: Any, skip: bool) -> Any:
        if not skip:
            return t / t.sum(0)
        with SkipDTensorDispatch():
            return DTensor(t / t.sum(0), mesh, [Shard(0), Shard(1)])

    whole, own = xd.compile(lambda t: update(t, False)), xd.compile(lambda t: update(t, True))
    torch.testing.assert_close(whole(x).cpu(), VALUE / VALUE.sum(0))
    halves = [half / half.sum(0) for half in VALUE.chunk(2)]
    torch.testing.assert_close(own(x).cpu(), torch.cat(halves))
    assert [c.axes for c in collectives(whole.hlo(), mesh.value)] == [("dp",)]
    assert collectives(own.hlo(), mesh.value) == ()


def test_a_compiled_step_is_traced_anew(mesh: DeviceMesh) -> None:
    x, step = put(mesh), xd.compile(lambda t: t.sum().reshape(1))
    assert step(x).tolist() == [VALUE.sum().item()]
    with SkipDTensorDispatch():
        check_local(step(x), [block.sum().reshape(1) for block in blocks()])
    assert step(x).tolist() == [VALUE.sum().item()]
