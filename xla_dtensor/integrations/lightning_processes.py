"""The processes of a job, as Lightning's loops ask a strategy for them.

    process 0 of 2, mesh (fsdp=8)      global_rank 0, world_size 2; a loader's rows 0, 2, 4, ...
    process 1 of 2                     global_rank 1, world_size 2; its rows 1, 3, 5, ...

To Lightning a process is a rank, as under DDP: rank 0 writes logs and removes checkpoints, and a
loader of a data set is given a ``DistributedSampler``. Which rows a process loads follows from the
mesh: where an axis ``tp`` lies over several processes, they load the same ones.

What a step computes is of all rows, in every process. So nothing that lies on the mesh is reduced
or gathered; what is plain goes over torch.distributed's group, as
:func:`xla_dtensor.init_distributed` makes it.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed
from lightning.fabric.utilities.distributed import (
    _all_gather_ddp_if_available,
    _sync_ddp_if_available,
)
from lightning.fabric.utilities.rank_zero import rank_zero_only

from xla_dtensor.dtensor.dtensor import DTensor
from xla_dtensor.dtensor.mesh import DeviceMesh
from xla_dtensor.hosts.data.rows import row_group

__all__ = ["ProcessOfJob"]

dist: Any = torch.distributed


class ProcessOfJob:
    """What a strategy of Lightning's says of this process; stands before its class.

    Attributes:
        mesh: The mesh.
        global_rank: Which process this is.
        local_rank: Which of those on its machine.
        node_rank: Which machine it is on.
        world_size: How many processes there are.
    """

    mesh: DeviceMesh
    global_rank = local_rank = node_rank = 0
    world_size = 1

    def join(self) -> None:
        """Take this process's numbers from the job, and let it write where it is the first."""
        if dist.is_available() and dist.is_initialized():
            self.global_rank, self.world_size = dist.get_rank(), dist.get_world_size()
            self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
            self.node_rank = self.global_rank // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        # Lightning reads it from RANK when it is imported, which may be before the processes met.
        rank_zero_only.rank = self.global_rank

    @property
    def is_global_zero(self) -> bool:
        """Whether this process is the first."""
        return self.global_rank == 0

    @property
    def is_distributed(self) -> bool:
        """Whether there are others."""
        return self.world_size > 1

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any] | None:
        """Which rows this process loads; None where it loads all, as the loader has them."""
        if not self.is_distributed:
            return None
        rows = row_group(self.mesh)
        return {"num_replicas": rows.count, "rank": rows.index}

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for the others."""
        if self.is_distributed:
            dist.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return what one process has."""
        objects = [obj]
        if self.is_distributed:
            dist.broadcast_object_list(objects, src)
        return objects[0]

    def all_gather(self, tensor: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Return plain tensors of all processes, stacked; a DTensor has the rows of all."""
        if isinstance(tensor, DTensor) or not self.is_distributed:
            return tensor
        return _all_gather_ddp_if_available(tensor, group, sync_grads)

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce what is plain over the processes; a DTensor is of all rows."""
        if isinstance(tensor, DTensor) or not self.is_distributed:
            return tensor
        return _sync_ddp_if_available(tensor, group, reduce_op)

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """Return what was logged with ``sync_dist=True``: means are over the rows of all."""
        return tensor

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether all processes, or any, say yes."""
        said = [decision] * self.world_size
        if self.is_distributed:
            dist.all_gather_object(said, decision)
        return min(said) if all else max(said)
