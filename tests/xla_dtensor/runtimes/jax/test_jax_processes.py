"""Which GPUs a process takes, and how much of their memory."""

from __future__ import annotations

import importlib
import os
from typing import Any

import pytest

from xla_dtensor.errors import RuntimeSetupError

FOUR = ["0", "1", "2", "3"]


@pytest.fixture
def processes() -> Any:
    return importlib.import_module("xla_dtensor.runtimes.jax.processes")


@pytest.mark.parametrize(
    ("gpus", "index", "count", "expected"),
    [
        (FOUR, 0, 1, None),
        (FOUR, 3, 4, [3]),
        (FOUR, 1, 2, [2, 3]),
        (["GPU-a"], 1, 2, None),  # each sees its own
        ([], 1, 2, None),
    ],
)
def test_gpus_of_a_process(
    processes: Any, gpus: list[str], index: int, count: int, expected: list[int] | None
) -> None:
    assert processes.own_gpus(gpus, index, count) == expected


def test_gpus_that_cannot_be_shared_out_are_refused(processes: Any) -> None:
    with pytest.raises(RuntimeSetupError, match=r"3 processes.*4 GPUs \(0,1,2,3\).*evenly"):
        processes.own_gpus(FOUR, 0, 3)


def test_gpus_that_are_visible(processes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import jax

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2, GPU-7")
    before = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
    try:
        jax.config.update("jax_platforms", "")
        assert processes.visible_gpus() == ["2", "GPU-7"]
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
        assert processes.visible_gpus() == []
        jax.config.update("jax_platforms", "cpu")
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
        assert processes.visible_gpus() == []
    finally:
        jax.config.update("jax_platforms", before)


def test_a_memory_fraction(processes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "XLA_PYTHON_CLIENT_MEM_FRACTION"
    monkeypatch.setenv(name, "0.5")
    processes.set_memory_fraction(0.9)
    assert os.environ[name] == "0.5"
    monkeypatch.delenv(name)
    processes.set_memory_fraction(0.9)
    assert os.environ.pop(name) == "0.9"
    with pytest.raises(RuntimeSetupError, match=r"memory_fraction=1\.5.*up to 1"):
        processes.set_memory_fraction(1.5)
