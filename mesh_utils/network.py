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
equal. Permute: see network_routes.py.

A twisted torus (k x k x 2k, or k x 2k x 2k chips): the wrap link of a short dim leads to the chip
that lies k further along each long dim. So a short dim closes to rings only for axes that also take
both halves of every long dim.

Two devices on a chip share its links: an axis without the cores gets half. An axis with them
gathers each byte once per chip; what is between the cores is at most the HBM bandwidth of one core,
no figure being known. GPUs: a switch, so each device sends at its full bandwidth, whatever the
group. Several slices: each device moves its part (1 / ICI size of the axis) over DCN, and then
gathers inside the slice; the two do not overlap.

What it rests on, and what on hardware would show it wrong (docs/topology.md has more, in GB/s):

- a link carries its figure both ways at once: two neighbours that send to each other take longer
  than one that sends alone;
- wrap is as the table says: on v5e 8x16 an axis along y is not twice as fast as one along x;
- groups in between each other share links: chips 8 apart are not about 4 times slower than
  neighbours on a ring of 16;
- whole dims add up, and parts of dims do not: all of 16x16 is nearer to 2 links than to 4, or 16x8
  is well above 2;
- blocks are gathered over a ring: 2 x 2 chips are not twice as fast as 4 in a line;
- rings of groups in between each other turn at different places ("staggered ring"): such an axis
  is as slow as its largest stride says;
- two devices on a chip share its links equally; DCN and ICI phases follow each other; there is no
  latency, and one axis is at work at a time.

Invariants: bandwidth is at least 0; it does not exceed `bound`; scaling of all strides apart, it
depends on sizes, strides, wrap and twist only, not on names or ids; the same input gives the same
answer bit by bit.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, SupportsIndex, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mesh_utils.errors import TopologyError
from mesh_utils.network_bound import bound_links, chip_degree
from mesh_utils.network_exchange import exchange_links
from mesh_utils.network_gather import STRATEGIES, Links3, gather_links
from mesh_utils.span import Span
from mesh_utils.topology import Topology

Collective: TypeAlias = Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all"]

COLLECTIVES: tuple[Collective, ...] = (
    "all-gather",
    "reduce-scatter",
    "all-reduce",
    "all-to-all",
)
"""The collectives that `Network.links` models."""

FloatArray: TypeAlias = NDArray[np.float64]


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
    ) -> "Network":
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
        per_byte = self._ici_seconds(size, stride, core, chips, devices, collective)
        total = devices * slice_
        with np.errstate(divide="ignore", invalid="ignore"):
            if (slice_ > 1).any():
                rate = self._needed_dcn()
                moved = (1 - 1 / slice_) / rate
                if collective == "all-to-all":
                    per_byte = per_byte / slice_ + moved
                else:
                    per_byte = per_byte + moved / devices
            return np.where(total > 1, (1 - 1 / total) / per_byte, np.inf)

    def _ici_seconds(
        self,
        sizes: NDArray[np.int64],
        strides: NDArray[np.int64],
        cores: FloatArray,
        chips: FloatArray,
        devices: FloatArray,
        collective: Collective,
    ) -> FloatArray:
        """Time inside a slice, for one byte per device, of links of one byte per second: [n]."""
        if self.switched:
            return 1 - 1 / devices
        box: Links3 = (self.shape, self.wrap, self.twist)
        if collective == "all-to-all":
            # Whether in one group or in two, the devices of a chip send through its links.
            seconds = self.cores * (1 - 1 / chips) / exchange_links(box, sizes, strides)
        else:
            shared = np.where(cores == self.cores, 1.0, self.cores)
            seconds = shared * (1 - 1 / chips) / gather_links(box, sizes, strides)[0]
        between = np.where(cores > 1, (1 - 1 / cores) / self.core_links, 0.0)
        return np.maximum(seconds, between)

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
        return self.links(span, collective) * self._needed_link()

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
        moved = num_bytes * (1 - 1 / span.num_devices)
        passes = 2 if collective == "all-reduce" else 1
        return passes * moved / self.bytes_per_second(span, collective) if moved else 0.0

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
        box: Links3 = (self.shape, self.wrap, self.twist)
        sizes, strides = np.array([span.sizes]), np.array([span.strides])
        return STRATEGIES[int(gather_links(box, sizes, strides)[1][0])]

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
        dcn = self._needed_dcn() if outer > 1 else np.inf
        degree = 1.0 if self.switched else chip_degree(self.shape, self.wrap)
        cores = 1 if self.switched else self.cores
        return bound_links(total, outer, degree, cores, self.core_links, dcn)

    def _needed_dcn(self) -> float:
        if self.dcn_links is None:
            raise TopologyError(
                f"The bandwidth of an axis over {self.num_slices} slices was asked for. "
                "The figures of link and DCN of this chip are not both known. "
                "Pass link_bytes_per_second= and dcn_bytes_per_second= to Network.of."
            )
        return self.dcn_links

    def _needed_link(self) -> float:
        if self.link_bytes_per_second is None:
            raise TopologyError(
                "A bandwidth in bytes per second was asked for. That of one link is not known. "
                "Pass link_bytes_per_second= to Network.of, or ask for links()."
            )
        return self.link_bytes_per_second

    def check_span(self, span: Span) -> None:
        """Refuses a span that is none of this network.

        Args:
            span: where an axis lies.

        Raises:
            TopologyError: it does not tile the box, or takes cores or slices that are not there.
        """
        box = zip(span.sizes, span.strides, self.shape, strict=True)
        fits = all(length % (size * stride) == 0 for size, stride, length in box)
        if not fits or span.cores not in (1, self.cores) or self.num_slices % span.slices:
            raise TopologyError(
                f"{span} was asked for in a box of {self.shape} chips of {self.cores} devices, "
                f"{self.num_slices} times. Its groups do not tile that box. Pass sizes and strides "
                f"whose products divide {self.shape}, cores=1 or {self.cores}, and slices that "
                f"divide {self.num_slices}."
            )


@lru_cache(maxsize=1 << 16)
def _links(network: Network, span: Span, collective: Collective) -> float:
    if collective not in COLLECTIVES:
        raise TopologyError(
            f"The bandwidth of {collective!r} was asked for. It is no collective of this model. "
            f"Pass one of {', '.join(COLLECTIVES)}; permute is in network_routes.py."
        )
    network.check_span(span)
    found = network.all_links([span.sizes], [span.strides], span.cores, span.slices, collective)
    return float(found[0])
