"""Where checkpoints lie: the few operations that saving and loading need of a folder.

Names are relative to the folder, with "/" between parts. Whatever fails raises a `CheckpointError`
that names the file. The local file system is here; every other URL goes to fsspec, see
:mod:`xla_dtensor.hosts.checkpoint.fsspec_storage`.

==================  ============================  ==============================================
                    local file system             object stores, through fsspec
==================  ============================  ==============================================
a file is there     when it was synced            when it was closed
a checkpoint is     renamed into its place, with  in its place from the start, and valid from the
                    all its files synced          moment its manifest, put last, is there
==================  ============================  ==============================================
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

from xla_dtensor.core.errors import CheckpointError

__all__ = ["LocalStorage", "Sink", "Storage", "naming_file", "open_storage"]


class Sink(ABC):
    """A file being written."""

    @abstractmethod
    def write(self, data: Any) -> int:
        """Append bytes, or anything with the buffer protocol."""

    def flush(self) -> None:  # noqa: B027
        """Nothing: what counts is `commit`. Here because torch.save calls it."""

    @abstractmethod
    def commit(self) -> None:
        """Close the file, so that it outlives a crash of the machine."""

    @abstractmethod
    def abandon(self) -> None:
        """Close the file; it may be incomplete."""


class Storage(ABC):
    """A folder that holds checkpoints.

    Args:
        root: The folder, as the user wrote it; for messages.
    """

    can_rename: ClassVar[bool]  # a folder, in one step

    def __init__(self, root: str) -> None:
        self.root = root

    def text(self, name: str) -> str:
        """Return the path of a file, for messages."""
        return f"{self.root.rstrip('/')}/{name}" if name else self.root

    @abstractmethod
    def make_folder(self, name: str) -> None:
        """Make a folder and those above it; nothing if it is there."""

    @abstractmethod
    def names(self, name: str = "") -> list[str]:
        """Return the names in a folder, sorted; none if there is no such folder."""

    @abstractmethod
    def size(self, name: str) -> int | None:
        """Return a file's size in bytes; None if there is no such file."""

    @abstractmethod
    def sink(self, name: str) -> Sink:
        """Begin to write a new file."""

    @abstractmethod
    def put(self, name: str, data: bytes) -> None:
        """Write a file in one step: a reader sees the old content or the new, never a part."""

    @abstractmethod
    def open(self, name: str) -> BinaryIO:
        """Open a file to read from it."""

    @abstractmethod
    def rename(self, old: str, new: str) -> None:
        """Rename a folder in one step. Only where `can_rename`."""

    @abstractmethod
    def remove_file(self, name: str) -> None:
        """Remove a file; nothing if it is not there."""

    @abstractmethod
    def remove_folder(self, name: str) -> None:
        """Remove a folder with all that is in it; nothing if it is not there."""

    def sync_folder(self, name: str) -> None:  # noqa: B027
        """Make the names in a folder outlive a crash of the machine."""

    def read_all(self, name: str) -> bytes:
        """Return the whole content of a file."""
        with naming_file(self.text(name), "read"), self.open(name) as file:
            return file.read()


@contextlib.contextmanager
def naming_file(path: str, verb: str) -> Iterator[None]:
    """Raise what fails inside as an error that names the file.

    Args:
        path: The file.
        verb: What was to be done: "written", "read".

    Raises:
        CheckpointError: Anything was raised inside.
    """
    try:
        yield
    except CheckpointError:
        raise
    except FileNotFoundError as error:
        raise CheckpointError(
            f"The file {path} was to be {verb}. It is not there, or was removed meanwhile. Pass "
            "another step, or put the file back."
        ) from error
    except Exception as error:  # Each kind of store has its own.
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise CheckpointError(
            f"The file {path} was to be {verb}. The file system refused it: {reason}. Make room "
            "or mend the file system, and call it again; the checkpoints before are untouched."
        ) from error


def open_storage(folder: str | os.PathLike[str]) -> Storage:
    """Return the storage of a folder or an fsspec URL.

    Args:
        folder: A path, or a URL such as "gs://bucket/run" or "memory://run".

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     storage = open_storage(folder)
        ...     storage.put("a", b"abc")
        ...     storage.names(), storage.size("a")
        (['a'], 3)
    """
    text = os.fspath(folder)
    if "://" not in text or text.startswith("file://"):
        return LocalStorage(text.removeprefix("file://"))
    return importlib.import_module("xla_dtensor.hosts.checkpoint.fsspec_storage").FsspecStorage(
        text
    )


class LocalStorage(Storage):
    """A folder of the local file system, or of a shared one that is mounted."""

    can_rename = True

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self._root = Path(root)

    def _path(self, name: str) -> Path:
        return self._root / name if name else self._root

    def make_folder(self, name: str) -> None:
        """Make a folder and those above it."""
        folder = self._path(name)
        with naming_file(self.text(name), "made"):
            new = [each for each in (folder, *folder.parents) if not each.exists()]
            try:
                folder.mkdir(parents=True, exist_ok=True)
                for each in new:
                    _sync(each.parent)
            except OSError:
                for each in new:  # the innermost first
                    with contextlib.suppress(OSError):
                        each.rmdir()
                raise

    def names(self, name: str = "") -> list[str]:
        """Return the names in a folder."""
        with naming_file(self.text(name), "listed"):
            try:
                return sorted(os.listdir(self._path(name)))
            except FileNotFoundError:
                return []

    def size(self, name: str) -> int | None:
        """Return a file's size in bytes."""
        try:
            return self._path(name).stat().st_size
        except FileNotFoundError:
            return None

    def sink(self, name: str) -> Sink:
        """Begin to write a new file."""
        with naming_file(self.text(name), "written"):
            return _LocalSink(open(self._path(name), "xb"), self.text(name))

    def put(self, name: str, data: bytes) -> None:
        """Write a file in one step."""
        temporary = f"{name}.{os.getpid()}.new"
        with naming_file(self.text(name), "written"):
            try:
                with open(self._path(temporary), "wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(self._path(temporary), self._path(name))
            except BaseException:
                with contextlib.suppress(OSError):
                    self._path(temporary).unlink(missing_ok=True)
                raise
        self.sync_folder(os.path.dirname(name))

    def open(self, name: str) -> BinaryIO:
        """Open a file to read from it."""
        with naming_file(self.text(name), "read"):
            return open(self._path(name), "rb")

    def rename(self, old: str, new: str) -> None:
        """Rename a folder in one step."""
        with naming_file(self.text(new), "written"):
            os.rename(self._path(old), self._path(new))
        self.sync_folder(os.path.dirname(new))

    def remove_file(self, name: str) -> None:
        """Remove a file."""
        with naming_file(self.text(name), "removed"):
            self._path(name).unlink(missing_ok=True)

    def remove_folder(self, name: str) -> None:
        """Remove a folder with all that is in it."""
        if self._path(name).exists():
            with naming_file(self.text(name), "removed"):
                shutil.rmtree(self._path(name))

    def sync_folder(self, name: str) -> None:
        """Sync the names in a folder."""
        with naming_file(self.text(name), "written"):
            _sync(self._path(name))


def _sync(folder: Path) -> None:
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


class _LocalSink(Sink):
    def __init__(self, file: BinaryIO, path: str) -> None:
        self._file, self._path = file, path

    def write(self, data: Any) -> int:
        with naming_file(self._path, "written"):
            return self._file.write(data)

    def commit(self) -> None:
        with naming_file(self._path, "written"):
            try:
                self._file.flush()
                os.fsync(self._file.fileno())
            finally:
                self._file.close()

    def abandon(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()
