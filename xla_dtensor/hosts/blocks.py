"""Blocks of global tensors on their way between devices and files, a few at a time on the host.

A *block* is one slice per dim (an ``Index``). What a device holds of a tensor is one, what a file
has of it is another, and what goes from one to the other is where they meet:

    w (8, 4) as [tp, dp] on (dp=2, tp=4)      device 0 holds    (0:2, 0:2)
    a file has                                                  (0:8, 1:4)
    they meet in                              intersection  ->  (0:2, 1:2)
    which is, in the device's tile            relative      ->  (0:2, 1:2)
    and in the file's block                   relative      ->  (0:2, 0:1)

Checkpoints and the weights of Hugging Face are both made of this. Both read with `filled`, which
asks for each distinct block of this process once, and places it before it asks for the next.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, TypeAlias

import torch

from xla_dtensor.core.errors import CheckpointError
from xla_dtensor.dtensor.dcp import (
    Index,
    device_indices,
    distinct_indices,
    extents_of,
    layout_to_load,
    offset_of,
)
from xla_dtensor.dtensor.dtensor import DTensor
from xla_dtensor.runtimes.registry import get_runtime

__all__ = [
    "Read",
    "blocks_of",
    "filled",
    "intersection",
    "moving",
    "relative",
    "shifted",
    "whole_block",
    "windows",
]

Read: TypeAlias = Callable[[Index, torch.Tensor], object]
"""Fills a CPU tensor with a block of a tensor: the block, one slice per dim, and what to fill."""

_TRIM_BYTES = 256 << 20


# ------------------------------------------------------------------------ Blocks against each other


def whole_block(shape: Sequence[int]) -> Index:
    """Return the block that is everything."""
    return tuple(slice(0, size) for size in shape)


def windows(shape: Sequence[int], itemsize: int, limit: int) -> Iterator[Index]:
    """Cut a block into parts that follow one another in memory.

    Args:
        shape: The block's shape. One without elements has no parts.
        itemsize: Bytes of an element.
        limit: Most bytes of a part, unless one element is larger.

    Yields:
        One slice per dim, in row-major order.

    Example:
        >>> list(windows((3, 4), itemsize=2, limit=16))
        [(slice(0, 2, None), slice(0, 4, None)), (slice(2, 3, None), slice(0, 4, None))]
    """
    shape = tuple(shape)
    if not all(shape):
        return
    if prod(shape) * itemsize <= limit or not shape:
        yield whole_block(shape)
        return
    cut = 0
    while cut < len(shape) - 1 and prod(shape[cut + 1 :]) * itemsize > limit:
        cut += 1
    step = max(1, limit // (prod(shape[cut + 1 :]) * itemsize))
    for place in itertools.product(*map(range, shape[:cut])):
        for start in range(0, shape[cut], step):
            part = slice(start, min(start + step, shape[cut]))
            yield (*(slice(i, i + 1) for i in place), part, *whole_block(shape[cut + 1 :]))


def intersection(first: Index, second: Index) -> Index | None:
    """Return where two blocks meet, if they do.

    Example:
        >>> intersection((slice(0, 4),), (slice(3, 9),))
        (slice(3, 4, None),)
    """
    common = tuple(
        slice(max(a.start, b.start), min(a.stop, b.stop))
        for a, b in zip(first, second, strict=True)
    )
    return common if all(extent > 0 for extent in extents_of(common)) else None


def relative(part: Index, base: Index) -> Index:
    """Return where `part` lies in `base`, which contains it.

    Example:
        >>> relative((slice(3, 4),), (slice(2, 9),))
        (slice(1, 2, None),)
    """
    return tuple(
        slice(p.start - b.start, p.stop - b.start) for p, b in zip(part, base, strict=True)
    )


def shifted(part: Index, base: Index) -> Index:
    """Return a block that is said relative to `base`, in the terms of the whole tensor.

    Example:
        >>> shifted((slice(1, 2),), (slice(2, 9),))
        (slice(3, 4, None),)
    """
    return tuple(
        slice(p.start + b.start, p.stop + b.start) for p, b in zip(part, base, strict=True)
    )


# --------------------------------------------------------------------------------- Onto the devices


def blocks_of(tensor: torch.Tensor) -> list[Index]:
    """Return the distinct blocks of a tensor that this process needs, none where it has no device.

    Args:
        tensor: A DTensor, of which blocks are those of its placements; or a plain tensor.
    """
    if not isinstance(tensor, DTensor):
        return [whole_block(tensor.shape)]
    return list(distinct_indices(_indices(tensor).values()).values())


def filled(tensor: DTensor, dtype: torch.dtype, read: Read) -> torch.Tensor:
    """Return a payload for a DTensor with new values, as it lies or is to lie.

    Args:
        tensor: Gives shape, mesh and placements; it may be on the meta device. A reduction that is
            pending is none in the payload.
        dtype: Of the payload.
        read: Called with each distinct block of this process once.
    """
    runtime, layout, shape = get_runtime(), layout_to_load(tensor), tuple(tensor.shape)
    if shape and tensor.numel():
        tiles = _Tiles(_indices(tensor), dtype, read)
        # JAX asks for each once, so that no more than one is on the host.
        return runtime.from_shards(tiles if runtime.name == "jax" else dict(tiles), shape, layout)
    content = torch.empty(shape, dtype=dtype)  # a number, or nothing: there are no tiles
    if content.numel():
        read(whole_block(shape), content)
    return runtime.put(content, layout)


def _indices(tensor: DTensor) -> dict[int, Index]:
    layout = layout_to_load(tensor)
    return device_indices(tensor, layout.op_sharding(get_runtime().root(layout.mesh)))


class _Tiles(Mapping[int, torch.Tensor]):
    """Device -> its tile, read when it is asked for; devices that hold the same come together."""

    def __init__(self, indices: Mapping[int, Index], dtype: torch.dtype, read: Read) -> None:
        self._indices = dict(sorted(indices.items(), key=lambda pair: offset_of(pair[1])))
        self._dtype, self._read = dtype, read
        self._latest: tuple[Index, torch.Tensor] | None = None

    def __getitem__(self, device: int) -> torch.Tensor:
        index = self._indices[device]
        if self._latest is None or self._latest[0] != index:
            self._latest = None  # let it go before the next one takes memory
            tile = torch.empty(extents_of(index), dtype=self._dtype)
            if tile.numel():
                self._read(index, tile)
            self._latest = index, tile
        return self._latest[1]

    def __iter__(self) -> Iterator[int]:
        return iter(self._indices)

    def __len__(self) -> int:
        return len(self._indices)


# ----------------------------------------------------------------------------------------- Progress


@contextlib.contextmanager
def moving(what: str, total_bytes: int, show: bool | None) -> Iterator[Callable[[int], None]]:
    """Give a function that is told how many bytes more were moved and are no longer held.

    It shows a bar, by tqdm, and gives freed memory back to the system from time to time. glibc
    keeps what is freed in blocks of up to 32 MB and, when small objects came between them, finds no
    place there for the next one: a process that moved 16 GB tile by tile, and held one of them, was
    seen to grow by 3 GB.

    Args:
        what: What is done: "saving", "loading".
        total_bytes: How much there is to do, about.
        show: Whether to show a bar. None: where tqdm is installed and stderr is a terminal.

    Raises:
        CheckpointError: A bar was asked for, and tqdm is not installed.

    Example:
        >>> with moving("loading", 10, show=False) as advance:
        ...     advance(10)
    """
    untrimmed = 0
    if show is None:
        show = sys.stderr.isatty() and importlib.util.find_spec("tqdm") is not None
    with contextlib.ExitStack() as stack:
        bar = stack.enter_context(_bar(what, total_bytes)) if show else None

        def advance(num_bytes: int) -> None:
            nonlocal untrimmed
            untrimmed += num_bytes
            if untrimmed >= _TRIM_BYTES:
                untrimmed = 0
                with contextlib.suppress(OSError, AttributeError):  # glibc alone keeps that much
                    ctypes.CDLL(None).malloc_trim(0)
            if bar is not None:
                bar.update(num_bytes)

        yield advance


def _bar(what: str, total_bytes: int) -> Any:
    try:
        from tqdm import tqdm
    except ImportError as error:
        raise CheckpointError(
            "A checkpoint was asked for with progress=True. tqdm, which shows it, is not "
            "installed. Install tqdm, or pass progress=False."
        ) from error
    return tqdm(total=total_bytes, desc=what, unit="B", unit_scale=True)
