"""A brute-force simulation of link loads: the oracle for the closed forms of the network model.

Nothing here is shared with mesh_utils but the words. Chips are tuples, links a dictionary from
(chip, next chip) to bytes, and every message is walked link by link. Loads are exact fractions.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache

Chip = tuple[int, int, int]
Loads = dict[tuple[Chip, Chip], Fraction]


@dataclass(frozen=True)
class Torus:
    """A box of chips; `twist` shifts the wrap links of the short dims by half a long one."""

    shape: Chip
    wrap: tuple[bool, bool, bool]
    twist: bool = False

    def chips(self) -> Iterator[Chip]:
        yield from itertools.product(*(range(size) for size in self.shape))  # type: ignore[misc]

    def step(self, chip: Chip, dim: int, sign: int) -> Chip | None:
        """The chip at the other end of a link; None where there is no link."""
        place = list(chip)
        place[dim] += sign
        if not 0 <= place[dim] < self.shape[dim]:
            if not self.wrap[dim]:
                return None
            place[dim] %= self.shape[dim]
            if self.twist and self.shape[dim] == min(self.shape):
                for other, size in enumerate(self.shape):
                    if size > self.shape[dim]:
                        place[other] = (place[other] + self.shape[dim]) % size
        return (place[0], place[1], place[2])

    def walk(self, start: Chip, steps: Sequence[int]) -> list[tuple[Chip, Chip]]:
        """The links of a way: all steps in x, then y, then z."""
        links: list[tuple[Chip, Chip]] = []
        at = start
        for dim, count in enumerate(steps):
            for _ in range(abs(count)):
                following = self.step(at, dim, 1 if count > 0 else -1)
                assert following is not None
                links.append((at, following))
                at = following
        return links

    def ways(self, start: Chip, end: Chip) -> list[tuple[int, ...]]:
        """All shortest step counts from one chip to another."""
        if self.twist:
            return _ways(self, start)[end]
        return list(itertools.product(*(self._counts(start[d], end[d], d) for d in range(3))))

    def _counts(self, start: int, end: int, dim: int) -> list[int]:
        """The shortest step counts in a dim that has nothing to do with the others."""
        found = [end - start]
        if self.wrap[dim]:
            found += [end - start + self.shape[dim], end - start - self.shape[dim]]
        least = min(map(abs, found))
        return sorted({count for count in found if abs(count) == least})


@cache  # of a twisted torus, by trying all counts
def _ways(torus: Torus, start: Chip) -> dict[Chip, list[tuple[int, ...]]]:
    found: dict[Chip, list[tuple[int, ...]]] = {}
    lengths: dict[Chip, int] = {}
    ranges = [range(-size, size + 1) if size > 1 else range(1) for size in torus.shape]
    for steps in sorted(itertools.product(*ranges), key=lambda counts: sum(map(abs, counts))):
        length = sum(map(abs, steps))
        end: Chip | None = start
        for dim, count in enumerate(steps):
            for _ in range(abs(count)):
                end = None if end is None else torus.step(end, dim, 1 if count > 0 else -1)
        if end is not None and lengths.setdefault(end, length) == length:
            found.setdefault(end, []).append(steps)
    return found


@dataclass
class Simulation:
    """Adds up what is sent over each link."""

    torus: Torus
    loads: Loads = field(default_factory=lambda: defaultdict(Fraction))

    def send(self, start: Chip, end: Chip, amount: Fraction) -> None:
        ways = self.torus.ways(start, end)
        for steps in ways:
            for link in self.torus.walk(start, steps):
                self.loads[link] += amount / len(ways)

    @property
    def worst(self) -> Fraction:
        return max(self.loads.values(), default=Fraction(0))


def groups(shape: Chip, sizes: Chip, strides: Chip) -> list[tuple[Chip, dict[Chip, Chip]]]:
    """Each group of a span: its offsets within a block, and its chips by their digits."""
    found: list[tuple[Chip, dict[Chip, Chip]]] = []
    blocks = [
        range(0, n, size * stride) for n, size, stride in zip(shape, sizes, strides, strict=True)
    ]
    for block in itertools.product(*blocks):
        for offset in itertools.product(*(range(stride) for stride in strides)):
            members = {
                digits: tuple(
                    b + o + d * t for b, o, d, t in zip(block, offset, digits, strides, strict=True)
                )
                for digits in itertools.product(*(range(size) for size in sizes))
            }
            found.append((offset, members))  # type: ignore[arg-type]
    return found


def gather_over_rings(torus: Torus, rings: Iterable[Sequence[Chip]]) -> Fraction:
    """Bandwidth where each group gathers over one ring, half of the bytes each way."""
    simulation = Simulation(torus)
    count = 0
    for ring in rings:
        count = len(ring)
        amount = Fraction(count - 1, 2 * count)
        for chip, following in zip(ring, [*ring[1:], ring[0]], strict=True):
            simulation.send(chip, following, amount)
            simulation.send(following, chip, amount)
    return Fraction(count - 1, count) / simulation.worst


def gather_over_paths(torus: Torus, paths: Iterable[Sequence[Chip]]) -> Fraction:
    """Bandwidth where each chip's part runs along a path to both of its ends."""
    simulation = Simulation(torus)
    count = 0
    for path in paths:
        count = len(path)
        for place in range(count - 1):
            simulation.send(path[place], path[place + 1], Fraction(place + 1, count))
            simulation.send(path[place + 1], path[place], Fraction(count - 1 - place, count))
    return Fraction(count - 1, count) / simulation.worst


def exchange(torus: Torus, sizes: Chip, strides: Chip) -> Fraction:
    """Bandwidth of all-to-all: every chip sends a part to every other of its group."""
    simulation = Simulation(torus)
    count = math.prod(sizes)
    for _, members in groups(torus.shape, sizes, strides):
        for start in members.values():
            for end in members.values():
                if start != end:
                    simulation.send(start, end, Fraction(1, count))
    return Fraction(count - 1, count) / simulation.worst


def shift(torus: Torus, ordered: Iterable[Sequence[Chip]]) -> tuple[int, Fraction]:
    """A permute to the next of the group: the longest way, and the load of the worst link."""
    simulation = Simulation(torus)
    longest = 0
    for group in ordered:
        for chip, following in zip(group, [*group[1:], group[0]], strict=True):
            if chip != following:
                longest = max(longest, sum(map(abs, torus.ways(chip, following)[0])))
                simulation.send(chip, following, Fraction(1))
    return longest, simulation.worst


# --- the rings of a block ------------------------------------------------------------------------


def snake(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """A walk through a block in which each step goes to a neighbour."""
    if not sizes:
        return [()]
    inner = snake(sizes[1:])
    return [
        (digit, *rest)
        for digit in range(sizes[0])
        for rest in (inner if digit % 2 == 0 else inner[::-1])
    ]


def block_ring(sizes: Chip) -> list[Chip] | None:
    """A ring through all chips of a block of two or more dims, without wrap links.

    One dim is the row: its column 0 is the way back. It needs an even number of rows, so that the
    snake through the other columns ends next to column 0.
    """
    active = [dim for dim in range(3) if sizes[dim] > 1]
    for row in active:
        others = [dim for dim in active if dim != row]
        rows = snake([sizes[dim] for dim in others])
        if len(rows) % 2:
            continue
        walk = [(r, c) for n, r in enumerate(rows) for c in _columns(n, sizes[row])]
        walk += [(r, 0) for r in reversed(rows)]
        return [_chip(row, c, others, r) for r, c in walk]
    return None


def _columns(number: int, count: int) -> range:
    return range(1, count) if number % 2 == 0 else range(count - 1, 0, -1)


def _chip(row: int, column: int, others: list[int], digits: Sequence[int]) -> Chip:
    place = [0, 0, 0]
    place[row] = column
    for dim, digit in zip(others, digits, strict=True):
        place[dim] = digit
    return (place[0], place[1], place[2])


def row_ring(sizes: Chip, row: int, column: int) -> list[Chip]:
    """A ring through a block whose dim `row` wraps: the way back is `column`.

    The snake goes through the other columns, from column + 1 on around the row.
    """
    others = [dim for dim in range(3) if dim != row and sizes[dim] > 1]
    rows = snake([sizes[dim] for dim in others])
    count = sizes[row]
    walk = [(r, (column + c) % count) for n, r in enumerate(rows) for c in _columns(n, count)]
    walk += [(r, column) for r in reversed(rows)]
    return [_chip(row, c, others, r) for r, c in walk]


def staggered_rings(torus: Torus, sizes: Chip, strides: Chip, row: int) -> list[list[Chip]]:
    """The staggered ring of every group: its column follows from its offsets in the other dims."""
    found: list[list[Chip]] = []
    for offset, members in groups(torus.shape, sizes, strides):
        column = 0
        for dim in range(3):
            if dim != row and sizes[dim] > 1:
                step = 2 if sizes[dim] == 2 else 3
                slots = max(sizes[row] // step, 1)
                column += step * (offset[dim] % slots)
        found.append([members[digits] for digits in row_ring(sizes, row, column % sizes[row])])
    return found


# --- whole dims at the same time -----------------------------------------------------------------


def phase_loads(torus: Torus, dims: Sequence[int]) -> dict[int, Fraction]:
    """The worst link of each dim when an axis of whole dims is gathered dim by dim.

    Walked chip by chip: in each phase all lines along a dim gather what they have so far.
    """
    total = math.prod(torus.shape[dim] for dim in dims)
    have = Fraction(1, total)
    worst: dict[int, Fraction] = {}
    for dim in dims:
        simulation = Simulation(torus)
        length = torus.shape[dim]
        others = [range(size) if d != dim else range(1) for d, size in enumerate(torus.shape)]
        for start in itertools.product(*others):
            line = [tuple(n if d == dim else start[d] for d in range(3)) for n in range(length)]
            for place in range(length if torus.wrap[dim] else length - 1):
                chip, following = line[place], line[(place + 1) % length]
                right = (length - 1) * have / 2 if torus.wrap[dim] else (place + 1) * have
                left = right if torus.wrap[dim] else (length - 1 - place) * have
                simulation.loads[chip, following] += right  # type: ignore[index]
                simulation.loads[following, chip] += left  # type: ignore[index]
        worst[dim] = simulation.worst
        have *= length
    return worst


def best_mix(columns: list[list[float]], rounds: int = 4000) -> float:
    """The least worst load of a mix of schedules: columns[i][j] is what i loads on dim j.

    Fictitious play: the next part of the data takes the schedule that is best against the loads so
    far. It converges to the value of the game from above.
    """
    dims = len(columns[0])
    total = [0.0] * dims
    weights = [1.0] * dims
    best = math.inf
    for n in range(1, rounds + 1):
        pick = min(
            columns, key=lambda column: sum(w * c for w, c in zip(weights, column, strict=True))
        )
        total = [t + c for t, c in zip(total, pick, strict=True)]
        best = min(best, max(total) / n)
        top = max(total)
        weights = [math.exp(8.0 * (t - top) / max(top / n, 1e-12) / math.sqrt(n)) for t in total]
    return best


def twisted_rings(torus: Torus, sizes: Chip, strides: Chip, row: int) -> list[list[Chip]]:
    """Staggered rings around a short dim of a twisted torus.

    Going around it twice passes both halves of the long dims: those are the columns, twice as many
    as the dim has chips. The other half of the first long dim is no row of its own then.
    """
    low = min(torus.shape)
    long = next(dim for dim in range(3) if torus.shape[dim] > low)
    rows = tuple(size // 2 if dim == long else size for dim, size in enumerate(sizes))
    doubled = tuple(2 * size if dim == row else size for dim, size in enumerate(rows))
    found: list[list[Chip]] = []
    for offset, members in groups(torus.shape, sizes, strides):
        column = 0
        for dim in range(3):
            if dim != row and rows[dim] > 1:
                step = 2 if rows[dim] == 2 else 3
                slots = max(doubled[row] // step, 1)
                column += step * (offset[dim] % slots)
        ring: list[Chip] = []
        for digits in row_ring(doubled, row, column % doubled[row]):  # type: ignore[arg-type]
            at: Chip | None = members[_with(digits, row, 0)]
            for _ in range(digits[row] * strides[row]):
                assert at is not None
                at = torus.step(at, row, 1)
            assert at is not None
            ring.append(at)
        assert sorted(ring) == sorted(members.values())
        found.append(ring)
    return found


def _with(digits: Chip, dim: int, value: int) -> Chip:
    place = list(digits)
    place[dim] = value
    return (place[0], place[1], place[2])
