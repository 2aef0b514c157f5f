"""What the model says of the meshes of `benchmarks.bandwidth`, where it knows their links."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.bandwidth_measure import KINDS, Kind
from mesh_utils import AxisReport, MeshError, Topology, assign, axis_reports
from mesh_utils.network import Network


@dataclass(frozen=True)
class Machine:
    """The devices, and what is known of their links.

    Attributes:
        devices: as JAX lists them.
        topology: None where their links are not known.
        reason: why not; "" where they are.
    """

    devices: Sequence[Any]
    topology: Topology | None
    reason: str

    @property
    def kind(self) -> str:
        """What the devices are, in words: virtual ones are called so."""
        first = self.devices[0]
        if first.platform == "cpu":
            return f"{len(self.devices)} virtual CPU devices: memory of one machine, no network"
        return f"{len(self.devices)} x {first.device_kind}"


def machine_of(devices: Iterable[Any], wrap: Sequence[bool] | None = None) -> Machine:
    """Looks at devices.

    Args:
        devices: of JAX.
        wrap: for each dim whether it wraps, where no table knows.

    Returns:
        The machine.
    """
    given = list(devices)
    if given[0].platform == "cpu":
        return Machine(given, None, "CPU devices have no links")
    try:
        on_torus = getattr(given[0], "coords", None) is not None
        rule = "slice" if on_torus else len(given)
        topology = Topology.from_devices(given, granule=rule, wrap=wrap)
        Network.of(topology)
    except MeshError as error:
        return Machine(given, None, str(error))
    return Machine(given, topology, "")


def mesh_ids(machine: Machine, shape: Sequence[int]) -> np.ndarray:
    """The ids of a mesh: the search's where the links are known, else in the order of the list.

    Args:
        machine: the devices.
        shape: the size of each axis; slices go to the first axis.

    Returns:
        Ids in that shape.
    """
    topology = machine.topology
    if topology is None:
        return np.array([device.id for device in machine.devices]).reshape(shape)
    slices = topology.num_slices
    if slices == 1:
        return assign(topology, shape).device_ids
    if shape[0] % slices:
        raise SystemExit(
            f"A mesh of {tuple(shape)} was asked for on {slices} slices. Its first axis cannot be "
            f"shared out to them. Pass --mesh with a first axis that {slices} divides."
        )
    inner = (shape[0] // slices, *shape[1:])
    return assign(topology, inner, (slices, *[1] * (len(shape) - 1))).device_ids


def modelled(machine: Machine, ids: np.ndarray) -> list[dict[str, Any]]:
    """What the model says of each axis.

    Args:
        machine: the devices.
        ids: the ids of the mesh.

    Returns:
        For each axis its span, the strategy, and bytes per second by collective; empty dicts where
        the links are not known.
    """
    if machine.topology is None:
        return [{} for _ in ids.shape]
    return [_figures(report) for report in axis_reports(machine.topology, ids)]


def _figures(report: AxisReport) -> dict[str, Any]:
    link = report.link_bytes_per_second
    rates: dict[Kind, float | None] = {}
    for kind in KINDS:
        links = report.shift_links if kind == "permute" else report.links[kind]
        rates[kind] = None if link is None else links * link
    where = "no rows of chips" if report.span is None else str(report.span)[5:-1]
    return {"on": where, "strategy": report.strategy, "bytes_per_second": rates}
