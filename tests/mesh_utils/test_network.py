"""The network model: against a simulation that walks every link, and by what it must obey.

`link_simulation.py` is the oracle. It builds the rings, lines and exchanges that the module's text
describes, chip by chip, and counts bytes per link in exact fractions. The closed forms equal it.
"""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh_utils import Network, Span, Topology, TopologyError
from mesh_utils.network import COLLECTIVES, STRATEGIES, exchange_links, gather_links
from tests.mesh_utils import link_simulation as simulation
from tests.mesh_utils.link_simulation import Chip, Torus

# shape, dims that wrap
BOXES: list[tuple[Chip, str]] = [
    ((4, 4, 1), "xy"),
    ((4, 4, 1), ""),
    ((8, 4, 1), "x"),
    ((8, 8, 1), "y"),
    ((6, 4, 1), "xy"),
    ((9, 3, 1), "x"),
    ((2, 2, 4), ""),
    ((2, 4, 4), "yz"),
    ((4, 4, 4), "xyz"),
    ((12, 6, 1), "xy"),
    ((16, 4, 1), "xy"),
    ((5, 10, 1), "y"),
]


def torus(shape: Chip, wraps: str, twist: bool = False) -> Torus:
    return Torus(shape, ("x" in wraps, "y" in wraps, "z" in wraps), twist)


def spans(shape: Chip) -> Iterator[tuple[Chip, Chip]]:
    """Every size and stride that tiles a box."""
    sizes = [[n for n in range(1, length + 1) if length % n == 0] for length in shape]
    for size in itertools.product(*sizes):
        strides = [
            [t for t in range(1, n // s + 1) if s > 1 and (n // s) % t == 0] or [1]
            for n, s in zip(shape, size, strict=True)
        ]
        for stride in itertools.product(*strides):
            yield size, stride  # type: ignore[misc]


def some_spans(shape: Chip, count: int, seed: int = 0) -> list[tuple[Chip, Chip]]:
    found = [span for span in spans(shape) if math.prod(span[0]) > 1]
    return random.Random(f"{shape}{seed}").sample(found, min(count, len(found)))


def modelled(box: Torus, sizes: Chip, strides: Chip) -> tuple[float, str]:
    links, strategy = gather_links(
        (box.shape, box.wrap, box.twist), np.array([sizes]), np.array([strides])
    )
    return float(links[0]), STRATEGIES[int(strategy[0])]


def simulated(box: Torus, sizes: Chip, strides: Chip) -> dict[str, float]:
    """What each strategy gives, walked link by link."""
    dims = [dim for dim in range(3) if sizes[dim] > 1]
    members = [group for _, group in simulation.groups(box.shape, sizes, strides)]
    around = [d for d in dims if sizes[d] * strides[d] == box.shape[d] and box.wrap[d]]
    found: dict[str, float] = {}
    walk = simulation.snake(sizes)
    paths = [[group[(a, b, c)] for a, b, c in walk] for group in members]
    found["line" if len(dims) == 1 else "path"] = float(simulation.gather_over_paths(box, paths))
    if len(dims) == 1 and around:
        found["ring"] = float(simulation.gather_over_rings(box, paths))
    if len(dims) > 1:
        ring = simulation.block_ring(sizes)
        if ring is not None:
            rings = [[group[digits] for digits in ring] for group in members]
            found["snake"] = float(simulation.gather_over_rings(box, rings))
        for row in (dim for dim in around if sizes[dim] > 2):
            rings = simulation.staggered_rings(box, sizes, strides, row)
            bandwidth = float(simulation.gather_over_rings(box, rings))
            found["staggered ring"] = max(found.get("staggered ring", 0.0), bandwidth)
    return found


def whole_dims(box: Torus, dims: list[int]) -> float:
    """The best mix of the orders in which an axis of whole dims can be gathered dim by dim."""
    columns = [
        [float(simulation.phase_loads(box, order)[dim]) for dim in dims]
        for order in itertools.permutations(dims)
    ]
    count = math.prod(box.shape[dim] for dim in dims)
    return (1 - 1 / count) / simulation.best_mix(columns)


# --- the closed forms equal the simulation -------------------------------------------------------


def check_gather(box: Torus, sizes: Chip, strides: Chip) -> None:
    links, strategy = modelled(box, sizes, strides)
    walked = simulated(box, sizes, strides)
    if strategy == "whole dims":
        # What the dims carry together is checked by itself; it is the best of all.
        assert links >= max(walked.values()) - 1e-9
        return
    best = max(walked.values())
    if strategy == "path":  # a lower bound: two groups need not share the path's worst link
        assert links <= best + 1e-9
        return
    assert links == pytest.approx(best, rel=1e-9), (strategy, walked)
    assert walked[strategy] == pytest.approx(links, rel=1e-9)


@pytest.mark.parametrize(("shape", "wraps"), BOXES)
def test_gather_equals_the_simulation(shape: Chip, wraps: str) -> None:
    for sizes, strides in some_spans(shape, 12):
        check_gather(torus(shape, wraps), sizes, strides)


@pytest.mark.thorough
@pytest.mark.parametrize(("shape", "wraps"), BOXES)
def test_gather_equals_the_simulation_on_every_span(shape: Chip, wraps: str) -> None:
    for sizes, strides in some_spans(shape, 100_000, 1):
        check_gather(torus(shape, wraps), sizes, strides)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("shape", "wraps"),
    [
        ((16, 16, 1), "xy"),
        ((8, 16, 1), "y"),
        ((8, 8, 1), ""),
        ((8, 8, 8), "xyz"),
        ((4, 4, 12), "xyz"),
        ((4, 12, 20), "xyz"),
    ],
)
def test_gather_equals_the_simulation_on_real_slices(shape: Chip, wraps: str) -> None:
    for sizes, strides in some_spans(shape, 25, 3):
        check_gather(torus(shape, wraps), sizes, strides)


def test_the_path_is_the_only_strategy_that_is_a_lower_bound() -> None:
    box = torus((12, 6, 1), "")
    assert modelled(box, (3, 3, 1), (2, 1, 1)) == (0.5, "path")
    assert simulated(box, (3, 3, 1), (2, 1, 1))["path"] == pytest.approx(2 / 3)


@pytest.mark.parametrize(("shape", "wraps"), BOXES)
def test_exchange_equals_the_simulation(shape: Chip, wraps: str) -> None:
    box = torus(shape, wraps)
    for sizes, strides in some_spans(shape, 5, 2):
        links = exchange_links((box.shape, box.wrap, False), np.array([sizes]), np.array([strides]))
        walked = float(simulation.exchange(box, sizes, strides))
        assert float(links[0]) == pytest.approx(walked, rel=1e-9), (sizes, strides)


@pytest.mark.parametrize(
    ("shape", "wraps", "dims"),
    [
        ((4, 4, 1), "xy", [0, 1]),
        ((4, 8, 1), "y", [0, 1]),
        ((2, 16, 1), "y", [0, 1]),
        ((3, 5, 1), "", [0, 1]),
        ((8, 16, 1), "xy", [0, 1]),
        ((4, 4, 8), "xyz", [0, 1, 2]),
        ((2, 2, 4), "", [0, 1, 2]),
        ((4, 8, 12), "xyz", [0, 2]),
    ],
)
def test_whole_dims_add_up(shape: Chip, wraps: str, dims: list[int]) -> None:
    """The sum of the dims is reached by gathering parts of the data in different orders of dims."""
    box = torus(shape, wraps)
    sizes = tuple(size if dim in dims else 1 for dim, size in enumerate(shape))
    links, strategy = modelled(box, sizes, (1, 1, 1))  # type: ignore[arg-type]
    assert strategy == "whole dims"
    assert links == sum(2 if box.wrap[dim] else 1 for dim in dims)
    assert whole_dims(box, dims) == pytest.approx(links, rel=0.02)


# --- twisted tori --------------------------------------------------------------------------------


def test_a_short_dim_of_a_twisted_torus_is_a_line() -> None:
    box = torus((4, 4, 8), "xyz", twist=True)
    assert modelled(box, (4, 1, 1), (1, 1, 1)) == (1.0, "line")
    assert modelled(replace(box, twist=False), (4, 1, 1), (1, 1, 1)) == (2.0, "ring")
    assert modelled(box, (1, 1, 8), (1, 1, 1)) == (2.0, "ring")


def test_a_short_dim_with_both_halves_of_the_long_one_is_a_ring() -> None:
    box = torus((4, 4, 8), "xyz", twist=True)
    rings: list[list[Chip]] = []
    for y, z in itertools.product(range(4), range(4)):
        ring: list[Chip] = [(0, y, z)]
        while (following := box.step(ring[-1], 0, 1)) != ring[0]:
            assert following is not None
            ring.append(following)
        rings.append(ring)
    assert {len(ring) for ring in rings} == {8}
    assert {place[2] % 4 for place in rings[0]} == {0}
    assert modelled(box, (4, 1, 2), (1, 1, 4))[0] == simulation.gather_over_rings(box, rings) == 2


@pytest.mark.thorough
@pytest.mark.parametrize("shape", [(4, 4, 8), (4, 8, 8)])
def test_gather_on_a_twisted_torus_equals_the_simulation(shape: Chip) -> None:
    """Rings around short dims pass both halves of the long ones; all else is as on a torus."""
    box = torus(shape, "xyz", twist=True)
    short = [dim for dim in range(3) if shape[dim] == min(shape)]
    rings = 0
    for sizes, strides in some_spans(shape, 60, 4):
        links, strategy = modelled(box, sizes, strides)
        if strategy == "whole dims":
            continue
        # A short dim by itself is a line here, whatever its wrap links would do.
        cut = Torus(shape, (True, True, True))
        cut = replace(cut, wrap=(0 not in short, 1 not in short, 2 not in short))
        walked = list(simulated(cut, sizes, strides).values())
        halves = all(
            sizes[dim] * strides[dim] == shape[dim] and sizes[dim] % 2 == 0
            for dim in range(3)
            if dim not in short
        )
        for row in short:
            if halves and sizes[row] > 1 and sizes[row] * strides[row] == shape[row]:
                found = simulation.twisted_rings(box, sizes, strides, row)
                walked.append(float(simulation.gather_over_rings(box, found)))
                rings += 1
        assert links == pytest.approx(max(walked), rel=1e-9) or strategy == "path"
    assert rings >= 5


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [((4, 4, 8), (4, 4, 8)), ((4, 4, 8), (4, 1, 8)), ((4, 8, 8), (4, 8, 8))],
)
def test_exchange_on_a_twisted_torus(shape: Chip, sizes: Chip) -> None:
    box = torus(shape, "xyz", twist=True)
    links = exchange_links((shape, box.wrap, True), np.array([sizes]), np.ones((1, 3), np.int64))
    walked = simulation.Simulation(box)
    # The torus looks alike from every chip, so that one sender tells the load of each kind of link.
    start: Chip = (0, 0, 0)
    for end in itertools.product(*(range(size) for size in sizes)):
        if end != start:
            walked.send(start, end, simulation.Fraction(1))  # type: ignore[arg-type]
    kinds: dict[tuple[int, int], simulation.Fraction] = {}
    for (chip, following), load in walked.loads.items():
        for kind in itertools.product(range(3), (1, -1)):
            if box.step(chip, *kind) == following:
                kinds[kind] = kinds.get(kind, simulation.Fraction(0)) + load
    count = math.prod(sizes)
    assert float(links[0]) == pytest.approx((1 - 1 / count) / float(max(kinds.values()) / count))


def test_a_twist_makes_all_to_all_faster() -> None:
    plain, twisted = torus((4, 4, 8), "xyz"), torus((4, 4, 8), "xyz", twist=True)
    whole, ones = np.array([[4, 4, 8]]), np.ones((1, 3), np.int64)
    slow = exchange_links((plain.shape, plain.wrap, False), whole, ones)[0]
    fast = exchange_links((plain.shape, plain.wrap, True), whole, ones)[0]
    assert float(slow) == pytest.approx(float(simulation.exchange(plain, (4, 4, 8), (1, 1, 1))))
    assert float(fast) == pytest.approx(float(simulation.exchange(twisted, (4, 4, 8), (1, 1, 1))))
    assert 1.7 < fast / slow < 1.8


@pytest.mark.parametrize(("sizes", "strides"), [((4, 4, 1), (1, 1, 1)), ((4, 2, 2), (1, 1, 4))])
def test_elsewhere_the_exchange_on_a_twisted_torus_is_a_lower_bound(
    sizes: Chip, strides: Chip
) -> None:
    box = torus((4, 4, 8), "xyz", twist=True)
    links = exchange_links((box.shape, box.wrap, True), np.array([sizes]), np.array([strides]))
    assert float(links[0]) <= float(simulation.exchange(box, sizes, strides))


# --- cases worked by hand ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "sizes", "strides", "links"),
    [
        # 2 chips 8 apart on a ring of 16: 8 groups on each link, half each way
        ("v5e:16x16", (2, 1, 1), (8, 1, 1), 0.25),
        ("v5e:16x16", (2, 1, 1), (1, 1, 1), 1.0),
        ("v5e:16x16", (8, 1, 1), (2, 1, 1), 1.0),
        ("v5e:16x16", (16, 16, 1), (1, 1, 1), 4.0),
        ("v5e:16x16", (16, 8, 1), (1, 1, 1), 2.0),
        ("v5e:8x8", (8, 2, 1), (1, 4, 1), 0.5),
        ("v5e:8x8", (2, 2, 1), (1, 1, 1), 2.0),
        ("v5e:8x16", (8, 1, 1), (1, 1, 1), 1.0),
        ("v5e:8x16", (1, 16, 1), (1, 1, 1), 2.0),
        ("v5p:16x16x16", (16, 16, 2), (1, 1, 8), 2.0),
        ("v5p:16x16x16", (1, 1, 8), (1, 1, 1), 1.0),
        ("v5p:16x16x16", (2, 4, 1), (1, 1, 1), 2.0),
        ("v5p:16x16x16", (16, 16, 16), (1, 1, 1), 6.0),
        ("v5p:2x2x4", (2, 2, 4), (1, 1, 1), 3.0),
    ],
)
def test_worked_cases(name: str, sizes: Chip, strides: Chip, links: float) -> None:
    assert Network.of(Topology.parse(name)).links(Span(sizes, strides)) == links


def test_two_devices_on_a_chip_share_its_links() -> None:
    network = Network.of(Topology.parse("tpu7x:4x4x4"))
    apart, together = Span((4, 1, 1)), Span((4, 1, 1), cores=2)
    assert network.links(apart) == 1.0  # 2 links of a ring, for two devices
    # 8 devices gather S over links that bring 3/4 S to each chip.
    assert network.links(together) == pytest.approx(2 * (7 / 8) / (3 / 4))
    assert network.links(Span((1, 1, 1), cores=2)) == pytest.approx(7380 / 2 / 100)
    assert network.links(apart, "all-to-all") == pytest.approx((3 / 4) / (2 * 4 / 8))


def test_devices_of_a_switch() -> None:
    network = Network.of(Topology.parse("8xh100:8"))
    for collective in COLLECTIVES:
        assert network.bytes_per_second(Span((4, 1, 1), (2, 1, 1)), collective) == 450e9
    assert network.strategy(Span((4, 1, 1))) == "switch"
    assert network.links(Span((8, 1, 1))) == network.bound(8) == 1.0


def test_an_axis_over_slices() -> None:
    """Each device moves its part over DCN, then the parts are gathered inside the slice."""
    network = Network.of(Topology.parse("4xv5e:16x16"))
    dcn, ici, size = 25e9 / 8, 2 * 50e9, 1e9
    seconds = (3 / 4) * (size / 16) / dcn + (15 / 16) * size / ici
    span = Span((16, 1, 1), slices=4)
    assert network.seconds(span, size, "all-gather") == pytest.approx(seconds)
    assert network.seconds(span, size, "all-reduce") == pytest.approx(2 * seconds)
    alone = Span((1, 1, 1), slices=4)
    assert network.bytes_per_second(alone) == pytest.approx(dcn)
    assert network.bytes_per_second(alone, "all-to-all") == pytest.approx(dcn)


def test_seconds_of_an_axis_of_one_device() -> None:
    assert Network.of(Topology.parse("v5e:2x2")).seconds(Span((1, 1, 1)), 1e9, "all-gather") == 0.0


def test_figures_of_the_caller() -> None:
    topology = Topology.parse("v2-512")
    with pytest.raises(TopologyError, match="That of one link is not known"):
        Network.of(topology).bytes_per_second(Span((16, 1, 1), cores=2))
    network = Network.of(topology, link_bytes_per_second=50e9)
    assert network.bytes_per_second(Span((16, 1, 1))) == 50e9


# --- invariants ----------------------------------------------------------------------------------

NAMES = ["v5e:4x4", "v5e:8x16", "v6e:16x16", "v5p:4x4x8", "v5p:4x4x8_twisted", "tpu7x:4x4x4"]


@pytest.mark.parametrize("name", NAMES)
def test_nothing_exceeds_the_bound(name: str) -> None:
    network = Network.of(Topology.parse(name))
    found = list(spans(network.shape))
    sizes, strides = np.array([s for s, _ in found]), np.array([t for _, t in found])
    for cores in {1, network.cores}:
        for collective in COLLECTIVES:
            links = network.all_links(sizes, strides, cores, 1, collective)
            bounds = [network.bound(int(size.prod()) * cores) for size in sizes]
            assert (links <= np.array(bounds) * (1 + 1e-9)).all()
            assert (links > 0).all()


@pytest.mark.parametrize("name", ["2xv5e:4x4", "4xtpu7x:2x2x2", "8xh100:8"])
def test_nothing_exceeds_the_bound_over_slices(name: str) -> None:
    network = Network.of(Topology.parse(name))
    for (sizes, strides), cores in itertools.product(spans(network.shape), {1, network.cores}):
        for slices in (2, network.num_slices):
            span = Span(sizes, strides, cores, slices)
            bound = network.bound(span.num_devices, slices)
            for collective in COLLECTIVES:
                assert 0 < network.links(span, collective) <= bound * (1 + 1e-9), (span, collective)


@given(st.data())
def test_one_by_one_and_all_at_once_agree(data: st.DataObject) -> None:
    network = Network.of(Topology.parse(data.draw(st.sampled_from(NAMES))))
    found = data.draw(st.lists(st.sampled_from(list(spans(network.shape))), min_size=1, max_size=8))
    collective = data.draw(st.sampled_from(COLLECTIVES))
    cores = data.draw(st.sampled_from([1, network.cores]))
    sizes, strides = [s for s, _ in found], [t for _, t in found]
    together = network.all_links(sizes, strides, cores, 1, collective).tolist()
    alone = [network.links(Span(s, t, cores), collective) for s, t in found]
    assert together == alone
    backwards = network.all_links(sizes[::-1], strides[::-1], cores, 1, collective)
    assert backwards.tolist() == alone[::-1]


@pytest.mark.parametrize("name", ["v5e:16x16", "v5p:4x8x8"])
def test_a_mesh_is_never_faster_than_its_torus(name: str) -> None:
    network = Network.of(Topology.parse(name))
    mesh = replace(network, wrap=(False, False, False))
    found = list(spans(network.shape))
    sizes, strides = [s for s, _ in found], [t for _, t in found]
    for collective in COLLECTIVES:
        fast = network.all_links(sizes, strides, collective=collective)
        assert (mesh.all_links(sizes, strides, collective=collective) <= fast + 1e-12).all()


def test_it_is_fast_enough_for_a_search() -> None:
    network = Network.of(Topology.parse("v5p:16x20x28"))
    found = list(spans(network.shape))
    sizes, strides = np.array([s for s, _ in found]), np.array([t for _, t in found])
    network.all_links(sizes, strides)
    start = time.perf_counter()
    network.all_links(sizes, strides)
    per_span = (time.perf_counter() - start) / len(found)
    assert len(found) > 1000
    assert per_span < 50e-6  # 2 microseconds on an idle core


# --- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("span", "collective", "message"),
    [
        (Span((3, 1, 1)), "all-gather", r"Span\(x3\) was asked for .* do not tile that box"),
        (Span((4, 1, 1), (8, 1, 1)), "all-gather", "do not tile that box"),
        (Span((4, 1, 1), cores=2), "all-gather", "cores=1 or 1"),
        (Span((4, 1, 1), slices=2), "all-gather", "slices that divide 1"),
        (Span((4, 1, 1)), "broadcast", "'broadcast' was asked for. It is no collective"),
    ],
)
def test_refusals(span: Span, collective: str, message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        Network.of(Topology.parse("v5e:16x16")).links(span, collective)  # type: ignore[arg-type]


def test_unknown_wrap_is_asked_for() -> None:
    with pytest.raises(TopologyError, match=r"Its wrap is not known.*Pass wrap= to Topology"):
        Network.of(Topology.parse("v3-32"))
    torus_of_four = Topology.parse("v3-32", wrap=(True, True))
    assert Network.of(torus_of_four).links(Span((4, 1, 1), cores=2)) > 2


def test_unknown_dcn_is_asked_for() -> None:
    topology = Topology.synthetic((4, 4), wrap=(True, True), num_slices=2)
    with pytest.raises(TopologyError, match=r"Pass link_bytes_per_second= and dcn_bytes_per"):
        Network.of(topology).links(Span((4, 1, 1), slices=2))
