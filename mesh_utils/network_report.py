"""What each axis of a mesh gets: modelled bandwidth, strategy, hops, in numbers and in words.

    >>> from mesh_utils import Mesh, Topology
    >>> topology = Topology.parse("v5e:16x16")
    >>> mesh = Mesh.arange((32, 8), ("fsdp", "tp"))
    >>> for axis in axis_reports(topology, mesh):
    ...     print(axis)
    fsdp=32 on Span(x2@8 y16): 100 GB/s modelled, 50 % of the bound (staggered ring); 9 hops
    tp=8 on Span(x8): 50 GB/s modelled, 25 % of the bound (line); 7 hops

All of it is modelled: see network.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import ArrayLike

from mesh_utils.argument_types import argument_types
from mesh_utils.mesh import Mesh
from mesh_utils.mesh_input import Axis
from mesh_utils.mesh_spans import IntArray, axis_groups, find_span, mesh_places
from mesh_utils.network import COLLECTIVES, Collective, Network
from mesh_utils.network_routes import exchange_load, neighbour_shift, ring_links
from mesh_utils.span import Span
from mesh_utils.topology import Topology

MAX_MESSAGES = 200_000
"""All-to-all of an axis without a span is counted up to so many messages."""


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


def _in_one_slice(groups: IntArray) -> IntArray:
    """The members in the first slice: every slice has links of its own, and all are alike."""
    there = groups[..., 0] == groups[..., 0].min()
    touching = there.any(axis=1)
    return groups[touching][there[touching]].reshape(int(touching.sum()), -1, 5)


def _report(network: Network, axis: Axis, groups: IntArray) -> AxisReport:
    size = groups.shape[1]
    span = find_span(network, groups)
    slices = 1 if span is None else span.slices
    inner = _in_one_slice(groups)[..., 1:4]
    if span is not None:
        links: dict[Collective, float] = {
            collective: network.links(span, collective) for collective in COLLECTIVES
        }
        strategy = network.strategy(span)
    else:
        gathered = ring_links(network, inner)
        counted = groups.shape[0] * size * size <= MAX_MESSAGES
        exchanged = exchange_load(network, inner) if counted else float("nan")
        links = dict.fromkeys(COLLECTIVES, gathered)
        links["all-to-all"] = exchanged
        strategy = "ring in mesh order"
    shift = neighbour_shift(network, inner)
    rate = shift.links
    if slices > 1:
        rate = min(rate, network.dcn_links or 0.0)
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
