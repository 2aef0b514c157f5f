"""G. torch.distributed.checkpoint: what is saved is all of it, and loads under another sharding."""

# torch does not list these names in __all__.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import Replicate, Shard

import xla_dtensor as xd
import xla_dtensor.spmd as xs
from xla_dtensor.runtimes import Runtime, get_runtime

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]

R = Replicate()
Whole = Callable[[Any], torch.Tensor]
X = torch.arange(70.0).reshape(10, 7)


def load_into(path: Path, target: Any) -> Any:
    dcp.load({"w": target}, checkpoint_id=path, no_dist=True)
    return target


def bytes_in(path: Path) -> int:
    return sum(file.stat().st_size for file in path.glob("*.distcp"))


def test_default_writer(mesh: xd.DeviceMesh, tmp_path: Path, whole_of: Whole) -> None:
    saved = xd.distribute_tensor(X, mesh, [Shard(0), Shard(1)])
    dcp.save({"w": saved}, storage_writer=dcp.FileSystemWriter(tmp_path), no_dist=True)
    assert bytes_in(tmp_path) >= X.numel() * 4
    target = xd.distribute_tensor(torch.zeros(10, 7), mesh, [Shard(0), Shard(1)])
    assert torch.equal(whole_of(load_into(tmp_path, target)), X)


@pytest.mark.parametrize("placements", [[R, Shard(1)], [Shard(0), Shard(0)], [R, R]], ids=str)
def test_default_planner_and_another_sharding(
    mesh: xd.DeviceMesh, tmp_path: Path, whole_of: Whole, placements: list[Any]
) -> None:
    saved = xd.distribute_tensor(X, mesh, [Shard(1), Shard(0)])
    dcp.save({"w": saved}, checkpoint_id=tmp_path, no_dist=True)
    target = load_into(tmp_path, xd.distribute_tensor(torch.zeros(10, 7), mesh, placements))
    assert torch.equal(whole_of(target), X)
    assert target.xla_sharding() == xd.distribute_tensor(X, mesh, placements).xla_sharding()


def test_marked_tensor_is_saved_in_shards(dp_tp: xs.Mesh, tmp_path: Path) -> None:
    saved = xs.mark_sharding(X.clone(), dp_tp, ("dp", "tp"))
    dcp.save({"w": saved}, checkpoint_id=tmp_path, no_dist=True)
    stored: Any = dcp.FileSystemReader(tmp_path).read_metadata().state_dict_metadata["w"]
    assert [tuple(chunk.sizes) for chunk in stored.chunks].count((5, 2)) == 6
    assert len(stored.chunks) == 8
    target = xs.mark_sharding(torch.zeros(10, 7), dp_tp, (None, None))
    assert torch.equal(load_into(tmp_path, target).cpu(), X)


def test_silent_uneven_target_left_replicated_by_a_load(
    mesh: xd.DeviceMesh, tmp_path: Path, whole_of: Whole
) -> None:
    saved = xd.distribute_tensor(X, mesh, [Shard(0), R])
    dcp.save({"w": saved}, checkpoint_id=tmp_path, no_dist=True)
    target = load_into(tmp_path, xd.distribute_tensor(torch.zeros(10, 7), mesh, [R, Shard(1)]))
    assert str(target.xla_sharding()) == "{devices=[1,4,2]<=[2,4]T(1,0) last_tile_dim_replicate}"
    assert {shard.data.shape[1] for shard in target.addressable_shards()} == {2, 1}
    assert torch.equal(whole_of(target), X)


@pytest.mark.parametrize("placements", [[Shard(0), R], [R, Shard(1)]], ids=str)
def test_silent_partly_replicated_tensor_saved_as_nothing(
    mesh: xd.DeviceMesh, tmp_path: Path, whole_of: Whole, placements: list[Any]
) -> None:
    x = torch.arange(32.0).reshape(8, 4)
    saved = xd.distribute_tensor(x, mesh, placements)
    dcp.save({"w": saved}, checkpoint_id=tmp_path, no_dist=True)
    stored: Any = dcp.FileSystemReader(tmp_path).read_metadata().state_dict_metadata["w"]
    parts = 2 if placements[1] == R else 4
    assert len(stored.chunks) == parts  # one per distinct shard, none for its replicas
    assert sum(chunk.sizes.numel() for chunk in stored.chunks) == 32
    assert bytes_in(tmp_path) >= 32 * 4
    target = xd.distribute_tensor(torch.zeros(8, 4), mesh, [Shard(1), Shard(0)])
    assert torch.equal(whole_of(load_into(tmp_path, target)), x)


@pytest.mark.skipif(importlib.util.find_spec("torch_xla") is None, reason="no torch_xla here")
def test_silent_loss_by_torch_xlas_own_planner_is_an_error_or_no_loss(
    runtime: Runtime, mesh: xd.DeviceMesh, tmp_path: Path
) -> None:
    if runtime.name == "jax":
        pytest.skip("importing torch_xla's planner would start torch_xla beside JAX")
    planners: Any = importlib.import_module("torch_xla.experimental.distributed_checkpoint")
    saved = xd.distribute_tensor(torch.arange(32.0).reshape(8, 4), mesh, [Shard(0), R])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            planner = planners.SPMDSavePlanner()
            dcp.save({"w": saved}, checkpoint_id=tmp_path, planner=planner, no_dist=True)
    except CheckpointException:
        assert not (tmp_path / ".metadata").exists()  # nothing that could be taken for a checkpoint
    else:
        assert bytes_in(tmp_path) >= 32 * 4


def test_model_state_dict(mesh: xd.DeviceMesh) -> None:
    module: Any = xd.distribute_module(nn.Linear(8, 8), mesh)
    before = module.weight.detach().cpu()
    state: Any = get_model_state_dict(module)
    assert isinstance(state["weight"], xd.DTensor)
    assert state["weight"].placements == (R, R)
    set_model_state_dict(module, {name: value + 1 for name, value in state.items()})
    torch.testing.assert_close(module.weight.detach().cpu(), before + 1)


def test_model_state_dict_of_a_marked_module(
    mesh: xd.DeviceMesh, dp_tp: xs.Mesh, tmp_path: Path, bytes_of: Callable[[Any], set[int]]
) -> None:
    def marked() -> Any:
        module = nn.Linear(8, 8)
        xs.mark_sharding(module.weight, dp_tp, ("tp", None))
        return module

    saved, loaded = marked(), marked()
    state: Any = get_model_state_dict(saved)
    rows_on_tp = "{devices=[4,1,2]<=[2,4]T(1,0) last_tile_dim_replicate}"
    assert str(get_runtime().op_sharding(state["weight"])) == rows_on_tp
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    # distribute_module makes DTensors of marked parameters, which DCP reads shard by shard.
    xd.distribute_module(loaded, mesh)
    state = get_model_state_dict(loaded)
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    set_model_state_dict(loaded, state)
    assert torch.equal(loaded.weight.detach().cpu(), saved.weight.detach().cpu())
    assert str(loaded.weight.xla_sharding()) == rows_on_tp
    assert bytes_of(loaded.weight) == {2 * 8 * 4}
