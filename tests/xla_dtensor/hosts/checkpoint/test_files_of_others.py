"""A checkpoint's folder is data: what it claims is checked, and nothing outside of it is opened.

Each case changes the manifest of a good checkpoint and gives it a right checksum again.
"""

from __future__ import annotations

import io
import json
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard

import xla_dtensor as xd
from xla_dtensor import checkpoint
from xla_dtensor.errors import CheckpointError

pytestmark = pytest.mark.usefixtures("mesh")


def saved(folder: Path, mesh: xd.DeviceMesh) -> Path:
    """A checkpoint of a sharded tensor, a plain one and a value; its folder."""
    sharded = xd.distribute_tensor(torch.arange(8.0) + 1, mesh, [Shard(0), Replicate()])
    checkpoint.save(folder, {"w": sharded, "p": torch.arange(6.0) + 1, "epoch": 3}, step=1)
    return folder / "step_00000001"


def rewrite(step: Path, change: Callable[[dict[str, Any]], None]) -> None:
    manifest = json.loads((step / "manifest.json").read_bytes())["manifest"]
    change(manifest)
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode()
    whole = {"crc32": f"{zlib.crc32(text):08x}", "manifest": manifest}
    (step / "manifest.json").write_text(json.dumps(whole))


def load(folder: Path, mesh: xd.DeviceMesh) -> dict[str, Any]:
    whole = xd.distribute_tensor(torch.zeros(8), mesh, [Replicate(), Replicate()])
    state = {"w": whole, "p": torch.zeros(6), "epoch": 0}
    checkpoint.load(folder, state, rng=False)
    return state


def _entry(name: str, key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(manifest: dict[str, Any]) -> None:
        manifest["entries"][name][key] = value

    return change


def _chunk(name: str, place: int, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(manifest: dict[str, Any]) -> None:
        manifest["entries"][name]["chunks"][0][place] = value

    return change


def _half(manifest: dict[str, Any]) -> None:
    chunks = manifest["entries"]["w"]["chunks"]
    manifest["entries"]["w"]["chunks"] = chunks[: len(chunks) // 2]


def _outside(path: str) -> Callable[[dict[str, Any]], None]:
    def change(manifest: dict[str, Any]) -> None:
        manifest["files"][path] = 24
        crc = f"{zlib.crc32(bytes(24)):08x}"
        manifest["entries"]["p"]["chunks"][0][2:] = [path, 0, 24, 0, crc]

    return change


CASES = {
    "half of a tensor": (_half, "the pieces of 'w' are not all of shape=.8,., each element once"),
    "a piece before the beginning": (_chunk("p", 0, [-3]), "the pieces of 'p' are not all"),
    "a piece that is too large": (_chunk("p", 1, [7]), "the pieces of 'p' are not all"),
    "another shape": (_entry("p", "shape", [2, 3]), "damaged or of another kind"),
    "a path to the folder above": (_outside("../secret.bin"), "'../secret.bin', which is not in"),
    "an absolute path": (_outside("/tmp/secret.bin"), "'/tmp/secret.bin', which is not in"),
    "a path below": (_outside("a/b"), "'a/b', which is not in the checkpoint's folder"),
    "a file of nobody": (_chunk("p", 2, "other.bin"), "is in 'other.bin', no file of its own"),
    "beyond the end": (_chunk("p", 5, 10**9), "goes beyond the end of"),
    "before the beginning": (_chunk("p", 5, -4), "goes beyond the end of"),
    "no dtype": (_entry("p", "dtype", "nn"), "'p' has dtype='nn'"),
    "a value in two pieces": (_entry("epoch", "chunks", []), "'epoch' has 0 pieces, not one"),
}


@pytest.mark.parametrize("name", CASES)
def test_what_a_manifest_claims_is_checked(name: str, tmp_path: Path, mesh: xd.DeviceMesh) -> None:
    change, text = CASES[name]
    (tmp_path / "secret.bin").write_bytes(bytes(24))
    rewrite(saved(tmp_path, mesh), change)
    for run in (checkpoint.verify, lambda folder: load(folder, mesh)):
        with pytest.raises(CheckpointError, match=text):
            run(tmp_path)


def _values(value: Any) -> list[tuple[Any, Any]]:
    """Each place in nested JSON, as its container and its key."""
    pairs = list(value.items() if isinstance(value, dict) else enumerate(value))
    found = [(value, key) for key, _ in pairs]
    for _, inner in pairs:
        found += _values(inner) if isinstance(inner, (dict, list)) else []
    return found


_OTHERS = st.sampled_from(
    [None, -1, 0, 3, 10**12, 1.5, "", "x", "..", [], [1], [-1], {}, {"a": 1}, True]
)


@given(place=st.integers(0, 10**6), other=_OTHERS)
def test_a_changed_manifest_loads_the_same_or_is_refused(
    place: int, other: Any, tmp_path_factory: pytest.TempPathFactory, mesh: xd.DeviceMesh
) -> None:
    folder = tmp_path_factory.mktemp("checkpoint")
    step = saved(folder, mesh)

    def change(manifest: dict[str, Any]) -> None:
        places = _values({"files": manifest["files"], "entries": manifest["entries"]})
        container, key = places[place % len(places)]
        container[key] = other

    rewrite(step, change)
    try:
        state = load(folder, mesh)
    except CheckpointError:
        return
    assert state["w"].full_tensor().cpu().tolist() == list(range(1, 9))
    assert state["p"].tolist() == list(range(1, 7))
    assert state["epoch"] == 3


def test_a_value_that_is_compressed_is_refused(tmp_path: Path, mesh: xd.DeviceMesh) -> None:
    """torch.save compresses nothing; a small file could become any number of bytes."""
    step = saved(tmp_path, mesh)
    manifest = json.loads((step / "manifest.json").read_bytes())["manifest"]
    _, _, name, start, length, *_ = manifest["entries"]["epoch"]["chunks"][0]
    file = step / name
    record = file.read_bytes()[start : start + length]
    packed = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(record)) as source,
        zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as target,
    ):
        for info in source.infolist():
            target.writestr(info.filename, source.read(info))
    data = packed.getvalue()
    (step / "packed").write_bytes(data)

    def change(manifest: dict[str, Any]) -> None:
        manifest["files"]["packed"] = len(data)
        crc = f"{zlib.crc32(data):08x}"
        manifest["entries"]["epoch"]["chunks"][0][2:] = ["packed", 0, len(data), 0, crc]

    rewrite(step, change)
    with pytest.raises(CheckpointError, match=r"is compressed, which torch\.save never does"):
        load(tmp_path, mesh)


@pytest.mark.parametrize(
    ("only", "text"),
    [
        ("w", r"with only='w'\. It takes a list of patterns of names\. Pass only=\['w'\]"),
        (["model.*"], r"No name is like 'model\.\*'; there are 'epoch', 'p', 'rng', 'w'\. "),
    ],
    ids=["a text", "of nothing"],
)
def test_patterns_that_choose_nothing(
    only: Any, text: str, tmp_path: Path, mesh: xd.DeviceMesh
) -> None:
    saved(tmp_path, mesh)
    with pytest.raises(CheckpointError, match=text):
        checkpoint.load(tmp_path, {"p": torch.zeros(6)}, only=only, rng=False)
