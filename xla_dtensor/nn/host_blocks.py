"""What torch's CPU generator draws for a DTensor, a piece at a time: the whole lies nowhere.

The elements of a tensor are counted in torch's order, the last dim first. A *run* is a range of
that count. Each run is drawn, and written into the blocks that this process's devices hold; at the
end the blocks go to the devices. On the host there are the blocks of this process, each once
however many devices hold it, and one run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from xla_dtensor.dtensor.dcp import (
    device_indices,
    extents_of,
    host_shards,
    layout_to_load,
    offset_of,
)
from xla_dtensor.dtensor.dtensor import DTensor
from xla_dtensor.runtimes.registry import get_runtime

__all__ = ["RUN", "HostBlocks", "boxes", "runs", "torch_draws"]

# Elements that are drawn at once on the host: 16 MB of float32.
RUN = 1 << 22
# torch's CPU generator makes normal numbers in groups of this many, and the last group of a tensor
# anew; a tensor of fewer elements is drawn in another way.
_GROUP = 16


def torch_draws(
    func: Any, target: torch.Tensor, args: Sequence[Any], kwargs: Any
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield what torch draws for a tensor run by run, each with the count of its first element."""
    if not target.is_contiguous():  # a view with gaps, drawn whole
        draws = torch.empty_strided(target.shape, target.stride(), dtype=target.dtype)
        func(draws, *args[1:], **kwargs)
        yield 0, draws.reshape(-1)
        return
    for start, stop in runs(target.numel()):
        values = torch.empty(stop - start, dtype=target.dtype)
        func(values, *args[1:], **kwargs)
        yield start, values


def runs(numel: int, size: int | None = None) -> Iterator[tuple[int, int]]:
    """Cut a count of elements so that torch draws run by run what it draws at once.

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
    """Take a run apart into blocks of a tensor: each block's index, and its part of the run.

    Example:
        >>> [index for index, _, _ in boxes(1, 6, (3, 2))]
        [(slice(0, 1, None), slice(1, 2, None)), (slice(1, 3, None), slice(0, 2, None))]
    """
    if not shape and start < stop:
        yield (), start, stop
        return
    row = math.prod(shape[1:])
    while start < stop:
        first = start // row
        if start % row == 0 and stop - start >= row:
            last = stop // row
            end = last * row
            yield (slice(first, last), *(slice(0, n) for n in shape[1:])), start, end
        else:
            end, origin = min(stop, (first + 1) * row), first * row
            for index, a, b in boxes(start - origin, end - origin, shape[1:]):
                yield (slice(first, first + 1), *index), a + origin, b + origin
        start = end


class HostBlocks:
    """The blocks of a DTensor that this process's devices hold, each once, on the host.

    Args:
        tensor: The DTensor whose shape, dtype and placements they have.
        read: Whether they begin with its values.
    """

    def __init__(self, tensor: DTensor, *, read: bool = False) -> None:
        self._shape, self._dtype = tuple(tensor.shape), tensor.dtype
        self._layout = layout_to_load(tensor)
        sharding = self._layout.op_sharding(get_runtime().root(self._layout.mesh))
        self._indices = device_indices(tensor, sharding)
        self._blocks = {offset_of(index): index for index in self._indices.values()}
        self.buffers = {
            offset: torch.empty(extents_of(index), dtype=self._dtype)
            for offset, index in self._blocks.items()
        }
        if read and tensor.numel():
            payload = tensor._local_tensor
            if get_runtime().op_sharding(payload) != sharding:
                payload = get_runtime().constrain(payload, self._layout)
            for offset, shard in host_shards(payload).items():
                self.buffers[offset].copy_(shard)

    def write(self, start: int, values: torch.Tensor) -> None:
        """Take what belongs into the blocks of a run: its first element, and all its values."""
        for index, first, last in boxes(start, start + values.numel(), self._shape):
            box = values[first - start : last - start].view(extents_of(index))
            for offset, block in self._blocks.items():
                source, target = box, self.buffers[offset]
                for dim, (a, b) in enumerate(zip(index, block, strict=True)):
                    low, length = max(a.start, b.start), min(a.stop, b.stop) - max(a.start, b.start)
                    if length <= 0:
                        break
                    source = source.narrow(dim, low - a.start, length)
                    target = target.narrow(dim, low - b.start, length)
                else:
                    target.copy_(source)

    def payload(self) -> torch.Tensor:
        """Return the values as the runtime's tensor; all processes have to call this alike."""
        if not self._shape or math.prod(self._shape) == 0:
            tensor = self.buffers[()] if not self._shape else torch.empty(self._shape)
            return get_runtime().put(tensor.to(self._dtype), self._layout)
        tiles = {device: self.buffers[offset_of(index)] for device, index in self._indices.items()}
        return get_runtime().from_shards(tiles, self._shape, self._layout)
