"""The pieces of a state that this process saves: each distinct block of a tensor once.

A block that several devices hold is saved from the first of them in the mesh's order, by the
process that this device belongs to. Every process knows that without asking. Blocks of more than
`LIMIT_BYTES` are saved in several pieces, so that neither saving nor reading a part of one holds
more than a piece on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from xla_dtensor.core import Layout
from xla_dtensor.dtensor.dcp import distinct_indices, extents_of, offset_of
from xla_dtensor.dtensor.dtensor import DTensor
from xla_dtensor.hosts.checkpoint.manifest import Entry
from xla_dtensor.hosts.checkpoint.state import Leaf
from xla_dtensor.runtimes.registry import get_runtime

if TYPE_CHECKING:
    from xla_dtensor.dtensor.dcp import Offset

__all__ = ["LIMIT_BYTES", "Piece", "entry_of_tensor", "pieces_of", "split"]

LIMIT_BYTES = 64 << 20


@dataclass
class Piece:
    """One block of a tensor that this process saves.

    Attributes:
        name: The tensor's name.
        offset: The block's first element along each dim.
        shape: Its number of elements along each dim.
        num_bytes: Bytes of its values.
        read: Returns its values: a CPU tensor that nothing else writes to.
    """

    name: str
    offset: Offset
    shape: tuple[int, ...]
    num_bytes: int
    read: Callable[[], torch.Tensor]


def entry_of_tensor(leaf: Leaf) -> Entry:
    """Return a tensor's entry in the manifest, without its chunks."""
    tensor: torch.Tensor = leaf.value
    layout = mesh = None
    if isinstance(tensor, DTensor):
        spec = tensor._spec
        mesh = spec.mesh.value.axes_text()
        layout = Layout.from_placements(spec.placements, tensor.ndim, spec.mesh.value).text()
    dtype = str(tensor.dtype).removeprefix("torch.")
    num_bytes = tensor.numel() * tensor.element_size()
    return Entry(leaf.path, num_bytes, tuple(tensor.shape), dtype, layout, mesh)


def pieces_of(leaf: Leaf, process: int) -> Iterator[Piece]:
    """Yield what this process saves of a tensor.

    Args:
        leaf: The tensor.
        process: This process's place in the job. Plain tensors are saved by process 0.
    """
    tensor: torch.Tensor = leaf.value
    if not isinstance(tensor, DTensor):
        if process == 0:
            yield from _cut(leaf.name, (0,) * tensor.ndim, tuple(tensor.shape), tensor, _host)
        return
    if tensor.numel() == 0:
        if process == 0:
            empty = torch.empty(tensor.shape, dtype=tensor.dtype)
            yield from _cut(leaf.name, (0,) * tensor.ndim, tuple(tensor.shape), empty, _host)
        return
    payload = tensor._local_tensor
    if payload.is_meta:  # This process reaches none of its devices.
        return
    for device, index in _owned(tensor, payload):
        offset, shape = offset_of(index), extents_of(index)
        block = _Block(payload.detach(), device)
        yield from _cut(leaf.name, offset, shape, block, _Block.read, tensor.element_size())


def _owned(tensor: DTensor, payload: torch.Tensor) -> list[tuple[int, tuple[slice, ...]]]:
    """The blocks whose first device is of this process, with that device."""
    runtime = get_runtime()
    sharding = runtime.op_sharding(payload)
    root = runtime.root(tensor._spec.mesh.value).device_ids.ravel().tolist()
    shape = tuple(tensor.shape)
    indices = {int(device): sharding.shard_index(i, shape) for i, device in enumerate(root)}
    first: dict[Offset, int] = {}
    for device, index in indices.items():
        first.setdefault(offset_of(index), device)
    own = set(runtime.addressable_device_ids())
    distinct = distinct_indices(indices.values())
    return [(first[o], index) for o, index in distinct.items() if first[o] in own]


class _Block:
    """One device's shard, read once for all its pieces in a row."""

    def __init__(self, payload: torch.Tensor, device: int) -> None:
        self._payload, self._device = payload, device
        self._data: torch.Tensor | None = None
        self._left = 0

    def expect(self, pieces: int) -> None:
        """Hear how many pieces will be read; after the last the shard is let go."""
        self._left = pieces

    def read(self) -> torch.Tensor:
        """Return the shard."""
        if self._data is None:
            found = get_runtime().addressable_shards(self._payload, devices=[self._device])
            self._data = found[0].data.detach()
        data, self._left = self._data, self._left - 1
        if self._left <= 0:
            self._data = None
        return data


def _host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu()


def _cut(
    name: str,
    offset: Offset,
    shape: tuple[int, ...],
    source: Any,
    read: Callable[[Any], torch.Tensor],
    item_bytes: int | None = None,
) -> Iterator[Piece]:
    size = source.element_size() if item_bytes is None else item_bytes
    parts = list(split(shape, size, LIMIT_BYTES))
    if isinstance(source, _Block):
        source.expect(len(parts))
    for index in parts:
        start = tuple(o + s.start for o, s in zip(offset, index, strict=True))
        extents = extents_of(index)
        num_bytes = torch.Size(extents).numel() * size

        def values(index: tuple[slice, ...] = index) -> torch.Tensor:
            # Memory of its own: torch.save writes a view's whole storage, and a step may go on.
            return read(source)[index].clone(memory_format=torch.contiguous_format)

        yield Piece(name, start, extents, num_bytes, values)


def split(shape: tuple[int, ...], item_bytes: int, limit_bytes: int) -> Iterator[tuple[slice, ...]]:
    """Yield the pieces of a block, cut along its first dims.

    Args:
        shape: The block's shape.
        item_bytes: Bytes per element.
        limit_bytes: What a piece may take; one element at least.

    Example:
        >>> [i[0] for i in split((5, 2), 4, 16)]
        [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    total = torch.Size(shape).numel() * item_bytes
    if not shape or total <= limit_bytes:
        yield tuple(slice(0, n) for n in shape)
        return
    row_bytes = total // shape[0]
    rows = max(1, limit_bytes // row_bytes)
    for start in range(0, shape[0], rows):
        stop = min(start + rows, shape[0])
        for rest in split(shape[1:], item_bytes * (stop - start), limit_bytes):
            yield (slice(start, stop), *rest)
