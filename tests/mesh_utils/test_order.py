"""Mixed-radix recognition against brute force."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh_utils import Digit, mixed_radix, mixed_radix_positions
from mesh_utils.mesh import are_nested, axis_digits

SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=5).filter(lambda s: math.prod(s) <= 600)


def factorizations(n: int) -> list[tuple[int, ...]]:
    """All ordered ways to write n as a product of factors above 1."""
    return (
        [()]
        if n == 1
        else [
            (first, *rest)
            for first in range(2, n + 1)
            if n % first == 0
            for rest in factorizations(n // first)
        ]
    )


def all_mixed_radix_orders(n: int) -> set[tuple[int, ...]]:
    """By brute force: iota of every shape, transposed in every way."""
    return {
        tuple(np.arange(n).reshape(shape).transpose(axes).reshape(-1).tolist())
        for shape in factorizations(n)
        for axes in itertools.permutations(range(len(shape)))
    }


@pytest.mark.parametrize("n", range(1, 9))
def test_of_all_permutations_exactly_the_mixed_radix_ones_are_recognised(n: int) -> None:
    orders = all_mixed_radix_orders(n)
    for permutation in itertools.permutations(range(n)):
        digits = mixed_radix(np.array(permutation))
        assert (digits is not None) == (permutation in orders), permutation
        if digits is not None:
            assert tuple(mixed_radix_positions(digits).tolist()) == permutation


@pytest.mark.parametrize("n", [12, 16, 24, 30, 36, 64])
def test_every_mixed_radix_order_of_larger_n_is_recognised(n: int) -> None:
    for order in all_mixed_radix_orders(n):
        digits = mixed_radix(np.array(order))
        assert digits is not None
        assert tuple(mixed_radix_positions(digits).tolist()) == order
        assert are_nested(digits)
        assert math.prod(size for size, _ in digits) == n


@given(st.data())
def test_transposed_iota_gives_its_fewest_digits(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    axes = data.draw(st.permutations(range(len(shape))))
    order = np.arange(math.prod(shape)).reshape(shape).transpose(axes).reshape(-1)
    digits = mixed_radix(order)
    assert digits is not None
    np.testing.assert_array_equal(mixed_radix_positions(digits), order)
    assert all(size > 1 for size, _ in digits)
    for (_, outer_stride), (size, stride) in itertools.pairwise(digits):
        assert outer_stride != size * stride, "two digits that are one"
    assert len(digits) <= sum(size > 1 for size in shape)


@given(st.data())
def test_one_swap_is_never_called_by_the_digits_of_the_old_order(data: st.DataObject) -> None:
    shape = data.draw(SHAPES.filter(lambda s: math.prod(s) > 1))
    axes = data.draw(st.permutations(range(len(shape))))
    order = np.arange(math.prod(shape)).reshape(shape).transpose(axes).reshape(-1).copy()
    i, j = data.draw(st.lists(st.integers(0, order.size - 1), min_size=2, max_size=2, unique=True))
    order[[i, j]] = order[[j, i]]
    digits = mixed_radix(order)
    if digits is not None:  # a swap can give another mixed-radix order: 0 1 2 3 -> 0 2 1 3
        np.testing.assert_array_equal(mixed_radix_positions(digits), order)


@given(st.permutations(range(24)))
def test_random_permutations(order: list[int]) -> None:
    digits = mixed_radix(np.array(order))
    if digits is None:
        assert tuple(order) not in ORDERS_24
    else:
        np.testing.assert_array_equal(mixed_radix_positions(digits), order)


ORDERS_24 = all_mixed_radix_orders(24)


@pytest.mark.parametrize(
    ("positions", "digits"),
    [
        ([0], ()),
        ([0, 1, 2, 3], ((4, 1),)),
        ([0, 2, 1, 3], ((2, 1), (2, 2))),
        ([0, 4, 8, 12], ((4, 4),)),  # part of a permutation: one axis of it
        ([0, 1, 8, 9], ((2, 8), (2, 1))),
        ([], None),
        ([1], None),
        ([1, 0], None),
        ([0, 0], None),
        ([1, 2, 3], None),
        ([3, 2, 1, 0], None),
        ([0, 1, 1, 2], None),  # digits add up, but share a place
        ([0, 1, 3, 4], None),  # digits add up, but 3 is no multiple of 2
        ([0, 1, 2, 4], None),
        ([0, 1, 2, 3, 5, 4], None),
        ([[0, 1], [2, 3]], None),  # not 1-D
    ],
)
def test_by_hand(positions: list[int], digits: tuple[Digit, ...] | None) -> None:
    assert mixed_radix(np.array(positions, np.int64)) == digits


@pytest.mark.parametrize("dtype", [np.int32, np.uint8, np.uint64])
def test_other_integer_types(dtype: type[np.integer]) -> None:
    assert mixed_radix(np.array([0, 2, 1, 3], dtype)) == ((2, 1), (2, 2))
    assert mixed_radix(np.array([0, 3, 1, 2], dtype)) is None


def test_the_argument_is_not_touched() -> None:
    positions = np.array([0, 2, 1, 3])
    positions.flags.writeable = False
    assert mixed_radix(positions) is not None


def test_reconstruct_of_no_digits_is_one_position() -> None:
    assert mixed_radix_positions(()).tolist() == [0]


def test_axis_digits_wants_axes_that_add_up() -> None:
    # Each line is fine, but the second row walks another way than the first.
    assert axis_digits(np.array([[0, 1, 2, 3], [4, 6, 5, 7]])) is None
    assert axis_digits(np.array([[0, 1], [4, 5]])) == (((2, 4),), ((2, 1),))
    assert axis_digits(np.array([[2, 3], [6, 7]])) == (((2, 4),), ((2, 1),))
    # Each line is fine and they add up, but the digits overlap.
    assert axis_digits(np.array([[0, 1], [1, 2]])) is None


@pytest.mark.parametrize(
    ("digits", "nested"),
    [
        ((), True),
        (((4, 1),), True),
        (((4, 3),), True),
        (((2, 4), (4, 1)), True),
        (((4, 1), (2, 4)), True),
        (((2, 3), (2, 1)), False),
        (((2, 1), (2, 1)), False),
        (((2, 0),), False),
        (((2, -1),), False),
    ],
)
def test_are_nested(digits: tuple[Digit, ...], nested: bool) -> None:
    assert are_nested(digits) is nested
