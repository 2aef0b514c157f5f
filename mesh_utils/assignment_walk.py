"""The order of the chips of one axis: rows, a snake, or a ring.

Which chips an axis takes decides its gathers; which follows which decides a permute to the next
(ring attention, pipelines). On a block of 2 x 4 chips:

    rows    0 1 2 3         snake   0 1 2 3         ring    0 1 2 3
            4 5 6 7                 7 6 5 4                 7 6 5 4
            ends far apart          the last next to        every chip next to its follower,
                                    the first only where    the last next to the first, wherever
                                    there are two rows      a side is even

A walk is chosen by its longest step, counted over the links (wrap and twist included), then by the
sum of its steps, then rows before snakes before rings: rows can be split into axes of their own.

One kind of axis is in rows although a snake has shorter steps: the one that XLA gathers over all
its dims at once ("whole dims"), which it does in rows only; in a snake it gathers over one ring
(docs/mesh_search.md). For a permute rows cost a hop or two there, and in the model no bandwidth.

Where hosts are to stay boxes of the mesh ("contiguous submeshes"), the chips of a host follow each
other: rows of hosts, and rows within a host.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mesh_utils.lattice import Box, shortest_ways
from mesh_utils.network import Network
from mesh_utils.span import Shape3, Span, span_members

IntArray: TypeAlias = NDArray[np.int64]
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
    found: tuple[tuple[int, int, int], Walk] | None = None
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
            if found is None or key < found[0]:
                found = key, Walk(kind, (x, y, z), members, longest)
    if found is None:
        raise RuntimeError(f"{span} has no walk")  # rows there always are
    return found[1]


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
    inner = replace(span, sizes=_with(span.sizes, outer, 1), order=_first(order, outer), snake=True)
    row = span_members(inner)
    count = span.sizes[outer]
    if count % 2:
        return None
    starts, columns = row[:1], row[1:]
    shifts = [number * span.strides[outer] for number in range(count)]
    down = [
        _moved(columns[::-1] if number % 2 else columns, outer, shift)
        for number, shift in enumerate(shifts)
    ]
    back = [_moved(starts, outer, shift) for shift in reversed(shifts[1:])]
    return np.concatenate([starts, *down, *back])


def _with(sizes: Shape3, dim: int, size: int) -> Shape3:
    changed = [size if number == dim else each for number, each in enumerate(sizes)]
    return (changed[0], changed[1], changed[2])


def _first(order: Shape3, dim: int) -> Shape3:
    rest = [each for each in order if each != dim]
    return (dim, rest[0], rest[1])


def _moved(chips: IntArray, dim: int, steps: int) -> IntArray:
    moved = chips.copy()
    moved[:, dim] += steps
    return moved


def _hops(network: Network, members: IntArray) -> tuple[int, int]:
    """Links that the longest step of a walk crosses, and all steps together."""
    if network.switched or len(members) < 2:
        return (0, 0)
    steps = np.roll(members, -1, axis=0) - members
    # A walk has few kinds of steps, however long it is.
    kinds, counts = np.unique(steps, axis=0, return_counts=True)
    box: Box = (network.shape, network.wrap, network.twist)
    ways, _ = shortest_ways(box, kinds)
    lengths = np.abs(ways).sum(axis=2).min(axis=0)
    return int(lengths.max()), int((lengths * counts).sum())
