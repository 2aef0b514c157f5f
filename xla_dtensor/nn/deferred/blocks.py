"""Values given to a DTensor from the host, a piece at a time: the whole lies nowhere.

The elements of a tensor are counted in torch's order, the last dim first. A *run* is a range of
that count. Who makes values run by run writes each into the blocks that this process's devices
hold, and at the end the blocks go to the devices. On the host there are the blocks of this process,
each once however many devices hold it, and one run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.distributed.tensor import Replicate

from xla_dtensor.core import Layout, OpSharding
from xla_dtensor.core.errors import LayoutError
from xla_dtensor.dtensor.dcp import (
    device_indices,
    distinct_indices,
    extents_of,
    host_shards,
    offset_of,
)
from xla_dtensor.dtensor.dtensor import DTensor
from xla_dtensor.runtimes.registry import get_runtime

__all__ = ["RUN", "HostBlocks", "boxes", "runs", "sharding_of"]

# Elements of a run: 16 MB of float32.
RUN = 1 << 22
# torch's CPU generator makes normal numbers in groups of this many, and the last group of a tensor
# anew; a tensor of fewer elements is drawn in another way.
_GROUP = 16


def runs(numel: int, size: int | None = None) -> Iterator[tuple[int, int]]:
    """Cut a count of elements so that torch draws run by run what it draws at once.

    Args:
        numel: How many elements.
        size: Elements of a run, a multiple of 16; :data:`RUN` when None.

    Yields:
        (start, stop) of each run. Each but the last is `size` long, and the last has at least 16.

    Example:
        >>> list(runs(70, 32))
        [(0, 32), (32, 70)]
    """
    size, start = size or RUN, 0
    while start < numel:
        stop = start + size
        stop = numel if numel - stop < _GROUP else stop
        yield start, stop
        start = stop


def boxes(
    start: int, stop: int, shape: Sequence[int]
) -> Iterator[tuple[tuple[slice, ...], int, int]]:
    """Take a run apart into blocks of a tensor, at most two per dim and one.

    Args:
        start: Its first element.
        stop: The element after its last.
        shape: The tensor's shape.

    Yields:
        The block's index, and the run's part that it is.

    Example:
        >>> [index for index, _, _ in boxes(1, 6, (3, 2))]
        [(slice(0, 1, None), slice(1, 2, None)), (slice(1, 3, None), slice(0, 2, None))]
    """
    if start >= stop:
        return
    if not shape:
        yield (), start, stop
        return
    row = math.prod(shape[1:])
    first, last = start // row, stop // row
    if start % row:
        end = min(stop, (first + 1) * row)
        for index, a, b in boxes(start - first * row, end - first * row, shape[1:]):
            yield (slice(first, first + 1), *index), a + first * row, b + first * row
        yield from boxes(end, stop, shape)
        return
    if last > first:
        rest = tuple(slice(0, n) for n in shape[1:])
        yield (slice(first, last), *rest), start, last * row
    for index, a, b in boxes(0, stop - last * row, shape[1:]):
        yield (slice(last, last + 1), *index), a + last * row, b + last * row


def sharding_of(tensor: DTensor) -> tuple[Layout, OpSharding]:
    """Return how the placements of a tensor say that it lies, as far as XLA has them."""
    mesh = tensor._spec.mesh.value
    root = get_runtime().root(mesh)
    whole = [Replicate() if p.is_partial() else p for p in tensor._spec.placements]
    layout = Layout.from_placements(whole, tensor.ndim, mesh)
    try:
        return layout, layout.op_sharding(root)
    except LayoutError:  # a label of a view that no XLA sharding expresses
        layout = Layout.replicated(mesh, tensor.ndim)
        return layout, layout.op_sharding(root)


class HostBlocks:
    """The blocks of a DTensor that this process's devices hold, as buffers on the host.

    Args:
        tensor: The DTensor whose shape, dtype and placements they have.
        filled: Whether they begin with its values.
    """

    def __init__(self, tensor: DTensor, *, filled: bool = False) -> None:
        self._shape, self._dtype = tuple(tensor.shape), tensor.dtype
        self._layout, self._sharding = sharding_of(tensor)
        self._indices = device_indices(tensor, self._sharding)
        self._distinct = distinct_indices(self._indices.values())
        present = self._present(tensor) if filled else {}
        self.buffers = {
            offset: present[offset].clone(memory_format=torch.contiguous_format)
            if filled
            else torch.empty(extents_of(index), dtype=self._dtype)
            for offset, index in self._distinct.items()
        }

    def _present(self, tensor: DTensor) -> dict[tuple[int, ...], torch.Tensor]:
        payload = tensor._local_tensor
        if payload.numel() and get_runtime().op_sharding(payload) != self._sharding:
            payload = get_runtime().constrain(payload, self._layout)
        return host_shards(payload)

    def write(self, start: int, values: torch.Tensor) -> None:
        """Take what belongs into the blocks of a run.

        Args:
            start: The run's first element.
            values: Its values, a 1-D tensor.
        """
        for index, first, last in boxes(start, start + values.numel(), self._shape):
            part = values[first - start : last - start].view(extents_of(index))
            for offset, block in self._distinct.items():
                here, there = _overlap(index, block)
                if here is not None:
                    self.buffers[offset][there] = part[here]

    def write_in_runs(self, fill: Callable[[torch.Tensor, int], Any]) -> None:
        """Make all values run by run.

        Args:
            fill: Called as ``fill(values, start)``, to set the run's values in place.
        """
        for start, stop in runs(math.prod(self._shape)):
            values = torch.empty(stop - start, dtype=self._dtype)
            fill(values, start)
            self.write(start, values)

    def payload(self) -> torch.Tensor:
        """Return the values as the runtime's tensor; all processes have to call this alike."""
        if not self._shape or math.prod(self._shape) == 0:
            whole = next(iter(self.buffers.values()), torch.empty(self._shape, dtype=self._dtype))
            return get_runtime().put(whole, self._layout)
        tiles = {
            device: self.buffers[offset_of(index)]
            if all(extents_of(index))
            else torch.empty(extents_of(index), dtype=self._dtype)
            for device, index in self._indices.items()
        }
        return get_runtime().from_shards(tiles, self._shape, self._layout)


def _overlap(
    box: tuple[slice, ...], block: tuple[slice, ...]
) -> tuple[tuple[slice, ...] | None, tuple[slice, ...]]:
    """Return what two blocks have in common, seen from either; None where that is nothing."""
    here: list[slice] = []
    there: list[slice] = []
    for one, other in zip(box, block, strict=True):
        start, stop = max(one.start, other.start), min(one.stop, other.stop)
        if start >= stop:
            return None, ()
        here.append(slice(start - one.start, stop - one.start))
        there.append(slice(start - other.start, stop - other.start))
    return tuple(here), tuple(there)
