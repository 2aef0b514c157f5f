"""Saving and loading in one process: what is saved, what is loaded, and what is refused."""

from __future__ import annotations

import json
import logging
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.tensor import Replicate, Shard

import xla_dtensor as xd
from xla_dtensor import checkpoint
from xla_dtensor.dtensor.random import RNGStatesTracker
from xla_dtensor.errors import CheckpointError
from xla_dtensor.hosts.checkpoint import pieces, storage
from xla_dtensor.hosts.hugging_face import load_hf, save_hf

pytestmark = pytest.mark.usefixtures("mesh")
R, S = Replicate(), Shard


def put(value: torch.Tensor, mesh: xd.DeviceMesh, placements: Any) -> Any:
    return xd.distribute_tensor(value, mesh, list(placements))


def model(mesh: xd.DeviceMesh, placements: Any, seed: int) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 5), nn.BatchNorm1d(5))

    def place(_: str, part: nn.Module, on: xd.DeviceMesh) -> None:
        for name, p in list(part.named_parameters(recurse=False)):
            setattr(part, name, nn.Parameter(xd.distribute_tensor(p, on, placements)))

    xd.distribute_module(module, mesh, place)
    return module, torch.optim.AdamW(module.parameters(), lr=0.01)


def train(module: Any, optimizer: Any, mesh: xd.DeviceMesh, batches: Any) -> list[float]:
    losses: list[float] = []
    for batch in batches:
        optimizer.zero_grad()
        loss = module(xd.distribute_tensor(batch, mesh)).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


class Loader:
    """A loader that has been somewhere."""

    def __init__(self, position: int = 0) -> None:
        self.state: Any = {"position": position, "rest": [torch.arange(position), "a"]}

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def manifest_of(path: str) -> dict[str, Any]:
    return json.loads((Path(path) / "manifest.json").read_text())["manifest"]


# ---------------------------------------------------------------------- a training job


def test_a_job_goes_on_where_it_was(tmp_path: Path, mesh: xd.DeviceMesh) -> None:
    batches = torch.randn(4, 8, 6)
    module, optimizer = model(mesh, [R, S(0)], 0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    train(module, optimizer, mesh, batches[:2])
    scheduler.step()
    state = {"model": module, "optim": optimizer, "sched": scheduler, "loader": Loader(5)}
    checkpoint.save(tmp_path, state, step=2)
    expected = train(module, optimizer, mesh, batches[2:])

    other, its_optimizer = model(mesh, [S(0), R], 1)  # a new optimizer, without any state
    its_scheduler = torch.optim.lr_scheduler.StepLR(its_optimizer, 2)
    loader = Loader()
    state = {"model": other, "optim": its_optimizer, "sched": its_scheduler, "loader": loader}
    assert checkpoint.load(tmp_path, state) == 2
    for p in other.parameters():
        assert p.placements == (S(0), R)
        assert its_optimizer.state[p]["exp_avg"].xla_sharding() == p.xla_sharding()
    assert its_scheduler.state_dict() == scheduler.state_dict()
    assert loader.state["rest"][0].tolist() == [0, 1, 2, 3, 4]
    assert other[3].num_batches_tracked.item() == 2
    losses = train(other, its_optimizer, mesh, batches[2:])
    assert losses == pytest.approx(expected, rel=1e-5)


def test_the_same_layout_goes_on_bit_equal(tmp_path: Path, mesh: xd.DeviceMesh) -> None:
    batches = torch.randn(3, 8, 6)
    module, optimizer = model(mesh, [R, S(0)], 0)
    train(module, optimizer, mesh, batches[:1])
    pending = checkpoint.async_save(tmp_path, {"m": module, "o": optimizer}, step=1)
    expected = train(module, optimizer, mesh, batches[1:])  # the state changes meanwhile
    pending.wait()
    again, its_optimizer = model(mesh, [R, S(0)], 1)
    train(again, its_optimizer, mesh, torch.randn(1, 8, 6))  # an optimizer with another state
    checkpoint.load(tmp_path, {"m": again, "o": its_optimizer})
    assert train(again, its_optimizer, mesh, batches[1:]) == expected
    for p, q in zip(again.parameters(), module.parameters(), strict=True):
        assert torch.equal(p.cpu(), q.cpu())


def test_random_numbers_go_on(tmp_path: Path, mesh: xd.DeviceMesh) -> None:
    tracker = RNGStatesTracker()
    tracker.add("dropout", 3)
    checkpoint.save(tmp_path, {"tracker": tracker}, step=0)

    def drawn() -> list[Any]:
        with tracker.fork("dropout"):
            named = xd.rand(4, device_mesh=mesh).full_tensor().tolist()
        return [torch.rand(3).tolist(), xd.rand(8, device_mesh=mesh).full_tensor().tolist(), named]

    first = drawn()
    assert drawn() != first
    checkpoint.load(tmp_path, {"tracker": tracker})
    assert drawn() == first
    checkpoint.load(tmp_path, {"tracker": tracker}, rng=False)
    assert drawn()[0] != first[0]


def test_fully_shard_and_tied_weights(tmp_path: Path, mesh: xd.DeviceMesh) -> None:
    def made(seed: int) -> Any:
        torch.manual_seed(seed)
        module: Any = nn.Sequential(nn.Embedding(12, 8), nn.Linear(8, 12, bias=False))
        module[1].weight = module[0].weight
        return xd.fully_shard(module, mesh=mesh["tp"])

    module, other = made(0), made(1)
    path = checkpoint.save(tmp_path, {"m": module}, step=0, rng=False)
    entries = manifest_of(path)["entries"]
    assert entries["m.0.weight"]["chunks"] == entries["m.1.weight"]["chunks"]
    size = sum(manifest_of(path)["files"].values())
    assert 4 * 1500 < size < 5 * 1800  # four records
    checkpoint.load(tmp_path, {"m": other})
    assert other[1].weight is other[0].weight
    assert torch.equal(other[0].weight.full_tensor().cpu(), module[0].weight.full_tensor().cpu())


# ---------------------------------------------------------------------- what is written


def test_the_manifest_and_each_shard_once(tmp_path: Path, mesh: xd.DeviceMesh) -> None:
    x = torch.randn(16, 6)
    state = {
        "a": {"x": put(x, mesh, [S(0), R]), "y": put(x, mesh, [R, R])},
        "l": [put(x.bfloat16(), mesh, [S(1), S(0)]), 3],
        "n": {"deep": [1, {"b": (2, "c")}], "none": None, "empty": {}},
        "e": put(torch.empty(0, 3), mesh, [S(0), R]),
        "s": put(torch.tensor(7), mesh, [R, R]),
    }
    path = checkpoint.save(tmp_path, state, step=3, rng=False)
    assert path == f"{tmp_path}/step_00000003"
    manifest = manifest_of(path)
    entries = manifest["entries"]
    assert (manifest["step"], manifest["processes"]) == (3, 1)
    counts = {name: len(entry["chunks"]) for name, entry in entries.items()}
    tensors = {"a.x": 2, "a.y": 1, "l.0": 8, "e": 1, "s": 1}
    values = {"l.1": 1, "n.deep": 1, "n.none": 1, "n.empty": 1}
    assert counts == {**tensors, **values}
    first = entries["a.x"]
    assert first["path"] == ["a", "x"]
    assert (first["shape"], first["dtype"], first["bytes"]) == ([16, 6], "float32", 16 * 6 * 4)
    assert (first["layout"], first["mesh"]) == ("[dp, -]", "dp=2, tp=4")
    for file, size in manifest["files"].items():
        assert (Path(path) / file).stat().st_size == size
    plain = {"a": {"x": x * 0, "y": x * 0}, "l": [x.bfloat16() * 0, 0], "s": torch.tensor(0)}
    plain |= {"n": {"deep": 0, "none": 1, "empty": {1: 2}}, "e": torch.empty(0, 3)}
    with pytest.raises(CheckpointError, match=r"lacks 'n.empty.1'; the state lacks 'n.empty'"):
        checkpoint.load(tmp_path, plain)
    plain["n"]["empty"] = 5
    checkpoint.load(tmp_path, plain)
    assert torch.equal(plain["a"]["x"], x)
    assert torch.equal(plain["l"][0], x.bfloat16())
    assert (plain["l"][1], plain["n"], plain["s"].item()) == (3, state["n"], 7)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_torch_distributed_checkpoint_reads_it(tmp_path: Path, mesh: xd.DeviceMesh) -> None:
    x = torch.randn(9, 7)
    path = checkpoint.save(tmp_path, {"m": {"x": put(x, mesh, [S(1), S(0)])}, "n": [3]}, step=1)
    plain = {"m": {"x": x * 0}, "n": None}
    dcp_load(plain, checkpoint_id=path)
    assert torch.equal(plain["m"]["x"], x)
    assert plain["n"] == [3]
    dcp_to_torch_save(path, tmp_path / "whole.pt")
    assert torch.equal(torch.load(tmp_path / "whole.pt")["m"]["x"], x)


def test_large_blocks_are_cut(
    tmp_path: Path, mesh: xd.DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "LIMIT_BYTES", 100)
    values = [torch.randn(17, 5), torch.randn(3, 50), torch.randn(2, 3, 40).bfloat16()]
    state = {str(i): put(v, mesh, [S(0), R]) for i, v in enumerate(values)}
    path = checkpoint.save(tmp_path, state, step=1)
    chunks = [c for e in manifest_of(path)["entries"].values() if "shape" in e for c in e["chunks"]]
    assert len(chunks) > 15
    loaded = {str(i): put(torch.zeros_like(v), mesh, [S(1), S(0)]) for i, v in enumerate(values)}
    checkpoint.load(tmp_path, loaded)
    for i, value in enumerate(values):
        assert torch.equal(loaded[str(i)].cpu(), value)


@pytest.mark.only_on("jax")
def test_host_memory_is_bounded(
    tmp_path: Path, mesh: xd.DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NumPy and torch's pickled pieces are seen by tracemalloc; tensors are counted by hand."""
    monkeypatch.setattr(pieces, "LIMIT_BYTES", 1 << 18)
    state = {str(i): xd.ones(2048, 512, device_mesh=mesh, placements=[R, S(0)]) for i in range(3)}
    tracemalloc.start()
    try:
        checkpoint.save(tmp_path, state, step=1)
        save_peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    shard_bytes = 2048 * 512 * 4 // 4
    assert save_peak < 3 * shard_bytes  # of 12 shards
    made: list[int] = []
    real_empty = torch.empty

    def empty(*args: Any, **kwargs: Any) -> torch.Tensor:
        result = real_empty(*args, **kwargs)
        made.append(result.nbytes)
        return result

    monkeypatch.setattr(torch, "empty", empty)
    other = {k: xd.zeros(2048, 512, device_mesh=mesh, placements=[S(0), S(1)]) for k in state}
    made.clear()
    checkpoint.load(tmp_path, other)
    assert max(made) <= max(shard_bytes // 2, 1 << 18)  # a block of 1/8 each, or a piece
    assert other["2"].sum().item() == 2048 * 512


# ---------------------------------------------------------------------- part of it


def test_partial_loads(
    tmp_path: Path, mesh: xd.DeviceMesh, caplog: pytest.LogCaptureFixture
) -> None:
    saved = {"a": {"x": torch.ones(3), "y": torch.ones(4)}, "b": 1}
    checkpoint.save(tmp_path, saved, step=1)
    state = {"a": {"x": torch.zeros(3), "z": torch.zeros(2)}, "b": 0}
    with pytest.raises(CheckpointError, match=r"lacks 'a.z'; the state lacks 'a.y'. Pass strict="):
        checkpoint.load(tmp_path, state)
    assert (state["a"]["x"].tolist(), state["b"]) == ([0, 0, 0], 0)
    checkpoint.load(tmp_path, state, only=["*.x"])
    assert (state["a"]["x"].tolist(), state["b"]) == ([1, 1, 1], 0)
    with caplog.at_level(logging.WARNING, "xla_dtensor"):
        checkpoint.load(tmp_path, state, strict=False)
    assert "not loaded: 'a.z'; not asked for: 'a.y'" in caplog.text
    assert state["b"] == 1


def test_an_optimizer_is_loaded_in_part(tmp_path: Path, mesh: xd.DeviceMesh) -> None:
    def made(scale: float) -> Any:
        weight = nn.Parameter(put(torch.ones(4, 4), mesh, [S(0), R]))
        optimizer = torch.optim.AdamW([weight], lr=scale)
        weight.grad = put(torch.full((4, 4), scale), mesh, [S(0), R])
        optimizer.step()
        return optimizer

    one, two = made(1.0), made(2.0)
    before = [s["exp_avg_sq"].cpu() for s in two.state.values()]
    checkpoint.save(tmp_path, {"o": one}, step=1)
    checkpoint.load(tmp_path, {"o": two}, only=["o.state.*.exp_avg"])
    (loaded,) = two.state.values()
    (saved,) = one.state.values()
    assert torch.equal(loaded["exp_avg"].cpu(), saved["exp_avg"].cpu())
    assert torch.equal(loaded["exp_avg_sq"].cpu(), before[0])
    assert two.param_groups[0]["lr"] == 2
    # One without a state takes the place of one that has some.
    new = torch.optim.AdamW([nn.Parameter(put(torch.ones(4, 4), mesh, [S(0), R]))])
    checkpoint.save(tmp_path, {"o": new}, step=2)
    checkpoint.load(tmp_path, {"o": two})
    assert not two.state_dict()["state"]


def test_dtypes_are_converted_when_that_is_asked_for(tmp_path: Path, mesh: xd.DeviceMesh) -> None:
    x = torch.randn(8, 4)
    checkpoint.save(tmp_path, {"x": put(x, mesh, [S(0), R])}, step=1)
    state = {"x": put(x.bfloat16() * 0, mesh, [R, S(1)])}
    with pytest.raises(CheckpointError, match=r"dtype=float32 there, and dtype=bfloat16 in the"):
        checkpoint.load(tmp_path, state)
    checkpoint.load(tmp_path, state, convert=True)
    assert torch.equal(state["x"].cpu(), x.bfloat16())


def test_progress(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tqdm")
    checkpoint.save(tmp_path, {"x": torch.ones(3000)}, step=1, progress=True)
    checkpoint.load(tmp_path, {"x": torch.ones(3000)}, progress=True)
    checkpoint.verify(tmp_path, progress=True)
    said = capfd.readouterr().err
    assert all(word in said for word in ("saving", "loading", "verifying", "100%"))


def test_progress_without_tqdm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with pytest.raises(CheckpointError, match=r"tqdm, which shows it, is not installed\. Install"):
        checkpoint.save(tmp_path, {"x": torch.ones(3)}, step=1, progress=True)
    assert checkpoint.latest(tmp_path) is None
    save_hf(tmp_path / "weights", layer := nn.Linear(2, 2))
    load_hf(tmp_path / "weights", layer)


# ---------------------------------------------------------------------- in the background


def test_errors_in_the_background_are_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> int:
        raise CheckpointError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(pieces._Writer, "write", full)
        pending = checkpoint.async_save(tmp_path, {"x": torch.ones(3)}, step=1)
        with pytest.raises(CheckpointError, match="the disk is full"):
            pending.wait()
        checkpoint.async_save(tmp_path, {"x": torch.ones(3)}, step=2)
        with pytest.raises(CheckpointError, match="the disk is full"):
            checkpoint.save(tmp_path, {"x": torch.ones(3)}, step=3)
    assert checkpoint.latest(tmp_path) is None
    # It was told once, to the save before this one.
    assert checkpoint.save(tmp_path, {"x": torch.ones(3)}, step=4).endswith("step_00000004")


def test_the_second_waits_for_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    finish = storage._Local.finish

    def noted(place: Any, file: Any) -> None:
        order.append(Path(file.name).parent.name[:13])
        finish(place, file)

    monkeypatch.setattr(storage._Local, "finish", noted)
    state = {"x": torch.zeros(1000)}
    pending = []
    for step in range(4):
        state["x"].fill_(step)
        pending.append(checkpoint.async_save(tmp_path, state, step=step))
    state["x"].fill_(99)
    assert [Path(each.wait()).name for each in pending] == order
    assert all(each.done() for each in pending)
    for step in range(4):
        checkpoint.load(tmp_path, state, step=step)
        assert state["x"].tolist() == [step] * 1000
    failing = _failing_slowly(monkeypatch, tmp_path)
    with pytest.raises(TimeoutError, match=r"timeout_seconds=0. It is not written yet"):
        failing.wait(0)
    with pytest.raises(CheckpointError, match="late"):  # else the next save would say it
        failing.wait(60)


def _failing_slowly(patch: pytest.MonkeyPatch, folder: Path) -> checkpoint.Pending:
    import time

    def slow(_: Any, __: Any) -> int:
        time.sleep(0.2)
        raise CheckpointError("late")

    patch.setattr(storage._Local, "finish", slow)
    pending = checkpoint.async_save(folder, {"x": torch.ones(1)}, step=9)
    return pending
