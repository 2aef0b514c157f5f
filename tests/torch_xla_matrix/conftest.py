"""What the tests of the matrix share: values, meshes, and programs in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import xla_dtensor as xd
import xla_dtensor.spmd as xs
from xla_dtensor.runtimes import Runtime

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_SECONDS = 120
# What a session sets for itself, and what torch_xla leaves behind when it starts.
INHERITED = (
    "NPROC",
    "XLA_DISABLE_FUNCTIONALIZATION",
    "XLA_DTENSOR_CPU_DEVICES",
    "XLA_DTENSOR_RUNTIME",
    "XLA_FLAGS",
    "XLA_USE_SPMD",
)

Child = tuple[int, str, str]


@pytest.fixture(scope="session")
def dp_tp(runtime: Runtime) -> xs.Mesh:
    """A (dp=2, tp=4) mesh, as torch_xla's scripts make one."""
    return xs.Mesh(range(8), (2, 4), ("dp", "tp"))


@pytest.fixture(scope="session")
def one_axis(runtime: Runtime) -> xd.DeviceMesh:
    """A mesh of one axis over the same devices."""
    return xd.init_device_mesh("xla", (8,), mesh_dim_names=("all",))


@pytest.fixture
def installed(runtime: Runtime) -> Iterator[None]:
    """Let torch.distributed.tensor's own functions work on "xla" meshes."""
    xd.install()
    yield
    xd.uninstall()


@pytest.fixture(scope="session")
def bytes_of() -> Callable[[Any], set[int]]:
    """How many bytes of a DTensor each device has: what memory says, whatever a label says."""
    return lambda d: {shard.num_bytes_on_device for shard in d.addressable_shards()}


@pytest.fixture(scope="session")
def whole_of() -> Callable[[Any], torch.Tensor]:
    """The value put together from what each device really has; devices that disagree are found."""

    def whole(d: Any) -> torch.Tensor:
        made = torch.zeros(d.shape, dtype=d.dtype)
        seen = torch.zeros(d.shape, dtype=torch.bool)
        for shard in d.addressable_shards():
            again = seen[shard.index]
            assert torch.equal(made[shard.index][again], shard.data[again])
            made[shard.index], seen[shard.index] = shard.data, True
        assert seen.all()
        return made

    return whole


@pytest.fixture(scope="session")
def run_child() -> Callable[..., Child]:
    """Run a program in a process of its own: its exit status, what it printed, and its errors."""

    def child(program: str, **environment: str) -> Child:
        clean = {k: v for k, v in os.environ.items() if k not in INHERITED}
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", program],
            env=clean
            | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "PJRT_DEVICE": "CPU"}
            | {"CPU_NUM_DEVICES": "8", "NPROC": "64"}
            | environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
        return done.returncode, done.stdout, done.stderr

    return child
