"""Granules: the sets of devices that the fast network joins.

On TPU a granule is a slice, joined by ICI; on GPU an NVLink domain. Between granules is DCN, the
data centre network, ten and more times slower. Runtimes do not always say where the border is, so
it can be told in four ways:

    granule="slice"       by slice_index; devices that have none are one slice
    granule="process"     by process: one granule per host where a process drives a host
    granule=72            72 devices that follow each other by id, such as an NVL72 rack
    granule=rack_of       by what a function says of each device, such as its rack
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from typing import Any, Literal, TypeAlias, cast

from mesh_utils.argument_types import argument_types
from mesh_utils.device import Device, read_devices
from mesh_utils.errors import MeshError
from mesh_utils.mesh_input import as_integer

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
    found = sorted(read_devices(devices), key=lambda device: device.id)
    members: dict[Hashable, list[Device]] = {}
    for device, key in zip(found, _keys(found, granule), strict=True):
        members.setdefault(key, []).append(device)
    _refuse_unequal(members, granule)
    try:
        keys = cast("list[Hashable]", sorted(cast("Iterable[Any]", members)))
    except TypeError:
        raise MeshError(
            f"{_asked(granule)}, with {len(found)} devices. Its keys, such as "
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


def _asked(granule: Granule) -> str:
    return f"granule={describe_granule(granule)} was asked for"


def _keys(devices: list[Device], granule: Granule) -> list[Hashable]:
    """The granule of each device, which are in the order of their ids."""
    if granule == "slice":
        return [device.slice_index or 0 for device in devices]
    if granule == "process":
        if devices[0].process_index is None:
            raise MeshError(
                f"{_asked(granule)}, with {len(devices)} devices. They have no process_index, "
                "which torch_xla and bare ids do not tell. "
                "Pass granule='slice', or the number of devices per process."
            )
        return [device.process_index for device in devices]
    if callable(granule):
        return [_called(granule, device) for device in devices]
    size = as_integer(granule)
    if size is None:
        raise MeshError(
            f"{_asked(granule)}, with {len(devices)} devices. There is no such granule. {_CHOICES}"
        )
    if size < 1 or len(devices) % size:
        nearest = max(
            n for n in range(1, min(max(size, 1), len(devices)) + 1) if len(devices) % n == 0
        )
        raise MeshError(
            f"{_asked(granule)}, with {len(devices)} devices. "
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
            f"{_asked(granule)}. It gives {key!r} for device {device.id}, which cannot be the key "
            "of a set. Let it return integers, strings, or tuples of them."
        ) from None
    return key


def _refuse_unequal(members: dict[Hashable, list[Device]], granule: Granule) -> None:
    sizes = {key: len(devices) for key, devices in members.items()}
    if len(set(sizes.values())) == 1:
        return
    usual = Counter(sizes.values()).most_common(1)[0][0]
    odd = next(key for key, size in sizes.items() if size != usual)
    raise MeshError(
        f"{_asked(granule)}: it makes {len(sizes)} granules of {min(sizes.values())} to "
        f"{max(sizes.values())} devices; granule {odd!r} has {sizes[odd]}, others have {usual}. "
        "Granules of one mesh have one size. "
        "Leave out devices until they have, or pass another granule."
    )


def _refuse_mixed_slices(devices: list[Device], granule: Granule) -> None:
    # On GPU a runtime may call each host a slice although NVLink joins several.
    slices = sorted({d.slice_index for d in devices if d.slice_index is not None})
    if len(slices) > 1 and devices[0].coords is not None:
        raise MeshError(
            f"{_asked(granule)}: it puts devices of the slices {slices[0]} and {slices[1]} into "
            "one granule. Slices of TPUs are joined by DCN only. "
            "Pass granule='slice', or one that divides slices."
        )
