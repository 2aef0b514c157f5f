"""torch.distributed.checkpoint with its default planners and no process group, on DTensors."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import xla_dtensor as xd
from xla_dtensor.dtensor.mesh import as_device_mesh
from xla_dtensor.errors import DistributeError
from xla_dtensor.runtimes import Runtime

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
    pytest.mark.usefixtures("mesh"),
]
R, S = Replicate(), Shard
STRIDED = [_StridedShard(0, split_factor=4), S(0)]
PERMUTED = [0, 4, 1, 5, 2, 6, 3, 7]


def mesh_of(*shape: int) -> xd.DeviceMesh:
    return xd.init_device_mesh("xla", shape)


def permuted_mesh() -> xd.DeviceMesh:
    return as_device_mesh(xd.Mesh(PERMUTED, (2, 4)))


def put(value: torch.Tensor, mesh: xd.DeviceMesh, placements: Any) -> Any:
    return xd.distribute_tensor(value, mesh, list(placements))


def empty_of(value: torch.Tensor, mesh: xd.DeviceMesh, placements: Any) -> Any:
    return put(torch.zeros_like(value), mesh, placements)


def check_loaded(tensor: Any, value: torch.Tensor, before: xd.OpSharding) -> None:
    assert type(tensor) is xd.DTensor
    assert tensor.dtype == value.dtype
    assert torch.equal(tensor.cpu(), value)
    assert tensor.xla_sharding() == before
    assert all(torch.equal(s.data, value[s.index]) for s in tensor.addressable_shards())


TARGETS: list[tuple[Callable[[], xd.DeviceMesh], list[Any]]] = [
    (lambda: mesh_of(2, 4), [S(0), S(1)]),
    (lambda: mesh_of(8), [S(1)]),
    (lambda: mesh_of(4, 2), [S(1), S(0)]),
    (lambda: mesh_of(4, 2), [R, S(0)]),
    (lambda: mesh_of(2, 2, 2), [S(0), R, S(1)]),
    (lambda: mesh_of(2, 2, 2), [S(0), S(0), S(0)]),
    (lambda: mesh_of(2, 4), STRIDED),
    (lambda: mesh_of(2, 4), [R, R]),
    (permuted_mesh, [S(1), S(0)]),
]
SOURCES: list[tuple[list[Any], int]] = [
    ([S(0), S(1)], 8),
    ([R, S(0)], 4),
    ([S(1), R], 2),
    ([S(0), S(0)], 8),
    (STRIDED, 8),
    ([R, R], 1),
]


@pytest.mark.parametrize(("source", "num_items"), SOURCES, ids=str)
def test_saved_on_one_mesh_and_loaded_on_others(
    source: Any, num_items: int, tmp_path: Path, mesh: xd.DeviceMesh
) -> None:
    values = {"even": torch.randn(16, 8), "uneven": torch.randn(9, 7)}
    save({k: put(v, mesh, source) for k, v in values.items()}, checkpoint_id=tmp_path)
    state = {
        f"{k}{i}": empty_of(v, make(), target)
        for i, (make, target) in enumerate(TARGETS)
        for k, v in values.items()
    }
    lies = {name: tensor.xla_sharding() for name, tensor in state.items()}
    for i in range(len(TARGETS)):
        load({k: state[f"{k}{i}"] for k in values}, checkpoint_id=tmp_path)
    for name, tensor in state.items():
        check_loaded(tensor, values[name.rstrip("0123456789")], lies[name])


@pytest.mark.parametrize(("source", "num_items"), SOURCES, ids=str)
@pytest.mark.parametrize("threads", [1, 3])
def test_one_item_per_distinct_shard_on_disk(
    source: Any, num_items: int, threads: int, tmp_path: Path, mesh: xd.DeviceMesh
) -> None:
    x, y = torch.randn(64, 32), torch.randn(64, 32)
    writer = FileSystemWriter(tmp_path, thread_count=threads)
    written = save({"x": put(x, mesh, source), "y": put(y, mesh, source)}, storage_writer=writer)
    metadata = cast("Any", written)
    for name in ("x", "y"):
        stored = metadata.state_dict_metadata[name]
        assert isinstance(stored, TensorStorageMetadata)
        offsets = {tuple(chunk.offsets) for chunk in stored.chunks}
        assert len(stored.chunks) == len(offsets) == num_items
        assert sum(math.prod(chunk.sizes) for chunk in stored.chunks) == x.numel()
    num_bytes = sum(file.stat().st_size for file in tmp_path.glob("*.distcp"))
    assert 2 * x.nbytes < num_bytes < 2 * x.nbytes + 2 * num_items * 2048
    plain = {"x": torch.zeros_like(x), "y": torch.zeros_like(y)}
    load(plain, checkpoint_id=tmp_path)
    assert torch.equal(plain["x"], x)
    assert torch.equal(plain["y"], y)


def test_empty_shards_are_no_items(mesh: xd.DeviceMesh) -> None:
    x = put(torch.ones(9, 7), mesh, [S(0), S(0)])  # tiles of 2 rows: five devices hold some
    items = x.__create_write_items__("x", x)
    assert [tuple(i.index.offset) for i in items] == [(0, 0), (2, 0), (4, 0), (6, 0), (8, 0)]
    assert [tuple(i.tensor_data.chunk.sizes) for i in items] == [(2, 7)] * 4 + [(1, 7)]
    assert [tuple(c.offsets) for c in x.__create_chunk_list__()] == [
        (0, 0), (2, 0), (4, 0), (6, 0), (8, 0),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("placements", "offered"),
    [([S(0), S(1)], [4, 4]), ([R, S(0)], [4, 4]), ([S(0), R], [1, 1]), ([R, R], [1, 1])],
    ids=str,
)
def test_two_processes_offer_what_they_reach_and_each_shard_is_kept_once(
    placements: Any, offered: list[int], mesh: xd.DeviceMesh, runtime: Runtime
) -> None:
    x = put(torch.ones(8, 4), mesh, placements)
    distinct = len(x.__create_write_items__("x", x))
    planner = DefaultSavePlanner()
    plans = []
    for devices in ((0, 1, 2, 3), (4, 5, 6, 7)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(runtime, "addressable_device_ids", lambda own=devices: own)
            planner.set_up_planner({"x": x}, is_coordinator=True)
            plans.append(planner.create_local_plan())
            assert len(x.__create_chunk_list__()) == len(plans[-1].items)
    assert [len(plan.items) for plan in plans] == offered
    kept, metadata = planner.create_global_plan(plans)
    assert sum(len(plan.items) for plan in kept) == distinct
    assert len(cast("Any", metadata.state_dict_metadata["x"]).chunks) == distinct


def test_a_label_without_xla_sharding(mesh: xd.DeviceMesh) -> None:
    # Every second block of two rows: PyTorch can say it, XLA has no such tiles.
    payload = put(torch.arange(8.0), mesh, [R, S(0)])._local_tensor
    x = xd.DTensor._wrapping(payload, mesh, (_StridedShard(0, split_factor=2), R))
    before = x.xla_sharding()
    assert [tuple(chunk.sizes) for chunk in cast("Any", x).__create_chunk_list__()] == [(8,)]
    buffer_of(x, 0)[3] = 30
    assert x.sum().item() == 55
    check_loaded(x, torch.tensor([0.0, 1, 2, 30, 4, 5, 6, 7]), before)


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor(2.5),
        torch.tensor(-3),
        torch.randn(9, 7).bfloat16(),
        torch.randint(-(2**62), 2**62, (9, 7)),
        torch.rand(9, 7) > 0.5,
        torch.randn(9, 7, dtype=torch.complex64),
        torch.randn(9, 7, dtype=torch.float64),
        torch.empty(0, 5),
        torch.randn(1, 3),
    ],
    ids=lambda v: f"{v.dtype}{list(v.shape)}",
)
def test_dtypes_and_shapes(value: torch.Tensor, tmp_path: Path, mesh: xd.DeviceMesh) -> None:
    source, target = ([S(0), S(1)], [S(1), R]) if value.ndim else ([R, R], [R, R])
    save({"x": put(value, mesh, source)}, checkpoint_id=tmp_path)
    loaded = empty_of(value, mesh_of(4, 2), target)
    before = loaded.xla_sharding()
    load({"x": loaded}, checkpoint_id=tmp_path)
    check_loaded(loaded, value, before)
    plain = torch.zeros_like(value)
    load({"x": plain}, checkpoint_id=tmp_path)
    assert torch.equal(plain, value)


def test_between_plain_tensors_and_dtensors(tmp_path: Path, mesh: xd.DeviceMesh) -> None:
    x, y = torch.randn(9, 7), torch.randn(8)
    save({"a": {"x": put(x, mesh, [R, S(1)])}, "y": y, "n": 3}, checkpoint_id=tmp_path / "d")
    dcp_to_torch_save(tmp_path / "d", tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt")
    assert torch.equal(whole["a"]["x"], x)
    assert torch.equal(whole["y"], y)
    assert whole["n"] == 3
    save({"x": x}, checkpoint_id=tmp_path / "plain")
    loaded = empty_of(x, mesh, [S(1), S(0)])
    load({"x": loaded}, checkpoint_id=tmp_path / "plain")
    assert torch.equal(loaded.cpu(), x)


def test_a_submesh_and_a_tensor_that_lies_otherwise_than_labelled(
    tmp_path: Path, mesh: xd.DeviceMesh
) -> None:
    x = torch.randn(8, 4)
    on_tp = put(x, mesh["tp"], [S(0)])
    pending = put(torch.ones(8, 4), mesh, [S(0), R]).sum(0)  # labelled Partial
    save({"x": on_tp, "s": pending}, checkpoint_id=tmp_path)
    loaded = put(x * 0, mesh["dp"], [S(1)])
    sums = put(torch.ones(16, 4), mesh, [S(0), R]).sum(0)
    before = loaded.xla_sharding(), sums.xla_sharding()
    load({"x": loaded, "s": sums}, checkpoint_id=tmp_path)
    check_loaded(loaded, x, before[0])
    check_loaded(sums, torch.full((4,), 8.0), before[1])


# ---------------------------------------------------------------------- buffers


def buffer_of(tensor: Any, *offset: int) -> torch.Tensor:
    return tensor.__get_tensor_shard__(MetadataIndex("x", offset))


@pytest.mark.parametrize(
    "read",
    [
        lambda t: t.cpu(),
        lambda t: (t + 0).cpu(),
        lambda t: t.detach().cpu(),
    ],
    ids=["cpu", "op", "detach"],
)
def test_what_is_not_written_stays(read: Any, mesh: xd.DeviceMesh) -> None:
    x = torch.arange(9.0 * 4).view(9, 4)
    tensor = put(x, mesh, [S(1), S(0)])
    before = tensor.xla_sharding()
    tensor.__create_chunk_list__()
    buffer = buffer_of(tensor, 3, 2)
    assert torch.equal(torch.stack([*buffer.unbind(0)]) + 0, x[3:6, 2:])
    buffer.narrow(0, 1, 1).detach().copy_(torch.full((1, 2), -1.0))
    expected = x.clone()
    expected[4, 2:] = -1
    assert torch.equal(read(tensor), expected)
    check_loaded(tensor, expected, before)
    buffer_of(tensor, 0, 0)[0] = 50  # goes on after the value was read
    expected[0, :2] = 50
    assert isinstance(tensor, xd.DTensor)
    assert torch.equal(read(tensor), expected)
    check_loaded(tensor, expected, before)


@pytest.mark.parametrize(
    "write",
    [
        lambda b: b.fill_(7),
        lambda b: b.view(-1)[:].copy_(torch.full((1,), 7.0)),
        lambda b: torch.full((1,), 7.0, out=b),
        lambda b: b.split(1)[0].mul_(0).add_(7),
    ],
    ids=["fill", "view", "out", "split"],
)
def test_every_way_of_writing_is_noticed(write: Any, mesh: xd.DeviceMesh) -> None:
    tensor = put(torch.arange(8.0), mesh, [S(0), S(0)])
    tensor.__create_chunk_list__()
    write(buffer_of(tensor, 3))
    assert tensor.tolist() == [0, 1, 2, 7, 4, 5, 6, 7]


def test_aliases_see_the_load_and_a_dropped_one_loses_nothing(mesh: xd.DeviceMesh) -> None:
    tensor = put(torch.zeros(8), mesh, [R, S(0)])
    alias = tensor.detach()
    alias.__create_chunk_list__()
    for start in (0, 2, 4, 6):
        buffer_of(alias, start).fill_(1)
    assert tensor.tolist() == [1.0] * 8  # all is written: no read of the alias was needed
    alias.__create_chunk_list__()
    buffer_of(alias, 2).fill_(2)
    del alias
    assert tensor.tolist() == [1, 1, 2, 2, 1, 1, 1, 1]


def test_a_tensor_with_two_names(tmp_path: Path, mesh: xd.DeviceMesh) -> None:
    x = torch.randn(9, 7)
    source, target = put(x, mesh, [R, S(0)]), empty_of(x, mesh, [S(1), S(0)])
    save({"a": source, "b": source}, checkpoint_id=tmp_path)
    alias = target.detach()
    load({"a": alias, "b": alias}, checkpoint_id=tmp_path)
    assert torch.equal(target.cpu(), x)


def test_a_load_broken_off_leaves_no_trace_in_the_next(mesh: xd.DeviceMesh) -> None:
    tensor = put(torch.zeros(8), mesh, [R, S(0)])
    tensor.__create_chunk_list__()
    buffer_of(tensor, 2).fill_(2)
    items = tensor.__create_write_items__("x", tensor)  # a save instead: it sees what was loaded
    shards = [tensor.__get_tensor_shard__(item.index).tolist() for item in items]
    assert shards == [[0, 0], [2, 2], [0, 0], [0, 0]]
    tensor.add_(1)
    assert tensor.__get_tensor_shard__(items[1].index).tolist() == [3, 3]
    tensor.__create_chunk_list__()
    buffer_of(tensor, 0).fill_(5)
    tensor.data = put(torch.arange(8.0), mesh, [R, S(0)])  # another value: the load is void
    assert tensor.tolist() == [*range(8)]


def test_a_checkpoint_does_not_follow_later_writes(mesh: xd.DeviceMesh) -> None:
    tensor = put(torch.zeros(8), mesh, [R, S(0)])
    items = tensor.__create_write_items__("x", tensor)
    assert tensor.__get_tensor_shard__(items[0].index).tolist() == [0, 0]
    tensor.fill_(4)
    assert tensor.__get_tensor_shard__(items[1].index).tolist() == [4, 4]


# ---------------------------------------------------------------------- models


def model(mesh: xd.DeviceMesh, placements: Any, seed: int) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 5))

    def place(_: str, part: nn.Module, on: xd.DeviceMesh) -> None:
        for name, p in list(part.named_parameters(recurse=False)):
            setattr(part, name, nn.Parameter(xd.distribute_tensor(p, on, placements)))

    xd.distribute_module(module, mesh, place)
    return module, torch.optim.AdamW(module.parameters(), lr=0.01)


def train(module: nn.Module, optimizer: Any, mesh: xd.DeviceMesh, batches: Any) -> list[float]:
    losses: list[float] = []
    for batch in batches:
        optimizer.zero_grad()
        loss = module(xd.distribute_tensor(batch, mesh)).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def resumed(
    folder: Path, mesh: xd.DeviceMesh, placements: list[Any], batches: torch.Tensor
) -> tuple[nn.Module, list[float]]:
    """Train on from a checkpoint, on any mesh."""
    module, optimizer = model(mesh, placements, seed=1)
    weights, moments = get_state_dict(module, optimizer)
    state: Any = {"model": weights, "optim": moments}
    load(state, checkpoint_id=folder)
    set_state_dict(
        module, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
    )
    losses = train(module, optimizer, mesh, batches)
    for parameter in cast("Any", module).parameters():
        assert parameter.placements == tuple(placements)
        average = optimizer.state[parameter]["exp_avg"]
        assert average.xla_sharding() == parameter.xla_sharding()
    return module, losses


@pytest.mark.thorough
def test_training_resumes_where_it_was(tmp_path: Path, mesh: xd.DeviceMesh) -> None:
    batches = torch.randn(4, 8, 6)
    module, optimizer = model(mesh, [R, S(0)], seed=0)
    train(module, optimizer, mesh, batches[:2])
    weights, moments = get_state_dict(module, optimizer)
    save({"model": weights, "optim": moments}, checkpoint_id=tmp_path)
    expected = train(module, optimizer, mesh, batches[2:])
    again, losses = resumed(tmp_path, mesh, [R, S(0)], batches[2:])
    assert losses == expected
    for p, q in zip(again.parameters(), module.parameters(), strict=True):
        assert torch.equal(p.cpu(), q.cpu())
    _, losses = resumed(tmp_path, mesh_of(8), [S(0)], batches[2:])
    assert losses == pytest.approx(expected, rel=1e-5)  # sums in another order


def test_the_state_of_adamw_is_loaded_as_its_parameters_lie(
    tmp_path: Path, mesh: xd.DeviceMesh
) -> None:
    def state_on(on: xd.DeviceMesh, placements: Any, seed: int) -> tuple[Any, Any]:
        torch.manual_seed(seed)
        linear = nn.Linear(6, 5, bias=False)
        linear.weight = nn.Parameter(put(torch.randn(5, 6), on, placements))
        optimizer = torch.optim.AdamW(linear.parameters())
        linear.weight.grad = put(torch.randn(5, 6), on, placements)
        optimizer.step()
        return get_state_dict(linear, optimizer)[1], optimizer.state[linear.weight]

    saved, moments = state_on(mesh, [R, S(0)], 0)
    loaded, others = state_on(mesh_of(4, 2), [S(1), S(0)], 1)
    before = others["exp_avg"].xla_sharding()
    save({"optim": saved}, checkpoint_id=tmp_path)
    load({"optim": loaded}, checkpoint_id=tmp_path)
    for name in ("exp_avg", "exp_avg_sq"):
        check_loaded(others[name], moments[name].cpu(), before)


def test_a_modules_own_state_dict_is_loaded_in_place(tmp_path: Path, mesh: xd.DeviceMesh) -> None:
    source, target = model(mesh, [R, S(0)], 0)[0], model(mesh_of(4, 2), [S(0), R], 1)[0]
    save(source.state_dict(), checkpoint_id=tmp_path)
    load(target.state_dict(), checkpoint_id=tmp_path)  # its tensors share the parameters'
    for p, q in zip(source.parameters(), target.parameters(), strict=True):
        assert torch.equal(p.cpu(), q.cpu())


# ---------------------------------------------------------------------- any layout


MESH_SHAPES = [(8,), (2, 4), (4, 2), (2, 2, 2)]


@st.composite
def layouts(draw: st.DrawFn, ndim: int) -> tuple[tuple[int, ...], list[Any]]:
    shape = draw(st.sampled_from(MESH_SHAPES))
    placement = st.sampled_from([R, *(S(dim) for dim in range(ndim))])
    return shape, draw(st.lists(placement, min_size=len(shape), max_size=len(shape)))


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[int], Any, Any]:
    shape = draw(st.lists(st.sampled_from([0, 1, 3, 5, 8, 9]), max_size=3))
    return shape, draw(layouts(len(shape))), draw(layouts(len(shape)))


@given(cases())
def test_round_trips(case: tuple[list[int], Any, Any]) -> None:
    shape, source, target = case
    value = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape) + 1
    with tempfile.TemporaryDirectory() as folder:
        save({"x": put(value, mesh_of(*source[0]), source[1])}, checkpoint_id=folder)
        loaded = empty_of(value, mesh_of(*target[0]), target[1])
        before = loaded.xla_sharding()
        load({"x": loaded}, checkpoint_id=folder)
    check_loaded(loaded, value, before)


# ---------------------------------------------------------------------- errors


def test_refusals(mesh: xd.DeviceMesh) -> None:
    x = put(torch.zeros(8), mesh, [R, S(0)])
    with pytest.raises(DistributeError, match=r"offset=\(1,\) of 'w' was asked for. No shard of"):
        x.__get_tensor_shard__(MetadataIndex("w", [1]))
    with pytest.raises(DistributeError, match="offset=None"):
        x.__get_tensor_shard__(MetadataIndex("w"))
    meta = put(torch.zeros(8, device="meta"), mesh, [R, S(0)])
    with pytest.raises(DistributeError, match=r"was to be saved. It has no value and no shards"):
        meta.__create_write_items__("w", meta)
    with pytest.raises(DistributeError, match=r"was to be loaded.*Materialise it first"):
        meta.__create_chunk_list__()
