"""Which part of a global tensor the devices of one process hold.

    mesh (dp=4, tp=2) over 2 processes of 4 devices, a batch of shape (8, 6)

    [Shard(0), Replicate()]     process 0: rows 0 to 3, process 1: rows 4 to 7
    [Replicate(), Shard(0)]     each process all rows
    [Shard(1), Shard(0)]        process 0: columns 0 to 3 of all rows (tiles of 2, 2, 2)

A part is a product of *runs*, one tuple of (start, stop) per dim. The devices of a process need not
be neighbours, so that there may be several runs along a dim; a process's own tensor then holds them
joined. Where a process's shards are no such product, its part is the smallest one that covers them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from mesh_utils import Mesh
from xla_dtensor.core import Layout
from xla_dtensor.core.argument_types import argument_types
from xla_dtensor.core.errors import DataError
from xla_dtensor.dtensor.mesh import as_device_mesh, current_mesh, mesh_text
from xla_dtensor.dtensor.redistribute import checked_placements
from xla_dtensor.hosts.data.exchange import own_process, process_of_device
from xla_dtensor.runtimes.registry import get_runtime

__all__ = ["ProcessPart", "part_of", "process_part", "tiles_of"]

Run: TypeAlias = tuple[int, int]
"""(start, stop): consecutive positions along a dim."""


@dataclass(frozen=True)
class ProcessPart:
    """What one process holds of a global tensor.

    Args:
        global_shape: The whole tensor's shape.
        runs: Per dim the positions that the process holds, as (start, stop), ascending.
        blocks: What each of its devices holds, one slice per dim into the whole, by device id.
    """

    global_shape: tuple[int, ...]
    runs: tuple[tuple[Run, ...], ...]
    blocks: dict[int, tuple[slice, ...]] = field(repr=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the process's own tensor."""
        return tuple(sum(stop - start for start, stop in runs) for runs in self.runs)

    def positions(self, dim: int = 0) -> NDArray[np.int64]:
        """Return the positions along a dim, e.g. the rows to read."""
        runs = self.runs[dim]
        return np.concatenate([np.arange(*run, dtype=np.int64) for run in (*runs, (0, 0))])

    def take(self, whole: Any, dims: Iterable[int] | None = None) -> Any:
        """Cut the process's own tensor out of one that is whole along `dims`; all when None."""
        for dim in range(len(self.runs)) if dims is None else dims:
            runs = self.runs[dim]
            if runs == ((0, self.global_shape[dim]),):
                continue
            pieces = [whole.narrow(dim, start, stop - start) for start, stop in runs]
            if len(pieces) == 1:
                whole = pieces[0]
            else:
                whole = torch.cat(pieces, dim) if pieces else whole.narrow(dim, 0, 0)
        return whole

    def own_index(self, block: tuple[slice, ...]) -> tuple[slice, ...]:
        """Return where a device's block lies in the process's own tensor."""
        return tuple(_own_slice(runs, part) for runs, part in zip(self.runs, block, strict=True))

    def text(self, dim: int = 0) -> str:
        """Return the positions along a dim as a short text, e.g. ``0:4,8:12``."""
        return ",".join(f"{start}:{stop}" for start, stop in self.runs[dim])


def _own_slice(runs: tuple[Run, ...], part: slice) -> slice:
    before = 0
    for start, stop in runs:
        if start <= part.start and part.stop <= stop and part.start < part.stop:
            return slice(before + part.start - start, before + part.stop - start)
        before += stop - start
    return slice(0, 0)


@argument_types
def process_part(
    global_shape: Sequence[int], mesh: Any = None, placements: Any = None
) -> ProcessPart:
    """Tell which part of a global tensor this process has to read.

    Args:
        global_shape: The shape of the whole.
        mesh: The mesh; that of the open ``with mesh:`` block when None.
        placements: One per mesh axis, or one alias entry per dim, e.g. ``("dp", None)``.

    Returns:
        The part: `runs` per dim, `positions(dim)`, and the `shape` of the process's own tensor.

    Raises:
        DistributeError: Wrong mesh or placements.
        DataError: The process holds no device of the mesh.

    Example:
        >>> from torch.distributed.tensor import Shard
        >>> import xla_dtensor as xd
        >>> mesh = xd.init_device_mesh("xla", (8,), mesh_dim_names=("dp",))
        >>> xd.process_part((16, 4), mesh, [Shard(0)]).runs
        (((0, 16),), ((0, 4),))
    """
    device_mesh = current_mesh("process_part") if mesh is None else as_device_mesh(mesh)
    shape = tuple(int(extent) for extent in global_shape)
    checked = checked_placements("process_part", placements, device_mesh, len(shape), partial=False)
    return part_of(shape, Layout.from_placements(checked, len(shape), device_mesh.value))


def part_of(shape: tuple[int, ...], layout: Layout, process: int | None = None) -> ProcessPart:
    """Return a process's part under a layout; this process's when None."""
    own = own_process() if process is None else process
    return _part(shape, layout, get_runtime().root(layout.mesh), own)


def _devices_of(process: int) -> frozenset[int]:
    return frozenset(d for d, holder in process_of_device().items() if holder == process)


@lru_cache(maxsize=1024)
def _part(shape: tuple[int, ...], layout: Layout, root: Mesh, process: int) -> ProcessPart:
    sharding = layout.op_sharding(root)
    own = _devices_of(process)
    blocks = {
        int(device): sharding.shard_index(place, shape)
        for place, device in enumerate(root.device_ids.ravel().tolist())
        if int(device) in own
    }
    if not blocks:
        raise DataError(
            f"A batch of shape={shape} was to be fed to the mesh {mesh_text(layout.mesh)} by "
            f"process {process}. That process holds no device of the mesh, so it has no part of "
            "the batch. Feed it in the processes that do."
        )
    runs = tuple(
        _joined({(index[dim].start, index[dim].stop) for index in blocks.values()})
        for dim in range(len(shape))
    )
    return ProcessPart(shape, runs, blocks)


def _joined(pieces: Iterable[Run]) -> tuple[Run, ...]:
    runs: list[Run] = []
    for start, stop in sorted(piece for piece in pieces if piece[0] < piece[1]):
        if runs and start <= runs[-1][1]:
            runs[-1] = (runs[-1][0], max(stop, runs[-1][1]))
        else:
            runs.append((start, stop))
    return tuple(runs)


def tiles_of(layout: Layout, dim: int) -> tuple[int, int]:
    """Return into how many tiles a dim is cut, and how many of them this process holds."""
    count = layout.num_shards(dim)
    shape = tuple(layout.num_shards(d) for d in range(layout.ndim))
    return count, part_of(shape, layout).shape[dim]
