"""Device: what a mesh has to know of one device, wherever it was read.

    jax.devices()                                   ids, processes, slices; on TPU coordinates
    get_topology_desc("v5e:4x4", "tpu").devices     the same, of a slice that is not here
    xr.global_runtime_device_attributes()           torch_xla: a dict per device, its name in it
    range(8)                                        ids alone
    synthetic_devices((4, 4), num_slices=2)         as libtpu would list them

`read_devices` takes all of these and gives Devices. Ids stay as they are: those of a job over
several slices, as libtpu numbers them, start at 100000 for the first slice, 200000 for the second.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex, TypeAlias, cast

import numpy as np

from mesh_utils.argument_types import argument_types
from mesh_utils.errors import MeshError
from mesh_utils.mesh_input import as_integer

Coords: TypeAlias = tuple[int, int, int]
"""The place of a chip in its slice: x, y, z."""

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
    found = tuple(_read_device(device, place) for place, device in enumerate(devices))
    if not found:
        raise MeshError(f"No devices were given. A mesh has at least one device. {_KINDS_OF_INPUT}")
    _refuse_repeated(found)
    for attribute in ("slice_index", "coords", "process_index"):
        _refuse_partial(found, attribute)
    return found


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
    host = _read_box("chips_per_host", chips_per_host)
    host = tuple(min(sizes) for sizes in zip(host, shape, strict=True))
    slices, cores = as_integer(num_slices) or 0, as_integer(cores_per_chip) or 0
    per_slice = int(np.prod(shape)) * cores
    too_large = slices > 1 and per_slice > 100_000
    filled = not any(size % part for size, part in zip(shape, host, strict=True))
    if slices < 1 or cores < 1 or not filled or too_large:
        raise MeshError(
            f"Devices were asked for with slice_shape={shape}, num_slices={num_slices}, "
            f"cores_per_chip={cores_per_chip}, chips_per_host={host}. Slices are made of whole "
            "hosts, and libtpu numbers at most 100000 devices in each of several slices. "
            "Pass counts of 1 or more, and a slice_shape that chips_per_host divides."
        )
    local = _local_devices(shape, host, cores)
    num_hosts = int(np.prod(shape)) // int(np.prod(host))
    return tuple(
        Device(
            id=number if slices == 1 else 100_000 * (index + 1) + number,
            process_index=process + index * num_hosts,
            slice_index=None if slices == 1 else index,
            coords=coords,
            core_on_chip=core,
            kind=kind,
        )
        for index in range(slices)
        for number, process, coords, core in local
    )


def _local_devices(
    shape: tuple[int, ...], host: tuple[int, ...], cores: int
) -> list[tuple[int, int, Coords, int]]:
    """Id, host, coordinates and core of each device of one slice, in libtpu's order."""
    z, y, x, core = np.indices((*reversed(shape), cores)).reshape(4, -1)
    host_shape = tuple(size // part for size, part in zip(shape, host, strict=True))
    process = x // host[0] + host_shape[0] * (y // host[1] + host_shape[1] * (z // host[2]))
    places: list[list[int]] = np.stack([process, x, y, z, core], axis=-1).tolist()
    # The sort is stable: within a host the order stays that of the ids.
    numbers: list[int] = np.argsort(process, kind="stable").tolist()
    return [(n, places[n][0], cast("Coords", tuple(places[n][1:4])), places[n][4]) for n in numbers]


def _read_box(name: str, given: Sequence[SupportsIndex]) -> tuple[int, ...]:
    sizes = tuple(as_integer(size) or 0 for size in given)
    if not 1 <= len(sizes) <= 3 or min(sizes) < 1:
        raise MeshError(
            f"Devices were asked for with {name}={given!r}. That is no box of chips. "
            "Pass up to three positive integers: the chips in x, y and z."
        )
    return (*sizes, 1, 1)[:3]


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


def _read_coords(given: object, device_id: int) -> Coords | None:
    if given is None:
        return None
    values = cast("Sequence[object]", given) if isinstance(given, (Sequence, np.ndarray)) else ()
    coords = tuple(as_integer(value) for value in values)
    if len(coords) != 3 or None in coords:
        raise MeshError(
            f"Device {device_id} has coords={given!r}. A chip has three coordinates, x, y and z. "
            "Pass the coords that the runtime gives."
        )
    return cast("Coords", coords)


def _refuse_repeated(devices: tuple[Device, ...]) -> None:
    seen: set[int] = set()
    for device in devices:
        if device.id in seen:
            raise MeshError(
                f"Device {device.id} was given twice, in a list of {len(devices)} devices. "
                "A device has one place in a mesh. Pass each device once."
            )
        seen.add(device.id)


def _refuse_partial(devices: tuple[Device, ...], attribute: str) -> None:
    missing = [device.id for device in devices if getattr(device, attribute) is None]
    if missing and len(missing) < len(devices):
        raise MeshError(
            f"{len(devices)} devices were given, of which {len(devices) - len(missing)} have "
            f"{attribute} and {len(missing)} have not, such as device {missing[0]}. "
            "Devices of one job are described alike. Pass devices of one source."
        )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
