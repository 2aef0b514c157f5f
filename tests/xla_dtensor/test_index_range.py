"""An index that a tensor does not have raises, as in PyTorch; in a compiled step it gives NaN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import Replicate, Shard

import xla_dtensor as xd
from xla_dtensor.errors import IndexRangeError

pytestmark = pytest.mark.only_on("jax")
R = Replicate()
ONE = torch.tensor(1.0)
Call = Callable[[Any, Any], Any]

# Name -> (call of a tensor of 8 rows and 3 columns, and of two indices; those that are taken).
CALLS: dict[str, tuple[Call, tuple[int, int]]] = {
    "x[i]": (lambda x, i: x[i], (-8, 7)),
    "x[:, i]": (lambda x, i: x[:, i], (-3, 2)),
    "index_put": (lambda x, i: x.index_put((i,), ONE), (-8, 7)),
    "index_select": (lambda x, i: x.index_select(0, i), (0, 7)),
    "gather": (lambda x, i: x.gather(0, i[:, None]), (0, 7)),
    "scatter": (lambda x, i: x.scatter(0, i[:, None], 1.0), (0, 7)),
    "scatter_add": (lambda x, i: x.scatter_add(1, i[:, None], x), (0, 2)),
    "scatter_reduce": (lambda x, i: x.scatter_reduce(0, i[:, None], x, "amax"), (0, 7)),
    "index_add": (lambda x, i: x.index_add(0, i, x[:2]), (0, 7)),
    "index_copy": (lambda x, i: x.index_copy(0, i, x[:2]), (0, 7)),
    "index_fill": (lambda x, i: x.index_fill(0, i, 1.0), (-8, 7)),
    "take": (lambda x, i: x.take(i), (-24, 23)),
    "put": (lambda x, i: x.put(i, x[0, :2]), (-24, 23)),
    "embedding": (lambda x, i: F.embedding(i, x), (0, 7)),
    "cross_entropy": (lambda x, i: F.cross_entropy(x[:2], i), (0, 2)),
    "multi_margin_loss": (lambda x, i: F.multi_margin_loss(x[:2], i), (0, 2)),
    "multilabel_margin_loss": (lambda x, i: F.multilabel_margin_loss(x[0, :2], i), (-1, 1)),
    "max_unpool2d": (
        lambda x, i: F.max_unpool2d(x[None, :1, :2], i[None, None], [2, 2], output_size=(2, 4)),
        (0, 7),
    ),
    # What has no dims is one row.
    "index_select, 0-d": (lambda x, i: x[0, 0].index_select(0, i[1:]), (0, 0)),
    "gather, 0-d": (lambda x, i: x[0, 0].gather(0, i[1]), (0, 0)),
    "scatter, 0-d": (lambda x, i: x[0, 0].scatter(0, i[1], 1.0), (0, 0)),
    "scatter_add, 0-d": (lambda x, i: x[0, 0].scatter_add(0, i[1], x[0, 1]), (0, 0)),
    "scatter_reduce, 0-d": (lambda x, i: x[0, 0].scatter_reduce(0, i[1], x[1, 1], "amax"), (0, 0)),
    "index_add, 0-d": (lambda x, i: x[0, 0].index_add(0, i[1:], x[0, 1]), (0, 0)),
    "index_copy, 0-d": (lambda x, i: x[0, 0].index_copy(0, i[1:], x[0, 1:2]), (0, 0)),
    "index_fill, 0-d": (lambda x, i: x[0, 0].index_fill(0, i[1:], 1.0), (-1, 0)),
}


def table(mesh: xd.DeviceMesh | None) -> Any:
    x = torch.sin(torch.arange(24.0)).reshape(8, 3)
    return x if mesh is None else xd.distribute_tensor(x, mesh, [Shard(0), R])


def on_mesh(index: torch.Tensor, mesh: xd.DeviceMesh) -> Any:
    return xd.distribute_tensor(index, mesh, [R, R])


@pytest.mark.parametrize("on_host", [True, False], ids=["host", "mesh"])
@pytest.mark.parametrize("name", CALLS)
def test_range(name: str, on_host: bool, mesh: xd.DeviceMesh) -> None:
    call, (low, high) = CALLS[name]
    put = (lambda i: i) if on_host and name != "embedding" else (lambda i: on_mesh(i, mesh))
    ends = torch.tensor([low, high])
    found: Any = call(table(mesh), put(ends))
    torch.testing.assert_close(found.full_tensor().cpu(), call(table(None), ends))
    for wrong in (low - 1, high + 1):
        index = torch.tensor([low, wrong])
        with pytest.raises(IndexRangeError, match=f"the index {wrong} for ") as error:
            call(table(mesh), put(index))
        with pytest.raises((IndexError, RuntimeError)) as right:
            call(table(None), index)
        assert isinstance(error.value, type(right.value))


def test_what_means_no_index(mesh: xd.DeviceMesh) -> None:
    target = torch.tensor([-100, 2])
    found: Any = F.cross_entropy(table(mesh)[:2], on_mesh(target, mesh))
    right = F.cross_entropy(table(None)[:2], target)
    torch.testing.assert_close(found.full_tensor().cpu(), right)
    nothing = on_mesh(torch.zeros(0, dtype=torch.int64), mesh)
    assert table(mesh)[nothing].shape == (0, 3)


def test_a_compiled_step_gives_nan(mesh: xd.DeviceMesh) -> None:
    step: Any = xd.compile(lambda x, i, t: (x[i], F.embedding(i, x), F.cross_entropy(x[:2], t)))
    index, target = torch.tensor([7, 8]), torch.tensor([0, 3])
    rows, embedded, loss = step(table(mesh), on_mesh(index, mesh), on_mesh(target, mesh))
    for value in (rows, embedded):
        assert torch.equal(value.full_tensor().cpu()[0], table(None)[7])
        assert value.full_tensor().cpu()[1].isnan().all()
    assert loss.full_tensor().cpu().isnan()


def test_sums_that_a_compiled_step_does_not_know_give_nan(mesh: xd.DeviceMesh) -> None:
    for name in ("repeat_interleave", "segment_reduce"):
        call, right, wrong, _ = VALUES[name]
        step: Any = xd.compile(call)
        found = step(table(mesh), on_mesh(torch.tensor(right), mesh)).full_tensor().cpu()
        torch.testing.assert_close(found, call(table(None), torch.tensor(right)))
        found = step(table(mesh), on_mesh(torch.tensor(wrong), mesh))
        assert found.full_tensor().cpu().isnan().all(), name


def test_a_dim_that_there_is_not(mesh: xd.DeviceMesh) -> None:
    with pytest.raises(IndexRangeError, match=r"along dim=4 of a tensor of shape=\(8, 3\)"):
        table(mesh).softmax(4)


W = torch.ones(4, 3)


@pytest.mark.parametrize(
    "index",
    [torch.tensor([1, 2]), (slice(None), torch.tensor([1, 2])), torch.arange(8) < 2],
    ids=["rows", "columns", "mask"],
)
def test_values_of_another_shape(mesh: xd.DeviceMesh, index: Any) -> None:
    for x in (table(mesh), table(None)):
        with pytest.raises(RuntimeError, match="shape"):
            x[index] = W
    if isinstance(index, torch.Tensor):
        x = table(mesh)
        with pytest.raises(RuntimeError, match="shape"):
            x[on_mesh(index, mesh)] = W
        with pytest.raises(IndexError, match="whole number"):
            x[index.float()]


# What decides is a value: calls that are taken, and those that are not with what is said.
VALUES: dict[str, tuple[Call, Any, Any, str]] = {
    "one_hot": (lambda x, v: F.one_hot(v, 5), [0, 4], [0, 5], "the index 5 for num_classes=5"),
    "one_hot below 0": (lambda x, v: F.one_hot(v, 5), [0, 4], [-1, 4], "the index -1 for num_cl"),
    "// a tensor": (lambda x, v: v // v.flip(0), [2, -1], [2, 0], "cannot be divided by 0"),
    "% a tensor": (lambda x, v: v % v.flip(0), [2, -1], [2, 0], "cannot be divided by 0"),
    "fmod": (lambda x, v: torch.fmod(v, v.flip(0)), [2, -1], [2, 0], "cannot be divided by 0"),
    "trunc": (
        lambda x, v: torch.div(v, v.flip(0), rounding_mode="trunc"),
        [2, -1],
        [2, 0],
        "cannot be divided by 0",
    ),
    "masked_scatter": (
        lambda x, v: x.masked_scatter((v > 0)[:1], x[0]),
        [0, 1],
        [1, 1],
        "the number of places 24 for a source of 3 values",
    ),
    "repeat_interleave": (
        lambda x, v: x[:2].repeat_interleave(v, 0, output_size=3),
        [1, 2],
        [1, 3],
        "the sum of repeats 4 for output_size=3. Pass their sum",
    ),
    "segment_reduce": (
        lambda x, v: torch.segment_reduce(x, "max", lengths=v),
        [6, 2],
        [6, 1],
        "the sum of lengths 7 for dim 0 of size 8",
    ),
    "sorter": (
        lambda x, v: torch.searchsorted(torch.zeros_like(v), v * 0, sorter=v),
        [0, 1],
        [0, 2],
        "the place in sorter 2 for boundaries of size 2",
    ),
    "multinomial": (
        lambda x, v: torch.multinomial(v.float(), 1) * 0,
        [1, 2],
        [1, -2],
        "the weight -2.0 for a draw",
    ),
    "bernoulli": (
        lambda x, v: torch.bernoulli(v.float()),
        [0, 1],
        [0, 2],
        "the probability 2.0 for a draw",
    ),
    "binary_cross_entropy": (
        lambda x, v: F.binary_cross_entropy(v.float(), v.float().sigmoid()),
        [0, 1],
        [0, 2],
        "the probability 2.0 for a loss",
    ),
    "target of binary_cross_entropy": (
        lambda x, v: F.binary_cross_entropy(v.float().sigmoid(), v.float()),
        [0, 1],
        [0, 2],
        "the probability 2.0 for a loss",
    ),
    "offsets of embedding_bag": (
        lambda x, v: F.embedding_bag((v * 0).repeat(2), x, v),
        [0, 4],
        [0, 9],
        "the offset 9 for an input of 4 indices",
    ),
}


@pytest.mark.parametrize("name", VALUES)
def test_values(name: str, mesh: xd.DeviceMesh) -> None:
    call, right, wrong, text = VALUES[name]
    found: Any = call(table(mesh), on_mesh(torch.tensor(right), mesh))
    torch.testing.assert_close(found.full_tensor().cpu(), call(table(None), torch.tensor(right)))
    with pytest.raises(IndexRangeError, match=text) as error:
        call(table(mesh), on_mesh(torch.tensor(wrong), mesh))
    with pytest.raises((IndexError, RuntimeError)) as expected:
        call(table(None), torch.tensor(wrong))
    assert isinstance(error.value, type(expected.value))


def test_numbers(mesh: xd.DeviceMesh) -> None:
    x = table(mesh)
    assert (x // 0).full_tensor().cpu().isinf().any()
    with pytest.raises(IndexRangeError, match="Whole numbers cannot be divided by 0"):
        _ = on_mesh(torch.arange(3), mesh) // 0
    for k in (0, 9):
        with pytest.raises(IndexRangeError, match=f"the number k {k} for dim 0 of size 8"):
            x.kthvalue(k, 0)
    targets = on_mesh(torch.tensor([0, 4]), mesh)
    with pytest.raises(IndexRangeError, match="the index 4 for 4 classes"):
        xd.linear_cross_entropy(x[:2], W, targets)
