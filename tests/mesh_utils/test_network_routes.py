"""Links counted message by message, spans found in meshes, and what is reported of them."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh_utils import (
    HybridMesh,
    Mesh,
    Network,
    Span,
    Topology,
    axis_reports,
    jax_order,
    synthetic_devices,
)
from mesh_utils.network import exchange_load, neighbour_shift, ring_links
from mesh_utils.span import axis_groups, find_span, mesh_places, span_groups, span_members
from mesh_utils.topology import canonical, periods, shortest_ways
from tests.mesh_utils import link_simulation as simulation
from tests.mesh_utils.link_simulation import Chip, Torus

NAMES = ["v5e:4x8", "v5p:4x4x4", "v5p:4x4x8_twisted", "v6e:8x16"]


def network_of(name: str) -> Network:
    return Network.of(Topology.parse(name))


def torus_of(network: Network) -> Torus:
    return Torus(network.shape, network.wrap, network.twist)


def random_groups(network: Network, size: int, seed: int) -> np.ndarray[Any, Any]:
    chips = list(itertools.product(*(range(length) for length in network.shape)))
    random.Random(seed).shuffle(chips)
    return np.array(chips, np.int64).reshape(-1, size, 3)


def as_chips(groups: np.ndarray[Any, Any]) -> list[list[Chip]]:
    return [[tuple(chip) for chip in group] for group in groups.tolist()]  # type: ignore[misc]


# --- counted like the simulation -----------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_permute_in_any_order_equals_the_simulation(name: str) -> None:
    network = network_of(name)
    for seed in range(3):
        groups = random_groups(network, 8, seed)
        hops, load = simulation.shift(torus_of(network), as_chips(groups))
        found = neighbour_shift(network, groups)
        assert found.max_hops == hops
        assert found.links == pytest.approx(float(1 / load))


@pytest.mark.parametrize("name", NAMES)
def test_a_ring_in_any_order_equals_the_simulation(name: str) -> None:
    network = network_of(name)
    groups = random_groups(network, 4, 7)
    walked = simulation.gather_over_rings(torus_of(network), as_chips(groups))
    assert ring_links(network, groups) == pytest.approx(float(walked))


@pytest.mark.parametrize(
    ("name", "span"),
    [
        ("v5e:4x8", Span((4, 2, 1))),
        ("v5p:4x4x4", Span((2, 1, 4), (2, 1, 1))),
        ("v6e:8x16", Span((1, 8, 1), (1, 2, 1))),
        ("v6e:8x16", Span((2, 16, 1), (4, 1, 1))),
    ],
)
def test_an_exchange_that_is_counted_equals_the_closed_form(name: str, span: Span) -> None:
    network = network_of(name)
    counted = exchange_load(network, span_groups(span, network.shape))
    assert counted == pytest.approx(network.links(span, "all-to-all"))


def test_a_snake_is_never_worse_for_a_permute_than_counting_rows() -> None:
    network = network_of("v5p:4x4x4")
    for sizes in [(4, 4, 1), (2, 2, 2), (4, 2, 1), (2, 4, 4)]:
        rows = neighbour_shift(network, span_groups(Span(sizes), network.shape))
        snake = neighbour_shift(network, span_groups(Span(sizes, snake=True), network.shape))
        assert snake.max_hops <= rows.max_hops
        assert snake.links >= rows.links


def test_a_snake_steps_to_neighbours() -> None:
    for sizes, order in itertools.product([(3, 4, 2), (4, 1, 3)], itertools.permutations(range(3))):
        members = span_members(Span(sizes, order=order, snake=True))  # type: ignore[arg-type]
        assert (np.abs(np.diff(members, axis=0)).sum(axis=1) == 1).all()
        assert len(np.unique(members, axis=0)) == len(members)


def test_nothing_moves_on_one_chip() -> None:
    network = network_of("tpu7x:2x2x1")
    groups = np.zeros((4, 2, 3), np.int64)
    assert neighbour_shift(network, groups).links == np.inf
    assert exchange_load(network, groups) == np.inf


def test_a_switch_takes_one_hop() -> None:
    network = network_of("8xh100:8")
    groups = np.array([[[n, 0, 0] for n in range(8)]])
    assert neighbour_shift(network, groups).max_hops == 1
    assert ring_links(network, groups) == exchange_load(network, groups) == 1.0


# --- lattices ------------------------------------------------------------------------------------


@given(st.data())
def test_shortest_ways_are_those_of_the_simulation(data: st.DataObject) -> None:
    network = network_of(data.draw(st.sampled_from(NAMES)))
    box = (network.shape, network.wrap, network.twist)
    start, end = (
        tuple(data.draw(st.integers(0, size - 1)) for size in network.shape) for _ in range(2)
    )
    steps, shares = shortest_ways(box, np.array([np.subtract(end, start)]))
    found = sorted(map(tuple, steps[shares[:, 0] > 0, 0].tolist()))
    assert found == sorted(torus_of(network).ways(start, end))  # type: ignore[arg-type]
    assert shares.sum() == pytest.approx(1)
    for way in found:
        assert canonical(box, np.add(start, way)).tolist() == list(end)


def test_periods() -> None:
    assert periods(((8, 16, 1), (False, True, False), False)).tolist() == [[0, 16, 0]]
    assert periods(((4, 8, 8), (True, True, True), True)).tolist() == [
        [4, 4, 4],
        [0, 8, 0],
        [0, 0, 8],
    ]


# --- spans ---------------------------------------------------------------------------------------


@given(st.data())
def test_the_span_of_a_mesh_of_digits_is_found(data: st.DataObject) -> None:
    """Split each dim by mixed radix, give the digits to axes in any order: each axis has a span."""
    topology = Topology.parse(data.draw(st.sampled_from(["v5e:8x8", "v5p:4x4x8", "tpu7x:2x2x4"])))
    network = Network.of(topology)
    digits = [(dim, size) for dim, size in enumerate(topology.shape) if size > 1]
    box = np.arange(np.prod(topology.shape)).reshape(*topology.shape[::-1]).transpose(2, 1, 0)
    lows = [[low for low in (1, 2, 4) if size % low == 0] for _, size in digits]
    inner = [data.draw(st.sampled_from(choices)) for choices in lows]
    split: list[int] = []
    for (_, size), low in zip(digits, inner, strict=True):
        split += [size // low, low]
    chips = box.reshape(split)
    order = data.draw(st.permutations(range(len(split))))
    cores = topology.devices_per_chip
    ids = chips.transpose(order)[..., None] * cores + np.arange(cores)
    places = mesh_places(topology, ids)
    for axis, digit in enumerate(order):
        span = find_span(network.shape, axis_groups(places, axis))
        dim, size = digits[digit // 2]
        low = inner[digit // 2]
        length, stride = (size // low, low) if digit % 2 == 0 else (low, 1)
        expected_sizes, expected_strides = [1, 1, 1], [1, 1, 1]
        expected_sizes[dim] = length
        if length > 1:
            expected_strides[dim] = stride
        assert span == Span(tuple(expected_sizes), tuple(expected_strides))  # type: ignore[arg-type]


def test_an_axis_of_cores_and_chips() -> None:
    topology = Topology.parse("tpu7x:2x2x1")
    places = mesh_places(topology, np.arange(8).reshape(2, 4))
    span = find_span(topology.shape, axis_groups(places, 1))
    assert span == Span((2, 1, 1), cores=2)
    assert str(span) == "Span(x2 core)"


def test_an_axis_over_slices() -> None:
    topology = Topology.parse("2xv5e:4x4")
    mesh = HybridMesh(
        topology.devices,
        ici_mesh_shape=(4, 4),
        dcn_mesh_shape=(2, 1),
        axis_names=("dp", "tp"),
        order="row-major",
    )
    reports = axis_reports(topology, mesh)
    assert [str(report.span) for report in reports] == ["Span(slice2 y4)", "Span(x4)"]
    assert [report.crosses_slices for report in reports] == [True, False]
    assert reports[0].bytes_per_second() == pytest.approx(
        Network.of(topology).bytes_per_second(Span((1, 4, 1), slices=2))
    )
    assert reports[0].shift_links == pytest.approx(3.125 / 50)


def test_a_random_mesh_has_no_spans_and_is_counted() -> None:
    topology = Topology.parse("v5e:4x8")
    ids = np.random.default_rng(0).permutation(32).reshape(4, 8)
    for report in axis_reports(topology, Mesh(ids, (4, 8), ("a", "b"))):
        assert report.span is None
        assert report.strategy == "ring in mesh order"
        assert 0 < report.links["all-gather"] < report.bound
        assert 0 < report.links["all-to-all"] < report.bound
        assert "no rows of chips" in str(report)


def test_groups_around_the_edge_are_counted() -> None:
    """A ring of 16 cut elsewhere than at its ends is no block, though it is as good as one."""
    topology = Topology.parse("v6e:8x16")
    ids = np.roll(np.arange(128).reshape(16, 8), 2, axis=0).reshape(4, 4, 8)
    (_, report, _) = axis_reports(topology, ids)
    assert report.span is None
    assert report.max_hops == 3


def test_jax_meshes_have_spans() -> None:
    pytest.importorskip("jax")
    topology = Topology.parse("v5e:16x16")
    devices = synthetic_devices((16, 16), kind="TPU v5 lite")
    placed = jax_order(devices, (16, 2, 8))
    ids = np.vectorize(lambda device: device.id)(placed)
    links = [report.links["all-gather"] for report in axis_reports(topology, ids)]
    assert links == [2.0, 0.25, 1.0]


# --- reports -------------------------------------------------------------------------------------


def test_a_report_in_numbers() -> None:
    topology = Topology.parse("v5p:4x4x4")
    dp, tp = axis_reports(topology, np.arange(64).reshape(16, 4), ("dp", "tp"))
    assert (dp.axis, dp.size, str(dp.span), dp.strategy) == ("dp", 16, "Span(y4 z4)", "whole dims")
    assert dp.bytes_per_second() == 400e9
    assert dp.fraction() == pytest.approx(2 / 3)
    assert (tp.strategy, tp.max_hops, tp.shift_links) == ("ring", 1, 1.0)
    assert tp.bytes_per_second("all-to-all") == pytest.approx(150e9)


def test_an_axis_of_one_device() -> None:
    (report, _) = axis_reports(Topology.parse("v5e:2x2"), np.arange(4).reshape(1, 4))
    assert report.fraction() == 1.0
    assert report.strategy == "none"


def test_without_figures_bandwidth_is_in_links() -> None:
    topology = Topology.synthetic((4, 4), wrap=(True, True))
    (report,) = axis_reports(topology, np.arange(16))
    assert report.bytes_per_second() is None
    assert "4 links modelled" in str(report)


def test_a_network_of_the_callers_figures() -> None:
    topology = Topology.parse("v5e:4x4")
    network = Network.of(topology, link_bytes_per_second=1e9)
    (report,) = axis_reports(topology, np.arange(16), network=network)
    assert report.bytes_per_second() == 2e9
