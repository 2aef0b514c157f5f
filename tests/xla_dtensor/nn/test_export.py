"""step.export: a program that JAX runs in a process that has neither torch nor this library."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

import xla_dtensor as xd
from xla_dtensor.errors import CompileError
from xla_dtensor.runtimes import Runtime

pytestmark = [pytest.mark.usefixtures("runtime"), pytest.mark.only_on("jax")]

OTHER_PROCESS = """
import json, os, sys
os.environ["NPROC"], folder = "64", sys.argv[1]
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
jax.config.update("jax_enable_x64", True)
program = jax.export.deserialize(bytearray(open(f"{folder}/program.jax", "rb").read()))
with np.load(f"{folder}/inputs.npz") as saved:
    inputs = [saved[f"arr_{i}"] for i in range(len(saved))]
everywhere = NamedSharding(Mesh(jax.devices(), ("x",)), PartitionSpec())
placed = [jax.device_put(each, everywhere) for each in inputs]
np.savez(f"{folder}/outputs.npz", *map(np.asarray, jax.jit(program.call)(*placed)))
assert not {"torch", "xla_dtensor"} & {*sys.modules}
"""


@pytest.fixture
def mesh(runtime: Runtime) -> xd.DeviceMesh:
    return xd.init_device_mesh("xla", (4, 2), mesh_dim_names=("dp", "tp"))


def values(model: Any, optimizer: Any, given: dict[str, Any]) -> dict[str, np.ndarray]:
    """The arrays of a step's inputs, by the names of the signature."""
    tensors: dict[str, Any] = dict(given)
    for name, parameter in model.named_parameters():
        tensors[name] = parameter
        for key, state in optimizer.state[parameter].items():
            tensors[f"{name} {key}"] = state
    return {name: np.asarray(tensor.detach().cpu()) for name, tensor in tensors.items()}


def test_another_process_runs_the_step_from_its_files(tmp_path: Path, mesh: xd.DeviceMesh) -> None:
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    model = xd.shard_module(layers, mesh, {"0": "colwise", "2": "rowwise"})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    count = xd.zeros(3, device_mesh=mesh)

    @xd.compile
    def step(x: torch.Tensor, y: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        count.add_(1)
        return loss.detach()

    x = xd.distribute_tensor(torch.randn(8, 8), mesh, [Shard(0), Replicate()])
    y = xd.distribute_tensor(torch.randn(8, 4), mesh)
    step(x, y, count)
    step.export(tmp_path, mesh.value, [model])
    signature = json.loads((tmp_path / "signature.json").read_text())
    assert signature["mesh"] == {"dp": 4, "tp": 2}
    assert signature["devices"] == 8
    inputs, outputs = signature["inputs"], signature["outputs"]
    layouts = {each["name"]: each["layout"] for each in inputs}
    assert layouts["0.weight"] == layouts["0.weight exp_avg"] == "[tp, -]"
    assert layouts["2.weight"] == "[-, tp]"

    names = [each["name"] for each in inputs]
    given = iter((x, y, count))  # the last is written to, and comes last
    arguments = {each["name"]: next(given) for each in inputs if each["role"] == "argument"}
    held = values(model, optimizer, arguments)
    held["learning rate"] = np.asarray(1e-2)
    np.savez(tmp_path / "inputs.npz", *(held[name] for name in names))
    (tmp_path / "run.py").write_text(OTHER_PROCESS)
    subprocess.run([sys.executable, tmp_path / "run.py", tmp_path], check=True, timeout=300)

    loss = step(x, y, count)
    expected = {"result 0": np.asarray(loss.cpu()), **values(model, optimizer, arguments)}
    with np.load(tmp_path / "outputs.npz") as found:
        assert len(found) == len(outputs)
        for number, output in enumerate(outputs):
            np.testing.assert_allclose(
                found[f"arr_{number}"], expected[output["name"]], atol=1e-6, err_msg=str(output)
            )


def test_a_program_for_tpus_has_the_shardings(tmp_path: Path, mesh: xd.DeviceMesh) -> None:
    model = xd.shard_module(torch.nn.Linear(8, 16), mesh, {"": "colwise"})
    step = xd.compile(lambda x: model(x))
    with pytest.raises(CompileError, match="before its first call"):
        step.export(tmp_path, mesh.value)
    step(xd.distribute_tensor(torch.ones(8, 8), mesh))
    step.export(tmp_path, mesh.value, [model], platforms=["tpu"])
    assert json.loads((tmp_path / "signature.json").read_text())["platforms"] == ["tpu"]
    text = (tmp_path / "program.mlir").read_text()
    assert "stablehlo.dot_general" in text
    assert "sdy.sharding" in text
