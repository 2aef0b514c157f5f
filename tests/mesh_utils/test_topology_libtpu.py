"""Topology against libtpu: ids, order, coordinates, cores, hosts and kinds of a sample of slices.

libtpu runs in a child process; it needs no TPU. It cannot tell which slices are real, nor which of
them wrap: it accepts any. So those two rest on the table alone, and the wrap here only shows that
libtpu takes ours.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from mesh_utils import Topology
from tests.libtpu import needs_libtpu, run_with_libtpu

pytestmark = [
    pytest.mark.thorough,
    needs_libtpu,
]

NAMES = [
    *("v2-8", "v2-128", "v3-32", "v3-256"),
    *("v4-8", "v4-32", "v4-128", "v4-384", "v4:8x4x4", "v4:4x8x8_twisted"),
    *("v5litepod-4", "v5litepod-8", "v5litepod-16", "v5litepod-128", "v5litepod-256"),
    *("v6e-4", "v6e-8", "v6e-32", "v6e-256"),
    *("v5p-8", "v5p-32", "v5p-64", "v5p-256", "v5p:4x4x8_twisted", "v5p-640", "v5p-17920"),
    *("tpu7x-8", "tpu7x-16", "tpu7x-128", "tpu7x-768", "tpu7x-18432"),
    *("2xv5e:4x4", "4xv5e:16x16", "3xv6e:2x4", "2xv5p:2x2x4", "2xtpu7x:2x2x2", "2xv3:4x4"),
]

PROGRAM = """
import json, sys
from jax.experimental import topologies
found = {}
for name, libtpu, options in json.loads(sys.argv[1]):
    devices = topologies.get_topology_desc(libtpu, "tpu", **options).devices
    found[name] = [
        [d.id, d.process_index, getattr(d, "slice_index", None), list(d.coords), d.core_on_chip,
         d.device_kind]
        for d in devices
    ]
open(sys.argv[2], "w").write(json.dumps(found))
"""


def asked(name: str) -> tuple[str, str, dict[str, Any]]:
    """What to ask libtpu for. v4 is asked for with one device per chip, as TPU VMs run it."""
    topology = Topology.parse(name)
    assert topology.chip is not None
    wrap = topology.wrap or tuple(size > 2 for size in topology.shape)
    options: dict[str, Any] = {"wrap": wrap, "chips_per_host_bounds": topology.chips_per_host}
    if topology.num_slices > 1:
        options["num_slices"] = topology.num_slices
    if topology.chip.name == "v4":
        options["chip_config_name"] = "megacore"
    shape = topology.name.partition(":")[2]
    return name, f"{topology.chip.libtpu_name}:{shape}", options


@pytest.fixture(scope="module")
def listed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[Any]]]:
    """What libtpu lists for each name."""
    folder = tmp_path_factory.mktemp("topology_libtpu")
    arguments = json.dumps([asked(name) for name in NAMES])
    run_with_libtpu(PROGRAM, arguments, str(folder / "found.json"), folder=folder)
    return json.loads((folder / "found.json").read_text())


@pytest.mark.parametrize("name", NAMES)
def test_devices_equal_those_of_libtpu(name: str, listed: dict[str, list[list[Any]]]) -> None:
    ours = [
        [d.id, d.process_index, d.slice_index, list(d.coords or ()), d.core_on_chip, d.kind]
        for d in Topology.parse(name).devices
    ]
    assert ours == listed[name]
