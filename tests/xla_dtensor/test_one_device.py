"""A mesh of one device: whatever is told about placements changes nothing, and nothing fails."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import xla_dtensor as xd
from mesh_utils import Mesh
from tests.xla_dtensor.nn.scanned_blocks import Block
from tests.xla_dtensor.residual_network import residual_network
from xla_dtensor.dtensor.mesh import as_device_mesh
from xla_dtensor.runtimes import Runtime

pytestmark = pytest.mark.only_on("jax")  # torch_xla's programs run on all devices
ON_ROWS = [Shard(0), Replicate()]


@pytest.fixture(scope="module")
def alone(runtime: Runtime) -> xd.DeviceMesh:
    return as_device_mesh(Mesh.arange((1, 1), ("dp", "tp")))


class Moved(nn.Module):
    """An embedding whose result is moved twice, and two blocks."""

    def __init__(self, scanned: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 8)
        blocks = nn.ModuleList(Block() for _ in range(2))
        self.blocks: Any = xd.scan_layers(blocks, remat="full") if scanned else blocks
        self.scanned = scanned

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x: Any = self.table(tokens)
        for placements in ([Shard(0), Shard(1)], ON_ROWS):
            x = x.redistribute(placements=placements) if isinstance(x, xd.DTensor) else x
        if self.scanned:
            return self.blocks(x)
        for block in self.blocks:
            x = block(x)
        return x


def of_tokens() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(12, (4, 6)), torch.randint(8, (4, 6))


def of_images() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(4, 3, 32, 32), torch.randint(10, (4,))


MODELS = {
    "moved": (lambda: Moved(scanned=False), of_tokens),
    "scanned": (lambda: Moved(scanned=True), of_tokens),
    "images": (residual_network, of_images),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_step_trains_as_plain_torch(alone: xd.DeviceMesh, name: str) -> None:
    torch.manual_seed(0)
    make, batch_of = MODELS[name]
    plain = make()
    ours = xd.distribute_module(copy.deepcopy(plain), alone)
    batch = batch_of()
    losses: list[list[float]] = []
    for model in (plain, ours):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

        def step(
            x: torch.Tensor, y: torch.Tensor, model: Any = model, optimizer: Any = optimizer
        ) -> torch.Tensor:
            loss = F.cross_entropy(model(x).flatten(0, -2), y.flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        run: Any = step if model is plain else xd.compile(step)
        given = (
            batch if model is plain else [xd.distribute_tensor(t, alone, ON_ROWS) for t in batch]
        )
        losses.append([run(*given).item() for _ in range(3)])
    assert losses[1] == pytest.approx(losses[0], abs=1e-4 if name == "images" else 1e-5)
