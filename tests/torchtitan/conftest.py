"""torchtitan is imported once, and what it changes in torch is put back."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import xla_dtensor as xd
from tests.torchtitan.jobs import JOBS, Job, Run, parallelized
from xla_dtensor.runtimes import Runtime

REASON = "torchtitan is not installed: `make test` installs it, with the newest torch"

# What torchtitan's apply_compile changes.
CHANGED = {
    "capture_scalar_outputs": False,
    "skip_fwd_side_effects_in_bwd_under_checkpoint": False,
}


@pytest.fixture(scope="session")
def titan(runtime: Runtime) -> None:
    """torchtitan, told what its devices are called."""
    if find_spec("torchtitan") is None:
        pytest.skip(REASON)
    as_torch_made_it = FakeTensorMode.__init__
    importlib.import_module("torchtitan.models.llama3")
    FakeTensorMode.__init__ = as_torch_made_it
    parallel_dims: Any = importlib.import_module("torchtitan.distributed.parallel_dims")
    parallel_dims.device_type = "xla"


@pytest.fixture
def installed(titan: None) -> Iterator[None]:
    """install(), for the time of a test."""
    utils: Any = importlib.import_module("torchtitan.distributed.utils")
    backend = utils.get_spmd_backend()
    xd.install()
    with torch._dynamo.config.patch(CHANGED):
        yield
    xd.uninstall()
    utils.set_spmd_backend(backend)
    torch._C._dynamo.eval_frame._set_lru_cache(True)  # pyright: ignore


@pytest.fixture
def parallel(installed: None) -> Callable[[str | Job], Run]:
    """Applies a job, by its name or as it is."""
    return lambda asked: parallelized(JOBS[asked] if isinstance(asked, str) else asked)
