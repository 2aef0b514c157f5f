"""Orders: row-major, JAX's, and one's own; what JAX cannot do; every message."""

import itertools
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from mesh_utils import (
    Device,
    HybridMesh,
    MeshError,
    Topology,
    axis_reports,
    jax_order,
    row_major_order,
    search_order,
    synthetic_devices,
)
from mesh_utils.hybrid import arrange

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class MockTpu:
    """A TPU as JAX's own tests mock it."""

    id: int
    device_kind: str
    process_index: int
    coords: tuple[int, int, int]
    core_on_chip: int
    platform: str = "tpu"


def mocks(devices: tuple[Device, ...]) -> list[MockTpu]:
    return [
        MockTpu(d.id, d.kind, d.process_index or 0, d.coords or (0, 0, 0), d.core_on_chip)
        for d in devices
    ]


def ids(array: Any) -> list[Any]:
    return np.vectorize(lambda device: device.id, otypes=[int])(array).tolist()


def factorizations(count: int, axes: int) -> list[tuple[int, ...]]:
    divisors = [n for n in range(1, count + 1) if count % n == 0]
    found = itertools.product(divisors, repeat=axes)
    return [shape for shape in found if math.prod(shape) == count]


# Slices that exist, and those for which JAX has rings of its own.
TOPOLOGIES = [
    *(("TPU v5 lite", 1, shape) for shape in ((1, 1), (2, 2), (4, 2), (4, 4), (8, 4), (8, 8))),
    *(("TPU v6 lite", 1, shape) for shape in ((2, 2), (2, 4), (4, 4), (8, 16))),
    *(("TPU v5", 1, shape) for shape in ((2, 2, 1), (2, 2, 2), (4, 4, 4), (4, 4, 8))),
    *(("TPU v4", 1, shape) for shape in ((2, 2, 4), (4, 4, 8))),
    *(("TPU v4 lite", 1, shape) for shape in ((2, 2), (4, 4))),
    *((kind, 2, shape) for kind in ("TPU v2", "TPU v3") for shape in ((2, 2), (4, 4))),
    *(("TPU7x", 2, shape) for shape in ((2, 2, 1), (2, 2, 2), (2, 2, 4), (4, 4, 4))),
]


@st.composite
def slices(draw: st.DrawFn) -> tuple[Device, ...]:
    kind, cores, shape = draw(st.sampled_from(TOPOLOGIES))
    return synthetic_devices(shape, cores_per_chip=cores, kind=kind)


# --- row-major -----------------------------------------------------------------------------------


def test_row_major_counts_as_libtpu_numbers() -> None:
    for devices in (synthetic_devices((4, 2, 2), cores_per_chip=2), tuple(map(Device, range(32)))):
        assert ids(row_major_order(devices, (4, 8))) == np.arange(32).reshape(4, 8).tolist()


def test_row_major_goes_by_place_where_ids_do_not() -> None:
    devices = tuple(replace(d, id=99 - d.id) for d in synthetic_devices((2, 2), cores_per_chip=2))
    assert ids(row_major_order(devices, (8,))) == list(range(99, 91, -1))


# --- JAX -----------------------------------------------------------------------------------------


@given(slices(), st.data())
def test_jax_order_is_jaxs(devices: tuple[Device, ...], data: st.DataObject) -> None:
    jax_mesh_utils = pytest.importorskip("jax.experimental.mesh_utils")
    shape = data.draw(st.sampled_from(factorizations(len(devices), data.draw(st.integers(1, 3)))))
    expected = jax_mesh_utils.create_device_mesh(
        shape, mocks(devices), allow_split_physical_axes=True
    )
    shuffled = data.draw(st.permutations(devices)) if len(devices) < 65 else devices[::-1]
    (made,) = arrange([tuple(shuffled)], shape, "jax")
    assert ids(made) == ids(expected)
    assert ids(jax_order(tuple(shuffled), shape)) == ids(expected)


@given(slices(), st.data())
def test_a_sub_slice_is_laid_out_like_a_slice(
    devices: tuple[Device, ...], data: st.DataObject
) -> None:
    """JAX's own rings look at absolute coordinates: off the origin it does not see a tray."""
    pytest.importorskip("jax")
    shape = data.draw(st.sampled_from(factorizations(len(devices), 2)))
    moved = tuple(
        replace(device, coords=(device.coords[0] + 4, device.coords[1] + 2, device.coords[2]))
        for device in devices
        if device.coords is not None
    )
    assert ids(jax_order(moved, shape)) == ids(jax_order(devices, shape))


def test_two_cores_per_chip_as_torch_xla_shows_them() -> None:
    """torch_xla gives no kind; its own HybridMesh has no place for the second core."""
    pytest.importorskip("jax")
    attributes = [
        {"name": f"TPU:{d.id}", "coords": list(d.coords or ()), "core_on_chip": d.core_on_chip}
        for d in synthetic_devices((4, 4), cores_per_chip=2)
    ]
    mesh = HybridMesh(attributes, ici_mesh_shape=(16, 2), axis_names=("dp", "tp"))
    mesh.check_valid()
    assert (mesh.groups("tp") // 2 == mesh.groups("tp")[:, :1] // 2).all()  # the cores of a chip
    v3_8 = [a for a in attributes if max(a["coords"]) < 2]  # type: ignore[type-var]
    ring = HybridMesh(v3_8, ici_mesh_shape=(8,)).devices
    on_v3 = jax_order(synthetic_devices((2, 2), cores_per_chip=2, kind="TPU v3"), (8,))
    assert [(d.coords, d.core_on_chip) for d in ring] == [(d.coords, d.core_on_chip) for d in on_v3]


def test_jax_order_counts_devices_without_coords_by_id() -> None:
    pytest.importorskip("jax")
    devices = tuple(Device(n, process_index=9 - n, kind="NVIDIA B200") for n in range(8))
    assert ids(arrange([devices], (2, 4), "jax")[0]) == [[0, 1, 2, 3], [4, 5, 6, 7]]


LIGHT = """
import json, sys
from mesh_utils import HybridMesh, synthetic_devices
before = "jax" in sys.modules
HybridMesh(synthetic_devices((2, 2)), ici_mesh_shape=(2, 2), order="row-major")
HybridMesh(range(4), ici_mesh_shape=(2, 2))
row_major = "jax" in sys.modules
HybridMesh(synthetic_devices((2, 2)), ici_mesh_shape=(2, 2))
from jax._src import xla_bridge
print(json.dumps([before, row_major, "jax" in sys.modules, xla_bridge.backends_are_initialized()]))
"""


def test_jax_is_imported_when_asked_and_starts_no_backend() -> None:
    """A TPU process of torch_xla must keep its TPUs."""
    pytest.importorskip("jax")
    done = subprocess.run(
        [sys.executable, "-c", LIGHT],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [False, False, True, False]


def test_jax_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jax.experimental", None)
    for order in ("auto", "jax"):
        with pytest.raises(MeshError) as caught:
            HybridMesh(synthetic_devices((2, 2)), ici_mesh_shape=(4,), order=order)
        first, second, third = str(caught.value).split(". ")
        assert first == "order='jax' was asked for, by name or by 'auto' for TPUs"
        assert second.startswith("JAX cannot be imported: ")
        assert third == "Install jax, or pass order='row-major'."
    HybridMesh(synthetic_devices((2, 2)), ici_mesh_shape=(4,), order="row-major")


def test_jax_refuses() -> None:
    """v4 chips as two devices; JAX wants one."""
    pytest.importorskip("jax")
    devices = synthetic_devices((2, 2, 4), cores_per_chip=2, kind="TPU v4")
    with pytest.raises(MeshError) as caught:
        HybridMesh(devices, ici_mesh_shape=(4, 8), order="jax")
    text = str(caught.value)
    assert text.startswith(
        "order='jax' was asked for, with 32 devices of kind 'TPU v4' and ici_mesh_shape=(4, 8). "
        "JAX refuses them: AssertionError: Creating meshes for TPU >v3 requires one device per chip"
    )
    assert text.endswith(" Pass order='row-major', or another ici_mesh_shape.")
    assert len(text) < 400
    HybridMesh(devices, ici_mesh_shape=(4, 8), order="row-major").check_valid()


def test_whatever_jax_raises_becomes_a_mesh_error(monkeypatch: pytest.MonkeyPatch) -> None:
    jax_mesh_utils = pytest.importorskip("jax.experimental.mesh_utils")

    def refuse(*_: object, **__: object) -> None:
        raise NotImplementedError

    monkeypatch.setattr(jax_mesh_utils, "create_device_mesh", refuse)
    with pytest.raises(MeshError, match=r"JAX refuses them: NotImplementedError: \. Pass order="):
        HybridMesh(synthetic_devices((2, 2)), ici_mesh_shape=(4,))


@given(st.lists(st.integers(0, 31), min_size=1, max_size=31, unique=True))
def test_holes_are_refused_in_a_few_words(kept: list[int]) -> None:
    devices = synthetic_devices((4, 4), cores_per_chip=2, kind="TPU7x")
    some = tuple(device for device in devices if device.id in kept)
    coords = np.array([device.coords for device in some])
    box = int(np.prod(np.ptp(coords, axis=0) + 1)) * len({d.core_on_chip for d in some})
    assume(box != len(some))
    with pytest.raises(MeshError, match=r"in a box of .* is not there once\. Pass") as caught:
        jax_order(some, (len(some),))
    assert len(str(caught.value)) < 250
    assert len(row_major_order(some, (len(some),))) == len(some)


# --- the search ---------------------------------------------------------------------------------


def test_auto_searches_where_the_links_are_known() -> None:
    devices = synthetic_devices((16, 16), num_slices=2, kind="TPU v5 lite")
    shapes = {"ici_mesh_shape": (64, 4), "dcn_mesh_shape": (2, 1)}
    auto, searched = (HybridMesh(devices, order=order, **shapes) for order in ("auto", "search"))  # type: ignore[arg-type]
    auto.check_valid()
    assert auto == searched
    assert auto.device_ids[64:].tolist() == (auto.device_ids[:64] + 100_000).tolist()
    topology = Topology.from_devices(devices)
    assert [report.links["all-gather"] for report in axis_reports(topology, auto)][1] == 2.0
    with pytest.raises(MeshError, match="Its wrap is not known"):
        HybridMesh([replace(d, kind="TPU") for d in devices], order="search", **shapes)  # type: ignore[arg-type]


def test_the_chip_may_be_told() -> None:
    """torch_xla says "TPU" and no more."""
    devices = synthetic_devices((16, 16), kind="TPU v5 lite")
    dicts = [
        {"name": f"TPU:{d.id}", "coords": list(d.coords or ()), "core_on_chip": 0} for d in devices
    ]
    told = HybridMesh(dicts, ici_mesh_shape=(64, 4), order=partial(search_order, chip="v5e"))
    assert told == HybridMesh(devices, ici_mesh_shape=(64, 4), order="search")
    wrapped = partial(search_order, wrap=(True, True), weights=(9, 1))
    other = HybridMesh(dicts, ici_mesh_shape=(64, 4), order=wrapped)
    assert other != told
    other.check_valid()


def test_auto_asks_jax_where_granules_are_not_alike() -> None:
    """A cube at the origin could be a whole slice, which wraps; of the others nothing is known."""
    pytest.importorskip("jax")
    devices = synthetic_devices((4, 4, 8), kind="TPU v5")
    options: dict[str, Any] = {
        "ici_mesh_shape": (8, 8),
        "dcn_mesh_shape": (2, 1),
        "granule": lambda device: device.coords[2] // 4,
    }
    made = HybridMesh(devices, **options)
    made.check_valid()
    assert made == HybridMesh(devices, order="jax", **options)
    assert made.device_ids[8:].tolist() == (made.device_ids[:8] + 64).tolist()


# --- one's own -----------------------------------------------------------------------------------


def backwards(devices: tuple[Device, ...], shape: tuple[int, ...]) -> Any:
    return row_major_order(devices, shape)[::-1]


def of_ids(devices: tuple[Device, ...], shape: tuple[int, ...]) -> Any:
    return np.array([device.id for device in devices]).reshape(shape)


def test_an_order_of_ones_own() -> None:
    seen: list[tuple[int, ...]] = []

    def order(devices: tuple[Device, ...], shape: tuple[int, ...]) -> Any:
        seen.append(tuple(device.id for device in devices))
        return backwards(devices, shape)

    devices = synthetic_devices((4, 2))
    mesh = HybridMesh(devices[::-1], ici_mesh_shape=(8,), order=order)
    assert mesh.device_ids.tolist() == list(range(7, -1, -1))
    assert seen == [tuple(device.id for device in devices)]  # as libtpu lists them


TWO_SLICES = synthetic_devices((2, 2), num_slices=2, kind="TPU v4")

CASES: list[tuple[Callable[[], object], str]] = [
    (
        lambda: arrange([tuple(map(Device, range(4)))], (4,), "snake"),  # type: ignore[arg-type]
        "order='snake' was asked for. There is no such order. "
        "Pass 'auto', 'search', 'jax', 'row-major', or a function of a granule's devices and a "
        "shape.",
    ),
    (
        lambda: jax_order(synthetic_devices((2, 2))[:3], (3,)),
        "order='jax' was asked for, with 3 devices in a box of 2x2x1 chips. "
        "The chip at (1, 1, 0) is not there once. "
        "Pass the devices of a whole box, or order='row-major'.",
    ),
    (
        lambda: jax_order(synthetic_devices((4, 4), cores_per_chip=2)[-3:], (3,)),
        "order='jax' was asked for, with 3 devices in a box of 2x1x1 chips of 2 cores. "
        "The chip at (2, 3, 0) is not there once. "
        "Pass the devices of a whole box, or order='row-major'.",
    ),
    (
        lambda: arrange([tuple(map(Device, range(4)))], (4,), of_ids),
        "order=of_ids was asked for ici_mesh_shape=(4,). What it returned for the granule with the "
        "ids 0 to 3 is not each of its devices once. "
        "Let it return the Devices that it gets, and no others.",
    ),
    (
        lambda: HybridMesh(
            TWO_SLICES,
            ici_mesh_shape=(4,),
            dcn_mesh_shape=(2,),
            order=lambda devices, shape: row_major_order(TWO_SLICES[2:6], shape),
        ),
        "order=<lambda> was asked for ici_mesh_shape=(4,). What it returned for the granule with "
        "the ids 100000 to 100003 is not each of its devices once. "
        "Let it return the Devices that it gets, and no others.",
    ),
    (
        lambda: HybridMesh(
            range(4), ici_mesh_shape=(4,), order=lambda d, s: row_major_order(d, (2, 2))
        ),
        "order=<lambda> was asked for ici_mesh_shape=(4,). For a granule of 4 devices it returned "
        "(2, 2), no array of that shape. Let it return a numpy array of ici_mesh_shape.",
    ),
    (
        lambda: HybridMesh(range(4), ici_mesh_shape=(4,), order=lambda d, _: list(d)),  # type: ignore
        "order=<lambda> was asked for ici_mesh_shape=(4,). For a granule of 4 devices it returned "
        "'list', no array of that shape. Let it return a numpy array of ici_mesh_shape.",
    ),
]


@pytest.mark.parametrize(("ask", "message"), CASES)
def test_order_messages(ask: Callable[[], object], message: str) -> None:
    with pytest.raises(MeshError) as caught:
        ask()
    assert str(caught.value) == message
