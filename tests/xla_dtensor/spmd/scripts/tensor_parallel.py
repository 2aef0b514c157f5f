"""Tensor parallel on a (data, model) mesh: a transformer block, its activations annotated too."""

import numpy as np
import torch
import torch_xla
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from torch import nn

STEPS, BATCH, LENGTH, DIM, HEADS = 6, 8, 12, 32, 4

xr.use_spmd()
device = torch_xla.device()
num_devices = xr.global_runtime_device_count()
mesh = xs.Mesh(np.arange(num_devices), (2, num_devices // 2), ("data", "model"))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.out = nn.Linear(DIM, DIM)
        self.up = nn.Linear(DIM, 4 * DIM)
        self.down = nn.Linear(4 * DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).view(BATCH, LENGTH, 3, HEADS, -1).unbind(2)
        xs.mark_sharding(q, mesh, ("data", None, "model", None))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / (DIM // HEADS) ** 0.5
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril().to(device)
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        attended = torch.einsum("bhqk,bkhd->bqhd", weights, v).flatten(2)
        x = x + self.out(attended)
        x = xs.mark_sharding_with_gradients(x, mesh, ("data", None, None))
        hidden = self.up(x)
        xs.mark_sharding(hidden, mesh, ("data", None, "model"))
        return x + self.down(nn.functional.gelu(hidden))


torch.manual_seed(0)
model = Block()
model = model.to(device)
xs.mark_sharding(model.qkv.weight, mesh, ("model", "data"))
xs.mark_sharding(model.qkv.bias, mesh, ("model",))
xs.mark_sharding(model.out.weight, mesh, (None, "model"))
xs.mark_sharding(model.up.weight, mesh, ("model", None))
xs.mark_sharding(model.down.weight, mesh, (None, ("data", "model")))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)


@torch_xla.compile
def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


for _ in range(STEPS):
    x = torch.randn(BATCH, LENGTH, DIM).to(device)
    y = torch.randn(BATCH, LENGTH, DIM).to(device)
    xs.mark_sharding(x, mesh, ("data", None, None))
    xs.mark_sharding(y, mesh, ("data", None, None))
    print("loss", train_step(x, y).item())  # pyright: ignore[reportCallIssue]

for name, parameter in model.named_parameters():
    if not name.startswith("norm") and (parameter.ndim == 2 or name == "qkv.bias"):
        print("sharding", name, xs.wrap_if_sharded(parameter).sharding_spec)
