"""OpShardings: their text, their meaning, and what each partition holds."""

from __future__ import annotations

import copy
import math
import pickle
import time
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from layout_strategies import (
    GROUPS,
    QUICK,
    THOROUGH,
    TYPES,
    cases,
    meshes,
    op_shardings,
    sliced,
    xla_positions,
)

from mesh_utils import Mesh, mixed_radix_positions
from xla_dtensor.core import Layout, OpSharding, OpShardingError
from xla_dtensor.core.layout import op_sharding_of_dims
from xla_dtensor.core.op_sharding import iota_form, iota_walk, merged, remaining_walk, split_walk


@st.composite
def respelled(draw: st.DrawFn, op: OpSharding) -> OpSharding:
    """The same meaning in another spelling."""
    assignment = op.tile_assignment
    ndim = assignment.ndim - len(op.subgroup_types)
    types = list(op.subgroup_types)
    order = sorted(range(len(types)), key=lambda i: (types[i], i))  # one type stays in order
    moved = draw(st.permutations(sorted(set(types)))) if types else []
    order = [i for kind in moved for i in order if types[i] == kind]
    assignment = assignment.transpose(*range(ndim), *(ndim + i for i in order))
    types = [types[i] for i in order]
    if "replicated" in types and draw(st.booleans()):
        axis = ndim + types.index("replicated")
        assignment = np.flip(assignment, axis)
    if draw(st.booleans()):
        assignment, types = assignment[..., None], [*types, draw(st.sampled_from(TYPES))]
    devices = tuple(assignment.reshape(-1).tolist())
    return OpSharding("tiled", assignment.shape, devices=devices, subgroup_types=tuple(types))


def meaning(op: OpSharding) -> Any:
    """Which tile each partition has, and its place in the manual and unreduced subgroups."""
    if not op.is_tiled:
        return op.kind
    ndim = op.tensor_ndim or 0
    sizes = op.tile_dims[ndim:]
    groups = {
        k: math.prod(s for t, s in zip(op.subgroup_types, sizes, strict=True) if t == k)
        for k in TYPES
    }
    if math.prod(op.tile_dims[:ndim]) == 1:
        kinds = [kind for kind, size in groups.items() if size > 1]
        if len(kinds) <= 1:
            return kinds[0] if kinds else "replicated"
    places = {}
    for coordinate in np.ndindex(op.tile_dims):
        device = int(op.tile_assignment[coordinate])
        tile, rest = coordinate[:ndim], coordinate[ndim:]
        inner = {}
        for kind in ("manual", "unreduced"):
            own = [i for i, t in enumerate(op.subgroup_types) if t == kind]
            flat = 0
            for i in own:
                flat = flat * sizes[i] + rest[i]
            inner[kind] = flat
        places[device] = (tile, inner["manual"], inner["unreduced"])
    return (op.tile_dims[:ndim], groups, places)


@THOROUGH
@given(op=op_shardings())
def test_text_comes_back(op: OpSharding) -> None:
    again = OpSharding.parse(str(op))
    assert again == op
    assert str(again) == str(op)
    assert OpSharding.parse(str(op.canonical())) == op


@THOROUGH
@given(data=st.data())
def test_equality_is_equality_of_meaning(data: st.DataObject) -> None:
    one = data.draw(op_shardings())
    same = data.draw(respelled(one))
    assert meaning(one) == meaning(same)
    assert one == same
    assert hash(one) == hash(same)
    assert str(one.canonical()) == str(same.canonical())
    other = data.draw(op_shardings())
    assert (one == other) == (meaning(one) == meaning(other))
    assert one != other or hash(one) == hash(other)


@THOROUGH
@given(op=op_shardings())
def test_canonical_is_idempotent_and_shortest(op: OpSharding) -> None:
    canonical = op.canonical()
    assert canonical.canonical() is canonical
    assert op.canonical() is canonical
    assert meaning(canonical) == meaning(op)
    if canonical.is_tiled:
        again = OpSharding.from_assignment(canonical.tile_assignment, canonical.subgroup_types)
        assert str(again) == str(canonical)


@pytest.mark.parametrize("group", GROUPS)
@THOROUGH
@given(data=st.data())
def test_shard_index_follows_ceil_tiles(group: str, data: st.DataObject) -> None:
    """Against the tile assignment, looked up; meshes of up to thousands of devices, uneven dims."""
    case = data.draw(cases(group, large=data.draw(st.booleans())))
    op = case.layout.op_sharding(case.root)
    if not op.is_tiled:
        whole = tuple(slice(0, n) for n in case.shape)
        assert op.shard_index(0, case.shape) == whole
        return
    ndim = case.layout.ndim
    assert op.tensor_ndim == ndim
    assert op.num_devices == case.root.size()
    tiles = tuple(op.num_tiles(dim) for dim in range(ndim))
    coordinate = tuple(data.draw(st.integers(0, n - 1)) for n in op.tile_dims)
    partition = int(op.tile_assignment[coordinate])
    found = sliced(op.shard_index(partition, case.shape), case.shape)
    assert found == [p.tolist() for p in xla_positions(coordinate[:ndim], tiles, case.shape)]


@pytest.mark.parametrize("group", GROUPS)
@QUICK
@given(data=st.data())
def test_layouts_give_the_canonical_form(group: str, data: st.DataObject) -> None:
    """What is written from digits is what would be found in the listed tile assignment."""
    case = data.draw(cases(group, large=data.draw(st.booleans())))
    op = case.layout.op_sharding(case.root)
    if not op.is_tiled:
        return
    assert str(OpSharding.from_assignment(op.tile_assignment, op.subgroup_types)) == str(op)
    assert sorted(op.tile_assignment.reshape(-1).tolist()) == list(range(case.root.size()))
    if case.layout.mesh.digits(case.root) is not None:
        assert op.devices is None


@QUICK
@given(data=st.data())
def test_digits(data: st.DataObject) -> None:
    """Merging keeps the walk, iota_form inverts iota_walk, a rest completes a walk."""
    mesh = data.draw(meshes("permuted order", large=True))
    shape = mesh.mesh_shape
    perm = data.draw(st.permutations(range(len(shape))))
    walk = iota_walk(shape, perm)
    count = math.prod(shape)
    expected = np.arange(count).reshape(shape).transpose(perm).reshape(-1)
    assert np.array_equal(mixed_radix_positions(walk), expected)
    assert np.array_equal(mixed_radix_positions(merged(walk)), expected)
    assert merged(iota_walk(*iota_form(walk))) == merged(walk)
    used = [digit for digit in walk if data.draw(st.booleans())]
    rest = remaining_walk(used, count)
    assert rest is not None
    together = np.sort(mixed_radix_positions([*used, *rest]))
    assert np.array_equal(together, np.arange(count))
    for inner in range(1, count + 1):
        cut = split_walk(walk, inner)
        if cut is not None:
            assert merged([*cut[0], *cut[1]]) == merged(walk)
            assert mixed_radix_positions(cut[1]).size == inner


@pytest.mark.parametrize("size", [8, 4096, 262_144])
def test_any_size_takes_constant_space_and_little_time(size: int) -> None:
    mesh = Mesh.arange((2, size // 8, 4), ("pp", "dp", "tp"))
    mesh.digits()

    def translate() -> tuple[OpSharding, float]:
        started = time.perf_counter()
        dims = Layout(mesh, (("tp", "dp"), ())).dims
        return op_sharding_of_dims(dims, mesh, mesh), time.perf_counter() - started

    op, _ = translate()
    assert op.devices is None
    assert op.num_tiles(0) == size // 2
    # Tens of microseconds; a list of the devices would take far longer than this loose limit.
    assert min(translate()[1] for _ in range(20)) < 0.001
    tracemalloc.start()
    try:
        translate()
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 20_000


def test_no_list_until_it_is_needed() -> None:
    order = np.random.default_rng(0).permutation(64)
    op = Layout.parse("[dp, tp]", Mesh(order, (8, 8), ("dp", "tp"))).op_sharding(Mesh.arange((64,)))
    assert op.devices == tuple(order.tolist())
    assert op.shard_index(int(order[9]), (8, 8)) == (slice(1, 2), slice(1, 2))


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("{replicated}", "{replicated}"),
        ("{manual}", "{manual}"),
        ("{unknown}", "{unknown}"),
        ("{unreduced}", "{unreduced}"),
        ("{maximal device=3}", "{maximal device=3}"),
        (" { devices = [ 2, 4 ] <= [ 8 ] } ", "{devices=[2,4]<=[8]}"),
        ("{devices=[8,1]0,1,2,3,4,5,6,7}", "{devices=[8,1]<=[8]}"),
        ("{devices=[2,4]<=[2,4,1]T(1,0,2)}", "{devices=[2,4]<=[2,4]T(1,0)}"),
        ("{devices=[2]4,5}", "{devices=[2]4,5}"),
        ("{devices=[4]0,2,4,6}", "{devices=[4]0,2,4,6}"),
        ("{devices=[1,8]<=[8] last_tile_dim_replicate}", "{replicated}"),
        ("{devices=[1,8]<=[8] last_tile_dims={manual}}", "{manual}"),
        ("{devices=[1]<=[1]}", "{replicated}"),
        ("{devices=[1,1]3}", "{maximal device=3}"),
        (
            "{devices=[2,1,4]0,1,2,3,4,5,6,7 last_tile_dim_replicate}",
            "{devices=[2,1,4]<=[8] last_tile_dim_replicate}",
        ),
        (
            "{devices=[2,4]3,1,2,0,4,7,6,5 last_tile_dim_replicate}",
            "{devices=[2,4]<=[8] last_tile_dim_replicate}",
        ),
        (
            "{devices=[1,2,2,2]<=[8] last_tile_dims={replicated,manual}}",
            "{devices=[1,2,2,2]<=[2,2,2]T(0,2,1) last_tile_dims={manual, replicated}}",
        ),
        (
            "{devices=[1,2,2,2]<=[8] last_tile_dims={unreduced, replicated, manual}}",
            "{devices=[1,2,2,2]<=[4,2]T(1,0) last_tile_dims={manual, unreduced, replicated}}",
        ),
        (
            '{devices=[2,4]<=[8] metadata={op_name="a}\\"b" source_line=3}}',
            "{devices=[2,4]<=[8]}",
        ),
        ('{replicated metadata={op_name="x"}}', "{replicated}"),
        (  # a copy group that is cut out of the middle of a digit, and has no digits when sorted
            "{devices=[2,3]<=[2,3]T(1,0) last_tile_dim_replicate}",
            "{devices=[2,3]0,1,3,2,4,5 last_tile_dim_replicate}",
        ),
    ],
)
def test_canonical_text(text: str, canonical: str) -> None:
    assert str(OpSharding.parse(text).canonical()) == canonical
    assert OpSharding.parse(text) == OpSharding.parse(canonical)


def test_manual_digits() -> None:
    op = OpSharding.from_digits((((2, 4),), ()), num_devices=8, manual=((2, 1),))
    assert str(op) == "{devices=[2,1,2,2]<=[2,2,2]T(0,2,1) last_tile_dims={manual, replicated}}"
    assert str(OpSharding.from_digits(((),), 8, manual=((8, 1),))) == "{manual}"
    assert str(OpSharding.from_digits(((), ()), 8)) == "{replicated}"


def test_maximal_and_replicated_indices() -> None:
    assert OpSharding.maximal(3).shard_index(3, (4, 2)) == (slice(0, 4), slice(0, 2))
    assert OpSharding.maximal(3).shard_index(2, (4, 2)) == (slice(0, 0), slice(0, 0))
    assert OpSharding.replicated().shard_index(77, (4,)) == (slice(0, 4),)
    assert OpSharding.replicated().num_tiles(5) == 1
    assert OpSharding.replicated().tensor_ndim is None


def test_scalar() -> None:
    op = OpSharding.parse("{devices=[4,2]<=[8] last_tile_dims={manual, replicated}}")
    assert op.tensor_ndim == 0
    assert op.shard_index(5, ()) == ()


def test_values_pickle_copy_and_hash() -> None:
    op = OpSharding.parse("{devices=[4,2]<=[2,4]T(1,0)}")
    hash(op)
    for again in (pickle.loads(pickle.dumps(op)), copy.deepcopy(op)):
        assert again == op
        assert hash(again) == hash(op)
    assert repr(op) == "OpSharding('{devices=[4,2]<=[2,4]T(1,0)}')"
    assert op != "{devices=[4,2]<=[2,4]T(1,0)}"


# Errors, by their full text.

TEXT_HELP = "Pass XLA's text of one tensor, e.g. '{devices=[2,1,4]<=[8] last_tile_dim_replicate}'."
TEXT_ERRORS = {
    "devices=[2]<=[2]": "Its braces are missing or not balanced",
    "{devices=[2]<=[2]": "Its braces are missing or not balanced",
    "{devices=[2]<=[2]}}": "Its braces are missing or not balanced",
    "": "Its braces are missing or not balanced",
    "{}": "It names no kind of sharding and no devices",
    "{device=3}": "It names no kind of sharding and no devices",
    "{sharded}": "'sharded' is unknown there",
    "{devices=[2]<=[2] shard_as 1}": "'shard_as' is unknown there",
    "{{replicated}, {manual}}": "'{replicated},' is unknown there",
    "{devices=[2,4]}": "'devices=[2,4]' is unknown there",
    "{devices=[]<=[1]}": "'devices=[]<=[1]' is unknown there",
    "{devices=[2]<=[2]T(x)}": "'T(x)' is unknown there",
    "{replicated manual}": "It says twice what its kind is",
}


@pytest.mark.parametrize("text", TEXT_ERRORS)
def test_refuses_text(text: str) -> None:
    with pytest.raises(OpShardingError) as error:
        OpSharding.parse(text)
    assert str(error.value) == (
        f"The sharding text {text!r} was to be read. {TEXT_ERRORS[text]}. {TEXT_HELP}"
    )


GRID_HELP = "Pass the tensor's tiles, then the size of each subgroup."
ERRORS = {
    "wrong product of an iota": (
        lambda: OpSharding.parse("{devices=[2,2]<=[8]}"),
        "tile_dims=(2, 2) over an iota of reshape_dims=(8,) were asked for. "
        "The tile dims hold 4 places, the iota has 8 devices. Pass dims with one product.",
    ),
    "wrong length of a list": (
        lambda: OpSharding.parse("{devices=[2,2]0,1,2}"),
        "tile_dims=(2, 2) over a list of 3 devices were asked for. "
        "The tile dims hold 4 places. Pass one device per place.",
    ),
    "duplicate device": (
        lambda: OpSharding.parse("{devices=[3]0,1,1}"),
        "tile_dims=(3,) over a list of 3 devices were asked for. "
        "Device 1 is negative or stands there twice. Pass distinct ids, 0 or higher.",
    ),
    "no permutation": (
        lambda: OpSharding.parse("{devices=[8]<=[2,4]T(0,0)}"),
        "transpose_perm=(0, 0) for reshape_dims=(2, 4) was asked for. "
        "It is no permutation of their positions. Pass each of 0..1 once.",
    ),
    "unknown subgroup type": (
        lambda: OpSharding.parse("{devices=[8]<=[8] last_tile_dims={shared}}"),
        "tile_dims=(8,) with subgroup_types=('shared',) were asked for. "
        "'shared' is no subgroup type. Pass manual, unreduced, replicated.",
    ),
    "more subgroups than dims": (
        lambda: OpSharding.parse("{devices=[8]<=[8] last_tile_dims={manual, manual}}"),
        "tile_dims=(8,) with subgroup_types=('manual', 'manual') were asked for. "
        f"Each tile dim is 1 or more, and each subgroup type names one of the last. {GRID_HELP}",
    ),
    "tile dim of 0": (
        lambda: OpSharding.parse("{devices=[0]<=[8]}"),
        "tile_dims=(0,) with subgroup_types=() were asked for. "
        f"Each tile dim is 1 or more, and each subgroup type names one of the last. {GRID_HELP}",
    ),
    "both an iota and a list": (
        lambda: OpSharding("tiled", (2,), (2,), (0,), devices=(0, 1)),
        "reshape_dims=(2,) and a list of 2 devices were asked for. A tile assignment is one or the "
        "other. Pass reshape_dims with transpose_perm, or devices.",
    ),
    "unknown kind": (
        lambda: OpSharding("sharded"),
        "An OpSharding of kind='sharded' was asked for. XLA has no such kind. "
        "Pass one of tiled, replicated, maximal, manual, unreduced, unknown.",
    ),
    "maximal without a device": (
        lambda: OpSharding.parse("{maximal}"),
        "A maximal OpSharding with device=None was asked for. "
        "It needs the one device that holds the tensor. Pass device=0 or higher.",
    ),
    "subgroups of a replicated one": (
        lambda: OpSharding.parse("{replicated last_tile_dim_replicate}"),
        "A replicated OpSharding with tile dims, devices or subgroups was asked for. "
        "Only a tiled one has any. Pass kind='tiled', or leave them out.",
    ),
    "digits of no mesh": (
        lambda: OpSharding.from_digits((((3, 1),),), num_devices=8),
        "Digits (((3, 1),),) with manual=() were asked for on 8 devices. "
        "They are no distinct mixed-radix digits of that range. "
        "Pass digits (size, stride) from Mesh.digits(root).",
    ),
    "partition id too high": (
        lambda: OpSharding.parse("{devices=[8]<=[8]}").shard_index(8, (8,)),
        "The tile of partition_id=8 under {devices=[8]<=[8]} was asked for. That partition is not "
        "in its tile assignment. Pass one of its 8 partition ids.",
    ),
    "partition id negative": (
        lambda: OpSharding.parse("{devices=[8]<=[8]}").shard_index(-1, (8,)),
        "The tile of partition_id=-1 under {devices=[8]<=[8]} was asked for. That partition is not "
        "in its tile assignment. Pass one of its 8 partition ids.",
    ),
    "partition id not in the list": (
        lambda: OpSharding.parse("{devices=[2]4,5}").shard_index(0, (8,)),
        "The tile of partition_id=0 under {devices=[2]4,5} was asked for. That partition is not "
        "in its tile assignment. Pass one of its 2 partition ids.",
    ),
    "shape of another rank": (
        lambda: OpSharding.parse("{devices=[8]<=[8]}").shard_index(0, (8, 2)),
        "The tiles of shape=(8, 2) under {devices=[8]<=[8]} were asked for. "
        "The shape has 2 dims, the sharding 1. Pass a shape of the sharding's rank.",
    ),
    "shard of a manual one": (
        lambda: OpSharding("manual").shard_index(0, (8,)),
        "The tile shape of {manual} was asked for. A manual sharding does not cut a tensor into "
        "tiles. Ask only where the kind is tiled or replicated.",
    ),
    "tiles of an unknown one": (
        lambda: OpSharding("unknown").num_tiles(0),
        "The number of tiles of {unknown} was asked for. An unknown sharding does not cut a tensor "
        "into tiles. Ask only where the kind is tiled or replicated.",
    ),
    "assignment of a replicated one": (
        lambda: OpSharding.replicated().tile_assignment,
        "The tile assignment of {replicated} was asked for. It has no tiles. "
        "Ask only where is_tiled is True.",
    ),
    "dim out of range": (
        lambda: OpSharding.parse("{devices=[8]<=[8]}").num_tiles(1),
        "The tiles along dim=1 of {devices=[8]<=[8]} were asked for. It has 1 tensor dims. "
        "Pass a dim from -1 to 0.",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_error(name: str) -> None:
    ask, message = ERRORS[name]
    with pytest.raises(OpShardingError) as error:
        ask()
    assert str(error.value) == message
    assert isinstance(error.value, ValueError)
