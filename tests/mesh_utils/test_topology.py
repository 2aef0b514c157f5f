"""Topology: names, shapes, live devices of either runtime, sub-slices, several slices, GPUs."""

from __future__ import annotations

import pickle
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mesh_utils import Device, Topology, chips, find_chip, synthetic_devices
from mesh_utils.devices import cloud_name

ALL = (True, True, True)
NONE = (False, False, False)


def jax_devices(topology: Topology) -> list[SimpleNamespace]:
    """Its devices as JAX shows them: coords is a list, one slice has no slice_index."""
    shown: list[SimpleNamespace] = []
    for device in topology.devices:
        attributes: dict[str, Any] = {
            "id": device.id,
            "platform": "tpu",
            "device_kind": device.kind,
            "process_index": device.process_index,
            "coords": list(device.coords or ()),
            "core_on_chip": device.core_on_chip,
        }
        if device.slice_index is not None:
            attributes["slice_index"] = device.slice_index
        shown.append(SimpleNamespace(**attributes))
    return shown


def torch_xla_attributes(topology: Topology) -> list[dict[str, Any]]:
    """Its devices as torch_xla's global_runtime_device_attributes shows them."""
    return [
        {"name": f"TPU:{device.id}", "coords": list(device.coords or ()), "core_on_chip": core}
        | ({} if device.slice_index is None else {"slice_index": device.slice_index})
        for device in topology.devices
        for core in [device.core_on_chip]
    ]


# --- names ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "shape", "slices", "devices", "hosts", "wrap"),
    [
        ("v2-8", (2, 2, 1), 1, 8, 1, NONE),
        ("v2-512", (16, 16, 1), 1, 512, 64, (True, True, False)),
        ("v3-32", (4, 4, 1), 1, 32, 4, None),
        ("v3-2048", (32, 32, 1), 1, 2048, 256, (True, True, False)),
        ("v4-8", (2, 2, 1), 1, 4, 1, NONE),
        ("v4-32", (2, 2, 4), 1, 16, 4, NONE),
        ("v4-8192", (16, 16, 16), 1, 4096, 1024, ALL),
        ("v5litepod-1", (1, 1, 1), 1, 1, 1, NONE),
        ("v5litepod-16", (4, 4, 1), 1, 16, 4, NONE),
        ("v5e-8", (2, 4, 1), 1, 8, 2, NONE),
        ("v5litepod-128", (8, 16, 1), 1, 128, 32, (False, True, False)),
        ("v6e-256", (16, 16, 1), 1, 256, 64, (True, True, False)),
        ("v5p-128", (4, 4, 4), 1, 64, 16, ALL),
        ("v5p-17920", (16, 20, 28), 1, 8960, 2240, ALL),
        ("tpu7x-8", (2, 2, 1), 1, 8, 1, NONE),
        ("tpu7x-128", (4, 4, 4), 1, 128, 16, ALL),
        ("tpu7x-18432", (16, 24, 24), 1, 18432, 2304, ALL),
        ("v5p:4x4x16", (4, 4, 16), 1, 256, 64, ALL),
        ("v4:8x4x4", (8, 4, 4), 1, 128, 32, ALL),
        ("4xv5e:16x16", (16, 16, 1), 4, 1024, 256, (True, True, False)),
        ("2 x v5litepod-256", (16, 16, 1), 2, 512, 128, (True, True, False)),
        ("TPU v5 lite:4x4", (4, 4, 1), 1, 16, 4, NONE),
        ("V5P=2x2x2", (2, 2, 2), 1, 8, 2, NONE),
        ("h100-8", (8, 1, 1), 1, 8, 1, NONE),
        ("8xh100", (8, 1, 1), 8, 64, 8, NONE),
        ("h100-mega-80gb-64", (8, 1, 1), 8, 64, 8, NONE),
        ("gb200-4", (4, 1, 1), 1, 4, 1, NONE),
        ("gb200-144", (72, 1, 1), 2, 144, 36, NONE),
    ],
)
def test_names(
    name: str,
    shape: tuple[int, ...],
    slices: int,
    devices: int,
    hosts: int,
    wrap: tuple[bool, ...] | None,
) -> None:
    topology = Topology.parse(name)
    topology.check_valid()
    assert (topology.shape, topology.num_slices) == (shape, slices)
    assert (topology.num_devices, topology.num_hosts) == (devices, hosts)
    assert topology.wrap == wrap
    assert topology.is_real
    assert Topology.parse(topology.name) == topology


def test_cores_and_chips() -> None:
    counts = [
        (topology.num_chips, topology.num_cores, topology.num_devices)
        for topology in map(Topology.parse, ("v3-8", "v5p-8", "v6e-4", "tpu7x-8"))
    ]
    assert counts == [(4, 8, 8), (4, 8, 4), (4, 4, 4), (4, 8, 8)]


def test_every_listed_slice_has_its_cloud_name() -> None:
    for chip in chips():
        if chip.torus_rank == 0:
            continue
        for shape in chip.slices.shapes:
            name = cloud_name(chip, shape)
            assert name is not None
            assert Topology.parse(name).shape == shape, name


def test_twist() -> None:
    twisted = Topology.parse("v5p:4x4x8_twisted")
    assert twisted.twist
    assert twisted.name == "v5p:4x4x8_twisted"
    assert twisted.assumptions == ()
    assert Topology.parse("v5p:4x4x8", twist=True) == twisted
    assert not Topology.parse("v5p:4x4x8_untwisted").twist
    assert Topology.parse("v5p:4x4x8_untwisted").assumptions == ()


def test_what_a_name_does_not_say_is_an_assumption() -> None:
    for name in ("v5p-256", "v5p:8x16x16", "v4-1024"):
        topology = Topology.parse(name)
        expected = topology.chip is not None and topology.chip.slices.twists(topology.shape)
        assert bool(topology.assumptions) is expected
        assert all("does not say" in text for text in topology.assumptions)


def test_unreal_slices_when_asked() -> None:
    topology = Topology.parse("v5p:4x4x6", allow_unreal=True)
    assert (topology.is_real, topology.wrap) == (False, None)
    said = Topology.parse("v5p:4x4x6", wrap=(True, True, False), allow_unreal=True)
    assert said.wrap == (True, True, False)
    unwrapped = Topology.parse("v5p:4x4x4", wrap=(False,), allow_unreal=True)
    assert (unwrapped.is_real, unwrapped.wrap) == (False, NONE)


# --- devices as libtpu lists them ----------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["v5e:4x4", "v5e:2x4", "v3:4x8", "tpu7x:2x2x4", "3xv6e:4x4", "2xtpu7x:2x2x1", "v5e:1x1"]
)
def test_devices_are_those_of_synthetic_devices(name: str) -> None:
    topology = Topology.parse(name)
    assert topology.devices == synthetic_devices(
        topology.shape,
        topology.num_slices,
        topology.devices_per_chip,
        topology.chips_per_host,
        topology.devices[0].kind,
    )
    assert topology.device_ids.tolist() == [device.id for device in topology.devices]
    assert topology.coords.tolist() == [list(device.coords or ()) for device in topology.devices]
    assert topology.core_on_chip.tolist() == [d.core_on_chip for d in topology.devices]
    assert topology.slice_index.tolist() == [d.slice_index or 0 for d in topology.devices]


def test_gpus_have_no_coords() -> None:
    devices = Topology.parse("gb200-144").devices
    assert devices[75] == Device(200_003, 18, 1, None, 0, "NVIDIA GB200")


# --- from devices --------------------------------------------------------------------------------

LIVE = ["v5e:4x4", "v5e:8x16", "v5p:4x4x4", "v4:2x2x4", "tpu7x:2x2x2", "2xv6e:4x4", "2xtpu7x:2x2x1"]


@pytest.mark.parametrize("name", LIVE)
def test_jax_devices(name: str) -> None:
    topology = Topology.parse(name)
    found = Topology.from_devices(jax_devices(topology))
    assert found == topology
    assert found.is_real
    assert ["a whole slice" in text for text in found.assumptions[:1]] == [True]


@pytest.mark.parametrize("name", LIVE)
def test_torch_xla_attributes(name: str) -> None:
    topology = Topology.parse(name)
    assert topology.chip is not None
    attributes = torch_xla_attributes(topology)
    unknown = Topology.from_devices(attributes)
    assert unknown.chip is None
    assert (unknown.wrap, unknown.is_real) == (None, False)
    found = Topology.from_devices(attributes, chip=topology.chip.name)
    assert (found.name, found.wrap) == (topology.name, topology.wrap)
    assert sorted(found.device_ids.tolist()) == sorted(topology.device_ids.tolist())
    assert Topology.from_devices(attributes, wrap=ALL).wrap == tuple(
        size > 2 for size in topology.shape
    )


@pytest.mark.parametrize("name", LIVE)
def test_the_order_of_the_list_does_not_matter(name: str) -> None:
    devices = jax_devices(Topology.parse(name))
    shuffled = random.Random(0).sample(devices, len(devices))
    assert Topology.from_devices(shuffled) == Topology.from_devices(devices)
    assert Topology.from_devices(np.array(shuffled, object)) == Topology.from_devices(devices)


def part(name: str, low: tuple[int, ...], high: tuple[int, ...]) -> list[Device]:
    """The devices of a slice from chip `low` to before chip `high`."""
    return [
        device
        for device in Topology.parse(name).devices
        if all(a <= c < b for a, c, b in zip(low, device.coords or (), high, strict=True))
    ]


def test_a_part_off_the_origin() -> None:
    devices = part("v5p:4x4x8", (0, 0, 4), (4, 4, 8))
    alone = Topology.from_devices(devices)
    assert (alone.shape, alone.origin, alone.wrap) == ((4, 4, 4), ((0, 0, 4),), None)
    known = Topology.from_devices(devices, slice_shape=(4, 4, 8))
    assert known.wrap == (True, True, False)
    assert not known.is_real
    assert known.coords.min(axis=0).tolist() == [0, 0, 0]
    assert known.coords.max(axis=0).tolist() == [3, 3, 3]
    assert Topology.from_devices(devices, wrap=ALL).wrap == ALL
    assert "origin=(0, 0, 4)" in repr(known)


def test_a_part_at_the_origin_looks_like_a_slice_unless_its_slice_is_named() -> None:
    devices = part("v5p:4x4x8", (0, 0, 0), (4, 4, 4))
    taken = Topology.from_devices(devices)
    assert taken.wrap == ALL
    assert "as a part of a larger slice could too" in taken.assumptions[0]
    assert Topology.from_devices(devices, slice_shape=(4, 4, 8)).wrap == (True, True, False)


def test_a_part_that_is_no_real_slice() -> None:
    devices = part("v5p:4x4x8", (0, 0, 0), (4, 4, 2))
    assert Topology.from_devices(devices).wrap is None
    found = Topology.from_devices(devices, slice_shape=(4, 4, 8))
    assert found.wrap == (True, True, False)


def test_a_part_whose_dims_wrap_by_their_length() -> None:
    """On v5e and v6e it is known of every box: a dim of 16 wraps, no other does."""
    row = part("v5e:16x16", (0, 4, 0), (16, 8, 1))
    assert Topology.from_devices(row).wrap == (True, False, False)
    turned = synthetic_devices((4, 2), kind="TPU v5 lite")
    assert (Topology.from_devices(turned).wrap, Topology.from_devices(turned).is_real) == (
        NONE,
        False,
    )
    assert Topology.parse("v6e:8x12", allow_unreal=True).wrap == NONE
    pair = part("v5p:4x4x8", (2, 2, 3), (4, 4, 4))
    assert Topology.from_devices(pair).wrap == NONE


def test_each_slice_has_an_origin_of_its_own() -> None:
    devices = [
        replace(device, coords=(x + 4 * (device.slice_index or 0), y, z))
        for device in Topology.parse("2xv5e:4x4").devices
        for x, y, z in [device.coords or (0, 0, 0)]
    ]
    found = Topology.from_devices(devices, slice_shape=(8, 8))
    assert found.origin == ((0, 0, 0), (4, 0, 0))
    assert found.coords.max(axis=0).tolist() == [3, 3, 0]


def test_gpus_by_every_granule() -> None:
    gpus = [
        SimpleNamespace(
            id=n, platform="gpu", process_index=n // 4, device_kind="NVIDIA H100 80GB HBM3"
        )
        for n in range(16)
    ]
    assert Topology.from_devices(gpus).num_slices == 1
    assert Topology.from_devices(gpus, granule="process").num_slices == 4
    by_size = Topology.from_devices(gpus, granule=8)
    assert (by_size.name, by_size.num_hosts) == ("2xh100:8", 2)
    by_rack = Topology.from_devices(gpus, granule=lambda device: device.id % 2)
    assert by_rack.device_ids.tolist() == [*range(0, 16, 2), *range(1, 16, 2)]


def test_bare_ids() -> None:
    topology = Topology.from_devices(range(8), granule=4)
    assert (topology.chip, topology.num_slices, topology.shape) == (None, 2, (4, 1, 1))
    assert (topology.torus_rank, topology.name) == (0, "2xchips:4")
    assert "a switch" in topology.assumptions[0]


def test_cpu_devices_of_jax() -> None:
    devices = [SimpleNamespace(id=n, platform="cpu", device_kind="cpu") for n in range(8)]
    topology = Topology.from_devices(devices)
    assert (topology.torus_rank, topology.num_devices) == (0, 8)
    assert topology.devices[3] == Device(3, kind="cpu")


# --- values --------------------------------------------------------------------------------------


def test_they_are_values() -> None:
    one, other = Topology.parse("v5p-128"), Topology.parse("v5p:4x4x4")
    assert one == other
    assert hash(one) == hash(other)
    assert one != Topology.parse("v4:4x4x4")
    assert one != Topology.parse("v5p:4x4x4", num_slices=2)
    assert one != "v5p-128"
    assert pickle.loads(pickle.dumps(one)) == one
    assert repr(one) == "Topology('v5p:4x4x4', 64 devices, wrap=(True, True, True))"
    assert repr(Topology.parse("8xh100:8")) == "Topology('8xh100:8', 64 devices)"


def test_synthetic_takes_any_box() -> None:
    topology = Topology.synthetic((3, 5), wrap=(True, False), chips_per_host=(1, 1))
    assert (topology.name, topology.wrap) == ("chips:3x5x1", (True, False, False))
    assert Topology.synthetic((2, 2), wrap=ALL).wrap == NONE
    assert Topology.synthetic((4, 4, 8), wrap=ALL, twist=True).twist
    with_figures = Topology.synthetic((6, 4), wrap=ALL, chip=find_chip("v5e"))
    assert with_figures.name == "v5e:6x4"


def test_granules_of_a_topology() -> None:
    topology = Topology.parse("2xv5e:4x4")
    assert [len(each) for each in topology.granules()] == [16, 16]
    assert len(topology.granules("process")) == 8


MODULES = [
    *("topology", "topology_name", "topology_places", "topology_wrap", "slice_table", "hardware"),
    *("hardware_file", "figure", "span", "lattice", "network", "network_gather", "network_bound"),
    *("network_exchange", "network_routes", "network_report", "mesh_spans"),
]
