"""Where checkpoints lie: the few operations that saving and loading need of a folder.

Names are relative to the folder, with "/" between parts. Whatever fails raises a `CheckpointError`
that names the file.

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
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, cast

from xla_dtensor.core.errors import CheckpointError

__all__ = ["Storage", "naming_file", "open_storage"]


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
    def create(self, name: str) -> BinaryIO:
        """Begin to write a new file, which `finish` or `abandon` ends."""

    @abstractmethod
    def finish(self, file: BinaryIO) -> None:
        """Close a file, so that it outlives a crash of the machine."""

    @abstractmethod
    def abandon(self, file: BinaryIO) -> None:
        """Close a file that may be incomplete."""

    @abstractmethod
    def put(self, name: str, content: bytes) -> None:
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
        return _Local(text.removeprefix("file://"))
    return _Fsspec(text)


class _Local(Storage):
    """A folder of the local file system, or of a shared one that is mounted."""

    can_rename = True

    def _path(self, name: str) -> Path:
        return Path(self.root) / name if name else Path(self.root)

    def make_folder(self, name: str) -> None:
        folder = self._path(name)
        with naming_file(self.text(name), "made"):
            new = [path for path in (folder, *folder.parents) if not path.exists()]
            try:
                folder.mkdir(parents=True, exist_ok=True)
                for path in new:
                    _sync(path.parent)
            except OSError:
                for path in new:  # the innermost first
                    with contextlib.suppress(OSError):
                        path.rmdir()
                raise

    def names(self, name: str = "") -> list[str]:
        with naming_file(self.text(name), "listed"):
            try:
                return sorted(os.listdir(self._path(name)))
            except FileNotFoundError:
                return []

    def size(self, name: str) -> int | None:
        try:
            return self._path(name).stat().st_size
        except FileNotFoundError:
            return None

    def create(self, name: str) -> BinaryIO:
        with naming_file(self.text(name), "written"):
            return open(self._path(name), "xb")

    def finish(self, file: BinaryIO) -> None:
        with naming_file(file.name, "written"), contextlib.closing(file):
            file.flush()
            os.fsync(file.fileno())

    def abandon(self, file: BinaryIO) -> None:
        with contextlib.suppress(OSError):
            file.close()

    def put(self, name: str, content: bytes) -> None:
        temporary = f"{name}.{os.getpid()}.new"
        with naming_file(self.text(name), "written"):
            try:
                with open(self._path(temporary), "wb") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(self._path(temporary), self._path(name))
            except BaseException:
                with contextlib.suppress(OSError):
                    self._path(temporary).unlink(missing_ok=True)
                raise
            _sync(self._path(name).parent)

    def open(self, name: str) -> BinaryIO:
        with naming_file(self.text(name), "read"):
            return open(self._path(name), "rb")

    def rename(self, old: str, new: str) -> None:
        with naming_file(self.text(new), "written"):
            os.rename(self._path(old), self._path(new))
            _sync(self._path(new).parent)

    def remove_file(self, name: str) -> None:
        with naming_file(self.text(name), "removed"):
            self._path(name).unlink(missing_ok=True)

    def remove_folder(self, name: str) -> None:
        if self._path(name).exists():
            with naming_file(self.text(name), "removed"):
                shutil.rmtree(self._path(name))


def _sync(folder: Path) -> None:
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


class _Fsspec(Storage):
    """A folder behind an fsspec URL, of which none is expected to rename a folder.

    fsspec is imported when a URL asks for it.
    """

    can_rename = False

    def __init__(self, root: str) -> None:
        super().__init__(root)
        try:
            from fsspec.core import url_to_fs

            self._files, self._base = url_to_fs(root)
        except (ImportError, ValueError) as error:
            raise CheckpointError(
                f"The folder {root} was asked for. fsspec cannot open it: {error}. Install fsspec "
                "and its package for this kind of URL, or pass a local folder."
            ) from error

    def _path(self, name: str) -> str:
        return f"{self._base.rstrip('/')}/{name}" if name else self._base

    def make_folder(self, name: str) -> None:
        with naming_file(self.text(name), "made"):
            self._files.makedirs(self._path(name), exist_ok=True)

    def names(self, name: str = "") -> list[str]:
        with naming_file(self.text(name), "listed"):
            self._files.invalidate_cache()
            try:
                paths: list[Any] = self._files.ls(self._path(name), detail=False)
            except FileNotFoundError:
                return []
        return sorted({str(path).rstrip("/").rpartition("/")[2] for path in paths})

    def size(self, name: str) -> int | None:
        with naming_file(self.text(name), "read"):
            try:
                return int(self._files.info(self._path(name))["size"])
            except FileNotFoundError:
                return None

    def create(self, name: str) -> BinaryIO:
        with naming_file(self.text(name), "written"):
            return cast("BinaryIO", self._files.open(self._path(name), "wb"))

    def finish(self, file: BinaryIO) -> None:
        file.close()

    def abandon(self, file: Any) -> None:
        with contextlib.suppress(Exception):
            file.discard()
        with contextlib.suppress(Exception):
            file.close()

    def put(self, name: str, content: bytes) -> None:
        with naming_file(self.text(name), "written"):
            self._files.pipe_file(self._path(name), content)

    def open(self, name: str) -> BinaryIO:
        with naming_file(self.text(name), "read"):
            return cast("BinaryIO", self._files.open(self._path(name), "rb"))

    def rename(self, old: str, new: str) -> None:
        raise NotImplementedError(f"{self.root} cannot rename {old} to {new} in one step")

    def remove_file(self, name: str) -> None:
        with naming_file(self.text(name), "removed"), contextlib.suppress(FileNotFoundError):
            self._files.rm_file(self._path(name))

    def remove_folder(self, name: str) -> None:
        with naming_file(self.text(name), "removed"), contextlib.suppress(FileNotFoundError):
            self._files.rm(self._path(name), recursive=True)
