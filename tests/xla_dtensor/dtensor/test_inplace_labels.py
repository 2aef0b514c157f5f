"""In-place ops and out=: the destination stays what it was, or the op raises as PyTorch's does."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

import xla_dtensor as xd
from xla_dtensor.errors import WriteError

R = Replicate()
untyped: Any = torch  # some of its names are private to it
LABEL = (Shard(0), R)


def put(mesh: xd.DeviceMesh, tensor: torch.Tensor, *placements: Any) -> Any:
    return xd.distribute_tensor(tensor, mesh, list(placements or LABEL))


# Each writes to d (8, 4), that is rows on dp, from s (8, 4), that is columns on dp.
WRITES: dict[str, Callable[[Any, Any], Any]] = {
    "add_": lambda d, s: d.add_(s),
    "mul_ by a number": lambda d, s: d.mul_(2),
    "copy_": lambda d, s: d.copy_(s),
    "fill_": lambda d, s: d.fill_(3),
    "zero_": lambda d, s: d.zero_(),
    "relu_": lambda d, s: d.relu_(),
    "clamp_": lambda d, s: d.clamp_(max=0.5),
    "addmm_": lambda d, s: d.addmm_(s, s[:4]),
    "masked_fill_": lambda d, s: d.masked_fill_(s > 0, -1),
    "index_add_": lambda d, s: d.index_add_(0, torch.tensor([2, 5]), s[:2]),
    "index_put_": lambda d, s: d.index_put_((torch.tensor([1, 3]),), s[:2]),
    "setitem": lambda d, s: d.__setitem__((slice(1, 3), slice(2)), s[:2, :2]) or d,
    "sort.values into": lambda d, s: d.copy_(s.sort(dim=0).values),
    "cumsum_": lambda d, s: d.cumsum_(0),
    "lerp_": lambda d, s: d.lerp_(s, 0.25),
    "foreach": lambda d, s: (untyped._foreach_addcmul_([d], [s], [s]), d)[1],
    "+=": lambda d, s: d.__iadd__(s),
    "add.out": lambda d, s: torch.add(s, 1, out=d),
    "matmul.out": lambda d, s: torch.mm(s, s[:4], out=d),
    "sort.out": lambda d, s: torch.sort(s, 0, out=(d, torch.empty_like(s, dtype=torch.int64)))[0],
    "cat.out": lambda d, s: torch.cat([s[:3], s[:5]], out=d),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_destination_keeps_object_label_and_sharding(name: str, mesh: xd.DeviceMesh) -> None:
    torch.manual_seed(0)
    plain, source = torch.randn(8, 4), torch.randn(8, 4)
    d, s = put(mesh, plain), put(mesh, source, Shard(1), R)
    before = d.xla_sharding()
    assert WRITES[name](d, s) is d
    WRITES[name](plain, source)
    torch.testing.assert_close(d.cpu(), plain)
    assert d.placements == LABEL
    assert d.xla_sharding() == before
    assert s.placements == (Shard(1), R)
    torch.testing.assert_close(s.cpu(), source)


def test_writes_of_a_compiled_step(mesh: xd.DeviceMesh) -> None:
    d, s = put(mesh, torch.ones(8, 4)), put(mesh, torch.ones(8, 4), Shard(1), R)
    before = d.xla_sharding()

    def f(s: Any) -> Any:
        d.add_(s)
        torch.mul(d, s, out=d)
        return d.sum()

    step = xd.compile(f)
    for expected in (64.0, 96.0, 128.0):
        assert step(s).item() == expected
    assert d.placements == LABEL
    assert d.xla_sharding() == before


def test_a_pending_destination_stays_pending(mesh: xd.DeviceMesh) -> None:
    total = put(mesh, torch.ones(8, 4), Shard(0), Shard(1)).sum(1)
    assert total.placements == (Shard(0), Partial("sum"))
    total.add_(1).relu_()
    assert total.placements == (Shard(0), Partial("sum"))
    moved = total.redistribute(placements=[Shard(0), R])
    torch.testing.assert_close(moved.cpu(), torch.full((8,), 5.0))


def test_several_destinations(mesh: xd.DeviceMesh) -> None:
    x = torch.randn(8, 4)
    values = put(mesh, torch.zeros(8), R, Shard(0))
    indices = put(mesh, torch.zeros(8, dtype=torch.int64), Shard(0), Shard(0))
    result = torch.max(put(mesh, x), 1, out=(values, indices))
    assert result[0] is values
    assert result[1] is indices
    assert values.placements == (R, Shard(0))
    assert indices.placements == (Shard(0), Shard(0))
    torch.testing.assert_close(values.cpu(), x.max(1).values)
    torch.testing.assert_close(indices.cpu(), x.max(1).indices)


@pytest.mark.parametrize("name", ["t_", "unsqueeze_", "transpose_"])
def test_ops_that_reshape_in_place_move_the_label_along(name: str, mesh: xd.DeviceMesh) -> None:
    arguments = {"t_": (), "unsqueeze_": (0,), "transpose_": (0, 1)}[name]
    plain = torch.arange(32.0).reshape(8, 4)
    d = put(mesh, plain)
    assert getattr(d, name)(*arguments) is d
    getattr(plain, name)(*arguments)
    assert d.shape == plain.shape
    assert d.placements == (Shard(1), R)
    torch.testing.assert_close(d.cpu(), plain)


NUMBERS = torch.arange(8)
ROWS = torch.ones(8, 4)
REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "int += float": (lambda p: p(NUMBERS).add_(1.5), "Float can't be cast to .* Long"),
    "int *= floats": (lambda p: p(NUMBERS).mul_(p(ROWS[:, 0])), "Float can't be cast to .* Long"),
    "int sqrt": (lambda p: p(NUMBERS).sqrt_(), "Float can't be cast to .* Long"),
    "bool += int": (lambda p: p(NUMBERS > 3).add_(p(NUMBERS)), "Long can't be cast to .* Bool"),
    "foreach": (
        lambda p: untyped._foreach_add_([p(NUMBERS)], [p(ROWS[:, 0])]),
        "Float can't be cast to .* Long",
    ),
    "broadcast": (
        lambda p: p(torch.ones(4)).add_(p(ROWS)),
        r"output with shape .* doesn't match the broadcast shape",
    ),
    "out dtype": (
        lambda p: torch.add(p(ROWS), 1.5, out=p(ROWS.long())),
        "Float can't be cast to .* Long",
    ),
    "out too large": (
        lambda p: torch.add(p(ROWS[:, 0]), 1, out=p(ROWS)),
        r"out= of shape=\(8, 4\), and its result has shape=\(8,\)",
    ),
    "out too small": (
        lambda p: torch.add(p(ROWS), 1, out=p(ROWS[:, 0])),
        r"out= of shape=\(8,\), and its result has shape=\(8, 4\)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_destination_cannot_hold(
    name: str, mesh: xd.DeviceMesh, count_sentences: Callable[[str], int]
) -> None:
    call, text = REFUSED[name]
    made: list[tuple[Any, torch.Tensor]] = []

    def p(tensor: torch.Tensor) -> Any:
        made.append((put(mesh, tensor.clone()), tensor.clone()))
        return made[-1][0]

    for _ in range(2):  # refused once, refused always
        with pytest.raises(WriteError, match=text) as raised:
            call(p)
        assert isinstance(raised.value, RuntimeError)
        assert count_sentences(str(raised.value)) == 3
    for d, plain in made:
        assert torch.equal(d.cpu(), plain)


def test_what_pytorch_casts_is_cast(mesh: xd.DeviceMesh) -> None:
    d = put(mesh, torch.zeros(8))
    d.copy_(put(mesh, NUMBERS)).add_(put(mesh, NUMBERS))
    assert d.dtype == torch.float32
    torch.testing.assert_close(d.cpu(), NUMBERS * 2.0)
    n = put(mesh, NUMBERS.clone())
    n.copy_(put(mesh, torch.full((8,), 2.75))).fill_(3.9)
    assert torch.equal(n.cpu(), torch.full((8,), 3))


def test_asking_costs_no_random_numbers_and_warns_of_nothing(mesh: xd.DeviceMesh) -> None:
    d = put(mesh, torch.zeros(8))
    state = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        d.div_(0.0).add_(1).floor_divide_(3)
        torch.add(d, 1, out=d)
    assert torch.equal(torch.get_rng_state(), state)
