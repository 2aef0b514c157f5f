"""Which products lose the order of their tiles; what XLA does is tested beside the runtimes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh_utils import Mesh
from xla_dtensor.core import Layout
from xla_dtensor.core.product_order import Tiles, dot_sources, loses_order

MESH = Mesh.arange((2, 2, 2), ("a", "b", "c"))
# The sum runs over dim 0 of both factors. (left, right, result), as XLA was found to be wrong.
WRONG = [
    ("b,c", "b,a.c", "b,a.c"),
    ("b,c", "b,c", "b,a.c"),
    ("b,c", "b,c", "a.c,b"),
    ("a,c", "b,a.c", "b.c,a"),
    ("a,b.c", "b,c", "b,a.c"),
]
RIGHT = [
    ("b,c", "b,a.c", "c,a"),
    ("b,a.c", "b,a.c", "b,a.c"),
    ("b,c", "b,a.c", "-,a.c"),
    ("-,c", "-,a.c", "b,a.c"),
]


def tiles(text: str, mesh: Mesh = MESH) -> Tiles:
    """Return the devices of a cut: "b,a.c" is dim 0 by b, dim 1 by a and then c."""
    spec = [None if dim == "-" else tuple(dim.split(".")) for dim in text.split(",")]
    sharding = Layout.from_partition_spec(spec, mesh).op_sharding()
    if sharding.tensor_ndim is None:
        return mesh.device_ids.reshape([*[1] * len(spec), -1])
    assignment = sharding.tile_assignment
    return assignment.reshape([*assignment.shape[: len(spec)], -1])


@pytest.mark.parametrize("case", WRONG)
def test_what_xla_gets_wrong_is_concerned(case: tuple[str, str, str]) -> None:
    assert loses_order(*map(tiles, case), summed=[(0, 0)])


@pytest.mark.parametrize("case", RIGHT)
def test_equal_orders_and_results_without_the_sums_axes_are_not(case: tuple[str, str, str]) -> None:
    assert not loses_order(*map(tiles, case), summed=[(0, 0)])


def test_a_batch_dim_that_is_cut_twice_is_concerned() -> None:
    mesh = Mesh.arange((2, 4), ("x", "y"))
    left, right, result = (tiles(text, mesh) for text in ("y,-,x", "y,x,-", "x,-,y"))
    assert loses_order(left, right, result, summed=[(2, 1)], batch=[(0, 0)])
    own = tiles("y,-,-", mesh)
    assert not loses_order(left, right, own, summed=[(2, 1)], batch=[(0, 0)])


def test_one_of_several_dims_of_the_sum_is_enough() -> None:
    left, right, result = map(tiles, ("c,b,-", "b,a.c,-", "c,a.b"))
    assert loses_order(left, right, result, summed=[(0, 0), (1, 1)])


def test_a_sum_over_dims_that_the_factors_are_cut_differently_along_is_concerned() -> None:
    summed = [(0, 0), (1, 1)]
    sources = dot_sources((3, 3), summed)
    assert sources == [(0, 2), (1, 2)]
    left, right = tiles("a,b,c"), tiles("a.c,b,-")
    assert loses_order(left, right, tiles("a,-"), summed, sources=sources)
    assert not loses_order(left, right, tiles("-,-"), summed, sources=sources)
    assert not loses_order(left, tiles("a,b,-"), tiles("c,-"), summed, sources=sources)


cuts = st.permutations("abc").flatmap(
    lambda axes: st.tuples(*[st.integers(0, 2)] * 3).map(
        lambda dims: ",".join(
            ".".join(a for a, d in zip(axes, dims, strict=True) if d == dim) or "-"
            for dim in (0, 1)
        )
    )
)


@given(cuts, cuts, cuts, st.permutations(range(8)))
def test_the_answer_does_not_depend_on_the_devices_names(
    left: str, right: str, result: str, ids: list[int]
) -> None:
    renamed = np.array(ids)
    given_ = [tiles(text) for text in (left, right, result)]
    other = [renamed[each] for each in given_]
    assert loses_order(*given_, summed=[(0, 0)]) == loses_order(*other, summed=[(0, 0)])


@given(cuts, cuts, cuts)
def test_the_factors_may_change_places(left: str, right: str, result: str) -> None:
    one, other, whole = map(tiles, (left, right, result))
    turned = np.swapaxes(whole, 0, 1)
    concerned = loses_order(one, other, whole, summed=[(0, 0)])
    assert concerned == loses_order(other, one, turned, summed=[(0, 0)])


@given(cuts, cuts, cuts)
def test_a_result_that_the_sums_axes_do_not_cut_is_safe(left: str, right: str, own: str) -> None:
    summed = set(left.split(",")[0] + right.split(",")[0])
    dims = [".".join(a for a in dim.split(".") if a not in summed) or "-" for dim in own.split(",")]
    assert not loses_order(tiles(left), tiles(right), tiles(",".join(dims)), summed=[(0, 0)])


def test_no_product_of_matrices_on_two_axes_is_concerned() -> None:
    mesh = Mesh.arange((2, 4), ("x", "y"))
    places = list(itertools.product(("-", "0", "1"), repeat=2))
    specs = [
        ",".join(
            ".".join(a for a, p in zip("xy", place, strict=True) if p == d) or "-" for d in "01"
        )
        for place in places
    ]
    for three in itertools.product(specs, repeat=3):
        assert not loses_order(*(tiles(s, mesh) for s in three), summed=[(0, 0)]), three
