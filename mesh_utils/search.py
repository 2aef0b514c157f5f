"""The search: which chips of each dim go to which axis, and in which order.

Two choices make a mesh, both finite:

    parts    how many chips of each dim, and whether the cores of a chip, each axis takes. The parts
             of a dim multiply to its length, those of an axis to its size.
    nesting  in each dim, which axis is innermost (stride 1), which is around it, and so on

    8x8 chips, axes (16, 4):   parts x: 4 2   nesting x: axis 1 inside axis 0
                                     y: 4 2           y: axis 1 inside axis 0
                               spans  (x4@2 y4@2), (x2 y2)

The cost of a mesh is a sum over its axes, each looked up in a SpanTable. So the parts are listed
axis by axis, a lower bound is known for each (every axis at its best strides), and they are looked
at from the lowest bound on: all nestings of one choice of parts at a time, as an array. It ends
when the bound of the next parts is not below the runner-up: then both results are optimal.

There are as many nestings as permutations, so that with many axes not all can be looked at. Then
the search goes as far as its budget reaches, from the lowest bounds on, and says that it is not
exact. The budget counts looks, not seconds: the same question has the same answer on any machine.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mesh_utils.hardware import Shape3
from mesh_utils.network import Collective, Network
from mesh_utils.span import Span, span_members
from mesh_utils.topology import shortest_ways

__all__ = []


# ----------------------------------------------------------------- The time of every span of a box
#
# What the search looks up.
#
# A dim of 8 chips can be taken by an axis as (size, stride): (1, 1), (2, 1), (2, 2), (2, 4), (4,
# 1), (4, 2), (8, 1). A span is one such pair for each dim, with the cores of a chip or without, so
# a box has few thousands of them. Their times are computed at once, by Network, and then only
# looked up.

FloatArray: TypeAlias = NDArray[np.float64]
IntArray: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class SpanTable:
    """Seconds per byte gathered, over links of one byte per second, for every span of a box.

    Attributes:
        pairs: for each dim the (size, stride) pairs, in ascending order.
        places: for each dim the place of a pair in `pairs`.
        cores: devices per chip.
        gather: time of an all-gather: [pairs of x, of y, of z, 2]; the last for spans without the
            cores and with them (equal where a chip is one device).
        exchange: time of an all-to-all, likewise.
        best: the least gather time of each (sizes in x, y, z, cores or not), over all strides.
    """

    pairs: tuple[tuple[tuple[int, int], ...], ...]
    places: tuple[dict[tuple[int, int], int], ...]
    cores: int
    gather: FloatArray
    exchange: FloatArray
    best: dict[tuple[int, int, int, int], float]


def divisors(number: int) -> list[int]:
    """The divisors of a number, in ascending order.

    Args:
        number: 1 or more.

    Returns:
        Its divisors.

    Example:
        >>> divisors(12)
        [1, 2, 3, 4, 6, 12]
    """
    return [n for n in range(1, number + 1) if number % n == 0]


@lru_cache(maxsize=32)
def span_table(network: Network) -> SpanTable:
    """Makes the table of a network.

    Args:
        network: the links.

    Returns:
        Its table. Cached.

    Example:
        >>> from mesh_utils import Topology
        >>> table = span_table(Network.of(Topology.parse("v5e:4x8")))
        >>> table.pairs[0], table.gather.shape
        (((1, 1), (2, 1), (2, 2), (4, 1)), (4, 7, 1, 2))
    """
    pairs = tuple(
        tuple(
            (size, stride)
            for size in divisors(length)
            for stride in (divisors(length // size) if size > 1 else [1])
        )
        for length in network.shape
    )
    grid = np.meshgrid(*(np.arange(len(dim_pairs)) for dim_pairs in pairs), [0, 1], indexing="ij")
    columns = [np.array(dim)[index.reshape(-1)] for dim, index in zip(pairs, grid, strict=False)]
    sizes = np.stack([column[:, 0] for column in columns], axis=1)
    strides = np.stack([column[:, 1] for column in columns], axis=1)
    cores = np.where(grid[3].reshape(-1) == 1, network.cores, 1)
    devices = sizes.prod(axis=1) * cores

    def seconds(collective: Collective) -> FloatArray:
        links = network.all_links(sizes, strides, cores, 1, collective)
        return np.where(devices > 1, (1 - 1 / devices) / links, 0.0)

    gather = seconds("all-gather")
    best: dict[tuple[int, int, int, int], float] = {}
    keys = np.column_stack([sizes, cores])
    unique, inverse = np.unique(keys, axis=0, return_inverse=True)
    least = np.full(len(unique), np.inf)
    np.minimum.at(least, inverse.reshape(-1), gather)
    for row, cost in zip(unique.tolist(), least.tolist(), strict=True):
        best[(row[0], row[1], row[2], row[3])] = cost
    return SpanTable(
        pairs=pairs,
        places=tuple({pair: place for place, pair in enumerate(dim_pairs)} for dim_pairs in pairs),
        cores=network.cores,
        gather=gather.reshape(grid[0].shape),
        exchange=seconds("all-to-all").reshape(grid[0].shape),
        best=best,
    )


# -------------------------------------------------------------------------------------- The search

Nesting = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""For x, y and z the axes that take more than one chip of it, from the innermost out."""

MAX_PARTS = 40_000
"""So many choices of parts are kept while axes are added."""

MAX_LOOKS = 12_000_000
"""So many nestings are looked at."""

MAX_NESTINGS = 400_000
"""Parts with more nestings than that are looked at one dim after the other."""

TIE = 1e-9
"""Weight of what decides among meshes of the same score."""

SAME = 1e-6
"""Costs that differ by less have the same score: TIE times what it weighs stays below."""


@dataclass(frozen=True)
class Candidate:
    """One mesh that was found.

    Attributes:
        spans: where each axis lies.
        nesting: which axis lies inside which.
        cost: what the search minimizes.
    """

    spans: tuple[Span, ...]
    nesting: Nesting
    cost: float


@dataclass(frozen=True)
class SearchResult:
    """What a search found.

    Attributes:
        best: the mesh of least cost.
        runner_up: the best of those of higher cost; None if all meshes cost the same.
        is_exact: whether all meshes were looked at, or could not be better.
        choices: choices of parts that there are.
        looks: meshes that were looked at.
    """

    best: Candidate
    runner_up: Candidate | None
    is_exact: bool
    choices: int
    looks: int


def search_spans(
    table: SpanTable,
    mesh_shape: tuple[int, ...],
    weights: tuple[float, ...],
    *,
    host: Shape3 | None = None,
    whole_dims: bool = False,
) -> SearchResult | None:
    """Finds the best spans for the axes of a mesh.

    Args:
        table: the times of spans.
        mesh_shape: the size of each axis inside a slice; they multiply to its devices.
        weights: bytes that each axis gathers, in any unit.
        host: the chips of a host, that are to stay a box of the mesh; None if they need not.
        whole_dims: whether no dim may be split over axes.

    Returns:
        What was found; None if nothing fits.

    Example:
        >>> from mesh_utils import Network, Topology
        >>> from mesh_utils.search import span_table
        >>> table = span_table(Network.of(Topology.parse("v5e:8x8")))
        >>> search = search_spans(table, (16, 4), (1.0, 2.0))
        >>> [str(span) for span in search.best.spans], search.is_exact
        (['Span(x4@2 y4@2)', 'Span(x2 y2)'], True)
    """
    total = sum(weights) or 1.0
    shares = np.array(weights) / total
    parts, bounds, complete = _all_parts(table, mesh_shape, shares, whole_dims)
    order = np.argsort(bounds, kind="stable")
    state = _State(table, shares, host)
    for place in order.tolist():
        # Beyond the runner-up nothing can change either result.
        if state.runner_up is not None and bounds[place] > state.runner_up.cost:
            break
        if state.looks > MAX_LOOKS:
            complete = False
            break
        state.look(parts[place])
    if state.best is None:
        return None
    exact = complete and state.is_exact
    return SearchResult(state.best, state.runner_up, exact, len(parts), state.looks)


def _all_parts(
    table: SpanTable, mesh_shape: tuple[int, ...], shares: FloatArray, whole_dims: bool
) -> tuple[IntArray, FloatArray, bool]:
    """All choices of parts [choices, axes, 4], a lower bound of each, and whether none is left out.

    Later axes come first, and prefer x: among equals, they lie on neighbouring ids.
    """
    box = (*(dim_pairs[-1][0] for dim_pairs in table.pairs), table.cores)
    remaining = np.array([box], np.int64)
    parts = np.zeros((1, len(mesh_shape), 4), np.int64)
    bounds = np.zeros(1)
    complete = True
    for axis in reversed(range(len(mesh_shape))):
        options = np.array(_options(box, mesh_shape[axis], whole_dims), np.int64).reshape(-1, 4)
        best = np.array([table.best[(a, b, c, d)] for a, b, c, d in options.tolist()])
        fits = (remaining[:, None, :] % options == 0).all(axis=2)
        if axis == 0:
            fits &= (remaining[:, None, :] == options).all(axis=2)
        row, option = np.nonzero(fits)
        bounds = bounds[row] + shares[axis] * best[option]
        parts, remaining = parts[row], remaining[row] // options[option]
        parts[:, axis] = options[option]
        if len(bounds) > MAX_PARTS:
            cheapest = np.sort(np.argsort(bounds, kind="stable")[:MAX_PARTS])
            parts, remaining, bounds = parts[cheapest], remaining[cheapest], bounds[cheapest]
            complete = False
    return parts, bounds, complete


@lru_cache(maxsize=4096)
def _options(box: tuple[int, ...], size: int, whole_dims: bool) -> list[tuple[int, ...]]:
    """What an axis can take of x, y, z and the cores, most of x first."""
    lengths = [[1, length] if whole_dims and length > 1 else divisors(length) for length in box[:3]]
    cores = [1] if box[3] == 1 else [box[3], 1]
    parts = [
        (x, y, z, core)
        for core in cores
        for z in lengths[2]
        for y in lengths[1]
        for x in lengths[0]
        if x * y * z * core == size
    ]
    return sorted(parts, key=lambda part: (-part[3], -part[0], -part[1]))


@lru_cache(maxsize=65536)
def _nestings(sizes: tuple[int, ...], host: int) -> tuple[tuple[int, ...], ...]:
    """All nestings of one dim, of which the axes take `sizes`; later axes inside come first."""
    active = [axis for axis in reversed(range(len(sizes))) if sizes[axis] > 1]
    orders = itertools.permutations(active)
    return tuple(nesting for nesting in orders if host_parts(sizes, nesting, host) is not None)


def host_parts(sizes: tuple[int, ...], nesting: tuple[int, ...], host: int) -> list[int] | None:
    """How the chips of a host, `host` neighbours in one dim, are shared out to the axes.

    Args:
        sizes: chips that each axis takes of the dim.
        nesting: the axes from the innermost out.
        host: chips of a host in that dim.

    Returns:
        Chips of one host for each axis; None if the host is no box of the mesh then.

    Example:
        >>> host_parts((4, 2), (1, 0), 4), host_parts((4, 3), (1, 0), 2)
        ([2, 2], None)
    """
    parts, remaining = [1] * len(sizes), host
    for axis in nesting:
        parts[axis] = math.gcd(sizes[axis], remaining)
        remaining //= parts[axis]
        if remaining > 1 and parts[axis] != sizes[axis]:
            return None
    return parts


class _State:
    """The best and the runner-up so far."""

    def __init__(self, table: SpanTable, shares: FloatArray, host: Shape3 | None) -> None:
        self.table, self.host = table, host or (1, 1, 1)
        # What an axis costs. Among equals: all-to-all, and axes that have no weight.
        every = table.gather + table.exchange
        self.costs = [share * table.gather + TIE * every for share in shares.tolist()]
        self.best: Candidate | None = None
        self.runner_up: Candidate | None = None
        self.is_exact = True
        self.looks = 0
        self._rows: dict[tuple[int, tuple[int, ...]], IntArray] = {}

    def look(self, parts: IntArray) -> None:
        """Looks at all nestings of one choice of parts, [axes, 4]."""
        columns = [tuple(column) for column in parts.T[:3].tolist()]
        counts = [math.factorial(sum(size > 1 for size in column)) for column in columns]
        if math.prod(counts) > MAX_NESTINGS:
            self.is_exact = False
            self._descend(parts, columns)
            return
        nestings = [_nestings(*dim) for dim in zip(columns, self.host, strict=True)]
        rows = [self._pair_places(dim, column) for dim, column in enumerate(columns)]
        cost = self._cost(parts, rows)
        self.looks += cost.size
        # The cheapest nesting, and the cheapest of those that are worse.
        for _ in range(2 if cost.size else 0):
            flat = int(cost.argmin())
            if not np.isfinite(cost.flat[flat]):
                break
            x, y, z = (int(n) for n in np.unravel_index(flat, cost.shape))
            nesting = (nestings[0][x], nestings[1][y], nestings[2][z])
            self._offer(parts, nesting, float(cost[x, y, z]))
            cost[cost <= cost[x, y, z] + SAME] = np.inf

    def _cost(self, parts: IntArray, rows: list[IntArray]) -> FloatArray:
        x, y, z = rows
        cost = np.zeros((len(x), len(y), len(z)))
        for axis, part in enumerate(parts.tolist()):
            costs = self.costs[axis][..., int(part[3] > 1)]
            cost += costs[np.ix_(x[:, axis], y[:, axis], z[:, axis])]
        return cost

    def _pair_places(self, dim: int, sizes: tuple[int, ...]) -> IntArray:
        """For each nesting of a dim and each axis the place of its (size, stride) pair."""
        key = (dim, sizes)
        if key not in self._rows:
            nestings = _nestings(sizes, self.host[dim])
            rows = np.zeros((len(nestings), len(sizes)), np.int64)
            for number, nesting in enumerate(nestings):
                stride = 1
                for axis in nesting:
                    rows[number, axis] = self.table.places[dim][(sizes[axis], stride)]
                    stride *= sizes[axis]
            self._rows[key] = rows
        return self._rows[key]

    def _descend(self, parts: IntArray, columns: list[tuple[int, ...]]) -> None:
        """Swaps neighbours in one dim after the other until no swap helps: a local optimum."""
        # Later axes inside, to begin with.
        nesting = [
            tuple(axis for axis in reversed(range(len(column))) if column[axis] > 1)
            for column in columns
        ]
        cost = self._cost_of(parts, nesting)
        better = True
        while better:
            better = False
            for dim, place in [(d, n) for d in range(3) for n in range(len(nesting[d]) - 1)]:
                swapped = list(nesting[dim])
                swapped[place : place + 2] = swapped[place + 1], swapped[place]
                tried = [*nesting[:dim], tuple(swapped), *nesting[dim + 1 :]]
                new_cost = self._cost_of(parts, tried)
                if new_cost < cost or np.isinf(cost):
                    better = better or new_cost < cost
                    nesting, cost = tried, new_cost
        if np.isfinite(cost):
            self._offer(parts, (nesting[0], nesting[1], nesting[2]), cost)

    def _cost_of(self, parts: IntArray, nesting: list[tuple[int, ...]]) -> float:
        self.looks += 64  # a look outside of an array costs about as much as 64 inside of one
        cost = 0.0
        for dim, axes in enumerate(nesting):
            if host_parts(tuple(parts[:, dim].tolist()), axes, self.host[dim]) is None:
                return math.inf
        for axis, span in enumerate(_spans(parts, (nesting[0], nesting[1], nesting[2]))):
            pairs = zip(self.table.places, span.sizes, span.strides, strict=True)
            x, y, z = (places[(size, stride)] for places, size, stride in pairs)
            cost += float(self.costs[axis][x, y, z, int(span.cores > 1)])
        return cost

    def _offer(self, parts: IntArray, nesting: Nesting, cost: float) -> None:
        if self.runner_up is not None and cost >= self.runner_up.cost:
            return
        candidate = Candidate(_spans(parts, nesting), nesting, cost)
        if self.best is None:
            self.best = candidate
        elif cost < self.best.cost:
            if cost < self.best.cost - SAME:
                self.runner_up = self.best
            self.best = candidate
        elif cost > self.best.cost + SAME:
            self.runner_up = candidate


def _spans(parts: IntArray, nesting: Nesting) -> tuple[Span, ...]:
    rows: list[list[int]] = parts.tolist()
    strides = [[1, 1, 1] for _ in rows]
    for dim, axes in enumerate(nesting):
        stride = 1
        for axis in axes:
            strides[axis][dim] = stride
            stride *= rows[axis][dim]
    return tuple(
        Span((row[0], row[1], row[2]), (steps[0], steps[1], steps[2]), row[3])
        for row, steps in zip(rows, strides, strict=True)
    )


# -------------------------------------------------------------- The order of the chips of one axis
#
# Rows, a snake, or a ring.
#
# Which chips an axis takes decides its gathers; which follows which decides a permute to the next
# (ring attention, pipelines). On a block of 2 x 4 chips:
#
#     rows    0 1 2 3         snake   0 1 2 3         ring    0 1 2 3
#             4 5 6 7                 7 6 5 4                 7 6 5 4
#             ends far apart          the last next to        every chip next to its follower,
#                                     the first only where    the last next to the first, wherever
#                                     there are two rows      a side is even
#
# A walk is chosen by its longest step, counted over the links (wrap and twist included), then by
# the sum of its steps, then rows before snakes before rings: rows can be split into axes of their
# own.
#
# One kind of axis is in rows although a snake has shorter steps: the one that XLA gathers over all
# its dims at once ("whole dims"), which it does in rows only; in a snake it gathers over one ring
# (docs/mesh_search.md). For a permute rows cost a hop or two there, and in the model no bandwidth.
#
# Where hosts are to stay boxes of the mesh ("contiguous submeshes"), the chips of a host follow
# each other: rows of hosts, and rows within a host.

WalkKind: TypeAlias = Literal["rows", "snake", "ring", "hosts"]

KINDS: tuple[WalkKind, ...] = ("rows", "snake", "ring")

GATHER_OVER_OPEN_DIMS = frozenset({"tpu7x"})
"""Chips on which XLA, as libtpu compiles it, gathers over several dims at once whether or not they
wrap. On the others it does so only where each of them wraps or is a pair."""


@dataclass(frozen=True, eq=False)
class Walk:
    """The chips of an axis, from the group's first chip, in the order of the axis.

    Attributes:
        kind: "rows", "snake", "ring", or "hosts".
        order: the dims from outer to inner.
        members: x, y and z of each, [chips, 3].
        max_hops: links that the longest step crosses, the one from the last to the first included.
    """

    kind: WalkKind
    order: Shape3
    members: IntArray
    max_hops: int


def best_walk(network: Network, span: Span, rings: bool = True) -> Walk:
    """Finds the walk of shortest steps.

    Args:
        network: the links.
        span: where the axis lies.
        rings: whether snakes and rings may be taken; else rows only.

    Returns:
        The walk.

    Example:
        >>> from mesh_utils import Topology
        >>> network = Network.of(Topology.parse("v5e:4x4"))
        >>> walk = best_walk(network, Span((2, 4, 1)))
        >>> walk.kind, walk.max_hops, walk.members[:, :2].tolist()[:3]
        ('snake', 1, [[0, 0], [0, 1], [0, 2]])
        >>> best_walk(network, Span((2, 4, 1)), rings=False).max_hops
        4
    """
    best: tuple[tuple[int, int, int], Walk] | None = None
    active = [dim for dim in (2, 1, 0) if span.sizes[dim] > 1]
    idle = [dim for dim in (2, 1, 0) if span.sizes[dim] == 1]
    for rank, kind in enumerate(KINDS if rings and len(active) > 1 else KINDS[:1]):
        for order in itertools.permutations(active):
            x, y, z = (*idle, *order)
            members = _members(span, kind, (x, y, z))
            if members is None:
                continue
            longest, total = _hops(network, members)
            key = (longest, total, rank)
            if best is None or key < best[0]:
                best = key, Walk(kind, (x, y, z), members, longest)
    if best is None:
        raise RuntimeError(f"{span} has no walk")  # rows there always are
    return best[1]


def gathers_at_once(network: Network, span: Span, chip: str | None = None) -> bool:
    """Whether XLA gathers over all dims of an axis at once, if its chips are in rows.

    This is what libtpu was seen to compile (docs/mesh_search.md), not a part of the model: whole
    dims, each a ring or a pair, and no twisted torus. Elsewhere it gathers over one ring, which it
    orders itself, whatever the order of the axis.

    Args:
        network: the links.
        span: where the axis lies.
        chip: the chip's name, where it is known.

    Returns:
        Whether it does; never for an axis in one dim, which has one order only.

    Example:
        >>> from mesh_utils import Topology
        >>> torus, open_dims = (Network.of(Topology.parse(f"v5p:{s}")) for s in ("4x4x8", "2x4x4"))
        >>> gathers_at_once(torus, Span((4, 4, 1))), gathers_at_once(open_dims, Span((1, 4, 4)))
        (True, False)
    """
    if network.strategy(span) != "whole dims":
        return False
    if chip in GATHER_OVER_OPEN_DIMS:
        return True
    dims = zip(span.sizes, network.wrap, strict=True)
    return not network.twist and all(wraps or size <= 2 for size, wraps in dims)


def host_walk(network: Network, span: Span, parts: Shape3) -> Walk:
    """The walk that keeps hosts together.

    Args:
        network: the links.
        span: where the axis lies.
        parts: chips of one host that it takes in x, y and z.

    Returns:
        The walk.

    Example:
        >>> from mesh_utils import Topology
        >>> network = Network.of(Topology.parse("v5e:4x4"))
        >>> host_walk(network, Span((4, 2, 1)), (2, 2, 1)).members[:, :2].tolist()
        [[0, 0], [1, 0], [0, 1], [1, 1], [2, 0], [3, 0], [2, 1], [3, 1]]
    """
    outer = [size // part for size, part in zip(span.sizes, parts, strict=True)]
    far = _digits(outer) * np.array(parts)
    digits = (far[:, None, :] + _digits(parts)).reshape(-1, 3)
    members = np.asarray(digits * np.array(span.strides), np.int64)
    return Walk("hosts", (2, 1, 0), members, _hops(network, members)[0])


def _digits(sizes: Sequence[int]) -> IntArray:
    """All x, y, z below some sizes, x fastest, [n, 3]."""
    x, y, z = sizes
    grid = np.indices((z, y, x)).reshape(3, -1)[::-1].T
    return np.asarray(grid, np.int64)


def _members(span: Span, kind: WalkKind, order: Shape3) -> IntArray | None:
    """The chips of a walk; None if the block has no such walk."""
    if kind != "ring":
        return span_members(replace(span, order=order, snake=kind == "snake"))
    # A snake through the inner dims makes them one row; the ring goes down that grid and back.
    outer = next(dim for dim in order if span.sizes[dim] > 1)
    count = span.sizes[outer]
    if count % 2:
        return None
    sizes, inner = list(span.sizes), [dim for dim in order if dim != outer]
    sizes[outer] = 1
    row = span_members(
        replace(
            span,
            sizes=(sizes[0], sizes[1], sizes[2]),
            order=(outer, inner[0], inner[1]),
            snake=True,
        )
    )
    starts, columns = row[:1], row[1:]
    step = np.zeros(3, np.int64)
    step[outer] = span.strides[outer]
    down = [(columns[::-1] if n % 2 else columns) + n * step for n in range(count)]
    back = [starts + n * step for n in reversed(range(1, count))]
    return np.concatenate([starts, *down, *back])


def _hops(network: Network, members: IntArray) -> tuple[int, int]:
    """Links that the longest step of a walk crosses, and all steps together."""
    if network.switched or len(members) < 2:
        return (0, 0)
    steps = np.roll(members, -1, axis=0) - members
    # A walk has few kinds of steps, however long it is.
    kinds, counts = np.unique(steps, axis=0, return_counts=True)
    ways, _ = shortest_ways(network.box, kinds)
    lengths = np.abs(ways).sum(axis=2).min(axis=0)
    return int(lengths.max()), int((lengths * counts).sum())
