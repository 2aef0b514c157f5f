"""How long collectives over the axes of a mesh take, in the model of network.py.

    >>> from mesh_utils import Mesh, Topology
    >>> traffic = MeshTraffic(Topology.parse("v5e:16x16"), Mesh.arange((32, 8), ("fsdp", "tp")))
    >>> traffic.seconds(("tp",), 100e6, "all-gather")
    TrafficSeconds(ici=0.00175, dcn=0.0)

Groups may be along one axis, along several at once, or along a part of one: "tp:(2)4" is the part
of tp that has size 4, with a part of size 2 outside it, as XLA writes it. Where their devices lie
is found from the topology (network.py), so any mesh will do. Groups that lie in no rows of chips
go over one ring in the order of the mesh; so does their all-to-all if it has too many messages to
be counted.

ALL OF IT IS MODELLED: bandwidth alone, no latency, one axis at work at a time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mesh_utils.errors import AxisError, TopologyError
from mesh_utils.mesh import Axis, Mesh
from mesh_utils.network import Collective, Network, exchange_load, ring_links, worst_link
from mesh_utils.span import find_span, first_slice, mesh_places
from mesh_utils.topology import Topology

__all__ = ["MeshTraffic", "TrafficSeconds", "part_groups"]

IntArray: TypeAlias = NDArray[np.int64]

_PART = re.compile(r"(.*):\((\d+)\)(\d+)", re.DOTALL)
_Key = tuple[int, bytes]


@dataclass(frozen=True, slots=True)
class TrafficSeconds:
    """The modelled time of one collective.

    Attributes:
        ici: inside the slices.
        dcn: between slices. The two phases follow each other.
    """

    ici: float
    dcn: float = 0.0


class MeshTraffic:
    """The collectives of one mesh on one topology.

    Args:
        topology: the chips.
        mesh: the mesh; its axes are those that are asked for.
        network: the links, where they are not `Network.of(topology)`.

    Raises:
        MeshError: ids that are not in the topology, or a wrap that is not known.
    """

    def __init__(self, topology: Topology, mesh: Mesh, network: Network | None = None) -> None:
        self.topology = topology
        self.mesh = mesh
        self.network = Network.of(topology) if network is None else network
        self._per_byte: dict[tuple[_Key, Collective], TrafficSeconds] = {}
        mesh_places(topology, mesh.device_ids)  # Devices that are not there, refused at once.

    def seconds(
        self, axes: Sequence[Axis], num_bytes: float, collective: Collective
    ) -> TrafficSeconds:
        """How long a collective along some axes takes, all its groups at work.

        Args:
            axes: axes, or parts of axes; none at all takes no time.
            num_bytes: the result of an all-gather, the input of the others, on each device.
            collective: what it is.

        Returns:
            Seconds, modelled.

        Raises:
            AxisError: an axis that the mesh does not have.
            TopologyError: bandwidths that are not known, or groups with more members in one slice
                than in another.
        """
        return self.group_seconds(part_groups(self.mesh, axes), num_bytes, collective)

    def group_seconds(
        self, groups: ArrayLike, num_bytes: float, collective: Collective
    ) -> TrafficSeconds:
        """How long a collective of any groups takes.

        Args:
            groups: device ids, [number of groups, members].
            num_bytes: as for `seconds`.
            collective: what it is.

        Returns:
            Seconds, modelled.

        Raises:
            TopologyError: as for `seconds`.
        """
        ids = np.asarray(groups, np.int64)
        if ids.shape[-1] <= 1 or not num_bytes:
            return TrafficSeconds(0.0)
        key = (ids.shape[-1], ids.tobytes()), collective
        if key not in self._per_byte:
            self._per_byte[key] = self._seconds_per_byte(
                mesh_places(self.topology, ids), collective
            )
        per_byte = self._per_byte[key]
        return TrafficSeconds(per_byte.ici * num_bytes, per_byte.dcn * num_bytes)

    def permute_seconds(self, pairs: ArrayLike, num_bytes: float) -> TrafficSeconds:
        """How long it takes to send from one device to another, all pairs at once.

        Args:
            pairs: device ids, from and to, [pairs, 2].
            num_bytes: what each of them sends.

        Returns:
            Seconds, modelled. Devices of one chip take none.

        Raises:
            TopologyError: bandwidths that are not known.

        Example:
            >>> from mesh_utils import Mesh, Topology
            >>> traffic = MeshTraffic(Topology.parse("v5e:4x4"), Mesh.arange((16,)))
            >>> round(traffic.permute_seconds([[0, 1], [1, 0]], 50e9).ici, 6)
            1.0
        """
        ids = np.asarray(pairs, np.int64).reshape(-1, 2)
        if not num_bytes or not len(ids):
            return TrafficSeconds(0.0)
        places = mesh_places(self.topology, ids)
        starts, ends = places[:, 0], places[:, 1]
        across = starts[:, 0] != ends[:, 0]
        moving = ~across & (starts[:, 1:4] != ends[:, 1:4]).any(axis=1)
        ici = 0.0
        for number in np.unique(starts[moving, 0]).tolist():
            there = moving & (starts[:, 0] == number)
            load, _ = worst_link(self.network, starts[there, 1:4], ends[there, 1:4])
            ici = max(ici, load / self._link_bytes_per_second())
        dcn = self.dcn_seconds(num_bytes) if across.any() else 0.0
        return TrafficSeconds(ici * num_bytes, dcn)

    def dcn_seconds(self, num_bytes: float) -> float:
        """How long each device takes to send some bytes to other slices.

        Args:
            num_bytes: of each device.

        Returns:
            Seconds, modelled.

        Raises:
            TopologyError: the bandwidth is not known.
        """
        if not num_bytes:
            return 0.0
        if self.network.dcn_links is None:
            raise TopologyError(
                f"The time of {num_bytes:.0f} bytes between slices was asked for. The bandwidth of "
                "a chip to other slices is not known. Pass dcn_bytes_per_second= to Network.of."
            )
        return num_bytes / (self.network.dcn_links * self._link_bytes_per_second())

    def slices(self, axes: Sequence[Axis]) -> int:
        """Counts the slices that a group touches.

        Args:
            axes: axes, or parts of axes.

        Returns:
            1 for groups inside a slice.

        Raises:
            AxisError: an axis that the mesh does not have.
        """
        first = part_groups(self.mesh, axes)[0]
        return len(np.unique(mesh_places(self.topology, first)[:, 0]))

    def _link_bytes_per_second(self) -> float:
        link = self.network.link_bytes_per_second
        if link is None:
            raise TopologyError(
                "A time on the links between chips was asked for. The bandwidth of one is not "
                "known. Pass link_bytes_per_second= to Network.of."
            )
        return link

    def _seconds_per_byte(self, places: IntArray, collective: Collective) -> TrafficSeconds:
        """Of groups of places, [groups, members, 5]."""
        span = find_span(self.network.shape, places)
        slices = len(np.unique(places[0, :, 0]))
        inner = places.shape[1] // slices
        if span is not None:
            local = replace(span, slices=1)
            ici = self.network.seconds(local, 1.0, collective)
        else:
            ici = self._unspanned(first_slice(places), collective)
        if slices == 1:
            return TrafficSeconds(ici)
        passes = 2 if collective == "all-reduce" else 1
        crossing = self.dcn_seconds(passes * (1 - 1 / slices))
        if collective == "all-to-all":
            return TrafficSeconds(ici / slices, crossing)
        return TrafficSeconds(ici, crossing / inner)

    def _unspanned(self, chips: IntArray, collective: Collective) -> float:
        """Seconds per byte inside a slice, of groups that lie in no rows of chips."""
        inner = chips.shape[1]
        if inner == 1:
            return 0.0
        links = exchange_load(self.network, chips) if collective == "all-to-all" else math.nan
        links = ring_links(self.network, chips) if math.isnan(links) else links
        passes = 2 if collective == "all-reduce" else 1
        return passes * (1 - 1 / inner) / (links * self._link_bytes_per_second())


def part_groups(mesh: Mesh, axes: Sequence[Axis]) -> IntArray:
    """Lists the groups of devices along axes and parts of axes.

    Args:
        mesh: the mesh.
        axes: axes as the mesh names them, or parts such as "tp:(2)4"; none at all makes each
            device a group.

    Returns:
        Device ids, [number of groups, members].

    Raises:
        AxisError: an axis that the mesh does not have, or a part that does not divide it.

    Example:
        >>> part_groups(Mesh.arange((2, 4), ("dp", "tp")), ("tp:(2)2",)).tolist()
        [[0, 1], [2, 3], [4, 5], [6, 7]]
    """
    axis_parts = [_read_axis(mesh, axis) for axis in axes]
    shape: list[int] = []
    members: list[int] = []
    for place, size in enumerate(mesh.mesh_shape):
        parts = [(outer, part) for number, outer, part in axis_parts if number == place]
        for outer, inner in pairwise(_cuts(mesh, place, parts)):
            if any(start <= outer < start * part for start, part in parts):
                members.append(len(shape))
            shape.append(inner // outer)
        if size == 1:
            shape.append(1)
    outer_dims = [number for number in range(len(shape)) if number not in members]
    width = math.prod(shape[number] for number in members)
    return mesh.device_ids.reshape(shape).transpose(*outer_dims, *members).reshape(-1, width)


def _cuts(mesh: Mesh, place: int, parts: Iterable[tuple[int, int]]) -> list[int]:
    size = mesh.mesh_shape[place]
    cuts = sorted({1, size, *(end for outer, part in parts for end in (outer, outer * part))})
    if any(inner % outer or size % inner for outer, inner in pairwise(cuts)):
        raise AxisError(
            f"Parts of axis {mesh.axis_names[place]!r} were asked for, cut at {cuts}. They do not "
            f"divide its size of {size}. Pass parts as 'axis:(size outside)size'."
        )
    return cuts


def _read_axis(mesh: Mesh, axis: Axis) -> tuple[int, int, int]:
    """The place of an axis in the mesh, the size outside the part, and that of the part."""
    if axis in mesh.axis_names:
        place = mesh.axis_names.index(axis)
        return place, 1, mesh.mesh_shape[place]
    names = [str(name) for name in mesh.axis_names]
    match = _PART.fullmatch(str(axis))
    if match is None or match[1] not in names or not int(match[2]) or not int(match[3]):
        raise AxisError(
            f"Axis {axis!r} was asked for. {mesh!r} has no such axis. "
            f"Pass some of {', '.join(names)}, or a part such as '{names[0]}:(1)2'."
        )
    return names.index(match[1]), int(match[2]), int(match[3])
