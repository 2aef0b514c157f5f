"""Every mesh of a shape, by plain enumeration: what `benchmarks.mesh` holds the search against.

Nothing of the search is used, only `Network.all_links`. A mesh hands out each physical dim to the
axes, in parts that multiply to its length, one inside the other:

    a dim of 4 chips, 2 axes      (4,1) (1,4)     one axis takes all of it
                                  (2@1, 2@2)      axis 0 has neighbours, axis 1 is around it
                                  (2@2, 2@1)      the other way round

and the cores of a chip to one of them. All combinations over x, y, z whose parts multiply to the
sizes of the axes are looked at: their score, and whether they beat a given mesh on an axis without
losing on another.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from mesh_utils import Network

MAX_MESHES = 20_000_000
"""A shape with more meshes than that is not enumerated."""

FloatArray = NDArray[np.float64]
Sizes = tuple[int, ...]
Pair = tuple[int, int]


@dataclass(frozen=True)
class Optimum:
    """What an enumeration found.

    Attributes:
        score: the highest score.
        meshes: meshes that were looked at.
        dominating: the most that any of them gains on one axis over the given links while it
            loses on none: 1 where none does.
    """

    score: float
    meshes: int
    dominating: float


def optimum(
    network: Network, shape: Sequence[int], weights: Sequence[float], against: Sequence[float] = ()
) -> Optimum | None:
    """Looks at every mesh of a shape.

    Args:
        network: the links of one slice.
        shape: the size of each axis.
        weights: bytes that each axis gathers, in any unit.
        against: links that each axis of another mesh has; () for no such comparison.

    Returns:
        What was found; None where there are more than MAX_MESHES.

    Example:
        >>> from mesh_utils import Topology
        >>> found = optimum(Network.of(Topology.parse("v5e:8x8")), (16, 4), (1, 2), (0.5, 1.0))
        >>> round(found.score, 3), found.meshes, found.dominating
        (1.444, 8, 2.0)
    """
    groups = list(_groups(network, tuple(shape)))
    meshes = sum(math.prod(len(each) for each in ways) for ways, _ in groups)
    if meshes > MAX_MESHES:
        return None
    table, places = seconds_table(network)
    moved = [w * (1 - 1 / size) for size, w in zip(shape, weights, strict=True)]
    least, gain = math.inf, 1.0
    for ways, owner in groups:
        costs = [
            _lookup(table[..., int(axis == owner)], places, ways, axis)
            for axis in range(len(shape))
        ]
        total = sum(part * cost for part, cost in zip(moved, costs, strict=True))
        least = min(least, float(np.min(total)))
        if against:
            gain = max(gain, _domination(costs, against))
    return Optimum(sum(moved) / least, meshes, gain)


def _domination(costs: list[FloatArray], against: Sequence[float]) -> float:
    """The largest gain on one axis of a mesh that loses on none."""
    ratios = [
        1 / (np.maximum(cost, 1e-12) * links) for cost, links in zip(costs, against, strict=True)
    ]
    shape = np.broadcast_shapes(*(ratio.shape for ratio in ratios))
    loses = np.zeros(shape, bool)
    for ratio in ratios:
        loses |= ratio < 1 - 1e-9
    best = np.max(np.broadcast_arrays(*ratios), axis=0)
    best[loses] = 1.0
    found = float(best.max())
    return found if found > 1 + 1e-9 else 1.0


def _lookup(
    table: FloatArray, places: list[dict[Pair, int]], ways: list[list[tuple[Pair, ...]]], axis: int
) -> FloatArray:
    """Seconds of one axis in every combination of ways, [ways of x, of y, of z]."""
    rows = [np.array([places[dim][way[axis]] for way in ways[dim]], np.int64) for dim in range(3)]
    return table[np.ix_(*rows)]


@lru_cache(maxsize=8)
def seconds_table(network: Network) -> tuple[FloatArray, list[dict[Pair, int]]]:
    """Seconds per byte over links of one byte per second, of every place an axis can lie.

    Args:
        network: the links.

    Returns:
        One over the links of an all-gather, [pairs of x, of y, of z, without cores or with], and
        for each dim the place of a (size, stride).
    """
    pairs: list[list[Pair]] = [
        [
            (size, stride)
            for size in range(1, length + 1)
            for stride in range(1, length // size + 1)
            if length % (size * stride) == 0 and (size > 1 or stride == 1)
        ]
        for length in network.shape
    ]
    box = (len(pairs[0]), len(pairs[1]), len(pairs[2]), 2)
    x, y, z, core = (each.reshape(-1) for each in np.indices(box))
    at = [np.array(pairs[dim])[index] for dim, index in enumerate((x, y, z))]
    sizes = np.stack([each[:, 0] for each in at], axis=1)
    strides = np.stack([each[:, 1] for each in at], axis=1)
    links = network.all_links(sizes, strides, np.where(core == 1, network.cores, 1))
    places = [{pair: place for place, pair in enumerate(each)} for each in pairs]
    return (1 / links).reshape(box), places


def _groups(network: Network, shape: Sizes) -> Iterator[tuple[list[list[tuple[Pair, ...]]], int]]:
    """For each choice of parts the ways of x, y and z, and the axis that takes the cores or -1."""
    by_sizes = [_by_sizes(length, len(shape)) for length in network.shape]
    owners = range(len(shape)) if network.cores > 1 else [-1]
    for owner in owners:
        if owner >= 0 and shape[owner] % network.cores:
            continue
        target = tuple(
            size // network.cores if axis == owner else size for axis, size in enumerate(shape)
        )
        for x, ways_x in by_sizes[0].items():
            left = _divided(target, x)
            if left is None:
                continue
            for y, ways_y in by_sizes[1].items():
                z = _divided(left, y)
                if z in by_sizes[2]:
                    yield [ways_x, ways_y, by_sizes[2][z]], owner


def _divided(sizes: Sizes, parts: Sizes) -> Sizes | None:
    if any(size % part for size, part in zip(sizes, parts, strict=True)):
        return None
    return tuple(size // part for size, part in zip(sizes, parts, strict=True))


@lru_cache(maxsize=256)
def _by_sizes(length: int, axes: int) -> dict[Sizes, list[tuple[Pair, ...]]]:
    """Every way to hand out one dim, by the sizes that the axes get."""
    found: dict[Sizes, list[tuple[Pair, ...]]] = {}

    def grow(left: int, stride: int, taken: dict[int, Pair]) -> None:
        if left == 1:
            way = tuple(taken.get(axis, (1, 1)) for axis in range(axes))
            found.setdefault(tuple(size for size, _ in way), []).append(way)
            return
        for axis in range(axes):
            if axis in taken:
                continue
            for size in range(2, left + 1):
                if left % size == 0:
                    grow(left // size, stride * size, {**taken, axis: (size, stride)})

    grow(length, 1, {})
    return found
