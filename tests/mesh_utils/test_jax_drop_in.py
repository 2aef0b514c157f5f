"""create_device_mesh and its hybrid: JAX's arguments, JAX's answers when asked, and messages."""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mesh_utils
from mesh_utils import Device, MeshError, Network, Topology, assign, synthetic_devices
from mesh_utils import create_device_mesh as make
from mesh_utils import create_hybrid_device_mesh as make_hybrid

ROOT = Path(__file__).resolve().parents[2]
V5E = synthetic_devices((4, 4), kind="TPU v5 lite")
TWO = synthetic_devices((4, 4), num_slices=2, kind="TPU v5 lite")


@dataclass(frozen=True)
class MockTpu:
    """A TPU as JAX's own tests mock it."""

    id: int
    device_kind: str
    process_index: int
    coords: tuple[int, int, int]
    core_on_chip: int
    slice_index: int
    platform: str = "tpu"


def mocks(devices: tuple[Device, ...]) -> list[MockTpu]:
    return [
        MockTpu(
            d.id,
            d.kind,
            d.process_index or 0,
            d.coords or (0, 0, 0),
            d.core_on_chip,
            d.slice_index or 0,
        )
        for d in devices
    ]


def ids(array: Any) -> list[Any]:
    return np.vectorize(lambda device: device.id, otypes=[int])(array).tolist()


def gpus(hosts: int) -> tuple[Device, ...]:
    return tuple(
        Device(n, process_index=n // 8, slice_index=n // 8, kind="NVIDIA H100 80GB HBM3")
        for n in range(8 * hosts)
    )


# --- strategy="jax" ------------------------------------------------------------------------------

KINDS = [
    *(("TPU v5 lite", 1, shape) for shape in ((2, 2), (4, 2), (4, 4), (8, 4))),
    *(("TPU v6 lite", 1, shape) for shape in ((2, 4), (4, 4), (8, 8))),
    *(("TPU v5", 1, shape) for shape in ((2, 2, 1), (2, 2, 2), (4, 4, 4))),
    *(("TPU v4", 1, shape) for shape in ((2, 2, 4), (4, 4, 8))),
    *((kind, 2, shape) for kind in ("TPU v2", "TPU v3") for shape in ((2, 2), (4, 4))),
    *(("TPU7x", 2, shape) for shape in ((2, 2, 1), (2, 2, 2), (2, 2, 4))),
]


def outcome(ask: Callable[[], Any]) -> object:
    """The mesh, or the error."""
    try:
        return ids(ask())
    except Exception as error:
        return type(error), str(error)[:200]


@pytest.mark.parametrize(("kind", "cores", "shape"), KINDS)
def test_strategy_jax_is_jax(kind: str, cores: int, shape: tuple[int, ...]) -> None:
    jax_mesh_utils = pytest.importorskip("jax.experimental.mesh_utils")
    devices = mocks(synthetic_devices(shape, cores_per_chip=cores, kind=kind))
    count = len(devices)
    wanted = [(count,), (2, count // 2), (count // 4, 4), (2, 2, count // 4), (3, count)]
    shuffled = random.Random(0).sample(devices, count)
    for mesh_shape, split, contiguous, given in itertools.product(
        wanted, (False, True), (False, True), (devices, shuffled)
    ):
        options: Any = {"allow_split_physical_axes": split, "contiguous_submeshes": contiguous}
        expected = outcome(
            lambda m=mesh_shape, g=given, o=options: jax_mesh_utils.create_device_mesh(m, g, **o)
        )
        found = outcome(lambda m=mesh_shape, g=given, o=options: make(m, g, strategy="jax", **o))
        assert found == expected, (mesh_shape, options)


def test_strategy_jax_on_what_jax_does_not_know() -> None:
    """A Topology, Devices, torch_xla's dicts."""
    jax_mesh_utils = pytest.importorskip("jax.experimental.mesh_utils")
    expected = ids(jax_mesh_utils.create_device_mesh((4, 4), mocks(V5E)))
    for given in (V5E, Topology.parse("v5e:4x4"), np.array(V5E, object)):
        assert ids(make((4, 4), given, strategy="jax")) == expected  # type: ignore[arg-type]
    two = jax_mesh_utils.create_hybrid_device_mesh((4, 4), (2, 1), mocks(TWO))
    assert ids(make_hybrid((4, 4), (2, 1), TWO, strategy="jax")) == ids(two)
    assert ids(make_hybrid((4, 4), (2, 1), Topology.parse("2xv5e:4x4"), strategy="jax")) == ids(two)


@pytest.mark.parametrize("by_process", [False, True])
@pytest.mark.parametrize("sort", [False, True])
def test_hybrid_strategy_jax_is_jax(by_process: bool, sort: bool) -> None:
    jax_mesh_utils = pytest.importorskip("jax.experimental.mesh_utils")
    options: Any = {"process_is_granule": by_process, "should_sort_granules_by_key": sort}
    for given in (mocks(TWO), random.Random(1).sample(mocks(TWO), 32)):
        for shape, dcn in [((4, 4), (2, 1)), ((2, 2), (2, 4)), ((1, 4), (8, 1)), ((4, 2), (1, 1))]:
            for split in (False, True):
                expected = outcome(
                    lambda g=given, s=shape, d=dcn, p=split: (
                        jax_mesh_utils.create_hybrid_device_mesh(
                            s, d, g, allow_split_physical_axes=p, **options
                        )
                    )
                )
                found = outcome(
                    lambda g=given, s=shape, d=dcn, p=split: make_hybrid(
                        s, d, g, allow_split_physical_axes=p, strategy="jax", **options
                    )
                )
                assert found == expected


# --- the search ----------------------------------------------------------------------------------


def test_the_devices_given_come_back() -> None:
    for given in (mocks(V5E), V5E, np.array(mocks(V5E), object).reshape(4, 4)):
        made = make((4, 4), given)  # type: ignore[arg-type]
        flat = list(given.reshape(-1)) if isinstance(given, np.ndarray) else list(given)
        assert made.shape == (4, 4)
        assert {id(device) for device in made.reshape(-1)} == {id(device) for device in flat}
    # torch_xla names no chip, so nothing says which dims wrap.
    dicts = [
        {"name": f"TPU:{d.id}", "coords": list(d.coords or ()), "core_on_chip": 0} for d in V5E
    ]
    found = make((-1, 4), dicts, wrap=(False, False))
    assert [device["name"] for device in found[0]] == ["TPU:0", "TPU:1", "TPU:5", "TPU:4"]
    assert ids(make((4, 4), devices=V5E)) == ids(make((4, 4), Topology.parse("v5e:4x4")))


@pytest.mark.parametrize(
    ("name", "shape"), [("v5e:4x4", (4, 4)), ("v5p:4x4x4", (8, 8)), ("tpu7x:2x2x2", (2, 8))]
)
def test_the_order_of_the_list_does_not_matter(name: str, shape: tuple[int, ...]) -> None:
    topology = Topology.parse(name)
    expected = ids(make(shape, topology))
    for seed in range(3):
        shuffled = random.Random(seed).sample(topology.devices, topology.num_devices)
        assert ids(make(shape, shuffled)) == expected


def test_it_answers_where_jax_refuses() -> None:
    """JAX refuses by default what splits a dim, and sizes with other factors than 2 always did."""
    for name, shape in [("v5e:4x4", (2, 8)), ("v5p:4x4x12", (6, 32)), ("v5p:16x20x28", (1120, 8))]:
        topology = Topology.parse(name)
        assert ids(make(shape, topology)) == assign(topology, shape).device_ids.tolist()
    sub_slice = synthetic_devices((8, 8), kind="TPU v5 lite")
    moved = [d for d in sub_slice if d.coords and min(d.coords[:2]) >= 4]
    assert sorted(np.ravel(ids(make((4, 4), moved))).tolist()) == sorted(d.id for d in moved)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        *(("v5e:4x4", shape) for shape in ((16,), (4, 4), (2, 8), (8, 2), (2, 2, 4), (4, 2, 2))),
        *(("v5p:4x4x4", shape) for shape in ((64,), (4, 16), (8, 8), (2, 4, 8), (2, 2, 2, 8))),
        *(("v5p:4x4x12", shape) for shape in ((6, 32), (3, 64), (12, 16), (4, 6, 8))),
        *(("tpu7x:2x2x4", shape) for shape in ((32,), (4, 8), (2, 16), (16, 2))),
    ],
)
def test_contiguous_submeshes(name: str, shape: tuple[int, ...]) -> None:
    """The devices of every process are a box of the mesh."""
    topology = Topology.parse(name)
    made = make(shape, topology, contiguous_submeshes=True)
    process = np.vectorize(lambda device: device.process_index, otypes=[int])(made)
    for number in range(topology.num_hosts):
        places = np.argwhere(process == number)
        assert math.prod((np.ptp(places, axis=0) + 1).tolist()) == len(places)
    # It costs no more than it must: never above the free search, and the same as its own report.
    free = assign(topology, shape)
    kept = assign(topology, shape, contiguous_submeshes=True)
    assert ids(made) == kept.device_ids.tolist()
    assert kept.score <= free.score + 1e-9
    kept.check_valid()


def test_contiguous_submeshes_find_the_best_of_those() -> None:
    """Against all meshes of the shape: (2, 8) on 4x4 has few."""
    topology = Topology.parse("v5e:4x4")
    kept = assign(topology, (4, 4), contiguous_submeshes=True)
    free = assign(topology, (4, 4))
    assert kept.score == pytest.approx(free.score)
    assert kept.walks[1].kind == "hosts"


def test_devices_without_a_torus_go_by_id() -> None:
    devices = gpus(2)
    assert ids(make((2, 8), devices[::-1])) == np.arange(16).reshape(2, 8).tolist()
    assert ids(make((4, 4), [Device(n, process_index=0, kind="cpu") for n in range(16)])) == (
        np.arange(16).reshape(4, 4).tolist()
    )
    assert ids(make_hybrid((1, 8), (2, 1), devices[::-1])) == np.arange(16).reshape(2, 8).tolist()


def test_hybrid() -> None:
    made = np.array(ids(make_hybrid((4, 4), (2, 1), TWO)))
    assert made.shape == (8, 4)
    assert (made[:4] < 200_000).all()
    assert (made[4:] >= 200_000).all()
    assert np.array_equal(made[:4] + 100_000, made[4:])
    inner = np.array(ids(make((4, 4), V5E)))
    assert np.array_equal(made[:4] - 100_000, inner)
    assert ids(make_hybrid((-1, 4), (-1, 1), TWO)) == made.tolist()
    assert ids(make_hybrid((4, 4), (1, 1), V5E)) == inner.tolist()  # one slice, which JAX refuses


def test_hybrid_granules_as_they_appear() -> None:
    backwards = list(TWO[::-1])
    made = np.array(ids(make_hybrid((4, 4), (2, 1), backwards, should_sort_granules_by_key=False)))
    assert (made[:4] >= 200_000).all()
    assert np.array_equal(made[4:], np.array(ids(make_hybrid((4, 4), (2, 1), backwards)))[:4])


def test_hybrid_of_processes() -> None:
    made = make_hybrid((2, 2), (4, 1), V5E, process_is_granule=True)
    process = np.vectorize(lambda device: device.process_index, otypes=[int])(made)
    assert process[:, 0].tolist() == process[:, 1].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


def test_hybrid_warns_of_the_hungriest_axis_over_dcn() -> None:
    with pytest.warns(UserWarning, match=r"1=8 runs over DCN, while 0=4 .* modelled 0\.368 links"):
        make_hybrid((4, 4), (1, 2), TWO)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_hybrid((4, 4), (2, 1), TWO)


LIGHT = """
import json, sys
import mesh_utils
mesh_utils.create_device_mesh((4, 4), mesh_utils.Topology.parse("v5e:4x4"))
print(json.dumps([name in sys.modules for name in ("jax", "torch", "torch_xla")]))
"""


def test_the_search_needs_neither_jax_nor_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIGHT],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [False, False, False]


def test_jax_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jax.experimental", None)
    with pytest.raises(MeshError, match=r"strategy='jax'\. JAX cannot .* pass strategy='search'"):
        make((4, 4), V5E, strategy="jax")
    with pytest.raises(MeshError, match=r"JAX cannot .* or pass devices, or a Topology\."):
        make((4, 4))
    make((4, 4), V5E)


@pytest.mark.only_on("jax")
def test_without_devices_it_takes_jaxs() -> None:
    """Here they are CPU devices, which have no torus: they go by id, as JAX has them."""
    jax = pytest.importorskip("jax")
    count = len(jax.devices())
    assert make((count,)).tolist() == jax.devices()
    assert make((-1, 1)).tolist() == make((count, 1), strategy="jax").tolist()


def test_public_names() -> None:
    assert mesh_utils.create_device_mesh is make
    assert mesh_utils.create_hybrid_device_mesh is make_hybrid


# --- messages ------------------------------------------------------------------------------------

TOPOLOGY = Topology.parse("v5e:4x4")
SPARSE = [device for device in V5E if device.id != 5]
V3 = synthetic_devices((4, 4), cores_per_chip=2, kind="TPU v3")

CASES: list[tuple[Callable[[], object], str]] = [
    (
        lambda: assign(TOPOLOGY, (4, 5)),
        r"mesh_shape=\(4, 5\), a product of 20\. There are 16 devices in a slice of .* "
        r"Pass mesh_shape=\(4, 4\), or",
    ),
    (lambda: assign(TOPOLOGY, (3, 7)), r"Pass mesh_shape=\(16, 1\), or others with that product"),
    (lambda: assign(TOPOLOGY, (-1, 3)), r"mesh_shape=\(-1, 3\), a product of 3\. There are 16"),
    (lambda: assign(TOPOLOGY, (-1, -1)), r"of which one may be -1, for what is left"),
    (lambda: assign(TOPOLOGY, (4, 0)), r"no size of 1 or more for each axis"),
    (lambda: assign(TOPOLOGY, (4, 2.0)), r"no size of 1 or more for each axis"),  # type: ignore
    (lambda: assign(TOPOLOGY, ()), r"no size of 1 or more for each axis"),
    (lambda: assign(TOPOLOGY, 16), r"no size of 1 or more for each axis"),  # type: ignore
    (lambda: assign(TOPOLOGY, "44"), r"no size of 1 or more for each axis"),  # type: ignore
    (lambda: assign(TOPOLOGY, (4, 4), (2, 1)), r"dcn_mesh_shape=\(2, 1\), .* There are 1 slices"),
    (lambda: assign(TOPOLOGY, (4, 4), (1,)), r"They have 2 and 1 axes"),
    (
        lambda: assign(Topology.parse("2xv5e:4x4"), (4, 4)),
        r"Nothing says which axis runs across slices, over DCN\. Pass dcn_mesh_shape=\(2, 1\)",
    ),
    (lambda: assign(TOPOLOGY, (4, 4), axis_names=("dp",)), r"The number of names is 1"),
    (
        lambda: assign(TOPOLOGY, (4, 4), axis_names=("dp", "tp"), weights={"ep": 1}),
        r"It has no axis 'ep'\. Pass weights for some of dp, tp",
    ),
    (lambda: assign(TOPOLOGY, (4, 4), weights=(1,)), r"no number of bytes, 0 or more, for each"),
    (lambda: assign(TOPOLOGY, (4, 4), weights=(1, -1)), r"no number of bytes, 0 or more"),
    (lambda: assign(TOPOLOGY, (4, 4), weights=(0, 0)), r"of which one is more than 0"),
    (lambda: assign(TOPOLOGY, (4, 4), weights=(1, math.nan)), r"no number of bytes, 0 or more"),
    (lambda: assign(TOPOLOGY, (4, 4), weights="12"), r"no number of bytes"),  # type: ignore
    (
        lambda: make((2, 8), V5E, allow_split_physical_axes=False),
        r"allow_split_physical_axes=False\. No choice of whole dims, of \(4, 4, 1\) chips",
    ),
    (lambda: make((4, 4), V5E, strategy="best"), r"strategy='best'\. There is no"),  # type: ignore
    (
        lambda: make_hybrid((4, 4), (1, 1), V5E, strategy="best"),  # type: ignore[arg-type]
        r"Pass 'search' or 'jax'",
    ),
    (lambda: make((4, 8), TWO), r"makes meshes of one slice\. .* create_hybrid_device_mesh"),
    (lambda: make((15,), SPARSE), r"There is none at core 0 of the chip at \(1, 1, 0\)"),
    (lambda: make((4, 8), [*V5E, V5E[0]]), r"Device 0 was given twice"),
    (lambda: make((4, 4), []), r"No devices were given"),
    (lambda: make((4, 4), "v5e:4x4"), r"That is no list of devices"),  # type: ignore[arg-type]
    (lambda: make((4, 4), [object()] * 16), r"no device that is known here"),
    (
        lambda: make((8, 4), V3),
        r"on 32 devices that fill .*v3:4x4.* Its wrap is not known, .* Pass wrap=\(True, True, Fal",
    ),
    (
        lambda: make((4, 4), [Device(d.id, coords=d.coords, kind="TPU") for d in V5E]),
        r"Its wrap is not known",
    ),
    (
        lambda: make_hybrid((4, 4), (2, 1), TWO[:-4]),
        r"it makes 2 granules of 12 to 16 devices",
    ),
    (lambda: make_hybrid((4, 4), (4, 1), TWO), r"dcn_mesh_shape=\(4, 1\), .* There are 2 slices"),
    (
        lambda: make_hybrid(
            (4, 4),
            (2, 1),
            [Device(d.id, coords=d.coords, kind=d.kind) for d in V5E],
            process_is_granule=True,
        ),
        r"They have no process_index",
    ),
    (
        lambda: assign(Topology.synthetic((4, 4), wrap=None), (4, 4)),
        r"Its wrap is not known",
    ),
]


@pytest.mark.parametrize(("ask", "message"), CASES)
def test_messages(ask: Callable[[], object], message: str) -> None:
    with pytest.raises(MeshError, match=message) as caught:
        ask()
    assert len(str(caught.value)) < 500


def test_hosts_that_are_no_boxes_are_found_out() -> None:
    rows = tuple(Device(d.id, process_index=d.id // 4, coords=d.coords, kind=d.kind) for d in V5E)
    # Hosts of 4x1 chips; the usual ones of v5e are 2x2, which `rows` does not say.
    with pytest.raises(MeshError, match=r"The 4 devices of process 0 are not a box of \(2, 2, 1\)"):
        make((16,), rows, contiguous_submeshes=True)


def test_a_network_of_ones_own() -> None:
    topology = Topology.parse("2xv5e:4x4")
    slow = Network.of(topology, dcn_bytes_per_second=1e8)
    found = assign(topology, (4, 4), (2, 1), network=slow)
    assert found.links[0] < assign(topology, (4, 4), (2, 1)).links[0]
