"""Where checkpoints lie: the local file system, and fsspec's memory as an object store."""

from __future__ import annotations

import builtins
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from xla_dtensor import checkpoint
from xla_dtensor.errors import CheckpointError
from xla_dtensor.hosts.checkpoint.storage import Storage, naming_file, open_storage

fsspec = pytest.importorskip("fsspec")


@pytest.fixture(params=["path", "file://", "memory://"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A folder of each kind, which does not exist yet."""
    if request.param == "memory://":
        name = f"memory://{uuid.uuid4().hex}/run"
        yield name
        filesystem = fsspec.filesystem("memory")
        filesystem.rm(name.removeprefix("memory:/").removesuffix("/run"), recursive=True)
    else:
        yield f"{request.param if '://' in request.param else ''}{tmp_path}/new/run"


def test_the_operations(folder: str) -> None:
    storage = open_storage(folder)
    assert storage.can_rename == ("memory" not in folder)
    assert storage.names() == []
    assert storage.size("a") is None
    storage.make_folder("one")
    storage.put("one/a", b"first")
    storage.put("one/a", b"second")
    file = storage.create("one/b")
    assert file.write(memoryview(b"abc")) == 3
    file.write(b"def")
    storage.finish(file)
    storage.abandon(storage.create("one/c"))
    storage.remove_file("one/c")
    assert storage.names("one") == ["a", "b"]
    assert (storage.size("one/a"), storage.size("one/b")) == (6, 6)
    assert storage.read_all("one/a") == b"second"
    with storage.open("one/b") as file:
        file.seek(2)
        assert file.read(2) == b"cd"
    if storage.can_rename:
        storage.rename("one", "two")
        storage.rename("two", "one")
    storage.remove_file("one/a")
    storage.remove_file("one/a")
    assert storage.names("one") == ["b"]
    storage.remove_folder("one")
    storage.remove_folder("one")
    assert storage.names("one") == []
    with pytest.raises(CheckpointError, match=r"The file .*/one/a was to be read. It is not there"):
        storage.read_all("one/a")


def state(step: int) -> dict[str, Any]:
    return {"x": torch.arange(50.0).reshape(5, 10) + step, "step": step}


def check(folder: str, expected: list[int]) -> None:
    assert checkpoint.steps(folder) == expected
    for step in expected:
        loaded = state(-1)
        assert checkpoint.load(folder, loaded, step=step) == step
        assert torch.equal(loaded["x"], state(step)["x"])
        assert loaded["step"] == step
        assert checkpoint.verify(folder, step=step) == step


def test_save_load_and_keep(folder: str) -> None:
    assert checkpoint.latest(folder) is None
    for step in (1, 2, 3):
        path = checkpoint.save(folder, state(step), step=step, keep=2)
        assert path == f"{folder.removeprefix('file://')}/step_{step:08d}"
    check(folder, [2, 3])
    checkpoint.async_save(folder, state(3), step=3, keep=2).wait()  # once more
    check(folder, [2, 3])
    # The one just saved stays, though it is not the newest.
    checkpoint.save(folder, state(1), step=1, keep=2)
    check(folder, [1, 3])
    storage = open_storage(folder)
    assert storage.names() == ["step_00000001", "step_00000003"]
    assert len(storage.names("step_00000003")) == 3  # nothing of the one it replaced


def test_the_local_file_system_through_fsspec_reads_what_was_written(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, state(4), step=4)
    storage = open_storage(f"local://{tmp_path}")
    assert storage.names() == ["step_00000004"]
    assert (
        storage.size("step_00000004/manifest.json")
        == (tmp_path / "step_00000004" / "manifest.json").stat().st_size
    )
    check(f"local://{tmp_path}", [4])


class PowerLoss(BaseException):
    pass


@pytest.mark.parametrize("step", [2, 3], ids=["again", "new"])
def test_an_object_store_holds_a_whole_checkpoint_at_every_moment(
    step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    changing = ("make_folder", "create", "put", "remove_file", "remove_folder")
    store = type(open_storage("memory://any"))
    at = 0
    while True:
        folder = f"memory://{uuid.uuid4().hex}"
        for earlier in (1, 2):
            checkpoint.save(folder, state(earlier), step=earlier)
        calls: list[str] = []
        with monkeypatch.context() as patch:
            for name in changing:
                patch.setattr(store, name, _counted(getattr(store, name), calls, at))
            try:
                checkpoint.save(folder, state(step), step=step, keep=2)
                break
            except PowerLoss:
                pass
        found = checkpoint.steps(folder)
        assert 2 in found
        check(folder, found)
        checkpoint.save(folder, state(4), step=4, keep=2)
        check(folder, [max(f for f in found if f < 4), 4])
        assert len(open_storage(folder).names()) == 2
        at += 1
    assert at == len(calls) >= 5


def _counted(function: Any, calls: list[str], at: int) -> Any:
    def call(storage: Storage, *arguments: Any) -> Any:
        if len(calls) >= at + 1:
            raise PowerLoss
        calls.append(function.__name__)
        if len(calls) == at + 1:
            raise PowerLoss
        return function(storage, *arguments)

    return call


def test_errors_name_the_file() -> None:
    with (
        pytest.raises(CheckpointError, match=r"^The file a/b was to be written. .*: no room. Make"),
        naming_file("a/b", "written"),
    ):
        raise OSError("no room")
    with (
        pytest.raises(CheckpointError, match=r"^inner"),
        naming_file("a/b", "written"),
    ):
        raise CheckpointError("inner")
    with pytest.raises(CheckpointError, match=r"nosuch://a was asked for. fsspec cannot open it"):
        open_storage("nosuch://a")


def test_without_fsspec(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def absent(name: str, *arguments: Any, **options: Any) -> Any:
        if name.startswith("fsspec"):
            raise ImportError("No module named 'fsspec'")
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", absent)
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(CheckpointError, match="Install fsspec and its package"):
        open_storage("memory://a")
