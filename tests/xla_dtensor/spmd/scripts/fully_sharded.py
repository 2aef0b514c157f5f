"""As FSDP does it: parameters and inputs are cut over the same axis, and so is AdamW's state."""

import numpy as np
import torch
import torch_xla
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from torch import nn

STEPS, BATCH = 6, 16

xr.use_spmd()
device = torch_xla.device()
num_devices = xr.global_runtime_device_count()
mesh = xs.Mesh(np.arange(num_devices), (num_devices,), ("fsdp",))
xs.set_global_mesh(mesh)


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 24)
        self.up = nn.Linear(24, 96)
        self.down = nn.Linear(96, 24)
        self.head = nn.Linear(24, 64, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        hidden = hidden + self.down(nn.functional.gelu(self.up(hidden)))
        return self.head(hidden)


torch.manual_seed(0)
model = Network()
model = model.to(device)
for parameter in model.parameters():
    if parameter.ndim == 2:
        xs.mark_sharding(parameter, mesh, ("fsdp", None))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

for _ in range(STEPS):
    tokens = torch.randint(64, (BATCH, 10))
    inputs = tokens[:, :-1].to(device)
    targets = tokens[:, 1:].to(device)
    xs.mark_sharding(inputs, mesh, ("fsdp", None))
    xs.mark_sharding(targets, mesh, ("fsdp", None))
    logits = model(inputs)
    xs.mark_sharding(logits, mesh, ("fsdp", None, None))
    loss = nn.functional.cross_entropy(logits.transpose(1, 2), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    torch_xla.sync()
    print("loss", loss.item())

for name, parameter in model.named_parameters():
    if parameter.ndim == 2:
        print("sharding", name, xs.wrap_if_sharded(parameter).sharding_spec)
        moment = optimizer.state[parameter]["exp_avg"]
        print("sharding", f"{name}.exp_avg", xs.XLAShardedTensor(moment).sharding_spec)
