"""What one device holds, by XLA's rule and by PyTorch's."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from layout_strategies import (
    GROUPS,
    QUICK,
    THOROUGH,
    cases,
    meshes,
    placement_lists,
    torch_positions,
)

from mesh_utils import Mesh
from xla_dtensor.core import Layout, LayoutError, LocalShape, local_shape, torch_indices

MESH = Mesh.arange((2, 2), ("dp", "tp"))


@pytest.mark.parametrize("group", GROUPS)
@QUICK
@given(data=st.data())
def test_xla_rule_is_the_shard_index(group: str, data: st.DataObject) -> None:
    case = data.draw(cases(group, large=data.draw(st.booleans())))
    mesh = case.layout.mesh
    coordinate = tuple(data.draw(st.integers(0, size - 1)) for size in mesh.mesh_shape)
    found = local_shape(case.layout, case.shape, coordinate)
    op = case.layout.op_sharding(case.root)
    index = op.shard_index(int(mesh.positions(case.root)[coordinate]), case.shape)
    assert found.offset == tuple(part.start for part in index)
    assert found.shape == tuple(part.stop - part.start for part in index)
    assert found.padded_shape == op.shape_per_tile(case.shape)


@pytest.mark.parametrize("group", GROUPS)
@THOROUGH
@given(data=st.data())
def test_torch_rule_is_nested_chunks(group: str, data: st.DataObject) -> None:
    """Uneven, strided, gaps: the positions, their number and the first one."""
    mesh = data.draw(meshes(group))
    tensor_ndim = data.draw(st.integers(0, 3))
    placements = data.draw(placement_lists(mesh, tensor_ndim))
    try:
        layout = Layout.from_placements(placements, tensor_ndim, mesh)
    except LayoutError:
        return
    placements = layout.to_placements()
    shape = tuple(data.draw(st.integers(0, 30)) for _ in range(tensor_ndim))
    coordinate = tuple(data.draw(st.integers(0, size - 1)) for size in mesh.mesh_shape)
    expected = torch_positions(placements, mesh, shape, coordinate)
    indices = torch_indices(layout, shape, coordinate)
    assert [i.tolist() for i in indices] == [e.tolist() for e in expected]
    found = local_shape(layout, shape, coordinate, rule="torch")
    assert found.shape == tuple(len(e) for e in expected)
    firsts = tuple(int(e[0]) if len(e) else n for e, n in zip(expected, shape, strict=True))
    assert found.offset == firsts
    longest = torch_positions(placements, mesh, shape, (0,) * mesh.ndim)
    assert found.padded_shape == tuple(len(positions) for positions in longest)
    assert min(found.padding, default=0) >= 0


def test_rules_agree_on_one_axis_and_differ_on_two() -> None:
    one = Layout.parse("[dp]", Mesh.arange((4,), ("dp",)))
    for extent in range(20):
        for index in range(4):
            assert local_shape(one, (extent,), (index,)) == local_shape(
                one, (extent,), (index,), rule="torch"
            )
    two = Layout.parse("[dp.tp]", MESH)
    coordinates = [(0, 0), (0, 1), (1, 0), (1, 1)]
    xla = [local_shape(two, (5,), c).shape[0] for c in coordinates]
    torch = [local_shape(two, (5,), c, rule="torch").shape[0] for c in coordinates]
    assert (xla, torch) == ([2, 2, 1, 0], [2, 1, 1, 1])


def test_empty_shards_start_at_the_end() -> None:
    layout = Layout.parse("[dp.tp, -]", MESH)
    assert local_shape(layout, (5, 3), (1, 1)) == LocalShape((0, 3), (5, 0), (2, 0))
    assert local_shape(layout, (1, 3), (1, 1), rule="torch") == LocalShape((0, 3), (1, 0), (1, 0))


def test_bytes() -> None:
    shard = LocalShape(shape=(1, 3), offset=(9, 0), padding=(2, 0))
    assert shard.size_bytes(2) == 6
    assert shard.padded_size_bytes(4) == 36
    scalar = local_shape(Layout.replicated(MESH, 0), (), (1, 1))
    assert scalar == LocalShape((), (), ())
    assert scalar.padded_size_bytes(8) == 8


def test_a_long_dim_is_not_walked() -> None:
    layout = Layout.parse("[~2.dp]", MESH)
    shape = (2**50,)
    assert local_shape(layout, shape, (1, 0), rule="torch").offset == (2**48,)


ERRORS = {
    "gap under XLA's rule": (
        lambda: local_shape(Layout.parse("[~4.dp]", MESH), (8,), (0, 0)),
        "The XLA shards of layout [~4.dp] were asked for. It has a gap of 4 outside a cut, so its "
        "shards are no tiles. Use rule='torch' and torch_indices.",
    ),
    "shape of another rank": (
        lambda: local_shape(Layout.parse("[dp]", MESH), (8, 2), (0, 0)),
        "The shard of shape=(8, 2) under layout [dp] was asked for. The shape has 2 dims, the "
        "layout 1. Pass a shape of the layout's rank.",
    ),
    "coordinate out of range": (
        lambda: torch_indices(Layout.parse("[dp]", MESH), (8,), (0, 2)),
        "The shard at coordinate=(0, 2) was asked for. The mesh with dp=2, tp=2 has no such "
        "coordinate. Pass one index per axis, each from 0 to its size - 1.",
    ),
    "coordinate of another length": (
        lambda: local_shape(Layout.parse("[dp]", MESH), (8,), (0,)),
        "The shard at coordinate=(0,) was asked for. The mesh with dp=2, tp=2 has no such "
        "coordinate. Pass one index per axis, each from 0 to its size - 1.",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_error(name: str) -> None:
    ask, message = ERRORS[name]
    with pytest.raises(LayoutError) as error:
        ask()
    assert str(error.value) == message
