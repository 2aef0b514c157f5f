"""HybridMesh: against JAX's, its invariants, its value, its submeshes; every message."""

import copy
import itertools
import math
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh_utils import AxisError, Device, HybridMesh, Mesh, MeshError, synthetic_devices

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("pp", "dp", "tp")


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


def mock(device: Device) -> MockTpu:
    coords, index = device.coords or (0, 0, 0), device.slice_index or 0
    process = device.process_index or 0
    return MockTpu(device.id, device.kind, process, coords, device.core_on_chip, index)


def factorizations(count: int, axes: int) -> list[tuple[int, ...]]:
    divisors = [n for n in range(1, count + 1) if count % n == 0]
    found = itertools.product(divisors, repeat=axes)
    return [shape for shape in found if math.prod(shape) == count]


TOPOLOGIES = [
    ("TPU v5 lite", 1, (2, 2)),
    ("TPU v5 lite", 1, (4, 2)),
    ("TPU v5 lite", 1, (4, 4)),
    ("TPU v6 lite", 1, (2, 4)),
    ("TPU v6 lite", 1, (8, 4)),
    ("TPU v4", 1, (2, 2, 4)),
    ("TPU v5", 1, (2, 2, 2)),
    ("TPU v5", 1, (4, 4, 4)),
    ("TPU v3", 2, (2, 2)),
    ("TPU v3", 2, (4, 4)),
    ("TPU7x", 2, (2, 2, 2)),
]


@dataclass(frozen=True)
class Plan:
    """What HybridMesh is asked for."""

    devices: tuple[Device, ...]
    ici: tuple[int, ...]
    dcn: tuple[int, ...]

    def mesh(self, **options: Any) -> HybridMesh:
        names = NAMES[: len(self.ici)]
        options = {"axis_names": names, "order": "row-major", **options}
        return HybridMesh(self.devices, ici_mesh_shape=self.ici, dcn_mesh_shape=self.dcn, **options)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    kind, cores, shape = draw(st.sampled_from(TOPOLOGIES))
    num_slices = draw(st.sampled_from([1, 2, 3, 4, 6]))
    axes = draw(st.integers(1, 3))
    ici = draw(st.sampled_from(factorizations(math.prod(shape) * cores, axes)))
    dcn = draw(st.sampled_from(factorizations(num_slices, axes)))
    return Plan(synthetic_devices(shape, num_slices, cores, kind=kind), ici, dcn)


FOUR = HybridMesh(range(8), ici_mesh_shape=(2, 2), dcn_mesh_shape=(2, 1), granule=4)
NAMED = HybridMesh(
    range(8), ici_mesh_shape=(2, 2), dcn_mesh_shape=(2, 1), axis_names=("dp", "tp"), granule=4
)


# --- what it holds -------------------------------------------------------------------------------


def test_the_worked_example() -> None:
    devices = synthetic_devices((2, 2), num_slices=2, kind="TPU v4")
    mesh = Plan(devices, (2, 2), (2, 1)).mesh(axis_names=("dp", "tp"))
    mesh.check_valid()
    places = mesh.device_ids - 100_000 * (1 + mesh.granule_index(mesh.device_ids))
    assert (places + 4 * mesh.granule_index(mesh.device_ids)).tolist() == NAMED.device_ids.tolist()
    assert NAMED.device_ids.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert NAMED.granules == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert (NAMED.mesh_shape, NAMED.axis_names) == ((4, 2), ("dp", "tp"))
    assert (NAMED.ici_mesh_shape, NAMED.dcn_mesh_shape) == ((2, 2), (2, 1))
    assert (NAMED.dcn_axes, FOUR.dcn_axes) == (("dp",), (0,))
    assert NAMED.device_ids.dtype == np.int64
    assert NAMED.is_root
    assert NAMED.root is NAMED


def test_one_size_of_each_shape_may_be_left_open() -> None:
    devices = synthetic_devices((4, 4), num_slices=4, kind="TPU v5 lite")
    asked = Plan(devices, (-1, 4), (2, -1)).mesh(axis_names=("dp", "tp"))
    assert asked == Plan(devices, (4, 4), (2, 2)).mesh(axis_names=("dp", "tp"))
    with pytest.raises(MeshError, match=r"ici_mesh_shape=\(3, 5\) and .* Pass ici_mesh_shape="):
        Plan(devices, (3, -1), (2, 2)).mesh()


def test_dcn_over_two_axes() -> None:
    mesh = HybridMesh(range(16), ici_mesh_shape=(1, 4), dcn_mesh_shape=(2, 2), granule=4)
    assert mesh.granule_index(mesh.device_ids).tolist() == [[0] * 4 + [1] * 4, [2] * 4 + [3] * 4]
    assert mesh.dcn_axes == (0, 1)


def test_one_granule_needs_no_dcn_shape() -> None:
    one_slice = synthetic_devices((4, 4), kind="TPU v5 lite")  # they have no slice_index
    mesh = HybridMesh(one_slice, ici_mesh_shape=(4, 4), order="row-major")
    assert (mesh.dcn_mesh_shape, mesh.dcn_axes, len(mesh.granules)) == ((1, 1), (), 1)
    with_index = [Device(n, slice_index=0) for n in range(4)]
    assert HybridMesh(with_index, ici_mesh_shape=(4,)).granules == ((0, 1, 2, 3),)


def test_granule_index() -> None:
    assert (NAMED.granule_index(3), NAMED.granule_index(4)) == (0, 1)
    assert type(NAMED.granule_index(4)) is int
    found = NAMED.granule_index(np.array([[7], [0]]))
    assert (found.tolist(), found.dtype) == ([[1], [0]], np.int64)
    with pytest.raises(MeshError, match="The first that it does not have is 8"):
        NAMED.granule_index(8)


def test_devices_are_in_the_order_of_the_mesh() -> None:
    devices = synthetic_devices((2, 2), num_slices=2, kind="TPU v4")
    mesh = Plan(devices, (4,), (2,)).mesh()
    assert [device.id for device in mesh.devices] == mesh.device_ids.tolist()
    assert set(mesh.devices) == set(devices)


def torch_xla_attributes() -> list[dict[str, Any]]:
    """Two slices of 2x2 chips as torch_xla describes them."""
    return [
        {"name": f"TPU:{n}", "coords": [n % 2, n // 2 % 2, 0], "core_on_chip": 0}
        | {"slice_index": n // 4}
        for n in range(8)
    ]


@pytest.mark.parametrize("order", ["row-major", "jax"])
def test_torch_xla_attributes_of_two_slices(order: Any) -> None:
    if order == "jax":
        pytest.importorskip("jax")
    mesh = HybridMesh(
        torch_xla_attributes(), ici_mesh_shape=(2, 2), dcn_mesh_shape=(2, 1), order=order
    )
    assert mesh.granules == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert mesh.device_ids.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]


# --- against JAX ---------------------------------------------------------------------------------


@given(plans(), st.randoms())
def test_hybrid_meshes_are_jaxs(plan: Plan, random: Any) -> None:
    jax_mesh_utils = pytest.importorskip("jax.experimental.mesh_utils")
    expected = jax_mesh_utils.create_hybrid_device_mesh(
        plan.ici, plan.dcn, [mock(d) for d in plan.devices], allow_split_physical_axes=True
    )
    shuffled = list(plan.devices)
    random.shuffle(shuffled)
    mesh = Plan(tuple(shuffled), plan.ici, plan.dcn).mesh(order="jax")
    mesh.check_valid()
    assert mesh.device_ids.tolist() == np.vectorize(lambda device: device.id)(expected).tolist()


@given(plans())
def test_processes_as_granules_are_jaxs(plan: Plan) -> None:
    jax_mesh_utils = pytest.importorskip("jax.experimental.mesh_utils")
    processes = len({device.process_index for device in plan.devices})
    size = len(plan.devices) // processes
    ici, dcn = (1, size), (processes, 1)
    expected = jax_mesh_utils.create_hybrid_device_mesh(
        ici,
        dcn,
        [mock(device) for device in plan.devices],
        process_is_granule=True,
        allow_split_physical_axes=True,
    )
    mesh = Plan(plan.devices, ici, dcn).mesh(order="jax", granule="process")
    assert {frozenset(row) for row in mesh.device_ids.tolist()} == {
        frozenset(device.id for device in row) for row in expected
    }
    # Hosts that are not at the origin are laid out like the first one; JAX lays them out otherwise.
    assert mesh.device_ids[0].tolist() == [device.id for device in expected[0]]


SPLITS = [
    (ici, dcn)
    for axes in (1, 2, 3)
    for ici in factorizations(4, axes)
    for dcn in factorizations(2, axes)
]


@pytest.mark.only_on("torch_xla")
@pytest.mark.parametrize(("ici", "dcn"), SPLITS)
def test_hybrid_meshes_are_torch_xlas(
    runtime: Any, monkeypatch: pytest.MonkeyPatch, ici: tuple[int, ...], dcn: tuple[int, ...]
) -> None:
    pytest.importorskip("jax")
    import torch_xla.core.xla_model as xm
    import torch_xla.runtime as xr
    from torch_xla.distributed.spmd import HybridMesh as TorchXlaHybridMesh

    monkeypatch.setattr(xr, "global_runtime_device_attributes", torch_xla_attributes)
    monkeypatch.setattr(xm, "xla_device_hw", lambda _: "TPU")
    expected = TorchXlaHybridMesh(ici_mesh_shape=ici, dcn_mesh_shape=dcn)
    mesh = HybridMesh(torch_xla_attributes(), ici_mesh_shape=ici, dcn_mesh_shape=dcn)
    assert mesh.mesh_shape == expected.mesh_shape
    assert mesh.device_ids.tolist() == expected.get_logical_mesh().tolist()


# --- invariants ----------------------------------------------------------------------------------


@given(plans(), st.data())
def test_invariants(plan: Plan, data: st.DataObject) -> None:
    mesh = plan.mesh()
    mesh.check_valid()
    slice_of = {device.id: device.slice_index or 0 for device in plan.devices}
    assert mesh.mesh_shape == tuple(np.multiply(plan.ici, plan.dcn))
    assert [{slice_of[n] for n in each} for each in mesh.granules] == [
        {index} for index in range(math.prod(plan.dcn))
    ]
    # The DCN part of a coordinate is its outer part, and every block of ICI is in one slice.
    numbers = np.arange(math.prod(plan.dcn)).reshape(plan.dcn)
    for device_id, index in slice_of.items():
        coordinates = mesh.coordinates(device_id)
        outer = tuple(c // size for c, size in zip(coordinates, plan.ici, strict=True))
        assert numbers[outer] == index == mesh.granule_index(device_id)
    # A group of any axes has as many members in each granule that it touches.
    axes = data.draw(st.lists(st.sampled_from(mesh.axis_names), min_size=1, unique=True))
    spans = math.prod(plan.dcn[mesh.axis_index(axis)] for axis in axes)
    for group in mesh.granule_index(mesh.groups(axes)):
        _, counts = np.unique(group, return_counts=True)
        assert counts.size == spans
        assert np.unique(counts).size == 1
    crossed = {
        axis for axis in mesh.axis_names if np.ptp(mesh.granule_index(mesh[axis].device_ids))
    }
    assert crossed == set(mesh.dcn_axes)


def test_check_valid_notices_a_block_across_granules() -> None:
    restore, (ids, *others) = NAMED.__reduce__()[:2]  # type: ignore[misc]
    assert restore(ids, *others) == NAMED  # type: ignore[operator]
    restore(ids, *others).check_valid()  # type: ignore[operator]
    across = ids.reshape(2, 2, 2).transpose(1, 0, 2).reshape(4, 2).copy()
    with pytest.raises(MeshError, match=r"A block of ici_mesh_shape=\(2, 2\) is not one granule"):
        restore(across, *others).check_valid()  # type: ignore[operator]
    with pytest.raises(MeshError, match="or blocks and granules differ in order"):
        restore(ids[::-1].copy(), *others).check_valid()  # type: ignore[operator]
    swapped = ids[:, ::-1].copy()
    with pytest.raises(MeshError, match="Its devices are not in the order of its device_ids"):
        restore(swapped, *others).check_valid()  # type: ignore[operator]


def test_granules_across_slices_are_refused() -> None:
    devices = synthetic_devices((2, 2), num_slices=2, kind="TPU v4")
    with pytest.raises(MeshError, match="it puts devices of the slices 0 and 1 into one granule"):
        Plan(devices, (4,), (2,)).mesh(granule=lambda device: device.id % 2)


# --- value ---------------------------------------------------------------------------------------


@given(plans(), st.data())
def test_pickle_and_copy(plan: Plan, data: st.DataObject) -> None:
    mesh = plan.mesh()
    other: HybridMesh = pickle.loads(pickle.dumps(mesh))
    other.check_valid()
    assert other == mesh
    assert (hash(other), other.to_hash()) == (hash(mesh), mesh.to_hash())
    assert (other.devices, other.granules) == (mesh.devices, mesh.granules)
    assert copy.deepcopy(mesh) is mesh
    axes = data.draw(st.lists(st.sampled_from(mesh.axis_names), min_size=1, unique=True))
    submesh, restored = mesh[axes], pickle.loads(pickle.dumps(mesh[axes]))
    assert restored == submesh
    assert isinstance(restored.root, HybridMesh)
    assert restored.root.granules == mesh.granules


def test_a_plain_mesh_is_another_mesh() -> None:
    plain = Mesh(range(8), (4, 2), ("dp", "tp"))
    assert plain != NAMED
    assert not NAMED == plain  # noqa: SIM201, SIM300
    assert NAMED.to_hash() != plain.to_hash()
    assert plain != NAMED  # with the hashes known
    assert NAMED["tp"] != plain["tp"]
    assert plain["tp"] != NAMED["tp"]
    assert len({NAMED, plain, NAMED["tp"], plain["tp"]}) == 4
    assert NAMED != "mesh"


def test_equal_means_ids_axes_and_granules() -> None:
    def made(ids: Any = range(8), **changed: Any) -> HybridMesh:
        asked = {"ici_mesh_shape": (2, 2), "dcn_mesh_shape": (2, 1), "granule": 4}
        return HybridMesh(ids, **{**asked, "axis_names": ("dp", "tp"), **changed})

    assert made() == NAMED
    assert made(granule=lambda device: device.id // 4) == NAMED
    assert made([Device(n, process_index=0, kind="H100") for n in range(8)]) == NAMED
    others = [
        made(range(8, 16)),
        made(axis_names=("dp", "ep")),
        made(ici_mesh_shape=(1, 2), dcn_mesh_shape=(4, 1), granule=2),
        made(ici_mesh_shape=(4, 2), dcn_mesh_shape=(1, 1), granule=8),
    ]
    assert [other.device_ids.shape for other in others] == [(4, 2)] * 4
    assert len({NAMED, *others}) == 5
    assert len({mesh.to_hash() for mesh in (NAMED, *others)}) == 5
    assert all(one != other for one, other in itertools.permutations([NAMED, *others], 2))


HASH = """
from mesh_utils import HybridMesh
names = ("dp", "tp")
mesh = HybridMesh(
    range(8), ici_mesh_shape=(2, 2), dcn_mesh_shape=(2, 1), axis_names=names, granule=4
)
print(mesh.to_hash())
"""


def test_the_hash_is_that_of_another_process() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "7"}
    command = [sys.executable, "-c", HASH]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == NAMED.to_hash(), done.stderr


def test_it_cannot_be_changed() -> None:
    for name in ("ici_mesh_shape", "dcn_mesh_shape", "granules", "devices", "dcn_axes", "label"):
        with pytest.raises(AttributeError):
            setattr(NAMED, name, None)
    with pytest.raises(ValueError, match="read-only"):
        NAMED.device_ids[0, 0] = 5


def test_repr_of_a_hybrid_mesh() -> None:
    assert repr(NAMED) == "HybridMesh(dp=4, tp=2, ici=(2, 2), dcn=(2, 1), devices=0..7)"


# --- what comes of it ----------------------------------------------------------------------------


def test_submeshes_are_plain_and_know_their_root() -> None:
    for submesh in (NAMED["tp"], NAMED["tp", "dp"], NAMED.slice(dp=2)):
        assert type(submesh) is Mesh
        assert submesh.root is NAMED
        submesh.check_valid()
    assert NAMED["dp", "tp"] is NAMED
    assert NAMED["tp"].digits() == (((2, 1),),)


def test_finer_and_coarser_axes_are_plain() -> None:
    fine = NAMED.factored({"dp": (("across", 2), ("inside", 2))})
    assert type(fine) is Mesh
    assert fine == Mesh(range(8), (2, 2, 2), ("across", "inside", "tp"))
    assert type(NAMED.flattened(("dp", "tp"), "all")) is Mesh


def test_65536_devices_do_not_take_long() -> None:
    devices = synthetic_devices((16, 16), num_slices=256, kind="TPU v5 lite")
    start = time.process_time()
    mesh = Plan(devices, (16, 16), (256, 1)).mesh()
    hash(mesh)
    mesh.granule_index(mesh.device_ids)
    mesh.check_valid()
    assert time.process_time() - start < 3


# --- messages ------------------------------------------------------------------------------------

SLICES = synthetic_devices((4, 4), num_slices=2, kind="TPU v5 lite")


def asked(ici: Any, dcn: Any = None, devices: Any = SLICES, **options: Any) -> Callable[[], object]:
    return lambda: HybridMesh(devices, ici_mesh_shape=ici, dcn_mesh_shape=dcn, **options)


CASES: list[tuple[Callable[[], object], str]] = [
    (
        asked((4, 4)),
        "There are 2 granules of 16 devices: granule='slice'. ici_mesh_shape=(4, 4) and "
        "dcn_mesh_shape=(1, 1) ask for 1 of 16. Pass ici_mesh_shape=(4, 4) and "
        "dcn_mesh_shape=(2, 1), or others with those products.",
    ),
    (
        asked((4, 2), (2, 1)),
        "There are 2 granules of 16 devices: granule='slice'. ici_mesh_shape=(4, 2) and "
        "dcn_mesh_shape=(2, 1) ask for 2 of 8. Pass ici_mesh_shape=(8, 2) and "
        "dcn_mesh_shape=(2, 1), or others with those products.",
    ),
    (
        asked((8, 4), (1, 3)),
        "There are 2 granules of 16 devices: granule='slice'. ici_mesh_shape=(8, 4) and "
        "dcn_mesh_shape=(1, 3) ask for 3 of 32. Pass ici_mesh_shape=(4, 4) and "
        "dcn_mesh_shape=(1, 2), or others with those products.",
    ),
    (
        asked((3, 5), (2, 1)),
        "There are 2 granules of 16 devices: granule='slice'. ici_mesh_shape=(3, 5) and "
        "dcn_mesh_shape=(2, 1) ask for 2 of 15. Pass ici_mesh_shape=(16, 1) and "
        "dcn_mesh_shape=(2, 1), or others with those products.",
    ),
    (
        asked((2, 2), (2, 1), range(8)),
        "There is 1 granule of 8 devices: granule='slice'. ici_mesh_shape=(2, 2) and "
        "dcn_mesh_shape=(2, 1) ask for 2 of 4. Pass ici_mesh_shape=(4, 2) and "
        "dcn_mesh_shape=(1, 1), or others with those products, or say with granule= where they "
        "divide: the devices name no slices.",
    ),
    (
        asked((4, 4), (2,)),
        "HybridMesh was given ici_mesh_shape=(4, 4) and dcn_mesh_shape=(2,). "
        "They have 2 and 1 axes. Pass a size for each axis in both, 1 where there is none, such as "
        "dcn_mesh_shape=(2, 1).",
    ),
    (
        asked((0, 4)),
        "HybridMesh was given ici_mesh_shape=(0, 4). It is no sequence of positive integers. "
        "Pass one size of 1 or more for each axis, such as (2, 4).",
    ),
    (
        asked((4, 4), (-1, -1)),
        "HybridMesh was given dcn_mesh_shape=(-1, -1). It is no sequence of positive integers. "
        "Pass one size of 1 or more for each axis, such as (2, 4).",
    ),
    (
        asked(16),
        "HybridMesh was given ici_mesh_shape=16. It is no sequence of positive integers. "
        "Pass one size of 1 or more for each axis, such as (2, 4).",
    ),
    (
        asked(()),
        "HybridMesh was given ici_mesh_shape=(). It is no sequence of positive integers. "
        "Pass one size of 1 or more for each axis, such as (2, 4).",
    ),
    (
        asked((4, 4), (2, 1), (*SLICES[:-1],)),
        "granule='slice' was asked for: it makes 2 granules of 15 to 16 devices; granule 1 has 15, "
        "others have 16. Granules of one mesh have one size. "
        "Leave out devices until they have, or pass another granule.",
    ),
    (
        asked((2,), None, [-1, 1]),
        "Mesh was given device_ids with the id -1. Device ids are 0 or more and fit in 64 bits "
        "with a sign. Pass the ids by which the runtime knows its devices.",
    ),
]


@pytest.mark.parametrize(("ask", "message"), CASES)
def test_messages_of_hybrid_meshes(ask: Callable[[], object], message: str) -> None:
    with pytest.raises(MeshError) as caught:
        ask()
    assert str(caught.value) == message


def test_names_are_read_as_those_of_any_mesh() -> None:
    with pytest.raises(AxisError, match="The name 'dp' is there twice"):
        asked((4, 4), (2, 1), axis_names=("dp", "dp"))()
    with pytest.raises(AxisError, match="for mesh_shape=\\(8, 4\\)"):
        asked((4, 4), (2, 1), axis_names=("dp",))()
