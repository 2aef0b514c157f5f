"""Layouts: round trips, meaning against a literal oracle, and the cases that others get wrong."""

from __future__ import annotations

import contextlib
import copy
import math
import pickle
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from layout_strategies import (
    GROUPS,
    QUICK,
    THOROUGH,
    Case,
    axis_orders,
    cases,
    meshes,
    placement_lists,
    sliced,
    torch_positions,
)

from mesh_utils import Mesh
from xla_dtensor.core import (
    OPEN,
    AxisPart,
    Gap,
    Layout,
    LayoutError,
    OpSharding,
    Partial,
    PlacementRecord,
    Replicate,
    Shard,
    StridedShard,
    torch_indices,
)

MESH = Mesh.arange((2, 4), ("dp", "tp"))


def layout_or_none(
    placements: list[PlacementRecord], tensor_ndim: int, mesh: Mesh
) -> Layout | None:
    """The layout, or None where an axis would cut across a free cut."""
    with contextlib.suppress(LayoutError):
        return Layout.from_placements(placements, tensor_ndim, mesh)
    with pytest.raises(LayoutError, match="neither number divides the other"):
        Layout.from_placements(placements, tensor_ndim, mesh)
    return None


@pytest.mark.parametrize("group", GROUPS)
@THOROUGH
@given(data=st.data())
def test_placements_come_back(group: str, data: st.DataObject) -> None:
    """placements -> Layout -> placements, split factors that are no mesh factor included."""
    mesh = data.draw(meshes(group, large=data.draw(st.booleans())))
    tensor_ndim = data.draw(st.integers(0, 5))
    placements = data.draw(placement_lists(mesh, tensor_ndim))
    layout = layout_or_none(placements, tensor_ndim, mesh)
    if layout is None:
        return
    back = layout.to_placements()
    assert Layout.from_placements(back, tensor_ndim, mesh) == layout
    idle = [i for i, size in enumerate(mesh.mesh_shape) if size == 1]
    exact = [(a, b) for i, (a, b) in enumerate(zip(placements, back, strict=True)) if i not in idle]
    assert all(a == b for a, b in exact)
    for index in idle:
        assert placements[index] == back[index] or (
            isinstance(placements[index], StridedShard) and back[index].is_shard()
        )
    layout.check_valid()


@pytest.mark.parametrize("group", GROUPS)
@THOROUGH
@given(data=st.data())
def test_meaning_of_placements(group: str, data: st.DataObject) -> None:
    """Each device has the elements that the placements, taken literally, leave it."""
    mesh = data.draw(meshes(group, large=data.draw(st.booleans())))
    tensor_ndim = data.draw(st.integers(1, 3))
    placements = data.draw(placement_lists(mesh, tensor_ndim))
    layout = layout_or_none(placements, tensor_ndim, mesh)
    if layout is None:
        return
    shape = []
    for dim in range(tensor_ndim):
        cut = [i for i, p in enumerate(placements) if p.is_shard(dim)]
        factors = [getattr(placements[i], "split_factor", 1) for i in cut]
        even = math.prod(mesh.mesh_shape[i] for i in cut) * math.prod(factors)
        uneven = group == "uneven shapes" and not any(factor > 1 for factor in factors)
        shape.append(data.draw(st.integers(0, 40)) if uneven else even)
    coordinate = tuple(data.draw(st.integers(0, size - 1)) for size in mesh.mesh_shape)
    expected = torch_positions(placements, mesh, tuple(shape), coordinate)
    found = torch_indices(layout, shape, coordinate)
    assert [f.tolist() for f in found] == [e.tolist() for e in expected]


@pytest.mark.parametrize("group", GROUPS[:4])
@THOROUGH
@given(data=st.data())
def test_tiles_are_what_the_placements_leave(group: str, data: st.DataObject) -> None:
    """OpSharding.shard_index against the placements taken literally, on the root's partitions."""
    case = data.draw(cases(group, large=data.draw(st.booleans())))
    mesh = case.layout.mesh
    placements = case.layout.to_placements()
    op = case.layout.op_sharding(case.root)
    positions = mesh.positions(case.root)
    for _ in range(3):
        coordinate = tuple(data.draw(st.integers(0, size - 1)) for size in mesh.mesh_shape)
        expected = torch_positions(placements, mesh, case.shape, coordinate)
        index = op.shard_index(int(positions[coordinate]), case.shape)
        assert sliced(index, case.shape) == [e.tolist() for e in expected]


@pytest.mark.parametrize("group", GROUPS)
@THOROUGH
@given(data=st.data())
def test_other_forms_come_back(group: str, data: st.DataObject) -> None:
    """Partition spec, aliases and text of layouts with whole axes; all four name one layout."""
    mesh = data.draw(meshes(group, large=data.draw(st.booleans())))
    layout = Layout(mesh, data.draw(axis_orders(mesh, group)))
    spec, aliases = layout.to_partition_spec(), layout.alias_placements
    assert Layout.from_partition_spec(spec, mesh) == layout
    assert Layout.from_partition_spec(spec, mesh).to_partition_spec() == spec
    if isinstance(mesh.axis_names[0], str):  # aliases are names
        assert Layout.from_aliases(aliases, mesh) == layout
        assert Layout.from_aliases(aliases, mesh).alias_placements == aliases
    assert Layout.parse(layout.text(), mesh) == layout
    assert hash(Layout.parse(str(layout), mesh)) == hash(layout)
    if 1 not in mesh.mesh_shape:
        assert Layout.from_placements(layout.to_placements(), layout.ndim, mesh) == layout
    again = Layout.from_placements(layout.to_placements(), layout.ndim, mesh)
    assert again.op_sharding() == layout.op_sharding()


@QUICK
@given(data=st.data())
def test_text_comes_back_with_everything_in_it(data: st.DataObject) -> None:
    mesh = data.draw(meshes("strided"))
    tensor_ndim = data.draw(st.integers(0, 4))
    layout = layout_or_none(data.draw(placement_lists(mesh, tensor_ndim)), tensor_ndim, mesh)
    if layout is None:
        return
    open_dims = frozenset(data.draw(st.sets(st.integers(0, 3)))) & set(range(tensor_ndim))
    layout = Layout(mesh, layout.dims, layout.partial, open_dims)
    assert Layout.parse(layout.text(), mesh) == layout
    assert Layout.parse(layout.text().replace(" ", ""), mesh) == layout


@QUICK
@given(case=cases("strided", large=True))
def test_factored_has_the_same_meaning(case: Case) -> None:
    whole = case.layout.factored()
    assert not any(isinstance(entry, AxisPart) for dim in whole.dims for entry in dim)
    assert whole.op_sharding(case.root) == case.layout.op_sharding(case.root)
    assert np.array_equal(
        whole.mesh.device_ids.reshape(-1), case.layout.mesh.device_ids.reshape(-1)
    )
    assert whole.to_partition_spec() is not None


# The cases that torch_xla 2.9 gets wrong without saying so.


def test_two_shards_of_one_dim() -> None:
    """[Shard(0), Shard(0)] cuts 8 ways; it is not Shard(0) on the last axis alone."""
    layout = Layout.from_placements([Shard(0), Shard(0)], 2, MESH)
    assert layout.dims == (("dp", "tp"), ())
    assert str(layout.op_sharding()) == "{devices=[8,1]<=[8]}"
    assert layout.op_sharding().shape_per_tile((16, 32)) == (2, 32)
    assert layout.to_placements() == (Shard(0), Shard(0))


def test_strided_shard() -> None:
    """[_StridedShard(0, 4), Shard(0)] is tp outside dp; it is not [Shard(0), Shard(0)]."""
    layout = Layout.from_placements([StridedShard(0, 4), Shard(0)], 1, MESH)
    assert layout.dims == (("tp", "dp"),)
    assert str(layout.op_sharding()) == "{devices=[8]<=[2,4]T(1,0)}"
    rows = [layout.op_sharding().shard_index(p, (8,))[0].start for p in range(8)]
    assert rows == [0, 2, 4, 6, 1, 3, 5, 7]
    assert layout != Layout.from_placements([Shard(0), Shard(0)], 1, MESH)


def test_permuted_device_order() -> None:
    """The mesh [[7, 6, 5, 4], [3, 2, 1, 0]]: device 7 has the first shard, in every form."""
    mesh = Mesh(range(7, -1, -1), (2, 4), ("dp", "tp"))
    layout = Layout.from_placements([Shard(0), Shard(1)], 2, mesh)
    root = Mesh.arange((8,))
    assert str(layout.op_sharding()) == "{devices=[2,4]<=[8]}"
    assert str(layout.op_sharding(root)) == "{devices=[2,4]7,6,5,4,3,2,1,0}"
    assert layout.op_sharding(root).shard_index(7, (2, 4)) == (slice(0, 1), slice(0, 1))


def test_order_by_columns_needs_no_list() -> None:
    mesh = Mesh(np.arange(8).reshape(2, 4).T, (4, 2), ("dp", "tp"))
    layout = Layout.from_placements([Shard(0), Replicate()], 1, mesh)
    op = layout.op_sharding(Mesh.arange((8,)))
    assert str(op) == "{devices=[4,2]<=[2,4]T(1,0) last_tile_dim_replicate}"


def test_named_specs() -> None:
    """Names are the layout; ("dp", None) is not read as replicated."""
    layout = Layout.from_partition_spec(("dp", None), MESH)
    assert layout.to_placements() == (Shard(0), Replicate())
    assert layout == Layout.from_partition_spec((0, None), MESH)
    both = Layout.from_partition_spec(((0, "tp"), None), MESH)
    assert both.to_placements() == (Shard(0), Shard(0))


# Straddling, gaps, axes of size 1.


def test_an_axis_in_parts() -> None:
    layout = Layout.from_placements([StridedShard(0, 2), Shard(0)], 1, MESH)
    assert layout.dims == ((AxisPart("tp", 2, 2), "dp", AxisPart("tp", 2, 1)),)
    assert str(layout) == "[tp/2%2.dp.tp%2]"
    assert str(layout.op_sharding()) == "{devices=[8]<=[2,2,2]T(1,0,2)}"
    assert str(layout.factored()) == "[tp_0.dp.tp_1]"


def test_names_of_factored_axes_are_new() -> None:
    mesh = Mesh.arange((2, 4, 2), ("dp", "tp", "tp_0"))
    layout = Layout.parse("[tp/2%2.dp.tp%2, tp_0]", mesh).factored()
    assert str(layout) == "[tp_0_.dp.tp_1, tp_0]"
    assert Layout.parse("[dp]", mesh).factored() is Layout.parse("[dp]", mesh)


def test_a_part_that_is_no_whole_digits_is_listed() -> None:
    """The axis walks the root in digits of 3 and 2, its parts are 2 and 3: no iota says that."""
    order = np.arange(6).reshape(3, 2).T.reshape(-1)
    mesh = Mesh(np.concatenate([order, order + 6]).reshape(2, 6), (2, 6), ("dp", "tp"))
    layout = Layout.parse("[tp/2%3.dp.tp%2]", mesh)
    op = layout.op_sharding(Mesh.arange((12,)))
    assert op.devices is not None
    expected = mesh.device_ids.reshape(2, 3, 2).transpose(1, 0, 2)
    assert np.array_equal(op.tile_assignment.reshape(-1), expected.reshape(-1))


def test_a_gap() -> None:
    layout = Layout.from_placements([StridedShard(0, 4), Replicate()], 2, MESH)
    assert layout.dims == ((Gap(4), "dp"), ())
    assert str(layout) == "[~4.dp, -]"
    assert layout.num_shards(0) == 2


def test_a_gap_taken_in_part() -> None:
    mesh = Mesh.arange((2, 2), ("dp", "tp"))
    layout = Layout.from_placements([StridedShard(0, 6), Shard(0)], 1, mesh)
    assert layout.dims == (("tp", Gap(3), "dp"),)


@pytest.mark.parametrize("factor", [2, 3, 4, 5])
def test_split_factor_of_an_axis_of_size_1(factor: int) -> None:
    """It means nothing, so it never makes a tiling impossible."""
    mesh = Mesh.arange((1, 6), ("dp", "tp"))
    for second in (Shard(0), Replicate(), StridedShard(0, 4)):
        layout = Layout.from_placements([StridedShard(0, factor), second], 1, mesh)
        if isinstance(second, StridedShard):
            continue
        expected = "{devices=[6]<=[6]}" if second == Shard(0) else "{replicated}"
        assert str(layout.op_sharding()) == expected
    fsdp = [StridedShard(0, 6), Shard(0)]
    assert Layout.from_placements(fsdp, 1, mesh).to_placements() == tuple(fsdp)


def test_axes_of_size_1_keep_their_place() -> None:
    mesh = Mesh.arange((1, 8), ("pp", "tp"))
    placements = (Shard(1), Shard(0))
    assert Layout.from_placements(placements, 2, mesh).to_placements() == placements
    assert Layout.from_partition_spec((("tp", "pp"), None), mesh).to_partition_spec() == (
        ("tp", "pp"),
        None,
    )


# Submeshes and roots.


def test_submesh_is_a_tensor_of_the_root() -> None:
    layout = Layout.from_placements([Shard(0)], 1, MESH["tp"])
    assert str(layout.op_sharding()) == "{devices=[4,2]<=[2,4]T(1,0) last_tile_dim_replicate}"
    assert layout.op_sharding() == Layout.from_aliases(("tp",), MESH).op_sharding()
    sliced_mesh = Layout.from_placements([Shard(0)], 1, MESH.slice(dp=1))
    assert sliced_mesh.op_sharding() == layout.op_sharding()


def test_submesh_of_a_mesh_in_any_order() -> None:
    order = [5, 0, 3, 6, 1, 7, 2, 4]
    root, mesh = Mesh.arange((8,)), Mesh(order, (2, 4), ("dp", "tp"))
    op = Layout.from_placements([Shard(0)], 1, mesh["tp"]).op_sharding(root)
    assert op == Layout.from_aliases(("tp",), mesh).op_sharding(root)
    assert op.tile_assignment.tolist() == np.sort(np.reshape(order, (2, 4)).T).tolist()


def test_mesh_of_some_devices_only() -> None:
    with pytest.raises(LayoutError) as error:
        Layout.parse("[0]", Mesh(range(4), (4,))).op_sharding(Mesh.arange((8,)))
    assert str(error.value) == (
        "An OpSharding on Mesh(0=4, devices=0..3) was asked for, in a program over "
        "Mesh(0=8, devices=0..7). The mesh has 4 of the program's 8 devices, and is no submesh of "
        "all of them. Pass a mesh over all devices, or one cut out of it by axis names."
    )


def test_partial_and_open_dims_are_no_part_of_the_op_sharding() -> None:
    layout = Layout.parse("[dp, -?] sum(tp)", MESH)
    assert layout.partial == (("tp", "sum"),)
    assert layout.op_sharding() == Layout.parse("[dp, -]", MESH).op_sharding()
    assert layout.to_partition_spec() == ("dp", OPEN)
    assert Layout.from_partition_spec(("dp", OPEN), MESH).open_dims == {1}
    assert layout != Layout.parse("[dp, -]", MESH)
    assert layout.to_placements() == (Shard(0), Partial("sum"))


def test_partial_is_kept_in_mesh_order() -> None:
    mesh = Mesh.arange((2, 2, 2), ("dp", "ep", "tp"))
    layout = Layout(mesh, ((),), (("tp", "sum"), ("dp", "avg")))
    assert str(layout) == "[-] avg(dp) sum(tp)"


def test_global_shape_and_shards() -> None:
    layout = Layout.parse("[dp.tp, -, -]", MESH)
    assert layout.get_global_shape((2, 3, 5)) == (16, 3, 5)
    assert [layout.num_shards(dim) for dim in (0, 1, -3)] == [8, 1, 8]
    assert layout.sharded_axes == ("dp", "tp")
    assert Layout.replicated(MESH, 2).sharded_axes == ()


def test_spec_may_be_shorter_than_the_tensor() -> None:
    assert str(Layout.from_partition_spec(("tp",), MESH, tensor_ndim=3)) == "[tp, -, -]"


def test_unnamed_axes() -> None:
    mesh = Mesh.arange((2, 4))
    layout = Layout.from_partition_spec(((1, 0), None), mesh)
    assert str(layout) == "[1.0, -]"
    assert Layout.parse("[1.0, -]", mesh) == layout
    assert Layout.from_partition_spec((1,), mesh[1]).dims == ((1,),)


def test_odd_axis_names() -> None:
    mesh = Mesh.arange((2, 4), ("data parallel", 'a"],b.'))
    layout = Layout(mesh, (('a"],b.', "data parallel"),), (), frozenset({0}))
    assert Layout.parse(str(layout), mesh) == layout


def test_values_pickle_copy_and_hash() -> None:
    layout = Layout.parse("[tp/2%2.dp.tp%2, -?]", MESH)
    for again in (pickle.loads(pickle.dumps(layout)), copy.deepcopy(layout)):
        assert again == layout
        assert hash(again) == hash(layout)
    assert repr(layout) == "Layout('[tp/2%2.dp.tp%2, -?]', Mesh(dp=2, tp=4, devices=0..7))"
    assert layout != "layout"
    assert pickle.loads(pickle.dumps(OPEN)) is OPEN
    assert Layout.from_partition_spec(("dp",), MESH) is Layout.from_partition_spec(("dp",), MESH)


def test_large_mesh_is_written_in_constant_space() -> None:
    mesh = Mesh.arange((4, 32, 64, 32), ("pp", "dp", "ep", "tp"))
    layout = Layout.from_placements([Replicate(), StridedShard(0, 32), Shard(1), Shard(0)], 2, mesh)
    op = layout.op_sharding()
    assert str(op) == "{devices=[1024,64,4]<=[4,2048,32]T(2,1,0) last_tile_dim_replicate}"
    assert op.devices is None
    assert op.shard_index(262143, (2048, 64)) == (slice(2046, 2048), slice(63, 64))


def test_core_needs_neither_torch_nor_jax() -> None:
    code = "import sys, xla_dtensor.core; print({'torch', 'jax', 'torch_xla'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


# Errors, by their full text.

UNKNOWN_SPEC = "Pass None, one of 'dp', 'tp', or a tuple of them."
ALIAS_HELP = (
    "Pass a tuple with one entry per tensor dim: \"None\", one of 'dp', 'tp', or a tuple of them."
)
TEXT_HELP = "Pass one entry per tensor dim, e.g. '[dp, tp, -]'."
TWICE = (
    "Axis 'tp' (size 4) was asked for twice in one layout. "
    "A mesh axis cuts one tensor dim, or is reduced over, once. Pass each axis once."
)
GAPPED = Layout.parse("[~4.dp, -]", MESH)
PARTED = Layout.parse("[tp/2%2.dp.tp%2, -]", MESH)

ERRORS = {
    "axis twice in a spec": (lambda: Layout.from_partition_spec(("tp", "tp"), MESH), TWICE),
    "axis twice in one entry": (lambda: Layout.from_aliases((("tp", "tp"),), MESH), TWICE),
    "axis cut and partial": (lambda: Layout(MESH, (("tp",),), (("tp", "sum"),)), TWICE),
    "axis whole and in parts": (lambda: Layout.parse("[tp, tp%4]", MESH), TWICE),
    "unknown axis": (
        lambda: Layout(MESH, (("ep",),)),
        "Axis 'ep' was asked for on a mesh with axes dp=2, tp=4. It is not one of them. "
        "Pass one of 'dp', 'tp'.",
    ),
    "unknown axis in a spec": (
        lambda: Layout.from_partition_spec(("ep", None), MESH),
        "partition_spec=('ep', None) was asked for. "
        f"Entry 'ep' for dim 0 is no axis of the mesh with dp=2, tp=4. {UNKNOWN_SPEC}",
    ),
    "axis position out of range": (
        lambda: Layout.from_partition_spec((None, 2), MESH),
        "partition_spec=(None, 2) was asked for. "
        f"Entry 2 for dim 1 is no axis of the mesh with dp=2, tp=4. {UNKNOWN_SPEC}",
    ),
    "bool in a spec": (
        lambda: Layout.from_partition_spec((True,), MESH),
        "partition_spec=(True,) was asked for. "
        f"Entry True for dim 0 is no axis of the mesh with dp=2, tp=4. {UNKNOWN_SPEC}",
    ),
    "spec too long": (
        lambda: Layout.from_partition_spec(("dp", None), MESH, tensor_ndim=1),
        "partition_spec=('dp', None) was asked for. It has 2 entries for a tensor of rank 1. "
        "Pass at most one entry per dim.",
    ),
    "spec is a string": (
        lambda: Layout.from_partition_spec("dp", MESH),
        "partition_spec='dp' was asked for. A string is one entry, not a spec. "
        "Pass a tuple with one entry per dim.",
    ),
    "aliases of wrong length": (
        lambda: Layout.from_aliases(("dp", "None"), MESH, tensor_ndim=3),
        "placements=('dp', 'None') were asked for as aliases. "
        f"It has 2 entries for a tensor of rank 3. {ALIAS_HELP}",
    ),
    "aliases mixed with a placement": (
        lambda: Layout.from_aliases(("dp", Shard(0)), MESH),
        "placements=('dp', Shard(dim=0)) were asked for as aliases. "
        f"Shard(dim=0), of type Shard, is not the name of an axis. {ALIAS_HELP}",
    ),
    "aliases with an int": (
        lambda: Layout.from_aliases(("dp", 1), MESH),
        "placements=('dp', 1) were asked for as aliases. "
        f"1, of type int, is not the name of an axis. {ALIAS_HELP}",
    ),
    "aliases with a list entry": (
        lambda: Layout.from_aliases((["dp", "tp"],), MESH),
        "placements=(['dp', 'tp'],) were asked for as aliases. "
        f"['dp', 'tp'], of type list, is not the name of an axis. {ALIAS_HELP}",
    ),
    "aliases as a list": (
        lambda: Layout.from_aliases(["dp", "None"], MESH),  # type: ignore[arg-type]
        "placements=['dp', 'None'] were asked for as aliases. "
        f"A list is not read as aliases. {ALIAS_HELP}",
    ),
    "None inside an alias tuple": (
        lambda: Layout.from_aliases((("dp", None),), MESH),
        "placements=(('dp', None),) were asked for as aliases. "
        f"None, of type NoneType, is not the name of an axis. {ALIAS_HELP}",
    ),
    "unknown alias": (
        lambda: Layout.from_aliases(("ep",), MESH),
        "placements=('ep',) were asked for as aliases. "
        f"'ep' is no axis of the mesh with dp=2, tp=4. {ALIAS_HELP}",
    ),
    "gap asked for as tiles": (
        GAPPED.op_sharding,
        "The OpSharding of a layout was asked for whose dim 0 is cut by (Gap(size=4), 'dp') on "
        "Mesh(dp=2, tp=4, devices=0..7). No mesh axis makes the 4-fold cut outside, so its shards "
        "are no tiles. Pass a split_factor that is the product of the sizes of later axes on that "
        "dim.",
    ),
    "gap asked for as a spec": (
        GAPPED.to_partition_spec,
        "The partition spec of a layout was asked for whose dim 0 is cut by (Gap(size=4), 'dp'). "
        "It can name whole axes only. Use placements, or Layout.factored() where only parts are in "
        "the way.",
    ),
    "cut and open asked for as a spec": (
        Layout.parse("[dp?]", MESH).to_partition_spec,
        "The partition spec of a layout was asked for whose dim 0 is cut by ('dp',) and open. "
        "A spec leaves a whole dim open or none of it. Read dims and open_dims instead.",
    ),
    "uneven split across a free factor": (
        lambda: Layout.from_placements([StridedShard(0, 3), Shard(0)], 1, MESH),
        "placements=[StridedShard(dim=0, split_factor=3), Shard(dim=0)] were asked for, with "
        "Shard(dim=0) on axis 'tp' (size 4). There it cuts 4 pieces across a cut into 3 that "
        "split_factor left free, and neither number divides the other. "
        "Pass a split_factor that is a product of the sizes of later axes on that dim.",
    ),
    "parts that placements cannot write": (
        lambda: Layout.parse("[dp, tp%2.tp/2%2]", MESH),
        "Parts [(2, 1), (2, 2)] of axis 'tp' (size 4) were asked for. They do not make up the "
        "axis, outermost first, on one tensor dim. "
        "Pass parts (size, inner) whose sizes multiply to the axis, down to inner=1.",
    ),
    "parts in an order that placements cannot write": (
        Layout.parse("[dp/2%2.tp.dp%2]", Mesh.arange((4, 2), ("dp", "tp"))).to_placements,
        "The placements of a layout were asked for whose dims are cut by "
        "((AxisPart(axis='dp', size=2, inner=2), 'tp', AxisPart(axis='dp', size=2, inner=1)),). "
        "PyTorch's placements cannot put the parts of an axis in that order. "
        "Use the layout itself, or the placements of Layout.factored().",
    ),
    "open dim out of range": (
        lambda: Layout(MESH, ((),), (), frozenset({1})),
        "open_dims=[1] were asked for in a layout of 1 dims. One of them is out of range. "
        "Pass dims counted from 0.",
    ),
    "shards of a dim out of range": (
        lambda: GAPPED.num_shards(2),
        "The shards of dim=2 of layout [~4.dp, -] were asked for. The layout has 2 dims. "
        "Pass a dim from -2 to 1.",
    ),
    "global shape of another rank": (
        lambda: GAPPED.get_global_shape((1,)),
        "The global shape of local_shape=(1,) under layout [~4.dp, -] was asked for. "
        "The shape has 1 dims, the layout 2. Pass a shape of the layout's rank.",
    ),
    "text without brackets": (
        lambda: Layout.parse("dp", MESH),
        "The layout text 'dp' was to be read. "
        f"It has no [...] with one entry per tensor dim. {TEXT_HELP}",
    ),
    "text with an unknown axis": (
        lambda: Layout.parse("[ep]", MESH),
        "The layout text '[ep]' was to be read. "
        f"'ep' is no axis of the mesh with dp=2, tp=4. {TEXT_HELP}",
    ),
    "text with an empty entry": (
        lambda: Layout.parse("[dp,,-]", MESH),
        "The layout text '[dp,,-]' was to be read. "
        f"'' is no axis, part of an axis, gap or '-'. {TEXT_HELP}",
    ),
    "text with a bad reduction": (
        lambda: Layout.parse("[-] sum tp", MESH),
        "The layout text '[-] sum tp' was to be read. "
        f"'sum tp' is no reduction such as sum(axis). {TEXT_HELP}",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_error(name: str) -> None:
    ask, message = ERRORS[name]
    with pytest.raises(LayoutError) as error:
        ask()
    assert str(error.value) == message
    assert isinstance(error.value, ValueError)


def test_parts_are_a_tiling_but_no_spec() -> None:
    assert isinstance(PARTED.op_sharding(), OpSharding)
    with pytest.raises(LayoutError, match="whole axes only"):
        _ = PARTED.alias_placements
