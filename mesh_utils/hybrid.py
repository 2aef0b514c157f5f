"""HybridMesh: a mesh over several granules, which knows what runs over the slow network.

A granule is a set of devices joined by a fast network (a TPU slice by ICI, GPUs by NVLink); between
granules is the slow one (DCN). Each axis of a hybrid mesh has a size inside granules and a size
across them, and is as long as their product:

    HybridMesh(devices, ici_mesh_shape=(2, 2), dcn_mesh_shape=(2, 1), axis_names=("dp", "tp"))

    2 slices of 4 chips, dp = 2 (DCN) x 2 (ICI), tp = 1 (DCN) x 2 (ICI):

        tp 0 1
    dp 0   0 1      granule 0
       1   2 3
       2   4 5      granule 1
       3   6 7

    mesh["tp"]           0 1           never leaves a granule
    mesh["dp"]           0 2 4 6       steps 0 to 1 and 2 to 3 are ICI, 1 to 2 is DCN
    mesh.dcn_axes        ("dp",)
    mesh.granules        ((0, 1, 2, 3), (4, 5, 6, 7))

On every axis the DCN part is the outer one: coordinate = dcn * ici size + ici. Granule number i
is at np.arange(number of granules).reshape(dcn_mesh_shape) == i.

Invariants (`check_valid` states them):

- mesh_shape is ici_mesh_shape * dcn_mesh_shape, axis by axis;
- a block of ici_mesh_shape is one whole granule, and the blocks lie in the order of the granules;
- so a group of devices along any axes has equally many members in each granule that it touches,
  which XLA needs to make of it one part per slice and one between slices.

How the devices of one granule are laid out in their block is an order: see below.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Literal, SupportsIndex, TypeAlias, cast, overload

import numpy as np
from numpy.typing import NDArray

from mesh_utils.argument_types import argument_types
from mesh_utils.assignment import Weights, across_slices, assign, nearest_sizes
from mesh_utils.devices import (
    Coords,
    Device,
    DeviceArray,
    Granule,
    describe_granule,
    device_array,
    granules,
)
from mesh_utils.errors import MeshError
from mesh_utils.jax_compat import JaxDevice, jax_mesh_utils, shown_to_jax
from mesh_utils.mesh import (
    Axis,
    Mesh,
    as_integer,
    describe_device_ids,
    read_axis_names,
    read_device_ids,
)
from mesh_utils.network import Network
from mesh_utils.topology import Topology

# ------------------------------------------------------------------------------------------ Orders
#
# Which device of a granule gets which place in the mesh of that granule.
#
# An order is a function of the devices of one granule and the shape of the mesh to make of them. It
# returns an array of that shape with each device once:
#
#   row_major_order    by place (x fastest, then y, z; cores of a chip before that), or by id
#   search_order       the mesh of highest modelled score: assignment.py
#   jax_order          jax.experimental.mesh_utils.create_device_mesh, which folds the torus so that
#                      neighbours on an axis are neighbours in the network, where it can
#   your own           passed as HybridMesh(..., order=function)
#
# Devices reach an order in the order in which libtpu lists them, whatever order they were given in,
# because some of JAX's rings are written for that one: host by host, in a host z, y, x, core.

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
        >>> mesh = row_major_order(synthetic_devices((4, 2)), (2, 4))
        >>> [[device.id for device in row] for row in mesh]
        [[0, 1, 2, 3], [4, 5, 6, 7]]
    """
    return device_array(sorted(devices, key=_place), shape)


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
        >>> mesh = jax_order(synthetic_devices((2, 2), kind="TPU v5 lite"), (4,))
        >>> [device.id for device in mesh]
        [0, 1, 3, 2]
    """
    listed = tuple(sorted(devices, key=_listed))
    jax_devices = shown_to_jax(_from_origin(listed))
    create_device_mesh = jax_mesh_utils(
        "order='jax' was asked for, by name or by 'auto' for TPUs.", "pass order='row-major'"
    ).create_device_mesh
    try:
        mesh = create_device_mesh(shape, jax_devices, allow_split_physical_axes=True)
    except Exception as error:  # it raises five types, some by accident
        lines = str(error).splitlines() or [""]
        raise MeshError(
            f"order='jax' was asked for, with {len(devices)} devices of kind {devices[0].kind!r} "
            f"and ici_mesh_shape={shape}. "
            f"JAX refuses them: {type(error).__name__}: {lines[0][:160]}. "
            "Pass order='row-major', or another ici_mesh_shape."
        ) from error
    places = [cast("JaxDevice", device).id for device in mesh.reshape(-1)]
    return device_array([listed[place] for place in places], mesh.shape)


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
        >>> mesh = search_order(synthetic_devices((4, 4), kind="TPU v5 lite"), (4, 4))
        >>> [device.id for device in mesh[0]]
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
    arrays = [function(tuple(sorted(granule, key=_listed)), shape) for granule in granules]
    for granule, array in zip(granules, arrays, strict=True):
        _refuse_other_devices(array, granule, shape, order)
    return arrays


def _from_origin(devices: tuple[Device, ...]) -> tuple[Device, ...]:
    """The devices of a box as if it began at (0, 0, 0), of a kind that JAX knows."""
    if devices[0].coords is None:
        return devices
    chips = np.array([device.coords or () for device in devices], np.int64)
    cores = np.array([device.core_on_chip for device in devices], np.int64)
    origin = chips.min(axis=0)
    chips, cores = chips - origin, cores - cores.min()
    _refuse_holes(chips, cores, origin)
    two_cores = int(cores.max()) == 1
    is_unnamed = two_cores and {device.kind for device in devices} == {"TPU"}
    kind = "TPU7x" if is_unnamed else devices[-1].kind
    return tuple(
        replace(device, coords=cast("Coords", tuple(chip)), core_on_chip=core, kind=kind)
        for device, chip, core in zip(devices, chips.tolist(), cores.tolist(), strict=True)
    )


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
    networks: set[Network] = set()
    try:
        for granule in granules:
            topology = Topology.from_devices(granule, granule=len(granule))
            if topology.chip is None or topology.wrap is None:
                return False
            networks.add(Network.of(topology))
    except MeshError:  # holes, say: JAX's order has a message for them
        return False
    return len(networks) == 1


def _refuse_other_devices(
    output: object, granule: tuple[Device, ...], shape: tuple[int, ...], order: DeviceOrder
) -> None:
    name = getattr(order, "__name__", None) or repr(order)
    request = f"order={name} was asked for ici_mesh_shape={shape}."
    array = cast("DeviceArray", output)
    if not isinstance(output, np.ndarray) or array.shape != shape:
        form: object = getattr(array, "shape", type(array).__name__)
        raise MeshError(
            f"{request} For a granule of {len(granule)} devices it returned {form!r}, no array of "
            "that shape. Let it return a numpy array of ici_mesh_shape."
        )
    places = cast("list[object]", array.reshape(-1).tolist())
    if not all(isinstance(device, Device) for device in places) or set(places) != set(granule):
        ids = f"{granule[0].id} to {granule[-1].id}"
        raise MeshError(
            f"{request} What it returned for the granule with the ids {ids} is not each of its "
            "devices once. Let it return the Devices that it gets, and no others."
        )


def _place(device: Device) -> tuple[int, ...]:
    if device.coords is None:
        return (device.id,)
    return (*reversed(device.coords), device.core_on_chip, device.id)


def _listed(device: Device) -> tuple[int, ...]:
    """The order in which libtpu lists a slice; devices without coordinates go by id."""
    first = 0 if device.coords is None else device.process_index or 0
    return (first, *_place(device))


# -------------------------------------------------------------------------------------- HybridMesh


@argument_types
class HybridMesh(Mesh):
    """Devices of several granules along named axes; an immutable, hashable value.

    It is a Mesh, and a root. Submeshes of it are plain meshes whose root it is. `factored` and
    `flattened` give plain meshes too: a new axis may lie across the border between DCN and ICI.

    Args:
        devices: whatever `read_devices` reads, in any order: JAX devices, torch_xla's attribute
            dicts, Devices, ids.
        ici_mesh_shape: the size of each axis inside a granule; one may be -1, for what is left.
        dcn_mesh_shape: the size of each axis across granules, one may be -1; None for one granule.
        axis_names: a name for each axis; None names them 0, 1, ...
        granule: what makes devices one granule: "slice", "process", a number of devices that follow
            each other by id, or a function of a Device.
        order: how a granule's devices are laid out: "search", for the best links; "jax", which
            asks JAX; "row-major"; "auto", which is "search" for TPUs whose links are known, "jax"
            for other TPUs and "row-major" for all else; or a function.

    Raises:
        MeshError: shapes that do not fit each other or the granules, granules of different sizes,
            devices that cannot be read, or an order that refuses them.

    Example:
        >>> from mesh_utils import synthetic_devices
        >>> devices = synthetic_devices((2, 2), num_slices=2, kind="TPU v4")
        >>> mesh = HybridMesh(
        ...     devices, ici_mesh_shape=(2, 2), dcn_mesh_shape=(2, 1), order="row-major"
        ... )
        >>> mesh.device_ids[:, 0].tolist(), mesh.granule_index(200001)
        ([100000, 100002, 200000, 200002], 1)
    """

    __slots__ = ("_dcn_mesh_shape", "_devices", "_granule_ids", "_hybrid_hash", "_ici_mesh_shape")

    def __init__(
        self,
        devices: Iterable[object],
        *,
        ici_mesh_shape: Iterable[SupportsIndex],
        dcn_mesh_shape: Iterable[SupportsIndex] | None = None,
        axis_names: Iterable[Axis] | None = None,
        granule: Granule = "slice",
        order: DeviceOrder = "auto",
    ) -> None:
        parts = granules(devices, granule)
        ici = _read_shape("ici_mesh_shape", ici_mesh_shape, len(parts[0]))
        dcn = (1,) * len(ici)
        if dcn_mesh_shape is not None:
            dcn = _read_shape("dcn_mesh_shape", dcn_mesh_shape, len(parts))
        _refuse_different_lengths(ici, dcn)
        shape = tuple(inner * outer for inner, outer in zip(ici, dcn, strict=True))
        names = read_axis_names(axis_names, shape)
        _refuse_other_counts(parts, ici, dcn, granule)
        blocks = np.stack(arrange(parts, ici, order))
        placed: tuple[Device, ...] = tuple(across_slices(blocks, dcn, ici).reshape(-1).tolist())
        self._set_parts(
            read_device_ids([device.id for device in placed], shape),
            names,
            (ici, dcn),
            np.array([[device.id for device in part] for part in parts], np.int64),
            placed,
        )

    def _set_parts(
        self,
        ids: NDArray[np.int64],
        names: tuple[Axis, ...],
        shapes: tuple[tuple[int, ...], tuple[int, ...]],
        granule_ids: NDArray[np.int64],
        devices: tuple[Device, ...],
    ) -> None:
        self._set(ids, names, None)
        self._ici_mesh_shape, self._dcn_mesh_shape = shapes
        self._granule_ids = granule_ids
        self._devices = devices
        self._hybrid_hash: str | None = None

    @property
    def ici_mesh_shape(self) -> tuple[int, ...]:
        """The size of each axis inside a granule."""
        return self._ici_mesh_shape

    @property
    def dcn_mesh_shape(self) -> tuple[int, ...]:
        """The size of each axis across granules."""
        return self._dcn_mesh_shape

    @property
    def dcn_axes(self) -> tuple[Axis, ...]:
        """The axes along which something crosses granules, in mesh order."""
        sizes = zip(self.axis_names, self._dcn_mesh_shape, strict=True)
        return tuple(name for name, size in sizes if size > 1)

    @property
    def granules(self) -> tuple[tuple[int, ...], ...]:
        """The device ids of each granule, in ascending order."""
        rows: list[list[int]] = self._granule_ids.tolist()
        return tuple(tuple(row) for row in rows)

    @property
    def devices(self) -> tuple[Device, ...]:
        """What is known of each device, in the order of `device_ids.flat`."""
        return self._devices

    @overload
    def granule_index(self, device_id: int) -> int: ...
    @overload
    def granule_index(
        self, device_id: NDArray[np.integer] | Sequence[int]
    ) -> NDArray[np.int64]: ...

    def granule_index(
        self, device_id: int | NDArray[np.integer] | Sequence[int]
    ) -> int | NDArray[np.int64]:
        """Finds the granule of devices.

        Args:
            device_id: one id, or an array of ids of any shape.

        Returns:
            Its place in `granules`; for an array int64 of its shape.

        Raises:
            MeshError: an id that is not in the mesh.

        Example:
            >>> mesh = HybridMesh(range(4), ici_mesh_shape=(2,), dcn_mesh_shape=(2,), granule=2)
            >>> mesh.granule_index(3), mesh.granule_index(mesh.device_ids).tolist()
            (1, [0, 0, 1, 1])
        """
        outer = np.asarray(self.coordinates(device_id)) // np.array(self._ici_mesh_shape)
        index = np.ravel_multi_index(tuple(np.moveaxis(outer, -1, 0)), self._dcn_mesh_shape)
        return np.asarray(index, np.int64) if np.ndim(index) else int(index)

    def to_hash(self) -> str:
        """Names the value of the mesh: the same in every process and Python version.

        Returns:
            64 hexadecimal digits. Equal hybrid meshes have the same; a plain mesh of the same ids
            has others.

        Example:
            >>> mesh = HybridMesh(range(4), ici_mesh_shape=(4,))
            >>> mesh.to_hash() == Mesh.arange((4,)).to_hash()
            False
        """
        if self._hybrid_hash is None:
            digest = hashlib.sha256(b"mesh_utils.HybridMesh 1\n")
            parts = [super().to_hash(), self._ici_mesh_shape, self._dcn_mesh_shape]
            digest.update(json.dumps(parts).encode())
            digest.update(self._granule_ids.astype("<i8", copy=False).tobytes())
            self._hybrid_hash = digest.hexdigest()
        return self._hybrid_hash

    def check_valid(self) -> None:
        """States the invariants of a hybrid mesh.

        Raises:
            MeshError: one of them does not hold, which only a bug in mesh_utils can bring about.
        """
        super().check_valid()
        sizes = np.multiply(self._ici_mesh_shape, self._dcn_mesh_shape).tolist()
        blocks = np.sort(_blocks(self.device_ids, self._ici_mesh_shape, self._dcn_mesh_shape))
        if self.mesh_shape != tuple(sizes) or not np.array_equal(blocks, self._granule_ids):
            raise MeshError(
                f"{self!r} was checked. A block of ici_mesh_shape={self._ici_mesh_shape} is not "
                "one granule, or blocks and granules differ in order. "
                "Make hybrid meshes with HybridMesh only."
            )
        if [device.id for device in self._devices] != self.device_ids.reshape(-1).tolist():
            raise MeshError(
                f"{self!r} was checked. Its devices are not in the order of its device_ids. "
                "Make hybrid meshes with HybridMesh only."
            )

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Mesh):
            return NotImplemented
        # Not what the devices are: a program is sharded by ids, axes and granules.
        return (
            isinstance(other, HybridMesh)
            and self.axis_names == other.axis_names
            and self._ici_mesh_shape == other._ici_mesh_shape
            and self._dcn_mesh_shape == other._dcn_mesh_shape
            and np.array_equal(self.device_ids, other.device_ids)
            and np.array_equal(self._granule_ids, other._granule_ids)
        )

    # Python takes the hash away from a class that defines equality.
    def __hash__(self) -> int:
        return hash(self._hybrid_hash or self.to_hash())

    def __repr__(self) -> str:
        ids = describe_device_ids(self.device_ids)
        shapes = f"ici={self._ici_mesh_shape}, dcn={self._dcn_mesh_shape}"
        return f"HybridMesh({self.axes_text()}, {shapes}, devices={ids})"

    def __reduce__(self) -> tuple[object, ...]:
        shapes = self._ici_mesh_shape, self._dcn_mesh_shape
        parts = self.device_ids, self.axis_names, shapes, self._granule_ids, self._devices
        return _restored, parts


def _restored(
    ids: NDArray[np.int64],
    names: tuple[Axis, ...],
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
    granule_ids: NDArray[np.int64],
    devices: tuple[Device, ...],
) -> HybridMesh:
    """The mesh of the parts of a pickled one."""
    mesh = object.__new__(HybridMesh)
    ids = np.ascontiguousarray(ids)
    ids.flags.writeable = False
    mesh._set_parts(ids, names, shapes, granule_ids, devices)  # pyright: ignore[reportPrivateUsage]
    return mesh


def _blocks(
    ids: NDArray[np.int64], ici: tuple[int, ...], dcn: tuple[int, ...]
) -> NDArray[np.int64]:
    """The ids of each block, [blocks, block size]: the inverse of `across_slices`."""
    ndim = len(ici)
    split = [size for pair in zip(dcn, ici, strict=True) for size in pair]
    outer_first = [*range(0, 2 * ndim, 2), *range(1, 2 * ndim, 2)]
    return ids.reshape(split).transpose(outer_first).reshape(math.prod(dcn), -1)


def _read_shape(name: str, mesh_sizes: Iterable[SupportsIndex], count: int) -> tuple[int, ...]:
    is_list = hasattr(mesh_sizes, "__iter__") and not isinstance(mesh_sizes, (str, bytes))
    sizes = tuple(as_integer(size) or 0 for size in mesh_sizes) if is_list else ()
    if sizes.count(-1) == 1 and (product := -math.prod(sizes)) > 0:
        free_size = max(count // product, 1)  # a wrong product is refused with all others
        sizes = tuple(free_size if size == -1 else size for size in sizes)
    if not sizes or min(sizes) < 1:
        raise MeshError(
            f"HybridMesh was given {name}={mesh_sizes!r}. It is no sequence of positive integers. "
            "Pass one size of 1 or more for each axis, such as (2, 4)."
        )
    return sizes


def _refuse_different_lengths(ici: tuple[int, ...], dcn: tuple[int, ...]) -> None:
    if len(ici) != len(dcn):
        padded = (*dcn, *(1,) * len(ici))[: len(ici)]
        raise MeshError(
            f"HybridMesh was given ici_mesh_shape={ici} and dcn_mesh_shape={dcn}. "
            f"They have {len(ici)} and {len(dcn)} axes. "
            f"Pass a size for each axis in both, 1 where there is none, such as "
            f"dcn_mesh_shape={padded}."
        )


def _refuse_other_counts(
    parts: tuple[tuple[Device, ...], ...],
    ici: tuple[int, ...],
    dcn: tuple[int, ...],
    granule: Granule,
) -> None:
    count, size = len(parts), len(parts[0])
    if (count, size) == (math.prod(dcn), math.prod(ici)):
        return
    granules_are = "There is 1 granule" if count == 1 else f"There are {count} granules"
    # One granule may be all there is, or only all that the devices tell.
    unknown = count == 1 and granule == "slice" and parts[0][0].slice_index is None
    hint = ", or say with granule= where they divide: the devices name no slices" if unknown else ""
    raise MeshError(
        f"{granules_are} of {size} devices: granule={describe_granule(granule)}. "
        f"ici_mesh_shape={ici} and dcn_mesh_shape={dcn} ask for {math.prod(dcn)} of "
        f"{math.prod(ici)}. Pass ici_mesh_shape={nearest_sizes(ici, size)} and "
        f"dcn_mesh_shape={nearest_sizes(dcn, count)}, or others with those products{hint}."
    )
