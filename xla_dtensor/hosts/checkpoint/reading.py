"""Reading pieces of a checkpoint: every byte that is used has had its checksum compared.

Of a tensor only the chunks are read that meet the block wanted, one at a time. What the last few
chunks hold is kept, up to `KEPT_BYTES`, since neighbouring blocks often share them.
"""

from __future__ import annotations

import io
import pickle
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import torch

from xla_dtensor.core.errors import CheckpointError
from xla_dtensor.dtensor.dcp import Index
from xla_dtensor.hosts.checkpoint.manifest import Chunk, Entry
from xla_dtensor.hosts.checkpoint.storage import Storage, naming_file

__all__ = ["KEPT_BYTES", "Reader"]

KEPT_BYTES = 128 << 20
_MOST_FILES = 16


class Reader:
    """Reads from the folder of one checkpoint; a context manager that closes its files.

    Args:
        storage: Where checkpoints lie.
        folder: The checkpoint's folder.
        files: Bytes of each of its files, as the manifest has them.
        progress: Called with the bytes that were read.
    """

    def __init__(
        self,
        storage: Storage,
        folder: str,
        files: Mapping[str, int],
        progress: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._storage, self._folder, self._progress = storage, folder, progress
        self._sizes = files
        self._files: OrderedDict[str, BinaryIO] = OrderedDict()
        self._kept: OrderedDict[Chunk, torch.Tensor] = OrderedDict()
        self._index: dict[str, tuple[Any, Any]] = {}

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

    def block(self, name: str, entry: Entry, index: Index, dtype: torch.dtype) -> torch.Tensor:
        """Return one block of a tensor, as a new CPU tensor.

        Args:
            name: The tensor's name.
            entry: What the manifest says of it.
            index: The block, one slice per dim.
            dtype: What its values are converted to.

        Raises:
            CheckpointError: A file cannot be read, or a checksum differs.
        """
        result = torch.empty([s.stop - s.start for s in index], dtype=dtype)
        if result.numel() == 0:
            return result
        saved = getattr(torch, str(entry.dtype))
        for chunk in self._meeting(name, entry, index):
            target, source = _overlap(index, chunk)
            part = result[target]
            whole = part.shape == chunk.shape and part.is_contiguous() and dtype == saved
            if whole and chunk not in self._kept:
                self._read_into(name, chunk, part)
            else:
                part.copy_(self._values(name, chunk, saved)[source])
        return result

    def value(self, name: str, entry: Entry) -> Any:
        """Return a plain value.

        Raises:
            CheckpointError: A file cannot be read, or a checksum differs.
        """
        chunk = entry.chunks[0]
        data = bytearray(chunk.length)
        self._fill(name, chunk, memoryview(data))
        _refuse_compressed(data, self._text(chunk))
        try:
            return torch.load(io.BytesIO(data), weights_only=True)
        except pickle.UnpicklingError as error:
            raise CheckpointError(
                f"The value {name!r} in the file {self._text(chunk)} was to be loaded. It has "
                f"classes that are not allowed: {str(error).splitlines()[0]}. Name them to "
                "torch.serialization.add_safe_globals, as when it was saved."
            ) from error

    def check(self, name: str, entry: Entry) -> None:
        """Read an entry and compare its checksums."""
        for chunk in entry.chunks:
            self._read_into(name, chunk, torch.empty(_num_bytes(entry, chunk), dtype=torch.uint8))

    # ------------------------------------------------------------------ chunks

    def _meeting(self, name: str, entry: Entry, index: Index) -> list[Chunk]:
        found = self._index.get(name)
        if found is None:
            starts = np.array([c.offset for c in entry.chunks], dtype=np.int64)
            sizes = np.array([c.shape for c in entry.chunks], dtype=np.int64)
            starts = starts.reshape(len(entry.chunks), -1)
            found = starts, starts + sizes.reshape(starts.shape)
            self._index = {name: found}  # that of the tensor being read only
        starts, stops = found
        low = np.array([s.start for s in index], dtype=np.int64)
        high = np.array([s.stop for s in index], dtype=np.int64)
        meets = ((starts < high) & (stops > low)).all(axis=1)
        return [entry.chunks[i] for i in np.flatnonzero(meets)]

    def _values(self, name: str, chunk: Chunk, dtype: torch.dtype) -> torch.Tensor:
        kept = self._kept.get(chunk)
        if kept is None:
            kept = torch.empty(chunk.shape, dtype=dtype)
            self._read_into(name, chunk, kept)
            self._kept[chunk] = kept
            while len(self._kept) > 1 and sum(t.nbytes for t in self._kept.values()) > KEPT_BYTES:
                self._kept.popitem(last=False)
        else:
            self._kept.move_to_end(chunk)
        return kept

    def _read_into(self, name: str, chunk: Chunk, target: torch.Tensor) -> None:
        if target.numel() == 0:
            return
        flat = target.view(-1) if target.ndim else target.reshape(1)
        self._fill(name, chunk, flat.view(torch.uint8).numpy().data)

    def _fill(self, name: str, chunk: Chunk, target: memoryview) -> None:
        path = self._text(chunk)
        with naming_file(path, "read"):
            file = self._file(chunk.file)
            file.seek(chunk.data_start)
            done = 0
            while done < len(target):
                count = _read_some(file, target[done:])
                if not count:
                    break
                done += count
        if done < len(target):
            raise CheckpointError(
                f"The file {path} was to be read for {name!r}. It ends {len(target) - done} bytes "
                f"before the end of the piece at byte {chunk.data_start}: it was truncated. Load "
                "another step, see checkpoint.steps."
            )
        found = zlib.crc32(target)
        if found != chunk.crc32:
            raise CheckpointError(
                f"The file {path} was to be read for {name!r}. Its {len(target)} bytes from byte "
                f"{chunk.data_start} have the checksum {found:08x}, not {chunk.crc32:08x}: they "
                "were changed after they were written. Load another step, see checkpoint.steps."
            )
        self._progress(len(target))

    def _check_size(self, file: str) -> None:
        name, expected = f"{self._folder}/{file}", self._sizes[file]
        size = self._storage.size(name)
        if size is not None and size != expected:
            raise CheckpointError(
                f"The file {self._storage.text(name)} was to be read. It has {size} bytes and was "
                f"written with {expected}: it was truncated or changed. Load another step, see "
                "checkpoint.steps."
            )

    def _text(self, chunk: Chunk) -> str:
        return self._storage.text(f"{self._folder}/{chunk.file}")

    def _file(self, name: str) -> BinaryIO:
        found = self._files.get(name)
        if found is None:
            self._check_size(name)
            found = self._files[name] = self._storage.open(f"{self._folder}/{name}")
            while len(self._files) > _MOST_FILES:
                self._files.popitem(last=False)[1].close()
        return found


def _refuse_compressed(data: bytearray, path: str) -> None:
    """torch.save compresses nothing; what is compressed may be of any size when it is read."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as records:
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
    data = file.read(len(target))
    target[: len(data)] = data
    return len(data)


def _num_bytes(entry: Entry, chunk: Chunk) -> int:
    if entry.shape is None:
        return chunk.length
    size = torch.empty((), dtype=getattr(torch, str(entry.dtype))).element_size()
    return torch.Size(chunk.shape).numel() * size


def _overlap(index: Sequence[slice], chunk: Chunk) -> tuple[Index, Index]:
    """Where a chunk and a block meet: within the block, and within the chunk."""
    target: list[slice] = []
    source: list[slice] = []
    for wanted, offset, size in zip(index, chunk.offset, chunk.shape, strict=True):
        start, stop = max(wanted.start, offset), min(wanted.stop, offset + size)
        target.append(slice(start - wanted.start, stop - wanted.start))
        source.append(slice(start - offset, stop - offset))
    return tuple(target), tuple(source)
