"""Mesh.digits against what digits mean, and against brute force."""

import itertools
import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mesh_utils import Digit, Mesh

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


def coordinate_of(digit_input: int, digits: tuple[Digit, ...]) -> int:
    """How far a coordinate moves the position, straight from what digits mean."""
    moved, inner = 0, 1
    for size, stride in reversed(digits):
        moved += digit_input // inner % size * stride
        inner *= size
    return moved


def positions_by_digits(mesh: Mesh, digits: tuple[tuple[Digit, ...], ...]) -> list[int]:
    return [
        sum(coordinate_of(c, axis_digits) for c, axis_digits in zip(at, digits, strict=True))
        for at in itertools.product(*map(range, mesh.mesh_shape))
    ]


def test_digits_by_hand() -> None:
    assert MESH.digits() == (((2, 4),), ((4, 1),))
    assert MESH["tp"].digits() == (((4, 1),),)
    assert MESH["dp"].digits() == (((2, 4),),)
    assert MESH["tp", "dp"].digits() == (((4, 1),), ((2, 4),))
    assert MESH["tp", "dp"].flattened(("tp", "dp"), "x").digits() == (((4, 1), (2, 4)),)
    assert MESH.slice(dp=1).digits() == (((4, 1),),)
    assert MESH.flattened(("dp", "tp"), "x").digits() == (((8, 1),),)
    assert Mesh.arange((1, 8, 1)).digits() == ((), ((8, 1),), ())
    assert Mesh([7], (1,)).digits() == ((),)
    three = Mesh.arange((2, 3, 4), ("pp", "dp", "tp"))
    assert three["pp", "tp"].flattened(("pp", "tp"), "x").digits() == (((2, 12), (4, 1)),)


def test_digits_relative_to_another_root() -> None:
    # The order 0 2 4 6 1 3 5 7 seen from MESH: axis "a" makes steps of 1, "b" steps of 2.
    mesh = Mesh([0, 2, 4, 6, 1, 3, 5, 7], (2, 4), ("a", "b"))
    assert mesh.digits() == (((2, 4),), ((4, 1),))
    assert mesh.digits(MESH) == (((2, 1),), ((4, 2),))
    assert mesh.positions(MESH).tolist() == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert mesh["b"].digits(MESH) == (((4, 2),),)
    assert mesh.slice(a=1).digits(MESH) == (((4, 2),),)
    # Both orders are permutations of the ids: what counts is the place, not the id.
    shuffled = Mesh([5, 2, 7, 0, 1, 6, 3, 4], (8,))
    assert shuffled.digits(MESH) is None
    assert Mesh([5, 7, 1, 3, 2, 0, 6, 4], (2, 4)).digits(shuffled) == (((2, 1),), ((4, 2),))


def test_digits_are_none_where_there_are_none() -> None:
    assert Mesh([0, 1, 2, 4, 3, 5, 6, 7], (2, 4)).digits(MESH) is None
    assert Mesh(range(7, -1, -1), (8,)).digits(MESH) is None
    # The order as a whole is mixed-radix, but not along the axes of this shape.
    assert Mesh([0, 2, 4, 1, 3, 5], (3, 2)).digits(Mesh.arange((6,))) is None
    assert Mesh([0, 2, 4, 1, 3, 5], (2, 3)).digits(Mesh.arange((6,))) == (((2, 1),), ((3, 2),))


def test_digits_of_a_part_that_was_not_cut_out() -> None:
    assert Mesh.arange((4,)).digits(MESH) is None
    assert Mesh.arange((4,)).digits() == (((4, 1),),)
    # Cut out of a mesh over other devices than those of MESH, or of fewer.
    assert Mesh.arange((2, 2), ("a", "b"))["b"].digits(MESH) is None
    assert Mesh([0, 1, 2, 3, 4, 5, 6, 8], (2, 4), ("a", "b"))["b"].digits(MESH) is None
    # Its own walk is regular, but that of the mesh that it was cut out of is not.
    mesh = Mesh([0, 1, 2, 3, 4, 6, 5, 7], (2, 4), ("a", "b"))
    assert mesh["b"].digits() == (((4, 1),),)
    assert mesh["b"].digits(MESH) is None


@given(st.data())
def test_digits_of_cut_permuted_and_rearranged_meshes(data: st.DataObject) -> None:
    """Whatever is made out of a root, its digits give back the positions of its devices."""
    root = data.draw(meshes())
    mesh = root
    for step in range(data.draw(st.integers(0, 4))):
        mesh = rearrange(data, mesh, f"new{step}_")
    mesh.check_valid()
    assert_digits_are_right(mesh, root)


def rearrange(data: st.DataObject, mesh: Mesh, prefix: str) -> Mesh:
    how = data.draw(st.sampled_from(["select", "slice", "factor", "flatten"]))
    axis = data.draw(st.sampled_from(mesh.axis_names))
    size, index = mesh.size(axis), mesh.axis_index(axis)
    if how == "select":
        return mesh[tuple(data.draw(selections(mesh)))]
    if how == "slice" and mesh.ndim > 1:
        return mesh.slice({axis: data.draw(st.integers(0, size - 1))})
    if how == "factor":
        inner = data.draw(st.sampled_from([d for d in range(1, size + 1) if size % d == 0]))
        return mesh.factored({axis: ((prefix + "o", size // inner), (prefix + "i", inner))})
    last = data.draw(st.integers(index + 1, mesh.ndim))
    return mesh.flattened(mesh.axis_names[index:last], prefix + "f")


def assert_digits_are_right(mesh: Mesh, root: Mesh) -> None:
    digits = mesh.digits(root)
    positions = mesh.positions(root).reshape(-1)
    assert digits is not None
    assert positions_by_digits(mesh, digits) == (positions - positions[0]).tolist()
    for axis_digits, size in zip(digits, mesh.mesh_shape, strict=True):
        assert math.prod(s for s, _ in axis_digits) == size
        assert all(s > 1 for s, _ in axis_digits)
    assert mesh.digits(root) is digits, "not cached"
    # The stated digits of the flat position are free of each other.
    for size, stride in itertools.chain.from_iterable(digits):
        assert root.size() % (size * stride) == 0


@given(st.data())
def test_digits_of_another_order_over_the_same_devices(data: st.DataObject) -> None:
    root = data.draw(meshes())
    axes = data.draw(st.permutations(root.axis_names))
    ids = root[tuple(axes)].device_ids
    other = Mesh(ids, ids.shape, axes)  # a root of its own
    assert_digits_are_right(other, root)
    assert_digits_are_right(root, other)
    sub = other[data.draw(selections(other))]
    assert_digits_are_right(sub, root)
    assert sub.digits(root) == tuple(
        (other.digits(root) or ())[other.axis_index(axis)] for axis in sub.axis_names
    )


@given(st.permutations(range(8)), st.sampled_from([(8,), (2, 4), (4, 2), (2, 2, 2)]))
def test_digits_of_random_orders(order: list[int], shape: tuple[int, ...]) -> None:
    mesh, root = Mesh(order, shape), Mesh.arange((8,))
    digits = mesh.digits(root)
    if digits is not None:
        assert positions_by_digits(mesh, digits) == order
    elif order[0] == 0:
        # Brute force over all digits that a mesh of 8 can have, axis by axis.
        choices = [[d for d in ALL_DIGITS if math.prod(s for s, _ in d) == n] for n in shape]
        assert all(positions_by_digits(mesh, d) != order for d in itertools.product(*choices))


ALL_DIGITS = [
    digits
    for count in range(4)
    for digits in itertools.permutations([(2, 1), (2, 2), (2, 4), (4, 1), (4, 2), (8, 1)], count)
]
