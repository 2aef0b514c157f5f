"""The mesh with the axes of two meshes that were cut out of the same devices differently."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from mesh_utils import Mesh
from xla_dtensor.core.spanning import joint_mesh

WORLD = Mesh(np.arange(16)[::-1], (16,), ("world",))


def split(*parts: tuple[str, int]) -> Mesh:
    return WORLD.factored({"world": parts})


@pytest.mark.parametrize(
    ("outer", "inner"),
    [
        (split(("a", 4), ("rest", 4))["a"], split(("b", 8), ("c", 2))["c"]),
        (split(("a", 2), ("b", 2), ("c", 4))["a", "c"], split(("o", 2), ("d", 2), ("p", 4))["d"]),
        (split(("one", 1), ("a", 4), ("rest", 4))["one", "a"], split(("x", 4), ("t", 4))["t"]),
        (split(("x", 8), ("a", 2))["a"], split(("b", 2), ("y", 8))["b"]),
    ],
)
def test_each_axis_walks_the_same_devices(outer: Mesh, inner: Mesh) -> None:
    joint = joint_mesh(outer, inner)
    assert joint is not None
    assert joint.axis_names == (*outer.axis_names, *inner.axis_names)
    for part in (outer, inner):
        groups = {tuple(group) for group in joint.groups(part.axis_names).tolist()}
        assert tuple(part.device_ids.ravel().tolist()) in groups


def test_one_mesh_that_has_all_axes_is_used() -> None:
    mesh = Mesh.arange((2, 4), ("dp", "tp"))
    assert joint_mesh(mesh["tp"], mesh["dp"]) == mesh
    three = Mesh.arange((2, 2, 2), ("pp", "dp", "tp"))
    assert joint_mesh(three["tp"], three["dp"]) == three["dp", "tp"]


def test_there_is_none() -> None:
    mesh = split(("a", 4), ("b", 4))
    for outer, inner in itertools.permutations(
        (mesh["a"], split(("c", 8), ("d", 2))["c"], split(("a", 2), ("e", 8))["a"]), 2
    ):
        assert joint_mesh(outer, inner) is None
    assert joint_mesh(mesh["a"], Mesh.arange((4, 4), ("x", "y"))["x"]) is None
    assert joint_mesh(Mesh.arange((2, 4), ("x", "y"))["x"], mesh["b"]) is None
