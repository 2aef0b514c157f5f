"""Cuts of a lowered product's factors that agree."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from xla_dtensor.core.product_order import ProductDims

pytestmark = pytest.mark.only_on("jax")

SHAPES = (8, 8), (8, 8)


def mesh_named(name: str) -> Any:
    from xla_dtensor.runtimes.jax.arrays.products import MeshAxes

    return MeshAxes(name, {"x": 2, "y": 4}, np.arange(8).reshape(2, 4))


def test_parts_of_an_axis() -> None:
    """The outer half of y cuts the sum of one factor, all of y the columns of the other."""
    from xla_dtensor.runtimes.jax.arrays.products import Cut, Piece, agreed_cuts

    x, y, outer = Piece("x", 1, 2), Piece("y", 1, 4), Piece("y", 1, 2)
    mesh = mesh_named("m")
    left, right = Cut(mesh, ((x,), (outer,))), Cut(mesh, ((), (y,)))
    found = agreed_cuts(ProductDims.of_equation("mn,nk->mk"), left, right, SHAPES)
    assert [each.dims for each in found] == [((x,), (outer,)), ((outer,), ()), ((x,), ())]


def test_a_factor_on_another_mesh_is_gathered() -> None:
    from xla_dtensor.runtimes.jax.arrays.products import Cut, Piece, agreed_cuts

    x, y = Piece("x", 1, 2), Piece("y", 1, 4)
    left, right = Cut(mesh_named("m"), ((x,), (y,))), Cut(mesh_named("n"), ((x,), (y,)))
    found = agreed_cuts(ProductDims.of_equation("mn,nk->mk"), left, right, SHAPES)
    assert [each.dims for each in found] == [((x,), (y,)), ((y,), ()), ((x,), ())]
    assert {each.mesh.name for each in found} == {"m"}


def test_axes_that_cut_together_are_one_part() -> None:
    from xla_dtensor.runtimes.jax.arrays.products import Cut, MeshAxes, Piece, num_parts

    mesh = MeshAxes("m", {"x": 2, "y": 2, "z": 4}, np.arange(16).reshape(2, 2, 4))
    x, y, z, outer = Piece("x", 1, 2), Piece("y", 1, 2), Piece("z", 1, 4), Piece("z", 1, 2)
    cases: list[tuple[int, list[tuple[tuple[Any, ...], ...]]]] = [
        (2, [((x, y), (z,)), ((), (x, y)), ((z,), ())]),
        (2, [((x,), (y, z)), ((), (x,)), ((y, z), ())]),
        (1, [((x, y, z), ()), ((), ()), ((), (x, y, z))]),
        (3, [((x, y), ()), ((), (y, x)), ((z,), ())]),
        (3, [((x, y), ()), ((x,), (y,)), ((z,), ())]),
        (3, [((x, y), ()), ((x, z), ()), ((), ())]),
        (3, [((x, y), (outer,)), ((z,), ()), ((), ())]),
        (2, [((x, y), (z,)), ((z,), ()), ((), ())]),
    ]
    for wanted, dims in cases:
        assert num_parts([Cut(mesh, each) for each in dims]) == wanted, dims
    manual = [Cut(mesh, ((y,), (z,)), frozenset("x"))] * 3
    assert num_parts(manual) == 2
