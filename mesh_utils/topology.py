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

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import SupportsIndex

import numpy as np
from numpy.typing import NDArray

from mesh_utils.argument_types import argument_types
from mesh_utils.device import Coords, Device
from mesh_utils.errors import TopologyError
from mesh_utils.granule import Granule, granules
from mesh_utils.hardware import Chip
from mesh_utils.slice_table import Shape3, Wrap3
from mesh_utils.topology_name import cloud_name, read_topology_name, shape_text
from mesh_utils.topology_places import Places, devices_at, fills, synthetic_places
from mesh_utils.topology_wrap import read_count, read_shape, settle_links


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
    ) -> "Topology":
        """Makes the topology of a name.

        Args:
            name: "v5p-128", "v5litepod-16", "v5p:4x4x8", "v5p:4x4x8_twisted", "4xv5e:16x16",
                "h100-64": see topology_name.py.
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
        found = read_topology_name(name)
        slices = read_count(name, found.num_slices, num_slices)
        if found.twist is not None and twist is not None and found.twist != twist:
            raise TopologyError(
                f"Topology {name!r} was asked for with twist={twist}. The two differ. "
                "Say it in the name, or with twist=, or in both alike."
            )
        chip = found.chip
        asked = found.twist if twist is None else twist
        links = settle_links(name, chip, found.shape, wrap, asked, allow_unreal)
        return cls(
            chip=chip,
            shape=found.shape,
            wrap=links.wrap,
            twist=links.twist,
            num_slices=slices,
            devices_per_chip=chip.devices_per_chip,
            chips_per_host=_clipped(chip.chips_per_host, found.shape),
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
    ) -> "Topology":
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
        box = read_shape("shape", shape)
        slices = read_count("synthetic", None, num_slices)
        cores = read_count("synthetic", None, devices_per_chip, "devices_per_chip")
        links = settle_links("synthetic", None, box, wrap, twist, allow_unreal=True)
        host = _clipped(read_shape("chips_per_host", chips_per_host), box)
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
    ) -> "Topology":
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
        from mesh_utils.topology_devices import read_topology

        found = read_topology(devices, chip, wrap, twist, slice_shape, granule, allow_unreal)
        return cls(
            chip=found.chip,
            shape=found.shape,
            wrap=found.links.wrap,
            twist=found.links.twist,
            num_slices=len(found.origin),
            devices_per_chip=found.devices_per_chip,
            chips_per_host=found.chips_per_host,
            origin=found.origin,
            is_real=found.links.is_real,
            assumptions=found.links.assumptions,
            _places=found.places,
        )

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
        known = self._places.devices if self._places else ()
        return 0 if known and known[0].coords is None else 3

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
            MeshError: granules of different sizes; see granule.py.

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
        if not fills(self.places, (self.num_slices, *self.shape, self.devices_per_chip)):
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
    x, y, z = (min(part, size) for part, size in zip(host, shape, strict=True))
    return (x, y, z)
