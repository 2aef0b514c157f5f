"""The rows of a batch that a process loads, where all axes but the tensor parallel one cut rows.

    mesh (fsdp=4, tp=2), two processes of four devices
    process 0   RowGroup(index=0, count=2, devices=2)    rows 0 to 7 of 16
    process 1   RowGroup(index=1, count=2, devices=2)    rows 8 to 15

Trainers load by this (:mod:`xla_dtensor.integrations`), since the axes' names say how a batch lies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed
from torch.distributed.tensor import Replicate
from torch.utils import _pytree as pytree

from xla_dtensor.core.errors import DataError
from xla_dtensor.dtensor.dtensor import DTensor
from xla_dtensor.dtensor.mesh import DeviceMesh
from xla_dtensor.hosts.data.batch import shard_batch
from xla_dtensor.hosts.data.part import process_part
from xla_dtensor.nn.model_plan import row_placements

__all__ = ["MeshLoader", "RowGroup", "put_batch", "row_group"]

dist: Any = torch.distributed


@dataclass(frozen=True)
class RowGroup:
    """Which rows of the global batch a process loads: the `index`-th of `count` equal parts.

    Args:
        index: The part, from 0. Processes that hold the same rows have the same one.
        count: How many different parts there are.
        devices: How many devices cut one part into rows of their own.
    """

    index: int
    count: int
    devices: int


def row_group(mesh: DeviceMesh, *, tp_axis: str = "tp") -> RowGroup:
    """Tell which rows this process loads, for :func:`put_batch`.

    Args:
        mesh: The mesh.
        tp_axis: The axis over which every device has the same rows.

    Returns:
        The part of the rows.

    Raises:
        DataError: The process's rows are no part of equal size, or it has no device of the mesh.

    Example:
        >>> import xla_dtensor as xd
        >>> mesh = xd.init_device_mesh("xla", (4, 2), mesh_dim_names=("fsdp", "tp"))
        >>> row_group(mesh)
        RowGroup(index=0, count=1, devices=4)
    """
    shards = math.prod(
        size
        for size, placement in zip(mesh.shape, row_placements(mesh, tp_axis=tp_axis), strict=True)
        if placement.is_shard()
    )
    (runs,) = process_part((shards,), mesh, row_placements(mesh, tp_axis=tp_axis)).runs
    ((start, stop), *extra_runs) = runs
    devices = stop - start
    if extra_runs or shards % devices or start % devices:
        raise DataError(
            f"The rows of a batch were to be loaded by several processes on a mesh of "
            f"shape={tuple(mesh.shape)}. This process's devices hold the parts {runs} of {shards}, "
            "which are not one run like those of the others. Make the mesh so that the devices of "
            "a process lie side by side, or load with xd.ShardedSampler and xd.shard_batch."
        )
    return RowGroup(start // devices, shards // devices, devices)


def put_batch(batch: Any, mesh: DeviceMesh, *, tp_axis: str = "tp", is_whole: bool = False) -> Any:
    """Put this process's part of a batch on a mesh: rows over all axes but the tensor parallel one.

    Args:
        batch: Tensors of shape (rows, ...) or () in dicts, lists and tuples. DTensors, and what is
            no tensor, stay what they are. All processes pass as many rows; a number that their
            devices do not divide, as in a loader's last batch, goes over torch.distributed's group.
        mesh: The mesh.
        tp_axis: The axis over which every device has the same rows.
        is_whole: Whether each process passes the rows of all.

    Returns:
        The batch with a DTensor for every tensor.

    Raises:
        DataError: The processes' parts do not fit the mesh.

    Example:
        >>> import xla_dtensor as xd
        >>> mesh = xd.init_device_mesh("xla", (4, 2), mesh_dim_names=("fsdp", "tp"))
        >>> put_batch({"x": torch.ones(8, 3), "n": 2}, mesh)["x"].mesh_layout.text()
        '[fsdp, -]'
    """
    rows = row_placements(mesh, tp_axis=tp_axis)
    is_part = not is_whole and dist.is_initialized() and dist.get_world_size() > 1
    group = row_group(mesh, tp_axis=tp_axis) if is_part else RowGroup(0, 1, 1)

    def put(leaf: Any) -> Any:
        if isinstance(leaf, DTensor) or not isinstance(leaf, torch.Tensor):
            return leaf
        if leaf.ndim == 0:
            return shard_batch(leaf, mesh, [Replicate()] * mesh.ndim)
        if group.count > 1 and len(leaf) % group.devices:
            return shard_batch(_rows_of_all(leaf, group), mesh, rows, whole=True)
        return shard_batch(leaf, mesh, rows, whole=is_whole)

    return pytree.tree_map(put, batch)


def _rows_of_all(part: torch.Tensor, group: RowGroup) -> torch.Tensor:
    """Return the rows of all processes: a device's may have been loaded by another process."""
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, (group.index, part))
    parts = dict(said)
    return torch.cat([parts[index] for index in range(group.count)])


class MeshLoader:
    """A trainer's loader whose batches are put on a mesh; all else is the loader's.

    Args:
        loader: Yields this process's rows of each batch.
        put: Puts a batch on the mesh.

    Example:
        >>> import functools, xla_dtensor as xd
        >>> mesh = xd.init_device_mesh("xla", (8,), mesh_dim_names=("fsdp",))
        >>> loader = torch.utils.data.DataLoader(torch.ones(16, 3), batch_size=8)
        >>> put = functools.partial(put_batch, mesh=mesh)
        >>> [batch.mesh_layout.text() for batch in MeshLoader(loader, put)]
        ['[fsdp, -]', '[fsdp, -]']
    """

    def __init__(self, loader: Any, put: Callable[[Any], Any]) -> None:
        self.loader, self.put = loader, put

    def __iter__(self) -> Iterator[Any]:
        return map(self.put, self.loader)

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name in ("loader", "put"):  # of a copy that is not filled yet
            raise AttributeError(name)
        return getattr(self.loader, name)
