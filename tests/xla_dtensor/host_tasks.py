"""What processes of a job do in tests: called by name in each of them, see ``tests/hosts.py``."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import Shard

import xla_dtensor as xd
from xla_dtensor.errors import XlaDTensorError

__all__ = ["join_again", "matmul", "places", "scanned_steps", "submeshes"]


def matmul(mesh_shape: tuple[int, ...]) -> dict[str, Any]:
    """A product of sharded matrices, read whole."""
    mesh = xd.init_device_mesh("xla", mesh_shape, mesh_dim_names=("dp", "tp"))
    x = torch.arange(64.0).reshape(8, 8)
    d = xd.distribute_tensor(x, mesh, [Shard(0), Shard(1)])
    y: Any = d @ d.t()
    return {
        "right": torch.equal(y.full_tensor().cpu(), x @ x.t()),
        "shards": [shard.device_id for shard in d.addressable_shards()],
    }


def places(mesh_shape: tuple[int, ...]) -> dict[str, Any]:
    """Where each process is in a mesh, in the ways that PyTorch code asks."""
    mesh = xd.init_device_mesh("xla", mesh_shape, mesh_dim_names=("dp", "tp"))
    return {
        "rank": mesh.get_rank(),
        "ranks": mesh.mesh.tolist(),
        "found": (mesh.mesh == mesh.get_rank()).nonzero().tolist(),
        "coordinate": mesh.get_coordinate(),
        "local": [mesh.get_local_rank("dp"), mesh.get_local_rank("tp")],
        "submeshes": {name: mesh[name].mesh.tolist() for name in ("dp", "tp")},
        "in_submeshes": {name: mesh[name].get_local_rank() for name in ("dp", "tp")},
        "offsets": xd.compute_local_shape_and_global_offset((8, 8), mesh, ("dp", "tp"))[1],
        "part_of_submesh": xd.compute_local_shape_and_global_offset((8,), mesh["tp"], [Shard(0)]),
        "device_ids": mesh.value.device_ids.ravel().tolist(),
        "stock": xd.init_device_mesh("xla", mesh_shape, mesh_dim_names=("dp", "tp")) is mesh,
    }


def submeshes() -> list[list[Any]]:
    """Tensors on each axis of a mesh: tensors of the whole mesh, in every process."""
    mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
    x, found = torch.arange(8.0), []
    for name in ("dp", "tp"):
        d: Any = xd.distribute_tensor(x, mesh[name], [Shard(0)])
        found.append([len(d.addressable_shards()), (d * 2).sum().item(), d.cpu().tolist()])
    return found


def join_again(**arguments: Any) -> str:
    """A second call of init_distributed: what it returns, or its refusal."""
    try:
        return repr(xd.init_distributed(**arguments))
    except XlaDTensorError as error:
        return f"{type(error).__name__}: {error}"


def scanned_steps(reader: int) -> dict[str, Any]:
    """Train scanned layers; between two steps one process alone reads what it holds of a layer."""
    import jax

    from tests.xla_dtensor.nn.scanned_blocks import batch, model, on, placed, scanned, trainer

    mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
    net = placed(scanned(model()), mesh)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    run = xd.compile(trainer(net, optimizer))
    losses, rows, read = [], 0, 0
    for i in range(4):
        losses.append(float(run(on(mesh, batch(i))).item()))
        weight: Any = net.layers[1].wide.weight
        rows += weight._local_tensor._storage.row is not None
        if jax.process_index() == reader:
            assert len(weight.addressable_shards()) == 4
            read += weight._local_tensor._storage.row is None
    parameters = {name: p.full_tensor().cpu().tolist() for name, p in net.named_parameters()}
    return {"losses": losses, "parameters": parameters, "rows": rows, "read": read}
