"""Thirty steps under autocast to bfloat16, beside plain torch under the same autocast.

Both round to bfloat16, each where its sums end: a sharded sum ends in parts, and XLA keeps what
lies between fused operations in float32. Where a last bit grows (batch norms, two experts that
score alike) both are further than 2e-3 from a run in float32, and so from each other.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import xla_dtensor as xd
from tests.xla_dtensor.hugging_face import MODELS, distributed, made, training
from tests.xla_dtensor.models.jobs import JOBS
from tests.xla_dtensor.residual_network import residual_network
from xla_dtensor.models.training import make

pytestmark = [
    pytest.mark.only_on("jax"), pytest.mark.thorough, pytest.mark.usefixtures("runtime")
]  # fmt: skip
STEPS = 30
Step = Callable[..., torch.Tensor]


class Trainee(NamedTuple):
    """What is trained: plain under autocast, plain in float32, and on a mesh of (2, 4)."""

    plain: Step
    exact: Step
    sharded: Step
    batches: list[tuple[torch.Tensor, ...]]


def of_hugging_face(name: str, mesh: xd.DeviceMesh) -> Trainee:
    example = made(name, pytest.importorskip("transformers"))
    twins = [copy.deepcopy(example.model) for _ in range(2)]
    models = *twins, distributed(example.model, mesh)
    plain, exact, sharded = (training(example, model, STEPS)[0] for model in models)
    return Trainee(plain, exact, sharded, list(example.batches))


def of_our_own(name: str, mesh: xd.DeviceMesh) -> Trainee:
    torch.manual_seed(0)
    job, sizes = JOBS[name], {"sequence": 32, "per_group": 4, "learning_rate": 1e-3}
    ours = make(name, job, dtype=torch.float32, device="cpu", **sizes)
    mesh = xd.init_device_mesh("xla", mesh.shape, mesh_dim_names=job.axis_names)
    model = xd.shard_module(copy.deepcopy(ours.model), mesh, ours.rules)
    batches: list[Any] = [tuple(t.roll(k, 1) for t in ours.inputs) for k in (0, 5, 9)]
    plain, exact = (ours.make_step(one, None) for one in (ours.model, copy.deepcopy(ours.model)))
    return Trainee(plain, exact, ours.make_step(model, mesh), batches)


def of_images(name: str, mesh: xd.DeviceMesh) -> Trainee:
    network = residual_network()
    twins = [copy.deepcopy(network) for _ in range(2)]
    models = *twins, xd.distribute_module(network, mesh)
    plain, exact, sharded = map(step_on_images, models)
    batches: list[Any] = [(torch.randn(16, 3, 32, 32), torch.randint(10, (16,))) for _ in range(3)]
    return Trainee(plain, exact, sharded, batches)


def step_on_images(model: nn.Module) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


MAKERS: dict[str, Callable[[str, xd.DeviceMesh], Trainee]] = {
    **dict.fromkeys(MODELS, of_hugging_face),
    **dict.fromkeys(JOBS, of_our_own),
    "residual": of_images,
}


@pytest.mark.parametrize("name", MAKERS)
def test_thirty_steps(mesh: xd.DeviceMesh, name: str) -> None:
    trainee = MAKERS[name](name, mesh)

    def cast(*batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return trainee.sharded(*batch)

    compiled: Any = xd.compile(cast)
    off, rounding = [], []
    for i in range(STEPS):
        batch = trainee.batches[i % len(trainee.batches)]
        cut = [xd.distribute_tensor(t, mesh, [Shard(0), Replicate()]) for t in batch]
        with torch.autocast("cpu", torch.bfloat16):
            wanted = trainee.plain(*batch).item()
        off.append(abs(compiled(*cut).item() - wanted) / abs(wanted))
        rounding.append(abs(trainee.exact(*batch).item() - wanted) / abs(wanted))
    assert "bf16[" in compiled.hlo()
    assert compiled.stats()["traces"] <= 2
    print(f"{name}: relative difference {max(off):.1e}, of rounding {max(rounding):.1e}")
    assert max(off) < max(2e-3, 2 * max(rounding))
