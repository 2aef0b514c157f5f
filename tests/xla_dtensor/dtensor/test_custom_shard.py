"""custom_shard: functions of local tensors called with DTensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import Partial, Replicate, Shard

import xla_dtensor as xd
from xla_dtensor import DeviceMesh, DTensor, LocalView, custom_shard, distribute_tensor
from xla_dtensor.collectives import psum
from xla_dtensor.errors import ArgumentTypeError, DistributeError, LocalViewError, RedistributeError
from xla_dtensor.report import collectives
from xla_dtensor.runtimes import Runtime

R = Replicate()
ROWS = (Shard(0), R)
VALUE = torch.arange(32.0).reshape(8, 4)


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def put(mesh: DeviceMesh, *placements: Any, value: torch.Tensor = VALUE) -> Any:
    return distribute_tensor(value, mesh, list(placements) or None)


def test_values(mesh: DeviceMesh) -> None:
    seen: list[Any] = []

    def normalised(x: Any, w: Any, eps: float) -> Any:
        seen.extend([x, w])
        return x / (x.sum(0) + w + eps)

    made = custom_shard(normalised, mesh, (ROWS,), (ROWS, (R, R), None))
    weight = torch.arange(4.0)
    found = made(put(mesh, *ROWS), put(mesh, value=weight), 0.5)
    halves = [half / (half.sum(0) + weight + 0.5) for half in VALUE.chunk(2)]
    assert [type(v) for v in seen] == [LocalView, LocalView]
    assert [tuple(v.shape) for v in seen] == [(4, 4), (4,)]
    assert type(found) is DTensor
    assert (found.placements, found.device_mesh) == (ROWS, mesh)
    torch.testing.assert_close(found.cpu(), torch.cat(halves))


def test_inputs_are_moved(mesh: DeviceMesh) -> None:
    made = custom_shard(lambda x: x.cumsum(0), mesh, ((R, Shard(1)),), (("None", "tp"),))
    x = put(mesh, Shard(0), R)
    found = made(x)
    assert x.placements == ROWS
    assert found.placements == (R, Shard(1))
    assert torch.equal(found.cpu(), VALUE.cumsum(0))


def test_inputs_are_not_moved(mesh: DeviceMesh) -> None:
    made = custom_shard(lambda x: x + 1, mesh, (ROWS,), (ROWS,), False)
    assert torch.equal(made(put(mesh, *ROWS)).cpu(), VALUE + 1)
    x = put(mesh, R, Shard(1))
    with pytest.raises(DistributeError) as raised:
        made(x)
    assert str(raised.value) == (
        f"A function made by custom_shard was called with {x!r} as argument 0, and in_placements "
        "has [Shard(dim=0), Replicate()] on the mesh (dp=2, tp=4). With redistribute_inputs=False "
        "nothing is moved. Call redistribute on it first, or leave redistribute_inputs=True."
    )


def test_inputs_from_another_mesh(mesh: DeviceMesh) -> None:
    flat = xd.init_device_mesh("xla", (8,), mesh_dim_names=("all",))
    made = custom_shard(lambda x: x * 2, mesh, (ROWS,), (ROWS,))
    found = made(distribute_tensor(VALUE, flat, [Shard(1)]))
    assert found.device_mesh == mesh
    assert torch.equal(found.cpu(), VALUE * 2)
    with pytest.raises(DistributeError, match="nothing is moved"):
        custom_shard(lambda x: x, mesh, (ROWS,), (ROWS,), False)(
            distribute_tensor(VALUE, flat, [Shard(0)])
        )


def test_parts_go_in_and_come_out(mesh: DeviceMesh) -> None:
    pending = (Partial(), R)
    made = custom_shard(lambda x: x * 3, mesh, (pending,), (pending,))
    total = put(mesh, *ROWS).sum(0)
    assert total.placements == pending
    assert torch.equal(made(total).cpu(), VALUE.sum(0) * 3)
    with pytest.raises(RedistributeError, match="Partial"):
        made(put(mesh, value=VALUE[0]))


def test_several_outputs(mesh: DeviceMesh) -> None:
    def split(x: Any) -> Any:
        return x * 2, "rows", x.sum(0)

    made = custom_shard(split, mesh, (ROWS, None, (Partial(), R)), (ROWS,))
    doubled, word, total = made(put(mesh))
    assert word == "rows"
    assert torch.equal(doubled.cpu(), VALUE * 2)
    assert torch.equal(total.cpu(), VALUE.sum(0))
    as_list = custom_shard(lambda x: [x, x + 1], mesh, [ROWS, ("dp", "None")], [ROWS])(put(mesh))
    assert isinstance(as_list, list)
    assert torch.equal(as_list[1].cpu(), VALUE + 1)


@pytest.mark.parametrize(
    "alone", [ROWS, [Shard(0), R], ("dp", "None"), (("dp",), "None"), ("dp", None)], ids=str
)
def test_one_item_alone(mesh: DeviceMesh, alone: Any) -> None:
    found = custom_shard(lambda x: -x, mesh, alone, alone)(put(mesh))
    assert found.placements == ROWS
    assert torch.equal(found.cpu(), -VALUE)


def test_as_a_decorator(mesh: DeviceMesh) -> None:
    @custom_shard(device_mesh=mesh, out_placements=(ROWS,), in_placements=(ROWS,))
    def doubled(x: Any, *, times: int = 2) -> Any:
        """Double."""
        return x * times

    assert (doubled.__name__, doubled.__doc__) == ("doubled", "Double.")
    assert torch.equal(doubled(put(mesh)).cpu(), VALUE * 2)
    assert torch.equal(doubled(put(mesh), times=5).cpu(), VALUE * 5)


def test_without_dtensors(mesh: DeviceMesh) -> None:
    made = custom_shard(lambda x: x + 1, mesh, (ROWS,))
    assert torch.equal(made(VALUE), VALUE + 1)
    assert made(2) == 3


def test_collectives_inside(mesh: DeviceMesh, runtime: Runtime) -> None:
    """Row-parallel: each device multiplies its columns, and one all-reduce adds the products."""
    x, w = numbers(8, 16), numbers(16, 4)

    def product(a: Any, b: Any) -> Any:
        return psum(a @ b, "tp")

    made = custom_shard(product, mesh, (ROWS,), ((Shard(0), Shard(1)), (R, Shard(0))))
    left, right = put(mesh, Shard(0), Shard(1), value=x), put(mesh, R, Shard(0), value=w)
    step = xd.compile(made)
    torch.testing.assert_close(step(left, right).cpu(), x @ w)
    found = collectives(step.hlo(), mesh.value)
    assert [(c.kind, c.axes) for c in found] == [("all-reduce", ("tp",))]


def test_nothing_else_is_communicated(mesh: DeviceMesh, runtime: Runtime) -> None:
    made = custom_shard(lambda x: x.sort(0).values, mesh, (ROWS,), (ROWS,))
    x, step = put(mesh, *ROWS, value=numbers(8, 4)), xd.compile(made)
    torch.testing.assert_close(
        step(x).cpu(), torch.cat([half.sort(0).values for half in numbers(8, 4).chunk(2)])
    )
    assert collectives(step.hlo(), mesh.value) == ()


# ---------------------------------------------------------------------- gradients


def test_gradients(mesh: DeviceMesh) -> None:
    x, w = numbers(8, 6), numbers(5, 6)
    made = custom_shard(
        F.linear,
        mesh,
        (ROWS,),
        (ROWS, (R, R)),
        in_grad_placements=(ROWS, (Partial(), R)),
    )
    ours = put(mesh, *ROWS, value=x).requires_grad_(), put(mesh, value=w).requires_grad_()
    theirs = x.clone().requires_grad_(), w.clone().requires_grad_()
    (made(*ours) ** 2).sum().backward()
    (F.linear(*theirs) ** 2).sum().backward()
    for mine, plain in zip(ours, theirs, strict=True):
        assert mine.grad is not None
        assert plain.grad is not None
        torch.testing.assert_close(mine.grad.cpu(), plain.grad)
    assert ours[0].grad.placements == ROWS


def test_gradients_that_are_parts(mesh: DeviceMesh) -> None:
    made = custom_shard(F.linear, mesh, (ROWS,), (ROWS, (R, R)))
    x = put(mesh, *ROWS, value=numbers(8, 6))
    w = put(mesh, value=numbers(5, 6)).requires_grad_()
    with pytest.raises(LocalViewError, match="with Partial\\(\\) for these axes"):
        made(x, w).sum().backward()


def test_gradients_through_a_move(mesh: DeviceMesh) -> None:
    x = put(mesh, Shard(0), R).requires_grad_()
    made = custom_shard(lambda t: t.exp(), mesh, ((R, Shard(1)),), ((R, Shard(1)),))
    made(x / 32).sum().backward()
    assert x.grad.placements == ROWS
    torch.testing.assert_close(x.grad.cpu(), (VALUE / 32).exp() / 32)


# ---------------------------------------------------------------------- errors

CALLS: dict[str, tuple[Any, type[Exception], type[Exception], str]] = {
    "no_in_placements": (
        lambda m, x: custom_shard(torch.exp, m, (ROWS,))(x),
        RedistributeError,
        RuntimeError,
        "as argument 0, without in_placements. How its local tensors are to be cut is not said. "
        "Pass in_placements with one entry per argument.",
    ),
    "none_for_a_dtensor": (
        lambda m, x: custom_shard(torch.add, m, (ROWS,), (ROWS, None))(x, x),
        ArgumentTypeError,
        TypeError,
        "as argument 1, for which in_placements has None. None is for what is no DTensor.",
    ),
    "placements_for_a_plain_tensor": (
        lambda m, x: custom_shard(torch.add, m, (ROWS,), (ROWS, ROWS))(x, VALUE),
        ArgumentTypeError,
        TypeError,
        "was called with a Tensor as argument 1, for which in_placements has (Shard(dim=0), "
        "Replicate()). Only a DTensor has placements.",
    ),
    "placements_for_a_number": (
        lambda m, x: custom_shard(torch.add, m, (ROWS,), (ROWS, ROWS))(x, 3),
        ArgumentTypeError,
        TypeError,
        "was called with a int as argument 1",
    ),
    "number_of_inputs": (
        lambda m, x: custom_shard(torch.add, m, (ROWS,), (ROWS,))(x, 3),
        DistributeError,
        ValueError,
        "was called with 2 positional arguments, and in_placements has 1 entries.",
    ),
    "number_of_gradients": (
        lambda m, x: custom_shard(torch.exp, m, (ROWS,), (ROWS,), in_grad_placements=(ROWS,) * 2)(
            x
        ),
        DistributeError,
        ValueError,
        "was called with 1 positional arguments, and in_grad_placements has 2 entries.",
    ),
    "number_of_outputs": (
        lambda m, x: custom_shard(torch.exp, m, (ROWS, ROWS), (ROWS,))(x),
        DistributeError,
        ValueError,
        "returned 1 outputs, and out_placements has 2 entries. There is one entry per output.",
    ),
    "none_for_an_output": (
        lambda m, x: custom_shard(torch.exp, m, (None,), (ROWS,))(x),
        ArgumentTypeError,
        TypeError,
        "returned a LocalView as output 0, for which out_placements has None. A tensor has "
        "placements, anything else has None.",
    ),
    "placements_for_a_word": (
        lambda m, x: custom_shard(lambda t: "word", m, (ROWS,), (ROWS,))(x),
        ArgumentTypeError,
        TypeError,
        "returned a str as output 0",
    ),
    "no_out_placements": (
        lambda m, x: custom_shard(torch.exp, m),
        ArgumentTypeError,
        TypeError,
        "custom_shard was called without out_placements.",
    ),
    "no_mesh": (
        lambda m, x: custom_shard(torch.exp, None, (ROWS,)),
        ArgumentTypeError,
        TypeError,
        "A mesh was expected",
    ),
    "wrong_placements": (
        lambda m, x: custom_shard(torch.exp, m, (ROWS,), ((Shard(0),),))(x),
        DistributeError,
        ValueError,
        "custom_shard was called with 1 placements=[Shard(dim=0)]",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_bad_calls(mesh: DeviceMesh, count_sentences: Any, name: str) -> None:
    call, error, builtin, text = CALLS[name]
    with pytest.raises(error) as raised:
        call(mesh, put(mesh, *ROWS))
    assert isinstance(raised.value, builtin)
    assert text in str(raised.value)
    assert count_sentences(str(raised.value)) >= 3
