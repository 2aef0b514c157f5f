"""Evidence: what one process leaves for another to read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mesh_utils import Mesh, Topology, assign
from xla_dtensor.report import CompilerMemory, Evidence, EvidenceError, Held

WEIGHT = Held("w", "parameter", (1024, 512), "bf16", (256, 512), "[dp, -]", None, 0, 1)
BATCH = Held("args[0]", "argument", (8, 3), "s32", (2, 3), input=1)


def evidence(name: str = "2xv5e:2x2") -> Evidence:
    topology = Topology.parse(name)
    mesh = assign(topology, (4,), (topology.num_slices,), axis_names=("dp",)).mesh
    return Evidence(
        title="a test",
        hlo_text="HloModule m, num_partitions=8\n",
        mesh=mesh,
        topology=topology,
        held=(WEIGHT, BATCH),
        memory=CompilerMemory(100, 60, 50, 30, 5),
        flops=1e12,
        seconds={"compile": 1.5},
        peak_host_bytes=1 << 30,
        versions={"jax": "0.10.2"},
        options={"xla_x": "true"},
        command="make it",
        attributes={"batch": "8 rows"},
    )


def test_it_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    saved = evidence()
    saved.save(tmp_path / "new" / "folder")
    loaded = Evidence.load(tmp_path / "new" / "folder")
    assert loaded == saved
    assert loaded.mesh.device_ids.tolist() == saved.mesh.device_ids.tolist()


def test_equal_evidence_makes_equal_files(tmp_path: Path) -> None:
    for name in ("a", "b"):
        evidence().save(tmp_path / name)
    for file in (tmp_path / "a").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes()


@pytest.mark.parametrize(
    ("name", "granules"), [("2xv5e:2x2", (0,) * 4 + (1,) * 4), ("v5e:2x2", None)]
)
def test_granules_are_the_slices_in_mesh_order(name: str, granules: tuple[int, ...] | None) -> None:
    assert evidence(name).granules == granules


def test_a_mesh_without_a_topology(tmp_path: Path) -> None:
    saved = replace(evidence(), topology=None, mesh=Mesh.arange((2, 4), ("dp", "tp")), memory=None)
    saved.save(tmp_path)
    assert Evidence.load(tmp_path) == saved
    assert saved.granules is None


def test_what_contradicts_itself_is_refused() -> None:
    with pytest.raises(EvidenceError, match=r"input=0 .* belongs to several arrays"):
        replace(evidence(), held=(WEIGHT, replace(BATCH, input=0))).check_valid()
    with pytest.raises(EvidenceError, match=r"args\[0\] of shape=\(8, 3\) and device_shape=\(2,\)"):
        replace(evidence(), held=(replace(BATCH, device_shape=(2,)),)).check_valid()


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EvidenceError, match="cannot be read"):
        Evidence.load(tmp_path)
    evidence().save(tmp_path)
    data = json.loads((tmp_path / "evidence.json").read_text())
    (tmp_path / "evidence.json").write_text(json.dumps({**data, "schema": 99}))
    with pytest.raises(EvidenceError, match="another schema than 1"):
        Evidence.load(tmp_path)
    (tmp_path / "evidence.json").write_text(json.dumps(data))
    (tmp_path / "program.hlo.gz").write_bytes(b"no gzip")
    with pytest.raises(EvidenceError, match="cannot be read"):
        Evidence.load(tmp_path)
