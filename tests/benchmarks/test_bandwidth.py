"""The bandwidth benchmark: the collectives are right, the figures are what they are said to be.

No bandwidth is asserted. What runs, runs in a process of its own with 8 virtual CPU devices.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.bandwidth import default_shapes, main
from benchmarks.bandwidth_measure import KINDS, Measured, is_as_asked, moved_bytes
from benchmarks.bandwidth_model import Machine, machine_of, mesh_ids, modelled
from mesh_utils import Network, Span, Topology
from mesh_utils.devices import read_devices
from mesh_utils.jax_compat import JaxDevice, shown_to_jax

ROOT = Path(__file__).resolve().parents[2]

RIGHT = """
import jax, numpy as np
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
from jax.sharding import Mesh
from benchmarks.bandwidth_measure import KINDS, program

mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))
for kind in KINDS:
    function, x, num_bytes = program(mesh, "b", kind, 65536)
    given, made = np.asarray(x), function(x)
    parts = np.split(given, 4)
    local = np.asarray(made.addressable_shards[0].data)
    wanted = {
        "all-gather": given,
        "all-reduce": 4 * given,
        "reduce-scatter": 4 * parts[0],
        "permute": parts[3],
        "all-to-all": np.concatenate([np.split(part, 4)[0] for part in parts]),
    }[kind]
    assert np.array_equal(local, wanted), kind
    per_device = {"all-gather": local, "reduce-scatter": given, "all-reduce": given}
    assert per_device.get(kind, parts[0]).nbytes == num_bytes >= 65536, kind
    print(kind, "is right")
"""


def run(*command: str, folder: Path) -> str:
    foreign = ("XLA_", "JAX_", "PYTHONPATH")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(foreign)}
    environment |= {"PYTHONPATH": str(ROOT), "NPROC": "64"}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_collectives_are_what_they_are_called(tmp_path: Path) -> None:
    pytest.importorskip("jax")
    printed = run("-c", RIGHT, folder=tmp_path)
    assert printed.splitlines() == [f"{kind} is right" for kind in KINDS]


def test_on_virtual_cpu_devices(tmp_path: Path) -> None:
    pytest.importorskip("jax")
    options = ["--virtual-cpus", "8", "--mebibytes", "0.01", "--rounds", "2", "--calls", "2"]
    command = ["-m", "benchmarks.bandwidth", *options, "--mesh", "4x2", "--mesh", "8x1"]
    printed = run(*command, "--results", str(tmp_path), folder=tmp_path)
    assert printed.startswith("8 virtual CPU devices: memory of one machine, no network")
    assert "Nothing is modelled: CPU devices have no links" in printed
    stored = json.loads((tmp_path / "bandwidth.json").read_text())
    assert stored["is_virtual"]
    assert stored["topology"] is None
    rows = stored["rows"]
    # Two axes of the first mesh, one of the second: its other axis has one device.
    assert [(row["mesh"], row["axis"]) for row in rows[::5]] == [
        ("4x2", "a"),
        ("4x2", "b"),
        ("8x1", "a"),
    ]
    assert len(rows) == 3 * len(KINDS)
    for row in rows:
        assert row["modelled"] is None
        assert row["as_asked"], row
        assert 0 < row["seconds_least"] <= row["seconds_median"]
        moved = moved_bytes(row["kind"], row["num_bytes"], row["size"])
        assert row["bandwidth"] == pytest.approx(moved / row["seconds_median"])
        assert row["bandwidth_most"] >= row["bandwidth"]
    assert all(f"  {kind}" in printed for kind in KINDS)


def test_bandwidth_is_counted_as_the_model_counts_it() -> None:
    network = Network.of(Topology.parse("v5e:16x16"))
    span = Span((16, 1, 1))
    for kind in KINDS:
        if kind == "permute":
            assert moved_bytes(kind, 100, 16) == 100
            continue
        seconds = network.seconds(span, 1e9, kind)
        rate = network.bytes_per_second(span, kind)
        assert moved_bytes(kind, int(1e9), 16) / seconds == pytest.approx(rate)


def tpus(name: str) -> list[JaxDevice]:
    """The devices of a slice as JAX would list them."""
    return shown_to_jax(read_devices(Topology.parse(name).devices))


def test_modelled_beside_measured() -> None:
    machine = machine_of(tpus("v5e:16x16"))
    assert machine.kind == "256 x TPU v5 lite"
    assert machine.topology is not None
    assert machine.topology.name == "v5e:16x16"
    ids = mesh_ids(machine, (64, 4))
    first, last = modelled(machine, ids)
    assert (last["on"], last["strategy"]) == ("x2 y2", "snake")
    assert last["bytes_per_second"]["all-gather"] == 100e9
    assert first["bytes_per_second"]["all-gather"] == 50e9
    assert last["bytes_per_second"]["permute"] == 50e9
    assert set(last["bytes_per_second"]) == set(KINDS)


def test_slices_go_to_the_first_axis() -> None:
    topology = Topology.parse("2xv5e:4x4")
    machine = Machine(topology.devices, topology, "")
    ids = mesh_ids(machine, (8, 4))
    assert (ids[:4] < 200_000).all()
    assert (ids[4:] >= 200_000).all()
    assert modelled(machine, ids)[0]["on"].startswith("slice2")
    with pytest.raises(SystemExit, match="Its first axis cannot be shared out"):
        mesh_ids(machine, (1, 32))


def test_links_that_are_not_known() -> None:
    machine = machine_of(tpus("v3:4x4"))
    assert machine.topology is None
    assert "wrap is not known" in machine.reason
    assert modelled(machine, mesh_ids(machine, (32,))) == [{}]
    known = machine_of(tpus("v3:4x4"), wrap=(False, False))
    assert known.topology is not None


def test_what_the_compiler_made_is_said() -> None:
    asked = Measured("all-gather", 1, 1.0, 1.0, 1.0, 1.0, ("all-gather",))
    other = Measured("all-gather", 1, 1.0, 1.0, 1.0, 1.0, ("all-reduce",))
    shift = Measured("permute", 1, 1.0, 1.0, 1.0, 1.0, ("collective-permute",))
    assert [is_as_asked(each) for each in (asked, other, shift)] == [True, False, True]


def test_default_meshes() -> None:
    assert default_shapes(1) == []
    assert default_shapes(2) == [(2,)]
    assert default_shapes(256) == [(256,), (128, 2), (64, 4), (32, 8)]
    assert default_shapes(6) == [(6,), (3, 2)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--mesh", "four"], "'four' is no mesh. Pass sizes, as in 16x16"),
        (["--mebibytes", "big"], "'big' is no list of numbers, as in 1,64"),
    ],
)
def test_bad_arguments(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(options)
    assert message in capsys.readouterr().err


def test_a_mesh_that_does_not_fit() -> None:
    from benchmarks.bandwidth import measured_rows

    topology = Topology.parse("v5e:2x2")
    machine = Machine(topology.devices, topology, "")
    asked = argparse.Namespace(mebibytes=[1.0], rounds=1, calls=1)
    pytest.importorskip("jax")
    with pytest.raises(SystemExit, match="There are 4 devices"):
        next(measured_rows(machine, [(2, 4)], asked))
    assert np.array_equal(np.sort(mesh_ids(machine, (2, 2)), axis=None), np.arange(4))
