"""Ways in which a process starts: alone, too late, without the others, under torchrun."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.hosts import free_port

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parents[3]
PROGRAM = Path(__file__).with_name("process_starts.py")
SAYING = ("JAX_", "RANK", "WORLD_SIZE", "MASTER_", "SLURM_", "LOCAL_", "XLA_FLAGS", "XLA_DTENSOR_")


class Start:
    """A process that is on its way."""

    def __init__(self, *command: str, **environment: str) -> None:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(SAYING)}
        kept |= {"JAX_PLATFORMS": "cpu", "XLA_DTENSOR_RUNTIME": "jax", "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            [sys.executable, *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=kept | environment,
            cwd=ROOT,
        )

    def lines(self) -> list[Any]:
        """What it printed, once it has ended well."""
        out, err = self.process.communicate(timeout=100)
        assert self.process.returncode == 0, err[-3000:]
        return [json.loads(line) for line in out.splitlines() if line.startswith(("[{", '["', '"'))]


def start(way: str, *arguments: str, **environment: str) -> Start:
    return Start(str(PROGRAM), way, *arguments, **environment)


def test_starts_of_one_process() -> None:
    """Started at once, as each takes seconds."""
    place = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}", "JAX_NUM_PROCESSES": "3"}
    started = [start("alone"), start("late"), start("missing", **place, JAX_PROCESS_ID="0")]
    (alone,), (late,), (missing,) = [each.lines() for each in started]

    first, same, again, service = alone
    assert (first["index"], first["count"], first["device_ids"]) == (0, 1, [0, 1])
    assert (first["found_by"], first["coordinator_address"]) == ("nobody", None)
    assert (same, service) == (True, False)
    assert "called again, with coordinator_address='127.0.0.1:1', num_processes=2" in again

    assert "was to join 2 processes (found by arguments), but JAX has started" in late
    assert "before anything else" in late

    address = re.escape(place["JAX_COORDINATOR_ADDRESS"])
    assert re.search(rf"2 did not come to {address} in 1\.\d+ s", missing)
    assert "process 1, 2. Process 0 (" in missing


@pytest.mark.thorough
def test_jax_may_have_been_told_by_the_program() -> None:
    ((refusal, info),) = start("jax_itself", str(free_port())).lines()
    assert "jax.distributed runs with coordinator_address='127.0.0.1" in refusal
    assert (info["found_by"], info["count"]) == ("jax.distributed", 1)


@pytest.mark.thorough
@pytest.mark.skipif(importlib.util.find_spec("torch_xla") is None, reason="no torch_xla here")
def test_torch_xla_finds_its_processes_itself() -> None:
    ((refusal, info),) = start(
        "torch_xla", XLA_DTENSOR_RUNTIME="torch_xla", PJRT_DEVICE="CPU"
    ).lines()
    assert "told num_processes=2, process_id=1 (by arguments)" in refusal
    assert "the runtime 'torch_xla' found num_processes=1" in refusal
    assert (info["count"], info["found_by"]) == (1, "torch_xla")


@pytest.mark.thorough
def test_torchrun_starts_two_processes() -> None:
    run = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port")
    found = Start(*run, str(free_port()), str(PROGRAM), "by_environment").lines()
    assert sorted(info["index"] for info, _, _ in found) == [0, 1]
    assert {info["found_by"] for info, _, _ in found} == {"torchrun"}
    assert sorted(rank for _, rank, _ in found) == [0, 2]
    assert {size for _, _, size in found} == {4}


@pytest.mark.thorough
def test_slurm_is_found_by_jax() -> None:
    step = {
        "SLURM_JOB_ID": str(free_port()),
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NTASKS": "8",
        "SLURM_STEP_NUM_TASKS": "2",
        "JAX_COORDINATOR_PORT": str(free_port()),
    }
    started = [
        start("by_environment", **step, SLURM_PROCID=str(i), SLURM_LOCALID=str(i)) for i in (0, 1)
    ]
    found = [line for each in started for line in each.lines()]
    assert [info["index"] for info, _, _ in found] == [0, 1]
    assert {info["found_by"] for info, _, _ in found} == {"JAX's detection of 'slurm'"}
    assert {info["coordinator_address"] for info, _, _ in found} == {
        f"localhost:{step['JAX_COORDINATOR_PORT']}"
    }


@pytest.mark.thorough
def test_variables_of_torchrun_without_torchrun() -> None:
    port = free_port()
    said = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    started = [start("by_environment", **said, RANK=str(i)) for i in (0, 1)]
    found = [line for each in started for line in each.lines()]
    assert {info["coordinator_address"] for info, _, _ in found} == {f"127.0.0.1:{port + 1}"}
