"""Factors that are made to agree: what stays, and that no such product is concerned."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh_utils import Mesh
from xla_dtensor.core import Layout
from xla_dtensor.core.product_order import Factor, ProductDims, Tiles, loses_order

MESH = Mesh.arange((2, 2, 2, 4), ("a", "b", "c", "d"))
SIZES = dict(zip("abcd", (2, 2, 2, 4), strict=True))
Cuts = tuple[tuple[str, ...], ...]


def cut(text: str) -> Cuts:
    """Read a cut: "ac,b" is dim 0 by a and then c, dim 1 by b."""
    return tuple(map(tuple, text.split(",")))


def agreed(
    equation: str, left: str, right: str, shapes: tuple[tuple[int, ...], tuple[int, ...]]
) -> list[str]:
    factors = [Factor(s, cut(text)) for s, text in zip(shapes, (left, right), strict=True)]
    found = ProductDims.of_equation(equation).agreed(*factors, size=SIZES.__getitem__)
    return [",".join(map("".join, dims)) for dims in found]


def tiles(text: str) -> Tiles:
    sharding = Layout(MESH, cut(text)).op_sharding()
    ndim = text.count(",") + 1
    if sharding.tensor_ndim is None:
        return MESH.device_ids.reshape([*[1] * ndim, -1])
    assignment = sharding.tile_assignment
    return np.asarray(assignment.reshape([*assignment.shape[:ndim], -1]))


def test_dims_of_an_equation() -> None:
    assert ProductDims.of_equation("bmk,bkn->bmn") == ([(2, 1)], [(0, 0)], [(0, 0), (0, 1), (1, 2)])
    assert ProductDims.of_equation("bsm,bsn->mn") == ([(0, 0), (1, 1)], [], [(0, 2), (1, 2)])
    assert ProductDims.of_equation("m,n->mn") == ([], [], [(0, 0), (1, 0)])


@pytest.mark.parametrize(
    ("left", "right", "shapes", "wanted"),
    [
        ("c,a", "b,c", ((8, 8), (8, 8)), ["c,ab", "ab,", "c,"]),
        ("c,a", "b,c", ((8, 8), (8, 16)), [",ba", "ba,c", ",c"]),
        ("a,", "a,b", ((64, 8), (8, 8)), ["a,", ",b", "a,b"]),  # FSDP: the weight is gathered
        ("a,b", "ab,c", ((64, 8), (8, 8)), ["a,b", "b,c", "a,c"]),
        ("a,b", "b,a", ((8, 8), (8, 8)), ["a,b", "b,", "a,"]),
        ("a,b", "c,", ((8, 2), (2, 8)), ["a,b", "b,", "a,"]),  # b and c are too many for the sum
        (",d", "d,", ((8, 2), (2, 8)), [",", ",", ","]),
    ],
)
def test_the_larger_factor_stays(
    left: str, right: str, shapes: tuple[tuple[int, ...], tuple[int, ...]], wanted: list[str]
) -> None:
    assert agreed("mn,nk->mk", left, right, shapes) == wanted


def test_batch_dims_are_cut_by_both() -> None:
    shapes = (8, 8, 8), (8, 8, 8)
    assert agreed("bmk,bkn->bmn", "a,,b", "c,b,a", shapes) == ["ac,,b", "ac,b,", "ac,,"]


drawn = st.tuples(st.permutations("abcd"), st.tuples(*[st.integers(0, 3)] * 4)).map(
    lambda both: ",".join(
        "".join(a for a, d in zip(*both, strict=True) if d == dim) for dim in range(3)
    )
)


@given(drawn, drawn, st.tuples(*[st.sampled_from([2, 8, 32])] * 4))
def test_what_agrees_is_never_concerned(
    left: str, right: str, sizes: tuple[int, int, int, int]
) -> None:
    batch, rows, summed, columns = sizes
    shapes = (batch, rows, summed), (batch, summed, columns)
    equation = "bmk,bkn->bmn"
    found = agreed(equation, left, right, shapes)
    dims = ProductDims.of_equation(equation)
    one, other, result = map(tiles, found)
    assert not loses_order(one, other, result, *dims, num_axes=4)
    assert agreed(equation, found[0], found[1], shapes) == found
