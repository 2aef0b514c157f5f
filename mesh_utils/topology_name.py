r"""Reads the name of a topology.

    v5p-128             Cloud's accelerator type: the chip and its number of cores (v2 to v5p,
    v5litepod-16        tpu7x) or chips (v5e, v6e); the table of slices gives the shape
    v5p:4x4x8           the chip and the shape of the slice, as libtpu and GKE name it
    v5p:4x4x8_twisted   the same slice as a twisted torus; _untwisted says that it is none
    4xv5e:16x16         four such slices; 4xv5litepod-256 is the same
    h100-64             GPUs by number: 8 nodes of 8; 8xh100:8 is the same

Names of chips are those of `find_chip`.
"""

import math
import re
from dataclasses import dataclass

from mesh_utils.errors import TopologyError
from mesh_utils.hardware import Chip, find_chip
from mesh_utils.hardware_file import read_box
from mesh_utils.slice_table import Shape3

_SLICES = re.compile(r"(\d+)\s*[x*]\s*(?=[a-z])", re.IGNORECASE)
_SHAPE = re.compile(r"(.+?)[:=]([0-9x]+)(_twisted|_untwisted)?", re.IGNORECASE)
_COUNT = re.compile(r"(.+)-(\d+)")


@dataclass(frozen=True)
class TopologyName:
    """What a name says.

    Attributes:
        chip: the chip.
        shape: the chips of one slice in x, y and z.
        num_slices: how many slices; None where the name does not say.
        twist: whether the name says that the slice is twisted, or that it is not; else None.
    """

    chip: Chip
    shape: Shape3
    num_slices: int | None
    twist: bool | None


def read_topology_name(name: str) -> TopologyName:
    """Reads a name.

    Args:
        name: a Cloud accelerator type, or a chip and a shape; "4x" before it for four slices.

    Returns:
        What it says. The shape need not be that of a real slice.

    Raises:
        MeshError: it has no such form, there is no such chip, or no slice has so many chips.

    Example:
        >>> found = read_topology_name("2xv5litepod-16")
        >>> found.chip.name, found.shape, found.num_slices
        ('v5e', (4, 4, 1), 2)
    """
    text = name.strip()
    several = _SLICES.match(text)
    num_slices = None if several is None else int(several[1])
    rest = text if several is None else text[several.end() :]
    if by_shape := _SHAPE.fullmatch(rest):
        chip = find_chip(by_shape[1])
        suffix = by_shape[3]
        twist = None if suffix is None else suffix.lower() == "_twisted"
        return TopologyName(chip, read_box(by_shape[2]), num_slices, twist)
    if by_count := _COUNT.fullmatch(rest):
        chip = find_chip(by_count[1])
        if chip.torus_rank == 0:
            return _gpus(name, chip, int(by_count[2]), num_slices)
        return TopologyName(chip, _shape_of(name, chip, int(by_count[2])), num_slices, None)
    chip = find_chip(rest)  # "h100": a whole node
    if chip.torus_rank == 0:
        return TopologyName(chip, chip.slices.shapes[0], num_slices, None)
    examples = ", ".join(_cloud_names(chip)[2:5])
    raise TopologyError(
        f"Topology {name!r} was asked for. It names a chip and no slice of it. "
        f"Pass a size or a shape with it, such as {examples} or {chip.name}:"
        f"{shape_text(chip.slices.shapes[-1], chip.torus_rank)}."
    )


def shape_text(shape: Shape3, rank: int = 3) -> str:
    """Writes a shape as names do.

    Args:
        shape: chips in x, y and z.
        rank: how many sizes to write at least: the chip's torus_rank.

    Returns:
        The sizes with "x" between them; sizes of 1 at the end are left out beyond `rank`.

    Example:
        >>> shape_text((2, 2, 1)), shape_text((16, 16, 1), 2), shape_text((8, 1, 1), 0)
        ('2x2x1', '16x16', '8')
    """
    needed = max([place + 1 for place, size in enumerate(shape) if size > 1], default=1)
    return "x".join(map(str, shape[: max(rank, needed)]))


def cloud_name(chip: Chip, shape: Shape3) -> str | None:
    """Cloud's accelerator type of a slice.

    Args:
        chip: the chip.
        shape: chips in x, y and z.

    Returns:
        Its name; None where a number does not stand for this shape.

    Example:
        >>> cloud_name(find_chip("v5p"), (4, 4, 4)), cloud_name(find_chip("v5p"), (4, 4, 16))
        ('v5p-128', None)
    """
    count = math.prod(shape)
    if chip.torus_rank == 0 or chip.slices.of_chips(count) != shape:
        return None
    cores = chip.cores_per_chip if chip.cloud_counts == "cores" else 1
    return f"{chip.cloud_names[0]}-{count * cores}"


def _cloud_names(chip: Chip) -> list[str]:
    names = (cloud_name(chip, shape) for shape in chip.slices.shapes)
    return [name for name in names if name is not None]


def _shape_of(name: str, chip: Chip, number: int) -> Shape3:
    cores = chip.cores_per_chip if chip.cloud_counts == "cores" else 1
    shape = chip.slices.of_chips(number // cores) if number % cores == 0 else None
    if shape is not None:
        return shape
    near = [
        f"{chip.cloud_names[0]}-{count * cores}"
        for count in chip.slices.nearest_counts(number / cores)
    ]
    raise TopologyError(
        f"Topology {name!r} was asked for: {number} {chip.cloud_counts} of {chip.title}. "
        f"No listed slice has so many. Pass {' or '.join(near)}, or a shape, such as "
        f"{chip.name}:{shape_text(chip.slices.shapes[-1], chip.torus_rank)}."
    )


def _gpus(name: str, chip: Chip, count: int, num_slices: int | None) -> TopologyName:
    domain, host = chip.slices.shapes[0][0], chip.chips_per_host[0]
    if 0 < count <= domain and (count <= host or count % host == 0):
        return TopologyName(chip, (count, 1, 1), num_slices, None)
    if count % domain == 0 and count and num_slices is None:
        return TopologyName(chip, (domain, 1, 1), count // domain, None)
    lower = max(count // domain * domain, domain)
    raise TopologyError(
        f"Topology {name!r} was asked for: {count} GPUs. {chip.title} has {domain} in an NVLink "
        f"domain and {host} in a host. Pass {chip.name}-{lower} or {chip.name}-{lower + domain}."
    )
