"""Topologies that cannot be: every refusal says what was asked, why not, and what to pass."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from mesh_utils import Device, MeshError, Network, Span, Topology, axis_reports, find_chip
from mesh_utils import synthetic_devices as devices

parse = Topology.parse
read = Topology.from_devices
V5E = "TPU v5 lite"
V5P = "TPU v5"


def without(shape: tuple[int, ...], *ids: int) -> list[Device]:
    return [device for device in devices(shape, kind=V5E) if device.id not in ids]


def moved(number: int, coords: tuple[int, int, int]) -> list[Device]:
    return [
        replace(device, coords=coords) if device.id == number else device
        for device in devices((4, 4), kind=V5E)
    ]


def two_slices(first: tuple[int, ...], second: tuple[int, ...]) -> list[Device]:
    return [
        *(replace(d, slice_index=0) for d in devices(first, kind=V5E)),
        *(replace(d, slice_index=1, id=1000 + d.id) for d in devices(second, kind=V5E)),
    ]


def part_of(low: int) -> list[Device]:
    return [d for d in devices((4, 4, 8), kind=V5P) if (d.coords or (0, 0, 0))[2] >= low]


def tpu_without_coords(kind: str) -> list[Device]:
    return [Device(n, kind=kind) for n in range(4)]


# what is done, what the message has: the question, the reason, the way out
ROWS: dict[str, tuple[Callable[[], object], str]] = {
    # names
    "unknown chip": (lambda: parse("v5q-8"), r"Chip 'v5q' was asked.*Pass 'v5p', or one of v2, v3"),
    "chip that is like none": (lambda: parse("banana:4x4"), r"'banana'.*Pass v2, v3, v4"),
    "empty name": (lambda: parse(""), r"Chip '' was asked for.*Pass v2, v3"),
    "chip alone": (
        lambda: parse("v5p"),
        r"names a chip and no slice.*such as v5p-32, .*v5p:16x20x28",
    ),
    "count that no slice has": (lambda: parse("v5p-100"), r"100 cores.*Pass v5p-64 or v5p-128"),
    "odd count of cores": (lambda: parse("v4-9"), r"9 cores of TPU v4.*Pass v4-8 or v4-16"),
    "count of zero": (lambda: parse("v5litepod-0"), r"0 chips of TPU v5e.*Pass v5litepod-1"),
    "more than a pod": (lambda: parse("v6e-512"), r"512 chips.*Pass v6e-256, or a shape"),
    "no whole nodes": (lambda: parse("h100-12"), r"12 GPUs.*Pass h100-8 or h100-16"),
    "no whole trays": (lambda: parse("gb200-6"), r"6 GPUs.*72 in an NVLink.*4 in a host"),
    "shape of four dims": (
        lambda: parse("v5p:4x4x4x4"),
        r"'4x4x4x4'.*no box of chips.*such as 4x4x8",
    ),
    "shape with a zero": (lambda: parse("v5e:0x4"), r"'0x4' was given.*positive integers"),
    "two counts of slices": (
        lambda: parse("4xv5e:16x16", num_slices=2),
        r"num_slices=2. The name says 4. Pass num_slices or write it in the name",
    ),
    "no slices": (
        lambda: parse("v5e:4x4", num_slices=0),
        r"num_slices=0.*Pass num_slices=1 or more",
    ),
    "zero slices in the name": (lambda: parse("0xv5e:4x4"), r"num_slices=0.*positive integer"),
    "slices that are no number": (
        lambda: parse("v5e:4x4", num_slices="2"),  # type: ignore[arg-type]
        r"num_slices='2'.*no positive integer",
    ),
    # slices that there are not
    "unreal 2-D slice": (
        lambda: parse("v5e:8x12"),
        r"no slice of 8x12. Pass 'v5e:8x16', 'v5e:8x8'",
    ),
    "unreal 3-D slice": (lambda: parse("v5p:4x4x6"), r"no slice of 4x4x6. Pass 'v5p:4x4x[48]'"),
    "dims in another order": (lambda: parse("v5p:8x4x4"), r"no slice of 8x4x4. Pass 'v5p:4x4x8'"),
    "turned v5e": (lambda: parse("v5e:4x2"), r"no slice of 4x2. Pass 'v5e:2x4'"),
    "3-D shape of a 2-D chip": (
        lambda: parse("v6e:4x4x4"),
        r"TPU v6e .* no slice of 4x4x4. Pass 'v6e:",
    ),
    "too many cubes": (lambda: parse("v4:16x16x32"), r"no slice of 16x16x32.*Pass .*'v4:16x16x16'"),
    "too many GPUs in a node": (lambda: parse("h100:16"), r"no slice of 16. Pass 'h100:8'"),
    # wrap and twist
    "wrap that the slice has not": (
        lambda: parse("v5p:4x4x4", wrap=(False, False, False)),
        r"wrap=\(False, False, False\).*has wrap=\(True, True, True\) \(MaxText.*allow_unreal=True",
    ),
    "wrap of four dims": (
        lambda: parse("v3-32", wrap=(True,) * 4),
        r"no flag for each dim.*up to three",
    ),
    "wrap that is no flag": (
        lambda: parse("v3-32", wrap="xy"),  # type: ignore[arg-type]
        r"wrap='xy'.*\(True, True, False\)",
    ),
    "twist on a cube": (
        lambda: parse("v5p:4x4x4_twisted"),
        r"twisted torus of 4x4x4.*'v5p:4x4x8_twisted'",
    ),
    "twist on 4x4x16": (
        lambda: parse("v4:4x4x16", twist=True),
        r"k x k x 2k.*Pass 'v4:4x4x8_twisted'",
    ),
    "twist without wrap": (
        lambda: parse("v5p:2x2x4_twisted"),
        r"wrap=\(False, .*'v5p:4x4x8_twisted'",
    ),
    "twist on a flat chip": (
        lambda: parse("v5e:16x16_twisted"),
        r"16x16x1 with wrap.*or twist=False",
    ),
    "name against twist": (
        lambda: parse("v5p:4x4x8_twisted", twist=False),
        r"twist=False. The two differ",
    ),
    "synthetic twist on a mesh": (
        lambda: Topology.synthetic((4, 4, 8), wrap=(True, True, False), twist=True),
        r"'synthetic'.*wrap=\(True, True, False\).*Pass 'v5p:4x4x8_twisted'",
    ),
    # synthetic
    "synthetic shape": (lambda: Topology.synthetic((4, -1), wrap=None), r"shape=\(4, -1\).*no box"),
    "hosts that do not fill": (
        lambda: Topology.synthetic((3, 4), wrap=None),
        r"hosts of \(2, 2, 1\) chips do not fill it.*Pass a shape that its hosts fill",
    ),
    # devices
    "a hole": (
        lambda: read(without((4, 4), 5)),
        r"15 devices.*none at core 0 of the chip at \(1, 1, 0\), with 1 places.*such as 1x4x1 from",
    ),
    "one place twice": (
        lambda: read(moved(5, (0, 0, 0))),
        r"16 devices were given, 2 of them at core 0 of the chip at \(0, 0, 0\).*each device once",
    ),
    "a chip with one of two cores": (
        lambda: read([d for d in devices((2, 2), cores_per_chip=2, kind="TPU7x") if d.id != 3]),
        r"none at core 1 of the chip at \(1, 0, 0\)",
    ),
    "coords missing": (
        lambda: read(tpu_without_coords(V5E)),
        r"4 devices of TPU v5e were given without coords.*or Topology.parse",
    ),
    "coords of some": (
        lambda: read([*devices((2, 1)), Device(7)]),
        r"2 have coords and 1 have not, such as device 7",
    ),
    "two coords": (
        lambda: read([{"name": "TPU:0", "coords": [0, 0]}]),
        r"coords=\[0, 0\]. A chip has three coordinates",
    ),
    "one device twice": (lambda: read([0, 1, 1]), r"Device 1 was given twice"),
    "no device": (lambda: read([]), r"No devices were given"),
    "ragged slices": (
        lambda: read(two_slices((4, 4), (2, 4))),
        r"granules of 8 to 16 devices.*Granules of one mesh have one size",
    ),
    "slices of different shapes": (
        lambda: read(two_slices((4, 4), (2, 8))),
        r"Slice 1 fills 2x8x1 .* slice 0 4x4x1 .*slices of one topology are alike",
    ),
    "two kinds of chips": (
        lambda: read(
            [Device(0, coords=(0, 0, 0), kind=V5E), Device(1, coords=(1, 0, 0), kind=V5P)]
        ),
        r"Devices of 2 kinds were given: TPU v5, TPU v5 lite.*Pass devices of one kind",
    ),
    "unknown chip of devices": (
        lambda: read(devices((2, 2)), chip="v5x"),
        r"Chip 'v5x' was asked for",
    ),
    "granules that do not divide": (lambda: read(range(8), granule=3), r"such as 2"),
    "beyond the slice": (
        lambda: read(part_of(4), slice_shape=(4, 4, 4)),
        r"from \(0, 0, 4\) on .*They reach beyond that slice.*\(4, 4, 8\) or more",
    ),
    "part of an unreal slice": (
        lambda: read(part_of(4), slice_shape=(4, 4, 10)),
        r"'v5p:4x4x10' was asked for. TPU v5p has no slice of 4x4x10. Pass .*'v5p:4x4x8'",
    ),
    "part of a twisted slice": (
        lambda: read(part_of(4), slice_shape=(4, 4, 8), twist=True),
        r"part of a twisted slice_shape=\(4, 4, 8\).*Pass twist=False",
    ),
    # what needs more than is known
    "network of an unknown wrap": (
        lambda: Network.of(parse("v3-32")),
        r"Its wrap is not known.*Pass wrap= to Topology, such as wrap=\(True, True, False\)",
    ),
    "network of a part": (
        lambda: Network.of(read(part_of(4))),
        r"or slice_shape= for devices that are part of a slice",
    ),
    "wrong product": (
        lambda: Network.of(parse("v5e:4x4")).links(Span((3, 2, 1))),
        r"Span\(x3 y2\) was asked for.*Pass sizes and strides whose products divide \(4, 4, 1\)",
    ),
    "ids of another topology": (
        lambda: axis_reports(parse("v5e:2x2"), [[0, 1], [2, 9]]),
        r"The first that it does not have is 9",
    ),
    "groups that mix slices": (
        lambda: axis_reports(
            parse("2xv5e:2x2"), [[100000, 100001, 100002, 200000], [200001, 200002, 200003, 100003]]
        ),
        r"a group of which has 3 in slice 0, 1 in slice 1.*Make the mesh with HybridMesh",
    ),
    "figure that there is not": (
        lambda: find_chip("v5p").figure("weight"),
        r"Figure 'weight' of TPU v5p.*Pass one of: cores_per_chip, .*peak_flops.bf16",
    ),
}


@pytest.mark.parametrize("row", ROWS)
def test_refusals(row: str) -> None:
    action, message = ROWS[row]
    with pytest.raises(MeshError) as caught:
        action()
    text = str(caught.value)
    assert re.search(message, text), text
    assert len(text) < 400, text


def test_there_are_many_rows() -> None:
    assert len(ROWS) >= 30
