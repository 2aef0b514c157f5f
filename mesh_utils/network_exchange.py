"""Bandwidth of all-to-all inside a slice, in closed form.

Each chip sends S / k to each of its group, by dims in the order x, y, z, along the shorter way, and
half each way where both are equally long. A dim of a span is then loaded as if it were alone:

    ring of s chips     each link, one way:     S t s / 8      (s even),  S t (s^2 - 1) / 8 s
    line of s chips     the middle link:        S t floor(s/2) ceil(s/2) / s

with t groups in between each other. The dims work at the same time: the slowest counts. In a
twisted torus shortest paths cross several dims, so that they are enumerated: every link of one kind
carries the same, because the torus looks alike from each of its chips.
"""

from functools import lru_cache

import numpy as np

from mesh_utils.lattice import shortest_ways
from mesh_utils.network_gather import FloatArray, IntArray, Links3, closed_dims


def exchange_links(box: Links3, sizes: IntArray, strides: IntArray) -> FloatArray:
    """All-to-all on each span.

    Args:
        box: the links.
        sizes: chips in x, y, z, [n, 3].
        strides: the strides between them, [n, 3].

    Returns:
        Bus bandwidth per chip in links, [n]; inf where there is one chip.

    Example:
        >>> box = ((4, 4, 4), (True, True, True), False)
        >>> exchange_links(box, np.array([[4, 4, 4]]), np.ones((1, 3), np.int64)).tolist()
        [1.96875]
    """
    rings = closed_dims(box, sizes, strides)
    odd = sizes % 2
    ring = (sizes**2 - odd) / (8 * sizes)
    line = (sizes // 2) * (sizes - sizes // 2) / sizes
    load = np.where(sizes > 1, strides * np.where(rings, ring, line), 0.0).max(axis=1)
    if box[2]:
        short = np.array([size == min(box[0]) for size in box[0]])
        whole = ((sizes == 1) | ((sizes == np.array(box[0])) & rings)).all(axis=1)
        whole &= ((sizes > 1) & short).any(axis=1)
        for row in np.flatnonzero(whole):
            load[row] = _twisted_load(box, tuple((sizes[row] > 1).tolist()))
    chips = sizes.prod(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(chips > 1, (1 - 1 / chips) / load, np.inf)


@lru_cache(maxsize=256)
def _twisted_load(box: Links3, dims: tuple[bool, ...]) -> float:
    """Load of the worst link for S = 1, where a span takes those whole dims of a twisted torus."""
    taken = [size if used else 1 for size, used in zip(box[0], dims, strict=True)]
    others = np.indices(taken).reshape(3, -1).T
    steps, weights = shortest_ways(box, others)
    ways = np.stack(
        [np.maximum(steps, 0), np.maximum(-steps, 0)], axis=-1
    )  # [way, chip, dim, sign]
    loads = (weights[:, :, None, None] * ways).sum(axis=(0, 1)) / len(others)
    return float(loads.max())
