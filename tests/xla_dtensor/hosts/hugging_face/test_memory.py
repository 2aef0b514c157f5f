"""How much memory a conversion takes in the process, the devices' own aside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.xla_dtensor.host_tasks_hf import sparse_weights
from xla_dtensor.hosts.hugging_face.files import WeightFiles
from xla_dtensor.plan.model_sizes import ModelSizes

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(sys.platform != "linux", reason="counts resident memory as Linux does"),
]


def test_an_8b_model_is_converted_in_less_than_2_gb(tmp_path: Path) -> None:
    """16 GB in, 16 GB out, neither on the disk; devices are stood in for, all else is real.

    The peak is that of the whole process, of which torch and JAX take 0.8 GB before it begins.
    """
    sizes = ModelSizes.load("llama3-8b")
    (tmp_path / "source").mkdir()
    total = sparse_weights(tmp_path / "source", sizes, files=4)
    task = [sys.executable, "-m", "tests.xla_dtensor.host_tasks_hf", "convert_without_devices"]
    arguments = [str(tmp_path / "source"), str(tmp_path / "target"), "llama3-8b", "bfloat16"]
    child = subprocess.run(
        [*task, *arguments],
        env={**os.environ, "NPROC": "64", "JAX_PLATFORMS": "cpu", "XLA_DTENSOR_RUNTIME": "jax"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    found = json.loads(child.stdout.splitlines()[-1])
    assert total == 2 * sizes.num_parameters
    assert found["read"] == total
    assert found["handed_over"] >= total
    assert found["after"] < 2_000_000_000, found
    with WeightFiles(tmp_path / "source") as first, WeightFiles(tmp_path / "target") as second:
        assert {key: tensor.shape for key, tensor in first.tensors.items()} == {
            key: tensor.shape for key, tensor in second.tensors.items()
        }
