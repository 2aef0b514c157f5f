"""Points of failure: everything that a save or a load asks of the file system can go wrong there.

    with Points() as points:            counts
        checkpoint.save(...)
    points.seen

    with Points(at=17, act=power_cut):  does something before the 17th
        checkpoint.save(...)

`PowerCut` knows what had been synced when the power went, and undoes the rest.
"""

from __future__ import annotations

import io
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from xla_dtensor.hosts.checkpoint import storage

__all__ = ["FullDisk", "Points", "PowerCut", "PowerLoss", "slow"]


class PowerLoss(BaseException):
    """The machine is off: nothing that comes after has any effect."""


class Points:
    """Within it, `act` is called before every point from number `at` on.

    Args:
        at: The first point that something is done at. None: they are counted only.
        act: Called with the name of the operation, its file, and the data that is to be written.
            What it raises, the operation raises.
        watch: Called after every operation with its name and its file; before a replacement, too.
    """

    def __init__(
        self,
        at: int | None = None,
        act: Callable[[str, Any, Any], None] = lambda *_: None,
        watch: Callable[[str, Any], None] = lambda *_: None,
    ) -> None:
        self.seen: list[str] = []
        self._at, self._act, self._watch = at, act, watch
        self._patch = pytest.MonkeyPatch()

    def hit(self, what: str, file: Any, data: Any = None) -> None:
        """An operation is about to happen."""
        self.seen.append(what)
        if self._at is not None and len(self.seen) > self._at:
            self._act(what, file, data)

    def done(self, what: str, file: Any) -> None:
        """An operation has happened."""
        self._watch(what, file)

    def __enter__(self) -> Points:
        self._patch.setattr(storage, "os", _Module(os, self))
        self._patch.setattr(storage, "shutil", _Module(shutil, self))
        self._patch.setattr(storage, "open", self._open, raising=False)
        for name in ("mkdir", "unlink"):
            self._patch.setattr(Path, name, self._counted(name, getattr(Path, name)))
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.undo()

    def _counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *args: Any, **kwargs: Any) -> Any:
            self.hit(name, path)
            result = function(path, *args, **kwargs)
            self.done(name, path)
            return result

        return call

    def _open(self, path: Any, mode: str) -> Any:
        self.hit(f"open {mode}", path)
        file = _File(io.FileIO(path, mode), self)
        self.done(f"open {mode}", path)
        return file


class _Module:
    """``os`` or ``shutil`` with points in what changes a file system."""

    def __init__(self, module: Any, points: Points) -> None:
        self._module, self._points = module, points

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)
        if name not in ("fsync", "replace", "rename", "rmtree"):
            return found

        def call(first: Any, *rest: Any) -> Any:
            self._points.hit(name, first, rest[0] if rest else None)
            self._points.done(f"before {name}", (first, *rest))
            result = found(first, *rest)
            self._points.done(name, (first, *rest))
            return result

        return call


class _File:
    """An open file whose reads and writes are points; it has no buffer of its own."""

    def __init__(self, file: Any, points: Points) -> None:
        self._file, self._points = file, points

    def write(self, data: Any) -> int:
        self._points.hit("write", self._file, data)
        self._file.write(data)
        self._file.flush()
        self._points.done("write", self._file.name)
        return len(data)

    def read(self, *size: int) -> bytes:
        self._points.hit("read", self._file)
        return self._file.read(*size)

    def readinto(self, target: Any) -> int:
        self._points.hit("read", self._file)
        return self._file.readinto(target)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


class FullDisk:
    """An `act`: of what is written a part fits, and then nothing."""

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw
        self.refused: list[str] = []

    def __call__(self, what: str, file: Any, data: Any) -> None:
        """Refuse what needs room."""
        if what in ("write", "mkdir", "fsync") or what.startswith(("open w", "open x")):
            if what == "write":
                file.write(memoryview(data)[: self._draw.randrange(len(data) + 1)])
                file.flush()
            self.refused.append(what)
            raise OSError(28, "No space left on device")


class PowerCut:
    """An `act` and a `watch`: the power goes, and some of what was not synced is lost."""

    def __init__(self, folder: Path, draw: random.Random) -> None:
        self._folder, self._draw = folder, draw
        self._synced: dict[int, int] = {}  # bytes by inode
        self._new: dict[int, Path] = {}  # by inode: the folder whose name for it is not synced
        self._moved: list[tuple[Path, Path, bytes | None]] = []
        self._old: bytes | None = None  # what is about to be replaced

    def __call__(self, what: str, file: Any, data: Any) -> None:
        """The power is off from here on."""
        raise PowerLoss

    def watch(self, what: str, file: Any) -> None:
        """See what has happened."""
        if what in ("open wb", "open xb"):
            self._synced[os.stat(file).st_ino] = 0
            self._new[os.stat(file).st_ino] = Path(file).parent
        elif what == "fsync":
            path = Path(os.readlink(f"/proc/self/fd/{file[0]}"))
            if path.is_dir():
                self._moved = [m for m in self._moved if m[1].parent != path]
                self._new = {i: p for i, p in self._new.items() if p != path}
            else:
                self._synced[path.stat().st_ino] = path.stat().st_size
        elif what == "before replace":
            self._old = Path(file[1]).read_bytes() if Path(file[1]).exists() else None
        elif what in ("rename", "replace"):
            old = self._old if what == "replace" else None
            if old is not None:  # a name that was there is the old file or the new, never none
                self._new.pop(os.stat(file[1]).st_ino, None)
            self._moved.append((Path(file[0]), Path(file[1]), old))

    def lose(self) -> None:
        """Undo a part of what was not synced: what a machine might come back with."""
        for old, new, content in reversed(self._moved):
            if self._draw.random() < 0.5 and new.exists() and not old.exists():
                os.rename(new, old)
                if content is not None:
                    new.write_bytes(content)
        for path in list(self._files()):
            number = path.stat().st_ino
            if number in self._new and self._draw.random() < 0.5:
                path.unlink()
            elif number in self._synced and path.stat().st_size > self._synced[number]:
                size = self._draw.randint(self._synced[number], path.stat().st_size)
                os.truncate(path, size)

    def _files(self) -> Iterator[Path]:
        return (p for p in self._folder.rglob("*") if p.is_file())


def slow(seconds: float) -> Callable[[str, Any, Any], None]:
    """An `act`: every operation takes so much longer."""
    return lambda *_: time.sleep(seconds)
