"""_flatten and _unflatten: names of merged axes, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import xla_dtensor as xd
from mesh_utils import Mesh
from mesh_utils.errors import AxisError, MeshError
from xla_dtensor.dtensor.mesh import Merged, flattened, submesh, unflattened
from xla_dtensor.errors import DistributeError

CUBE = Mesh.arange((2, 2, 2), ("pp", "dp", "tp"))


def test_merged_axes_are_remembered() -> None:
    merged: Merged = {}
    made = flattened(CUBE["dp", "tp"], None, merged)
    assert made.axis_names == ("dp_tp",)
    assert made.device_ids.tolist() == [0, 1, 2, 3]
    assert made.root == CUBE
    assert submesh(CUBE, ("dp_tp",), merged) == made
    assert submesh(CUBE, ("dp_tp", "pp"), merged).device_ids[:, 1].tolist() == [4, 5, 6, 7]
    assert flattened(CUBE["dp", "tp"], "dp_tp", merged) == made
    assert flattened(made, None, merged) is made


def test_order_of_the_axes_is_kept() -> None:
    made = flattened(CUBE["tp", "pp"], "x", {})
    assert made.device_ids.tolist() == [0, 4, 1, 5]


def test_one_axis_gets_another_name() -> None:
    merged: Merged = {}
    assert flattened(CUBE["tp"], "cp", merged).axis_names == ("cp",)
    assert submesh(CUBE, ("pp", "cp"), merged).device_ids.tolist() == [[0, 1], [4, 5]]


def test_split_axes(mesh: xd.DeviceMesh) -> None:
    assert unflattened(CUBE, 0, (1, 2), ("a", "b")).mesh_shape == (1, 2, 2, 2)
    one = xd.init_device_mesh("xla", (8,), mesh_dim_names=("all",))
    assert one._unflatten("all", (2, 4), ("dp", "tp")) == mesh


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: flattened(Mesh.arange((2, 2)), None, {}), DistributeError, "axes have no names"),
        (lambda: flattened(CUBE["pp", "dp"], "tp", {}), DistributeError, "Pass another name"),
        (
            lambda: flattened(CUBE["pp", "dp"], "x", {"x": ("dp", "tp")}),
            DistributeError,
            r"The name stands for \('dp', 'tp'\) of",
        ),
        (lambda: submesh(CUBE, ("xy",), {}), AxisError, "'xy'"),
        (lambda: submesh(CUBE["pp"], ("x",), {"x": ("dp", "tp")}), AxisError, "'x'"),
        (lambda: unflattened(CUBE, 0, (2,), ("a", "b")), DistributeError, "as many names as sizes"),
        (lambda: unflattened(CUBE, 0, (2, 2), ("a", "b")), MeshError, "2"),
    ],
)
def test_refusals(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
