"""Checkpoints on object stores and whatever else fsspec reaches.

fsspec is imported when a URL asks for it. No store is expected to rename a folder: see the table in
:mod:`xla_dtensor.hosts.checkpoint.storage`.
"""

from __future__ import annotations

import contextlib
from typing import Any, BinaryIO, cast

from xla_dtensor.core.errors import CheckpointError
from xla_dtensor.hosts.checkpoint.storage import Sink, Storage, naming_file

__all__ = ["FsspecStorage"]


class FsspecStorage(Storage):
    """A folder behind an fsspec URL.

    Args:
        root: The URL, such as "gs://bucket/run".

    Raises:
        CheckpointError: fsspec, or its package for this kind of URL, is not installed.
    """

    can_rename = False

    def __init__(self, root: str) -> None:
        super().__init__(root)
        try:
            from fsspec.core import url_to_fs

            self._fs, self._base = url_to_fs(root)
        except (ImportError, ValueError) as error:
            raise CheckpointError(
                f"The folder {root} was asked for. fsspec cannot open it: {error}. Install fsspec "
                "and its package for this kind of URL, or pass a local folder."
            ) from error

    def _path(self, name: str) -> str:
        return f"{self._base.rstrip('/')}/{name}" if name else self._base

    def make_folder(self, name: str) -> None:
        """Make a folder and those above it."""
        with naming_file(self.text(name), "made"):
            self._fs.makedirs(self._path(name), exist_ok=True)

    def names(self, name: str = "") -> list[str]:
        """Return the names in a folder."""
        with naming_file(self.text(name), "listed"):
            self._fs.invalidate_cache()
            try:
                found = self._fs.ls(self._path(name), detail=False)
            except FileNotFoundError:
                return []
        return sorted({str(each).rstrip("/").rpartition("/")[2] for each in found})

    def size(self, name: str) -> int | None:
        """Return a file's size in bytes."""
        with naming_file(self.text(name), "read"):
            try:
                return int(self._fs.info(self._path(name))["size"])
            except FileNotFoundError:
                return None

    def sink(self, name: str) -> Sink:
        """Begin to write a new file."""
        with naming_file(self.text(name), "written"):
            return _FsspecSink(self._fs.open(self._path(name), "wb"), self.text(name))

    def put(self, name: str, data: bytes) -> None:
        """Write a file in one step."""
        with naming_file(self.text(name), "written"):
            self._fs.pipe_file(self._path(name), data)

    def open(self, name: str) -> BinaryIO:
        """Open a file to read from it."""
        with naming_file(self.text(name), "read"):
            return cast("BinaryIO", self._fs.open(self._path(name), "rb"))

    def rename(self, old: str, new: str) -> None:
        """Nothing can be renamed: see `can_rename`."""
        raise NotImplementedError(f"{self.root} cannot rename {old} to {new} in one step")

    def remove_file(self, name: str) -> None:
        """Remove a file."""
        with naming_file(self.text(name), "removed"), contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._path(name))

    def remove_folder(self, name: str) -> None:
        """Remove a folder with all that is in it."""
        with naming_file(self.text(name), "removed"), contextlib.suppress(FileNotFoundError):
            self._fs.rm(self._path(name), recursive=True)


class _FsspecSink(Sink):
    def __init__(self, file: Any, path: str) -> None:
        self._file, self._path = file, path

    def write(self, data: Any) -> int:
        with naming_file(self._path, "written"):
            return int(self._file.write(bytes(data)))

    def commit(self) -> None:
        with naming_file(self._path, "written"):
            self._file.close()

    def abandon(self) -> None:
        with contextlib.suppress(Exception):
            self._file.discard()
        with contextlib.suppress(Exception):
            self._file.close()
