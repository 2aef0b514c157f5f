"""Mesh: its value, its submeshes, its groups, finer and coarser axes."""

import copy
import itertools
import math
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh_utils import AxisError, Mesh

NAMES = ("pp", "dp", "ep", "tp")
SHAPES = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple)
MESH = Mesh.arange((2, 4), ("dp", "tp"))


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    """Roots with ids in any order, dense or sparse."""
    shape = draw(SHAPES)
    count = math.prod(shape)
    ids = np.array(draw(st.permutations(range(count))))
    factor = draw(st.sampled_from([1, 3, 10**6]))
    return Mesh(ids * factor, shape, NAMES[: len(shape)])


@st.composite
def selections(draw: st.DrawFn, mesh: Mesh, min_size: int = 1) -> list[str]:
    return draw(
        st.lists(st.sampled_from(mesh.axis_names), min_size=min_size, unique=True).map(
            lambda axes: [str(axis) for axis in axes]
        )
    )


# --- what a mesh is ------------------------------------------------------------------------------


def test_what_a_mesh_holds() -> None:
    mesh = Mesh([3, 1, 2, 0, 7, 5, 6, 4], (2, 4), ("dp", "tp"))
    assert mesh.device_ids.tolist() == [[3, 1, 2, 0], [7, 5, 6, 4]]
    assert mesh.device_ids.dtype == np.int64
    assert (mesh.mesh_shape, mesh.axis_names, mesh.ndim) == ((2, 4), ("dp", "tp"), 2)
    assert (mesh.size(), mesh.size("tp"), mesh.size(0)) == (8, 4, 2)
    assert (mesh.axis_index("tp"), mesh.axis_index(1), mesh.axis_index(0)) == (1, 1, 0)
    assert mesh.axis_index(np.int64(1)) == 1  # type: ignore[arg-type]
    assert mesh.is_root
    assert mesh.root is mesh
    assert Mesh.arange((2, 2)).axis_names == (0, 1)


@pytest.mark.parametrize(
    "ids",
    [
        range(8),
        list(range(8)),
        tuple(range(8)),
        np.arange(8, dtype=np.uint8),
        np.arange(8, dtype=np.int32).reshape(2, 4),
        np.arange(8, dtype=np.uint64).reshape(4, 2),
        np.arange(8).reshape(2, 4).astype(">i8"),
        np.asfortranarray(np.arange(8).reshape(2, 4)),
        [[0, 1, 2, 3], [4, 5, 6, 7]],
    ],
)
def test_device_ids_may_come_in_any_form(ids: list[int]) -> None:
    mesh = Mesh(ids, (2, 4), ("dp", "tp"))
    mesh.check_valid()
    assert mesh == MESH
    assert mesh.to_hash() == MESH.to_hash()
    assert mesh.device_ids.dtype == np.int64
    assert mesh.device_ids.dtype.isnative


def test_shape_and_names_may_come_in_any_form() -> None:
    assert Mesh(range(8), np.array([2, 4]), ["dp", "tp"]) == MESH
    mesh = Mesh(range(8), [np.int32(2), 4], iter(("dp", "tp")))
    assert mesh == MESH
    assert all(type(size) is int for size in mesh.mesh_shape)


def test_the_given_array_and_the_mesh_are_apart() -> None:
    ids = np.arange(8)
    mesh = Mesh(ids, (2, 4))
    ids[0] = 99
    assert mesh.device_ids[0, 0] == 0
    with pytest.raises(ValueError, match="read-only"):
        mesh.device_ids[0, 0] = 5
    with pytest.raises(ValueError, match="read-only"):
        MESH["tp"].device_ids[0] = 5
    with pytest.raises(ValueError, match="read-only"):
        MESH.groups("tp")[0, 0] = 5


def test_a_mesh_cannot_be_changed() -> None:
    for name in ("device_ids", "mesh_shape", "axis_names", "ndim", "root", "is_root"):
        with pytest.raises(AttributeError):
            setattr(MESH, name, None)
    with pytest.raises(AttributeError):
        MESH.label = "mine"  # type: ignore[attr-defined]


def test_a_mesh_is_no_sequence() -> None:
    with pytest.raises(TypeError):
        iter(Mesh.arange((2, 4)))  # type: ignore[call-overload]
    with pytest.raises(TypeError):
        _ = "tp" in MESH  # type: ignore[operator]


def test_integer_names_are_names_and_not_positions() -> None:
    mesh = Mesh.arange((2, 3, 4))
    sub = mesh[1, 2]
    assert sub.axis_names == (1, 2)
    assert sub.axis_index(2) == 1
    assert sub.size(1) == 3
    with pytest.raises(AxisError):
        sub.axis_index(0)
    mixed = mesh.factored({0: (("outer", 1), ("inner", 2))})
    assert mixed.axis_names == ("outer", "inner", 1, 2)
    assert mixed.axis_index(1) == 2


@pytest.mark.parametrize(
    ("mesh", "text"),
    [
        (MESH, "Mesh(dp=2, tp=4, devices=0..7)"),
        (Mesh.arange((2, 2)), "Mesh(0=2, 1=2, devices=0..3)"),
        (Mesh([5], (1,), ("x",)), "Mesh(x=1, devices=[5])"),
        (Mesh([3, 1, 0, 2], (4,), ("x",)), "Mesh(x=4, devices=[3, 1, 0, 2])"),
        (Mesh([3, 1, 0, 2, 4], (5,), ("x",)), "Mesh(x=5, devices=[3, 1, ...] (5))"),
        (MESH["dp"], "Mesh(dp=2, devices=[0, 4])"),
        (MESH.slice(dp=1), "Mesh(tp=4, devices=4..7)"),
    ],
)
def test_repr(mesh: Mesh, text: str) -> None:
    assert repr(mesh) == text


# --- equality, hash, pickle ----------------------------------------------------------------------


def variants() -> list[Mesh]:
    """Meshes that differ from each other in one thing."""
    mesh = Mesh.arange((2, 4), ("dp", "tp"))
    return [
        mesh,
        Mesh.arange((2, 4)),
        Mesh.arange((4, 2), ("dp", "tp")),
        Mesh.arange((2, 4), ("tp", "dp")),
        Mesh([1, 0, 2, 3, 4, 5, 6, 7], (2, 4), ("dp", "tp")),
        Mesh.arange((2, 2, 2), ("dp", "t", "p")),
        Mesh.arange((4,), ("tp",)),
        mesh["tp"],  # as the one before, but for its root
        Mesh.arange((4, 4), ("dp", "tp"))["tp"],
        mesh.slice(dp=1),
        Mesh.arange((1, 4), ("dp", "tp")),
        Mesh.arange((4,), (1,)),
        Mesh.arange((4,), ("1",)),
    ]


def test_equal_by_value() -> None:
    pairs = list(itertools.product(enumerate(variants()), enumerate(variants())))
    for _ in range(2):  # before any hash is cached, and after all are
        for (i, mesh), (j, other) in pairs:
            assert (mesh == other) == (i == j), (mesh, other)
        for (i, mesh), (j, other) in pairs:
            assert (mesh.to_hash() == other.to_hash()) == (i == j), (mesh, other)
            assert (hash(mesh) == hash(other)) == (i == j), (mesh, other)
    assert len(set(variants())) == len(variants())
    assert MESH != "mesh"
    assert MESH != 8


@given(st.data())
def test_pickle_and_deepcopy(data: st.DataObject) -> None:
    mesh = data.draw(meshes())
    mesh = mesh[data.draw(selections(mesh))]
    if data.draw(st.booleans()):
        hash(mesh)
    copies: list[Callable[[Mesh], Mesh]] = [
        copy.copy,
        copy.deepcopy,
        *(lambda m, p=p: pickle.loads(pickle.dumps(m, p)) for p in range(2, 6)),
    ]
    for make in copies:
        made = make(mesh)
        made.check_valid()
        assert made == mesh
        assert hash(made) == hash(mesh)
        assert made.root == mesh.root
        assert made.is_root == mesh.is_root
        assert made.digits() == mesh.digits()
        assert not made.device_ids.flags.writeable


def test_meshes_pickled_together_share_their_root() -> None:
    sub, root = pickle.loads(pickle.dumps((MESH["tp"], MESH)))
    assert sub.root is root


GOLDEN = {
    "root": "35cf4aeec866131bf17ad104c2d3ba3d0c6d9cd78b57122ed31e054a498ab1ee",
    "tp": "860ca6a551acd423595f3b8677f1cd56259cf317b60355bc48b2a70806041224",
}


def test_to_hash_is_what_it_always_was() -> None:
    mesh = Mesh([3, 1, 2, 0, 7, 5, 6, 4], (2, 4), ("dp", "tp"))
    assert mesh.to_hash() == GOLDEN["root"]
    assert mesh["tp"].to_hash() == GOLDEN["tp"]


@pytest.mark.parametrize("seed", ["0", "4242"])
def test_to_hash_is_the_same_in_another_process(seed: str) -> None:
    program = (
        "import pickle, sys; from mesh_utils import Mesh\n"
        "mesh = Mesh([3, 1, 2, 0, 7, 5, 6, 4], (2, 4), ('dp', 'tp'))\n"
        "other = pickle.loads(bytes.fromhex(sys.argv[1]))\n"
        "assert other == mesh and hash(other) == hash(mesh) and {other: 1}[mesh]\n"
        "assert 'torch' not in sys.modules and 'jax' not in sys.modules\n"
        "print(mesh.to_hash(), mesh['tp'].to_hash())\n"
    )
    mesh = Mesh([3, 1, 2, 0, 7, 5, 6, 4], (2, 4), ("dp", "tp"))
    hash(mesh)
    path = os.pathsep.join(entry for entry in sys.path if entry)
    result = subprocess.run(
        [sys.executable, "-c", program, pickle.dumps(mesh).hex()],
        env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == [GOLDEN["root"], GOLDEN["tp"]]


# --- submeshes -----------------------------------------------------------------------------------


@given(st.data())
def test_submesh_is_the_axes_asked_at_coordinate_zero(data: st.DataObject) -> None:
    mesh = data.draw(meshes())
    axes = data.draw(selections(mesh))
    sub = mesh[tuple(axes)]
    sub.check_valid()
    assert sub.axis_names == tuple(axes)
    assert sub.mesh_shape == tuple(mesh.size(axis) for axis in axes)
    for at in itertools.product(*map(range, sub.mesh_shape)):
        where = dict.fromkeys(mesh.axis_names, 0) | dict(zip(axes, at, strict=True))
        assert sub.device_ids[at] == mesh.device_ids[tuple(where[a] for a in mesh.axis_names)]
    assert sub.root is mesh
    assert sub[axes[0]].root is mesh
    assert mesh[list(axes)] == sub


def test_all_axes_in_order_is_the_mesh_itself() -> None:
    assert MESH["dp", "tp"] is MESH
    assert MESH.slice() is MESH
    assert MESH.slice({}) is MESH
    assert MESH["tp", "dp"].root is MESH


@given(st.data())
def test_slice_is_the_other_axes_at_the_coordinate(data: st.DataObject) -> None:
    mesh = data.draw(meshes())
    axes = data.draw(selections(mesh, min_size=0))
    if len(axes) == mesh.ndim:
        axes.pop()
    at = {axis: data.draw(st.integers(0, mesh.size(axis) - 1)) for axis in axes}
    cut = mesh.slice(**at)
    cut.check_valid()
    assert cut == mesh.slice(at)
    assert cut.root is mesh
    index = tuple(at.get(str(axis), slice(None)) for axis in mesh.axis_names)
    np.testing.assert_array_equal(cut.device_ids, mesh.device_ids[index])
    assert cut.axis_names == tuple(axis for axis in mesh.axis_names if axis not in at)


# --- devices -------------------------------------------------------------------------------------


@given(meshes())
def test_coordinates_and_positions(mesh: Mesh) -> None:
    for at in itertools.product(*map(range, mesh.mesh_shape)):
        assert mesh.coordinates(int(mesh.device_ids[at])) == at
    found = mesh.coordinates(mesh.device_ids)
    assert found.shape == (*mesh.mesh_shape, mesh.ndim)
    np.testing.assert_array_equal(np.moveaxis(found, -1, 0), np.indices(mesh.mesh_shape))
    np.testing.assert_array_equal(mesh.positions().reshape(-1), np.arange(mesh.size()))
    assert mesh.coordinates([]).shape == (0, mesh.ndim)
    assert type(mesh.coordinates(np.int32(mesh.device_ids.flat[0]))) is tuple  # type: ignore[arg-type]


@given(st.data())
def test_groups_against_brute_force(data: st.DataObject) -> None:
    mesh = data.draw(meshes())
    axes = data.draw(selections(mesh, min_size=0))
    others = [axis for axis in mesh.axis_names if axis not in axes]
    expected = [
        [
            int(mesh.device_ids[tuple((outer | inner)[axis] for axis in mesh.axis_names)])
            for inner in coordinates(mesh, axes)
        ]
        for outer in coordinates(mesh, others)
    ]
    groups = mesh.groups(axes)
    assert groups.tolist() == expected
    assert groups.dtype == np.int64
    if len(axes) == 1:
        assert mesh.groups(axes[0]).tolist() == expected


def coordinates(mesh: Mesh, axes: list[str] | list[str | int]) -> list[dict[str | int, int]]:
    ranges = [range(mesh.size(axis)) for axis in axes]
    return [dict(zip(axes, at, strict=True)) for at in itertools.product(*ranges)]


# --- finer and coarser axes ----------------------------------------------------------------------


def test_factored() -> None:
    fine = MESH.factored({"tp": (("tp_outer", 2), ("tp_inner", 2))})
    fine.check_valid()
    assert fine == Mesh.arange((2, 2, 2), ("dp", "tp_outer", "tp_inner"))
    assert fine.is_root
    assert MESH.factored({}) == MESH
    both = MESH.factored({"tp": (("a", 1), ("b", 4)), "dp": [("dp", 2)]})
    assert both == Mesh.arange((2, 1, 4), ("dp", "a", "b"))
    assert MESH["tp"].factored({"tp": (("a", 2), ("b", 2))}).root is MESH


@given(st.data())
def test_flattened_undoes_factored(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    ids = data.draw(st.permutations(range(math.prod(shape))))
    coarse = Mesh(ids, (math.prod(shape),), ("all",))
    names = NAMES[: len(shape)]
    fine = coarse.factored({"all": tuple(zip(names, shape, strict=True))})
    assert fine == Mesh(ids, shape, names)
    assert fine.flattened(names, "all") == coarse


@given(st.data())
def test_flattened_keeps_the_order(data: st.DataObject) -> None:
    mesh = data.draw(meshes())
    first = data.draw(st.integers(0, mesh.ndim - 1))
    last = data.draw(st.integers(first + 1, mesh.ndim))
    flat = mesh.flattened(mesh.axis_names[first:last], "flat")
    flat.check_valid()
    assert flat.axis_names == (*mesh.axis_names[:first], "flat", *mesh.axis_names[last:])
    assert flat.size("flat") == math.prod(mesh.mesh_shape[first:last])
    np.testing.assert_array_equal(flat.device_ids.reshape(-1), mesh.device_ids.reshape(-1))


def test_flattened_may_rename_one_axis() -> None:
    assert MESH.flattened("tp", "model") == Mesh.arange((2, 4), ("dp", "model"))
    assert MESH.flattened(("dp", "tp"), "dp") == Mesh.arange((8,), ("dp",))
    assert MESH["tp", "dp"].flattened(("tp", "dp"), "x").root is MESH


# --- the whole ------------------------------------------------------------------------------------


def test_a_mesh_of_262144_devices_is_vectorised() -> None:
    """A bound that only work per device in Python can miss, even on a busy machine."""
    count = 64**3
    order = np.arange(count).reshape(64, 64, 64).transpose(2, 0, 1).reshape(-1)
    root = Mesh.arange((count,))
    start = time.process_time()
    mesh = Mesh(order, (16, 128, 128), ("dp", "fsdp", "tp"))
    assert mesh.digits(root) == (((16, 4),), ((4, 1), (32, 8192)), ((128, 64),))
    mesh.coordinates(mesh.device_ids)
    mesh.groups(("dp", "tp"))
    hash(mesh["tp", "dp"])
    assert pickle.loads(pickle.dumps(mesh)) == mesh
    mesh.check_valid()
    assert time.process_time() - start < 0.5
