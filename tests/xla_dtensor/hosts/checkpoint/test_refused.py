"""What cannot be saved or loaded, and what is damaged, is refused by name."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

import xla_dtensor as xd
from xla_dtensor import checkpoint
from xla_dtensor.errors import CheckpointError
from xla_dtensor.hosts.checkpoint.manifest import Chunk, Manifest, check_covered
from xla_dtensor.runtimes import Runtime

pytestmark = pytest.mark.usefixtures("mesh")
R, S = Replicate(), Shard


def put(value: torch.Tensor, mesh: xd.DeviceMesh, placements: Any) -> Any:
    return xd.distribute_tensor(value, mesh, list(placements))


def manifest_of(path: str) -> dict[str, Any]:
    return json.loads((Path(path) / "manifest.json").read_text())["manifest"]


class Odd:
    """Of a class that torch.load does not know."""


def _local(mesh: xd.DeviceMesh) -> Any:
    return put(torch.ones(8), mesh, [S(0), R]).to_local()


@pytest.mark.parametrize(
    ("state", "text"),
    [
        (lambda _: {"v": {"a": Odd()}}, r"The value 'v.a' of type=Odd was to be saved. It cannot"),
        (lambda _: {"v": lambda: 1}, r"The value 'v' of type=function was to be saved. It cannot"),
        (lambda _: {"a": {"b.c": 1}, "a.b": {"c": 2}}, r"Both have the name 'a.b.c' in a check"),
        (lambda _: {"a": {(1, 2): 1}}, r"has the key \(1, 2\). A manifest can name str and int"),
        (lambda _: {"rng": 1}, r"A state with the key 'rng' was given. The generators have this"),
        (lambda _: {"m": torch.ones(2, device="meta")}, "is on the meta device and has no value"),
        (lambda mesh: {"l": _local(mesh)}, "It has another value on each device"),
    ],
    ids=["class", "function", "two names", "key", "rng", "meta", "local"],
)
def test_states_that_cannot_be_saved(
    state: Callable[[Any], Any], text: str, tmp_path: Path, mesh: xd.DeviceMesh
) -> None:
    with pytest.raises(CheckpointError, match=text):
        checkpoint.save(tmp_path, state(mesh), step=1)
    assert checkpoint.latest(tmp_path) is None


def test_wrong_arguments(tmp_path: Path, count_sentences: Callable[[str], int]) -> None:
    x = {"x": torch.ones(2)}
    checkpoint.save(tmp_path / "full", {**x, "n": 1, "t": (torch.ones(1), 2)}, step=7)
    tuples = {**x, "n": 1, "t": (torch.ones(1), 2)}
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: checkpoint.save(tmp_path, x, step=-1), "step=-1. It names the folder"),
        (lambda: checkpoint.save(tmp_path, x, step=True), "step=True. It names the folder"),
        (lambda: checkpoint.save(tmp_path, x, step=1, keep=0), "keep=0. The one being saved"),
        (lambda: checkpoint.load(tmp_path / "no", x), "The newest checkpoint in .*no was to be"),
        (lambda: checkpoint.load(tmp_path / "full", x, step=3), r"step=3 in .* steps \[7\], and"),
        (lambda: checkpoint.load(tmp_path, x), r"The folder has only \['full'\], and only fold"),
        (lambda: checkpoint.load(tmp_path / "full", {"x": 1}, only=["x"]), "a tensor there, and a"),
        (
            lambda: checkpoint.load(tmp_path / "full", {"x": torch.ones(3)}, only=["x"]),
            r"shape=\(2,\) there, and shape=\(3,\) in the state",
        ),
        (lambda: checkpoint.load(tmp_path / "full", tuples), r"\['t', 1\] was to be loaded. It st"),
    ]
    for call, text in cases:
        with pytest.raises(CheckpointError, match=text) as raised:
            call()
        assert count_sentences(str(raised.value)) >= 3, raised.value


def test_damage_is_refused_by_name(tmp_path: Path) -> None:
    state = {"x": torch.ones(400), "n": [1]}
    path = Path(checkpoint.save(tmp_path, state, step=1, rng=False))
    (data,) = path.glob("*.distcp")
    good, manifest = data.read_bytes(), (path / "manifest.json").read_bytes()
    entries = manifest_of(str(path))["entries"]
    start = entries["x"]["chunks"][0][5]

    def refused(text: str) -> None:
        for call in (lambda: checkpoint.load(tmp_path, state), lambda: checkpoint.verify(tmp_path)):
            with pytest.raises(CheckpointError, match=text):
                call()

    data.write_bytes(good[:start] + b"?" + good[start + 1 :])
    refused(rf"{data.name} was to be read for 'x'. Its 1600 bytes from byte {start} have the")
    data.write_bytes(good[:-1])
    refused(rf"{data.name} was to be read. It has {len(good) - 1} bytes and was written with")
    data.unlink()
    refused(rf"{data.name} was to be read. It is not there, or was removed meanwhile")
    data.write_bytes(good)
    (path / "manifest.json").write_bytes(manifest.replace(b'"step": 1', b'"step": 2'))
    refused("manifest.json was to be read. It is damaged or of another kind: its content does not")
    (path / "manifest.json").write_bytes(manifest[:-9])
    refused("manifest.json was to be read. It is damaged or of another kind")
    (path / "manifest.json").write_bytes(Manifest(5, "a", 1).to_bytes())
    refused("manifest.json was to be read. It is that of step=5")
    (path / "manifest.json").write_bytes(manifest)
    checkpoint.load(tmp_path, state)


def test_no_code_of_a_checkpoint_is_run(tmp_path: Path) -> None:
    path = Path(checkpoint.save(tmp_path, {"n": [1]}, step=1))
    (path / ".metadata").write_bytes(pickle.dumps(Odd()))  # never read here
    state = {"n": 0}
    checkpoint.load(tmp_path, cast("Any", state))
    assert state["n"] == [1]


@pytest.mark.parametrize(
    "chunks",
    [
        [],
        [((0, 0), (4, 2))],
        [((0, 0), (4, 2)), ((0, 1), (4, 2))],
        [((0, 0), (4, 2)), ((0, 2), (4, 2)), ((0, 0), (4, 2))],
        [((0, 0), (4, 3)), ((0, 2), (4, 2))],
        [((0, 0), (5, 4))],
    ],
    ids=["none", "half", "hole", "twice", "overlap", "too large"],
)
def test_pieces_that_are_not_the_whole(chunks: list[Any]) -> None:
    pieces = [Chunk(offset, shape, "f", 0, 0, 0, 0) for offset, shape in chunks]
    with pytest.raises(CheckpointError, match=r"The tensor 'x' of shape=\(4, 4\) was to be saved"):
        check_covered("x", (4, 4), pieces)


def test_shards_that_are_silently_not_written_are_noticed(
    tmp_path: Path, mesh: xd.DeviceMesh, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = put(torch.ones(8, 4), mesh, [S(0), R])
    monkeypatch.setattr(runtime, "addressable_device_ids", lambda: runtime.device_ids()[:4])
    monkeypatch.setattr("xla_dtensor.hosts.checkpoint.exchange._store_of_job", lambda: None)
    with pytest.raises(CheckpointError, match="are not the whole of it, each element once"):
        checkpoint.save(tmp_path, {"x": x}, step=1)
    assert checkpoint.latest(tmp_path) is None
    assert not list(tmp_path.iterdir())
