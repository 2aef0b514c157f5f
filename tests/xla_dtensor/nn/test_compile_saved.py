"""Compiled programs that outlive the process: files, and XLA's own cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import zipfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import xla_dtensor as xd
from xla_dtensor.errors import CompileError
from xla_dtensor.runtimes.registry import cache_folder

ROOT = Path(__file__).parents[3]

# Trains a little on 8 devices and prints what the losses were and where programs came from.
CHILD = """
import json, sys
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
import jax
import xla_dtensor as xd

events = []
jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
options, path, action = json.loads(sys.argv[1]), sys.argv[2], sys.argv[3]
xd.get_runtime("jax", num_cpu_devices=8, **options)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.1), nn.LayerNorm(32), nn.Linear(32, 16))
model[0].weight = nn.Parameter(xd.distribute_tensor(model[0].weight, mesh, [Replicate(), Shard(0)]))
xd.distribute_module(model, mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

def train(x):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()

step = xd.compile(train)
if action == "load":
    step.load(path)
losses = [step(torch.ones(8, 16)).item() for _ in range(4)]
if action == "save":
    step.save(path)
hits = sum(event.endswith("cache_hits") for event in events)
print(json.dumps({"losses": losses, "hits": hits, **step.stats()}))
"""


def child(action: str, path: Path, **options: Any) -> dict[str, Any]:
    ours = ("XLA_", "JAX_COMPILATION", "JAX_PERSISTENT")
    environment = {name: v for name, v in os.environ.items() if not name.startswith(ours)}
    environment |= {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "NPROC": "64"}
    found = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(CHILD), json.dumps(options), str(path), action],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-3000:]
    return json.loads(found.stdout.splitlines()[-1])


def test_a_saved_step_is_not_compiled_again(tmp_path: Path) -> None:
    path = tmp_path / "step.zip"
    saved = child("save", path)
    loaded = child("load", path)
    assert loaded["losses"] == saved["losses"]
    assert (saved["loaded"], loaded["loaded"]) == (0, 1)
    assert loaded["traces"] == 1


def test_the_cache_is_found_by_the_next_process(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    first = child("run", tmp_path, compile_cache=str(folder))
    assert first["hits"] == 0
    assert any(folder.iterdir())
    second = child("run", tmp_path, compile_cache=str(folder))
    assert second["hits"] >= 2
    assert second["losses"] == first["losses"]


def test_what_came_from_the_cache_can_be_saved(tmp_path: Path) -> None:
    """XLA for CPU writes a program that it has read without its functions."""
    path, cache = tmp_path / "step.zip", str(tmp_path / "cache")
    child("run", path, compile_cache=cache)
    saved = child("save", path, compile_cache=cache)
    assert saved["hits"] >= 2
    loaded = child("load", path)
    assert loaded["loaded"] == 1
    assert loaded["losses"] == saved["losses"]


@pytest.mark.only_on("jax")
class TestFiles:
    def step(self) -> Any:
        return xd.compile(lambda x: x * 2 + 1)

    def test_another_step_takes_nothing_from_it(self, mesh: xd.DeviceMesh, tmp_path: Path) -> None:
        step = self.step()
        x = xd.distribute_tensor(torch.ones(8), mesh)
        step(x)
        step.save(tmp_path / "step.zip")
        other: Any = xd.compile(lambda x: x * 2 + 3)
        other.load(tmp_path / "step.zip")
        assert other(x).full_tensor().tolist() == [5.0] * 8
        assert other.stats()["loaded"] == 0

    def test_the_same_step_takes_it(self, mesh: xd.DeviceMesh, tmp_path: Path) -> None:
        step, again = self.step(), self.step()
        x = xd.distribute_tensor(torch.arange(8.0), mesh)
        wanted = step(x).full_tensor()
        step.save(tmp_path / "step.zip")
        again.load(tmp_path / "step.zip")
        torch.testing.assert_close(again(x).full_tensor(), wanted)
        assert again.stats()["loaded"] == 1

    def test_a_file_can_be_made_of_a_file(self, mesh: xd.DeviceMesh, tmp_path: Path) -> None:
        steps = [self.step() for _ in range(3)]
        x = xd.distribute_tensor(torch.arange(8.0), mesh)
        for step, following in pairwise(steps):
            step(x)
            step.save(tmp_path / "step.zip")
            following.load(tmp_path / "step.zip")
        assert steps[2](x).full_tensor().tolist() == [2.0 * i + 1 for i in range(8)]
        assert steps[2].stats()["loaded"] == 1

    def test_nothing_to_save(self, mesh: xd.DeviceMesh, tmp_path: Path) -> None:
        with pytest.raises(CompileError, match="before its first call"):
            self.step().save(tmp_path / "step.zip")

    def test_another_machines_file(self, mesh: xd.DeviceMesh, tmp_path: Path) -> None:
        path = tmp_path / "step.zip"
        index = {"format": 1, "jax": "0.0.1", "device": "TPU v5", "devices": 256}
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("index.json", json.dumps(index))
        with pytest.raises(CompileError, match=r"jax='0\.0\.1' \(here .*devices=256 \(here 8\)"):
            self.step().load(path)

    @pytest.mark.parametrize("content", [b"", b"no archive"])
    def test_no_such_file(self, mesh: xd.DeviceMesh, tmp_path: Path, content: bytes) -> None:
        path = tmp_path / "step.zip"
        path.write_bytes(content)
        with pytest.raises(CompileError, match="not written by a compiled step"):
            self.step().load(path)

    def test_an_index_that_is_no_table(self, mesh: xd.DeviceMesh, tmp_path: Path) -> None:
        path = tmp_path / "step.zip"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("index.json", "[]")
        with pytest.raises(CompileError, match="not written by a compiled step"):
            self.step().load(path)


@pytest.mark.only_on("torch_xla")
def test_torch_xla_writes_no_files(mesh: xd.DeviceMesh, tmp_path: Path) -> None:
    step = xd.compile(lambda x: x)
    for call in (step.save, step.load):
        with pytest.raises(CompileError, match="compile cache"):
            call(tmp_path / "step.zip")


CHOSEN = [
    # asked, variable, on_cpu, folder
    (None, None, True, None),
    (None, None, False, "home/xla_dtensor"),
    (True, None, True, "home/xla_dtensor"),
    (False, None, False, None),
    (False, "1", False, None),
    (None, "0", False, None),
    (None, "1", True, "home/xla_dtensor"),
    (None, "there", True, "there"),
    ("here", "there", True, "here"),
    (Path("here"), None, False, "here"),
]


@pytest.mark.parametrize(("asked", "variable", "on_cpu", "folder"), CHOSEN)
def test_the_folder(
    monkeypatch: pytest.MonkeyPatch, asked: Any, variable: Any, on_cpu: bool, folder: Any
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "home")
    monkeypatch.delenv("XLA_DTENSOR_COMPILE_CACHE", raising=False)
    if variable is not None:
        monkeypatch.setenv("XLA_DTENSOR_COMPILE_CACHE", variable)
    assert cache_folder(asked, on_cpu=on_cpu) == (None if folder is None else Path(folder))
