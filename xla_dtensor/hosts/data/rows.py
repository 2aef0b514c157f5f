"""The rows of a batch that a process loads, where all axes but the tensor parallel one cut rows.

    mesh (fsdp=4, tp=2), two processes of four devices
    process 0   RowGroup(index=0, count=2, devices=2)    rows 0 to 7 of 16
    process 1   RowGroup(index=1, count=2, devices=2)    rows 8 to 15

Trainers load by this (:mod:`xla_dtensor.integrations`), since the axes' names say how a batch lies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import Replicate
from torch.utils import _pytree as pytree

from xla_dtensor.core.errors import DataError
from xla_dtensor.dtensor.dtensor import DTensor
from xla_dtensor.dtensor.mesh import DeviceMesh
from xla_dtensor.hosts.data.batch import shard_batch
from xla_dtensor.hosts.data.part import process_part
from xla_dtensor.nn.model_plan import row_placements

__all__ = ["RowGroup", "put_batch", "row_group"]


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
    ((start, stop), *others) = runs
    devices = stop - start
    if others or shards % devices or start % devices:
        raise DataError(
            f"The rows of a batch were to be loaded by several processes on a mesh of "
            f"shape={tuple(mesh.shape)}. This process's devices hold the parts {runs} of {shards}, "
            "which are not one run like those of the others. Make the mesh so that the devices of "
            "a process lie side by side, or load with xd.ShardedSampler and xd.shard_batch."
        )
    return RowGroup(start // devices, shards // devices, devices)


def put_batch(batch: Any, mesh: DeviceMesh, *, tp_axis: str = "tp") -> Any:
    """Put this process's part of a batch on a mesh: rows over all axes but the tensor parallel one.

    Args:
        batch: Tensors of shape (rows, ...) or () in dicts, lists and tuples. DTensors, and what is
            no tensor, stay what they are.
        mesh: The mesh.
        tp_axis: The axis over which every device has the same rows.

    Returns:
        The batch with a DTensor for every tensor.

    Raises:
        DataError: The processes' parts do not fit the mesh: one of several processes has rows that
            its devices do not divide.

    Example:
        >>> import xla_dtensor as xd
        >>> mesh = xd.init_device_mesh("xla", (4, 2), mesh_dim_names=("fsdp", "tp"))
        >>> put_batch({"x": torch.ones(8, 3), "n": 2}, mesh)["x"].mesh_layout.text()
        '[fsdp, -]'
    """
    rows = row_placements(mesh, tp_axis=tp_axis)

    def put(leaf: Any) -> Any:
        if isinstance(leaf, DTensor) or not isinstance(leaf, torch.Tensor):
            return leaf
        try:
            return shard_batch(leaf, mesh, rows if leaf.ndim else [Replicate()] * mesh.ndim)
        except DataError as error:
            raise DataError(
                f"{error} Of a loader the last short batch can be left out: drop_last=True, or "
                "dataloader_drop_last=True of TrainingArguments."
            ) from None

    return pytree.tree_map(put, batch)
