"""Faults that the layouts once had, or that were found while they were built: a row for each.

A row returns what is found and what it has to be. See tools/mutants/mutants.yaml.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mesh_utils import Mesh
from xla_dtensor.core import Layout
from xla_dtensor.core.local_shape import torch_indices
from xla_dtensor.core.placements import Replicate, Shard, StridedShard
from xla_dtensor.core.product_order import ProductDims, Tiles, loses_order
from xla_dtensor.core.spanning import layout_on_span

ROWS: list[Callable[[], tuple[Any, Any]]] = []
MESH = Mesh.arange((2, 4), ("dp", "tp"))


def row(function: Callable[[], tuple[Any, Any]]) -> Callable[[], tuple[Any, Any]]:
    """Register a row."""
    ROWS.append(function)
    return function


@pytest.mark.parametrize("function", ROWS, ids=lambda function: function.__name__)
def test_row(function: Callable[[], tuple[Any, Any]]) -> None:
    found, expected = function()
    assert found == expected


# ---------------------------------------------------------------------- placements


@row
def a_strided_shard_is_no_plain_one() -> tuple[Any, Any]:
    strided = Layout.from_placements([StridedShard(0, 4), Shard(0)], 2, MESH)
    plain = Layout.from_placements([Shard(0), Shard(0)], 2, MESH)
    return (
        [str(strided.op_sharding()), str(plain.op_sharding())],
        ["{devices=[8,1]<=[2,4]T(1,0)}", "{devices=[8,1]<=[8]}"],
    )


@row
def a_strided_shard_cuts_uneven_chunks() -> tuple[Any, Any]:
    """As torch 2.13 does: 10 rows are two chunks of 5, and each of them is cut in two."""
    layout = Layout.from_placements([StridedShard(0, 2)], 1, Mesh.arange((2,), ("dp",)))
    found = [torch_indices(layout, (10,), (at,))[0].tolist() for at in range(2)]
    return found, [[0, 1, 2, 5, 6, 7], [3, 4, 8, 9]]


@row
def a_submesh_keeps_what_is_known_of_other_axes() -> tuple[Any, Any]:
    on_tp = Layout.from_placements([Replicate()], 2, MESH["tp"])
    return [str(layout_on_span(on_tp, (("dp", 0),))), str(layout_on_span(on_tp))], [
        "[dp, -]",
        "[-?, -?]",
    ]


# ---------------------------------------------------------------------- products


def tiles(text: str, names: str) -> Tiles:
    """Return the devices of a cut: "b,a.c" is dim 0 by b, dim 1 by a and then c."""
    mesh = Mesh.arange((2,) * len(names), tuple(names))
    spec = [None if dim == "-" else tuple(dim.split(".")) for dim in text.split(",")]
    sharding = Layout.from_partition_spec(spec, mesh).op_sharding()
    if sharding.tensor_ndim is None:
        return mesh.device_ids.reshape([*[1] * len(spec), -1])
    return sharding.tile_assignment.reshape([*sharding.tile_dims[: len(spec)], -1])


def concerned(equation: str, *cuts: str, names: str = "abc") -> bool:
    """Tell whether a product may be wrong that is written as an einsum."""
    dims = ProductDims.of_equation(equation)
    left, right, result = (tiles(cut, names) for cut in cuts)
    return loses_order(
        left, right, result, dims.summed, dims.batch, dims.result, num_axes=len(names)
    )


@row
def products_whose_groups_come_in_another_order() -> tuple[Any, Any]:
    found = [
        concerned("mx,my->xy", "b,-", "b,a.c", "c,b.a"),
        concerned("mx,my->xy", "b,-", "b,a.c", "b,a.c"),
    ]
    return found, [True, False]


@row
def products_whose_factors_disagree() -> tuple[Any, Any]:
    cuts = ("a,c.b", "c,b.a", "-,d")
    return concerned("mx,my->xy", *cuts, names="abcd"), True


@row
def products_whose_batch_dims_are_cut_otherwise() -> tuple[Any, Any]:
    equation = "bxm,bmy->bxy"
    found = [
        concerned(equation, "b,-,a.c", "b,a.c,-", "b.c,-,-"),
        concerned(equation, "b,-,c", "b,c,-", "c,-,b"),
        concerned(equation, "b,-,c", "b,c,-", "b,c,-"),
    ]
    return found, [True, True, False]


@row
def products_with_batch_dims_on_two_axes() -> tuple[Any, Any]:
    equation = "bxm,bmy->bxy"
    found = [
        concerned(equation, "y,-,x", "y,x,-", "x,-,y", names="xy"),
        concerned(equation, "y,-,x", "y,x,-", "y,-,-", names="xy"),
    ]
    return found, [True, False]
