"""Data parallel, as torch_xla's guide has it: the loader cuts the batch over all devices."""

import torch
import torch_xla.core.xla_model as xm
import torch_xla.distributed.parallel_loader as pl
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from torch import nn

STEPS, BATCH = 6, 16

xr.use_spmd()
device = xm.xla_device()
num_devices = xr.global_runtime_device_count()
mesh = xs.Mesh(list(range(num_devices)), (num_devices, 1), ("data", "model"))

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 3))
model = model.to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

samples = [torch.randn(BATCH, 12) for _ in range(STEPS)]
batches = [(x, x[:, :3].sin()) for x in samples]
rows = xs.ShardingSpec(mesh, ("data", None))
loader = pl.MpDeviceLoader(batches, device, input_sharding=rows)

for x, y in loader:
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    xm.optimizer_step(optimizer)
    xm.mark_step()
    print("loss", loss.item())

print("sharding", "x", xs.XLAShardedTensor(x).sharding_spec)
