"""One of the processes of `test_two_processes`: python two_processes.py PORT NUM_PROCESSES ID.

Prints one line of JSON. Four CPU devices each; collectives by gloo over the loopback interface.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import jax
import torch
from torch import nn

import xla_dtensor
from mesh_utils import Mesh
from xla_dtensor.dtensor.mesh import as_device_mesh
from xla_dtensor.report import collectives

TOPS = [torch.arange(8.0) * scale for scale in (1, 0.1, 5, 1)]


def main(port: int, num_processes: int, process: int) -> None:
    """Distribute, train for some steps, gather, and print what this process saw."""
    jax.config.update("jax_num_cpu_devices", 4)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes, process)
    runtime = xla_dtensor.get_runtime("jax")
    mesh = xla_dtensor.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))

    host = torch.arange(10 * 6, dtype=torch.float32).reshape(10, 6)
    x = xla_dtensor.distribute_tensor(host, mesh, (("tp", "dp"), None))
    shards = x.addressable_shards()

    torch.manual_seed(0)
    weight = nn.Parameter(xla_dtensor.distribute_tensor(torch.randn(8, 6), mesh, ("tp", "dp")))
    optimizer = torch.optim.AdamW([weight], lr=0.1)

    def train_step(batch: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.linear(batch, weight).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    step = xla_dtensor.compile(train_step)
    losses = []
    for i in range(4):
        batch = xla_dtensor.distribute_tensor(torch.full((16, 6), 1.0 + i), mesh, ("dp", None))
        losses.append(step(batch).item())
    count = xla_dtensor.distribute_tensor(torch.zeros(8), mesh, ("dp",))

    @xla_dtensor.compile
    def halved(x: Any) -> Any:
        count.add_(1)
        while x.max() > 1:
            x = x / 2
        return x

    tops = [halved(xla_dtensor.distribute_tensor(x, mesh, ("dp",))).max().item() for x in TOPS]
    first = [device.id for device in jax.devices() if device.process_index == 0]
    near = as_device_mesh(Mesh(first, (4,), ("near",)))
    doubled: Any = xla_dtensor.distribute_tensor(host, near, ("near", None)) * 2
    print(
        json.dumps(
            {
                "devices": len(runtime.device_ids()),
                "addressable": len(runtime.addressable_device_ids()),
                "shard_rows": sum(shard.data.shape[0] for shard in shards),
                "shards_right": all(torch.equal(s.data, host[s.index]) for s in shards),
                "sharding": str(x.xla_sharding()),
                "full_is_right": torch.equal(x.full_tensor().cpu(), host),
                "repr": repr(x),
                "near_coordinate": near.get_coordinate(),
                "near_shape": list(doubled.shape),
                "near_shards": len(doubled.addressable_shards()),
                "near_value": doubled.cpu().tolist(),
                "losses": losses,
                "tops": tops,
                "count": count.cpu().tolist(),
                "weight": weight.cpu().tolist(),
                "axes": sorted({str(c.axes) for c in collectives(step.hlo(), mesh.value)}),
            }
        )
    )
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
