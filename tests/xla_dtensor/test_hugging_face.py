"""Hugging Face's models, unmodified, trained in one compiled step on a (2, 4) mesh."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Placement, Replicate, Shard

import xla_dtensor as xd
from tests.xla_dtensor.hugging_face import MODELS, Example, made

hf = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("runtime")


def lying(parameter: torch.Tensor) -> list[Placement]:
    """Every matrix cut over both axes where its sizes divide; XLA has to make sense of the rest."""
    cut: list[Placement] = [Replicate(), Replicate()]
    if parameter.ndim >= 2:
        for axis, (dim, size) in enumerate(((parameter.ndim - 1, 2), (parameter.ndim - 2, 4))):
            if parameter.shape[dim] % size == 0:
                cut[axis] = Shard(dim)
    return cut


def distributed(model: Any, mesh: xd.DeviceMesh) -> Any:
    def place(name: str, module: nn.Module, mesh: Any) -> None:
        for kind, parameter in list(module.named_parameters(recurse=False)):
            lies: Any = xd.distribute_tensor(parameter, mesh, lying(parameter))
            setattr(module, kind, nn.Parameter(lies))

    xd.distribute_module(model, mesh, place)
    model.tie_weights()
    return model


def training(example: Example, model: Any, steps: int) -> tuple[Any, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)

    def step(*batch: torch.Tensor) -> torch.Tensor:
        loss = example.loss(model, *batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step, scheduler


@pytest.mark.only_on("jax")
@pytest.mark.parametrize(
    "name",
    [name if name == "llama" else pytest.param(name, marks=pytest.mark.slow) for name in MODELS],
)
def test_thirty_steps_equal_plain_pytorch(mesh: xd.DeviceMesh, name: str) -> None:
    steps = 30
    example = made(name, hf)
    plain = copy.deepcopy(example.model)
    model = distributed(example.model, mesh)
    step, scheduler = training(example, model, steps)
    plain_step, plain_scheduler = training(example, plain, steps)
    compiled: Any = xd.compile(step)
    losses, wanted = [], []
    for i in range(steps):
        batch = example.batches[i % len(example.batches)]
        cut = [xd.distribute_tensor(t, mesh, [Shard(0), Replicate()]) for t in batch]
        losses.append(compiled(*cut).item())
        wanted.append(plain_step(*batch).item())
        scheduler.step()
        plain_scheduler.step()
    assert wanted[-1] < wanted[0]
    assert losses == pytest.approx(wanted, abs=1e-5)
    for (path, given), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(
            given.full_tensor().cpu(),
            expected.detach(),
            atol=1e-4,
            rtol=0,
            msg=lambda text, path=path: f"{path}: {text}",
        )
    assert compiled.stats()["traces"] <= 2


@pytest.mark.only_on("jax")
@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_thirty_steps_under_autocast(mesh: xd.DeviceMesh, name: str) -> None:
    """In bfloat16 both round, each where its sums end.

    Where two experts score alike, rounding decides which of them a token goes to.
    """
    steps = 30
    example = made(name, hf)
    plain = copy.deepcopy(example.model)
    model = distributed(example.model, mesh)
    step, plain_step = (training(example, m, steps)[0] for m in (model, plain))

    def cast(*batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return step(*batch)

    compiled: Any = xd.compile(cast)
    off = []
    for i in range(steps):
        batch = example.batches[i % len(example.batches)]
        cut = [xd.distribute_tensor(t, mesh, [Shard(0), Replicate()]) for t in batch]
        with torch.autocast("cpu", torch.bfloat16):
            wanted = plain_step(*batch).item()
        off.append(abs(compiled(*cut).item() - wanted) / abs(wanted))
    assert "bf16[" in compiled.hlo()
    assert max(off) < (3e-3 if name == "mixtral" else 2e-3)
