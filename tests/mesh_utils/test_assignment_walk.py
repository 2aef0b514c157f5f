"""The order of the chips of an axis: rows where XLA gathers over all dims at once, else snakes.

A plain rule of what libtpu was seen to compile stands beside the code's: a group of whole dims
that are all rings or pairs, not on a twisted torus; on tpu7x whole dims of any kind.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh_utils import Network, Span, Topology, assign
from mesh_utils.network import neighbour_shift
from mesh_utils.search import best_walk, gathers_at_once
from mesh_utils.span import span_groups

SLICES = [
    *("v2:16x16", "v5e:2x2", "v5e:2x4", "v5e:8x8", "v5e:8x16", "v6e:16x16"),
    *("v4:2x2x1", "v5p:2x2x2", "v5p:2x2x4", "v5p:2x4x4", "v5p:4x4x4", "v5p:4x4x12"),
    *("v5p:4x4x8_twisted", "tpu7x:2x2x1", "tpu7x:2x4x4", "tpu7x:4x4x4"),
]


def whole_spans(topology: Topology) -> list[Span]:
    """Every span of several whole dims."""
    found: list[Span] = []
    for taken in itertools.product((False, True), repeat=3):
        x, y, z = (size if took else 1 for size, took in zip(topology.shape, taken, strict=True))
        found += [Span((x, y, z), cores=cores) for cores in {1, topology.devices_per_chip}]
    network = Network.of(topology)
    return [span for span in found if network.strategy(span) == "whole dims"]


def is_in_rows(members: np.ndarray) -> bool:
    """Whether chips are counted through in some order of dims, each from 0 on."""
    inner_first = (members[:, list(order)].T for order in itertools.permutations(range(3)))
    return any(np.array_equal(np.lexsort(keys), np.arange(len(members))) for keys in inner_first)


@pytest.mark.parametrize("name", SLICES)
def test_whole_dims_are_in_rows_where_all_are_gathered_at_once(name: str) -> None:
    topology = Topology.parse(name)
    chip = name.partition(":")[0]
    wrap = topology.wrap
    assert wrap is not None
    for span in whole_spans(topology):
        closed = all(wraps or size < 3 for wraps, size in zip(wrap, span.sizes, strict=True))
        expected = chip == "tpu7x" or (closed and not topology.twist)
        assert gathers_at_once(Network.of(topology), span, chip) == expected, span


@given(st.sampled_from(SLICES), st.data())
def test_the_order_of_every_axis_and_no_score_depends_on_it(name: str, data: st.DataObject) -> None:
    topology = Topology.parse(name)
    network, chip = Network.of(topology), name.partition(":")[0]
    first = data.draw(st.sampled_from([n for n in range(1, 33) if topology.num_devices % n == 0]))
    rest = topology.num_devices // first
    second = data.draw(st.sampled_from([n for n in range(1, 33) if rest % n == 0]))
    shape = (first, second, rest // second)
    weights = data.draw(st.sampled_from([None, (4, 2, 1), (1, 1, 8)]))
    default, rings, rows = (
        assign(topology, shape, weights=weights, rings=rings) for rings in (None, True, False)
    )
    for found in (rings, rows):
        assert found.spans == default.spans
        assert (found.links, found.score) == (default.links, default.score)
        assert found.reasons == default.reasons
        found.check_valid()
    for axis, span in enumerate(default.spans):
        walk, shortest = default.walks[axis], rings.walks[axis]
        assert shortest.max_hops <= walk.max_hops <= rows.walks[axis].max_hops
        assert is_in_rows(rows.walks[axis].members)
        if gathers_at_once(network, span, chip):
            assert walk.kind == "rows"
            assert np.array_equal(walk.members, rows.walks[axis].members)
        else:
            assert np.array_equal(walk.members, shortest.members)
            assert walk.kind == best_walk(network, span).kind


@pytest.mark.parametrize("name", SLICES)
def test_rows_of_closed_dims_cost_a_permute_hops_and_no_bandwidth(name: str) -> None:
    topology = Topology.parse(name)
    network = Network.of(topology)
    for span in whole_spans(topology):
        if not gathers_at_once(network, span):
            continue
        starts = span_groups(span, network.shape)[:, :1]
        rows, snake = (
            neighbour_shift(network, starts + best_walk(network, span, rings).members)
            for rings in (False, True)
        )
        assert rows.links == snake.links, span
        assert (rows.max_hops, snake.max_hops) == (sum(n > 1 for n in span.sizes), 1), span


def test_a_gather_over_whole_dims_has_rows_and_a_permute_can_have_the_snake() -> None:
    topology = Topology.parse("v5p:4x4x8")
    assert [walk.kind for walk in assign(topology, (16, 8)).walks] == ["rows", "rows"]
    assert [walk.kind for walk in assign(topology, (16, 8), rings=True).walks] == ["snake", "rows"]
    assert [walk.max_hops for walk in assign(topology, (16, 8)).walks] == [2, 1]
    assert [walk.max_hops for walk in assign(topology, (16, 8), rings=True).walks] == [1, 1]
    # On 8 x 8 chips that do not wrap a ring is compiled, in whatever order.
    assert assign(Topology.parse("v5e:8x8"), (64,)).walks[0].max_hops == 1
    # A block is no whole dims.
    assert assign(Topology.parse("v5e:16x16"), (64, 4)).walks[1].kind == "snake"
