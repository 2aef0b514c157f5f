"""Programs that make the calls of pytorch/examples and of torch's tutorials, on a mesh of XLA's.

Each is a plain program of torch's in the folder torch_examples. What is run is its text with a few
lines changed, which are counted; it is started by ``python`` alone, and some in two processes. What
it computes is compared with the unchanged program, as the only rank of torch's gloo on the CPU.
"""

from __future__ import annotations

import difflib
import os
import runpy
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from mesh_utils.job import JobConfig
from mesh_utils.launch.local import local_plan
from tests.hosts import QUICK_COMPILER, free_port
from xla_dtensor.cli.launch_local import LocalRun

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.only_on("jax"),
    # The processes of a job are started by a fork of this one, where JAX may have begun.
    pytest.mark.filterwarnings(r"ignore:os\.fork\(\) was called:RuntimeWarning"),
]

ROOT = Path(__file__).parents[3]
PROGRAMS = Path(__file__).parent / "torch_examples"
INSTALL = {"import torch\n": "import torch\nimport xla_dtensor as xd\nxd.install()\n"}
ALL_DEVICES = {
    'world_size = int(os.environ["WORLD_SIZE"])': "world_size = len(xd.get_runtime().device_ids())"
}
# What is changed besides, and how many lines differ then.
CHANGES: dict[str, tuple[dict[str, str], int]] = {
    "tensor_parallel": (ALL_DEVICES, 3),
    "sequence_parallel": (
        ALL_DEVICES
        | {
            "x = torch.rand(24, 12, device=device_type)": (
                "x = xd.distribute_tensor(torch.rand(24, 12, device=device_type), mesh, [rows])"
            )
        },
        4,
    ),
    "sharded_and_tensor_parallel": (ALL_DEVICES, 3),
    "fully_sharded": ({}, 2),
    "device_mesh": ({'DEVICE = "cuda"': 'DEVICE = "xla"'}, 3),
    "checkpoint": ({"world_size = accelerator.device_count()": "world_size = 1"}, 3),
}


def source(name: str) -> str:
    return (PROGRAMS / f"{name}.py").read_text()


def with_changes(text: str, changes: dict[str, str]) -> str:
    for old, new in changes.items():
        assert text.count(old) == 1
        text = text.replace(old, new)
    return text


def on_xla(name: str) -> str:
    return with_changes(source(name), INSTALL | CHANGES[name][0])


def start(command: Sequence[str], environment: dict[str, str] | None = None) -> str:
    """Run a command, and return what it said."""
    variables = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "RANK")}
    variables |= {
        "NPROC": "64",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
        "XLA_DTENSOR_CPU_DEVICES": "8",
        "XLA_FLAGS": QUICK_COMPILER,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(free_port()),
        **(environment or {}),
    }
    run = subprocess.run(
        [sys.executable, *command],
        env=variables,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return run.stderr


def by_torch(name: str, tmp_path: Path, *words: str, **changes: str) -> Any:
    """What the program of torch's computes on one rank of the CPU."""
    program, result = tmp_path / "plain.py", tmp_path / "plain.pt"
    program.write_text(with_changes(source(name), changes))
    module = "tests.xla_dtensor.integrations.one_rank"
    start(["-m", module, str(program), str(result), *words])
    return torch.load(result)


def by_us(name: str, tmp_path: Path, *words: str) -> Any:
    """What it computes on eight devices, with its lines changed."""
    program, result = tmp_path / "changed.py", tmp_path / "changed.pt"
    program.write_text(on_xla(name))
    start([str(program), str(result), *words])
    return torch.load(result)


def by_two_processes(name: str, tmp_path: Path, *words: str) -> Any:
    """The same in two processes of four devices."""
    program, result = tmp_path / "hosts.py", tmp_path / "hosts.pt"
    program.write_text(on_xla(name))
    job = JobConfig.load(str(ROOT / "examples" / "jobs" / "language_model.yaml"))
    run = LocalRun(
        job,
        local_plan(job, 2, 4),
        [sys.executable, str(program), str(result), *words],
        logs=tmp_path,
        env={"PYTHONPATH": str(ROOT), "XLA_FLAGS": QUICK_COMPILER},
        timeout_seconds=200,
    )
    assert run.run() == 0, (run.reason, run.last_lines)
    return torch.load(result)


def assert_same(value: Any, expected: Any, tolerance: float) -> None:
    torch.testing.assert_close(value, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", CHANGES)
def test_how_many_lines_differ(name: str) -> None:
    lines = difflib.unified_diff(source(name).splitlines(), on_xla(name).splitlines(), n=0)
    signs = [line[0] for line in list(lines)[2:] if not line.startswith("@@")]
    added, removed = signs.count("+"), signs.count("-")
    assert (added, removed) == (CHANGES[name][1], added - 2)  # two are new


@pytest.mark.parametrize(
    "name", ["tensor_parallel", "sequence_parallel", "sharded_and_tensor_parallel"]
)
def test_parallel_styles(name: str, tmp_path: Path) -> None:
    assert_same(by_us(name, tmp_path), by_torch(name, tmp_path), 1e-9)


@pytest.mark.parametrize("name", ["tensor_parallel", "sharded_and_tensor_parallel"])
def test_parallel_styles_in_two_processes(name: str, tmp_path: Path) -> None:
    assert_same(by_two_processes(name, tmp_path), by_torch(name, tmp_path), 1e-9)


def test_world_size_of_the_environment(tmp_path: Path) -> None:
    """``WORLD_SIZE=8 python program.py``: the line that asks for it stays."""
    program, result = tmp_path / "changed.py", tmp_path / "changed.pt"
    changes = dict(list(CHANGES["sequence_parallel"][0].items())[1:])
    program.write_text(with_changes(source("sequence_parallel"), INSTALL | changes))
    start([str(program), str(result)], {"WORLD_SIZE": "8"})
    assert_same(torch.load(result), by_torch("sequence_parallel", tmp_path), 1e-9)


def weights_of_model(tmp_path: Path) -> str:
    model = runpy.run_path(str(PROGRAMS / "fully_sharded.py"), run_name="model")["Model"]
    torch.manual_seed(0)
    path = tmp_path / "weights.pt"
    torch.save(model().state_dict(), path)
    return str(path)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 5e-5), ("bfloat16", 0.03)])
def test_fully_shard_without_a_mesh(dtype: str, tolerance: float, tmp_path: Path) -> None:
    words = weights_of_model(tmp_path), dtype
    ours, plain = (run("fully_sharded", tmp_path, *words) for run in (by_us, by_torch))
    for key in ("losses", "weights"):
        assert_same(ours[key], plain[key], tolerance)
    assert ours["losses"][2] < ours["losses"][0]


def test_fully_shard_in_two_processes(tmp_path: Path) -> None:
    words = weights_of_model(tmp_path), "float32"
    ours = by_two_processes("fully_sharded", tmp_path, *words)
    plain = by_torch("fully_sharded", tmp_path, *words)
    for key in ("losses", "weights"):
        assert_same(ours[key], plain[key], 5e-5)


def test_meshes_of_more_axes(tmp_path: Path) -> None:
    one = {'"cuda"': '"cpu"', "(2, 4), (2, 2, 2)": "(1, 1), (1, 1, 1)"}
    ours = by_us("device_mesh", tmp_path)
    assert ours["sizes"] == [2, 4, 2, 2]
    plain = by_torch("device_mesh", tmp_path, **one)
    for key in ("hybrid", "weights"):
        assert_same(ours[key], plain[key], 1e-12)


def test_checkpoint(tmp_path: Path) -> None:
    ours = by_us("checkpoint", tmp_path, str(tmp_path / "ours"))
    plain = by_torch("checkpoint", tmp_path, str(tmp_path / "plain"))
    assert_same(ours["saved"], plain["saved"], 1e-12)
    for each in (ours, plain):
        assert_same(each["loaded"], each["saved"], 0)
    model = ours["saved"]["model"]
    assert_same(ours["plain"], {f"app.model.{name}": model[name] for name in model}, 0)


def test_processes_that_the_program_starts_are_one_job(tmp_path: Path) -> None:
    """The program says who is who to torch alone, and JAX hears it from torch's group."""
    program, result = tmp_path / "two.py", tmp_path / "two.pt"
    text = on_xla("checkpoint").replace("world_size = 1", "world_size = 2")
    program.write_text(text)
    words = [str(result), str(tmp_path / "folder")]
    start([str(program), *words], {"XLA_DTENSOR_CPU_DEVICES": "4"})
    plain = by_torch("checkpoint", tmp_path, str(tmp_path / "plain"))
    ours = torch.load(result)
    assert_same(ours["saved"], plain["saved"], 1e-12)
    assert_same(ours["loaded"], plain["saved"], 1e-12)
