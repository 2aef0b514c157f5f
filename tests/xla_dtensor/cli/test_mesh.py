"""``python -m xla_dtensor mesh``: the mesh, JAX's beside it, drawings, and what it refuses."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mesh_utils import Mesh, Topology, assign, axis_reports, draw_mesh
from mesh_utils.jax_compat import create_device_mesh, create_hybrid_device_mesh
from mesh_utils.network import COLLECTIVES
from xla_dtensor import cli
from xla_dtensor.cli import mesh_text as mesh_plans

ROOT = Path(__file__).resolve().parents[3]

TEXT = """\
v5e:4x4: fsdp=4, tp=4
  score 1.5 links modelled, 75 % of the bound of 2: the best of 3 choices of parts
  fsdp=4 on Span(x2@2 y2@2): 1 link (50 GB/s), a ring through a block; 2 chips apart, so that \
groups share links
  tp=4 on Span(x2 y2): 2 links (100 GB/s), a ring through a block
  runner-up: 1.2 links; there fsdp has 2 instead of 1, tp has 1 instead of 2

modelled, not measured: bus bandwidth per device in GB/s (% of the bound)
            lies on          all-gather   reduce-scatter  all-reduce   all-to-all   permute
  search    score 1.5 links
    fsdp=4  x2@2 y2@2        50 (50 %)    50 (50 %)       50 (50 %)    37.5 (38 %)  25, 2 hops
    tp=4    x2 y2            100 (100 %)  100 (100 %)     100 (100 %)  75 (75 %)    50, 1 hop
  JAX       score 1 links
    fsdp=4  y4               50 (50 %)    50 (50 %)       50 (50 %)    37.5 (38 %)  50, 3 hops
    tp=4    x4               50 (50 %)    50 (50 %)       50 (50 %)    37.5 (38 %)  50, 3 hops
  JAX: default arguments
  an all-reduce takes twice the seconds of an all-gather of as many bytes

the search's mesh: fsdp,tp of each chip
      x   0   1   2   3
  y 0   0,0 0,1 1,0 1,1
  y 1   0,3 0,2 1,3 1,2
  y 2   3,0 3,1 2,0 2,1
  y 3   3,3 3,2 2,3 2,2
"""


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.main(["mesh", *words]) == 0
    return capsys.readouterr().out


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    return json.loads(printed(capsys, *words, "--json"))


def test_text(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("jax")
    assert printed(capsys, "v5e:4x4", "--axes", "fsdp=4,tp=4") == TEXT


def test_text_of_jaxs_mesh(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("jax")
    lines = printed(capsys, "v5e:4x4", "--axes", "fsdp=4,tp=4", "--strategy", "jax").splitlines()
    assert lines[1:5] == [
        "  JAX's mesh: score 1 links modelled",
        "  fsdp=4 on Span(y4): 50 GB/s modelled, 50 % of the bound (line); 3 hops",
        "  tp=4 on Span(x4): 50 GB/s modelled, 50 % of the bound (line); 3 hops",
        "  the search's mesh: score 1.5 links modelled, 75 % of the bound of 2: the best of 3 "
        "choices of parts",
    ]
    assert (
        lines[-5:]
        == [
            "JAX's mesh: fsdp,tp of each chip",
            *("      x   0   1   2   3", "  y 0   0,0 0,1 0,2 0,3", "  y 1   1,0 1,1 1,2 1,3"),
            *("  y 2   2,0 2,1 2,2 2,3", "  y 3   3,0 3,1 3,2 3,3"),
        ][-5:]
    )


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("jax")
    words = ["v5p:4x4x8", "--axes", "fsdp=-1,tp=4", "--weights", "tp=3,fsdp=1"]
    found = answer(capsys, *words)
    mesh = assign(
        Topology.parse("v5p:4x4x8"), (32, 4), axis_names=("fsdp", "tp"), weights=(1.0, 3.0)
    )
    assert found["modelled"] is True
    assert found["topology"] == "v5p:4x4x8"
    assert found["axes"] == [
        {"name": "fsdp", "ici": 32, "dcn": 1, "weight": 1.0},
        {"name": "tp", "ici": 4, "dcn": 1, "weight": 3.0},
    ]
    assert found["device_ids"] == mesh.device_ids.tolist()
    assert found["search"]["score_links"] == mesh.score
    assert found["bound_links"] == mesh.bound
    assert found["reasons"] == list(mesh.reasons)
    assert mesh.runner_up is not None
    assert found["runner_up"]["links"] == list(mesh.runner_up.links)
    for axis, report in zip(found["search"]["axes"], mesh.reports, strict=True):
        assert set(axis["bandwidth"]) == set(COLLECTIVES)
        for collective in COLLECTIVES:
            rate = axis["bandwidth"][collective]
            assert rate["bytes_per_second"] == report.bytes_per_second(collective)
            assert rate["fraction_of_bound"] == report.fraction(collective)
        assert axis["permute"]["max_hops"] == report.max_hops
    assert set(found["jax"]) == set(found["search"])
    assert found["strategy"] == "search"


@pytest.mark.parametrize(
    ("name", "axes", "ici"),
    [("v5e:16x16", "fsdp=64,tp=4", (64, 4)), ("v5p:4x4x4", "dp=4,tp=16", (4, 16))],
)
def test_jaxs_mesh_is_jaxs(
    name: str, axes: str, ici: tuple[int, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("jax")
    found = answer(capsys, name, "--axes", axes, "--strategy", "jax")
    topology = Topology.parse(name)
    try:
        made = create_device_mesh(ici, topology, strategy="jax")
        assert found["jax"]["note"] == "default arguments"
    except NotImplementedError:
        made = create_device_mesh(ici, topology, strategy="jax", allow_split_physical_axes=True)
        assert found["jax"]["note"] == (
            "allow_split_physical_axes=True; by default it raises NotImplementedError"
        )
    ids = [device.id for device in made.reshape(-1)]
    assert found["device_ids"] == Mesh(ids, ici).device_ids.tolist()
    reports = axis_reports(topology, Mesh(ids, ici))
    links = [axis["bandwidth"]["all-gather"]["links"] for axis in found["jax"]["axes"]]
    assert links == [report.links["all-gather"] for report in reports]
    assert found["search"]["score_links"] >= found["jax"]["score_links"] * (1 - 1e-9)


def test_a_mesh_of_jaxs_without_rows(capsys: pytest.CaptureFixture[str]) -> None:
    """JAX takes 8 chips to be 4 x 2: on 2 x 4 its pairs are up to four hops apart."""
    pytest.importorskip("jax")
    words = ["v5e:2x4", "--axes", "a=2,b=4"]
    text = printed(capsys, *words)
    (row,) = [line for line in text.splitlines() if "no rows of chips" in line]
    assert " ".join(row.split()).startswith("a=2 no rows of chips 25 (25 %)")
    assert row.endswith("25, 4 hops")
    axis = answer(capsys, *words)["jax"]["axes"][0]
    assert (axis["span"], axis["strategy"]) == (None, "ring in mesh order")


def test_several_slices(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("jax")
    words = ["v5e:4x4", "--axes", "fsdp=4,tp=4", "--dcn", "data=2"]
    found = answer(capsys, *words, "--strategy", "jax")
    assert found["topology"] == "2xv5e:4x4"
    assert [axis["name"] for axis in found["axes"]] == ["data", "fsdp", "tp"]
    assert [axis["dcn"] for axis in found["axes"]] == [2, 1, 1]
    made = create_hybrid_device_mesh(
        (1, 4, 4), (2, 1, 1), Topology.parse("2xv5e:4x4"), strategy="jax"
    )
    assert found["device_ids"] == [
        [[device.id for device in row] for row in block] for block in made
    ]
    data = found["search"]["axes"][0]
    assert data["crosses_slices"]
    assert data["bandwidth"]["all-gather"]["bytes_per_second"] == pytest.approx(3.125e9)
    # Each slice has links of its own: a permute is as fast as on one of them.
    alone = answer(capsys, *words[:3])
    permutes = [axis["permute"]["bytes_per_second"] for axis in found["search"]["axes"][1:]]
    assert permutes == [axis["permute"]["bytes_per_second"] for axis in alone["search"]["axes"]]
    text = printed(capsys, *words)
    assert "the search's mesh, slice 0 of 2: data,fsdp,tp of each chip" in text
    both = answer(capsys, "4xv5e:4x4", "--axes", "fsdp=-1,tp=4", "--dcn", "fsdp=-1")
    assert both["axes"][0] == {"name": "fsdp", "ici": 4, "dcn": 4, "weight": 1.0}


def test_a_slow_crossing_is_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "v5e:4x4", "--axes", "dp=4,tp=4", "--dcn", "tp=2")
    assert "tp=8 runs over DCN, while dp=4 gathers less and does not" in text


def test_where_jax_raises(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def raising(*_: object, **options: object) -> None:
        raise TypeError("int() argument must be a number\nmore of it")

    monkeypatch.setattr(mesh_plans, "create_device_mesh", raising)
    words = ["v5p:4x4x20", "--axes", "a=32,b=10"]
    text = printed(capsys, *words)
    assert "  JAX raises TypeError: int() argument must be a number\n" in text
    found = answer(capsys, *words)
    assert found["jax"] == {"refused": "JAX raises TypeError: int() argument must be a number"}
    assert cli.main(["mesh", *words, "--strategy", "jax"]) == 2
    assert capsys.readouterr().err == (
        "error: JAX's mesh of a=32, b=10 on v5p:4x4x20 was asked for. JAX raises TypeError: int() "
        "argument must be a number. Pass --strategy search.\n"
    )


def test_without_jax_and_torch() -> None:
    code = (
        "import sys\n"
        "sys.modules |= dict.fromkeys(('jax', 'torch', 'torch_xla'), None)\n"
        "from xla_dtensor.cli import main\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    words = ["mesh", "v5e:16x16", "--axes", "fsdp=64,tp=4"]
    command = [sys.executable, "-c", code, *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "JAX's mesh is not known: JAX cannot be imported" in done.stdout
    assert "tp=4 on Span(x2 y2): 2 links (100 GB/s)" in done.stdout
    done = subprocess.run([*command, "--strategy", "jax"], env=environment, capture_output=True)
    assert done.returncode == 2
    assert done.stderr.endswith(b". Pass --strategy search.\n")


@pytest.mark.parametrize("name", ["v2-8", "gb200:72", "tpu7x:2x2x1", "v5e:2x2"])
def test_every_kind_of_machine(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, name, "--axes", "one=1,all=-1")
    devices = Topology.parse(name).num_devices
    assert [axis["size"] for axis in found["search"]["axes"]] == [1, devices]
    text = printed(capsys, name, "--axes", "one=1,all=-1")
    assert "all=" in text
    assert re.search("one=1 +1 ", text)
    unit = "links" if name == "v2-8" else "GB/s"  # the speed of v2's links is not known
    assert f"bus bandwidth per device in {unit}" in text
    assert "nan" not in text
    assert not any(math.isinf(number) for number in numbers(found))


def numbers(found: Any) -> list[float]:
    if isinstance(found, dict):
        return [number for value in found.values() for number in numbers(value)]
    if isinstance(found, list):
        return [number for value in found for number in numbers(value)]
    return [found] if isinstance(found, float) else []


# --- drawings -------------------------------------------------------------------------------------


def test_draw_svg(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mesh.svg"
    text = printed(capsys, "v5e:4x4", "--axes", "fsdp=4,tp=4", "--draw", str(file))
    assert text.endswith(f"\ndrawn to {file}\n")
    found = assign(Topology.parse("v5e:4x4"), (4, 4), axis_names=("fsdp", "tp"))
    assert file.read_text(encoding="utf-8") == draw_mesh(found.topology, found.mesh).svg()
    # In JSON nothing else is printed.
    assert answer(capsys, "v5e:4x4", "--axes", "fsdp=4,tp=4", "--draw", str(file))["modelled"]


def test_draw_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {
        "mesh.gif": "Drawings are SVG, which other programs turn into PNG. Pass a name that ends",
        "no/folder/mesh.svg": "mesh.svg' was asked for. The system says: No such file or directory."
        " Pass a path that can be opened.",
    }
    for name, message in files.items():
        words = ["mesh", "v5e:4x4", "--axes", "tp=16", "--draw", str(tmp_path / name)]
        assert cli.main(words) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert message in err
    assert list(tmp_path.iterdir()) == []


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("v5e:4x4 --axes fsdp=64,tp=4", "There are 16 devices in a slice of"),
        ("v5e:4x4 --axes fsdp", "'fsdp' has not the form NAME=NUMBER. Pass names with numbers"),
        ("v5e:4x4 --axes =4", "'=4' has not the form NAME=NUMBER."),
        ("v5e:4x4 --axes tp=four", "'four' is no size. Pass"),
        ("v5e:4x4 --axes tp=4,tp=4", "'tp' is there twice."),
        ("v5e:4x4 --axes dp=-1,tp=-1", "of which one may be -1"),
        ("v5e:4x4 --axes dp=0,tp=4", "That is no size of 1 or more for each axis"),
        ("v5e:4x4 --axes dp=4,tp=4 --weights tp=x", "'x' is no number. Pass names with numbers"),
        ("v5e:4x4 --axes dp=4,tp=4 --weights ep=1", "It has no axis 'ep'. Pass weights for some"),
        ("v5e:4x4 --axes dp=4,tp=4 --weights tp=-1", "That is no number of bytes, 0 or more"),
        ("2xv5e:4x4 --axes dp=4,tp=4", "Nothing says which axis runs across slices, over DCN. "
         "Pass such as --dcn data=2."),
        ("2xv5e:4x4 --axes dp=4,tp=4 --dcn dp=3", "There are 2 slices of"),
        ("v3-32 --axes dp=4,tp=8", "Which dims of it wrap is not known, and that decides the "
         "bandwidth of every axis. Pass --wrap xy for a torus, or --wrap none for a mesh."),
        ("v5e:3x4 --axes tp=12", "TPU v5e has no slice of 3x4."),
    ],
    ids=lambda value: value if value.startswith(("v", "2")) else "",
)  # fmt: skip
def test_refusals(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["mesh", *words.split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.startswith("error: ")
    assert len(err.splitlines()) == 1


def test_axes_are_needed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["mesh", "v5e:4x4"])
    assert ended.value.code == 2
    assert "the following arguments are required: --axes" in capsys.readouterr().err
