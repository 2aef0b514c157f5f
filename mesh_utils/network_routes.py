"""What links carry, counted: for meshes whose axes are no spans, and for permutes.

A message goes to its target by dims, x before y before z, along the shortest way; where several are
equally short, each takes its share. Loads are in units of what one message carries, per directed
link. This counts what the closed forms of network_gather.py and network_exchange.py derive, for any
order of devices, at the cost of walking every message.

A permute is one message from each member of a group to the next, the last to the first: ring
attention and pipelines live on it, and here the ORDER within a group matters.

    >>> from mesh_utils import Network, Span, Topology
    >>> network = Network.of(Topology.parse("v5e:4x4"))
    >>> row_major = span_groups(Span((4, 4, 1)), network.shape)
    >>> snake = span_groups(Span((4, 4, 1), snake=True), network.shape)
    >>> neighbour_shift(network, row_major), neighbour_shift(network, snake)
    (Shift(max_hops=6, links=1.0), Shift(max_hops=3, links=1.0))
"""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from mesh_utils.lattice import Box, canonical, shortest_ways
from mesh_utils.network import Network
from mesh_utils.span import span_groups

IntArray: TypeAlias = NDArray[np.int64]
FloatArray: TypeAlias = NDArray[np.float64]

_CHUNK = 4096
"""Messages that are routed at a time: memory stays below 30 MB."""

__all__ = ["Shift", "exchange_load", "link_loads", "neighbour_shift", "ring_links", "span_groups"]


@dataclass(frozen=True, slots=True)
class Shift:
    """A permute to the next member of each group.

    Attributes:
        max_hops: links that the longest message crosses.
        links: bandwidth of each message in links, all groups at work; inf where nothing moves.
    """

    max_hops: int
    links: float


def link_loads(
    network: Network, starts: IntArray, ends: IntArray, amounts: FloatArray
) -> tuple[FloatArray, int]:
    """Routes messages and adds up what each link carries.

    Args:
        network: the links.
        starts: the chip that sends, [messages, 3].
        ends: the chip that receives, [messages, 3].
        amounts: what each carries, [messages].

    Returns:
        Loads of the directed links, [x, y, z, dim, way], by the chip that sends over the link, way
        0 for upwards; and the links that the longest message crosses.

    Example:
        >>> from mesh_utils import Topology
        >>> network = Network.of(Topology.parse("v5e:4x4"))
        >>> loads, hops = link_loads(
        ...     network, np.array([[0, 0, 0]]), np.array([[2, 0, 0]]), np.ones(1)
        ... )
        >>> loads[:, 0, 0, 0, 0].tolist(), hops
        ([1.0, 1.0, 0.0, 0.0], 2)
    """
    box: Box = (network.shape, network.wrap, network.twist)
    loads = np.zeros((*network.shape, 3, 2))
    longest = 0
    for first in range(0, len(starts), _CHUNK):
        part = slice(first, first + _CHUNK)
        steps, shares = shortest_ways(box, ends[part] - starts[part])
        way, message = np.nonzero(shares)
        counts = steps[way, message]
        longest = max(longest, int(np.abs(counts).sum(axis=1).max(initial=0)))
        _walk(box, loads, starts[part][message], counts, (amounts[part] * shares)[way, message])
    return loads, longest


def _walk(
    box: Box, loads: FloatArray, starts: IntArray, counts: IntArray, amounts: FloatArray
) -> None:
    at = starts.copy()
    for dim in range(3):
        sign = np.sign(counts[:, dim])
        for step in range(int(np.abs(counts[:, dim]).max(initial=0))):
            moving = np.abs(counts[:, dim]) > step
            place = canonical(box, at[moving])
            way = (sign[moving] < 0).astype(np.int64)
            x, y, z = place[:, 0], place[:, 1], place[:, 2]
            where = np.ravel_multi_index((x, y, z, np.full_like(x, dim), way), loads.shape)
            # A sum per link; np.add.at would take one message after the other.
            loads += np.bincount(where, amounts[moving], loads.size).reshape(loads.shape)
            at[moving, dim] += sign[moving]


def neighbour_shift(network: Network, groups: IntArray) -> Shift:
    """A permute to the next member, in all groups at once.

    Args:
        network: the links.
        groups: the chip of each member, in the order of the axis, [groups, members, 3].

    Returns:
        Its hops and its bandwidth.
    """
    ends = np.roll(groups, -1, axis=1)
    return _shift(network, groups.reshape(-1, 3), ends.reshape(-1, 3))


def _shift(network: Network, starts: IntArray, ends: IntArray) -> Shift:
    moved = (starts != ends).any(axis=1)
    if not moved.any():
        return Shift(0, float(np.inf))
    if network.switched:
        return Shift(1, 1.0)
    loads, hops = link_loads(network, starts[moved], ends[moved], np.ones(int(moved.sum())))
    return Shift(hops, 1 / float(loads.max()))


def ring_links(network: Network, groups: IntArray) -> float:
    """The gather family over one ring per group, in the order of the axis, half each way.

    Args:
        network: the links.
        groups: the chip of each member, [groups, members, 3].

    Returns:
        Bus bandwidth per device in links; inf where all members of a group are on one chip.

    Example:
        >>> from mesh_utils import Span, Topology
        >>> network = Network.of(Topology.parse("v5e:4x4"))
        >>> ring_links(network, span_groups(Span((2, 2, 1), snake=True), network.shape))
        2.0
    """
    following = np.roll(groups, -1, axis=1).reshape(-1, 3)
    members = groups.reshape(-1, 3)
    starts, ends = np.concatenate([members, following]), np.concatenate([following, members])
    shift = _shift(network, starts, ends)
    return 1.0 if network.switched else 2 * shift.links


def exchange_load(network: Network, groups: IntArray) -> float:
    """All-to-all in all groups at once.

    Args:
        network: the links.
        groups: the chip of each member, [groups, members, 3].

    Returns:
        Bus bandwidth per device in links; inf where all members of a group are on one chip.

    Example:
        >>> from mesh_utils import Span, Topology
        >>> network = Network.of(Topology.parse("v5e:4x4"))
        >>> exchange_load(network, span_groups(Span((4, 1, 1)), network.shape))
        0.75
    """
    count = groups.shape[1]
    if network.switched:
        return 1.0
    starts = np.repeat(groups, count, axis=1).reshape(-1, 3)
    ends = np.tile(groups, (1, count, 1)).reshape(-1, 3)
    moved = (starts != ends).any(axis=1)
    if not moved.any():
        return float(np.inf)
    amounts = np.full(int(moved.sum()), 1 / count)
    loads, _ = link_loads(network, starts[moved], ends[moved], amounts)
    return (1 - 1 / count) / float(loads.max())
