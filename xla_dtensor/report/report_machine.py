"""The machine and the mesh of a report, in words and numbers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mesh_utils import Axis, Mesh, Topology
from xla_dtensor.report.evidence import Evidence

__all__ = ["Machine", "MeshAxis", "machine_of", "mesh_axes"]


@dataclass(frozen=True, slots=True)
class Machine:
    """What the step was compiled for.

    Attributes:
        name: of the topology, "2xv5p:8x8x8"; "" if it is not known.
        words: the same for people.
        devices: how many devices run the step.
        slices: how many slices they are on.

    Example:
        >>> machine = Machine("v5e:2x4", "TPU v5e, 8 chips (2 x 4)", 8, 1)
        >>> machine.slices
        1
    """

    name: str
    words: str
    devices: int
    slices: int


@dataclass(frozen=True, slots=True)
class MeshAxis:
    """An axis of the mesh.

    Attributes:
        name: its name.
        size: its size.
        slices: how many of that lie in other slices, over DCN; the rest is inside a slice, on ICI.

    Example:
        >>> axis = MeshAxis("fsdp", 16, 2)
        >>> axis.inside, axis.words
        (8, 'fsdp = 16 (2 over DCN x 8 on ICI)')
    """

    name: Axis
    size: int
    slices: int

    @property
    def inside(self) -> int:
        """Its size inside a slice."""
        return self.size // self.slices

    @property
    def words(self) -> str:
        """The axis for people."""
        if self.slices == 1:
            return f"{self.name} = {self.size}"
        where = "over DCN"
        if self.inside > 1:
            where = f"{self.slices} over DCN x {self.inside} on ICI"
        return f"{self.name} = {self.size} ({where})"


def machine_of(evidence: Evidence) -> Machine:
    """Describes the machine.

    Args:
        evidence: with its topology, if it is known.

    Returns:
        The machine.

    Example:
        >>> machine_of(Evidence("t", "HloModule m", Mesh.arange((2, 4)))).words
        '8 devices of a machine of which nothing is known'
    """
    size, topology = evidence.mesh.root.size(), evidence.topology
    if topology is None:
        words = f"{size} devices of a machine of which nothing is known"
        return Machine("", words, size, 1)
    return Machine(topology.name, _words(topology), size, topology.num_slices)


def _words(topology: Topology) -> str:
    chip = topology.chip
    is_gpu = chip is not None and chip.torus_rank == 0
    what = "GPUs" if is_gpu else "chips"
    rank = 3 if chip is None else chip.torus_rank
    shape = " x ".join(map(str, topology.shape[:rank]))
    words = "unknown chip" if chip is None else chip.title
    if topology.num_slices > 1:
        per_slice = topology.num_chips // topology.num_slices
        domain = "NVLink domains" if is_gpu else "slices"
        words += f", {topology.num_slices} {domain} of {per_slice:,} {what}"
    else:
        words += f", {topology.num_chips:,} {what}"
    words += f" ({shape})" if shape else ""
    words += ", twisted" if topology.twist else ""
    return f"{words}, {topology.num_hosts:,} host{'' if topology.num_hosts == 1 else 's'}"


def mesh_axes(evidence: Evidence) -> tuple[MeshAxis, ...]:
    """Lists the axes of the mesh.

    Args:
        evidence: with its mesh; without a topology all axes lie inside one slice.

    Returns:
        The axes in the order of the mesh.

    Example:
        >>> mesh = Mesh.arange((2, 4), ("dp", "tp"))
        >>> [axis.words for axis in mesh_axes(Evidence("t", "HloModule m", mesh))]
        ['dp = 2', 'tp = 4']
    """
    mesh = evidence.mesh
    mesh = mesh if mesh.size() == mesh.root.size() else mesh.root
    slices = _slices(mesh, evidence)
    found: list[MeshAxis] = []
    for place, (name, size) in enumerate(zip(mesh.axis_names, mesh.mesh_shape, strict=True)):
        lines = np.moveaxis(slices, place, -1).reshape(-1, size)
        counts = {np.unique(line).size for line in lines}
        # Where the lines of an axis differ, or its size is no multiple, no such product is true.
        count = max(counts)
        found.append(MeshAxis(name, size, count if size % count == 0 else size))
    return tuple(found)


def _slices(mesh: Mesh, evidence: Evidence) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """The slice of each device of the mesh, in its shape."""
    given = evidence.granules
    if given is None:
        return np.zeros(mesh.mesh_shape, np.int64)
    of_device = dict(zip(evidence.mesh.root.device_ids.flat, given, strict=True))
    return np.vectorize(of_device.__getitem__, otypes=[np.int64])(mesh.device_ids)
