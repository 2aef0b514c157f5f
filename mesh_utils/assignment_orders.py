"""Orders: which device of a granule gets which place in the mesh of that granule.

An order is a function of the devices of one granule and the shape of the mesh to make of them. It
returns an array of that shape with each device once:

    row_major_order    by place (x fastest, then y, z; cores of a chip before that), or by id
    search_order       the mesh of highest modelled score: see assignment.py
    jax_order          jax.experimental.mesh_utils.create_device_mesh, which folds the torus so that
                       neighbours on an axis are neighbours in the network, where it can
    your own           passed as HybridMesh(..., order=function)

Devices reach an order in the order in which libtpu lists them, whatever order they were given in,
because some of JAX's rings are written for that one: host by host, in a host z, y, x, core.
"""

from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from mesh_utils.assignment import assign
from mesh_utils.assignment_input import Weights
from mesh_utils.device import Coords, Device
from mesh_utils.errors import MeshError
from mesh_utils.jax_mesh_functions import JaxDevice, jax_mesh_utils
from mesh_utils.network import Network
from mesh_utils.topology import Topology

DeviceArray: TypeAlias = NDArray[np.object_]
"""An array of Devices."""

OrderFunction: TypeAlias = Callable[[tuple[Device, ...], tuple[int, ...]], DeviceArray]
"""The devices of a granule and a shape, to an array of that shape with each of them once."""

DeviceOrder: TypeAlias = Literal["auto", "search", "jax", "row-major"] | OrderFunction
"""An order by name, or a function. "auto" is "search" for TPUs whose chip and wrap are known,
"jax" for other TPUs, and "row-major" for all others."""


def row_major_order(devices: tuple[Device, ...], shape: tuple[int, ...]) -> DeviceArray:
    """Counts through the devices, the last axis fastest.

    Devices with coordinates are counted by z, then y, x and core, slowest first: as libtpu numbers
    the devices of a slice. All others are counted by id.

    Args:
        devices: the devices of a granule.
        shape: the mesh to make of them, as many places as devices.

    Returns:
        The devices in that shape.

    Example:
        >>> from mesh_utils import synthetic_devices
        >>> made = row_major_order(synthetic_devices((4, 2)), (2, 4))
        >>> [[device.id for device in row] for row in made]
        [[0, 1, 2, 3], [4, 5, 6, 7]]
    """
    return _as_array(sorted(devices, key=_place)).reshape(shape)


def jax_order(devices: tuple[Device, ...], shape: tuple[int, ...]) -> DeviceArray:
    """Asks JAX, which lays axes along the dimensions of the torus.

    `create_device_mesh` is called with allow_split_physical_axes=True. A sub-slice is shown to it
    as if it began at (0, 0, 0), so that it gets the mesh of a whole slice of its size. Chips of two
    cores whose kind is not known, as torch_xla's, are shown as TPU7x: a torus with the cores as a
    dimension.

    Args:
        devices: the devices of a granule.
        shape: the mesh to make of them, as many places as devices.

    Returns:
        The devices in that shape.

    Raises:
        MeshError: chips that do not fill a box, JAX is missing, or JAX refuses.

    Example:
        >>> from mesh_utils import synthetic_devices
        >>> made = jax_order(synthetic_devices((2, 2), kind="TPU v5 lite"), (4,))
        >>> [device.id for device in made]
        [0, 1, 3, 2]
    """
    listed = tuple(sorted(devices, key=_listed))
    shown = _shown_to_jax(listed)
    create_device_mesh = jax_mesh_utils(
        "order='jax' was asked for, by name or by 'auto' for TPUs.", "pass order='row-major'"
    ).create_device_mesh
    try:
        made = create_device_mesh(shape, shown, allow_split_physical_axes=True)
    except Exception as error:  # it raises five types, some by accident
        lines = str(error).splitlines() or [""]
        raise MeshError(
            f"order='jax' was asked for, with {len(devices)} devices of kind {devices[0].kind!r} "
            f"and ici_mesh_shape={shape}. "
            f"JAX refuses them: {type(error).__name__}: {lines[0][:160]}. "
            "Pass order='row-major', or another ici_mesh_shape."
        ) from error
    places = [cast("JaxDevice", device).id for device in made.reshape(-1)]
    return _as_array([listed[place] for place in places]).reshape(made.shape)


def search_order(
    devices: tuple[Device, ...],
    shape: tuple[int, ...],
    *,
    chip: str | None = None,
    wrap: Sequence[bool] | None = None,
    weights: Weights | None = None,
) -> DeviceArray:
    """Searches the mesh whose axes have the best links.

    torch_xla's devices do not tell their chip. There, pass it:

        HybridMesh(devices, ..., order=functools.partial(search_order, chip="v5e"))

    Args:
        devices: the devices of a granule.
        shape: the mesh to make of them, as many places as devices.
        chip: the chip, where the devices do not tell.
        wrap: for each dim whether it wraps, where no table knows.
        weights: bytes that each axis gathers; None doubles them from axis to axis.

    Returns:
        The devices in that shape.

    Raises:
        MeshError: chips that do not fill a box, or whose wrap is not known.

    Example:
        >>> from mesh_utils import synthetic_devices
        >>> made = search_order(synthetic_devices((4, 4), kind="TPU v5 lite"), (4, 4))
        >>> [device.id for device in made[0]]
        [0, 1, 5, 4]
    """
    topology = Topology.from_devices(devices, granule=len(devices), chip=chip, wrap=wrap)
    return assign(topology, shape, (1,) * len(shape), weights=weights).devices


def arrange(
    granules: Sequence[tuple[Device, ...]], shape: tuple[int, ...], order: DeviceOrder = "auto"
) -> list[DeviceArray]:
    """Lays each granule out as a mesh of its own.

    Args:
        granules: granules of one size.
        shape: the mesh to make of each, as many places as it has devices.
        order: how.

    Returns:
        For each granule an array of its Devices, of that shape.

    Raises:
        MeshError: there is no such order, the order refuses, or it does not return each device of
            the granule once in that shape.

    Example:
        >>> from mesh_utils import granules
        >>> arrange(granules(range(4), 2), (2,), "row-major")[1][0].id
        2
    """
    function = _order_function(order, granules)
    made = [function(tuple(sorted(granule, key=_listed)), shape) for granule in granules]
    for granule, array in zip(granules, made, strict=True):
        _refuse_other_devices(array, granule, shape, order)
    return made


def _shown_to_jax(devices: tuple[Device, ...]) -> list[JaxDevice]:
    if devices[0].coords is None:  # JAX counts GPUs by id, which here is their place in the list
        return [JaxDevice(n, "gpu", "", 0, (0, 0, 0), 0) for n in range(len(devices))]
    chips = np.array([device.coords or () for device in devices], np.int64)
    cores = np.array([device.core_on_chip for device in devices], np.int64)
    origin = chips.min(axis=0)
    chips, cores = chips - origin, cores - cores.min()
    _refuse_holes(chips, cores, origin)
    known = {device.kind for device in devices}
    two_cores = int(cores.max()) == 1
    kind = "TPU7x" if known == {"TPU"} and two_cores else devices[-1].kind
    return [
        JaxDevice(n, "tpu", kind, device.process_index or 0, cast("Coords", tuple(chip)), core)
        for n, (device, chip, core) in enumerate(
            zip(devices, chips.tolist(), cores.tolist(), strict=True)
        )
    ]


def _refuse_holes(
    chips: NDArray[np.int64], cores: NDArray[np.int64], origin: NDArray[np.int64]
) -> None:
    """Refuses chips, counted from the origin, that do not fill the box around them."""
    sizes: list[int] = (chips.max(axis=0) + 1).tolist()
    num_cores = int(cores.max()) + 1
    counts = np.zeros((*sizes, num_cores), np.int64)
    np.add.at(counts, (*chips.T, cores), 1)
    wrong = np.argwhere(counts != 1)
    if wrong.size:
        x, y, z = (wrong[0][:3] + origin).tolist()
        box = "x".join(map(str, sizes))
        per_chip = "" if num_cores == 1 else f" of {num_cores} cores"
        raise MeshError(
            f"order='jax' was asked for, with {len(cores)} devices in a box of {box} chips"
            f"{per_chip}. The chip at ({x}, {y}, {z}) is not there once. "
            "Pass the devices of a whole box, or order='row-major'."
        )


def _order_function(order: DeviceOrder, granules: Sequence[tuple[Device, ...]]) -> OrderFunction:
    if callable(order):
        return order
    if order == "auto":
        if granules[0][0].coords is None:
            return row_major_order
        return search_order if _are_known(granules) else jax_order
    named = {"search": search_order, "jax": jax_order, "row-major": row_major_order}
    if order in named:
        return named[order]
    raise MeshError(
        f"order={order!r} was asked for. There is no such order. "
        "Pass 'auto', 'search', 'jax', 'row-major', or a function of a granule's devices and a "
        "shape."
    )


def _are_known(granules: Sequence[tuple[Device, ...]]) -> bool:
    """Whether the links of all granules are known and alike, so that they get one layout."""
    found: set[Network] = set()
    try:
        for granule in granules:
            topology = Topology.from_devices(granule, granule=len(granule))
            if topology.chip is None or topology.wrap is None:
                return False
            found.add(Network.of(topology))
    except MeshError:  # holes, say: JAX's order has a message for them
        return False
    return len(found) == 1


def _refuse_other_devices(
    made: object, granule: tuple[Device, ...], shape: tuple[int, ...], order: DeviceOrder
) -> None:
    name = getattr(order, "__name__", None) or repr(order)
    asked = f"order={name} was asked for ici_mesh_shape={shape}."
    array = cast("DeviceArray", made)
    if not isinstance(made, np.ndarray) or array.shape != shape:
        given: object = getattr(array, "shape", type(array).__name__)
        raise MeshError(
            f"{asked} For a granule of {len(granule)} devices it returned {given!r}, no array of "
            "that shape. Let it return a numpy array of ici_mesh_shape."
        )
    places = cast("list[object]", array.reshape(-1).tolist())
    if not all(isinstance(device, Device) for device in places) or set(places) != set(granule):
        ids = f"{granule[0].id} to {granule[-1].id}"
        raise MeshError(
            f"{asked} What it returned for the granule with the ids {ids} is not each of its "
            "devices once. Let it return the Devices that it gets, and no others."
        )


def _as_array(devices: Sequence[Device]) -> DeviceArray:
    array = np.empty(len(devices), object)
    array[:] = devices
    return array


def _place(device: Device) -> tuple[int, ...]:
    if device.coords is None:
        return (device.id,)
    return (*reversed(device.coords), device.core_on_chip, device.id)


def _listed(device: Device) -> tuple[int, ...]:
    """The order in which libtpu lists a slice; devices without coordinates go by id."""
    first = 0 if device.coords is None else device.process_index or 0
    return (first, *_place(device))
