"""Writing one process's file of a checkpoint, with a checksum per piece.

The format is that of torch.distributed.checkpoint's ``FileSystemWriter``: what ``torch.save`` makes
of each piece, one after the other, so that ``torch.distributed.checkpoint.load`` reads it without
this library. The values lie within that record as they lie in memory; where, is noted.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch

from xla_dtensor.hosts.checkpoint.manifest import Chunk
from xla_dtensor.hosts.checkpoint.pieces import Piece
from xla_dtensor.hosts.checkpoint.storage import Sink, Storage

__all__ = ["pickled", "write_file"]


def write_file(
    storage: Storage,
    folder: str,
    file: str,
    pieces: Iterable[Piece],
    values: Mapping[str, bytes],
    progress: Callable[[int], None],
) -> tuple[int, list[tuple[str, Chunk]]]:
    """Write pieces and plain values to a file, and sync it.

    Args:
        storage: Where checkpoints lie.
        folder: The folder of this one.
        file: The file's name.
        pieces: Blocks of tensors, read one at a time.
        values: Plain values by name, as `pickled` made them.
        progress: Called with the bytes of each piece once it is written.

    Returns:
        The file's size in bytes, and each piece with its name. No file is written for nothing.

    Raises:
        CheckpointError: The file cannot be written.
    """
    sink: _Summing | None = None
    written: list[tuple[str, Chunk]] = []
    try:
        for piece in pieces:
            sink = sink or _Summing(storage.sink(f"{folder}/{file}"))
            written.append((piece.name, sink.add_tensor(piece, file)))
            progress(piece.num_bytes)
        for name, data in values.items():
            sink = sink or _Summing(storage.sink(f"{folder}/{file}"))
            written.append((name, sink.add_value(data, file)))
            progress(len(data))
        if sink is None:
            return 0, []
        sink.sink.commit()
    except BaseException:
        if sink is not None:
            sink.sink.abandon()
        raise
    return sink.position, written


def pickled(value: Any) -> bytes:
    """Return what torch.save makes of a plain value."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


class _Summing:
    """A file that torch.save writes to: it counts, and sees a tensor's values go by."""

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self.position = 0
        self._address = self._size = 0
        self._found: tuple[int, int] | None = None
        self._failed: BaseException | None = None

    def write(self, data: Any) -> int:
        """Append bytes."""
        if self._size and len(data) == self._size:
            seen = np.frombuffer(data, np.uint8)
            if seen.ctypes.data == self._address:
                self._found = (self.position, zlib.crc32(data))
        if self._failed is None:
            try:
                self.sink.write(data)
            except BaseException as error:
                # torch.save would go on to write the end of its record, and raise another error.
                self._failed = error
        self.position += len(data)
        return len(data)

    def flush(self) -> None:
        """Nothing to do before the end."""

    def _raise_failure(self) -> None:
        if self._failed is not None:
            raise self._failed

    def add_tensor(self, piece: Piece, file: str) -> Chunk:
        """Append a piece."""
        tensor = piece.read()
        start = self.position
        self._address, self._size = tensor.data_ptr(), piece.num_bytes
        self._found = None if piece.num_bytes else (start, 0)
        # Its own checksums would cost as much as the rest; the manifest has better ones.
        checks = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(False)
        try:
            torch.save(tensor, self)  # pyright: ignore[reportArgumentType]
        finally:
            torch.serialization.set_crc32_options(checks)
            self._size = 0
        self._raise_failure()
        if self._found is None:
            raise AssertionError("torch.save did not write the values of a tensor in one piece")
        data_start, checksum = self._found
        length = self.position - start
        return Chunk(piece.offset, piece.shape, file, start, length, data_start, checksum)

    def add_value(self, data: bytes, file: str) -> Chunk:
        """Append the record of a plain value."""
        start = self.position
        self.write(data)
        self._raise_failure()
        return Chunk((), (), file, start, len(data), start, zlib.crc32(data))
