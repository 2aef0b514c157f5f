"""Mesh, HybridMesh and the global mesh: torch_xla's attributes, values, and every message."""

from __future__ import annotations

import importlib
import pickle
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch

import xla_dtensor as xd
import xla_dtensor.spmd as xs
from mesh_utils import MeshError
from xla_dtensor.core import LayoutError, OpSharding
from xla_dtensor.errors import ArgumentTypeError, DistributeError, InvalidMeshError
from xla_dtensor.runtimes import Runtime
from xla_dtensor.spmd.mesh import as_mesh


@pytest.fixture(autouse=True)
def no_global_mesh(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xla_dtensor.spmd.mesh._global_mesh", None)


# ---------------------------------------------------------------- Mesh


@pytest.mark.parametrize("ids", [range(8), list(range(8)), np.arange(8)])
def test_what_a_mesh_says_of_itself(ids: Any) -> None:
    mesh = xs.Mesh(ids, (4, 2), ("x", "y"))
    assert mesh.shape() == OrderedDict([("x", 4), ("y", 2)])
    assert mesh.size() == 8
    assert mesh.mesh_shape == (4, 2)
    assert mesh.axis_names == ("x", "y")
    assert mesh.device_ids.tolist() == list(range(8))
    assert mesh.get_logical_mesh().tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert (mesh.get_axis_name_idx("y"), mesh.get_axis_name_idx("z")) == (1, None)
    assert repr(mesh) == "Mesh((x=4, y=2))"
    assert str(mesh.value.axis_names) == "('x', 'y')"


def test_a_mesh_without_names() -> None:
    mesh = xs.Mesh(range(8), (4, 2))
    assert mesh.axis_names is None
    assert mesh.shape() == OrderedDict([(0, 4), (1, 2)])
    assert mesh.get_axis_name_idx("x") is None
    assert str(mesh.op_sharding((1, None))) == (
        "{devices=[2,1,4]<=[4,2]T(1,0) last_tile_dim_replicate}"
    )
    with pytest.raises(LayoutError, match="'x'"):
        mesh.op_sharding(("x",))


def test_the_order_of_devices_is_kept() -> None:
    mesh = xs.Mesh([0, 4, 1, 5, 2, 6, 3, 7], (4, 2), ("x", "y"))
    assert mesh.device_ids.tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    marked = xs.mark_sharding(torch.arange(8.0), mesh, ("x",))
    on_device = {s.shard_device: s.data.tolist() for s in marked.local_shards}
    assert (on_device["CPU:4"], on_device["CPU:5"]) == ([0.0, 1.0], [2.0, 3.0])


def test_meshes_are_equal_and_hashed_by_value() -> None:
    mesh = xs.Mesh(range(8), (4, 2), ("x", "y"))
    assert mesh == xs.Mesh(np.arange(8), [4, 2], ["x", "y"])
    assert hash(mesh) == hash(xs.Mesh(range(8), (4, 2), ("x", "y")))
    assert mesh != xs.Mesh(range(8), (4, 2))
    assert mesh != xs.Mesh(range(8), (2, 4), ("x", "y"))
    assert mesh != "mesh"
    assert pickle.loads(pickle.dumps(mesh)) == mesh


def test_a_mesh_from_its_text() -> None:
    for mesh in (xs.Mesh(range(8), (4, 2), ("x", "y")), xs.Mesh(range(8), (8,))):
        assert xs.Mesh.from_str(str(mesh)) == mesh
    for text in ("", "Mesh", "{}", "[1, 2]", "{'device_ids': 3, 'mesh_shape': (8,)}"):
        assert xs.Mesh.from_str(text) is None


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (("x", "y"), "{devices=[4,2]<=[8]}"),
        ((("y", "x"), None), "{devices=[8,1]<=[4,2]T(1,0)}"),
        ((None,), "{replicated}"),
        ((), "{replicated}"),
    ],
)
def test_op_sharding(spec: tuple[Any, ...], text: str) -> None:
    assert str(xs.Mesh(range(8), (4, 2), ("x", "y")).op_sharding(spec)) == text


@pytest.mark.parametrize(
    ("ids", "shape", "names"),
    [
        (range(8), (4, 4), None),
        (range(8), (4, 2), ("x",)),
        (range(8), (4, 2), ("x", "x")),
        ([0, 0, 1, 2, 3, 4, 5, 6], (8,), None),
    ],
)
def test_what_is_no_mesh(ids: Any, shape: Any, names: Any) -> None:
    with pytest.raises(MeshError):
        xs.Mesh(ids, shape, names)


def test_a_mesh_over_devices_that_do_not_exist() -> None:
    with pytest.raises(DistributeError):
        xs.Mesh(range(8, 16), (8,))


@pytest.mark.only_on("torch_xla")
def test_torch_xla_runs_on_all_devices(runtime: Runtime) -> None:
    with pytest.raises(DistributeError, match="Its programs run on all devices"):
        xs.Mesh(range(4), (4,))


@pytest.mark.only_on("jax")
def test_jax_runs_on_some_devices(runtime: Runtime) -> None:
    marked = xs.mark_sharding(torch.arange(8.0), xs.Mesh(range(4), (4,)), (0,))
    assert [s.data.tolist() for s in marked.local_shards] == [
        [0.0, 1.0],
        [2.0, 3.0],
        [4.0, 5.0],
        [6.0, 7.0],
    ]


# ---------------------------------------------------------------- the global mesh


@pytest.mark.only_on("torch_xla")
def test_torch_xlas_own_module_has_the_global_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its FSDPv2 asks there."""
    its_own = importlib.import_module("torch_xla.distributed.spmd")
    monkeypatch.setattr("torch_xla.distributed.spmd.xla_sharding._GLOBAL_MESH", None)
    mesh = xs.Mesh(range(8), (8, 1), ("fsdp", "model"))
    xs.set_global_mesh(mesh)
    assert its_own.get_global_mesh() is mesh


def test_the_global_mesh() -> None:
    assert xs.get_global_mesh() is None
    mesh = xs.get_1d_mesh("data")
    xs.set_global_mesh(mesh)
    assert xs.get_global_mesh() is mesh
    assert (mesh.mesh_shape, mesh.axis_names) == ((8,), ("data",))
    marked = xs.mark_sharding(torch.arange(8.0), None, ("data",))
    assert marked.local_shards[3].data.tolist() == [3.0]
    assert xs.get_1d_mesh().axis_names is None


def test_what_stands_for_a_mesh(mesh: xd.DeviceMesh) -> None:
    class TorchXlaMesh:
        device_ids, mesh_shape, axis_names = np.arange(8), (2, 4), ("dp", "tp")

        def get_logical_mesh(self) -> Any: ...

    for given in (mesh, mesh.value, xs.Mesh(range(8), (2, 4), ("dp", "tp")), TorchXlaMesh()):
        assert as_mesh(given, "f") == mesh.value
    with pytest.raises(ArgumentTypeError, match=r"an object of type=str was passed"):
        as_mesh("mesh", "f")
    message = (
        "f was called without a mesh. None was passed and there is no global one. Pass mesh=, or "
        "call set_global_mesh once."
    )
    with pytest.raises(DistributeError, match=re.escape(message)):
        as_mesh(None, "f")


# ---------------------------------------------------------------- HybridMesh


def test_hybrid_on_devices_without_coordinates() -> None:
    mesh = xs.HybridMesh(ici_mesh_shape=(2, 4), axis_names=("a", "b"))
    assert mesh.get_logical_mesh().tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert (mesh.ici_mesh_shape, mesh.dcn_mesh_shape) == ((2, 4), (1, 1))
    assert len(mesh.device_attributes) == 8
    assert repr(mesh) == "HybridMesh((a=2, b=4))"
    marked = xs.mark_sharding(torch.arange(8.0), mesh, ("b",))
    assert marked.local_shards[1].data.tolist() == [2.0, 3.0]


@pytest.mark.parametrize("granule", [4, lambda device: device.id // 4])
def test_hybrid_over_granules_of_ones_own(granule: Any) -> None:
    mesh = xs.HybridMesh(
        ici_mesh_shape=(2, 2), dcn_mesh_shape=(1, 2), axis_names=("a", "b"), granule=granule
    )
    assert mesh.mesh_shape == (2, 4)
    assert mesh.get_logical_mesh().tolist() == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_the_dcn_part_on_one_slice() -> None:
    message = (
        "HybridMesh was called with dcn_mesh_shape=(2, 1). Invalid dcn_mesh_shape for single slice "
        "mesh. Leave it out, or say what else is a granule: granule='process' or a number of "
        "devices."
    )
    with pytest.raises(DistributeError, match=re.escape(message)):
        xs.HybridMesh(ici_mesh_shape=(1, 4), dcn_mesh_shape=(2, 1))


def tpus(cores_per_chip: int, slices: int) -> list[dict[str, Any]]:
    """The attributes of 8 TPU cores, in slices that are 2 chips wide."""
    per_slice = 8 // slices
    return [
        {
            "name": f"TPU:{i}",
            "coords": [*reversed(divmod(i % per_slice // cores_per_chip, 2)), 0],
            "core_on_chip": i % cores_per_chip,
        }
        | ({"slice_index": i // per_slice} if slices > 1 else {})
        for i in range(8)
    ]


def pretend(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, attributes: Sequence[Mapping[str, Any]]
) -> None:
    monkeypatch.setattr(runtime, "device_attributes", lambda: attributes)


def test_two_slices(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(runtime, monkeypatch, tpus(1, slices=2))
    mesh = xs.HybridMesh(ici_mesh_shape=(2, 2), dcn_mesh_shape=(2, 1), axis_names=("a", "b"))
    assert mesh.get_logical_mesh().tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert mesh.dcn_mesh_shape == (2, 1)


def test_two_slices_without_a_dcn_part(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(runtime, monkeypatch, tpus(1, slices=2))
    message = (
        "HybridMesh was called without dcn_mesh_shape on 2 slices. Provide dcn_mesh_shape to "
        "create a mesh for multislice. Its product is the number of slices, e.g. (2, 1, ...)."
    )
    with pytest.raises(DistributeError, match=re.escape(message)):
        xs.HybridMesh(ici_mesh_shape=(2, 4))


def test_two_cores_per_chip(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(runtime, monkeypatch, tpus(2, slices=1))
    mesh = xs.HybridMesh(ici_mesh_shape=(4, 2), axis_names=("a", "b"))
    pairs = {tuple(sorted(pair)) for pair in mesh.get_logical_mesh().tolist()}
    assert pairs == {(0, 1), (2, 3), (4, 5), (6, 7)}  # the inner axis stays on a chip


@pytest.mark.only_on("torch_xla")
def test_torch_xla_takes_the_native_object(runtime: Runtime) -> None:
    import torch_xla

    tensor = torch.ones(8, 4).to("xla")
    sharding = xs.Mesh(range(8), (4, 2), ("x", "y")).get_op_sharding(("x", None))
    torch_xla._XLAC._xla_mark_sharding(tensor, sharding)  # pyright: ignore
    assert runtime.known_sharding(tensor) == OpSharding.parse(
        "{devices=[4,1,2]<=[8] last_tile_dim_replicate}"
    )


@pytest.mark.only_on("jax")
def test_elsewhere_the_native_object_is_ours(runtime: Runtime) -> None:
    mesh = xs.Mesh(range(8), (4, 2), ("x", "y"))
    assert mesh.get_op_sharding(("x", None)) == mesh.op_sharding(("x", None))


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        ((range(8), (2, 4), ("a", "b", "c")), r"axis names \(3\) must match mesh dimensions \(2\)"),
        ((range(8), (2, 4), ("a", "a")), "Axis names must be unique"),
        ((range(8), (4, 4)), r"device IDs \(8\) must match mesh size \(16\)"),
        (([0] * 8, (2, 4)), "Device IDs must be unique"),
        ((range(9, 17), (2, 4)), r"Device IDs must be less than mesh size \(8\)"),
    ],
)
def test_a_mesh_that_cannot_be_is_what_torch_xla_asserts(arguments: Any, rule: str) -> None:
    with pytest.raises(InvalidMeshError, match=rule) as error:
        xs.Mesh(*arguments)
    assert isinstance(error.value, AssertionError)
    assert isinstance(error.value, MeshError)


def test_the_mesh_of_a_device_mesh(dp_tp: xs.Mesh) -> None:
    device_mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
    assert xs.convert_to_xla_mesh(device_mesh) == dp_tp
    assert xs.xla_sharding.convert_to_xla_mesh is xs.convert_to_xla_mesh


def test_indices_have_a_step(dp_tp: xs.Mesh) -> None:
    marked = xs.mark_sharding(torch.ones(8, 4), dp_tp, ("dp", None))
    shards: Any = marked.local_shards
    assert {str(shard.indices[0]) for shard in shards} == {
        "slice(0, 4, 1)",
        "slice(4, 8, 1)",
    }
