"""OpSharding back to Layout: the inverse of Layout.op_sharding, and None where there is none."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from layout_strategies import GROUPS, THOROUGH, axis_orders, cases, meshes

from mesh_utils import Mesh
from xla_dtensor.core import Layout, OpSharding, layout_of_op_sharding

MESH = Mesh.arange((2, 4), ("dp", "tp"))


@pytest.mark.parametrize("group", GROUPS)
def test_what_comes_back_means_the_same(group: str) -> None:
    @THOROUGH
    @given(cases(group))
    def check(case: object) -> None:
        layout = case.layout  # pyright: ignore
        for root in (None, case.root):  # pyright: ignore
            encoded = layout.op_sharding(root)
            found = layout_of_op_sharding(encoded, layout.mesh, layout.ndim, root)
            if has_parts(layout):
                assert found is None or found.op_sharding(root) == encoded
            else:
                assert found is not None
                assert found.op_sharding(root) == encoded
                assert found.dims == without_ones(layout)

    check()


def has_parts(layout: Layout) -> bool:
    """Whether an axis is cut in parts, so that no whole axes make the tiling."""
    return not all(isinstance(entry, str) for dim in layout.dims for entry in dim)


def without_ones(layout: Layout) -> tuple[tuple[object, ...], ...]:
    """The dims without axes of size 1, which cut nothing and leave no trace in the tiling."""
    return tuple(
        tuple(e for e in dim if layout.mesh.size(e) > 1)  # pyright: ignore
        for dim in layout.dims
    )


@st.composite
def submesh_layouts(draw: st.DrawFn) -> tuple[Layout, Mesh]:
    root = draw(meshes(draw(st.sampled_from(("size-1 axes", "permuted order")))))
    count = draw(st.integers(1, root.ndim))
    mesh = root[tuple(draw(st.permutations(root.axis_names))[:count])]
    return Layout(mesh, draw(axis_orders(mesh, "permuted order"))), root


@THOROUGH
@given(submesh_layouts())
def test_on_a_submesh(drawn: tuple[Layout, Mesh]) -> None:
    layout, root = drawn
    encoded = layout.op_sharding(root)
    found = layout_of_op_sharding(encoded, layout.mesh, layout.ndim, root)
    assert found is not None
    assert found.mesh == layout.mesh
    assert found.dims == without_ones(layout)


@pytest.mark.parametrize(
    ("text", "layout"),
    [
        ("{devices=[4,2]<=[2,4]T(1,0)}", "[tp, dp]"),
        ("{devices=[8,1]<=[8]}", "[dp.tp, -]"),
        ("{devices=[8,1]<=[2,4]T(1,0)}", "[tp.dp, -]"),
        ("{devices=[8,1]0,4,1,5,2,6,3,7}", "[tp.dp, -]"),
        ("{devices=[1,2,4]<=[8] last_tile_dim_replicate}", "[-, dp]"),
        ("{replicated}", "[-, -]"),
        ("{devices=[1,1,8]<=[8] last_tile_dim_replicate}", "[-, -]"),
    ],
)
def test_examples(text: str, layout: str) -> None:
    found = layout_of_op_sharding(OpSharding.parse(text), MESH, 2)
    assert found == Layout.parse(layout, MESH)


@pytest.mark.parametrize(
    "text",
    [
        "{devices=[4,2]<=[8]}",  # tp's outer half with dp on the rows
        "{devices=[2,1,4]<=[2,2,2]T(1,0,2) last_tile_dim_replicate}",  # half of tp
        "{devices=[2,2,2]<=[8] last_tile_dim_replicate}",  # halves of tp on a dim and on nothing
        "{devices=[8,1]7,6,5,4,3,2,1,0}",  # backwards
        "{devices=[8,1]0,1,2,3,4,5,7,6}",  # no strides at all
        "{devices=[2,2,2]0,1,2,3,4,5,7,6 last_tile_dim_replicate}",
        "{maximal device=0}",
        "{manual}",
        "{devices=[2,1,4]<=[8] last_tile_dims={manual}}",
        "{devices=[8]<=[8]}",  # of another rank
        "{devices=[2,2,2]<=[8]}",
        "{devices=[4,4]<=[16]}",  # of more devices
    ],
)
def test_a_tiling_that_follows_no_axes_is_none(text: str) -> None:
    assert layout_of_op_sharding(OpSharding.parse(text), MESH, 2) is None


def test_every_order_of_four_devices_is_found_or_refused() -> None:
    """Of all orders of 2 x 2 devices on one dim, those that follow the two axes are found."""
    mesh = Mesh.arange((2, 2), ("a", "b"))
    found = {
        order: layout_of_op_sharding(OpSharding("tiled", (4,), devices=order), mesh, 1)
        for order in itertools.permutations(range(4))
    }
    assert {order: str(layout) for order, layout in found.items() if layout is not None} == {
        (0, 1, 2, 3): "[a.b]",
        (0, 2, 1, 3): "[b.a]",
    }


def test_a_mesh_in_another_order_than_its_root() -> None:
    mesh = Mesh([[7, 6, 5, 4], [3, 2, 1, 0]], (2, 4), ("dp", "tp"))
    root = Mesh.arange((8,), ("all",))
    layout = Layout.from_partition_spec((("tp", "dp"), None), mesh)
    assert layout_of_op_sharding(layout.op_sharding(root), mesh, 2, root) == layout
    # By the mesh's own root the same text means other devices.
    assert layout_of_op_sharding(layout.op_sharding(root), mesh, 2) is None
