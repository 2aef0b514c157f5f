"""Which products lose the order of their tiles; what XLA does is tested beside the runtimes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh_utils import Mesh
from xla_dtensor.core import Layout
from xla_dtensor.core.product_order import Pairs, Tiles, loses_order

MESH = Mesh.arange((2, 2, 2), ("a", "b", "c"))
# The sum runs over dim 0 of both factors. (left, right, result), as XLA was found to be wrong.
WRONG = [
    ("b,c", "b,a.c", "b,a.c"),
    ("b,c", "b,c", "b,a.c"),
    ("b,c", "b,c", "a.c,b"),
    ("a,c", "b,a.c", "b.c,a"),
    ("a,b.c", "b,c", "b,a.c"),
    ("c,b.a", "c,a", "-,c"),
    ("c,a.b", "c,b", "a,c"),
    ("c,-", "a,c.b", "b.a,-"),
]
# The sum runs over the left one's dim 2 and the right one's dim 1, and dim 0 is a batch dim.
WRONG_BATCHES = [
    ("b,-,a.c", "b,a.c,-", "b.c,-,-"),
    ("b,-,c.a", "b,c.a,-", "b.a,c,-"),
    ("a.b,-,c", "c.b,a,-", "b,-,a.c"),
    ("b,-,c", "b,c,-", "c,-,b"),
]
RIGHT = [
    ("b,c", "b,a", "a,c"),
    ("b,a", "b,c", "-,-"),
    ("b,-", "b,a.c", "b,a.c"),
    ("-,c.a", "c,b", "c.a,b"),
    ("-,c", "-,a", "b,a.c"),
]


def concerned(*cuts: Tiles, summed: Pairs, batch: Pairs = (), num_axes: int = 3) -> bool:
    """Ask about a product whose result has the batch dims, then the left factor's, the right's."""
    left, right, result = cuts
    sources = [(0, of_left) for of_left, _ in batch] + [
        (factor, dim)
        for factor, tensor in enumerate((left, right))
        for dim in range(tensor.ndim - 1)
        if all(pair[factor] != dim for pair in (*summed, *batch))
    ]
    return loses_order(left, right, result, summed, batch, sources, num_axes)


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
    assert concerned(*map(tiles, case), summed=[(0, 0)])


@pytest.mark.parametrize("case", RIGHT)
def test_what_is_surely_safe_is_not(case: tuple[str, str, str]) -> None:
    assert not concerned(*map(tiles, case), summed=[(0, 0)])


def test_a_batch_dim_that_is_cut_twice_is_concerned() -> None:
    mesh = Mesh.arange((2, 4), ("x", "y"))
    left, right, result = (tiles(text, mesh) for text in ("y,-,x", "y,x,-", "x,-,y"))
    assert concerned(left, right, result, summed=[(2, 1)], batch=[(0, 0)])
    own = tiles("y,-,-", mesh)
    assert not concerned(left, right, own, summed=[(2, 1)], batch=[(0, 0)])


@pytest.mark.parametrize("case", WRONG_BATCHES)
def test_batches_that_xla_gets_wrong_are_concerned(case: tuple[str, str, str]) -> None:
    assert concerned(*map(tiles, case), summed=[(2, 1)], batch=[(0, 0)])


@pytest.mark.parametrize(
    "case",
    [
        ("b,-,c", "b,c,-", "b,c,-"),
        ("b,-,c", "b,c,-", "b,-,a"),
        ("b,a,c", "b,c,-", "b,a,c"),
        ("b,-,a.c", "b,a.c,-", "c,-,-"),
    ],
)
def test_batches_that_agree_are_as_a_product_of_matrices(case: tuple[str, str, str]) -> None:
    """All but the last, whose result is cut along its batch dim by an axis of the sum."""
    is_concerned = concerned(*map(tiles, case), summed=[(2, 1)], batch=[(0, 0)])
    assert is_concerned == (case[2] == "c,-,-")


def test_batch_dims_are_compared_one_by_one() -> None:
    left, right = tiles("b,-,a,c"), tiles("b,-,c,-")
    for result, wanted in (("b,-,a,-", False), ("-,b,a,-", False), ("-,b,c,-", True)):
        batch = [(0, 0), (1, 1)]
        found = concerned(left, right, tiles(result), summed=[(3, 2)], batch=batch)
        assert found == wanted, result
    other = tiles("-,b,c,-")
    assert concerned(left, other, tiles("b,-,a,-"), summed=[(3, 2)], batch=batch)


def test_one_of_several_dims_of_the_sum_is_enough() -> None:
    left, right, result = map(tiles, ("c,b,-", "b,a.c,-", "c,a.b"))
    assert concerned(left, right, result, summed=[(0, 0), (1, 1)])


def test_a_sum_over_dims_that_the_factors_are_cut_differently_along_is_concerned() -> None:
    summed = [(0, 0), (1, 1)]
    left, right = tiles("a,b,c"), tiles("a.c,b,-")
    assert concerned(left, right, tiles("a,-"), summed=summed)
    assert not concerned(left, tiles("a,b,-"), tiles("c,-"), summed=summed)


def test_a_sum_that_one_factor_is_cut_along() -> None:
    """It is safe where the result is cut as the factors are."""
    left, right = tiles("c,a,-"), tiles("b,a.c")
    for result, wanted in (("c,a,b", False), ("c,-,b", False), ("c,b,a", True), ("-,c,b", True)):
        found = concerned(left, right, tiles(result), summed=[(2, 1)])
        assert found == wanted, result


def test_the_order_of_each_part_of_the_sum_counts() -> None:
    """Over dim 0 alone one factor has c before b, where the sum's other dim is its last one."""
    right, result = tiles("a,b,-"), tiles("a,-")
    assert concerned(tiles("a,c,b"), right, result, summed=[(0, 0), (2, 1)])
    assert not concerned(tiles("a,b,c"), right, result, summed=[(0, 0), (1, 1)])


def test_two_axes_have_one_order() -> None:
    case = [tiles(text, Mesh.arange((2, 4), ("x", "y"))) for text in ("x,y", "x,-", "-,x")]
    assert not concerned(*case, summed=[(0, 0)], num_axes=2)


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
    assert concerned(*given_, summed=[(0, 0)]) == concerned(*other, summed=[(0, 0)])


@given(
    st.permutations("abc"), st.tuples(*[st.sampled_from(["sum", "rows", "columns", ""])] * 3), cuts
)
def test_factors_that_agree_are_safe(axes: list[str], meaning: tuple[str, ...], own: str) -> None:
    """As long as no axis of the sum cuts the result."""
    of = {m: ".".join(a for a, n in zip(axes, meaning, strict=True) if n == m) for m in meaning}
    summed, rows, columns = (of.get(name) or "-" for name in ("sum", "rows", "columns"))
    dims = [".".join(a for a in dim.split(".") if a not in summed) or "-" for dim in own.split(",")]
    left, right, result = (f"{summed},{rows}", f"{summed},{columns}", ",".join(dims))
    assert not concerned(tiles(left), tiles(right), tiles(result), summed=[(0, 0)])


def test_factors_that_disagree_may_be_wrong_without_the_sums_axes() -> None:
    """On four axes: `[a, c.b] x [c, b.a] -> [-, d]`."""
    mesh = Mesh.arange((2, 2, 2, 2), ("a", "b", "c", "d"))
    left, right = tiles("a,c.b", mesh), tiles("c,b.a", mesh)
    assert concerned(left, right, tiles("-,d", mesh), summed=[(0, 0)])
    assert not concerned(left, right, tiles("-,b.a", mesh), summed=[(0, 0)], num_axes=2)
