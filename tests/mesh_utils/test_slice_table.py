"""SliceTable: what is real, what wraps, what can be twisted, what is nearest."""

from __future__ import annotations

import math

import pytest

from mesh_utils import chips, find_chip
from mesh_utils.hardware import Shape3, SliceTable

ALL = (True, True, True)
NONE = (False, False, False)


def table(name: str) -> SliceTable:
    return find_chip(name).slices


@pytest.mark.parametrize(
    ("name", "shape", "wrap"),
    [
        ("v5p", (2, 2, 1), NONE),
        ("v5p", (2, 2, 4), NONE),
        ("v5p", (2, 4, 4), NONE),
        ("v5p", (4, 4, 4), ALL),
        ("v5p", (4, 4, 16), ALL),
        ("v5p", (16, 20, 28), ALL),
        ("v4", (8, 4, 4), ALL),
        ("tpu7x", (16, 24, 24), ALL),
        ("v5e", (4, 8, 1), NONE),
        ("v5e", (8, 16, 1), (False, True, False)),
        ("v6e", (16, 16, 1), (True, True, False)),
        ("v2", (2, 2, 1), NONE),
        ("v2", (4, 4, 1), None),
        ("v2", (16, 16, 1), (True, True, False)),
        ("v3", (16, 16, 1), None),
        ("v3", (32, 32, 1), (True, True, False)),
        ("h100", (8, 1, 1), NONE),
        ("v5p", (4, 4, 6), None),
        ("v5e", (4, 2, 1), NONE),
        ("v6e", (16, 12, 1), (True, False, False)),
        ("v6e", (32, 16, 1), None),
    ],
)
def test_wrap(name: str, shape: Shape3, wrap: tuple[bool, bool, bool] | None) -> None:
    assert table(name).wrap(shape) == wrap


def test_wrap_of_every_listed_slice_follows_its_rule() -> None:
    for name in ("v4", "v5p", "tpu7x"):
        for shape in table(name).shapes:
            cubes = all(size % 4 == 0 for size in shape)
            assert table(name).wrap(shape) == (ALL if cubes else NONE)
    for name in ("v5e", "v6e"):
        for shape in table(name).shapes:
            assert table(name).wrap(shape) == tuple(size == 16 for size in shape)


@pytest.mark.parametrize(
    ("name", "shape", "real"),
    [
        ("v5p", (8, 4, 4), False),
        ("v4", (8, 4, 4), True),
        ("v5p", (16, 16, 36), False),
        ("v4", (16, 16, 20), False),
        ("v5e", (4, 2, 1), False),
        ("v5e", (1, 1, 1), True),
        ("v3", (4, 8, 1), True),
        ("v2", (4, 8, 1), False),
        ("gb200", (36, 1, 1), True),
        ("gb200", (73, 1, 1), False),
        ("h100", (4, 2, 1), False),
    ],
)
def test_real(name: str, shape: Shape3, real: bool) -> None:
    assert table(name).is_real(shape) is real


@pytest.mark.parametrize(
    ("shape", "twists"),
    [
        ((4, 4, 8), True),
        ((4, 8, 8), True),
        ((8, 8, 16), True),
        ((8, 16, 16), True),
        ((12, 12, 24), True),
        ((4, 4, 4), False),
        ((4, 4, 16), False),
        ((4, 8, 16), False),
        ((2, 2, 4), False),
        ((2, 4, 4), False),
    ],
)
def test_twist(shape: Shape3, twists: bool) -> None:
    assert table("v5p").twists(shape) is twists
    assert table("v4").twists(shape) is twists
    assert not table("v5e").twists(shape)


def test_the_nearest_real_slices() -> None:
    assert table("v5e").nearest((4, 2, 1))[0] == (2, 4, 1)
    assert table("v5p").nearest((8, 4, 4))[0] == (4, 4, 8)
    assert table("v5p").nearest((4, 4, 4))[0] == (4, 4, 4)
    assert table("v5p").nearest_twisted((4, 4, 4)) == (4, 4, 8)
    assert table("v6e").nearest_twisted((4, 4, 1)) is None
    for chip in chips():
        near = chip.slices.nearest((5, 5, 5))
        assert all(chip.slices.is_real(shape) for shape in near)
        assert len(set(near)) == len(near)


def test_counts() -> None:
    assert table("v5p").of_chips(256) == (4, 8, 8)
    assert table("v5p").of_chips(257) is None
    assert table("v5p").nearest_counts(257) == (256, 320)
    assert table("v6e").nearest_counts(1000) == (256,)
    assert table("v6e").nearest_counts(0.5) == (1,)
    for chip in chips():
        counts = [math.prod(shape) for shape in chip.slices.shapes]
        assert counts == sorted(set(counts)), chip.name
