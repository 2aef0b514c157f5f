"""Assignment: the optimum against plain enumeration, never below JAX, and what it says of itself.

`every_mesh` is the oracle: it lists every way to hand out the chips of each dim, in every nesting,
by recursion, and asks Network for every span. Nothing of the search is used.
"""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh_utils import Network, Span, Topology, assign, axis_reports
from mesh_utils.assignment import mesh_score
from mesh_utils.jax_compat import create_device_mesh

PARTS = ("", "_input", "_places", "_reasons", "_search", "_table", "_walk")
MODULES = (*(f"assignment{part}" for part in PARTS), "jax_drop_in", "jax_mesh_functions")


def shapes(count: int, axes: int) -> Iterator[tuple[int, ...]]:
    """Every way to write a count as a product of sizes of 2 or more."""
    if axes == 1:
        yield from [(count,)] if count > 1 else []
        return
    for size in range(2, count // 2 + 1):
        if count % size == 0:
            yield from ((size, *rest) for rest in shapes(count // size, axes - 1))


def some_shapes(topology: Topology, count: int, most: int = 4) -> list[tuple[int, ...]]:
    every = [s for axes in range(1, most + 1) for s in shapes(topology.num_devices, axes)]
    return every if len(every) <= count else random.Random(repr(topology)).sample(every, count)


def ways(length: int, axes: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Every way to hand out one dim: (size, stride) for each axis."""

    def grow(left: int, stride: int, taken: dict[int, tuple[int, int]]) -> Any:
        if left == 1:
            yield tuple(taken.get(axis, (1, 1)) for axis in range(axes))
            return
        for axis in set(range(axes)) - set(taken):
            for size in range(2, left + 1):
                if left % size == 0:
                    yield from grow(left // size, stride * size, {**taken, axis: (size, stride)})

    yield from grow(length, 1, {})


def every_mesh(
    topology: Topology, shape: tuple[int, ...]
) -> Iterator[tuple[tuple[Span, ...], tuple[float, ...]]]:
    """The spans of every mesh of a shape, and what they get."""
    network = Network.of(topology)
    dims: list[list[Any]] = [list(ways(length, len(shape))) for length in topology.shape]
    cores = topology.devices_per_chip
    owners = range(len(shape)) if cores > 1 else [-1]
    for x, y, z, owner in itertools.product(*dims, owners):
        spans = tuple(
            Span(
                (x[axis][0], y[axis][0], z[axis][0]),
                (x[axis][1], y[axis][1], z[axis][1]),
                cores if axis == owner else 1,
            )
            for axis in range(len(shape))
        )
        if tuple(span.num_devices for span in spans) == shape:
            yield spans, tuple(network.links(span) for span in spans)


def assert_optimal(topology: Topology, shape: tuple[int, ...], weights: tuple[float, ...]) -> None:
    found = assign(topology, shape, weights=weights)
    scores = sorted(mesh_score(shape, weights, links) for _, links in every_mesh(topology, shape))
    assert found.is_exact
    assert found.score == pytest.approx(scores[-1], rel=1e-6), shape
    lower = [score for score in scores if score < scores[-1] * (1 - 1e-5)]
    if lower:
        assert found.runner_up is not None
        assert found.runner_up.score == pytest.approx(lower[-1], rel=1e-6), shape
    else:
        assert found.runner_up is None
    found.check_valid()


# --- the optimum ---------------------------------------------------------------------------------

ENUMERABLE = [
    *(("v5e", shape) for shape in ("2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")),
    *(("v5p", shape) for shape in ("2x2x1", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x4x12")),
    *(("tpu7x", shape) for shape in ("2x2x1", "2x2x2", "4x4x4")),
    ("v5p", "4x8x12"),
    ("v5p", "4x4x8_twisted"),
]


@pytest.mark.parametrize(("chip", "box"), ENUMERABLE)
def test_the_search_finds_the_optimum(chip: str, box: str) -> None:
    topology = Topology.parse(f"{chip}:{box}")
    for shape in some_shapes(topology, 6, most=3):
        weights = tuple(2.0**axis for axis in range(len(shape)))
        assert_optimal(topology, shape, weights)
        assert_optimal(topology, shape, weights[::-1])


@given(
    st.tuples(*[st.sampled_from([1, 2, 3, 4, 6, 9, 12])] * 2, st.sampled_from([1, 2, 3])),
    st.tuples(*[st.booleans()] * 3),
    st.sampled_from([1, 2]),
    st.data(),
)
def test_any_box_any_weights(
    box: tuple[int, int, int], wrap: tuple[bool, ...], cores: int, data: st.DataObject
) -> None:
    topology = Topology.synthetic(box, wrap=wrap, devices_per_chip=cores, chips_per_host=(1, 1, 1))
    every = [s for n in (1, 2, 3) for s in shapes(topology.num_devices, n)] or [(1,)]
    shape = data.draw(st.sampled_from(every))
    weights = data.draw(st.tuples(*[st.sampled_from([0.0, 1.0, 3.0, 50.0])] * len(shape)))
    if any(weight and size > 1 for weight, size in zip(weights, shape, strict=True)):
        assert_optimal(topology, shape, weights)


@pytest.mark.parametrize(
    ("name", "shape", "links"),
    [
        ("v5e:16x16", (16, 2, 8), (2.0, 1.0, 1.0)),
        ("v5e:16x16", (2, 128), (1.0, 2.0)),
        ("v5e:16x16", (64, 4), (1.0, 2.0)),
        ("v5p:16x16x16", (512, 8), (2.0, 2.0)),
        ("v5e:8x8", (16, 4), (1.0, 2.0)),
    ],
)
def test_meshes_that_are_known_to_be_better_than_jaxs(
    name: str, shape: tuple[int, ...], links: tuple[float, ...]
) -> None:
    found = assign(Topology.parse(name), shape)
    assert found.score >= mesh_score(shape, found.weights, links) - 1e-9
    assert found.links == pytest.approx(links)


@pytest.mark.parametrize(("rows", "columns", "shape"), [(2, 2, (64, 4)), (2, 4, (32, 8))])
def test_rings_of_blocks_that_people_make_by_hand(
    rows: int, columns: int, shape: tuple[int, int]
) -> None:
    """MaxText's hybrid_ring_64x4 and hybrid_ring_32x8: blocks of 2 x 2 and 2 x 4, each a ring."""
    topology = Topology.parse("v5e:16x16")
    blocks = np.arange(256).reshape(16 // rows, rows, 16 // columns, columns).swapaxes(1, 2)
    blocks[:, :, 1::2] = blocks[:, :, 1::2, ::-1]
    by_hand = axis_reports(topology, blocks.reshape(shape))
    assert by_hand[1].max_hops == 1
    for weights in ((1, 2), (1, 1), (1, 8), (4, 1)):
        found = assign(topology, shape, weights=weights)
        theirs = mesh_score(shape, weights, [report.links["all-gather"] for report in by_hand])
        assert found.score >= theirs - 1e-9
        if weights == (1, 8):
            assert found.reports[1].max_hops == 1


# --- beside JAX ----------------------------------------------------------------------------------


def assert_not_below_jax(topology: Topology, shape: tuple[int, ...]) -> bool:
    """Whether it is better."""
    found = assign(topology, shape)
    try:
        made = create_device_mesh(shape, topology, strategy="jax", allow_split_physical_axes=True)
    except (TypeError, ValueError):  # sizes with other factors than 2, in some versions
        return True
    ids = np.vectorize(lambda device: device.id, otypes=[int])(made)
    jax_links = [report.links["all-gather"] for report in axis_reports(topology, ids)]
    score = mesh_score(shape, found.weights, jax_links)
    assert found.score >= score * (1 - 1e-9), (topology, shape, score)
    read = [report.links["all-gather"] for report in axis_reports(topology, found.device_ids)]
    assert read == pytest.approx(found.links)
    return found.score > score * (1 + 1e-9)


BESIDE_JAX = [
    *("v5e:2x2", "v5e:2x4", "v5e:4x4", "v6e:8x8", "v6e:8x16", "v5e:16x16"),
    *("v4:2x2x1", "v5p:2x2x2", "v4:4x4x4", "v5p:4x4x8", "v5p:8x8x8", "v5p:4x8x12"),
    *("tpu7x:2x2x1", "tpu7x:2x2x2", "tpu7x:2x2x4", "tpu7x:4x4x4", "v3:2x2", "v2:16x16"),
]


@pytest.mark.parametrize("name", BESIDE_JAX)
def test_never_below_jax(name: str) -> None:
    pytest.importorskip("jax")
    topology = Topology.parse(name)
    for shape in some_shapes(topology, 12):
        assert_not_below_jax(topology, shape)


def test_better_than_jax_where_axes_share_dims() -> None:
    pytest.importorskip("jax")
    topology = Topology.parse("v5e:16x16")
    assert all(assert_not_below_jax(topology, shape) for shape in [(16, 2, 8), (2, 128), (64, 4)])
    assert not assert_not_below_jax(topology, (16, 16))


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["v5p:8x8x16", "v5p:16x16x16", "v4:8x12x16", "tpu7x:8x8x8"])
def test_never_below_jax_on_large_slices(name: str) -> None:
    pytest.importorskip("jax")
    topology = Topology.parse(name)
    for shape in some_shapes(topology, 25):
        assert_not_below_jax(topology, shape)


# --- size and time -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "shape", "seconds", "looks"),
    [
        ("v5p:16x20x28", (28, 40, 8), 2.0, 40_000),
        ("v5p:16x20x28", (10, 112, 8), 2.0, 40_000),
        ("v5p:16x16x16", (8, 8, 8, 8), 1.0, 400_000),
        ("tpu7x:16x24x24", (4, 24, 24, 8), 2.0, 1_000_000),
    ],
)
def test_pods_are_fast(name: str, shape: tuple[int, ...], seconds: float, looks: int) -> None:
    from mesh_utils.search import search_spans, span_table

    topology = Topology.parse(name)
    topology.places  # noqa: B018  # made once, whatever the mesh
    table = span_table(Network.of(topology))
    start = time.process_time()
    found = assign(topology, shape)
    assert time.process_time() - start < seconds
    assert found.is_exact
    result = search_spans(table, shape, found.weights)
    assert result is not None
    assert result.looks < looks


def test_many_axes_are_answered_and_said_to_be_no_optimum() -> None:
    topology = Topology.parse("v5p:16x16x32")
    found = assign(topology, (2,) * 13)
    assert not found.is_exact
    assert "the best that was found" in found.reasons[0]
    assert found.device_ids.size == 8192
    assert len(np.unique(found.device_ids)) == 8192


@settings(max_examples=10)  # a search each
@given(st.permutations([2, 2, 2, 2, 4, 4]))
def test_six_axes(shape: list[int]) -> None:
    found = assign(Topology.parse("v5e:16x16"), shape)
    assert found.is_exact
    assert found.score <= found.bound
    found.check_valid()


# --- what it says of itself ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["v5e:8x8", "v5p:4x4x8", "tpu7x:2x2x4", "2xv5e:4x4", "4xh100:8"])
def test_it_is_valid_and_deterministic(name: str) -> None:
    topology = Topology.parse(name)
    slices = topology.num_slices
    for inner in (
        some_shapes(Topology.parse(name.split("x", 1)[-1]), 5, most=3)
        if slices > 1
        else (some_shapes(topology, 5))
    ):
        outer = (slices, *(1,) * (len(inner) - 1))
        found = assign(topology, inner, outer)
        found.check_valid()
        again = assign(Topology.parse(name), list(inner), outer)
        assert np.array_equal(found.device_ids, again.device_ids)
        assert found.reasons == again.reasons
        assert 0 < found.score <= found.bound * (1 + 1e-9)
        assert [device.id for device in found.devices.reshape(-1)] == (
            found.device_ids.reshape(-1).tolist()
        )
        assert found.mesh.mesh_shape == found.mesh_shape
        with pytest.raises(ValueError, match="read-only"):
            found.device_ids[(0,) * len(inner)] = 5


def test_reasons() -> None:
    found = assign(Topology.parse("v5p-256"), (8, 16), axis_names=("fsdp", "tp"))
    assert found.reasons[0].startswith(
        "score 3.03 links modelled, 51 % of the bound of 6: the best"
    )
    assert found.reasons[1] == "fsdp=8 on Span(z8): 2 links (200 GB/s), a ring around a dim"
    assert found.reasons[2] == "tp=16 on Span(x4 y4): 4 links (400 GB/s), whole dims, all at once"
    assert found.reasons[3].startswith("runner-up: 2 links; there tp has 2 instead of 4")
    assert found.reasons[4].startswith("assumed: twist=False")
    assert not found.warnings
    alone = assign(Topology.parse("v5e:4x4"), (16,))
    assert alone.runner_up is None
    assert alone.reasons[-1] == "runner-up: none, every mesh of this shape has the same score"
    nothing = assign(Topology.parse("v5e:1x1"), (1,))
    assert nothing.score == math.inf
    assert nothing.reasons[:2] == (
        "score: nothing moves, no axis of more than one device has a weight",
        "0=1: one device, nothing moves",
    )


def test_weights_decide() -> None:
    topology = Topology.parse("v5e:16x16")
    names = ("fsdp", "tp")
    as_jax = assign(topology, (64, 4), axis_names=names, weights={"fsdp": 9e9, "tp": 1e6})
    assert as_jax.links == pytest.approx((2.0, 1.0))
    assert assign(topology, (64, 4), axis_names=names, weights=(0, 1)).links[1] == 2.0
    assert assign(topology, (64, 4), weights=np.array([1.0, 2.0])).links == pytest.approx(
        (1.0, 2.0)
    )


def test_an_axis_over_dcn_is_warned_of() -> None:
    topology = Topology.parse("2xv5e:4x4")
    found = assign(topology, (4, -1), (1, -1), axis_names=("dp", "tp"))
    assert found.mesh_shape == (4, 8)
    assert found.warnings == (found.reasons[-1],)
    assert found.warnings[0].startswith("tp=8 runs over DCN, while dp=4 gathers less and does not")
    assert not assign(topology, (4, 4), (2, 1)).warnings
    unknown = Topology.synthetic((4, 4), wrap=(False, False), num_slices=2)
    assert "no figure of DCN is known" in assign(unknown, (4, 4), (1, 2)).warnings[0]


def test_a_slice_is_one_block_of_the_mesh() -> None:
    topology = Topology.parse("4xv5e:4x4")
    found = assign(topology, (4, 4), (2, 2))
    for block, slice_index in zip(itertools.product((0, 1), repeat=2), range(4), strict=True):
        part = found.device_ids[block[0] * 4 : block[0] * 4 + 4, block[1] * 4 : block[1] * 4 + 4]
        assert (part // 100_000 == slice_index + 1).all()
        assert np.array_equal(part % 100_000, found.device_ids[:4, :4] % 100_000)
    other = assign(topology, (4, 4), (4, 1), slice_order=[2, 0, 3, 1])
    assert (other.device_ids[::4, 0] // 100_000).tolist() == [3, 1, 4, 2]


def test_whole_dims_only() -> None:
    topology = Topology.parse("v5p:4x4x8")
    found = assign(topology, (16, 8), allow_split_physical_axes=False)
    assert [str(span) for span in found.spans] == ["Span(x4 y4)", "Span(z8)"]
