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

import itertools
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from mesh_utils.assignment_table import SpanTable, divisors
from mesh_utils.span import Shape3, Span

FloatArray: TypeAlias = NDArray[np.float64]
IntArray: TypeAlias = NDArray[np.int64]
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
class Found:
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

    best: Found
    runner_up: Found | None
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
        >>> from mesh_utils.assignment_table import span_table
        >>> table = span_table(Network.of(Topology.parse("v5e:8x8")))
        >>> found = search_spans(table, (16, 4), (1.0, 2.0))
        >>> [str(span) for span in found.best.spans], found.is_exact
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
    box = (*(each[-1][0] for each in table.pairs), table.cores)
    rest = np.array([box], np.int64)
    chosen = np.zeros((1, len(mesh_shape), 4), np.int64)
    bounds = np.zeros(1)
    complete = True
    for axis in reversed(range(len(mesh_shape))):
        options = np.array(_options(box, mesh_shape[axis], whole_dims), np.int64).reshape(-1, 4)
        best = np.array([table.best[(a, b, c, d)] for a, b, c, d in options.tolist()])
        fits = (rest[:, None, :] % options == 0).all(axis=2)
        if axis == 0:
            fits &= (rest[:, None, :] == options).all(axis=2)
        row, option = np.nonzero(fits)
        bounds = bounds[row] + shares[axis] * best[option]
        chosen, rest = chosen[row], rest[row] // options[option]
        chosen[:, axis] = options[option]
        if len(bounds) > MAX_PARTS:
            kept = np.sort(np.argsort(bounds, kind="stable")[:MAX_PARTS])
            chosen, rest, bounds, complete = chosen[kept], rest[kept], bounds[kept], False
    return chosen, bounds, complete


@lru_cache(maxsize=4096)
def _options(box: tuple[int, ...], size: int, whole_dims: bool) -> list[tuple[int, ...]]:
    """What an axis can take of x, y, z and the cores, most of x first."""
    each = [[1, length] if whole_dims and length > 1 else divisors(length) for length in box[:3]]
    cores = [1] if box[3] == 1 else [box[3], 1]
    found = [
        (x, y, z, core)
        for core in cores
        for z in each[2]
        for y in each[1]
        for x in each[0]
        if x * y * z * core == size
    ]
    return sorted(found, key=lambda taken: (-taken[3], -taken[0], -taken[1]))


@lru_cache(maxsize=65536)
def _nestings(sizes: tuple[int, ...], host: int) -> tuple[tuple[int, ...], ...]:
    """All nestings of one dim, of which the axes take `sizes`; later axes inside come first."""
    active = [axis for axis in reversed(range(len(sizes))) if sizes[axis] > 1]
    found = itertools.permutations(active)
    return tuple(nesting for nesting in found if host_parts(sizes, nesting, host) is not None)


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
    parts, rest = [1] * len(sizes), host
    for axis in nesting:
        parts[axis] = math.gcd(sizes[axis], rest)
        rest //= parts[axis]
        if rest > 1 and parts[axis] != sizes[axis]:
            return None
    return parts


class _State:
    """The best and the runner-up so far."""

    def __init__(self, table: SpanTable, shares: FloatArray, host: Shape3 | None) -> None:
        self.table, self.host = table, host or (1, 1, 1)
        # What an axis costs. Among equals: all-to-all, and axes that have no weight.
        every = table.gather + table.exchange
        self.costs = [share * table.gather + TIE * every for share in shares.tolist()]
        self.best: Found | None = None
        self.runner_up: Found | None = None
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
        nestings = [_nestings(*each) for each in zip(columns, self.host, strict=True)]
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
        for axis, taken in enumerate(parts.tolist()):
            costs = self.costs[axis][..., int(taken[3] > 1)]
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
        nesting = [_natural(column) for column in columns]
        cost = self._cost_of(parts, nesting)
        better = True
        while better:
            better = False
            for dim, place in [(d, n) for d in range(3) for n in range(len(nesting[d]) - 1)]:
                swapped = list(nesting[dim])
                swapped[place : place + 2] = swapped[place + 1], swapped[place]
                tried = [*nesting[:dim], tuple(swapped), *nesting[dim + 1 :]]
                value = self._cost_of(parts, tried)
                if value < cost or np.isinf(cost):
                    better = better or value < cost
                    nesting, cost = tried, value
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
        found = Found(_spans(parts, nesting), nesting, cost)
        if self.best is None:
            self.best = found
        elif cost < self.best.cost:
            if cost < self.best.cost - SAME:
                self.runner_up = self.best
            self.best = found
        elif cost > self.best.cost + SAME:
            self.runner_up = found


def _natural(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Later axes inside."""
    return tuple(axis for axis in reversed(range(len(sizes))) if sizes[axis] > 1)


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
