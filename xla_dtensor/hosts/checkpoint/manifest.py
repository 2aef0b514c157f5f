"""The manifest of a checkpoint: what it holds, where each piece lies, and how to tell it is whole.

``manifest.json`` is written last, so a folder without one is no checkpoint. It is JSON, one entry
per line, with a checksum over itself:

    {"crc32": "8f1c22d0", "manifest": {"format": "xla_dtensor.checkpoint", "version": 1, "step": 42,
     "save_id": "5f0c...", "processes": 2, "files": {"5f0c_00000.distcp": 1234, ...},
     "entries": {
       "model.w": {"path": ["model", "w"], "shape": [8, 4], "dtype": "float32", "bytes": 128,
                   "layout": "[dp, tp]", "mesh": "dp=2, tp=4",
                   "chunks": [[offset, shape, file, start, length, data start, crc32], ...]},
       "epoch":   {"path": ["epoch"], "bytes": 812, "chunks": [...]}}}}

A tensor's *chunk* is one block of it, on disk as ``torch.save`` writes it; its checksum is over the
bytes of its values, which begin at "data start" within the file. A plain value is one chunk without
offset and shape. "path" leads to the value in the nested state; "of_process" and "copies" mark
values of which each process saved its own.

The same is written as torch.distributed.checkpoint's ``.metadata``, so that its ``load`` reads a
checkpoint without this library. That is a pickle, and never read here.

A manifest is data, and may be another's: what it claims is checked when it is read. Its files lie
in its folder, its pieces in its files, and those of a tensor are all of it, each element once.
"""

from __future__ import annotations

import json
import math
import pickle
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch

from xla_dtensor.core.errors import CheckpointError

__all__ = [
    "MANIFEST",
    "Chunk",
    "Entry",
    "Manifest",
    "PathKey",
    "check_covered",
    "metadata_bytes",
    "own_name",
]

MANIFEST = "manifest.json"
_FORMAT, _VERSION = "xla_dtensor.checkpoint", 1
PathKey: TypeAlias = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Chunk:
    """One piece on disk.

    Attributes:
        offset: Its first element along each dim; empty for a plain value.
        shape: Its number of elements along each dim.
        file: Its file, in the folder of the checkpoint.
        start: Where torch.save's record of it begins in the file, in bytes.
        length: The record's length in bytes.
        data_start: Where its values begin in the file, in bytes.
        crc32: The checksum of the values; of a plain value, of the record.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    start: int
    length: int
    data_start: int
    crc32: int

    def to_row(self) -> list[Any]:
        """Return the row of the manifest."""
        place = [self.file, self.start, self.length, self.data_start, f"{self.crc32:08x}"]
        return [list(self.offset), list(self.shape), *place]

    @classmethod
    def from_row(cls, row: Sequence[Any]) -> Chunk:
        """Return the chunk of a row."""
        offset, shape, file, start, length, data_start, crc32 = row
        numbers = int(start), int(length), int(data_start), int(crc32, 16)
        return cls(tuple(offset), tuple(shape), str(file), *numbers)


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor or plain value.

    Attributes:
        path: The keys that lead to it in the nested state.
        num_bytes: Bytes of its values.
        shape: The shape of the whole; None for a plain value.
        dtype: "float32"; None for a plain value.
        layout: How it lay when it was saved, e.g. "[dp, tp]"; None for what is no DTensor.
        mesh: The axes of its mesh, e.g. "dp=2, tp=4".
        chunks: Its pieces.
        of_process: The process whose own value this is; None where all had the same.
        copies: How many processes saved their own; this is then the first one's.
    """

    path: PathKey
    num_bytes: int
    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    layout: str | None = None
    mesh: str | None = None
    chunks: tuple[Chunk, ...] = ()
    of_process: int | None = None
    copies: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Return what the manifest says of it."""
        names = ("shape", "dtype", "layout", "mesh", "of_process", "copies")
        fields = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        rows = [chunk.to_row() for chunk in self.chunks]
        return {"path": list(self.path), "bytes": self.num_bytes, **fields, "chunks": rows}

    @classmethod
    def from_json(cls, text: Mapping[str, Any]) -> Entry:
        """Return the entry of what the manifest says."""
        fields = {k: v for k, v in text.items() if k not in ("path", "bytes", "chunks", "shape")}
        shape = tuple(text["shape"]) if "shape" in text else None
        chunks = tuple(Chunk.from_row(row) for row in text["chunks"])
        return cls(tuple(text["path"]), int(text["bytes"]), shape=shape, chunks=chunks, **fields)


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds.

    Attributes:
        step: The step that it was saved at.
        save_id: Tells two saves of one step apart; the names of its files begin with it.
        processes: How many processes wrote it.
        files: Bytes of each file.
        entries: Its tensors and values, by name.
    """

    step: int
    save_id: str
    processes: int
    files: Mapping[str, int] = field(default_factory=dict)
    entries: Mapping[str, Entry] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """Return the content of the file."""
        lines = ",\n".join(
            f"  {json.dumps(name)}: {json.dumps(entry.to_json())}"
            for name, entry in self.entries.items()
        )
        head = json.dumps(
            {
                "format": _FORMAT,
                "version": _VERSION,
                "step": self.step,
                "save_id": self.save_id,
                "processes": self.processes,
                "files": dict(self.files),
            }
        )
        body = f'{head[:-1]},\n "entries": {{\n{lines}\n }}}}'
        checksum = zlib.crc32(_canonical(json.loads(body)))
        return f'{{"crc32": "{checksum:08x}",\n "manifest": {body}}}'.encode()

    @classmethod
    def from_bytes(cls, content: bytes, path: str) -> Manifest:
        """Read the content of the file.

        Args:
            content: What the file holds.
            path: The file, for messages.

        Raises:
            CheckpointError: It is damaged, or of another kind.
        """
        try:
            document = json.loads(content)
            head = document["manifest"]
            if int(document["crc32"], 16) != zlib.crc32(_canonical(head)):
                raise ValueError("its content does not have the checksum that it names")
            if (head["format"], head["version"]) != (_FORMAT, _VERSION):
                raise ValueError(
                    f"it has format={head['format']!r}, version={head['version']!r}, not "
                    f"{_FORMAT!r}, {_VERSION}"
                )
            entries = {name: Entry.from_json(e) for name, e in head["entries"].items()}
            numbers = int(head["step"]), str(head["save_id"]), int(head["processes"])
            files = {str(name): int(size) for name, size in head["files"].items()}
            _check_claims(files, entries)
            return cls(*numbers, files, entries)
        except (
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            RecursionError,
            OverflowError,
        ) as error:
            raise CheckpointError(
                f"The manifest {path} was to be read. It is damaged or of another kind: {error}. "
                "Load another step, see checkpoint.steps."
            ) from error


def _canonical(content: Any) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()


def _check_claims(files: Mapping[str, int], entries: Mapping[str, Entry]) -> None:
    """Check what others may have written: that each piece is in a file of the folder, and whole.

    Raises:
        ValueError: It is not.
    """
    for file in files:
        if file in ("", ".", "..") or any(sign in file for sign in "/\\\0"):
            raise ValueError(f"it names the file {file!r}, which is not in the checkpoint's folder")
    for name, entry in entries.items():
        if entry.shape is None:
            if len(entry.chunks) != 1:
                raise ValueError(f"the value {name!r} has {len(entry.chunks)} pieces, not one")
            sizes = [entry.chunks[0].length]
        else:
            dtype = getattr(torch, str(entry.dtype), None)
            if not isinstance(dtype, torch.dtype):
                raise ValueError(f"{name!r} has dtype={entry.dtype!r}")
            if not is_covered(entry.shape, entry.chunks):
                raise ValueError(
                    f"the pieces of {name!r} are not all of shape={entry.shape}, each element once"
                )
            sizes = [math.prod(chunk.shape) * dtype.itemsize for chunk in entry.chunks]
        for chunk, size in zip(entry.chunks, sizes, strict=True):
            if chunk.file not in files:
                raise ValueError(f"a piece of {name!r} is in {chunk.file!r}, no file of its own")
            if not 0 <= chunk.data_start <= chunk.data_start + size <= files[chunk.file]:
                raise ValueError(f"a piece of {name!r} goes beyond the end of {chunk.file!r}")


def own_name(name: str, process: int) -> str:
    """Return the name under which a process saves its own value; the first has the plain name.

    Example:
        >>> own_name("loader", 0), own_name("loader", 1)
        ('loader', 'loader@process1')
    """
    return name if process == 0 else f"{name}@process{process}"


def check_covered(name: str, shape: Sequence[int], chunks: Iterable[Chunk]) -> None:
    """Check that chunks are a tensor: every element in one of them, and in one only.

    Args:
        name: The tensor's name, for messages.
        shape: The shape of the whole.
        chunks: Its pieces.

    Raises:
        CheckpointError: Elements are missing, or there twice.
    """
    pieces = list(chunks)
    if not is_covered(shape, pieces):
        raise CheckpointError(
            f"The tensor {name!r} of shape={tuple(shape)} was to be saved. The {len(pieces)} "
            "pieces that the processes wrote are not the whole of it, each element once. Save the "
            "same state, on the same mesh, in every process."
        )


def is_covered(shape: Sequence[int], pieces: Sequence[Chunk]) -> bool:
    """Tell whether every element of a tensor is in one of its pieces, and in one only."""
    if any(n < 0 for n in shape) or not pieces:
        return False
    starts = np.array([c.offset for c in pieces], dtype=np.int64).reshape(len(pieces), len(shape))
    sizes = np.array([c.shape for c in pieces], dtype=np.int64).reshape(len(pieces), len(shape))
    stops = starts + sizes
    if not ((starts >= 0).all() and (sizes >= 0).all() and (stops <= np.array(shape)).all()):
        return False
    if not math.prod(shape):
        return True
    # On the grid of all borders, each cell has to be in one chunk.
    borders = [np.unique([0, n, *starts[:, d], *stops[:, d]]) for d, n in enumerate(shape)]
    count = np.zeros([len(b) - 1 for b in borders], dtype=np.int32)
    for start, stop in zip(starts, stops, strict=True):
        ends = zip(borders, start, stop, strict=True)
        count[tuple(slice(*np.searchsorted(b, (i, j))) for b, i, j in ends)] += 1
    return bool((count == 1).all())


# ----------------------------------------------------------------- For torch.distributed.checkpoint


def metadata_bytes(manifest: Manifest) -> bytes:
    """Return the content of ``.metadata`` for a manifest."""
    # Here, because it takes 0.3 s to import, and only who saves needs it.
    from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

    keys: dict[str, Any] = {
        name: BytesStorageMetadata() if entry.shape is None else _tensor_metadata(entry)
        for name, entry in manifest.entries.items()
    }
    places = {
        MetadataIndex(name, chunk.offset if entry.shape is not None else None): _StorageInfo(
            chunk.file, chunk.start, chunk.length
        )
        for name, entry in manifest.entries.items()
        for chunk in entry.chunks
    }
    paths = {
        name: entry.path if entry.of_process is None else (name,)
        for name, entry in manifest.entries.items()
    }
    metadata = Metadata(keys, planner_data=paths, storage_data=places)
    metadata.version = CURRENT_DCP_VERSION
    return pickle.dumps(metadata)


def _tensor_metadata(entry: Entry) -> object:
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        TensorProperties,
        TensorStorageMetadata,
    )

    assert entry.shape is not None
    chunks = [
        ChunkStorageMetadata(offsets=torch.Size(c.offset), sizes=torch.Size(c.shape))
        for c in entry.chunks
    ]
    properties = TensorProperties(dtype=getattr(torch, str(entry.dtype)))
    return TensorStorageMetadata(properties, torch.Size(entry.shape), chunks)
