"""Device: what a mesh has to know of one device, wherever it was read.

    jax.devices()                                   ids, processes, slices; on TPU coordinates
    get_topology_desc("v5e:4x4", "tpu").devices     the same, of a slice that is not here
    xr.global_runtime_device_attributes()           torch_xla: a dict per device, its name in it
    range(8)                                        ids alone
    synthetic_devices((4, 4), num_slices=2)         as libtpu would list them

`read_devices` takes all of these and gives Devices. Ids stay as they are: those of a job over
several slices, as libtpu numbers them, start at 100000 for the first slice, 200000 for the second.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, SupportsIndex, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from mesh_utils.argument_types import argument_types
from mesh_utils.errors import MeshError, TopologyError
from mesh_utils.hardware import Chip, Shape3, find_chip, read_box
from mesh_utils.mesh import as_integer

__all__ = []


# ------------------------------------------------------------------------------------------ Device

Coords: TypeAlias = tuple[int, int, int]
"""The place of a chip in its slice: x, y, z."""

DeviceArray: TypeAlias = NDArray[np.object_]
"""An array of Devices, or of a runtime's devices."""

_NAME = re.compile(r"(.*\S)\s*:\s*(\d+)")

_KINDS_OF_INPUT = (
    "Pass jax.devices(), xr.global_runtime_device_attributes() of torch_xla, Devices or device ids."
)


@dataclass(frozen=True, slots=True)
class Device:
    """One device of a job.

    Attributes:
        id: the number by which the runtime knows it, unique in the job.
        process_index: the process that drives it; None where the runtime does not say.
        slice_index: its slice (TPU: the chips joined by ICI; GPU: the NVLink domain); None where
            the runtime does not say, as for a job on one slice.
        coords: the place of its chip in the slice, (x, y, z); None for what is no TPU.
        core_on_chip: its number on the chip, 0 where a chip is one device.
        kind: the name of the chip, such as "TPU v5 lite"; only "TPU" where the runtime tells no
            more, as torch_xla does; "" for bare ids.

    Example:
        >>> Device(5, coords=(1, 1, 0), kind="TPU v5 lite").slice_index is None
        True
    """

    id: int
    process_index: int | None = None
    slice_index: int | None = None
    coords: Coords | None = None
    core_on_chip: int = 0
    kind: str = ""


def read_devices(devices: Iterable[object]) -> tuple[Device, ...]:
    """Reads the devices of a runtime.

    Args:
        devices: JAX devices, torch_xla's attribute dicts, Devices or ids; an array of them may
            have any shape.

    Returns:
        The devices, in the order given.

    Raises:
        MeshError: what is no device, no device at all, one device twice, or something that only
            some of the devices have: a slice_index, coords or a process_index.

    Example:
        >>> read_devices([{"name": "TPU:1", "coords": [1, 0, 0], "core_on_chip": 0}])[0].coords
        (1, 0, 0)
        >>> [device.id for device in read_devices(range(3))]
        [0, 1, 2]
    """
    if isinstance(devices, np.ndarray):
        devices = cast("np.ndarray[Any, Any]", devices).reshape(-1)
    if isinstance(devices, (str, bytes, Mapping)) or not hasattr(devices, "__iter__"):
        kind = type(cast("object", devices)).__name__
        raise MeshError(
            f"Devices were given as one {kind}. That is no list of devices. {_KINDS_OF_INPUT}"
        )
    described = tuple(_read_device(device, place) for place, device in enumerate(devices))
    if not described:
        raise MeshError(f"No devices were given. A mesh has at least one device. {_KINDS_OF_INPUT}")
    _refuse_repeated(described)
    for attribute in ("slice_index", "coords", "process_index"):
        without = [device.id for device in described if getattr(device, attribute) is None]
        if without and len(without) < len(described):
            raise MeshError(
                f"{len(described)} devices were given, of which {len(described) - len(without)} "
                f"have {attribute} and {len(without)} have not, such as device {without[0]}. "
                "Devices of one job are described alike. Pass devices of one source."
            )
    return described


def device_array(devices: Iterable[object], shape: Sequence[int]) -> DeviceArray:
    """Lays devices out.

    Args:
        devices: as many as the shape has places, in row-major order.
        shape: of the array.

    Returns:
        Them in that shape. numpy would look into what can be indexed.

    Example:
        >>> device_array([{"name": "TPU:0"}, {"name": "TPU:1"}], (2, 1))[1, 0]
        {'name': 'TPU:1'}
    """
    listed = list(devices)
    array = np.empty(len(listed), object)
    array[:] = listed
    return array.reshape(shape)


@argument_types
def synthetic_devices(
    slice_shape: Sequence[SupportsIndex],
    num_slices: int = 1,
    cores_per_chip: int = 1,
    chips_per_host: Sequence[SupportsIndex] = (2, 2, 1),
    kind: str = "TPU",
) -> tuple[Device, ...]:
    """Makes the devices of TPU slices that are not here, as libtpu lists them.

    libtpu lists slice by slice, host by host, and within both x runs fastest. Ids count the cores
    of a chip fastest, then x, y, z over the slice; in a job over several slices those of slice s
    start at 100000 * (s + 1), and the processes are numbered through.

    Args:
        slice_shape: chips in x, y and, unless 1, z.
        num_slices: how many such slices; devices have a slice_index if there are several.
        cores_per_chip: devices per chip: 2 for v2, v3 and TPU7x.
        chips_per_host: chips of one host in x, y and z, at most those of the slice.
        kind: the name of the chip.

    Returns:
        The devices, in libtpu's order.

    Raises:
        MeshError: sizes that are no positive integers, a slice that hosts do not fill, or slices
            too large for libtpu's ids.

    Example:
        >>> [device.id for device in synthetic_devices((4, 2))]
        [0, 1, 4, 5, 2, 3, 6, 7]
        >>> [device.id for device in synthetic_devices((2, 1), num_slices=2)]
        [100000, 100001, 200000, 200001]
    """
    shape = _read_box("slice_shape", slice_shape)
    x, y, z = map(min, _read_box("chips_per_host", chips_per_host), shape)
    host = (x, y, z)
    slices, cores = as_integer(num_slices) or 0, as_integer(cores_per_chip) or 0
    per_slice = int(np.prod(shape)) * cores
    too_large = slices > 1 and per_slice > IDS_PER_SLICE
    filled = not any(size % part for size, part in zip(shape, host, strict=True))
    if slices < 1 or cores < 1 or not filled or too_large:
        raise MeshError(
            f"Devices were asked for with slice_shape={shape}, num_slices={num_slices}, "
            f"cores_per_chip={cores_per_chip}, chips_per_host={host}. Slices are made of whole "
            "hosts, and libtpu numbers at most 100000 devices in each of several slices. "
            "Pass counts of 1 or more, and a slice_shape that chips_per_host divides."
        )
    return devices_at(synthetic_places(shape, host, cores, slices), kind, slices > 1)


def _read_box(name: str, box: Sequence[SupportsIndex]) -> Shape3:
    sizes = tuple(as_integer(size) or 0 for size in box)
    if not 1 <= len(sizes) <= 3 or min(sizes) < 1:
        raise MeshError(
            f"Devices were asked for with {name}={box!r}. That is no box of chips. "
            "Pass up to three positive integers: the chips in x, y and z."
        )
    x, y, z, *_ = (*sizes, 1, 1)
    return (x, y, z)


def _read_device(device: object, place: int) -> Device:
    number = as_integer(device)
    if isinstance(device, Device):
        return device
    if number is not None:
        return Device(number)
    if isinstance(device, Mapping):
        return _from_attributes(cast("Mapping[str, object]", device), place)
    number = as_integer(getattr(device, "id", None))
    if number is None:
        raise MeshError(
            f"Device {place} of the list is {_short(device)}. It is no device that is known here. "
            f"{_KINDS_OF_INPUT}"
        )
    # Only the coords of a TPU are places on a torus, whatever other platforms call coords.
    on_torus = str(getattr(device, "platform", "tpu")).lower() == "tpu"
    return Device(
        id=number,
        process_index=as_integer(getattr(device, "process_index", None)),
        slice_index=as_integer(getattr(device, "slice_index", None)),
        coords=_read_coords(getattr(device, "coords", None), number) if on_torus else None,
        core_on_chip=(as_integer(getattr(device, "core_on_chip", 0)) or 0) if on_torus else 0,
        kind=str(getattr(device, "device_kind", "")),
    )


def _from_attributes(attributes: Mapping[str, object], place: int) -> Device:
    """A device of torch_xla, which names it "TPU:3" and leaves out what it does not know."""
    match = _NAME.fullmatch(str(attributes.get("name", "")))
    if match is None:
        raise MeshError(
            f"Device {place} of the list is {_short(attributes)}. It has no name such as 'TPU:3', "
            "from which torch_xla's devices get their id. "
            "Pass xr.global_runtime_device_attributes() as it is."
        )
    on_torus = match[1].upper().startswith("TPU")
    number = int(match[2])
    return Device(
        id=number,
        process_index=as_integer(attributes.get("process_index")),
        slice_index=as_integer(attributes.get("slice_index")),
        coords=_read_coords(attributes.get("coords"), number) if on_torus else None,
        core_on_chip=(as_integer(attributes.get("core_on_chip")) or 0) if on_torus else 0,
        kind=str(attributes.get("device_kind", match[1])),
    )


def _read_coords(coordinates: object, device_id: int) -> Coords | None:
    if coordinates is None:
        return None
    values = (
        cast("Sequence[object]", coordinates)
        if isinstance(coordinates, (Sequence, np.ndarray))
        else ()
    )
    coords = tuple(as_integer(coordinate) for coordinate in values)
    if len(coords) != 3 or None in coords:
        raise MeshError(
            f"Device {device_id} has coords={coordinates!r}. "
            "A chip has three coordinates, x, y and z. Pass the coords that the runtime gives."
        )
    return cast("Coords", coords)


def _refuse_repeated(devices: tuple[Device, ...]) -> None:
    ids: set[int] = set()
    for device in devices:
        if device.id in ids:
            raise MeshError(
                f"Device {device.id} was given twice, in a list of {len(devices)} devices. "
                "A device has one place in a mesh. Pass each device once."
            )
        ids.add(device.id)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


# ------------------------------------------------------------------------------------------ Places
#
# Where devices are, as arrays.
#
# libtpu numbers devices with the core of a chip fastest, then x, y, z; it lists them host by host.
# The ids of several slices start at 100000 for the first, 200000 for the second; hosts (processes)
# are numbered through.

IDS_PER_SLICE = 100_000
"""libtpu's ids of one of several slices."""


@dataclass(frozen=True, eq=False)
class Places:
    """Columns, one entry per device, in libtpu's order.

    Attributes:
        ids: the number by which the runtime knows it, [devices].
        processes: the process that drives it, [devices]; -1 where not known.
        slices: its slice, [devices], counted from 0.
        coords: its chip in the box, [devices, 3].
        cores: its number on the chip, [devices].
        devices: the devices that were read; () for synthetic ones.
    """

    ids: NDArray[np.int64]
    processes: NDArray[np.int64]
    slices: NDArray[np.int64]
    coords: NDArray[np.int64]
    cores: NDArray[np.int64]
    devices: tuple[Device, ...] = ()


def synthetic_places(shape: Shape3, host: Shape3, cores: int, num_slices: int) -> Places:
    """The places of devices as libtpu lists them.

    Args:
        shape: chips of a slice in x, y and z.
        host: chips of a host.
        cores: devices per chip.
        num_slices: how many such slices.

    Returns:
        Them, without devices.
    """
    z, y, x, core = np.indices((*reversed(shape), cores)).reshape(4, -1)
    hosts = [-(-size // part) for size, part in zip(shape, host, strict=True)]
    process = x // host[0] + hosts[0] * (y // host[1] + hosts[1] * (z // host[2]))
    order = np.argsort(process, kind="stable")  # within a host the order stays that of the ids
    base = IDS_PER_SLICE * np.arange(1, num_slices + 1) if num_slices > 1 else np.zeros(1, np.int64)
    slices = np.repeat(np.arange(num_slices), order.size)
    return Places(
        ids=(base[:, None] + order).reshape(-1).astype(np.int64),
        processes=np.tile(process[order], num_slices) + slices * int(np.prod(hosts)),
        slices=slices,
        coords=np.tile(np.column_stack([x, y, z])[order], (num_slices, 1)),
        cores=np.tile(core[order], num_slices),
    )


def devices_at(
    places: Places, kind: str, several: bool, on_torus: bool = True
) -> tuple[Device, ...]:
    """The devices of places.

    Args:
        places: where they are.
        kind: the name of the chip.
        several: whether there are several slices, so that each has a slice_index.
        on_torus: whether they have coords.

    Returns:
        A device for each place, in the same order.
    """
    columns = (places.ids, places.processes, places.slices, places.coords, places.cores)
    return tuple(
        Device(
            id=number,
            process_index=process,
            slice_index=index if several else None,
            coords=(chip[0], chip[1], chip[2]) if on_torus else None,
            core_on_chip=core,
            kind=kind,
        )
        for number, process, index, chip, core in zip(
            *(column.tolist() for column in columns), strict=True
        )
    )


# ---------------------------------------------------------------------------------------- Granules
#
# The sets of devices that the fast network joins.
#
# On TPU a granule is a slice, joined by ICI; on GPU an NVLink domain. Between granules is DCN, the
# data centre network, ten and more times slower. Runtimes do not always say where the border is, so
# it can be told in four ways:
#
#     granule="slice"       by slice_index; devices that have none are one slice
#     granule="process"     by process: one granule per host where a process drives a host
#     granule=72            72 devices that follow each other by id, such as an NVL72 rack
#     granule=rack_of       by what a function says of each device, such as its rack

Granule: TypeAlias = Literal["slice", "process"] | int | Callable[[Device], Hashable]
"""What makes devices one granule: a rule by name, a size, or a function that gives the same key
for devices of the same granule."""

_CHOICES = "Pass 'slice', 'process', a number of devices, or a function of a Device."


@argument_types
def granules(
    devices: Iterable[object], granule: Granule = "slice"
) -> tuple[tuple[Device, ...], ...]:
    """Sorts devices into granules.

    Args:
        devices: whatever `read_devices` reads.
        granule: what makes devices one granule.

    Returns:
        The granules in the order of their keys (slice, process, least id, what the function
        gives); the devices of each in the order of their ids.

    Raises:
        MeshError: granules of different sizes, a size that does not divide the devices, TPU devices
            of different slices in one granule, keys that have no order, or what is no granule.

    Example:
        >>> [[device.id for device in each] for each in granules(range(6), 3)]
        [[0, 1, 2], [3, 4, 5]]
        >>> len(granules(range(6)))
        1
    """
    ordered = sorted(read_devices(devices), key=lambda device: device.id)
    members: dict[Hashable, list[Device]] = {}
    for device, key in zip(ordered, _keys(ordered, granule), strict=True):
        members.setdefault(key, []).append(device)
    _refuse_unequal(members, granule)
    try:
        keys = cast("list[Hashable]", sorted(cast("Iterable[Any]", members)))
    except TypeError:
        raise MeshError(
            f"{_request(granule)}, with {len(ordered)} devices. Its keys, such as "
            f"{list(members)[:2]}, have no order among them. "
            "Let it return integers, strings, or tuples of them."
        ) from None
    for key in keys:
        _refuse_mixed_slices(members[key], granule)
    return tuple(tuple(members[key]) for key in keys)


def describe_granule(granule: Granule) -> str:
    """Writes a granule as it was passed.

    Args:
        granule: the granule.

    Returns:
        The text; a function by its name.

    Example:
        >>> describe_granule("slice"), describe_granule(8)
        ("'slice'", '8')
    """
    return getattr(granule, "__name__", None) or repr(granule)


def _request(granule: Granule) -> str:
    return f"granule={describe_granule(granule)} was asked for"


def _keys(devices: list[Device], granule: Granule) -> list[Hashable]:
    """The granule of each device, which are in the order of their ids."""
    if granule == "slice":
        return [device.slice_index or 0 for device in devices]
    if granule == "process":
        if devices[0].process_index is None:
            raise MeshError(
                f"{_request(granule)}, with {len(devices)} devices. They have no "
                "process_index, which torch_xla and bare ids do not tell. "
                "Pass granule='slice', or the number of devices per process."
            )
        return [device.process_index for device in devices]
    if callable(granule):
        return [_called(granule, device) for device in devices]
    size = as_integer(granule)
    if size is None:
        raise MeshError(
            f"{_request(granule)}, with {len(devices)} devices. There is no such granule. "
            f"{_CHOICES}"
        )
    if size < 1 or len(devices) % size:
        nearest = max(
            n for n in range(1, min(max(size, 1), len(devices)) + 1) if len(devices) % n == 0
        )
        raise MeshError(
            f"{_request(granule)}, with {len(devices)} devices. "
            f"They are no whole number of granules of {size}. "
            f"Pass a size that divides {len(devices)}, such as {nearest}."
        )
    return [place // size for place in range(len(devices))]


def _called(granule: Callable[[Device], Hashable], device: Device) -> Hashable:
    key = granule(device)
    try:
        hash(key)
    except TypeError:
        raise MeshError(
            f"{_request(granule)}. It gives {key!r} for device {device.id}, which cannot be the "
            "key of a set. Let it return integers, strings, or tuples of them."
        ) from None
    return key


def _refuse_unequal(members: dict[Hashable, list[Device]], granule: Granule) -> None:
    sizes = {key: len(devices) for key, devices in members.items()}
    if len(set(sizes.values())) == 1:
        return
    usual = Counter(sizes.values()).most_common(1)[0][0]
    odd = next(key for key, size in sizes.items() if size != usual)
    raise MeshError(
        f"{_request(granule)}: it makes {len(sizes)} granules of {min(sizes.values())} to "
        f"{max(sizes.values())} devices; granule {odd!r} has {sizes[odd]}, others have {usual}. "
        "Granules of one mesh have one size. "
        "Leave out devices until they have, or pass another granule."
    )


def _refuse_mixed_slices(devices: list[Device], granule: Granule) -> None:
    # On GPU a runtime may call each host a slice although NVLink joins several.
    slices = sorted({d.slice_index for d in devices if d.slice_index is not None})
    if len(slices) > 1 and devices[0].coords is not None:
        raise MeshError(
            f"{_request(granule)}: it puts devices of the slices {slices[0]} and {slices[1]} into "
            "one granule. Slices of TPUs are joined by DCN only. "
            "Pass granule='slice', or one that divides slices."
        )


# -------------------------------------------------------------------- Reads the name of a topology
#
#     v5p-128             Cloud's accelerator type: the chip and its number of cores (v2 to v5p,
#     v5litepod-16        tpu7x) or chips (v5e, v6e); the table of slices gives the shape
#     v5p:4x4x8           the chip and the shape of the slice, as libtpu and GKE name it
#     v5p:4x4x8_twisted   the same slice as a twisted torus; _untwisted says that it is none
#     4xv5e:16x16         four such slices; 4xv5litepod-256 is the same
#     h100-64             GPUs by number: 8 nodes of 8; 8xh100:8 is the same
#
# Names of chips are those of `find_chip`.

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
        >>> named = read_topology_name("2xv5litepod-16")
        >>> named.chip.name, named.shape, named.num_slices
        ('v5e', (4, 4, 1), 2)
    """
    text = name.strip()
    several = _SLICES.match(text)
    num_slices = None if several is None else int(several[1])
    slice_name = text if several is None else text[several.end() :]
    if by_shape := _SHAPE.fullmatch(slice_name):
        chip = find_chip(by_shape[1])
        suffix = by_shape[3]
        twist = None if suffix is None else suffix.lower() == "_twisted"
        return TopologyName(chip, read_box(by_shape[2]), num_slices, twist)
    if by_count := _COUNT.fullmatch(slice_name):
        chip = find_chip(by_count[1])
        if chip.torus_rank == 0:
            return _gpus(name, chip, int(by_count[2]), num_slices)
        return TopologyName(chip, _shape_of(name, chip, int(by_count[2])), num_slices, None)
    chip = find_chip(slice_name)  # "h100": a whole node
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
    min_rank = max([place + 1 for place, size in enumerate(shape) if size > 1], default=1)
    return "x".join(map(str, shape[: max(rank, min_rank)]))


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
