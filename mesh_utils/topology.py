"""Topology: the chips of a job, where they are, and how they are linked.

A slice is a box of chips, shape = (x, y, z), joined by ICI; a job has one or several of them, all
alike, joined by the data centre network (DCN). For GPUs a slice is an NVLink domain. A topology
comes from a name, from devices that are there, or from a shape:

    >>> from mesh_utils import Topology
    >>> topology = Topology.parse("v5p-256")
    >>> topology
    Topology('v5p:4x4x8', 128 devices, wrap=(True, True, True))
    >>> topology.num_hosts, topology.coords[5].tolist(), topology.cloud_name
    (32, [3, 0, 0], 'v5p-256')
    >>> topology.assumptions
    ("twist=False: this slice can be a twisted torus, and 'v5p-256' does not say",)

    Topology.parse("v5e:16x16", num_slices=4)       four slices; "4xv5e:16x16" is the same
    Topology.from_devices(jax.devices())            what is there
    Topology.synthetic((4, 4, 8), wrap=(True,) * 3) any box: nothing is looked up

Two facts are not to be had from devices, and the bandwidth of every mesh turns on them:

- wrap: for each dim, whether a link leads from its last chip to its first;
- twist: whether the wrap links of the short dims shift along the long one.

They are taken from the table of real slices, or from the caller. Where neither knows, wrap is None,
and what needs it (Network) asks for it. What was taken without being said is in `assumptions`.

Devices are in the order in which libtpu lists them: slice by slice, host by host, and within a host
x fastest. Coordinates are counted from the first chip of the box, also in a sub-slice off the
origin: `origin` says where the box begins.

Invariants (`check_valid` states them): every device has a place of its own in a box of
`shape`, with devices_per_chip of them on each chip; slices are alike; wrap only where a dim has
more than two chips; a twist only where the table allows one, or where it was asked for in so many
words.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import SupportsIndex, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mesh_utils.argument_types import argument_types
from mesh_utils.devices import (
    Coords,
    Device,
    Granule,
    Places,
    cloud_name,
    devices_at,
    granules,
    read_topology_name,
    shape_text,
    synthetic_places,
)
from mesh_utils.errors import MeshError, TopologyError
from mesh_utils.hardware import Chip, Shape3, Wrap3, find_chip
from mesh_utils.mesh import as_integer

__all__ = []


# ------------------------------- Shortest ways between chips of a mesh, a torus or a twisted torus
#
# Chips that differ by a period are the same chip. A dim of N chips that wraps has the period N
# along it; in a twisted torus of k x k x 2k or k x 2k x 2k chips the period of a short dim is k
# along it and k along each long dim. The shortest way to a chip is then the shortest of the
# differences that lead to it; there may be several, which share the traffic.

IntArray: TypeAlias = NDArray[np.int64]
Box: TypeAlias = tuple[tuple[int, int, int], tuple[bool, bool, bool], bool]


def periods(box: Box) -> IntArray:
    """The periods of a box of chips.

    Args:
        box: its shape, which dims wrap, and whether it is a twisted torus.

    Returns:
        One row (x, y, z) per dim that wraps.

    Example:
        >>> periods(((4, 4, 8), (True, True, True), True)).tolist()
        [[4, 0, 4], [0, 4, 4], [0, 0, 8]]
    """
    shape, wrap, twist = box
    rows: list[list[int]] = []
    for dim in range(3):
        if not wrap[dim]:
            continue
        row = [shape[dim] if d == dim else 0 for d in range(3)]
        if twist and shape[dim] == min(shape):
            row = [shape[dim] if d == dim or shape[d] > shape[dim] else 0 for d in range(3)]
        rows.append(row)
    return np.array(rows, np.int64).reshape(-1, 3)


def shortest_ways(box: Box, differences: IntArray) -> tuple[IntArray, NDArray[np.float64]]:
    """The shortest ways to go given differences.

    Args:
        box: its shape, which dims wrap, and whether it is a twisted torus.
        differences: target less source, x, y, z, [n, 3].

    Returns:
        Steps in x, y and z, signed, [ways, n, 3], and how much of the traffic takes each, [ways,
        n]: 0 for those that are not shortest, and equal for those that are.

    Example:
        >>> ring = ((4, 1, 1), (True, False, False), False)
        >>> steps, shares = shortest_ways(ring, np.array([[3, 0, 0]]))
        >>> steps[shares > 0].tolist()
        [[-1, 0, 0]]
    """
    rows = periods(box)
    # One period each way is not enough where those of a twisted torus are combined.
    most = 2 if box[2] else 1
    counts = itertools.product(range(-most, most + 1), repeat=len(rows))
    shifts = np.array([np.array(count) @ rows for count in counts], np.int64).reshape(-1, 3)
    steps = differences[None, :, :] + shifts[:, None, :]
    lengths = np.abs(steps).sum(axis=2)
    shortest = lengths == lengths.min(axis=0)
    return steps, shortest / shortest.sum(axis=0)


def canonical(box: Box, chips: IntArray) -> IntArray:
    """The chips of the box that coordinates outside of it mean.

    Args:
        box: its shape, which dims wrap, and whether it is a twisted torus.
        chips: x, y, z, [..., 3]; outside of the box only in dims that wrap.

    Returns:
        Their places in the box, [..., 3].

    Example:
        >>> canonical(((4, 4, 8), (True, True, True), True), np.array([4, 0, 1])).tolist()
        [0, 0, 5]
    """
    rows = periods(box)
    places = chips.copy()
    # The periods of short dims shift long ones too, so that those are set right last.
    for row in rows[np.argsort([-np.count_nonzero(row) for row in rows], kind="stable")]:
        dims: list[int] = np.flatnonzero(row).tolist()
        # The dim that it belongs to: of several the short one, which the long ones do not share.
        dim = next(d for d in dims if len(dims) == 1 or box[0][d] == min(box[0]))
        places = places - (places[..., dim] // box[0][dim])[..., None] * row
    return places


# ------------------------------------------------------- Settles the wrap and the twist of a slice
#
# Said by the caller, or by the table of real slices.

_MOST = 1 << 20  # of slices, hosts or chips: far more than were ever built


@dataclass(frozen=True)
class Links:
    """What was settled.

    Attributes:
        wrap: for each dim whether it wraps; None where it is not known.
        twist: whether the slice is a twisted torus.
        is_real: whether it is a slice that can be had.
        assumptions: what was taken without being said.
    """

    wrap: Wrap3 | None
    twist: bool
    is_real: bool
    assumptions: tuple[str, ...] = ()


def _settle_links(
    name: str,
    chip: Chip | None,
    shape: Shape3,
    wrap: Sequence[bool] | None,
    twist: bool | None,
    allow_unreal: bool,
) -> Links:
    """Wrap and twist of a whole slice: what the caller says, or the table; refused if unreal."""
    flags = _read_wrap(name, wrap, shape)
    real = chip is not None and chip.slices.is_real(shape)
    if chip is not None and not real and not allow_unreal:
        _refuse_unreal(name, chip, shape)
    table_wrap = chip.slices.wrap(shape) if chip is not None else None
    if (
        chip is not None
        and table_wrap is not None
        and flags not in (None, table_wrap)
        and not allow_unreal
    ):
        raise TopologyError(
            f"Topology {name!r} was asked for with wrap={flags}. A slice of {_text(chip, shape)} "
            f"of {chip.title} has wrap={table_wrap} ({chip.slices.source}). "
            "Leave wrap out, or pass allow_unreal=True."
        )
    settled = table_wrap if flags is None else flags
    assumptions: tuple[str, ...] = ()
    if twist is None and chip is not None and chip.slices.twists(shape):
        assumptions = (
            f"twist=False: this slice can be a twisted torus, and {name!r} does not say",
        )
    if twist:
        _refuse_twist(name, chip, shape, settled, allow_unreal)
    return Links(settled, bool(twist), real and flags in (None, table_wrap), assumptions)


def _read_wrap(name: str, wrap: Sequence[bool] | None, shape: Shape3) -> Wrap3 | None:
    """Three flags of up to three; dims of one or two chips do not wrap."""
    if wrap is None:
        return None
    flags = tuple(wrap) if isinstance(wrap, (tuple, list)) else ()
    if not 1 <= len(flags) <= 3 or any(flag not in (True, False) for flag in flags):
        raise TopologyError(
            f"Topology {name!r} was asked for with wrap={wrap!r}. That is no flag for each dim. "
            "Pass up to three, in x, y and z, such as (True, True, False)."
        )
    padded = (*(bool(flag) for flag in flags), False, False)
    return (
        padded[0] and shape[0] > 2,
        padded[1] and shape[1] > 2,
        padded[2] and shape[2] > 2,
    )


def _read_shape(name: str, shape: Sequence[SupportsIndex]) -> Shape3:
    """Chips in x, y and z of up to three sizes."""
    is_list = isinstance(shape, (tuple, list))
    sizes = [as_integer(size) or 0 for size in shape] if is_list else []
    if not 1 <= len(sizes) <= 3 or min(sizes) < 1:
        raise TopologyError(
            f"A topology was asked for with {name}={shape!r}. That is no box of chips. "
            "Pass up to three positive integers: the chips in x, y and z."
        )
    padded = [*sizes, 1, 1]
    return (padded[0], padded[1], padded[2])


def _read_count(
    name: str, named: int | None, number: SupportsIndex | None, what: str = "num_slices"
) -> int:
    """A count that a name and an argument may both say; 1 where neither does."""
    count = None if number is None else as_integer(number)
    bad = number is not None and count is None
    if named is not None and count is not None and named != count:
        raise TopologyError(
            f"Topology {name!r} was asked for with {what}={number}. The name says {named}. "
            f"Pass {what} or write it in the name, not two numbers."
        )
    size = named if count is None else count
    if bad or (size is not None and size < 1):
        raise TopologyError(
            f"Topology {name!r} was asked for with {what}={number if named is None else named!r}. "
            f"That is no positive integer. Pass {what}=1 or more."
        )
    if size is not None and size > _MOST:
        raise TopologyError(
            f"Topology {name!r} was asked for with {what}={size}. There are not so many. Pass "
            f"{what}={_MOST} or less."
        )
    return size or 1


def _refuse_unreal(name: str, chip: Chip, shape: Shape3) -> None:
    near = ", ".join(f"'{chip.name}:{_text(chip, real)}'" for real in chip.slices.nearest(shape))
    raise TopologyError(
        f"Topology {name!r} was asked for. {chip.title} has no slice of {_text(chip, shape)}. "
        f"Pass {near}; or pass allow_unreal=True, with wrap=."
    )


def _refuse_twist(
    name: str, chip: Chip | None, shape: Shape3, wrap: Wrap3 | None, allow_unreal: bool
) -> None:
    low, middle, high = sorted(shape)
    if not (high == 2 * low and middle in (low, high)) or wrap not in (None, (True, True, True)):
        near = None if chip is None else chip.slices.nearest_twisted(shape)
        example = "'v5p:4x4x8_twisted'"
        if chip is not None and near is not None:
            example = f"'{chip.name}:{_text(chip, near)}_twisted'"
        raise TopologyError(
            f"Topology {name!r} was asked for as a twisted torus of {shape_text(shape)} with "
            f"wrap={wrap}. Only k x k x 2k and k x 2k x 2k chips that wrap in every dim are "
            f"twisted. Pass {example}, or twist=False."
        )
    if chip is not None and not chip.slices.twists(shape) and not allow_unreal:
        raise TopologyError(
            f"Topology {name!r} was asked for as a twisted torus. {chip.title} has no twisted "
            "slices that are known. Pass twist=False, or allow_unreal=True."
        )


def _text(chip: Chip, shape: Shape3) -> str:
    return shape_text(shape, chip.torus_rank)


# ---------------------------------------------------------------------------------------- Topology


@dataclass(frozen=True, eq=False)
class Topology:
    """The chips of a job. Make one with `parse`, `from_devices` or `synthetic`.

    Attributes:
        chip: what is known of the chip; None where the devices do not tell.
        shape: the chips of one slice (or of one sub-slice) in x, y and z.
        wrap: for each dim whether it wraps; None where it is not known.
        twist: whether the slice is a twisted torus.
        num_slices: how many slices.
        devices_per_chip: devices per chip, as JAX sees them: 2 on v2, v3 and tpu7x.
        chips_per_host: the chips of one host in x, y and z.
        origin: the coordinates of the box's first chip, by slice.
        is_real: whether it is a slice that can be had.
        assumptions: what was taken without being said, in words.

    Example:
        >>> topology = Topology.parse("2xv5litepod-16")
        >>> topology.num_chips, topology.num_devices, topology.num_hosts
        (32, 32, 8)
    """

    chip: Chip | None
    shape: Shape3
    wrap: Wrap3 | None
    twist: bool
    num_slices: int
    devices_per_chip: int
    chips_per_host: Shape3
    origin: tuple[Coords, ...]
    is_real: bool
    assumptions: tuple[str, ...] = ()
    _places: Places | None = field(default=None, repr=False)

    @classmethod
    @argument_types
    def parse(
        cls,
        name: str,
        *,
        num_slices: SupportsIndex | None = None,
        wrap: Sequence[bool] | None = None,
        twist: bool | None = None,
        allow_unreal: bool = False,
    ) -> Topology:
        """Makes the topology of a name.

        Args:
            name: "v5p-128", "v5litepod-16", "v5p:4x4x8", "v5p:4x4x8_twisted", "4xv5e:16x16",
                "h100-64": see devices.py.
            num_slices: how many slices, where the name does not say; 1 by default.
            wrap: for each dim whether it wraps. Needed where the table does not know: slices of v2
                and v3 below the pod, and shapes that are no real slice.
            twist: whether the slice is a twisted torus, where the name does not say.
            allow_unreal: also take shapes, wraps and twists that no real slice has.

        Returns:
            The topology, with synthetic devices as libtpu would list them.

        Raises:
            MeshError: a name that cannot be read, an unknown chip, a shape that is no real slice,
                or a wrap or twist that it does not have.

        Example:
            >>> Topology.parse("v5e:8x16").wrap
            (False, True, False)
            >>> Topology.parse("v5e:8x12")
            Traceback (most recent call last):
            ...
            mesh_utils.errors.TopologyError: Topology 'v5e:8x12' was asked for. ...
        """
        named = read_topology_name(name)
        slices = _read_count(name, named.num_slices, num_slices)
        if named.twist is not None and twist is not None and named.twist != twist:
            raise TopologyError(
                f"Topology {name!r} was asked for with twist={twist}. The two differ. "
                "Say it in the name, or with twist=, or in both alike."
            )
        chip = named.chip
        wants_twist = named.twist if twist is None else twist
        links = _settle_links(name, chip, named.shape, wrap, wants_twist, allow_unreal)
        return cls(
            chip=chip,
            shape=named.shape,
            wrap=links.wrap,
            twist=links.twist,
            num_slices=slices,
            devices_per_chip=chip.devices_per_chip,
            chips_per_host=_clipped(chip.chips_per_host, named.shape),
            origin=((0, 0, 0),) * slices,
            is_real=links.is_real,
            assumptions=links.assumptions,
        )

    @classmethod
    def synthetic(
        cls,
        shape: Sequence[SupportsIndex],
        *,
        wrap: Sequence[bool] | None,
        twist: bool = False,
        num_slices: SupportsIndex = 1,
        devices_per_chip: SupportsIndex = 1,
        chips_per_host: Sequence[SupportsIndex] = (2, 2, 1),
        chip: Chip | None = None,
    ) -> Topology:
        """Makes any box of chips. Nothing is looked up, nothing has to be real.

        Args:
            shape: chips in x, y and, unless 1, z.
            wrap: for each dim whether it wraps; None for not known. Dims of one or two chips are
                taken not to: a second link beside the first.
            twist: whether it is a twisted torus: k x k x 2k or k x 2k x 2k chips, all dims wrapped.
            num_slices: how many such boxes.
            devices_per_chip: 1 or 2.
            chips_per_host: chips of one host, at most those of the box.
            chip: whose figures to take for bandwidths; None for bandwidths in links only.

        Returns:
            The topology.

        Raises:
            TopologyError: sizes that are no positive integers, a box that hosts do not fill, a
                twist of a box that cannot be twisted.

        Example:
            >>> Topology.synthetic((3, 5), wrap=(False, True), chips_per_host=(1, 1)).num_devices
            15
        """
        box = _read_shape("shape", shape)
        slices = _read_count("synthetic", None, num_slices)
        cores = _read_count("synthetic", None, devices_per_chip, "devices_per_chip")
        links = _settle_links("synthetic", None, box, wrap, twist, allow_unreal=True)
        host = _clipped(_read_shape("chips_per_host", chips_per_host), box)
        topology = cls(
            chip, box, links.wrap, links.twist, slices, cores, host, ((0, 0, 0),) * slices, False
        )
        topology.check_valid()
        return topology

    @classmethod
    def from_devices(
        cls,
        devices: Iterable[object],
        *,
        chip: str | Chip | None = None,
        wrap: Sequence[bool] | None = None,
        twist: bool | None = None,
        slice_shape: Sequence[SupportsIndex] | None = None,
        granule: Granule = "slice",
        allow_unreal: bool = False,
    ) -> Topology:
        """Reads the topology of devices, of JAX or torch_xla, or described ones.

        Devices do not tell their wrap, nor whether they are a whole slice. Devices that fill a real
        slice from (0, 0, 0) are taken to be that slice, which `assumptions` says. Others are part
        of a larger one: pass its `slice_shape`, or `wrap`.

        Args:
            devices: whatever `read_devices` reads: jax.devices(), torch_xla's attribute dicts,
                Devices, ids, GPUs.
            chip: the chip, where the devices do not tell, as torch_xla's do not.
            wrap: for each dim of the box whether it wraps.
            twist: whether they are a twisted torus; None takes them not to be one.
            slice_shape: the chips of the whole slice of which the devices are part. A dim wraps if
                the slice wraps there and the devices reach across all of it.
            granule: what makes devices one slice: "slice", "process", a number, or a function.
            allow_unreal: also take shapes, wraps and twists that no real slice has.

        Returns:
            The topology, with these devices, slice by slice, each in libtpu's order.

        Raises:
            MeshError: devices that cannot be read, slices that differ, devices without coords, or
                that do not fill a box, or a wrap or twist that the slice does not have.

        Example:
            >>> from mesh_utils import synthetic_devices
            >>> devices = synthetic_devices((4, 4), kind="TPU v5 lite")
            >>> Topology.from_devices(devices).name
            'v5e:4x4'
        """
        return _read_topology(devices, chip, wrap, twist, slice_shape, granule, allow_unreal)

    @property
    def num_chips(self) -> int:
        """Chips in all slices."""
        return math.prod(self.shape) * self.num_slices

    @property
    def num_cores(self) -> int:
        """TensorCores in all slices; devices, where the chip is not known."""
        per_chip = self.chip.cores_per_chip if self.chip else self.devices_per_chip
        return self.num_chips * per_chip

    @property
    def num_devices(self) -> int:
        """Devices in all slices, as JAX sees them."""
        return self.num_chips * self.devices_per_chip

    @property
    def devices_per_slice(self) -> int:
        """Devices in one slice."""
        return math.prod(self.shape) * self.devices_per_chip

    @property
    def hosts_shape(self) -> Shape3:
        """Hosts in x, y and z of one slice."""
        x, y, z = (
            -(-size // part) for size, part in zip(self.shape, self.chips_per_host, strict=True)
        )
        return (x, y, z)

    @property
    def num_hosts(self) -> int:
        """Hosts in all slices."""
        return math.prod(self.hosts_shape) * self.num_slices

    @property
    def torus_rank(self) -> int:
        """2 or 3; 0 where a switch joins the chips."""
        if self.chip is not None:
            return self.chip.torus_rank
        devices = self._places.devices if self._places else ()
        return 0 if devices and devices[0].coords is None else 3

    @property
    def name(self) -> str:
        """Its name, which `parse` reads again where the chip is known."""
        rank = self.torus_rank
        chip = "chips" if self.chip is None else self.chip.name
        several = "" if self.num_slices == 1 else f"{self.num_slices}x"
        return f"{several}{chip}:{shape_text(self.shape, rank)}{'_twisted' if self.twist else ''}"

    @property
    def cloud_name(self) -> str | None:
        """Cloud's accelerator type of one slice; None where it has none."""
        return None if self.chip is None else cloud_name(self.chip, self.shape)

    @cached_property
    def places(self) -> Places:
        """Where each device is, as arrays."""
        if self._places is not None:
            return self._places
        return synthetic_places(
            self.shape, self.chips_per_host, self.devices_per_chip, self.num_slices
        )

    @property
    def device_ids(self) -> NDArray[np.int64]:
        """The id of each device, [devices], in libtpu's order."""
        return self.places.ids

    @property
    def coords(self) -> NDArray[np.int64]:
        """The chip of each device, [devices, 3]: x, y, z from the first chip of its box."""
        return self.places.coords

    @property
    def core_on_chip(self) -> NDArray[np.int64]:
        """The number of each device on its chip, [devices]."""
        return self.places.cores

    @property
    def slice_index(self) -> NDArray[np.int64]:
        """The slice of each device, [devices]: 0 to num_slices - 1."""
        return self.places.slices

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        """Each device with its id, process, coordinates and slice, in libtpu's order."""
        if self._places is not None and self._places.devices:
            return self._places.devices
        kind = self.chip.device_kinds[0] if self.chip else "TPU"
        return devices_at(self.places, kind, self.num_slices > 1, self.torus_rank > 0)

    def granules(self, granule: Granule = "slice") -> tuple[tuple[Device, ...], ...]:
        """Sorts its devices into granules.

        Args:
            granule: "slice", "process", a number of devices, or a function of a Device.

        Returns:
            The devices of each granule.

        Raises:
            MeshError: granules of different sizes; see `granules`.

        Example:
            >>> len(Topology.parse("8xh100:8").granules())
            8
            >>> len(Topology.parse("gb200-144").granules(4))
            36
        """
        return granules(self.devices, granule)

    def check_valid(self) -> None:
        """States the invariants of a topology.

        Raises:
            TopologyError: one of them does not hold.
        """
        faults: list[str] = []
        if any(size % part for size, part in zip(self.shape, self.chips_per_host, strict=True)):
            faults.append(f"hosts of {self.chips_per_host} chips do not fill it")
        if self.wrap and any(self.wrap[d] and self.shape[d] <= 2 for d in range(3)):
            faults.append("a dim of one or two chips wraps")
        if len(self.origin) != self.num_slices:
            faults.append(f"{len(self.origin)} origins for {self.num_slices} slices")
        sizes = (self.num_slices, *self.shape, self.devices_per_chip)
        keys = np.column_stack([self.places.slices, self.places.coords, self.places.cores])
        inside = ((keys >= 0) & (keys < np.array(sizes))).all()
        if not inside or not len(np.unique(keys, axis=0)) == len(keys) == math.prod(sizes):
            faults.append("its devices do not fill its boxes")
        if faults:
            raise TopologyError(
                f"{self!r} was checked. It cannot be: {'; '.join(faults)}. "
                "Pass a shape that its hosts fill, and devices of whole boxes."
            )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Topology):
            return NotImplemented
        mine, theirs = self._key(), other._key()
        return mine == theirs and np.array_equal(self.device_ids, other.device_ids)

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[object, ...]:
        name = None if self.chip is None else self.chip.name
        links = self.shape, self.wrap, self.twist, self.origin
        return name, *links, self.num_slices, self.devices_per_chip, self.chips_per_host

    def __repr__(self) -> str:
        sub = "" if not any(map(any, self.origin)) else f", origin={self.origin[0]}"
        wrap = "" if self.torus_rank == 0 else f", wrap={self.wrap}"
        return f"Topology({self.name!r}, {self.num_devices} devices{wrap}{sub})"


def _clipped(host: Shape3, shape: Shape3) -> Shape3:
    x, y, z = map(min, host, shape)
    return (x, y, z)


# ------------------------------------------------------------------- Reads a topology from devices
#
# Their slices, the box that each fills, the chip.


def _read_topology(
    devices: Iterable[object],
    chip: str | Chip | None,
    wrap: Sequence[bool] | None,
    twist: bool | None,
    slice_shape: Sequence[SupportsIndex] | None,
    granule: Granule,
    allow_unreal: bool,
) -> Topology:
    """Reads devices; the arguments are those of `Topology.from_devices`."""
    slices = granules(devices, granule)
    known_chip = _chip_of(slices, chip)
    if slices[0][0].coords is None:
        if known_chip is not None and known_chip.torus_rank:
            raise TopologyError(
                f"{sum(map(len, slices))} devices of {known_chip.title} were given without coords. "
                "A TPU's place on the torus decides its links. "
                "Pass devices with coords, or Topology.parse a name."
            )
        return _switched(slices, known_chip)
    boxes = [_box(group) for group in slices]
    shape, per_chip = boxes[0][1], boxes[0][2]
    for number, (_, other_shape, cores) in enumerate(boxes):
        if (other_shape, cores) != (shape, per_chip):
            raise TopologyError(
                f"{len(slices)} slices were given. Slice {number} fills {shape_text(other_shape)} "
                f"chips of {cores} devices, slice 0 {shape_text(shape)} of {per_chip}: slices of "
                f"one topology are alike. Leave devices out until each fills {shape_text(shape)}."
            )
    origin = tuple(box[0] for box in boxes)
    full_shape = shape if slice_shape is None else _read_shape("slice_shape", slice_shape)
    name = "devices"
    if known_chip is not None:
        name = f"{known_chip.name}:{shape_text(full_shape, known_chip.torus_rank)}"
    if slice_shape is not None:
        links = _of_part(name, known_chip, full_shape, shape, origin, wrap, twist, allow_unreal)
    elif any(map(any, origin)):
        part_wrap = known_chip.slices.part_wrap(shape) if known_chip else None
        links = Links(_read_wrap(name, wrap, shape) or part_wrap, bool(twist), False)
    else:
        links = _of_whole(name, known_chip, shape, wrap, twist, allow_unreal)
    host = (2, 2, 1) if known_chip is None else known_chip.chips_per_host
    return Topology(
        chip=known_chip,
        shape=shape,
        wrap=links.wrap,
        twist=links.twist,
        num_slices=len(slices),
        devices_per_chip=per_chip,
        chips_per_host=_clipped(host, shape),
        origin=origin,
        is_real=links.is_real,
        assumptions=links.assumptions,
        _places=_places(slices, origin),
    )


def _chip_of(slices: tuple[tuple[Device, ...], ...], chip: str | Chip | None) -> Chip | None:
    if chip is not None:
        return find_chip(chip) if isinstance(chip, str) else chip
    kinds = {device.kind for group in slices for device in group}
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
    full_box = _largest_box(counts)
    raise TopologyError(
        f"{counts.sum()} devices were given in a box of {shape_text(shape)} chips of "
        f"{counts.shape[3]}. There is none at {where}, with {len(places)} places empty. "
        f"Pass the devices of a whole box, such as {shape_text(full_box)} from the first chip on."
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
        links = _settle_links(name, None, shape, wrap, twist, allow_unreal=True)
        part_wrap = chip.slices.part_wrap(shape) if chip else None
        return Links(links.wrap or part_wrap, links.twist, False)
    links = _settle_links(name, chip, shape, wrap, twist, allow_unreal)
    assumption = (
        f"a whole slice: the devices fill {chip.name}:{shape_text(shape, chip.torus_rank)} from "
        "(0, 0, 0), as a part of a larger slice could too",
    )
    return replace(links, assumptions=(*(assumption if wrap is None else ()), *links.assumptions))


def _of_part(
    name: str,
    chip: Chip | None,
    slice_shape: Shape3,
    shape: Shape3,
    origin: tuple[Coords, ...],
    wrap: Sequence[bool] | None,
    twist: bool | None,
    allow_unreal: bool,
) -> Links:
    """Links of a part of a slice: a dim wraps where the part reaches across all of it."""
    for start in origin:
        ends = [first + size for first, size in zip(start, shape, strict=True)]
        if any(end > size for end, size in zip(ends, slice_shape, strict=True)):
            raise TopologyError(
                f"Devices of {shape_text(shape)} chips from {start} on were given with "
                f"slice_shape={slice_shape}. They reach beyond that slice. "
                f"Pass the shape of the slice of which they are part, {tuple(ends)} or more."
            )
    links = _settle_links(name, chip, slice_shape, None, twist, allow_unreal)
    is_whole = slice_shape == shape
    if links.twist and not is_whole:
        raise TopologyError(
            f"Devices of {shape_text(shape)} chips were given as part of a twisted "
            f"slice_shape={slice_shape}. Its wrap links leave the part, so that it is no twisted "
            "torus. Pass twist=False and the wrap of the part, or all devices of the slice."
        )
    flags = _read_wrap(name, wrap, shape)
    if links.wrap is None or flags is not None:
        return Links(flags, links.twist, is_whole and links.is_real, links.assumptions)
    covered = [links.wrap[d] and shape[d] == slice_shape[d] and shape[d] > 2 for d in range(3)]
    wraps = (covered[0], covered[1], covered[2])
    return Links(wraps, links.twist, is_whole and links.is_real, links.assumptions)


def _places(slices: tuple[tuple[Device, ...], ...], origin: tuple[Coords, ...]) -> Places:
    ordered = [
        sorted(
            group,
            key=lambda device: (
                device.process_index or 0,
                *reversed(device.coords or (0, 0, 0)),
                device.core_on_chip,
            ),
        )
        for group in slices
    ]
    flat = [device for group in ordered for device in group]
    index = np.repeat(np.arange(len(slices)), [len(group) for group in ordered])
    chips = np.array([device.coords for device in flat], np.int64)
    return Places(
        ids=np.array([device.id for device in flat], np.int64),
        processes=np.array([_process(device) for device in flat], np.int64),
        slices=index,
        coords=chips - np.array(origin, np.int64)[index],
        cores=np.array([device.core_on_chip for device in flat], np.int64),
        devices=tuple(flat),
    )


def _process(device: Device) -> int:
    return -1 if device.process_index is None else device.process_index


def _switched(slices: tuple[tuple[Device, ...], ...], chip: Chip | None) -> Topology:
    """GPUs and bare ids: a granule is a row of devices behind one switch."""
    size = len(slices[0])
    flat = [device for group in slices for device in group]
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
    assumption = (
        "a switch: the devices have no coords, so that those of a granule are taken to be alike"
    )
    return Topology(
        chip=chip,
        shape=(size, 1, 1),
        wrap=(False, False, False),
        twist=False,
        num_slices=len(slices),
        devices_per_chip=1,
        chips_per_host=(host, 1, 1),
        origin=((0, 0, 0),) * len(slices),
        is_real=chip is not None,
        assumptions=() if chip is not None else (assumption,),
        _places=places,
    )
