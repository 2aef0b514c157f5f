"""The links of a slice one by one, and which mesh axes use each of them.

An axis uses a link if its messages cross it. For an axis that is exactly whole dims ("whole dims"
in network.py) these are all links of those dims. For every other axis they are the messages from
each device to the next one along the axis, the last to the first: rings, snakes and lines. Messages
take the ways that network_routes.py counts. XLA may order the members of a gather differently; the
chips stay the same.

    >>> from mesh_utils import Mesh, Topology
    >>> topology = Topology.parse("v5e:4x4")
    >>> uses = axis_links(topology, Mesh.arange((4, 4), ("dp", "tp")))
    >>> uses["tp"][0, 0, 0].tolist()  # chip (0, 0, 0): the links in x, y and z that begin there
    [True, False, False]
"""

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from mesh_utils.lattice import Box, canonical
from mesh_utils.mesh import Mesh
from mesh_utils.mesh_input import Axis
from mesh_utils.mesh_spans import axis_groups, find_span, mesh_places
from mesh_utils.network import Network
from mesh_utils.network_routes import link_loads
from mesh_utils.topology import Topology

IntArray: TypeAlias = NDArray[np.int64]
LinkFlags: TypeAlias = NDArray[np.bool_]
"""A flag for the link in each dim that begins at each chip and leads upwards, [x, y, z, dim]."""


def slice_links(network: Network) -> LinkFlags:
    """Which links there are.

    Args:
        network: the links of a topology.

    Returns:
        Flags, [x, y, z, dim]: every link once, at the end from which it leads upwards; a wrap link
        begins at the last chip of its dim.

    Example:
        >>> from mesh_utils import Topology
        >>> int(slice_links(Network.of(Topology.parse("v5e:4x4"))).sum())
        24
    """
    there = np.zeros((*network.shape, 3), np.bool_)
    if network.switched:
        return there
    for dim, wraps in enumerate(network.wrap):
        part = [slice(None)] * 3
        if not wraps:
            part[dim] = slice(0, network.shape[dim] - 1)
        there[(*part, dim)] = True
    return there


def link_ends(network: Network, flags: LinkFlags) -> tuple[IntArray, IntArray, IntArray]:
    """The chips at both ends of some links.

    Args:
        network: the links of a topology.
        flags: which of them.

    Returns:
        The chip at which each begins, [links, 3]; the one to which it leads, [links, 3]; and its
        dim, [links].

    Example:
        >>> from mesh_utils import Topology
        >>> network = Network.of(Topology.parse("v5e:16x16"))
        >>> starts, ends, dims = link_ends(network, slice_links(network))
        >>> starts[-1].tolist(), ends[-1].tolist(), int(dims[-1])
        ([15, 15, 0], [15, 0, 0], 1)
    """
    found = np.argwhere(flags)
    starts, dims = found[:, :3], found[:, 3]
    box: Box = (network.shape, network.wrap, network.twist)
    ends = canonical(box, starts + np.eye(3, dtype=np.int64)[dims])
    return starts, ends, dims


def bisection_links(network: Network) -> int:
    """The links that a plane through the middle cuts: the fewest over all dims.

    Args:
        network: the links of a topology.

    Returns:
        Links between the two halves of a slice; 0 for one chip, and where a switch joins them.

    Example:
        >>> from mesh_utils import Topology
        >>> bisection_links(Network.of(Topology.parse("v5e:16x16")))
        32
    """
    starts, ends, _ = link_ends(network, slice_links(network))
    cuts = [
        int(((starts[:, dim] < size // 2) != (ends[:, dim] < size // 2)).sum())
        for dim, size in enumerate(network.shape)
        if size > 1
    ]
    return min(cuts, default=0)


def axis_links(
    topology: Topology, mesh: Mesh, network: Network | None = None
) -> dict[Axis, LinkFlags]:
    """The links of the first slice that each axis uses.

    Args:
        topology: the chips.
        mesh: a mesh of all of them.
        network: the links, where they are not `Network.of(topology)`.

    Returns:
        For each axis, in mesh order, flags of `slice_links`.

    Raises:
        MeshError: ids that are not in the topology, or a wrap that is not known.
    """
    links = Network.of(topology) if network is None else network
    places = mesh_places(topology, mesh.device_ids)
    return {
        axis: _used(links, axis_groups(places, number))
        for number, axis in enumerate(mesh.axis_names)
    }


def _used(network: Network, groups: IntArray) -> LinkFlags:
    """The links that the groups of one axis use, [groups, members, 5]."""
    there = slice_links(network)
    span = None if network.switched else find_span(network, groups)
    if span is not None and network.strategy(span) == "whole dims":
        return there & (np.array(span.sizes) > 1)
    in_first = groups[..., 0] == 0
    # A group has as many members in each slice that it touches as in every other one.
    touching = groups[in_first.any(axis=1)]
    chips = touching[touching[..., 0] == 0][:, 1:4].reshape(len(touching), -1, 3)
    starts = chips.reshape(-1, 3)
    ends = np.roll(chips, -1, axis=1).reshape(-1, 3)
    moved = (starts != ends).any(axis=1)
    if network.switched or not moved.any():
        return np.zeros_like(there)
    # Many groups send the same messages over and over: those of the cores of a chip.
    pairs = np.unique(np.concatenate([starts[moved], ends[moved]], axis=1), axis=0)
    loads, _ = link_loads(network, pairs[:, :3], pairs[:, 3:], np.ones(len(pairs)))
    used: LinkFlags = loads[..., 0] > 0
    # A message downwards is counted at the chip that sends it, which is the upper end of its link.
    sent = np.argwhere(loads[..., 1] > 0)
    box: Box = (network.shape, network.wrap, network.twist)
    lower = canonical(box, sent[:, :3] - np.eye(3, dtype=np.int64)[sent[:, 3]])
    used[lower[:, 0], lower[:, 1], lower[:, 2], sent[:, 3]] = True
    return used
