"""Border: how a global tensor is cut into local views, and how they are put together.

Below autograd, on payloads. A worked example, 10 rows as [Partial(), Shard(0)] on (dp=2, tp=4)::

    (10,)        the payload: already the sum over dp
    (2, 10)      one row per device of dp: [the value, zeros], whose sum is the value
    (2, 12)      padded, because 4 does not divide 10
    local (3,)   entered with the layout [dp, tp], the leading dim dropped; sizes 3, 3, 3, 1 on tp

and back the same way: leave as (2, 12), sum over the leading dim, drop two rows.

Which rows a device has is PyTorch's rule: `torch.chunk` once per mesh axis. Where these are no
tiles of XLA's (several axes on one uneven dim, strided shards with a gap) the rows are first put in
the order of the devices, which moves data.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from math import prod
from typing import Any

import numpy as np
import torch

from mesh_utils import Axis
from xla_dtensor.core import Layout, ManualRegion
from xla_dtensor.core.entries import entry_axis
from xla_dtensor.core.local_shape import local_shape, torch_indices
from xla_dtensor.core.spanning import region_of
from xla_dtensor.local_uneven import Uneven
from xla_dtensor.runtimes.registry import get_runtime

__all__ = ["Border", "border"]

aten = torch.ops.aten
_REDUCTIONS: dict[str, Any] = {
    "sum": aten.sum.dim_IntList,
    "avg": aten.mean.dim,
    "max": aten.amax.default,
    "min": aten.amin.default,
}
_NEUTRAL = {"sum": 0.0, "product": 1.0}


@dataclass(frozen=True)
class _Dim:
    """How one dim is cut.

    Args:
        axes: The axes that cut it, outermost first.
        tile: Its size on the first device.
        rows: The global positions in the order of the devices, -1 for padding; None where XLA's
            tiles are the shards.
    """

    axes: tuple[Axis, ...]
    tile: int
    rows: np.ndarray[Any, Any] | None


class Border:
    """What lies between the global tensors of one layout and shape, and their local views.

    Args:
        layout: Of the global tensor, on the mesh that ``to_local`` refers to.
        shape: The global shape.
    """

    def __init__(self, layout: Layout, shape: tuple[int, ...]) -> None:
        self.layout, self.shape = layout, shape
        self.region: ManualRegion = region_of(layout.mesh)
        self.dims = [_dim(layout, shape, dim) for dim in range(len(shape))]
        axes = (*((axis,) for axis, _ in layout.partial), *(dim.axes for dim in self.dims))
        self._inside = Layout(self.region.mesh, axes)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of the first device's shard, which is the longest.

        Not always with a gap, where a strided shard has no axis for its outer cut; but nothing that
        has one comes here, since no DTensor lies so and ``from_local`` refuses it.
        """
        return tuple(dim.tile for dim in self.dims)

    @cached_property
    def uneven(self) -> Uneven | None:
        """How much of each device's array is real."""
        mesh, region = self.layout.mesh, self.region
        names = tuple(mesh.axis_names)
        tables: dict[int, list[int]] = {dim: [] for dim in range(len(self.shape))}
        if all(d.tile * self._pieces(n) == self.shape[n] for n, d in enumerate(self.dims)):
            return None
        for place in product(*map(range, region.sizes)):
            at = dict(zip(region.axes, place, strict=True))
            coordinate = tuple(at[name] for name in names)
            sizes = local_shape(self.layout, self.shape, coordinate, rule="torch").shape
            for dim, size in enumerate(sizes):
                tables[dim].append(size)
        return Uneven.of({dim: tuple(table) for dim, table in tables.items()})

    @property
    def varying(self) -> frozenset[Axis]:
        """The axes along which the shards differ."""
        cut = {axis for dim in self.dims for axis in dim.axes}
        return frozenset(cut | {axis for axis, op in self.layout.partial if op in _NEUTRAL})

    @property
    def replicated(self) -> frozenset[Axis]:
        """The axes along which all devices hold the same."""
        used = {axis for dim in self.dims for axis in dim.axes}
        return frozenset(self.region.axes) - used - {axis for axis, _ in self.layout.partial}

    def _pieces(self, dim: int) -> int:
        return prod(self.region.mesh.size(axis) for axis in self.dims[dim].axes)

    def cut(self, payload: torch.Tensor) -> torch.Tensor:
        """Return the local payload of a global one."""
        runtime = get_runtime()
        run = runtime.run_op
        for number, dim in enumerate(self.dims):
            if dim.rows is not None:
                rows = torch.from_numpy(np.maximum(dim.rows, 0))
                payload = run(aten.index_select.default, (payload, number, rows), {})
        missing = [
            dim.tile * self._pieces(number) - payload.shape[number]
            for number, dim in enumerate(self.dims)
        ]
        if any(missing):
            behind = [pad for amount in reversed(missing) for pad in (0, amount)]
            payload = run(aten.constant_pad_nd.default, (payload, behind), {})
        for axis, op in reversed(self.layout.partial):
            payload = _parts(run, payload, self.region.mesh.size(axis), op)
        local = runtime.enter_local(payload, self._inside, self.region)
        for _ in self.layout.partial:
            local = runtime.run_local_op(aten.squeeze.dim, (local, 0), {})
        return local

    def joined(self, local: torch.Tensor) -> torch.Tensor:
        """Return the global payload of a local one; reductions are made."""
        runtime = get_runtime()
        run = runtime.run_op
        for _ in self.layout.partial:
            local = runtime.run_local_op(aten.unsqueeze.default, (local, 0), {})
        payload = runtime.leave_local(local, self._inside, self.region)
        for _, op in self.layout.partial:
            # PyTorch would make int64 of the sum of int32.
            kept = {"dtype": payload.dtype} if op in _NEUTRAL else {}
            payload = (
                run(aten.prod.dim_int, (payload, 0), kept)
                if op == "product"
                else run(_REDUCTIONS[op], (payload, [0]), kept)
            )
        for number, dim in enumerate(self.dims):
            if dim.rows is not None:
                order = np.argsort(np.where(dim.rows < 0, dim.rows.size, dim.rows), kind="stable")
                order = torch.from_numpy(order[: self.shape[number]])
                payload = run(aten.index_select.default, (payload, number, order), {})
            elif payload.shape[number] != self.shape[number]:
                cut = (payload, number, 0, self.shape[number])
                payload = run(aten.slice.Tensor, cut, {})
        return payload


@lru_cache(maxsize=4096)
def border(layout: Layout, shape: tuple[int, ...]) -> Border:
    """Return the border of a layout and a global shape; the same object each time."""
    return Border(layout, shape)


def _dim(layout: Layout, shape: tuple[int, ...], dim: int) -> _Dim:
    mesh = layout.mesh
    named = [entry_axis(entry) for entry in layout.dims[dim]]
    used = [axis for axis in mesh.axis_names if axis in named]
    first = local_shape(layout, shape, (0,) * mesh.ndim, rule="torch")
    pieces = prod(mesh.size(axis) for axis in used)
    whole = tuple(axis for axis in named if axis is not None)
    tiles = len(whole) == len(named) == len(used)
    if tiles and (len(used) < 2 or shape[dim] % max(pieces, 1) == 0):
        return _Dim(whole, first.shape[dim], None)
    rows: list[Any] = []
    for place in product(*(range(mesh.size(axis)) for axis in used)):
        at = dict(zip(used, place, strict=True))
        coordinate = tuple(at.get(axis, 0) for axis in mesh.axis_names)
        mine = torch_indices(layout, shape, coordinate)[dim]
        rows.append(np.pad(mine, (0, first.shape[dim] - len(mine)), constant_values=-1))
    return _Dim(tuple(used), first.shape[dim], np.concatenate(rows))


def _parts(run: Any, payload: torch.Tensor, count: int, op: str) -> torch.Tensor:
    """Return [count, *shape]: parts of which the reduction is `payload`."""
    one = run(aten.unsqueeze.default, (payload, 0), {})
    if op not in _NEUTRAL:
        return run(aten.expand.default, (one, [count, *payload.shape]), {})
    behind = [*(0 for _ in range(2 * payload.ndim)), 0, count - 1]
    return run(aten.constant_pad_nd.default, (one, behind, _NEUTRAL[op]), {})
