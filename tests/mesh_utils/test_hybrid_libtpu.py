"""HybridMesh against the TPU compiler: what runs over DCN is what the mesh says.

A child process asks libtpu for slices that are not here, builds hybrid meshes of their devices and
compiles an all-gather and an all-reduce over every axis. A bad mesh can abort libtpu, so that
compiling is a test of its own. The programs are read here.
"""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from mesh_utils import HybridMesh, MeshError, synthetic_devices
from tests.libtpu import needs_libtpu, run_with_libtpu
from xla_dtensor.report import collectives

pytestmark = needs_libtpu

NAMES = ("dp", "tp", "sp")
ROWS = 64
BYTES_PER_DEVICE = ROWS * 128 * 4

# name of the topology, slices, chips of a slice, cores per chip, device kind, chips per host
TOPOLOGIES: dict[str, tuple[Any, ...]] = {
    "v5e:4x4": (2, (4, 4), 1, "TPU v5 lite", (2, 2, 1)),
    "v5e:4x2": (4, (4, 2), 1, "TPU v5 lite", (2, 2, 1)),
    "v6e:4x8": (1, (4, 8), 1, "TPU v6 lite", (2, 4, 1)),
    "v5p:2x2x4": (2, (2, 2, 4), 1, "TPU v5", (2, 2, 1)),
    "v3:4x4": (2, (4, 4), 2, "TPU v3", (2, 2, 1)),
    "tpu7x:2x2x2": (2, (2, 2, 2), 2, "TPU7x", (2, 2, 1)),
}

# topology, ici, dcn, order
SPLITS: list[tuple[str, tuple[int, ...], tuple[int, ...], str]] = [
    ("v5e:4x4", (4, 4), (2, 1), "jax"),
    ("v5e:4x4", (2, 8), (1, 2), "auto"),
    ("v5e:4x4", (16, 1), (1, 2), "auto"),
    ("v5e:4x4", (16,), (2,), "row-major"),
    ("v5e:4x4", (4, 2, 2), (1, 2, 1), "row-major"),
    ("v5e:4x2", (2, 4), (2, 2), "jax"),
    ("v5e:4x2", (1, 8), (4, 1), "row-major"),
    ("v5e:4x2", (8,), (4,), "auto"),
    ("v5p:2x2x4", (4, 4), (2, 1), "auto"),
    ("v3:4x4", (8, 4), (2, 1), "jax"),
    ("tpu7x:2x2x2", (8, 2), (2, 1), "auto"),
]

PROGRAM = """
import json, sys
import jax, numpy as np
from jax.experimental import mesh_utils as jax_mesh_utils, topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tests.libtpu import needs_libtpu, run_with_libtpu
from mesh_utils import HybridMesh

asked = json.loads(sys.argv[1])
found = {"devices": {}, "meshes": [], "jax": [], "programs": []}
listed = {}
for name, (num_slices, _, _, _, host) in asked["topologies"].items():
    options = {"num_slices": num_slices} if num_slices > 1 else {}
    listed[name] = topologies.get_topology_desc(
        name, "tpu", chips_per_host_bounds=tuple(host), **options
    ).devices
    found["devices"][name] = [
        [d.id, d.process_index, getattr(d, "slice_index", None), list(d.coords), d.core_on_chip,
         d.device_kind] for d in listed[name]
    ]


def program(mesh, names, axis, kind):
    others = tuple(name for name in names if name != axis)
    if kind == "all-gather":
        step = lambda x: jax.lax.all_gather(x, axis, tiled=True)
    else:
        step = lambda x: jax.lax.psum(x, axis)
    whole = PartitionSpec(names)
    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=whole, out_specs=PartitionSpec(others), check_vma=False
    )
    sharding = NamedSharding(mesh, whole)
    x = jax.ShapeDtypeStruct((mesh.size * asked["rows"], 128), "float32", sharding=sharding)
    return jax.jit(mapped).lower(x).compile().as_text()


for split, (name, ici, dcn, order) in enumerate(asked["splits"]):
    names = tuple(asked["names"][: len(ici)])
    hybrid = HybridMesh(
        listed[name], ici_mesh_shape=ici, dcn_mesh_shape=dcn, axis_names=names, order=order
    )
    hybrid.check_valid()
    found["meshes"].append(hybrid.device_ids.tolist())
    theirs = jax_mesh_utils.create_hybrid_device_mesh(
        ici, dcn, listed[name], allow_split_physical_axes=True
    )
    found["jax"].append(np.vectorize(lambda device: device.id)(theirs).tolist())
    by_id = {device.id: device for device in listed[name]}
    mesh = Mesh(np.vectorize(by_id.get, otypes=[object])(hybrid.device_ids), names)
    for axis in names:
        for kind in ("all-gather", "all-reduce"):
            found["programs"].append([split, axis, kind, program(mesh, names, axis, kind)])
open(sys.argv[2], "w").write(json.dumps(found))
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What libtpu lists and compiles."""
    folder = tmp_path_factory.mktemp("hybrid_libtpu")
    asked = json.dumps({"topologies": TOPOLOGIES, "splits": SPLITS, "names": NAMES, "rows": ROWS})
    run_with_libtpu(PROGRAM, asked, str(folder / "found.json"), folder=folder)
    return json.loads((folder / "found.json").read_text())


def hybrid_mesh(split: int) -> HybridMesh:
    name, ici, dcn, order = SPLITS[split]
    num_slices, shape, cores, kind, host = TOPOLOGIES[name]
    return HybridMesh(
        synthetic_devices(shape, num_slices, cores, host, kind),
        ici_mesh_shape=ici,
        dcn_mesh_shape=dcn,
        axis_names=NAMES[: len(ici)],
        order=order,  # type: ignore[arg-type]
    )


def check_program(hlo: str, mesh: HybridMesh, axis: str, kind: str) -> None:
    """What a collective over one axis has to become, by network and by group."""
    place = mesh.axis_index(axis)
    ici, dcn = mesh.ici_mesh_shape[place], mesh.dcn_mesh_shape[place]
    over_dcn = axis if ici == 1 else f"{axis}:(1){dcn}"
    over_ici = axis if dcn == 1 else f"{axis}:({dcn}){ici}"
    granule_of = mesh.granule_index(mesh.device_ids.reshape(-1))
    found = collectives(hlo, mesh, granule_of)
    between = [item for item in found if item.kind in ("send", "recv")]
    inside = [item for item in found if item not in between]
    assert ("xla_megascale" in hlo) == (axis in mesh.dcn_axes)
    assert {item.kind for item in between} == ({"send", "recv"} if dcn > 1 else set())
    assert {item.axes for item in between} == ({(over_dcn,)} if dcn > 1 else set())
    assert {item.axes for item in inside} == ({(over_ici,)} if ici > 1 else set())
    if kind == "all-reduce" and dcn > 1 and ici > 1:
        # DCN carries only the part that is left after reducing inside a slice.
        assert {item.payload_bytes for item in between} == {BYTES_PER_DEVICE // ici}


def programs(compiled: dict[str, Any]) -> Iterator[tuple[HybridMesh, str, str, str]]:
    for split, axis, kind, hlo in compiled["programs"]:
        yield hybrid_mesh(split), axis, kind, hlo


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_synthetic_devices_are_libtpus(compiled: dict[str, Any], name: str) -> None:
    num_slices, shape, cores, kind, host = TOPOLOGIES[name]
    made = synthetic_devices(shape, num_slices, cores, host, kind)
    assert compiled["devices"][name] == [
        [d.id, d.process_index, d.slice_index, list(d.coords or ()), d.core_on_chip, d.kind]
        for d in made
    ]


@pytest.mark.parametrize("split", range(len(SPLITS)))
def test_meshes_of_libtpus_devices(compiled: dict[str, Any], split: int) -> None:
    mesh = hybrid_mesh(split)
    assert compiled["meshes"][split] == mesh.device_ids.tolist()
    if SPLITS[split][-1] == "jax":
        assert compiled["jax"][split] == mesh.device_ids.tolist()


@pytest.mark.parametrize("split", range(len(SPLITS)))
def test_dcn_carries_what_the_mesh_says(compiled: dict[str, Any], split: int) -> None:
    mesh = hybrid_mesh(split)
    checked = [(axis, kind) for number, axis, kind, _ in compiled["programs"] if number == split]
    assert len(checked) == 2 * mesh.ndim
    for number, axis, kind, hlo in compiled["programs"]:
        if number == split:
            check_program(hlo, mesh, axis, kind)


def test_the_check_notices_another_axis(compiled: dict[str, Any]) -> None:
    wrong = 0
    for mesh, axis, kind, hlo in programs(compiled):
        for other in mesh.axis_names:
            if other != axis:
                with pytest.raises(AssertionError):
                    check_program(hlo, mesh, str(other), kind)
                wrong += 1
    assert wrong > 10


def test_the_check_notices_another_split(compiled: dict[str, Any]) -> None:
    """The same axes over the same devices, but DCN said to be on the other axis."""
    name, ici, dcn, _ = SPLITS[0]
    assert (name, ici, dcn) == ("v5e:4x4", (4, 4), (2, 1))
    devices = hybrid_mesh(0).devices
    other = HybridMesh(devices, ici_mesh_shape=(8, 2), dcn_mesh_shape=(1, 2), axis_names=NAMES[:2])
    assert other.mesh_shape == hybrid_mesh(0).mesh_shape
    for split, axis, kind, hlo in compiled["programs"]:
        if split == 0:
            with pytest.raises(AssertionError):
                check_program(hlo, other, axis, kind)


def test_an_ici_block_across_slices_is_refused() -> None:
    """libtpu aborts on some of these: they must not get there."""
    mesh = hybrid_mesh(0)
    with pytest.raises(MeshError, match="slices 0 and 1 into one granule"):
        HybridMesh(
            mesh.devices,
            ici_mesh_shape=(4, 4),
            dcn_mesh_shape=(2, 1),
            granule=lambda device: device.id % 2,
        )
    across = mesh.device_ids.reshape(2, 4, 4).transpose(1, 0, 2).reshape(8, 4)
    restore, (_, *others) = mesh.__reduce__()[:2]  # type: ignore[misc]
    with pytest.raises(MeshError, match="is not one granule"):
        restore(across.copy(), *others).check_valid()  # type: ignore[operator]
