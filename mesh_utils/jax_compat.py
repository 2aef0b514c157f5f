"""create_device_mesh and create_hybrid_device_mesh, with the arguments of JAX's.

    from jax.experimental import mesh_utils     becomes     import mesh_utils
    mesh_utils.create_device_mesh((64, 4))                  mesh_utils.create_device_mesh((64, 4))

They take what JAX's take and return an array of the devices given, in the order of the mesh, for
jax.sharding.Mesh. What is different:

- the mesh is the one of highest modelled score (assignment.py); strategy="jax" asks JAX instead;
- `devices` may also be a Topology, torch_xla's attribute dicts, or Devices;
- physical dims are split where that pays, unless allow_split_physical_axes=False forbids it (JAX
  splits only when told to, and refuses most shapes otherwise);
- a size of -1 stands for what is left;
- a job of one slice is a hybrid mesh too; `wrap` says which dims wrap where no table knows;
- errors are MeshErrors, which are ValueErrors.
"""

import math
import sys
import warnings as python_warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, SupportsIndex, TypeAlias, cast

import numpy as np

from mesh_utils.argument_types import argument_types
from mesh_utils.assignment import Assignment, Weights, assign
from mesh_utils.devices import Coords, Device, DeviceArray, Granule, device_array, read_devices
from mesh_utils.errors import MeshError, TopologyError
from mesh_utils.topology import Topology

# ------------------------------------------------------------------------ JAX's own mesh functions
#
# The one place that asks them.
#
# JAX is imported here, when it is asked, and no backend starts. Devices that JAX does not know
# (torch_xla's, Devices, those of a Topology) are shown to it in the form that its mesh functions
# look at.


@dataclass(frozen=True, slots=True)
class JaxDevice:
    """What JAX's mesh functions ask of a device. The id is its place in the list."""

    id: int
    platform: str
    device_kind: str
    process_index: int
    coords: Coords
    core_on_chip: int
    slice_index: int = 0


def jax_mesh_utils(request: str, instead: str) -> Any:
    """Imports JAX's mesh functions.

    Args:
        request: what needs them, for the message.
        instead: what else to do, for the message.

    Returns:
        The module jax.experimental.mesh_utils.

    Raises:
        MeshError: JAX cannot be imported.
    """
    try:
        from jax.experimental import mesh_utils
    except ImportError as error:
        raise MeshError(
            f"{request} JAX cannot be imported: {error}. Install jax, or {instead}."
        ) from error
    return mesh_utils


def jax_default_devices() -> list[object]:
    """The devices that JAX has here; this starts its backend.

    Returns:
        jax.devices().

    Raises:
        MeshError: JAX cannot be imported.
    """
    request = "A mesh was asked for without devices, which are jax.devices() then."
    jax_mesh_utils(request, "pass devices, or a Topology")
    return list(sys.modules["jax"].devices())  # its parent, which is there by now


def shown_to_jax(devices: Sequence[Device]) -> list[JaxDevice]:
    """Shows devices to JAX as they are.

    Args:
        devices: the devices.

    Returns:
        What JAX looks at; the id of each is its place in the list.
    """
    return [
        JaxDevice(
            place,
            "gpu" if device.coords is None else "tpu",
            device.kind,
            device.process_index or 0,
            device.coords or (0, 0, 0),
            device.core_on_chip,
            device.slice_index or 0,
        )
        for place, device in enumerate(devices)
    ]


# ----------------------------------------------------------------- JAX's functions, by their names

Strategy: TypeAlias = Literal["search", "jax"]
"""How a mesh is made: by the search, or by JAX."""


@argument_types
def create_device_mesh(
    mesh_shape: Sequence[SupportsIndex],
    devices: Iterable[object] | Topology | None = None,
    *,
    contiguous_submeshes: bool = False,
    allow_split_physical_axes: bool | None = None,
    strategy: Strategy = "search",
    weights: Weights | None = None,
    wrap: Sequence[bool] | None = None,
) -> DeviceArray:
    """Makes the mesh of one slice.

    Args:
        mesh_shape: the size of each axis, from the least to the most network-hungry; for the search
            one may be -1.
        devices: the devices, in any order, or a Topology; None for jax.devices().
        contiguous_submeshes: whether the devices of each process are to be a box of the mesh.
        allow_split_physical_axes: whether a physical dim may be split over axes; None lets the
            search do so, and JAX not.
        strategy: "search", or "jax" for what JAX makes.
        weights: bytes that each axis gathers, for the search; None doubles them from axis to axis.
        wrap: for each dim whether it wraps, where no table knows.

    Returns:
        The devices given (a Topology's Devices) in the shape of the mesh.

    Raises:
        MeshError: a shape that does not fit the devices, devices that are no box of one slice or
            whose wrap is not known, or restrictions that no mesh fulfils.
        Exception: with strategy="jax" whatever JAX raises.

    Example:
        >>> mesh = create_device_mesh((4, 4), Topology.parse("v5e:4x4"))
        >>> [device.id for device in mesh[0]]
        [0, 1, 5, 4]
    """
    _refuse_strategy(strategy)
    if strategy == "jax":
        jax_devices, originals = _for_jax(devices)
        array = _jax("create_device_mesh").create_device_mesh(
            mesh_shape,
            jax_devices,
            contiguous_submeshes=contiguous_submeshes,
            allow_split_physical_axes=bool(allow_split_physical_axes),
        )
        return _as_originals(array, originals)
    topology, originals = _read_topology(devices, "slice", wrap, single_mesh=True)
    if topology.num_slices > 1:
        raise TopologyError(
            f"A mesh of {tuple(mesh_shape)} was asked for on {topology.num_slices} slices, "
            f"{topology!r}. create_device_mesh makes meshes of one slice. Pass the devices of one "
            "slice, or call create_hybrid_device_mesh."
        )
    assignment = assign(
        topology,
        mesh_shape,
        (1,) * len(mesh_shape),
        weights=weights,
        contiguous_submeshes=contiguous_submeshes,
        allow_split_physical_axes=allow_split_physical_axes is not False,
    )
    if contiguous_submeshes:
        _refuse_split_hosts(assignment)
    return _placed(assignment, originals)


@argument_types
def create_hybrid_device_mesh(
    mesh_shape: Sequence[SupportsIndex],
    dcn_mesh_shape: Sequence[SupportsIndex],
    devices: Iterable[object] | Topology | None = None,
    *,
    process_is_granule: bool = False,
    should_sort_granules_by_key: bool = True,
    allow_split_physical_axes: bool | None = None,
    strategy: Strategy = "search",
    weights: Weights | None = None,
    wrap: Sequence[bool] | None = None,
) -> DeviceArray:
    """Makes the mesh of several slices: on each axis the part across slices is the outer one.

    Args:
        mesh_shape: the size of each axis inside a slice; for the search one may be -1.
        dcn_mesh_shape: the size of each axis across slices; for the search one may be -1.
        devices: the devices, in any order, or a Topology; None for jax.devices().
        process_is_granule: whether processes take the place of slices.
        should_sort_granules_by_key: whether granules are in the order of their numbers; else as
            they first appear among the devices.
        allow_split_physical_axes: as for `create_device_mesh`.
        strategy: "search", or "jax" for what JAX makes.
        weights: as for `create_device_mesh`.
        wrap: for each dim of a granule whether it wraps, where no table knows.

    Returns:
        The devices given (a Topology's Devices) in the shape mesh_shape * dcn_mesh_shape.

    Raises:
        MeshError: shapes that do not fit, granules that differ, or what `create_device_mesh`
            refuses.
        Exception: with strategy="jax" whatever JAX raises.

    Warns:
        UserWarning: an axis runs over DCN although one that gathers less does not.

    Example:
        >>> mesh = create_hybrid_device_mesh((1, 4), (2, 1), Topology.parse("2xv5e:2x2"))
        >>> [[device.id for device in row] for row in mesh]
        [[100000, 100001, 100002, 100003], [200000, 200001, 200002, 200003]]
    """
    _refuse_strategy(strategy)
    if strategy == "jax":
        jax_devices, originals = _for_jax(devices)
        array = _jax("create_hybrid_device_mesh").create_hybrid_device_mesh(
            mesh_shape,
            dcn_mesh_shape,
            jax_devices,
            process_is_granule=process_is_granule,
            should_sort_granules_by_key=should_sort_granules_by_key,
            allow_split_physical_axes=bool(allow_split_physical_axes),
        )
        return _as_originals(array, originals)
    topology, originals = _read_topology(
        devices, "process" if process_is_granule else "slice", wrap, single_mesh=False
    )
    assignment = assign(
        topology,
        mesh_shape,
        dcn_mesh_shape,
        weights=weights,
        allow_split_physical_axes=allow_split_physical_axes is not False,
        slice_order=None if should_sort_granules_by_key else _as_they_appear(topology, originals),
    )
    if not process_is_granule:
        for line in assignment.warnings:
            python_warnings.warn(line, UserWarning, stacklevel=3)  # past argument_types
    return _placed(assignment, originals)


def _refuse_strategy(strategy: object) -> None:
    if strategy not in ("search", "jax"):
        raise MeshError(
            f"A device mesh was asked for with strategy={strategy!r}. There is no such strategy. "
            "Pass 'search' or 'jax'."
        )


def _read_topology(
    devices: Iterable[object] | Topology | None,
    granule: Granule,
    wrap: Sequence[bool] | None,
    single_mesh: bool,
) -> tuple[Topology, list[object] | None]:
    """The topology of devices, and the devices as they were given; None for a topology's own."""
    if isinstance(devices, Topology):
        if granule == "slice":
            return devices, None
        originals: list[object] = list(devices.devices)
    else:
        originals = jax_default_devices() if devices is None else _listed(devices)
    described = read_devices(originals)
    on_torus = described[0].coords is not None
    # Of one mesh over devices without a torus: they count as one granule, as they do for JAX.
    rule = len(described) if single_mesh and not on_torus else granule
    topology = Topology.from_devices(originals, granule=rule, wrap=wrap)
    if topology.wrap is None:
        raise TopologyError(
            f"A mesh was asked for on {len(originals)} devices that fill {topology!r}. Its wrap is "
            "not known, and it decides the bandwidth of every axis. Pass wrap="
            f"{tuple(size > 2 for size in topology.shape)} for a torus, wrap=(False,) for a mesh, "
            "or strategy='jax'."
        )
    return topology, originals


def _listed(devices: Iterable[object]) -> list[object]:
    if isinstance(devices, np.ndarray):
        return cast("list[object]", devices.reshape(-1).tolist())
    argument: object = devices
    if isinstance(argument, (str, bytes, dict)) or not hasattr(argument, "__iter__"):
        read_devices(cast("Iterable[object]", argument))  # which says what is wrong
    return list(devices)


def _placed(assignment: Assignment, originals: list[object] | None) -> DeviceArray:
    if originals is None:
        return assignment.devices
    described = read_devices(originals)
    by_id = {device.id: original for device, original in zip(described, originals, strict=True)}
    ids = assignment.device_ids.reshape(-1).tolist()
    return device_array([by_id[number] for number in ids], assignment.mesh_shape)


def _as_they_appear(topology: Topology, originals: list[object] | None) -> list[int]:
    """The slices of a topology in the order in which their devices were given."""
    slices = dict(zip(topology.device_ids.tolist(), topology.slice_index.tolist(), strict=True))
    ids = (
        topology.device_ids.tolist()
        if originals is None
        else [d.id for d in read_devices(originals)]
    )
    return list(dict.fromkeys(slices[number] for number in ids))


def _refuse_split_hosts(assignment: Assignment) -> None:
    """The hosts of a topology are the usual ones of its chip; those of its devices may differ."""
    processes = assignment.topology.places.processes
    if (processes < 0).any():
        return
    by_place = dict(zip(assignment.topology.device_ids.tolist(), processes.tolist(), strict=True))
    at = np.vectorize(by_place.__getitem__, otypes=[np.int64])(assignment.device_ids)
    for process in np.unique(processes).tolist():
        places = np.argwhere(at == process)
        sizes = (np.ptp(places, axis=0) + 1).tolist()
        if math.prod(sizes) != len(places):
            raise TopologyError(
                f"A mesh of {assignment.mesh_shape} on {assignment.topology!r} was asked for with "
                f"contiguous_submeshes=True. The {len(places)} devices of process {process} are "
                f"not a box of {assignment.topology.chips_per_host} chips. "
                "Pass contiguous_submeshes=False, or devices whose hosts are such boxes."
            )


def _for_jax(
    devices: Iterable[object] | Topology | None,
) -> tuple[list[Any] | None, list[object] | None]:
    """What to show to JAX, and what to give back for it; None where it is the same."""
    if devices is None:
        return None, None
    originals: list[object] = list(
        devices.devices if isinstance(devices, Topology) else _listed(devices)
    )
    if all(hasattr(device, "device_kind") and hasattr(device, "platform") for device in originals):
        return originals, None
    return list(shown_to_jax(read_devices(originals))), originals


def _as_originals(mesh: Any, originals: list[object] | None) -> DeviceArray:
    if originals is None:
        return cast("DeviceArray", mesh)
    return device_array([originals[device.id] for device in mesh.reshape(-1)], mesh.shape)


def _jax(name: str) -> Any:
    request = f"{name} was asked for with strategy='jax'."
    return jax_mesh_utils(request, "pass strategy='search'")
