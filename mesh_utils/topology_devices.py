"""Reads a topology from devices: their slices, the box that each fills, the chip."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import SupportsIndex

import numpy as np
from numpy.typing import NDArray

from mesh_utils.device import Coords, Device
from mesh_utils.errors import MeshError, TopologyError
from mesh_utils.granule import Granule, granules
from mesh_utils.hardware import Chip, find_chip
from mesh_utils.slice_table import Shape3
from mesh_utils.topology_name import shape_text
from mesh_utils.topology_places import Places
from mesh_utils.topology_wrap import Links, read_shape, read_wrap, settle_links


@dataclass(frozen=True)
class FoundTopology:
    """What devices say, and what was settled with it.

    Attributes:
        chip: the chip; None where it is not known.
        shape: the chips of the box that each slice fills.
        origin: where the box of each slice begins.
        devices_per_chip: devices per chip.
        chips_per_host: the chips of one host.
        links: wrap and twist.
        places: where each device is.
    """

    chip: Chip | None
    shape: Shape3
    origin: tuple[Coords, ...]
    devices_per_chip: int
    chips_per_host: Shape3
    links: Links
    places: Places


def read_topology(
    devices: Iterable[object],
    chip: str | Chip | None,
    wrap: Sequence[bool] | None,
    twist: bool | None,
    slice_shape: Sequence[SupportsIndex] | None,
    granule: Granule,
    allow_unreal: bool,
) -> FoundTopology:
    """Reads devices; the arguments are those of `Topology.from_devices`.

    Args:
        devices: the devices.
        chip: the chip, where they do not tell.
        wrap: what the caller says of the wrap.
        twist: what the caller says of the twist.
        slice_shape: the whole slice of which they are part.
        granule: what makes devices one slice.
        allow_unreal: whether they may be no real slice.

    Returns:
        What was found.

    Raises:
        MeshError: devices that are no topology; see `Topology.from_devices`.
    """
    slices = granules(devices, granule)
    found_chip = _chip_of(slices, chip)
    if slices[0][0].coords is None:
        if found_chip is not None and found_chip.torus_rank:
            raise TopologyError(
                f"{sum(map(len, slices))} devices of {found_chip.title} were given without coords. "
                "A TPU's place on the torus decides its links. "
                "Pass devices with coords, or Topology.parse a name."
            )
        return _switched(slices, found_chip)
    boxes = [_box(each) for each in slices]
    shape, per_chip = boxes[0][1], boxes[0][2]
    for number, (_, other, cores) in enumerate(boxes):
        if (other, cores) != (shape, per_chip):
            raise TopologyError(
                f"{len(slices)} slices were given. Slice {number} fills {shape_text(other)} chips "
                f"of {cores} devices, slice 0 {shape_text(shape)} of {per_chip}: slices of one "
                f"topology are alike. Leave devices out until each fills {shape_text(shape)}."
            )
    origin = tuple(box[0] for box in boxes)
    whole = shape if slice_shape is None else read_shape("slice_shape", slice_shape)
    asked = "devices"
    if found_chip is not None:
        asked = f"{found_chip.name}:{shape_text(whole, found_chip.torus_rank)}"
    if slice_shape is not None:
        links = _of_part(asked, found_chip, whole, shape, origin, wrap, twist, allow_unreal)
    elif any(map(any, origin)):
        known = found_chip.slices.part_wrap(shape) if found_chip else None
        links = Links(read_wrap(asked, wrap, shape) or known, bool(twist), False)
    else:
        links = _of_whole(asked, found_chip, shape, wrap, twist, allow_unreal)
    host = (2, 2, 1) if found_chip is None else found_chip.chips_per_host
    x, y, z = (min(part, size) for part, size in zip(host, shape, strict=True))
    return FoundTopology(
        found_chip, shape, origin, per_chip, (x, y, z), links, _places(slices, origin)
    )


def _chip_of(slices: tuple[tuple[Device, ...], ...], chip: str | Chip | None) -> Chip | None:
    if chip is not None:
        return find_chip(chip) if isinstance(chip, str) else chip
    kinds = {device.kind for each in slices for device in each}
    if len(kinds) > 1:
        raise TopologyError(
            f"Devices of {len(kinds)} kinds were given: {', '.join(sorted(kinds)[:3])}. "
            "A topology has chips of one kind. Pass devices of one kind."
        )
    kind = kinds.pop()
    try:
        return find_chip(kind)
    except MeshError:  # torch_xla says "TPU" only, bare ids say nothing
        return None


def _box(devices: tuple[Device, ...]) -> tuple[Coords, Shape3, int]:
    """Where the box of a slice begins, its chips, and devices per chip."""
    chips = np.array([device.coords for device in devices], np.int64)
    cores = np.array([device.core_on_chip for device in devices], np.int64)
    low = chips.min(axis=0)
    sizes: list[int] = (chips.max(axis=0) - low + 1).tolist()
    per_chip = int(cores.max()) + 1
    counts = np.zeros((*sizes, per_chip), np.int64)
    np.add.at(counts, (*(chips - low).T, cores), 1)
    shape: Shape3 = (sizes[0], sizes[1], sizes[2])
    if (counts != 1).any():
        _refuse_holes(counts, low, shape)
    first: list[int] = low.tolist()
    return (first[0], first[1], first[2]), shape, per_chip


def _refuse_holes(counts: NDArray[np.int64], low: NDArray[np.int64], shape: Shape3) -> None:
    repeated = np.argwhere(counts > 1)
    places = repeated if repeated.size else np.argwhere(counts == 0)
    x, y, z = (places[0][:3] + low).tolist()
    core = int(places[0][3])
    where = f"core {core} of the chip at ({x}, {y}, {z})"
    if repeated.size:
        raise TopologyError(
            f"{counts.sum()} devices were given, {counts[tuple(places[0])]} of them at {where}. "
            "A place has one device. Pass each device once, with its own coords and core_on_chip."
        )
    whole = _largest_box(counts)
    raise TopologyError(
        f"{counts.sum()} devices were given in a box of {shape_text(shape)} chips of "
        f"{counts.shape[3]}. There is none at {where}, with {len(places)} places empty. "
        f"Pass the devices of a whole box, such as {shape_text(whole)} from the first chip on."
    )


def _largest_box(counts: NDArray[np.int64]) -> Shape3:
    """The largest full box that begins at the first chip; one chip where that itself is missing."""
    full = (counts == 1).all(axis=3).astype(np.int64)
    volume = full.cumsum(axis=0).cumsum(axis=1).cumsum(axis=2)
    x_, y_, z_ = np.ogrid[: full.shape[0], : full.shape[1], : full.shape[2]]
    boxes = np.where(volume == (x_ + 1) * (y_ + 1) * (z_ + 1), volume, 0)
    x, y, z = np.unravel_index(int(boxes.argmax()), boxes.shape)
    return (int(x) + 1, int(y) + 1, int(z) + 1)


def _of_whole(
    name: str,
    chip: Chip | None,
    shape: Shape3,
    wrap: Sequence[bool] | None,
    twist: bool | None,
    allow_unreal: bool,
) -> Links:
    """Links of a box at the origin: that of a real slice, or a part of one."""
    real = chip is not None and chip.slices.is_real(shape)
    if chip is None or not real:
        # It may be a part of a slice, so that nothing can be refused.
        links = settle_links(name, None, shape, wrap, twist, allow_unreal=True)
        known = chip.slices.part_wrap(shape) if chip else None
        return Links(links.wrap or known, links.twist, False)
    links = settle_links(name, chip, shape, wrap, twist, allow_unreal)
    said = (
        f"a whole slice: the devices fill {chip.name}:{shape_text(shape, chip.torus_rank)} from "
        "(0, 0, 0), as a part of a larger slice could too",
    )
    return replace(links, assumptions=(*(said if wrap is None else ()), *links.assumptions))


def _of_part(
    name: str,
    chip: Chip | None,
    whole: Shape3,
    shape: Shape3,
    origin: tuple[Coords, ...],
    wrap: Sequence[bool] | None,
    twist: bool | None,
    allow_unreal: bool,
) -> Links:
    """Links of a part of a slice: a dim wraps where the part reaches across all of it."""
    for start in origin:
        ends = [first + size for first, size in zip(start, shape, strict=True)]
        if any(end > size for end, size in zip(ends, whole, strict=True)):
            raise TopologyError(
                f"Devices of {shape_text(shape)} chips from {start} on were given with "
                f"slice_shape={whole}. They reach beyond that slice. "
                f"Pass the shape of the slice of which they are part, {tuple(ends)} or more."
            )
    links = settle_links(name, chip, whole, None, twist, allow_unreal)
    is_whole = whole == shape
    if links.twist and not is_whole:
        raise TopologyError(
            f"Devices of {shape_text(shape)} chips were given as part of a twisted "
            f"slice_shape={whole}. Its wrap links leave the part, so that it is no twisted torus. "
            "Pass twist=False and the wrap of the part, or all devices of the slice."
        )
    said = read_wrap(name, wrap, shape)
    if links.wrap is None or said is not None:
        return Links(said, links.twist, is_whole and links.is_real, links.assumptions)
    covered = [links.wrap[d] and shape[d] == whole[d] and shape[d] > 2 for d in range(3)]
    wraps = (covered[0], covered[1], covered[2])
    return Links(wraps, links.twist, is_whole and links.is_real, links.assumptions)


def _places(slices: tuple[tuple[Device, ...], ...], origin: tuple[Coords, ...]) -> Places:
    ordered = [
        sorted(each, key=lambda device: (device.process_index or 0, _by_place(device)))
        for each in slices
    ]
    flat = [device for each in ordered for device in each]
    index = np.repeat(np.arange(len(slices)), [len(each) for each in ordered])
    chips = np.array([device.coords for device in flat], np.int64)
    return Places(
        ids=np.array([device.id for device in flat], np.int64),
        processes=np.array([_process(device) for device in flat], np.int64),
        slices=index,
        coords=chips - np.array(origin, np.int64)[index],
        cores=np.array([device.core_on_chip for device in flat], np.int64),
        devices=tuple(flat),
    )


def _by_place(device: Device) -> tuple[int, int, int, int]:
    x, y, z = device.coords or (0, 0, 0)
    return (z, y, x, device.core_on_chip)


def _process(device: Device) -> int:
    return -1 if device.process_index is None else device.process_index


def _switched(slices: tuple[tuple[Device, ...], ...], chip: Chip | None) -> FoundTopology:
    """GPUs and bare ids: a granule is a row of devices behind one switch."""
    size = len(slices[0])
    flat = [device for each in slices for device in each]
    host = min(size, chip.chips_per_host[0]) if chip else size
    places = Places(
        ids=np.array([device.id for device in flat], np.int64),
        processes=np.array([_process(device) for device in flat], np.int64),
        slices=np.repeat(np.arange(len(slices)), size),
        coords=np.tile(
            np.column_stack([np.arange(size), *np.zeros((2, size))]), (len(slices), 1)
        ).astype(np.int64),
        cores=np.zeros(len(flat), np.int64),
        devices=tuple(flat),
    )
    said = "a switch: the devices have no coords, so that those of a granule are taken to be alike"
    unknown = () if chip is not None else (said,)
    links = Links((False, False, False), False, chip is not None, unknown)
    origin: tuple[Coords, ...] = ((0, 0, 0),) * len(slices)
    return FoundTopology(chip, (size, 1, 1), origin, 1, (host, 1, 1), links, places)
