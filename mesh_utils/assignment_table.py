"""The time of every span of a box: what the search looks up.

A dim of 8 chips can be taken by an axis as (size, stride): (1, 1), (2, 1), (2, 2), (2, 4), (4, 1),
(4, 2), (8, 1). A span is one such pair for each dim, with the cores of a chip or without, so a box
has few thousands of them. Their times are computed at once, by Network, and then only looked up.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from mesh_utils.network import Collective, Network

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
    grid = np.meshgrid(*(np.arange(len(each)) for each in pairs), [0, 1], indexing="ij")
    taken = [np.array(each)[index.reshape(-1)] for each, index in zip(pairs, grid, strict=False)]
    sizes = np.stack([each[:, 0] for each in taken], axis=1)
    strides = np.stack([each[:, 1] for each in taken], axis=1)
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
    for row, value in zip(unique.tolist(), least.tolist(), strict=True):
        best[(row[0], row[1], row[2], row[3])] = value
    return SpanTable(
        pairs=pairs,
        places=tuple({pair: place for place, pair in enumerate(each)} for each in pairs),
        cores=network.cores,
        gather=gather.reshape(grid[0].shape),
        exchange=seconds("all-to-all").reshape(grid[0].shape),
        best=best,
    )
