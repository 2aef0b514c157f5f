"""From spans to devices: which device of a topology is at which place of a mesh."""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from mesh_utils.assignment_search import Found, host_parts
from mesh_utils.assignment_walk import Walk, best_walk, gathers_at_once, host_walk
from mesh_utils.network import Network
from mesh_utils.span import Shape3
from mesh_utils.topology import Topology

IntArray: TypeAlias = NDArray[np.int64]


def mesh_chips(
    network: Network,
    found: Found,
    host: Shape3 | None,
    rings: bool | None,
    chip: str | None = None,
) -> tuple[tuple[Walk, ...], tuple[IntArray, ...]]:
    """Orders the devices of each axis.

    Args:
        network: the links.
        found: where the axes lie.
        host: the chips of a host that are to follow each other; None if they need not.
        rings: whether chips may follow each other in snakes and rings; None where no gather loses
            by it.
        chip: the chip's name, where it is known.

    Returns:
        The walk of each axis, and x, y, z and core of its devices, [size, 4], from the first of a
        group on; the cores of a chip follow each other.
    """
    walks: list[Walk] = []
    if host is None or network.switched:
        walks = [
            best_walk(
                network,
                span,
                not gathers_at_once(network, span, chip) if rings is None else rings,
            )
            for span in found.spans
        ]
    else:
        parts: list[list[int]] = []
        for dim in range(3):
            sizes = tuple(span.sizes[dim] for span in found.spans)
            shared = host_parts(sizes, found.nesting[dim], host[dim])
            parts.append(shared or [1] * len(sizes))
        walks = [
            host_walk(network, span, (parts[0][axis], parts[1][axis], parts[2][axis]))
            for axis, span in enumerate(found.spans)
        ]
    members: list[IntArray] = []
    for walk, span in zip(walks, found.spans, strict=True):
        chips = np.repeat(walk.members, span.cores, axis=0)
        cores = np.tile(np.arange(span.cores), len(walk.members))
        members.append(np.column_stack([chips, cores]).astype(np.int64))
    return tuple(walks), tuple(members)


def placed_rows(
    topology: Topology,
    members: tuple[IntArray, ...],
    dcn: tuple[int, ...],
    slice_order: Sequence[int] | None = None,
) -> IntArray:
    """Finds the device at each place of a mesh.

    Args:
        topology: the chips.
        members: x, y, z and core of the devices of each axis, [size, 4].
        dcn: the size of each axis across slices, which is the outer part.
        slice_order: the slices in the order of those axes; None for ascending.

    Returns:
        For each place of the mesh the device's place in the topology's list.

    Example:
        >>> columns = np.array([[0, 0, 0, 0], [1, 0, 0, 0]])
        >>> rows = np.array([[0, 0, 0, 0], [0, 1, 0, 0]])
        >>> placed_rows(Topology.parse("2xv5e:2x2"), (columns, rows), (1, 2)).tolist()
        [[0, 2, 4, 6], [1, 3, 5, 7]]
    """
    box = (topology.num_slices, *topology.shape, topology.devices_per_chip)
    rows = np.zeros(box, np.int64)
    rows[  # its place in the list, by slice, chip and core
        (topology.slice_index, *topology.coords.T, topology.core_on_chip)
    ] = np.arange(topology.num_devices)
    if slice_order is not None:
        rows = rows[list(slice_order)]
    ici = tuple(len(each) for each in members)
    place = np.zeros((*ici, 4), np.int64)
    for axis, each in enumerate(members):
        shape = [1] * len(ici)
        shape[axis] = ici[axis]
        place = place + each.reshape(*shape, 4)
    x, y, z, core = np.moveaxis(place, -1, 0)
    blocks = rows[:, x, y, z, core].reshape(*dcn, *ici)
    pairs = zip(range(len(ici)), range(len(ici), 2 * len(ici)), strict=True)
    outer_first = [axis for pair in pairs for axis in pair]
    sizes = [outer * inner for outer, inner in zip(dcn, ici, strict=True)]
    return np.ascontiguousarray(blocks.transpose(outer_first).reshape(sizes))
