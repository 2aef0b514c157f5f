"""Pieces of a state on their way into files and back, each with a checksum.

A *piece* is a block of a tensor that this process saves, of `LIMIT_BYTES` at most, so that neither
saving nor reading a part of a large block holds more than that on the host. A block that several
devices hold is saved from the first of them in the mesh's order, by the process that this device
belongs to. Every process knows that without asking.

Files are in the format of torch.distributed.checkpoint's ``FileSystemWriter``: what ``torch.save``
makes of each piece, one after the other, so that ``torch.distributed.checkpoint.load`` reads them
without this library. The values lie within that record as they lie in memory; where, is noted, and
reading goes straight there. Every byte that is used has had its checksum compared.
"""

from __future__ import annotations

import io
import pickle
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import torch

from xla_dtensor.core.errors import CheckpointError
from xla_dtensor.dtensor.dcp import (
    Index,
    Offset,
    distinct_indices,
    extents_of,
    offset_of,
    shard_indices,
)
from xla_dtensor.dtensor.dtensor import DTensor
from xla_dtensor.hosts.blocks import intersection, relative, shifted, whole_block, windows
from xla_dtensor.hosts.checkpoint.manifest import Chunk, Entry
from xla_dtensor.hosts.checkpoint.storage import Storage, naming_file
from xla_dtensor.runtimes.registry import get_runtime

__all__ = [
    "CACHE_BYTES",
    "LIMIT_BYTES",
    "Piece",
    "Reader",
    "pickled",
    "pieces_of",
    "unpickled",
    "write_file",
]

LIMIT_BYTES = 64 << 20
CACHE_BYTES = 128 << 20
_MOST_FILES = 16


# ----------------------------------------------------------------------------- What a process saves


@dataclass
class Piece:
    """One block of a tensor that this process saves.

    Attributes:
        name: The tensor's name.
        index: The block, one slice per dim.
        num_bytes: Bytes of its values.
        read: Returns its values: a contiguous CPU tensor that is all of its storage.
    """

    name: str
    index: Index
    num_bytes: int
    read: Callable[[], torch.Tensor]


def pieces_of(name: str, tensor: torch.Tensor, process: int) -> Iterator[Piece]:
    """Yield what this process saves of a tensor.

    Args:
        name: The tensor's name.
        tensor: The tensor.
        process: This process's place in the job. Plain tensors are saved by process 0.
    """
    if isinstance(tensor, DTensor) and tensor.numel():
        payload = tensor._local_tensor
        if not payload.is_meta:  # else this process reaches none of its devices
            for device, index in _own_blocks(tensor, payload):
                yield from _cut(name, index, tensor.element_size(), _Shard(payload, device))
    elif process == 0:
        host = torch.empty(tensor.shape, dtype=tensor.dtype)
        if tensor.numel():
            host = tensor.detach().cpu().resolve_conj().resolve_neg()
        yield from _cut(name, whole_block(tensor.shape), tensor.element_size(), lambda _: host)


def _own_blocks(tensor: DTensor, payload: torch.Tensor) -> list[tuple[int, Index]]:
    """The blocks whose first device is of this process, with that device."""
    runtime = get_runtime()
    root = runtime.root(tensor._spec.mesh.value)
    indices = shard_indices(root, runtime.op_sharding(payload), tuple(tensor.shape))
    first_device: dict[Offset, int] = {}
    for device, index in indices.items():
        first_device.setdefault(offset_of(index), device)
    own = set(runtime.addressable_device_ids())
    distinct = distinct_indices(indices.values())
    return [(first_device[o], index) for o, index in distinct.items() if first_device[o] in own]


class _Shard:
    """One device's shard, read once for all its pieces in a row."""

    def __init__(self, payload: torch.Tensor, device: int) -> None:
        self._payload, self._device = payload.detach(), device
        self._shard: torch.Tensor | None = None

    def __call__(self, is_last: bool) -> torch.Tensor:
        values = self._shard
        if values is None:
            shards = get_runtime().addressable_shards(self._payload, devices=[self._device])
            values = shards[0].data.detach()
        self._shard = None if is_last else values
        return values


def _cut(
    name: str, index: Index, item_bytes: int, source: Callable[[bool], torch.Tensor]
) -> Iterator[Piece]:
    shape = extents_of(index)
    # A tensor without elements is a record, too: its name is in the checkpoint.
    parts = list(windows(shape, item_bytes, LIMIT_BYTES)) or [whole_block(shape)]
    for number, part in enumerate(parts, 1):

        def read(part: Index = part, is_last: bool = number == len(parts)) -> torch.Tensor:
            return _alone(source(is_last)[part])

        yield Piece(name, shifted(part, index), prod(extents_of(part)) * item_bytes, read)


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """The same values as all of a storage, of which torch.save would write the rest as well."""
    if not tensor.is_contiguous() or not tensor.numel():
        return tensor.clone(memory_format=torch.contiguous_format)
    flat = tensor.reshape(-1).view(torch.uint8).numpy()
    return torch.from_numpy(flat).view(tensor.dtype).reshape(tensor.shape)


# ------------------------------------------------------------------------------------------ Writing


def write_file(
    storage: Storage,
    name: str,
    pieces: Iterable[Piece],
    values: Mapping[str, bytes],
    advance: Callable[[int], None],
) -> tuple[int, list[tuple[str, Chunk]]]:
    """Write pieces and plain values to a file, and sync it.

    Args:
        storage: Where checkpoints lie.
        name: The file, with its folder.
        pieces: Blocks of tensors, read one at a time.
        values: Plain values by name, as `pickled` made them.
        advance: Called with the bytes of each piece once it is written.

    Returns:
        The file's size in bytes, and each piece with its name. No file is written for nothing.

    Raises:
        CheckpointError: The file cannot be written.
    """
    writer: _Writer | None = None
    chunks: list[tuple[str, Chunk]] = []
    try:
        for piece in pieces:
            writer = writer or _Writer(storage, name)
            chunks.append((piece.name, writer.add_tensor(piece)))
            advance(piece.num_bytes)
        for key, record in values.items():
            writer = writer or _Writer(storage, name)
            chunks.append((key, writer.add_value(record)))
            advance(len(record))
        if writer is None:
            return 0, []
        storage.finish(writer.file)
    except BaseException:
        if writer is not None:
            storage.abandon(writer.file)
        raise
    return writer.position, chunks


def pickled(value: Any) -> bytes:
    """Return what torch.save makes of a plain value."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def unpickled(record: bytes | bytearray, title: str) -> Any:
    """Return the plain value of what `pickled` returned; `title` names it in an error."""
    try:
        return torch.load(io.BytesIO(record), weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{title} was to be loaded. It has classes that are not allowed: "
            f"{str(error).splitlines()[0]}. Name them to torch.serialization.add_safe_globals, "
            "as when it was saved."
        ) from error


class _Writer:
    """A file that torch.save writes to: it counts, and sees a tensor's values go by."""

    def __init__(self, storage: Storage, name: str) -> None:
        self.file = storage.create(name)
        self.position = 0
        self._path, self._name = storage.text(name), name.rpartition("/")[2]
        self._address = self._size = 0
        self._values: tuple[int, int] | None = None
        self._error: BaseException | None = None

    def write(self, buffer: Any) -> int:
        """Append bytes."""
        if len(buffer) == self._size > 0 and _address(buffer) == self._address:
            self._values = (self.position, zlib.crc32(buffer))
        if self._error is None:
            try:
                with naming_file(self._path, "written"):
                    self.file.write(buffer)
            except BaseException as error:
                # torch.save would go on to write the end of its record, and raise another error.
                self._error = error
        self.position += len(buffer)
        return len(buffer)

    def flush(self) -> None:
        """Nothing to do before the end."""

    def add_tensor(self, piece: Piece) -> Chunk:
        """Append a piece."""
        tensor = piece.read()
        start = self.position
        self._address, self._size = tensor.data_ptr(), piece.num_bytes
        self._values = None if piece.num_bytes else (start, 0)
        # Its own checksums would cost as much as the rest; the manifest has better ones.
        checks = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(False)
        try:
            torch.save(tensor, self)  # pyright: ignore[reportArgumentType]
        finally:
            torch.serialization.set_crc32_options(checks)
            self._size = 0
        if self._error is not None:
            raise self._error
        if self._values is None:
            raise AssertionError("torch.save did not write the values of a tensor in one piece")
        place = (self._name, start, self.position - start)
        return Chunk(offset_of(piece.index), extents_of(piece.index), *place, *self._values)

    def add_value(self, record: bytes) -> Chunk:
        """Append the record of a plain value."""
        start = self.position
        self.write(record)
        if self._error is not None:
            raise self._error
        return Chunk((), (), self._name, start, len(record), start, zlib.crc32(record))


def _address(buffer: Any) -> int:
    return np.frombuffer(buffer, np.uint8).ctypes.data


# ------------------------------------------------------------------------------------------ Reading


class Reader:
    """Reads from the folder of one checkpoint; a context manager that closes its files.

    Of a tensor only the chunks are read that meet the block asked for, one at a time. The last few
    stay in memory, up to `CACHE_BYTES`, since neighbouring blocks often share them.

    Args:
        storage: Where checkpoints lie.
        folder: The checkpoint's folder.
        files: Bytes of each of its files, as the manifest has them.
        advance: Called with the bytes that were read.
    """

    def __init__(
        self,
        storage: Storage,
        folder: str,
        files: Mapping[str, int],
        advance: Callable[[int], None],
    ) -> None:
        self._storage, self._folder, self._advance = storage, folder, advance
        self._sizes = files
        self._files: OrderedDict[str, BinaryIO] = OrderedDict()
        self._cache: OrderedDict[Chunk, torch.Tensor] = OrderedDict()
        self._bounds: dict[str, tuple[Any, Any]] = {}

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for file in self._files.values():
            file.close()

    def read(self, name: str, entry: Entry, index: Index, out: torch.Tensor) -> None:
        """Read one block of a tensor.

        Args:
            name: The tensor's name.
            entry: What the manifest says of it.
            index: The block, one slice per dim.
            out: A CPU tensor of its shape, to whose dtype values are converted.

        Raises:
            CheckpointError: A file cannot be read, or a checksum differs.
        """
        dtype = getattr(torch, str(entry.dtype))
        for chunk in self._meeting(name, entry, index):
            block = tuple(slice(o, o + n) for o, n in zip(chunk.offset, chunk.shape, strict=True))
            common = intersection(index, block)
            if common is None:
                continue
            part = out[relative(common, index)]
            is_all = common == block and part.is_contiguous() and out.dtype == dtype
            if is_all and chunk not in self._cache:
                self._read_values(name, chunk, part)
            else:
                part.copy_(self._values(name, chunk, dtype)[relative(common, block)])

    def value(self, name: str, entry: Entry) -> Any:
        """Return a plain value.

        Raises:
            CheckpointError: Its file cannot be read, its checksum differs, or it has classes that
                torch.load does not allow.
        """
        chunk = entry.chunks[0]
        record = bytearray(chunk.length)
        self._fill(name, chunk, memoryview(record))
        _refuse_compressed(record, self._text(chunk))
        return unpickled(record, f"The value {name!r} in the file {self._text(chunk)}")

    def check(self, name: str, entry: Entry) -> None:
        """Read an entry and compare its checksums."""
        for chunk in entry.chunks:
            num_bytes = chunk.length
            if entry.shape is not None:
                num_bytes = prod(chunk.shape) * getattr(torch, str(entry.dtype)).itemsize
            self._read_values(name, chunk, torch.empty(num_bytes, dtype=torch.uint8))

    def _meeting(self, name: str, entry: Entry, index: Index) -> list[Chunk]:
        if name not in self._bounds:
            starts = np.array([chunk.offset for chunk in entry.chunks], dtype=np.int64)
            sizes = np.array([chunk.shape for chunk in entry.chunks], dtype=np.int64)
            starts = starts.reshape(len(entry.chunks), -1)
            # Those of the tensor that is being read only.
            self._bounds = {name: (starts, starts + sizes.reshape(starts.shape))}
        starts, stops = self._bounds[name]
        low = np.array([s.start for s in index], dtype=np.int64)
        high = np.array([s.stop for s in index], dtype=np.int64)
        meets = ((starts < high) & (stops > low)).all(axis=1)
        return [entry.chunks[i] for i in np.flatnonzero(meets)]

    def _values(self, name: str, chunk: Chunk, dtype: torch.dtype) -> torch.Tensor:
        if chunk not in self._cache:
            values = torch.empty(chunk.shape, dtype=dtype)
            self._read_values(name, chunk, values)
            self._cache[chunk] = values
            while (
                len(self._cache) > 1 and sum(t.nbytes for t in self._cache.values()) > CACHE_BYTES
            ):
                self._cache.popitem(last=False)
        self._cache.move_to_end(chunk)
        return self._cache[chunk]

    def _read_values(self, name: str, chunk: Chunk, out: torch.Tensor) -> None:
        if out.numel():
            self._fill(name, chunk, out.reshape(-1).view(torch.uint8).numpy().data)

    def _fill(self, name: str, chunk: Chunk, target: memoryview) -> None:
        path, count = self._text(chunk), 0
        with naming_file(path, "read"):
            file = self._file(chunk.file)
            file.seek(chunk.data_start)
            while count < len(target) and (num_bytes := _read_some(file, target[count:])):
                count += num_bytes
        if count < len(target):
            raise CheckpointError(
                f"The file {path} was to be read for {name!r}. It ends {len(target) - count} bytes "
                f"before the end of the piece at byte {chunk.data_start}: it was truncated. Load "
                "another step, see checkpoint.steps."
            )
        checksum = zlib.crc32(target)
        if checksum != chunk.crc32:
            raise CheckpointError(
                f"The file {path} was to be read for {name!r}. Its {len(target)} bytes from byte "
                f"{chunk.data_start} have the checksum {checksum:08x}, not {chunk.crc32:08x}: they "
                "were changed after they were written. Load another step, see checkpoint.steps."
            )
        self._advance(len(target))

    def _text(self, chunk: Chunk) -> str:
        return self._storage.text(f"{self._folder}/{chunk.file}")

    def _file(self, name: str) -> BinaryIO:
        if name not in self._files:
            path, expected = f"{self._folder}/{name}", self._sizes[name]
            size = self._storage.size(path)
            if size is not None and size != expected:
                raise CheckpointError(
                    f"The file {self._storage.text(path)} was to be read. It has {size} bytes and "
                    f"was written with {expected}: it was truncated or changed. Load another step, "
                    "see checkpoint.steps."
                )
            self._files[name] = self._storage.open(path)
            while len(self._files) > _MOST_FILES:
                self._files.popitem(last=False)[1].close()
        return self._files[name]


def _refuse_compressed(record: bytearray, path: str) -> None:
    """torch.save compresses nothing; what is compressed may be of any size when it is read."""
    try:
        with zipfile.ZipFile(io.BytesIO(record)) as records:
            compressed = [r for r in records.infolist() if r.compress_type != zipfile.ZIP_STORED]
    except zipfile.BadZipFile:
        return  # torch.load says what it is
    if compressed:
        raise CheckpointError(
            f"A value in the file {path} was to be loaded. Its record {compressed[0].filename!r} "
            "is compressed, which torch.save never does. Load another step, see checkpoint.steps."
        )


def _read_some(file: Any, target: memoryview) -> int:
    if hasattr(file, "readinto"):
        return int(file.readinto(target))
    content = file.read(len(target))
    target[: len(content)] = content
    return len(content)
