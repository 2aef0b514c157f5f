"""What one device holds of a tensor: shape, offset, padding; by XLA's rule and by PyTorch's.

Even dims are the same for both. On an uneven dim

* XLA cuts once: tiles of ceil(extent / number of tiles) elements, the last ones shorter or empty.
* PyTorch cuts once per mesh axis, each time the piece that is left (`torch.chunk`), in placement
  order.

One axis on a dim gives the same shards. Several do not: 5 rows over (dp=2, tp=2) are tiles of 2, 2,
1, 0 for XLA, and for PyTorch first 3 + 2, then 2, 1, 1, 1. A strided placement is read as PyTorch's
`_StridedShard` says it: cut into split_factor chunks, then cut each of them, and join (torch 2.13;
torch 2.9 cut at once into the product, which differs on some uneven dims).

    >>> from mesh_utils import Mesh
    >>> layout = Layout.parse("[dp.tp]", Mesh.arange((2, 2), ("dp", "tp")))
    >>> local_shape(layout, (5,), (0, 1))
    LocalShape(shape=(2,), offset=(2,), padding=(0,))
    >>> local_shape(layout, (5,), (0, 1), rule="torch")
    LocalShape(shape=(1,), offset=(2,), padding=(1,))

The shards of a layout with a gap are no blocks: by PyTorch's rule `offset` is then the first
element, and `torch_indices` has all of them; XLA has no such shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mesh_utils import Axis
from xla_dtensor.core.errors import LayoutError
from xla_dtensor.core.layout import Layout
from xla_dtensor.core.placements import (
    AxisPart,
    Dim,
    Gap,
    PlacementRecord,
    Shard,
    StridedShard,
    axis_sizes,
    cuts,
    describe_axes,
)

Rule: TypeAlias = Literal["xla", "torch"]

Run: TypeAlias = tuple[int, int]
"""(start, stop): consecutive positions along a dim."""


@dataclass(frozen=True, slots=True)
class LocalShape:
    """What one device holds of a tensor.

    Args:
        shape: Elements along each dim; 0 for an empty shard.
        offset: First element along each dim; the global extent for an empty shard.
        padding: How much shorter than the longest shard it is along each dim, elements.
    """

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    padding: tuple[int, ...]

    @property
    def padded_shape(self) -> tuple[int, ...]:
        """Shape of the longest shard: what every device holds in memory."""
        return tuple(size + pad for size, pad in zip(self.shape, self.padding, strict=True))

    def size_bytes(self, itemsize_bytes: int) -> int:
        """Bytes of the elements of the shard."""
        return prod(self.shape) * itemsize_bytes

    def padded_size_bytes(self, itemsize_bytes: int) -> int:
        """Bytes that every device holds, padding counted."""
        return prod(self.padded_shape) * itemsize_bytes


def local_shape(
    layout: Layout, global_shape: Sequence[int], coordinate: Sequence[int], rule: Rule = "xla"
) -> LocalShape:
    """The shard of the device at a mesh coordinate.

    Args:
        layout: The layout.
        global_shape: The tensor's shape.
        coordinate: The device's position on each mesh axis.
        rule: "xla" for tiles, "torch" for nested chunks.

    Returns:
        Its shape, offset and padding.

    Raises:
        LayoutError: A shape of another rank, no such coordinate, or a gap under the rule "xla".

    Example:
        >>> from mesh_utils import Mesh
        >>> local_shape(Layout.parse("[tp, -]", Mesh.arange((4,), ("tp",))), (10, 3), (3,))
        LocalShape(shape=(1, 3), offset=(9, 0), padding=(2, 0))
    """
    _check(layout, global_shape, coordinate)
    if rule == "torch":
        runs = _torch_runs(layout, global_shape, coordinate)
        longest = _torch_runs(layout, global_shape, (0,) * len(coordinate))
        sizes = tuple(map(_run_size, runs))
        offset = [
            dim_runs[0][0] if size else extent
            for dim_runs, size, extent in zip(runs, sizes, global_shape, strict=True)
        ]
        padding = [_run_size(most) - size for most, size in zip(longest, sizes, strict=True)]
        return LocalShape(sizes, tuple(offset), tuple(padding))
    sizes_of_axes = axis_sizes(layout.mesh)
    on_axis = dict(zip(sizes_of_axes, coordinate, strict=True))
    dims: list[tuple[int, int, int]] = []
    for dim, extent in enumerate(global_shape):
        count = layout.num_shards(dim)
        tile = -(-extent // count)
        index = _tile_index(layout, cuts(layout.dims[dim], sizes_of_axes), on_axis)
        start = min(index * tile, extent)
        size = min(tile, extent - start)
        dims.append((size, start, tile - size))
    if not dims:
        return _SCALAR
    return LocalShape(*(tuple(column) for column in zip(*dims, strict=True)))


_SCALAR = LocalShape((), (), ())


def _tile_index(layout: Layout, entries: Dim, on_axis: dict[Axis, int]) -> int:
    """Which tile along a dim lies at a coordinate."""
    index = 0
    for entry in entries:
        if isinstance(entry, Gap):
            raise LayoutError(
                f"The XLA shards of layout {layout} were asked for. "
                f"It has a gap of {entry.size} outside a cut, so its shards are no tiles. "
                "Use rule='torch' and torch_indices."
            )
        if isinstance(entry, AxisPart):
            index = index * entry.size + on_axis[entry.axis] // entry.inner % entry.size
        else:
            index = index * layout.mesh.size(entry) + on_axis[entry]
    return index


def torch_indices(
    layout: Layout, global_shape: Sequence[int], coordinate: Sequence[int]
) -> tuple[NDArray[np.int64], ...]:
    """The positions along each dim that a device holds, by PyTorch's rule, in its order.

    Args:
        layout: The layout; gaps are fine.
        global_shape: The tensor's shape.
        coordinate: The device's position on each mesh axis.

    Returns:
        Per dim int64 positions; the shard is `tensor[np.ix_(*positions)]`.

    Raises:
        LayoutError: A shape of another rank, or no such coordinate.

    Example:
        >>> from mesh_utils import Mesh
        >>> strided = Layout.parse("[~2.dp]", Mesh.arange((2,), ("dp",)))
        >>> torch_indices(strided, (8,), (1,))[0].tolist()
        [2, 3, 6, 7]
    """
    _check(layout, global_shape, coordinate)
    return tuple(
        np.concatenate([np.arange(*run, dtype=np.int64) for run in runs])
        for runs in _torch_runs(layout, global_shape, coordinate)
    )


def _torch_runs(
    layout: Layout, global_shape: Sequence[int], coordinate: Sequence[int]
) -> list[list[Run]]:
    """Per dim the runs of positions that are left when every placement has cut."""
    runs: list[list[Run]] = [[(0, extent)] for extent in global_shape]
    steps = zip(layout.to_placements(), layout.mesh.mesh_shape, coordinate, strict=True)
    for placement, size, index in steps:
        if isinstance(placement, (Shard, StridedShard)):
            runs[placement.dim] = _cut(runs[placement.dim], placement, size, index)
    return runs


def _cut(runs: list[Run], placement: PlacementRecord, size: int, index: int) -> list[Run]:
    if not isinstance(placement, StridedShard):
        return _chunk(runs, size, index)
    pieces = (
        _chunk(runs, placement.split_factor, piece) for piece in range(placement.split_factor)
    )
    return [run for piece in pieces for run in _chunk(piece, size, index) if run[0] < run[1]] or [
        (0, 0)
    ]


def _chunk(runs: list[Run], count: int, index: int) -> list[Run]:
    """Chunk `index` of `count`, as torch.chunk cuts (with empty ones at the end)."""
    total = _run_size(runs)
    chunk = -(-total // count)
    first, last = min(index * chunk, total), min((index + 1) * chunk, total)
    cut_runs: list[Run] = []
    for start, stop in runs:
        low, high = max(first, 0), min(last, stop - start)
        if low < high:
            cut_runs.append((start + low, start + high))
        first, last = first - (stop - start), last - (stop - start)
    return cut_runs or [(0, 0)]


def _run_size(runs: Sequence[Run]) -> int:
    return sum([stop - start for start, stop in runs])


def may_leave_shards(size: int, count: int, n_devices: int) -> bool:
    """Whether the first rows of a tensor may be the same shards as all of it, on each device.

    Args:
        size: Rows of the tensor.
        count: Rows of the slice, from row 0.
        n_devices: Of the mesh. A dim is cut into a divisor of them.

    Example:
        >>> may_leave_shards(1024, 1023, 8), may_leave_shards(1024, 512, 8)  # 128 and 128, or 64
        (True, False)
    """
    tiles = (n for n in range(2, n_devices + 1) if n_devices % n == 0)
    return 0 < count < size and any(-(-count // n) == -(-size // n) for n in tiles)


def _check(layout: Layout, global_shape: Sequence[int], coordinate: Sequence[int]) -> None:
    if len(global_shape) != layout.ndim:
        raise LayoutError(
            f"The shard of shape={tuple(global_shape)} under layout {layout} was asked for. "
            f"The shape has {len(global_shape)} dims, the layout {layout.ndim}. "
            "Pass a shape of the layout's rank."
        )
    shape = layout.mesh.mesh_shape
    inside = len(coordinate) == len(shape) and all(
        0 <= index < size for index, size in zip(coordinate, shape, strict=True)
    )
    if not inside:
        raise LayoutError(
            f"The shard at coordinate={tuple(coordinate)} was asked for. "
            f"The mesh with {describe_axes(layout.mesh)} has no such coordinate. "
            "Pass one index per axis, each from 0 to its size - 1."
        )
