"""Save and load DTensors with torch.save: the whole value with mesh and placements.

A file holds the global value as a CPU tensor, so it can be read anywhere; loading puts it on the
mesh again. The record is made of plain values only, so that ``torch.load`` accepts it with its
default ``weights_only=True``. (Sharded checkpoints of big models are another matter.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor.placement_types import _StridedShard

from mesh_utils import Mesh
from xla_dtensor.core import Layout
from xla_dtensor.process_ranks import devices_of_ranks, ranks_of_devices
from xla_dtensor.runtimes.registry import get_runtime

if TYPE_CHECKING:
    from xla_dtensor.dtensor import DTensor

__all__ = ["load_dtensor", "reduce_dtensor"]


def reduce_dtensor(tensor: DTensor) -> Any:
    """Return the pickle record of `tensor`. All processes have to call this alike."""
    mesh = tensor._spec.mesh.value
    payload = tensor._local_tensor
    host = payload if payload.is_meta else get_runtime().to_host(payload.detach())
    record = {
        "value": host,
        "root": _mesh_record(mesh.root),
        "axes": None if mesh.is_root else tuple(mesh.axis_names),
        "placements": [_placement_record(p) for p in tensor._spec.placements],
        "requires_grad": tensor.requires_grad,
        "is_parameter": bool(getattr(tensor, "_is_param", False)),
    }
    return (load_dtensor, (record,))


def load_dtensor(record: dict[str, Any]) -> DTensor:
    """Return the DTensor of a record made by :func:`reduce_dtensor`."""
    from xla_dtensor.device_mesh import as_device_mesh
    from xla_dtensor.dtensor import DTensor

    ranks, *rest = record["root"]
    root = Mesh(devices_of_ranks(ranks).tolist(), *rest)
    mesh = as_device_mesh(root if record["axes"] is None else root[record["axes"]])
    placements = tuple(_placement(*fields) for fields in record["placements"])
    value: torch.Tensor = record["value"]
    layout = Layout.from_placements(placements, value.ndim, mesh.value)
    payload = value if value.is_meta else get_runtime().put(value, layout)
    tensor = DTensor._wrapping(payload, mesh, placements, requires_grad=record["requires_grad"])
    if record["is_parameter"]:
        return torch.nn.Parameter(tensor, record["requires_grad"])  # pyright: ignore
    return tensor


def _mesh_record(mesh: Mesh) -> tuple[Any, ...]:
    # Ranks, so that another job, whose processes hold other ids, finds its devices.
    return (
        ranks_of_devices(mesh.device_ids).ravel().tolist(),
        tuple(mesh.mesh_shape),
        tuple(mesh.axis_names),
    )


def _placement_record(placement: Any) -> tuple[Any, ...]:
    if isinstance(placement, _StridedShard):
        return ("strided", placement.dim, placement.split_factor)
    if placement.is_partial():
        return ("partial", placement.reduce_op)
    return ("shard", placement.dim) if placement.is_shard() else ("replicate",)


def _placement(kind: str, *fields: Any) -> Any:
    from torch.distributed.tensor import Partial, Replicate, Shard

    if kind == "strided":
        return _StridedShard(fields[0], split_factor=fields[1])
    return {"partial": Partial, "shard": Shard, "replicate": Replicate}[kind](*fields)


torch.serialization.add_safe_globals([load_dtensor])
