"""Local views read from Python, made from host tensors, uneven ones, and every refusal."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import Partial, Replicate, Shard

from xla_dtensor import DeviceMesh, DTensor, LocalView, distribute_tensor, init_device_mesh
from xla_dtensor.collectives import all_gather, axis_index, psum
from xla_dtensor.errors import (
    ArgumentTypeError,
    DistributeError,
    LocalViewError,
    UnsupportedOpError,
)
from xla_dtensor.runtimes import Runtime

VALUE = torch.arange(32.0).reshape(8, 4)
FIRST = VALUE[:4]
TEN = torch.randn(10, 3, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def view(mesh: DeviceMesh) -> Any:
    """Rows 0 to 3 on the devices with dp=0, the others on those with dp=1."""
    return distribute_tensor(VALUE, mesh, [Shard(0), Replicate()]).to_local()


@pytest.fixture(scope="module")
def uneven(mesh: DeviceMesh) -> Any:
    """3, 3, 3 and 1 of ten rows along tp."""
    return distribute_tensor(TEN, mesh, [Replicate(), Shard(0)]).to_local()


@pytest.fixture(scope="module")
def single(mesh: DeviceMesh) -> Any:
    """1, 1, 1 and 0 of three rows along tp."""
    return distribute_tensor(TEN[:3], mesh, [Replicate(), Shard(0)]).to_local()


# ---------------------------------------------------------------------- the first device's value

READS: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "item": (lambda v: v.sum().item(), 120.0),
    "float": (lambda v: float(v[0, 1]), 1.0),
    "int": (lambda v: int(v[2, 1]), 9),
    "bool": (lambda v: bool((v < 16).all()), True),
    "index": (lambda v: [5, 6, 7][v[0, 2].long()], 7),
    "in": (lambda v: 3.0 in v, True),
    "not in": (lambda v: 17.0 in v, False),
    "number format": (lambda v: f"{v.mean():.2f}", "7.50"),
    "tolist": (lambda v: v.tolist(), FIRST.tolist()),
    "numpy": (lambda v: v.numpy().tolist(), FIRST.tolist()),
    "asarray": (lambda v: np.asarray(v).tolist(), FIRST.tolist()),
    "cpu": (lambda v: v.cpu().tolist(), FIRST.tolist()),
    "a view read": (lambda v: v.t()[1:3, 0].tolist(), [1.0, 2.0]),
    "equal": (lambda v: torch.equal(v, FIRST), True),
    "not equal": (lambda v: torch.equal(v, VALUE[4:]), False),
    "allclose": (lambda v: torch.allclose(v, FIRST + 1e-9), True),
    "len": (len, 4),
    "iter": (lambda v: [row[0].item() for row in v], [0.0, 4.0, 8.0, 12.0]),
}


@pytest.mark.parametrize("name", READS)
def test_reads_the_first_device(view: Any, name: str) -> None:
    read, expected = READS[name]
    found = read(view)
    assert type(found) is type(expected)
    assert found == expected


def test_plain_tensors_come_out(view: Any) -> None:
    assert type(view.cpu()) is torch.Tensor
    torch.testing.assert_close(view.cpu(), FIRST)
    torch.testing.assert_close(view, FIRST, check_device=False)
    with pytest.raises(AssertionError, match="not close"):
        torch.testing.assert_close(view, VALUE[4:], check_device=False)


def test_text(view: Any) -> None:
    text = "LocalView(local_shape=(4, 4), dtype=float32, varying=('dp',), mesh=(dp=2, tp=4))"
    assert repr(view) == str(view) == f"{view}" == text
    leaf = view.clone().requires_grad_()
    assert repr(leaf) == f"{text[:-1]}, requires_grad=True)"


def test_addressable_shards(view: Any) -> None:
    shards = view.addressable_shards()
    assert [shard.device_id for shard in shards] == list(range(8))
    for shard in shards:
        expected = VALUE[:4] if shard.device_id < 4 else VALUE[4:]
        assert torch.equal(shard.data, expected)
        assert shard.index == (slice(0, 4), slice(0, 4))


def test_wait_and_copies(view: Any) -> None:
    assert view.wait() is view
    copied = copy.deepcopy(view)
    copied.zero_()
    assert view.sum().item() == 120.0
    leaf = view.clone().requires_grad_()
    again = copy.deepcopy(leaf)
    assert again.requires_grad
    assert again.is_leaf


# ---------------------------------------------------------------------- from_shards, from_local


def test_from_shards(mesh: DeviceMesh) -> None:
    tensors = [torch.full((2,), i) for i in range(8)]
    for given in (tensors, tuple(tensors), dict(enumerate(tensors))):
        view = LocalView.from_shards(given, mesh)
        assert view.varying == {"dp", "tp"}
        assert [s.data.tolist() for s in view.addressable_shards()] == [[i, i] for i in range(8)]
    columns = init_device_mesh("xla", (4, 2), mesh_dim_names=("tp", "dp"))
    moved = DTensor.from_local(LocalView.from_shards(tensors, columns), columns, [Shard(0)] * 2)
    assert moved.tolist() == [i for i in range(8) for _ in range(2)]


def test_from_shards_on_a_submesh(mesh: DeviceMesh) -> None:
    numbers = [torch.tensor(float(i)) for i in range(4)]
    for given in (numbers, {4 + i: number for i, number in enumerate(numbers)}):
        view = LocalView.from_shards(given, mesh["tp"])
        assert view.varying == {"tp"}
        assert [s.data.item() for s in view.addressable_shards()] == [0.0, 1.0, 2.0, 3.0] * 2


def test_from_local_of_a_plain_tensor(mesh: DeviceMesh) -> None:
    row = torch.tensor([1.0, 2.0])
    copies = DTensor.from_local(row, mesh)
    assert copies.placements == (Replicate(), Replicate())
    assert copies.tolist() == [1.0, 2.0]
    blocks = DTensor.from_local(row, mesh, [Shard(0), Partial()], same_on_every_device=True)
    assert blocks.tolist() == [4.0, 8.0, 4.0, 8.0]
    with mesh:
        assert DTensor.from_local(row).tolist() == [1.0, 2.0]


def test_shape_and_stride(mesh: DeviceMesh, view: Any, uneven: Any) -> None:
    shards = [Shard(0), Replicate()]
    whole = DTensor.from_local(view, mesh, shards, shape=(8, 4), stride=(4, 1))
    assert torch.equal(whole.cpu(), VALUE)
    seven = DTensor.from_local(view, mesh, shards, shape=(7, 4), stride=(4, 1))
    assert torch.equal(seven.cpu(), VALUE[:7])
    rows = [Replicate(), Shard(0)]
    assert torch.equal(DTensor.from_local(uneven * 2, mesh, rows).cpu(), TEN * 2)
    again = DTensor.from_local(uneven, mesh, rows, shape=(10, 3), stride=(3, 1))
    assert torch.equal(again.cpu(), TEN)


DTYPES = (torch.float32, torch.bfloat16, torch.int8, torch.int64, torch.bool)


@pytest.mark.parametrize("dtype", DTYPES)
def test_run_check_takes_the_first(mesh: DeviceMesh, dtype: torch.dtype) -> None:
    parts = [torch.tensor([i, 1 - i, 0]).to(dtype) for i in range(8)]
    view = LocalView.from_shards(parts, mesh)
    taken = DTensor.from_local(view, mesh, run_check=True)
    assert taken.dtype == dtype
    assert torch.equal(taken.cpu(), parts[0])
    along = DTensor.from_local(view, mesh, [Shard(0), Replicate()], run_check=True)
    assert torch.equal(along.cpu(), torch.cat([parts[0], parts[4]]))


def test_run_check_takes_the_first_alone(mesh: DeviceMesh) -> None:
    odd = torch.tensor([1e-30, float("nan"), float("-inf"), 0.1])
    view = LocalView.from_shards([odd, *[torch.full((4,), float("nan"))] * 7], mesh)
    taken = DTensor.from_local(view, mesh, run_check=True).cpu()
    assert torch.equal(taken.view(torch.int32), odd.view(torch.int32))


# ---------------------------------------------------------------------- uneven


def real_rows(value: torch.Tensor) -> list[torch.Tensor]:
    return [*value.split(3)] * 2


UNEVEN_RIGHT: dict[str, Callable[[Any], Any]] = {
    "pointwise": lambda v: (v.exp() / 2 + 1).tanh(),
    "two views": lambda v: v * v.relu(),
    "a row added": lambda v: v + torch.arange(3.0),
    "where": lambda v: torch.where(v > 0, v, -1.0),
    "masked_fill in place": lambda v: v.clone().masked_fill_(v > 0, 7.0),
    "cast": lambda v: v.double(),
    "sum": lambda v: v.sum(),
    "sum of the uneven dim": lambda v: v.sum(0),
    "sum of another dim": lambda v: v.sum(1),
    "sum that keeps dims": lambda v: v.sum(-1, keepdim=True),
    "sum of quotients by zero": lambda v: (1 / (v - v + (v * 0 + 1))).sum(0),
    "transposed": lambda v: v.t() * 2,
    "permuted": lambda v: v.unsqueeze(0).permute(2, 0, 1),
    "squeezed": lambda v: v.unsqueeze(1).squeeze(1),
    "expanded": lambda v: v.unsqueeze(0).expand(2, -1, -1),
    "reshaped beside": lambda v: v[:, None, :].reshape(v.shape[0], 3, 1),
    "a column": lambda v: v[:, 1],
    "columns": lambda v: v[:, 1:],
    "ones_like": lambda v: torch.ones_like(v),
    "in place": lambda v: v.clone().mul_(2).add_(1),
    "out=": lambda v: torch.add(v, 1, out=torch.empty_like(v)),
}


@pytest.mark.parametrize("name", UNEVEN_RIGHT)
def test_uneven_is_right(uneven: Any, name: str) -> None:
    function = UNEVEN_RIGHT[name]
    expected = [function(rows) for rows in real_rows(TEN)]
    shards = function(uneven).addressable_shards()
    for shard, value in zip(shards, expected, strict=True):
        torch.testing.assert_close(shard.data, value)


def test_uneven_reads_and_shapes(uneven: Any, single: Any) -> None:
    sizes = [tuple(s.data.shape) for s in uneven.addressable_shards()]
    assert sizes == [(3, 3), (3, 3), (3, 3), (1, 3)] * 2
    assert [s.index[0] for s in uneven.addressable_shards()][3] == slice(0, 1)
    assert uneven.tolist() == TEN[:3].tolist()
    fresh = uneven.new_zeros(2, 3)
    assert [tuple(s.data.shape) for s in fresh.addressable_shards()] == [(2, 3)] * 8
    for at, shape in ((0, (1, 1, 3)), (1, (1, 1, 3)), (2, (1, 3, 1))):
        shards = single.unsqueeze(at).addressable_shards()
        empty = TEN[3:3].unsqueeze(at).shape
        assert [tuple(s.data.shape) for s in shards] == [shape, shape, shape, tuple(empty)] * 2


def test_random_values_on_uneven_views(uneven: Any) -> None:
    kept: Any = F.dropout(uneven.exp(), 0.5)
    for shard, rows in zip(kept.addressable_shards(), real_rows(TEN.exp()), strict=True):
        assert torch.all((shard.data == 0) | torch.isclose(shard.data, 2 * rows))


UNEVEN_REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "mean": (lambda v: v.mean(), "aten.mean.default was called on an uneven local view"),
    "max": (lambda v: v.max(), "aten.max.default"),
    "amax of another dim": (lambda v: v.amax(1), "aten.amax.default"),
    "matmul": (lambda v: v @ torch.ones(3, 2), "aten."),
    "softmax": (lambda v: v.softmax(0), "aten._softmax.default"),
    "cat": (lambda v: torch.cat([v, v]), "aten.cat.default"),
    "flip": (lambda v: v.flip(0), "aten.flip.default"),
    "cumsum": (lambda v: v.cumsum(0), "aten.cumsum.default"),
    "sort": (lambda v: v.sort(0), "aten.sort"),
    "flatten": (lambda v: v.flatten(), "aten."),
    "a row": (lambda v: v[0], "aten.select.int"),
    "rows": (lambda v: v[1:], "aten.slice.Tensor"),
    "t_": (lambda v: v.clone().t_(), "aten.t_.default"),
    "an even tensor": (
        lambda v: v + torch.ones(3, 3),
        r"aten.add.Tensor, with an even tensor of shape=\(3, 3\), was called",
    ),
    "uneven in another way": (
        lambda v: v + v.t(),
        "aten.add.Tensor, with an even tensor of shape",
    ),
    "psum": (lambda v: psum(v, "tp"), "The collective all_reduce was called on an uneven"),
    "all_gather": (lambda v: all_gather(v, "tp"), "The collective all_gather was called on"),
}


@pytest.mark.parametrize("name", UNEVEN_REFUSED)
def test_uneven_refused(uneven: Any, name: str, count_sentences: Any) -> None:
    function, text = UNEVEN_REFUSED[name]
    with pytest.raises(LocalViewError, match=text) as raised:
        function(uneven)
    assert r"sizes by dim are {0: '3 to 1'}" in str(raised.value) or "other way" in name
    assert count_sentences(str(raised.value)) == 3


SINGLE_REFUSED: dict[str, Callable[[Any], Any]] = {
    "expanded": lambda v: v.expand(5, 3),
    "squeezed": lambda v: v.squeeze(0),
    "squeezed all": lambda v: v.squeeze(),
    "viewed": lambda v: v.view(1, 1, 3),
}


@pytest.mark.parametrize("name", SINGLE_REFUSED)
def test_one_row_or_none(single: Any, name: str) -> None:
    """A dim of one row here has none elsewhere, where PyTorch refuses these as well."""
    with pytest.raises(LocalViewError, match=r"sizes by dim are \{0: '1 to 0'\}"):
        SINGLE_REFUSED[name](single)


# ---------------------------------------------------------------------- refused

MESSAGES: dict[str, tuple[Callable[[Any, Any], Any], type[Exception], str]] = {
    "a boolean mask": (lambda v, m: v[v > 3], UnsupportedOpError, "depends on (the )?values"),
    "a DTensor": (
        lambda v, m: v + distribute_tensor(VALUE, m, [Shard(0), Replicate()]),
        LocalViewError,
        r"aten.add.Tensor was called on a local view of local shape=\(4, 4\) and a DTensor of "
        r"shape=\(8, 4\). One has a device's shape, the other not. Call to_local\(\) on the other "
        "one, or DTensor.from_local on the view.",
    ),
    "a DTensor first": (
        lambda v, m: distribute_tensor(VALUE, m, [Shard(0), Replicate()]) * v,
        LocalViewError,
        "One has a device's shape, the other not",
    ),
    "another mesh": (
        lambda v, m: v + distribute_tensor(FIRST, m["tp"], [Replicate()]).to_local(),
        LocalViewError,
        "A device's part of one is no part of the other",
    ),
    "pickled": (
        lambda v, m: pickle.dumps(v),
        LocalViewError,
        "was to be pickled. It is what each device has",
    ),
    "a number chosen inside PyTorch": (
        lambda v, m: F.one_hot(v[:, 0].long()),
        LocalViewError,
        "asked for inside of PyTorch, to choose a shape, a number or a branch for all devices",
    ),
    "an index that differs": (
        lambda v, m: torch.arange(4.0)[axis_index(v, "tp")],
        LocalViewError,
        "asked for inside of PyTorch",
    ),
    "a slice that differs": (
        lambda v, m: v[: axis_index(v, "tp")],
        LocalViewError,
        "asked for inside of PyTorch",
    ),
    "a fill value that differs": (
        lambda v, m: torch.full((2,), v[0, 0]),
        LocalViewError,
        "asked for inside of PyTorch",
    ),
    "written to a host tensor": (
        lambda v, m: torch.ones(4, 4).add_(v),
        LocalViewError,
        r"aten.add_.Tensor was called to write to a plain tensor of shape=\(4, 4\), with a local "
        r"view of local shape=\(4, 4\) among its arguments. Each device has values of its own, "
        r"and a plain tensor has one for all. Make the destination with view.new_zeros\(shape\) "
        r"or torch.zeros_like\(view\).",
    ),
    "written to an item": (
        lambda v, m: torch.ones(4, 4).__setitem__(0, v[0]),
        LocalViewError,
        r"aten.copy_.default was called to write to a plain tensor of shape=\(4,\)",
    ),
    "written to a parameter": (
        lambda v, m: torch.nn.Linear(4, 4).weight.data.copy_(v),
        LocalViewError,
        "a plain tensor has one for all",
    ),
    "written to what is in the graph": (
        lambda v, m: (torch.ones(4, 4, requires_grad=True) * 2).add_(v),
        LocalViewError,
        "a plain tensor has one for all",
    ),
    "written to a plain device tensor": (
        lambda v, m: distribute_tensor(FIRST, m).full_tensor().copy_(v),
        LocalViewError,
        "a plain tensor has one for all",
    ),
    "out= a plain tensor": (
        lambda v, m: torch.add(v, 1, out=torch.empty(4, 4)),
        LocalViewError,
        "a plain tensor has one for all",
    ),
    "shape alone": (
        lambda v, m: DTensor.from_local(v, m, [Shard(0), Replicate()], shape=(8, 4)),
        DistributeError,
        r"from_local was called with shape=\(8, 4\) and stride=None. One without the other does "
        "not describe the global tensor. Pass both, or none.",
    ),
    "stride alone": (
        lambda v, m: DTensor.from_local(v, m, [Shard(0), Replicate()], stride=(4, 1)),
        DistributeError,
        r"shape=None and stride=\(4, 1\)",
    ),
    "a shape that does not fit": (
        lambda v, m: DTensor.from_local(v, m, [Shard(0), Replicate()], shape=(9, 4), stride=(4, 1)),
        LocalViewError,
        r"The first device's part of that is \(5, 4\)",
    ),
    "replicated though it differs": (
        lambda v, m: DTensor.from_local(v, m),
        LocalViewError,
        r"whose values may differ along \['dp'\]. Replicate says that they are equal there.",
    ),
    "a mesh over other axes": (
        lambda v, m: DTensor.from_local(v, m["tp"], [Shard(0)]).cpu(),
        LocalViewError,
        r"of which each device of \('dp',\) has a value of its own",
    ),
    "a plain tensor for several devices": (
        lambda v, m: DTensor.from_local(FIRST, m, [Shard(0), Replicate()]),
        DistributeError,
        r"from_local was called with a plain tensor of shape=\(4, 4\) and S\(0\) for axis 'dp'",
    ),
    "a plain tensor as a part": (
        lambda v, m: DTensor.from_local(FIRST, m, [Replicate(), Partial()]),
        DistributeError,
        "one tensor for all of them would be repeated",
    ),
    "no tensor": (
        lambda v, m: DTensor.from_local([1.0], m),  # pyright: ignore
        ArgumentTypeError,
        "from_local was called with an object of type=list",
    ),
    "a DTensor for from_local": (
        lambda v, m: DTensor.from_local(distribute_tensor(VALUE, m), m),
        ArgumentTypeError,
        "That is not one device's tensor",
    ),
    "too few shards": (
        lambda v, m: LocalView.from_shards([torch.ones(2)] * 3, m),
        DistributeError,
        r"from_shards was called with 3 tensors on the mesh \(dp=2, tp=4\). Each of its 8 devices",
    ),
    "shards of several shapes": (
        lambda v, m: LocalView.from_shards([torch.ones(i + 1) for i in range(8)], m),
        DistributeError,
        r"for device 1 the tensor is \(\(2,\), torch.float32\)",
    ),
    "shards of several dtypes": (
        lambda v, m: LocalView.from_shards([torch.ones(1), *[torch.ones(1).int()] * 7], m),
        DistributeError,
        r"for device 1 the tensor is \(\(1,\), torch.int32\)",
    ),
    "a device without a shard": (
        lambda v, m: LocalView.from_shards({0: torch.ones(2)}, m),
        DistributeError,
        "for device 1 the tensor is None",
    ),
    "no shards": (
        lambda v, m: LocalView.from_shards({}, m),
        ArgumentTypeError,
        "from_shards was called with None for the first device",
    ),
    "shards that are numbers": (
        lambda v, m: LocalView.from_shards([1.0] * 8, m),
        ArgumentTypeError,
        "from_shards was called with 1.0 for the first device. A shard is a host tensor.",
    ),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_refused(view: Any, mesh: DeviceMesh, count_sentences: Any, name: str) -> None:
    call, error, text = MESSAGES[name]
    with pytest.raises(error, match=text) as raised:
        call(view, mesh)
    assert count_sentences(str(raised.value)) >= 3
    assert torch.equal(view.cpu(), FIRST)


def test_what_does_not_differ_may_choose(mesh: DeviceMesh, runtime: Runtime) -> None:
    same = distribute_tensor(torch.tensor([0, 2]), mesh).to_local()
    assert F.one_hot(same).tolist() == [[1, 0, 0], [0, 0, 1]]
    assert torch.arange(4)[same[1]].item() == 2
