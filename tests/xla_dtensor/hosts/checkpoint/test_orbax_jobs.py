"""DTensors in orbax's checkpoints, between jobs of several processes, in several batches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.hosts import Hosts
from xla_dtensor.errors import CheckpointError
from xla_dtensor.hosts.checkpoint import orbax
from xla_dtensor.runtimes import Runtime

TASKS = "tests.xla_dtensor.host_tasks_orbax"


@pytest.mark.only_on("jax")
def test_between_one_process_and_two(
    hosts: Callable[..., Hosts], runtime: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.xla_dtensor.host_tasks_orbax import restore_drawn, save_drawn

    two, folder = hosts(2, 4), str(tmp_path)
    save_drawn(folder, cases=24, step=1)
    restored = two.run(f"{TASKS}:restore_drawn", folder=folder, cases=24, where="2", step=1)
    assert restored == [[], []]
    two.run(f"{TASKS}:save_drawn", folder=folder, cases=24, step=2)
    monkeypatch.setattr(orbax, "_BATCH_BYTES", 1000)
    assert restore_drawn(folder, cases=24, where="1", step=2) == []
    restored = two.run(f"{TASKS}:restore_drawn", folder=folder, cases=24, where="3", step=2)
    assert restored == [[], []]


def test_on_another_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orbax, "get_runtime", lambda: SimpleNamespace(name="torch_xla"))
    with pytest.raises(CheckpointError, match="orbax takes arrays of JAX"):
        orbax.DTensorSave({"n": 1})
