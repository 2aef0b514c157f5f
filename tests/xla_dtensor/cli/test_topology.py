"""``python -m xla_dtensor topology``: what it prints, what it refuses, and that it starts fast."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mesh_utils import Topology, chips
from xla_dtensor import cli
from xla_dtensor.cli.mesh import topology_facts

ROOT = Path(__file__).resolve().parents[3]
HEAVY = ("torch", "jax", "jaxlib", "torch_xla", "torchax", "matplotlib")

V5E = """\
v5e:4x8: TPU v5e
  chips           32: 4 x 8
  cores           32
  devices         32, as JAX sees them
  hosts           8, each of 2x2
  torus           2-D
  wraps           no
  ICI links       up to 4 per chip, 52 in a slice; 50 GB/s (others say 45 GB/s) one way each
  bisection       4 links, 200 GB/s one way: a plane through the middle
"""


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.main(["topology", *words]) == 0
    return capsys.readouterr().out


def facts(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    return json.loads(printed(capsys, *words, "--json"))


def test_text(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "v5litepod-32")
    assert text.startswith(V5E)
    rest = dict(line.strip().split("  ", 1) for line in text.splitlines()[9:])
    assert {key: value.strip() for key, value in rest.items()} == {
        "DCN": "3.125 GB/s one way per chip",
        "HBM": "16 GiB per chip, 512 GiB in all; 15.75 GiB usable per device",
        "HBM bandwidth": "819 GB/s (others say 859 GB/s, 810 GB/s) per chip",
        "peak bf16": "197 TFLOP/s per chip, 6.304 PFLOP/s in all",
        "peak int8": "393 TFLOP/s per chip, 12.58 PFLOP/s in all",
        "Cloud": "v5litepod-32",
        "GKE": "tpu-v5-lite-podslice, topology 4x8, machine type ct5lp-hightpu-4t or "
        "ct5lp-hightpu-1t or ct5lp-hightpu-8t",
        "libtpu": "v5e:4x8",
        "JAX": "'TPU v5 lite' or 'TPU v5e'",
        "nearest slices": "v5e:4x4, v5e:8x8, v5e:2x4",
    }


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["v5p-128"], "wraps in x and y and z"),
        (["v5p:4x4x8"], "assumed twist=False: this slice can be a twisted torus"),
        (["v5p:4x4x8", "--twist"], "torus 3-D, twisted"),
        (["v3-32"], "wraps not known: --wrap xy or --wrap none says it"),
        (["v3-32", "--wrap", "xy"], "wraps in x and y"),
        (["v3-32", "--wrap", "none"], "wraps no"),
        (["v5e:16x16", "--slices", "2"], "Cloud v5litepod-256, 2 of them"),
        (
            ["h100-64"],
            "NVLink 18 links to a switch, 25 GB/s one way each: 450 GB/s per GPU",
        ),
        (["gb200:72"], "HBM 192 GB per GPU, 13,824 GB in all"),
        (["v5e:8x12", "--allow-unreal", "--wrap", "x"], "offered no: this is no slice"),
        (["v2-8"], "HBM not known: not found in the sources read"),
    ],
    ids=" ".join,
)
def test_lines(words: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [" ".join(each.split()) for each in printed(capsys, *words).splitlines()]
    assert any(each.startswith(line) for each in lines)


def test_json_says_what_topology_says(capsys: pytest.CaptureFixture[str]) -> None:
    found = facts(capsys, "v5p:4x4x8", "--slices", "2")
    topology = Topology.parse("2xv5p:4x4x8")
    named = Topology.parse("v5p:4x4x8", num_slices=2)
    assert found == json.loads(json.dumps(topology_facts(named)))
    assert (found["chips"], found["hosts"], found["slices"]) == (256, 64, 2)
    assert found["wrap"] == [True, True, True]
    assert found["assumptions"] == [each.replace("2x", "") for each in topology.assumptions]
    assert found["ici"]["links_per_slice"] == 3 * 128
    assert found["ici"]["bisection_bandwidth"] == 32 * 100e9
    assert found["names"] == {
        "cloud": "v5p-256",
        "gke_accelerator": "tpu-v5p-slice",
        "gke_topology": "4x4x8",
        "machine_types": ["ct5p-hightpu-4t"],
        "libtpu": "v5p:4x4x8",
        "jax_device_kinds": ["TPU v5", "TPU v5p"],
    }


@pytest.mark.parametrize("chip", chips(), ids=lambda chip: chip.name)
def test_every_chip_and_its_smallest_slice(chip: Any, capsys: pytest.CaptureFixture[str]) -> None:
    shape = "x".join(map(str, chip.slices.shapes[0][: max(chip.torus_rank, 1)]))
    name = f"{chip.name}:{shape}"
    found = facts(capsys, name)
    assert (found["name"], found["title"], found["platform"]) == (name, chip.title, chip.platform)
    figures = [found["hbm"], found["hbm_bandwidth"], found["ici"]["link_bandwidth"]]
    for figure in [*figures, *found["peak_flops"].values()]:
        assert set(figure) == {"value", "source", "note", "reason", "others"}
        # A figure has a source, or a reason why it is not known.
        assert bool(figure["source"]) == (figure["value"] is not None)
        assert bool(figure["reason"]) == (figure["value"] is None)
    for near in found["nearest"]:
        assert Topology.parse(near).is_real
        assert near != name
    assert "None" not in printed(capsys, name)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["v5e:8x12"], "TPU v5e has no slice of 8x12. Pass 'v5e:8x16', 'v5e:8x8', 'v5e:16x16'; or "
         "pass --allow-unreal, with --wrap."),
        (["v5q-8"], "No chip has that name. Pass 'v5p', or one of"),
        (["v5p-100"], "No listed slice has so many. Pass v5p-64 or v5p-128"),
        (["4xv5e:4x4", "--slices", "2"], "The name says 4."),
        (["v5e:4x4", "--slices", "0"], "Pass num_slices=1 or more."),
        (["v5e:4x4", "--wrap", "xw"], "That is no list of dims. Pass the letters"),
        (["v5e:16x16", "--wrap", "x"], "Leave wrap out, or pass --allow-unreal."),
        (["v5p:4x4x4", "--twist"], "Pass 'v5p:4x4x8_twisted', or --no-twist."),
        (["h100-12"], "Pass h100-8 or h100-16."),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_refusals(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["topology", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert message in err
    assert err.count(". ") >= 2  # three sentences


def test_words_that_are_no_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["topology"], ["topology", "v5e:4x4", "--slices", "two"]):
        with pytest.raises(SystemExit) as ended:
            cli.main(words)
        assert ended.value.code == 2
        assert "usage: python -m xla_dtensor topology" in capsys.readouterr().err


def test_loads_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from xla_dtensor.cli import main\n"
        "assert main(['topology', 'v5p-128']) == 0\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("\n[]\n")


def test_a_refusal_has_no_traceback() -> None:
    command = [sys.executable, "-m", "xla_dtensor", "topology", "v5q-8"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
