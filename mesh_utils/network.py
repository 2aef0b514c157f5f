"""Network: what bandwidth each axis of a mesh gets, in a model of the links between chips.

THE MODEL IS NOT A MEASUREMENT. No hardware has confirmed it; docs/topology.md lists its assumptions
beside what would show each of them wrong.

The idea. Chips sit in a box; between neighbours is a link of bandwidth 1 in each direction, and
where a dim wraps, also from its last chip to its first. A mesh axis of k devices splits all devices
into groups of k, and ALL groups communicate at once. A collective takes as long as its most loaded
link. So one counts, for each link, the bytes that the groups of an axis send over it:

    16 chips in a row that wraps. An axis of 4:

    neighbours (stride 1)   0 1 2 3 | 4 5 6 7 | ...      four lines; a link serves one group: 1
    far apart (stride 4)    0 4 8 12 | 1 5 9 13 | ...    rings around the whole row, used both ways:
                                                         2 directions / 4 groups per link = 0.5
    all 16 (stride 1)       0 1 2 ... 15                 one ring, both ways: 2

Where an axis lies is a Span: in each physical dim the number of chips it takes and the stride
between them. 2 x 2 neighbouring chips of a plane are sizes (2, 2, 1), strides (1, 1, 1): they form
a ring of four links, both ways, so 2, twice what four chips in a line get:

    >>> from mesh_utils import Network, Span, Topology
    >>> network = Network.of(Topology.parse("v5e:8x8"))
    >>> network.links(Span((4, 1, 1))), network.links(Span((2, 2, 1)))
    (1.0, 2.0)
    >>> network.bytes_per_second(Span((2, 2, 1))) / 1e9
    100.0

Bandwidth is "bus bandwidth": (1 - 1/k) S / seconds for an all-gather whose result is S bytes on
each device, a reduce-scatter of S, an all-to-all of S per device; an all-reduce of S takes twice
the seconds. So an axis has one number for the first three, and sizes can be compared.

Strategies of the gather family (all-gather, reduce-scatter, all-reduce), of which the best counts:

    line            along one dim, both ways: 1 / stride
    ring            along one dim that wraps, all of it: 2 / stride
    snake           one ring through all chips of a block of several dims, the same in every group:
                    2 / largest stride; where all sizes are odd there is no such ring: 1 / stride
    staggered ring  one ring that goes around a wrapped dim row by row; the rows are joined at other
                    places in other groups, so that only the wrapped dim's stride counts, as long as
                    there are places enough
    whole dims      the axis is exactly whole dims: every dim carries its own share at the same time
                    (XLA's N-D strategies): the sum of 2 per wrapped and 1 per other dim

All-to-all goes by dims in order x, y, z along shortest paths, half each way where both ways are
equal. Permute: see the section on messages.

A twisted torus (k x k x 2k, or k x 2k x 2k chips): the wrap link of a short dim leads to the chip
that lies k further along each long dim. So a short dim closes to rings only for axes that also take
both halves of every long dim.

Two devices on a chip share its links: an axis without the cores gets half. An axis with them
gathers each byte once per chip; what is between the cores is at most the HBM bandwidth of one core,
no figure being known. GPUs: a switch, so each device sends at its full bandwidth, whatever the
group. Several slices: each device moves its part (1 / ICI size of the axis) over DCN, and then
gathers inside the slice; the two do not overlap.

Invariants: bandwidth is at least 0; it does not exceed `bound`; scaling of all strides apart, it
depends on sizes, strides, wrap and twist only, not on names or ids; the same input gives the same
answer bit by bit.

What links carry, counted: for meshes whose axes are no spans, and for permutes.

A message goes to its target by dims, x before y before z, along the shortest way; where several are
equally short, each takes its share. Loads are in units of what one message carries, per directed
link. This counts what the closed forms for gathers and exchanges derive, for any
order of devices, at the cost of walking every message.

A permute is one message from each member of a group to the next, the last to the first: ring
attention and pipelines live on it, and here the ORDER within a group matters.

    >>> from mesh_utils import Network, Span, Topology
    >>> from mesh_utils.span import span_groups
    >>> network = Network.of(Topology.parse("v5e:4x4"))
    >>> row_major = span_groups(Span((4, 4, 1)), network.shape)
    >>> snake = span_groups(Span((4, 4, 1), snake=True), network.shape)
    >>> neighbour_shift(network, row_major), neighbour_shift(network, snake)
    (Shift(max_hops=6, links=1.0), Shift(max_hops=3, links=1.0))

What each axis of a mesh gets: modelled bandwidth, strategy, hops, in numbers and in words.

    >>> from mesh_utils import Mesh, Topology
    >>> topology = Topology.parse("v5e:16x16")
    >>> mesh = Mesh.arange((32, 8), ("fsdp", "tp"))
    >>> for axis in axis_reports(topology, mesh):
    ...     print(axis)
    fsdp=32 on Span(x2@8 y16): 100 GB/s modelled, 50 % of the bound (staggered ring); 9 hops
    tp=8 on Span(x8): 50 GB/s modelled, 25 % of the bound (line); 7 hops
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Literal, SupportsIndex, TypeAlias, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mesh_utils.argument_types import argument_types
from mesh_utils.errors import TopologyError
from mesh_utils.mesh import Axis, Mesh
from mesh_utils.span import Span, axis_groups, find_span, first_slice, mesh_places
from mesh_utils.topology import Box, Topology, canonical, shortest_ways

__all__ = ["exchange_load", "link_loads", "neighbour_shift", "ring_links"]


# ------------ Bandwidth of all-gather, reduce-scatter and all-reduce inside a slice, in closed form
#
# All numbers are for the chips of a box: cores, slices and bytes are added by `Network`, whose
# text says what the strategies are. Each follows from counting, for every link, which groups use
# it.
#
# With strides, t groups lie in between each other along a dim, and a link is crossed by all of them
# that have an edge there. So what one group loads with 1, all together load with t, at worst:
#
#     line: the last link carries (1 - 1/k) S of a group                  t (1 - 1/k) S
#     ring: each link carries half of that, the other half goes back      t (1 - 1/k) S / 2
#
# A pair at half the length of a dim that wraps (size 2, stride N/2) sends half each way: it loads
# with t / 2.
#
# Staggered ring. A dim p that wraps is taken whole, in rows of s chips; a ring goes through all
# rows of a group: it leaves out column a, snakes through the other columns of every row, and comes
# back along column a. A step from row to row happens at two of the columns a - 1, a, a + 1. Groups
# that lie in between each other in that other dim j differ in their column a: by 3, or by 2 where j
# has two rows only, and so there are s // 3 (s // 2) slots that share no link; of t groups at most
# ceil(t / slots) are in one slot.

FloatArray: TypeAlias = NDArray[np.float64]
IntArray: TypeAlias = NDArray[np.int64]
BoolArray: TypeAlias = NDArray[np.bool_]

STRATEGIES = ("none", "line", "path", "snake", "staggered ring", "ring", "whole dims")
"""What `gather_links` numbers: where two are equally fast, the later one counts."""


def gather_links(box: Box, sizes: IntArray, strides: IntArray) -> tuple[FloatArray, IntArray]:
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
    rings = _closed_dims(box, sizes, strides)
    dims = active.sum(axis=1)
    # A pair half way around sends half each way.
    pairs = rings & (sizes == 2) & ~_is_short(box)
    load = np.where(active, strides * np.where(pairs, 0.5, 1.0), 0.0).max(axis=1)
    with np.errstate(divide="ignore"):
        once = np.where(dims > 0, 1 / load, 0.0)
    even = (active & (sizes % 2 == 0)).any(axis=1)
    in_one_dim, in_several = dims == 1, dims > 1
    staggered = _staggered(box, sizes, strides, rings, pairs)
    whole_dims = (~active | ((strides == 1) & (sizes == np.array(box[0])))).all(axis=1)
    sum_of_dims = np.where(active, np.where(rings, 2.0, 1.0), 0.0).sum(axis=1)
    choices = np.stack(
        [
            np.where(dims == 0, np.inf, 0.0),
            np.where(in_one_dim, once, 0.0),
            np.where(in_several, once, 0.0),
            np.where(in_several & even, 2 * once, 0.0),
            np.where(in_several, staggered, 0.0),
            np.where(in_one_dim, staggered, 0.0),
            np.where(whole_dims & in_several, sum_of_dims, 0.0),
        ]
    )
    last = len(STRATEGIES) - 1 - choices[::-1].argmax(axis=0)
    return choices.max(axis=0), last


def _closed_dims(box: Box, sizes: IntArray, strides: IntArray) -> BoolArray:
    """Flags [n, 3]: the groups of a span are rings in that dim."""
    shape, wrap, twist = box
    around = (sizes > 1) & (sizes * strides == np.array(shape))
    closed: BoolArray = around & np.array(wrap, np.bool_)
    if twist:
        short = _is_short(box)
        halves: BoolArray = (short | (around & (sizes % 2 == 0))).all(axis=1)
        closed &= ~short | np.expand_dims(halves, 1)
    return closed


def _is_short(box: Box) -> BoolArray:
    """The short dims of a twisted torus, [3]; none of another one."""
    shape, _, twist = box
    return np.array([twist and size == min(shape) for size in shape])


def _staggered(
    box: Box, sizes: IntArray, strides: IntArray, rings: BoolArray, pairs: BoolArray
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
        # Two chips are a ring only alone: both ways, as every ring.
        usable = rings[:, p] & ((columns > 2) | ((sizes > 1).sum(axis=1) == 1))
        best = np.where(usable, np.maximum(best, 2 / load), best)
    return best


# ------------------------------------------ Bandwidth of all-to-all inside a slice, in closed form
#
# Each chip sends S / k to each of its group, by dims in the order x, y, z, along the shorter way,
# and half each way where both are equally long. A dim of a span is then loaded as if it were alone:
#
#     ring of s chips     each link, one way:     S t s / 8      (s even),  S t (s^2 - 1) / 8 s
#     line of s chips     the middle link:        S t floor(s/2) ceil(s/2) / s
#
# with t groups in between each other. The dims work at the same time: the slowest counts. In a
# twisted torus shortest paths cross several dims, so that they are enumerated: every link of one
# kind carries the same, because the torus looks alike from each of its chips.


def exchange_links(box: Box, sizes: IntArray, strides: IntArray) -> FloatArray:
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
    rings = _closed_dims(box, sizes, strides)
    odd = sizes % 2
    ring = (sizes**2 - odd) / (8 * sizes)
    line = (sizes // 2) * (sizes - sizes // 2) / sizes
    load = np.where(sizes > 1, strides * np.where(rings, ring, line), 0.0).max(axis=1)
    if box[2]:
        short = _is_short(box)
        whole_dims = ((sizes == 1) | ((sizes == np.array(box[0])) & rings)).all(axis=1)
        whole_dims &= ((sizes > 1) & short).any(axis=1)
        for row in np.flatnonzero(whole_dims):
            load[row] = _twisted_load(box, tuple((sizes[row] > 1).tolist()))
    chips = sizes.prod(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(chips > 1, (1 - 1 / chips) / load, np.inf)


@lru_cache(maxsize=256)
def _twisted_load(box: Box, dims: tuple[bool, ...]) -> float:
    """Load of the worst link for S = 1, where a span takes those whole dims of a twisted torus."""
    lengths = [size if is_part else 1 for size, is_part in zip(box[0], dims, strict=True)]
    targets = np.indices(lengths).reshape(3, -1).T
    steps, weights = shortest_ways(box, targets)
    # [way, chip, dim, sign]
    hops = np.stack([np.maximum(steps, 0), np.maximum(-steps, 0)], axis=-1)
    loads = (weights[:, :, None, None] * hops).sum(axis=(0, 1)) / len(targets)
    return float(loads.max())


# ----------------------------------------------------------------------------------------- Network

Collective: TypeAlias = Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all"]

COLLECTIVES: tuple[Collective, ...] = get_args(Collective)
"""The collectives that `Network.links` models."""


@dataclass(frozen=True)
class Network:
    """The links of a topology. Make one with `Network.of`.

    Attributes:
        shape: the chips of a slice in x, y and z.
        wrap: for each dim whether it wraps.
        twist: whether the slice is a twisted torus.
        switched: whether a switch joins the chips instead (GPUs).
        cores: devices per chip.
        num_slices: how many slices.
        link_bytes_per_second: one-way bandwidth of a link; None where not known.
        core_links: bandwidth between the cores of a chip, in links.
        dcn_links: bandwidth of one device to other slices, in links; None where not known.

    Example:
        >>> Network.of(Topology.parse("v5p-1024")).bound(8)
        6.0
    """

    shape: tuple[int, int, int]
    wrap: tuple[bool, bool, bool]
    twist: bool = False
    switched: bool = False
    cores: int = 1
    num_slices: int = 1
    link_bytes_per_second: float | None = None
    core_links: float = np.inf
    dcn_links: float | None = None

    @classmethod
    def of(
        cls,
        topology: Topology,
        *,
        link_bytes_per_second: float | None = None,
        dcn_bytes_per_second: float | None = None,
        core_bytes_per_second: float | None = None,
    ) -> Network:
        """Makes the network of a topology.

        Args:
            topology: its chips.
            link_bytes_per_second: one-way bandwidth of one ICI link; None for the chip's figure.
            dcn_bytes_per_second: one-way bandwidth of one CHIP to other slices; None likewise.
            core_bytes_per_second: bandwidth between the cores of a chip; None for the HBM bandwidth
                of one core, which it cannot exceed.

        Returns:
            The network.

        Raises:
            TopologyError: the topology's wrap is not known.

        Example:
            >>> Network.of(Topology.parse("v3-32"))
            Traceback (most recent call last):
            ...
            mesh_utils.errors.TopologyError: The network of Topology('v3:4x4', ...) was asked for...
        """
        if topology.wrap is None:
            raise TopologyError(
                f"The network of {topology!r} was asked for. Its wrap is not known, and it decides "
                "the bandwidth of every axis. Pass wrap= to Topology, such as "
                f"wrap={tuple(size > 2 for size in topology.shape)} for a torus, or "
                "slice_shape= for devices that are part of a slice."
            )
        chip, cores = topology.chip, topology.devices_per_chip
        link, dcn, core = link_bytes_per_second, dcn_bytes_per_second, core_bytes_per_second
        if chip is not None:
            link = link or chip.link_bytes_per_second
            dcn = dcn or chip.dcn_bytes_per_second
            hbm = chip.hbm_bytes_per_second
            core = core or (hbm / cores if hbm else None)
        return cls(
            shape=topology.shape,
            wrap=topology.wrap,
            twist=topology.twist,
            switched=topology.torus_rank == 0,
            cores=cores,
            num_slices=topology.num_slices,
            link_bytes_per_second=link,
            core_links=core / link if core and link else np.inf,
            dcn_links=dcn / cores / link if dcn and link else None,
        )

    @property
    def box(self) -> Box:
        """Shape, wrap and twist, by which ways between chips are found."""
        return self.shape, self.wrap, self.twist

    def links(self, span: Span, collective: Collective = "all-gather") -> float:
        """The bandwidth of an axis, all its groups at work.

        Args:
            span: where the axis lies.
            collective: what it does.

        Returns:
            Bus bandwidth per device in units of one link, one way; inf for an axis of one device.

        Raises:
            TopologyError: no such collective, a span that does not fit, or DCN of unknown speed.

        Example:
            >>> network = Network.of(Topology.parse("v5e:16x16"))
            >>> network.links(Span((16, 1, 1))), network.links(Span((2, 1, 1), (8, 1, 1)))
            (2.0, 0.25)
        """
        return _links(self, span, collective)

    def all_links(
        self,
        sizes: ArrayLike,
        strides: ArrayLike,
        cores: ArrayLike = 1,
        slices: ArrayLike = 1,
        collective: Collective = "all-gather",
    ) -> FloatArray:
        """The bandwidths of many spans at once, for a search. Nothing is checked.

        Args:
            sizes: chips in x, y and z, [n, 3].
            strides: chips between neighbours of the axis in x, y and z, [n, 3].
            cores: devices per chip that the axis takes, [n] or one number: 1 or `cores`.
            slices: slices that the axis takes, [n] or one number.
            collective: what the axes do.

        Returns:
            What `links` gives for each, [n].

        Example:
            >>> network = Network.of(Topology.parse("v5e:8x8"))
            >>> network.all_links([[4, 1, 1], [2, 2, 1]], np.ones((2, 3), int)).tolist()
            [1.0, 2.0]
        """
        size = np.asarray(sizes, np.int64).reshape(-1, 3)
        stride = np.asarray(strides, np.int64).reshape(-1, 3)
        core = np.broadcast_to(np.asarray(cores, np.float64), (len(size),))
        slice_ = np.broadcast_to(np.asarray(slices, np.float64), (len(size),))
        chips = size.prod(axis=1).astype(np.float64)
        devices = chips * core
        # Time inside a slice, for one byte per device, of links of one byte per second.
        if self.switched:
            per_byte = 1 - 1 / devices
        else:
            if collective == "all-to-all":
                # Whether in one group or in two, the devices of a chip send through its links.
                sharing, links = self.cores, exchange_links(self.box, size, stride)
            else:
                sharing = np.where(core == self.cores, 1.0, self.cores)
                links = gather_links(self.box, size, stride)[0]
            between = np.where(core > 1, (1 - 1 / core) / self.core_links, 0.0)
            per_byte = np.maximum(sharing * (1 - 1 / chips) / links, between)
        total = devices * slice_
        with np.errstate(divide="ignore", invalid="ignore"):
            if (slice_ > 1).any():
                rate = self._needed_dcn()
                dcn_seconds = (1 - 1 / slice_) / rate
                if collective == "all-to-all":
                    per_byte = per_byte / slice_ + dcn_seconds
                else:
                    per_byte = per_byte + dcn_seconds / devices
            return np.where(total > 1, (1 - 1 / total) / per_byte, np.inf)

    def bytes_per_second(self, span: Span, collective: Collective = "all-gather") -> float:
        """The bandwidth of an axis in bytes per second.

        Args:
            span: where the axis lies.
            collective: what it does.

        Returns:
            Bus bandwidth per device.

        Raises:
            TopologyError: as `links`; or the bandwidth of a link is not known.

        Example:
            >>> network = Network.of(Topology.parse("8xh100:8"))
            >>> network.bytes_per_second(Span((8, 1, 1))) / 1e9
            450.0
        """
        if self.link_bytes_per_second is None:
            raise TopologyError(
                "A bandwidth in bytes per second was asked for. That of one link is not known. "
                "Pass link_bytes_per_second= to Network.of, or ask for links()."
            )
        return self.links(span, collective) * self.link_bytes_per_second

    def seconds(self, span: Span, num_bytes: float, collective: Collective) -> float:
        """How long a collective takes on an axis.

        Args:
            span: where the axis lies.
            num_bytes: S: the result of an all-gather, the input of the others, per device.
            collective: what it does.

        Returns:
            Seconds, of bandwidth alone: no latency.

        Raises:
            TopologyError: as `bytes_per_second`.

        Example:
            >>> network = Network.of(Topology.parse("v5e:16x16"))
            >>> network.seconds(Span((16, 1, 1)), 100e6, "all-reduce")
            0.001875
        """
        sent_bytes = num_bytes * (1 - 1 / span.num_devices)
        passes = 2 if collective == "all-reduce" else 1
        return passes * sent_bytes / self.bytes_per_second(span, collective) if sent_bytes else 0.0

    def strategy(self, span: Span) -> str:
        """What the gather family does on an axis: the best of those in the module's text.

        Args:
            span: where the axis lies.

        Returns:
            "line", "ring", "snake", "path", "staggered ring", "whole dims"; "switch" for GPUs;
            "none" for an axis of one chip.

        Example:
            >>> network = Network.of(Topology.parse("v5e:8x8"))
            >>> network.strategy(Span((2, 2, 1))), network.strategy(Span((8, 8, 1)))
            ('snake', 'whole dims')
        """
        if self.switched:
            return "switch" if span.num_chips > 1 else "none"
        sizes, strides = np.array([span.sizes]), np.array([span.strides])
        return STRATEGIES[int(gather_links(self.box, sizes, strides)[1][0])]

    def bound(self, num_devices: SupportsIndex, slices: SupportsIndex = 1) -> float:
        """What no axis of so many devices can exceed: all links of a chip at work for it alone.

        A byte that a device receives comes through a link of its chip, so a chip at a corner, which
        has fewest, bounds all. With two devices per chip the axis may take both: each byte then
        comes once for the two.

        Args:
            num_devices: devices of the axis, over all slices.
            slices: slices of it.

        Returns:
            Bus bandwidth per device in links, of any collective; inf for one device.

        Example:
            >>> Network.of(Topology.parse("v5e:8x16")).bound(8)
            3.0
        """
        total, outer = num_devices.__index__(), slices.__index__()
        if total == 1:
            return np.inf
        links = [1 + wraps for wraps, size in zip(self.wrap, self.shape, strict=True) if size > 1]
        degree = 1.0 if self.switched else float(sum(links)) or 1.0
        cores = 1 if self.switched else self.cores
        inner = total // outer
        seconds = cores * (1 - 1 / inner) / degree  # cores in other groups share the links
        if inner % cores == 0:
            # Its cores in one group: each byte comes once for all of them.
            together = max((1 - cores / inner) / degree, (1 - 1 / cores) / self.core_links)
            seconds = min(seconds, together)
        if outer > 1:
            seconds += (1 - 1 / outer) / inner / self._needed_dcn()
        return (1 - 1 / total) / seconds if seconds else np.inf

    def _needed_dcn(self) -> float:
        if self.dcn_links is None:
            raise TopologyError(
                f"The bandwidth of an axis over {self.num_slices} slices was asked for. "
                "The figures of link and DCN of this chip are not both known. "
                "Pass link_bytes_per_second= and dcn_bytes_per_second= to Network.of."
            )
        return self.dcn_links


@lru_cache(maxsize=1 << 16)
def _links(network: Network, span: Span, collective: Collective) -> float:
    if collective not in COLLECTIVES:
        raise TopologyError(
            f"The bandwidth of {collective!r} was asked for. It is no collective of this model. "
            f"Pass one of {', '.join(COLLECTIVES)}; permute is `neighbour_shift`."
        )
    shape, cores, num_slices = network.shape, network.cores, network.num_slices
    fits = not (np.array(shape) % np.multiply(span.sizes, span.strides)).any()
    if not fits or span.cores not in (1, cores) or num_slices % span.slices:
        raise TopologyError(
            f"{span} was asked for in a box of {shape} chips of {cores} devices, {num_slices} "
            "times. Its groups do not tile that box. Pass sizes and strides whose products divide "
            f"{shape}, cores=1 or {cores}, and slices that divide {num_slices}."
        )
    links = network.all_links([span.sizes], [span.strides], span.cores, span.slices, collective)
    return float(links[0])


# ----------------------------------------------------------------------- What links carry, counted

_CHUNK = 4096
"""Messages that are routed at a time: memory stays below 30 MB."""

MAX_MESSAGES = 200_000
"""All-to-all of an axis without a span is counted up to so many messages."""


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
        >>> network = Network.of(Topology.parse("v5e:4x4"))
        >>> loads, hops = link_loads(
        ...     network, np.array([[0, 0, 0]]), np.array([[2, 0, 0]]), np.ones(1)
        ... )
        >>> loads[:, 0, 0, 0, 0].tolist(), hops
        ([1.0, 1.0, 0.0, 0.0], 2)
    """
    loads = np.zeros((*network.shape, 3, 2))
    longest = 0
    for first in range(0, len(starts), _CHUNK):
        part = slice(first, first + _CHUNK)
        steps, shares = shortest_ways(network.box, ends[part] - starts[part])
        way, message = np.nonzero(shares)
        counts = steps[way, message]
        longest = max(longest, int(np.abs(counts).sum(axis=1).max(initial=0)))
        _walk(
            network.box,
            loads,
            starts[part][message],
            counts,
            (amounts[part] * shares)[way, message],
        )
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
    starts, ends = groups.reshape(-1, 3), np.roll(groups, -1, axis=1).reshape(-1, 3)
    load, hops = worst_link(network, starts, ends)
    return Shift(hops, 1 / load if load else np.inf)


def worst_link(
    network: Network, starts: IntArray, ends: IntArray, amount: float = 1.0
) -> tuple[float, int]:
    """Finds the most loaded link.

    Args:
        network: the links.
        starts: the chip that sends, [messages, 3].
        ends: the chip that receives, [messages, 3].
        amount: what each message carries.

    Returns:
        What that link carries, 0 where nothing moves; and the links that the longest message
        crosses.
    """
    moving = (starts != ends).any(axis=1)
    if not moving.any():
        return 0.0, 0
    if network.switched:  # each device has a link to the switch, and all it sends goes over that
        _, messages = np.unique(starts[moving], axis=0, return_counts=True)
        return amount * float(messages.max()), 1
    amounts = np.full(int(moving.sum()), amount)
    loads, hops = link_loads(network, starts[moving], ends[moving], amounts)
    return float(loads.max()), hops


def ring_links(network: Network, groups: IntArray) -> float:
    """The gather family over one ring per group, in the order of the axis, half each way.

    Args:
        network: the links.
        groups: the chip of each member, [groups, members, 3].

    Returns:
        Bus bandwidth per device in links; inf where all members of a group are on one chip.

    Example:
        >>> from mesh_utils.span import Span, span_groups
        >>> network = Network.of(Topology.parse("v5e:4x4"))
        >>> ring_links(network, span_groups(Span((2, 2, 1), snake=True), network.shape))
        2.0
    """
    following = np.roll(groups, -1, axis=1).reshape(-1, 3)
    members = groups.reshape(-1, 3)
    starts, ends = np.concatenate([members, following]), np.concatenate([following, members])
    load, _ = worst_link(network, starts, ends)
    return 2 * (1 / load) if load else np.inf


def exchange_load(network: Network, groups: IntArray) -> float:
    """All-to-all in all groups at once.

    Args:
        network: the links.
        groups: the chip of each member, [groups, members, 3].

    Returns:
        Bus bandwidth per device in links; inf where all members of a group are on one chip; nan
        where more messages than MAX_MESSAGES had to be counted.

    Example:
        >>> from mesh_utils.span import Span, span_groups
        >>> network = Network.of(Topology.parse("v5e:4x4"))
        >>> exchange_load(network, span_groups(Span((4, 1, 1)), network.shape))
        0.75
    """
    count = groups.shape[1]
    if len(groups) * count * count > MAX_MESSAGES:
        return np.nan
    starts = np.repeat(groups, count, axis=1).reshape(-1, 3)
    ends = np.tile(groups, (1, count, 1)).reshape(-1, 3)
    load, _ = worst_link(network, starts, ends, 1 / count)
    return (1 - 1 / count) / load if load else np.inf


# ------------------------------------------------------------------- What each axis of a mesh gets


@dataclass(frozen=True)
class AxisReport:
    """What one axis gets, in the model.

    Attributes:
        axis: its name.
        size: its devices.
        span: where it lies; None where it does not lie in rows of chips, and then gathers are
            counted over one ring in the order of the mesh.
        strategy: what the gather family does: see `Network.strategy`; "ring in mesh order" without
            a span.
        links: bus bandwidth per device in links, by collective; nan where it was not counted.
        bound: what no axis of this size can exceed here, in links.
        max_hops: links that the longest message of a permute to the next device crosses.
        shift_links: bandwidth of that permute in links.
        link_bytes_per_second: bandwidth of a link; None where not known.
    """

    axis: Axis
    size: int
    span: Span | None
    strategy: str
    links: Mapping[Collective, float]
    bound: float
    max_hops: int
    shift_links: float
    link_bytes_per_second: float | None

    def bytes_per_second(self, collective: Collective = "all-gather") -> float | None:
        """Bus bandwidth per device.

        Args:
            collective: of what.

        Returns:
            Bytes per second; None where the bandwidth of a link is not known.
        """
        link = self.link_bytes_per_second
        return None if link is None else self.links[collective] * link

    def fraction(self, collective: Collective = "all-gather") -> float:
        """The share of the bound.

        Args:
            collective: of what.

        Returns:
            0 to 1; 1 for an axis of one device.
        """
        return 1.0 if self.size == 1 else self.links[collective] / self.bound

    @property
    def crosses_slices(self) -> bool:
        """Whether it runs over DCN."""
        return self.span is not None and self.span.slices > 1

    def __str__(self) -> str:
        where = "no rows of chips" if self.span is None else str(self.span)
        rate = self.bytes_per_second()
        speed = (
            f"{self.links['all-gather']:.3g} links" if rate is None else f"{rate / 1e9:.3g} GB/s"
        )
        share = f"{100 * self.fraction():.0f} % of the bound"
        hops = f"{self.max_hops} hop" + ("" if self.max_hops == 1 else "s")
        what = f"{speed} modelled, {share} ({self.strategy}); {hops}"
        return f"{self.axis}={self.size} on {where}: {what}"


@argument_types
def axis_reports(
    topology: Topology,
    mesh: Mesh | ArrayLike,
    axis_names: Sequence[Axis] | None = None,
    network: Network | None = None,
) -> tuple[AxisReport, ...]:
    """Reports on every axis of a mesh.

    Args:
        topology: its chips.
        mesh: a Mesh or HybridMesh, or device ids in the shape of one.
        axis_names: names of the axes of an array; None numbers them.
        network: the links, where they are not `Network.of(topology)`.

    Returns:
        A report per axis, in mesh order.

    Raises:
        MeshError: ids that are not in the topology, a wrap that is not known, or groups with more
            members in one slice than in another.
    """
    if not isinstance(mesh, Mesh):
        mesh = Mesh(mesh, np.shape(mesh), axis_names)
    links = Network.of(topology) if network is None else network
    places = mesh_places(topology, mesh.device_ids)
    return tuple(
        _report(links, name, axis_groups(places, number))
        for number, name in enumerate(mesh.axis_names)
    )


def _report(network: Network, axis: Axis, groups: IntArray) -> AxisReport:
    size = groups.shape[1]
    span = find_span(network.shape, groups)
    slices = 1 if span is None else span.slices
    inner = first_slice(groups)
    if span is not None:
        links: dict[Collective, float] = {
            collective: network.links(span, collective) for collective in COLLECTIVES
        }
        strategy = network.strategy(span)
    else:
        links = dict.fromkeys(COLLECTIVES, ring_links(network, inner))
        links["all-to-all"] = exchange_load(network, inner)
        strategy = "ring in mesh order"
    shift = neighbour_shift(network, inner)
    rate = min(shift.links, network.dcn_links or 0.0) if slices > 1 else shift.links
    return AxisReport(
        axis=axis,
        size=size,
        span=span,
        strategy=strategy,
        links=MappingProxyType(links),
        bound=network.bound(size, slices),
        max_hops=shift.max_hops,
        shift_links=rate,
        link_bytes_per_second=network.link_bytes_per_second,
    )
