"""Every message of mesh_utils, by its full text: what was asked, why not, what to pass instead."""

from collections.abc import Callable

import numpy as np
import pytest

from mesh_utils import AxisError, Mesh, MeshError

MESH = Mesh.arange((2, 4), ("dp", "tp"))
THREE = Mesh.arange((2, 2, 2), ("pp", "dp", "tp"))
UNNAMED = Mesh.arange((2, 4))
SPARSE = Mesh([5, 10**9], (2,))

CASES: list[tuple[Callable[[], object], type[MeshError], str]] = [
    (
        lambda: Mesh(range(6), (2, 4)),
        MeshError,
        "Mesh was given 6 device ids for mesh_shape=(2, 4). "
        "A mesh of that shape has 8 devices. "
        "Pass 8 device ids, or a mesh_shape with a product of 6.",
    ),
    (
        lambda: Mesh([], (2, 4)),
        MeshError,
        "Mesh was given no device ids for mesh_shape=(2, 4). "
        "A mesh of that shape has 8 devices. "
        "Pass 8 device ids.",
    ),
    (
        lambda: Mesh([0, 3, 3, 1], (4,)),
        MeshError,
        "Mesh was given device_ids with the id 3 more than once. "
        "A device has one place in a mesh. "
        "Pass 4 different ids.",
    ),
    (
        lambda: Mesh([0, 3_000_000, 3_000_000, 1], (4,)),
        MeshError,
        "Mesh was given device_ids with the id 3000000 more than once. "
        "A device has one place in a mesh. "
        "Pass 4 different ids.",
    ),
    (
        lambda: Mesh([0, 1, -1, 2], (4,)),
        MeshError,
        "Mesh was given device_ids with the id -1. "
        "Device ids are 0 or more and fit in 64 bits with a sign. "
        "Pass the ids by which the runtime knows its devices.",
    ),
    (
        lambda: Mesh(np.array([0, 2**63], np.uint64), (2,)),
        MeshError,
        "Mesh was given device_ids with the id 9223372036854775808. "
        "Device ids are 0 or more and fit in 64 bits with a sign. "
        "Pass the ids by which the runtime knows its devices.",
    ),
    (
        lambda: Mesh([0.0, 1.0], (2,)),
        MeshError,
        "Mesh was given device_ids of dtype float64. "
        "Device ids are integers. "
        "Pass 2 integers, such as range(2).",
    ),
    (
        lambda: Mesh([True, False], (2,)),
        MeshError,
        "Mesh was given device_ids of dtype bool. "
        "Device ids are integers. "
        "Pass 2 integers, such as range(2).",
    ),
    (
        lambda: Mesh(["tpu:0", "tpu:1"], (2,)),
        MeshError,
        "Mesh was given device_ids of dtype <U5. "
        "Device ids are integers. "
        "Pass 2 integers, such as range(2).",
    ),
    (
        lambda: Mesh([0, 2**70], (2,)),
        MeshError,
        "Mesh was given device_ids of dtype object. "
        "Device ids are integers. "
        "Pass 2 integers, such as range(2).",
    ),
    (
        lambda: Mesh([[0, 1], [2]], (2, 2)),
        MeshError,
        "Mesh was given device_ids of type list. "
        "numpy cannot read them as one array. "
        "Pass a flat sequence or an array of integers.",
    ),
    (
        lambda: Mesh(range(8), ()),
        MeshError,
        "Mesh was given mesh_shape=(). "
        "A mesh has at least one axis. "
        "Pass (1,) for a mesh of one device.",
    ),
    (
        lambda: Mesh([], (0,)),
        MeshError,
        "Mesh was given mesh_shape=(0,). "
        "The size of axis 0 is 0, not a positive integer. "
        "Pass a size of 1 or more for each axis.",
    ),
    (
        lambda: Mesh([], (2, 0)),
        MeshError,
        "Mesh was given mesh_shape=(2, 0). "
        "The size of axis 1 is 0, not a positive integer. "
        "Pass a size of 1 or more for each axis.",
    ),
    (
        lambda: Mesh(range(8), (2, -4)),
        MeshError,
        "Mesh was given mesh_shape=(2, -4). "
        "The size of axis 1 is -4, not a positive integer. "
        "Pass a size of 1 or more for each axis.",
    ),
    (
        lambda: Mesh(range(8), (2, 4.0)),  # type: ignore
        MeshError,
        "Mesh was given mesh_shape=(2, 4.0). "
        "The size of axis 1 is 4.0, not a positive integer. "
        "Pass a size of 1 or more for each axis.",
    ),
    (
        lambda: Mesh(range(1), (True,)),
        MeshError,
        "Mesh was given mesh_shape=(True,). "
        "The size of axis 0 is True, not a positive integer. "
        "Pass a size of 1 or more for each axis.",
    ),
    (
        lambda: Mesh(range(8), 8),  # type: ignore
        MeshError,
        "Mesh was given mesh_shape=8. "
        "A mesh shape is a sequence with one size per axis. "
        "Pass a tuple of integers, such as (2, 4).",
    ),
    (
        lambda: Mesh.arange((2, 0), ("dp", "tp")),
        MeshError,
        "Mesh was given mesh_shape=(2, 0). "
        "The size of axis 1 is 0, not a positive integer. "
        "Pass a size of 1 or more for each axis.",
    ),
    (
        lambda: Mesh(range(8), (2, 4), ("dp", "dp")),
        AxisError,
        "Mesh was given axis_names=('dp', 'dp') for mesh_shape=(2, 4). "
        "The name 'dp' is there twice. "
        "Pass a different name for each axis.",
    ),
    (
        lambda: Mesh(range(8), (2, 4), ("dp",)),
        AxisError,
        "Mesh was given axis_names=('dp',) for mesh_shape=(2, 4). "
        "The number of names is 1, the number of axes 2. "
        "Pass 2 names, or None to number the axes.",
    ),
    (
        lambda: Mesh(range(8), (2, 4), "dp"),
        AxisError,
        "Mesh was given axis_names='dp' for mesh_shape=(2, 4). "
        "One name is not a sequence of names. "
        "Pass a tuple, such as ('dp',).",
    ),
    (
        lambda: Mesh(range(8), (2, 4), 2),  # type: ignore
        AxisError,
        "Mesh was given axis_names=2 for mesh_shape=(2, 4). "
        "One name is not a sequence of names. "
        "Pass a tuple, such as (2,).",
    ),
    (
        lambda: Mesh(range(8), (2, 4), ("dp", "")),
        AxisError,
        "Mesh was given axis_names=('dp', '') for mesh_shape=(2, 4). "
        "'' is not the name of an axis. "
        "Pass non-empty strings, or integers of 0 or more.",
    ),
    (
        lambda: Mesh(range(8), (2, 4), ("dp", None)),  # type: ignore
        AxisError,
        "Mesh was given axis_names=('dp', None) for mesh_shape=(2, 4). "
        "None is not the name of an axis. "
        "Pass non-empty strings, or integers of 0 or more.",
    ),
    (
        lambda: Mesh(range(8), (2, 4), ("dp", -1)),
        AxisError,
        "Mesh was given axis_names=('dp', -1) for mesh_shape=(2, 4). "
        "-1 is not the name of an axis. "
        "Pass non-empty strings, or integers of 0 or more.",
    ),
    (
        lambda: Mesh(range(8), (2, 4), (True, "tp")),
        AxisError,
        "Mesh was given axis_names=(True, 'tp') for mesh_shape=(2, 4). "
        "True is not the name of an axis. "
        "Pass non-empty strings, or integers of 0 or more.",
    ),
    (
        lambda: MESH["ep"],
        AxisError,
        "Axis 'ep' was asked for. "
        "It is not among the axes dp=2, tp=4. "
        "Pass one of 'dp', 'tp', or a position from 0 to 1.",
    ),
    (
        lambda: MESH[2],
        AxisError,
        "Axis 2 was asked for. "
        "It is not among the axes dp=2, tp=4. "
        "Pass one of 'dp', 'tp', or a position from 0 to 1.",
    ),
    (
        lambda: MESH[-1],
        AxisError,
        "Axis -1 was asked for. "
        "It is not among the axes dp=2, tp=4. "
        "Pass one of 'dp', 'tp', or a position from 0 to 1.",
    ),
    (
        lambda: MESH[None],  # type: ignore
        AxisError,
        "Axis None was asked for. "
        "It is not among the axes dp=2, tp=4. "
        "Pass one of 'dp', 'tp', or a position from 0 to 1.",
    ),
    (
        lambda: MESH.size("ep"),
        AxisError,
        "Axis 'ep' was asked for. "
        "It is not among the axes dp=2, tp=4. "
        "Pass one of 'dp', 'tp', or a position from 0 to 1.",
    ),
    (
        lambda: MESH.axis_index(True),
        AxisError,
        "Axis True was asked for. "
        "It is not among the axes dp=2, tp=4. "
        "Pass one of 'dp', 'tp', or a position from 0 to 1.",
    ),
    (
        lambda: UNNAMED.axis_index(2),
        AxisError,
        "Axis 2 was asked for. It is not among the axes 0=2, 1=4. Pass one of 0, 1.",
    ),
    (
        lambda: UNNAMED[(1,)].axis_index(0),
        AxisError,
        "Axis 0 was asked for. It is not among the axes 1=4. Pass one of 1.",
    ),
    (
        lambda: MESH["tp", "tp"],
        AxisError,
        "Axes ('tp', 'tp') of dp=2, tp=4 were asked for. "
        "Axis 'tp' is there twice. "
        "Pass each axis at most once.",
    ),
    (
        lambda: MESH["tp", 1],
        AxisError,
        "Axes ('tp', 1) of dp=2, tp=4 were asked for. "
        "Axis 'tp' is there twice. "
        "Pass each axis at most once.",
    ),
    (
        lambda: MESH[()],
        AxisError,
        "A submesh of no axes was asked for. "
        "A mesh has at least one axis. "
        "Pass some of dp=2, tp=4.",
    ),
    (
        lambda: MESH.slice(ep=0),
        AxisError,
        "Axis 'ep' was asked for. "
        "It is not among the axes dp=2, tp=4. "
        "Pass one of 'dp', 'tp', or a position from 0 to 1.",
    ),
    (
        lambda: MESH.slice(dp=2),
        MeshError,
        "A slice at dp=2 was asked for. Axis 'dp' has size 2. Pass an integer from 0 to 1.",
    ),
    (
        lambda: MESH.slice(dp=-1),
        MeshError,
        "A slice at dp=-1 was asked for. Axis 'dp' has size 2. Pass an integer from 0 to 1.",
    ),
    (
        lambda: MESH.slice(dp=0.5),  # type: ignore
        MeshError,
        "A slice at dp=0.5 was asked for. Axis 'dp' has size 2. Pass an integer from 0 to 1.",
    ),
    (
        lambda: MESH.slice(dp=0, tp=3),
        MeshError,
        "A slice at dp=0, tp=3 was asked for. "
        "It leaves none of the axes dp=2, tp=4. "
        "Leave one axis out, or index device_ids to get one device.",
    ),
    (
        lambda: MESH.slice({"dp": 0}, dp=1),
        AxisError,
        "Axes ['dp', 'dp'] of dp=2, tp=4 were asked for. "
        "Axis 'dp' is there twice. "
        "Pass each axis at most once.",
    ),
    (
        lambda: MESH.coordinates(8),
        MeshError,
        "Device ids [8] were looked up in Mesh(dp=2, tp=4, devices=0..7). "
        "The first that it does not have is 8. "
        "Pass ids of its devices, or ask a mesh that has them.",
    ),
    (
        lambda: MESH.coordinates(-1),
        MeshError,
        "Device ids [-1] were looked up in Mesh(dp=2, tp=4, devices=0..7). "
        "The first that it does not have is -1. "
        "Pass ids of its devices, or ask a mesh that has them.",
    ),
    (
        lambda: MESH.coordinates([0, 9, 10]),
        MeshError,
        "Device ids [0, 9, 10] were looked up in Mesh(dp=2, tp=4, devices=0..7). "
        "The first that it does not have is 9. "
        "Pass ids of its devices, or ask a mesh that has them.",
    ),
    (
        lambda: MESH.coordinates(1.5),  # type: ignore
        MeshError,
        "Devices were looked up with ids of dtype float64. "
        "Device ids are integers. "
        "Pass an integer or an array of integers.",
    ),
    (
        lambda: SPARSE.coordinates(7),
        MeshError,
        "Device ids [7] were looked up in Mesh(0=2, devices=[5, 1000000000]). "
        "The first that it does not have is 7. "
        "Pass ids of its devices, or ask a mesh that has them.",
    ),
    (
        lambda: MESH["tp"].positions(Mesh.arange((2,))),
        MeshError,
        "Device ids 0..3 were looked up in Mesh(0=2, devices=0..1). "
        "The first that it does not have is 2. "
        "Pass ids of its devices, or ask a mesh that has them.",
    ),
    (
        lambda: Mesh([8, 9], (2,)).digits(MESH),
        MeshError,
        "Device ids 8..9 were looked up in Mesh(dp=2, tp=4, devices=0..7). "
        "The first that it does not have is 8. "
        "Pass ids of its devices, or ask a mesh that has them.",
    ),
    (
        lambda: MESH.groups("ep"),
        AxisError,
        "Axis 'ep' was asked for. "
        "It is not among the axes dp=2, tp=4. "
        "Pass one of 'dp', 'tp', or a position from 0 to 1.",
    ),
    (
        lambda: MESH.groups(("tp", "tp")),
        AxisError,
        "Axes ('tp', 'tp') of dp=2, tp=4 were asked for. "
        "Axis 'tp' is there twice. "
        "Pass each axis at most once.",
    ),
    (
        lambda: MESH.factored({"ep": (("a", 2), ("b", 2))}),
        AxisError,
        "Axis 'ep' was asked for. "
        "It is not among the axes dp=2, tp=4. "
        "Pass one of 'dp', 'tp', or a position from 0 to 1.",
    ),
    (
        lambda: MESH.factored({"tp": (("a", 2), ("b", 3))}),
        MeshError,
        "Axis 'tp' of size 4 was to be factored into sizes (2, 3). "
        "These are not positive integers with a product of 4. "
        "Pass sizes that multiply up to the size of the axis.",
    ),
    (
        lambda: MESH.factored({"tp": ()}),
        MeshError,
        "Axis 'tp' of size 4 was to be factored into sizes (). "
        "These are not positive integers with a product of 4. "
        "Pass sizes that multiply up to the size of the axis.",
    ),
    (
        lambda: MESH.factored({"tp": (2, 2)}),  # type: ignore
        AxisError,
        "Axis 'tp' was to be factored into (2, 2). "
        "These are not (name, size) pairs. "
        "Pass a tuple of pairs, such as (('outer', 2), ('inner', 2)).",
    ),
    (
        lambda: MESH.factored({"tp": (("a", 4), ("b", 0))}),
        MeshError,
        "Axis 'tp' of size 4 was to be factored into sizes (4, 0). "
        "These are not positive integers with a product of 4. "
        "Pass sizes that multiply up to the size of the axis.",
    ),
    (
        lambda: MESH.factored({"tp": (("dp", 2), ("b", 2))}),
        AxisError,
        "Mesh was given axis_names=('dp', 'dp', 'b') for mesh_shape=(2, 2, 2). "
        "The name 'dp' is there twice. "
        "Pass a different name for each axis.",
    ),
    (
        lambda: THREE.flattened(("pp", "tp"), "x"),
        AxisError,
        "Axes ('pp', 'tp') were to be flattened into 'x'. "
        "They do not follow each other, in that order, in pp=2, dp=2, tp=2. "
        "Pass adjacent axes, or permute the mesh first with mesh[axes].",
    ),
    (
        lambda: THREE.flattened(("tp", "dp"), "x"),
        AxisError,
        "Axes ('tp', 'dp') were to be flattened into 'x'. "
        "They do not follow each other, in that order, in pp=2, dp=2, tp=2. "
        "Pass adjacent axes, or permute the mesh first with mesh[axes].",
    ),
    (
        lambda: THREE.flattened((), "x"),
        AxisError,
        "Axes () were to be flattened into 'x'. "
        "They do not follow each other, in that order, in pp=2, dp=2, tp=2. "
        "Pass adjacent axes, or permute the mesh first with mesh[axes].",
    ),
    (
        lambda: THREE.flattened(("dp", "dp"), "x"),
        AxisError,
        "Axes ('dp', 'dp') of pp=2, dp=2, tp=2 were asked for. "
        "Axis 'dp' is there twice. "
        "Pass each axis at most once.",
    ),
    (
        lambda: THREE.flattened(("dp", "tp"), "pp"),
        AxisError,
        "Mesh was given axis_names=('pp', 'pp') for mesh_shape=(2, 4). "
        "The name 'pp' is there twice. "
        "Pass a different name for each axis.",
    ),
]


@pytest.mark.parametrize(("ask", "kind", "message"), CASES, ids=range(len(CASES)))
def test_message(ask: Callable[[], object], kind: type[MeshError], message: str) -> None:
    with pytest.raises(MeshError) as caught:
        ask()
    assert str(caught.value) == message
    assert type(caught.value) is kind


@pytest.mark.parametrize("message", sorted({message for _, _, message in CASES}))
def test_message_is_three_sentences(message: str) -> None:
    assert message.endswith(".")
    assert message.count(". ") == 2


def test_errors_are_value_errors() -> None:
    assert issubclass(MeshError, ValueError)
    assert issubclass(AxisError, MeshError)
    assert not issubclass(AxisError, KeyError)


def test_a_failed_question_leaves_the_mesh_as_it_was() -> None:
    before = MESH.to_hash()
    with pytest.raises(MeshError):
        MESH.digits(Mesh.arange((2,)))
    MESH.check_valid()
    assert MESH.to_hash() == before
    assert MESH.digits() == (((2, 4),), ((4, 1),))
