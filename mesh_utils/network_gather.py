"""Bandwidth of all-gather, reduce-scatter and all-reduce inside a slice, in closed form.

All numbers are for the chips of a box: cores, slices and bytes are added in network.py, whose text
says what the strategies are. Each follows from counting, for every link, which groups use it.

With strides, t groups lie in between each other along a dim, and a link is crossed by all of them
that have an edge there. So what one group loads with 1, all together load with t, at worst:

    line: the last link carries (1 - 1/k) S of a group                  t (1 - 1/k) S
    ring: each link carries half of that, the other half goes back      t (1 - 1/k) S / 2

A pair at half the length of a dim that wraps (size 2, stride N/2) sends half each way: it loads
with t / 2.

Staggered ring. A dim p that wraps is taken whole, in rows of s chips; a ring goes through all rows
of a group: it leaves out column a, snakes through the other columns of every row, and comes back
along column a. A step from row to row happens at two of the columns a - 1, a, a + 1. Groups that
lie in between each other in that other dim j differ in their column a: by 3, or by 2 where j has
two rows only, and so there are s // 3 (s // 2) slots that share no link; of t groups at most
ceil(t / slots) are in one slot.
"""

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Links3: TypeAlias = tuple[tuple[int, int, int], tuple[bool, bool, bool], bool]
"""The box of chips: its shape, which dims wrap, and whether it is a twisted torus."""

FloatArray: TypeAlias = NDArray[np.float64]
IntArray: TypeAlias = NDArray[np.int64]
BoolArray: TypeAlias = NDArray[np.bool_]

STRATEGIES = ("none", "line", "path", "snake", "staggered ring", "ring", "whole dims")
"""What `gather_links` numbers: where two are equally fast, the later one counts."""


def gather_links(box: Links3, sizes: IntArray, strides: IntArray) -> tuple[FloatArray, IntArray]:
    """The best strategy for each span.

    Args:
        box: the links.
        sizes: chips in x, y, z, [n, 3].
        strides: the strides between them, [n, 3].

    Returns:
        Bus bandwidth per chip in links, [n], inf where there is one chip; and the number of the
        strategy in STRATEGIES, [n].

    Example:
        >>> box = ((16, 16, 1), (True, True, False), False)
        >>> links, strategy = gather_links(box, np.array([[16, 2, 1]]), np.array([[1, 8, 1]]))
        >>> float(links[0]), STRATEGIES[strategy[0]]
        (2.0, 'staggered ring')
    """
    active = sizes > 1
    rings = closed_dims(box, sizes, strides)
    dims = active.sum(axis=1)
    # A pair half way around sends half each way.
    pairs = rings & (sizes == 2) & ~_is_short(box)
    load = np.where(active, strides * np.where(pairs, 0.5, 1.0), 0.0).max(axis=1)
    with np.errstate(divide="ignore"):
        once = np.where(dims > 0, 1 / load, 0.0)
    even = (active & (sizes % 2 == 0)).any(axis=1)
    one, several = dims == 1, dims > 1
    staggered = _staggered(box, sizes, strides, rings, pairs)
    whole = (~active | ((strides == 1) & (sizes == np.array(box[0])))).all(axis=1)
    ways = np.where(active, np.where(rings, 2.0, 1.0), 0.0).sum(axis=1)
    choices = np.stack(
        [
            np.where(dims == 0, np.inf, 0.0),
            np.where(one, once, 0.0),
            np.where(several, once, 0.0),
            np.where(several & even, 2 * once, 0.0),
            np.where(several, staggered, 0.0),
            np.where(one, staggered, 0.0),
            np.where(whole & several, ways, 0.0),
        ]
    )
    last = len(STRATEGIES) - 1 - choices[::-1].argmax(axis=0)
    return choices.max(axis=0), last


def closed_dims(box: Links3, sizes: IntArray, strides: IntArray) -> BoolArray:
    """In which dims the groups of a span are rings.

    Args:
        box: the links.
        sizes: chips in x, y, z, [n, 3].
        strides: the strides between them, [n, 3].

    Returns:
        Flags, [n, 3]: the span reaches around the dim, and the dim wraps; in a twisted torus a
        short dim only together with both halves of every long one.
    """
    shape, wrap, twist = box
    around = (sizes > 1) & (sizes * strides == np.array(shape))
    closed: BoolArray = around & np.array(wrap, np.bool_)
    if twist:
        short = _is_short(box)
        halves: BoolArray = (short | (around & (sizes % 2 == 0))).all(axis=1)
        closed &= ~short | np.expand_dims(halves, 1)
    return closed


def _is_short(box: Links3) -> BoolArray:
    """The short dims of a twisted torus, [3]; none of another one."""
    shape, _, twist = box
    return np.array([twist and size == min(shape) for size in shape])


def _staggered(
    box: Links3, sizes: IntArray, strides: IntArray, rings: BoolArray, pairs: BoolArray
) -> FloatArray:
    """The best ring that goes around one dim, [n]; 0 where there is none."""
    best = np.zeros(len(sizes))
    short = _is_short(box)
    for p in range(3):
        columns, rows = sizes[:, p], sizes.copy()
        if short[p]:
            # The wrap link leads to the other half of the long dims: one ring takes both halves.
            long = int(np.flatnonzero(~short)[0])
            columns = 2 * columns
            rows[:, long] = rows[:, long] // 2
        load = strides[:, p].astype(np.float64)
        for j in range(3):
            if j == p:
                continue
            slots = np.maximum(columns // np.where(rows[:, j] == 2, 2, 3), 1)
            shared = np.ceil(strides[:, j] / slots) * np.where(pairs[:, j], 0.5, 1.0)
            load = np.where(rows[:, j] > 1, np.maximum(load, shared), load)
        # A ring of two chips is a pair, which sends half each way.
        load = np.where(pairs[:, p], load / 2, load)
        one = (sizes > 1).sum(axis=1) == 1
        usable = rings[:, p] & ((columns > 2) | one)
        found = np.where(pairs[:, p], 1.0, 2.0) / load
        best = np.where(usable, np.maximum(best, found), best)
    return best
