"""Assignment: which chip gets which place in a mesh, so that every axis has the links it needs.

The idea. A mesh axis is as fast as the links under it (network.py). To lay a mesh on a slice is to
hand out each physical dim to the axes, in parts that multiply to its length, one inside the other:
the innermost gets neighbours, the next chips a stride apart. There are finitely many ways. Each
axis then has a modelled bandwidth, and the ways are compared by the time that a step would spend:

    seconds = sum over axes of  weight (1 - 1/size) / bandwidth        lowest wins
    score   = sum over axes of  weight (1 - 1/size) / seconds          a mean bandwidth, in links

A weight is the bytes that an axis gathers. Where nobody says, it doubles from axis to axis: the
last one is the hungriest, as in JAX and torch_xla. The bound is the same mean with the bandwidth
that no axis of that size can exceed here.

A worked example: 16 x 16 chips of v5e, 64 for fsdp and 4 for tp. JAX puts tp on 4 of a row of 16,
which is a line: one link. Four chips of a square are a ring of two links:

    >>> from mesh_utils import Topology, assign
    >>> found = assign(Topology.parse("v5e:16x16"), (64, 4), axis_names=("fsdp", "tp"))
    >>> for line in found.reasons:  # doctest: +ELLIPSIS
    ...     print(line)
    score 1.43 links modelled, 36 % of the bound of 4: the best of 3 choices of parts
    fsdp=64 on Span(x8@2 y8@2): 1 link (50 GB/s), a ring ...; 2 chips apart, so that groups share...
    tp=4 on Span(x2 y2): 2 links (100 GB/s), a ring through a block
    runner-up: 1.25 links; there fsdp has 2 instead of 1, tp has 1 instead of 2
    >>> found.links
    (1.0, 2.0)
    >>> found.device_ids[0].tolist()
    [0, 1, 17, 16]

Inside an axis chips are in the order of shortest steps: 0, 1, 17, 16 is a ring. Where XLA gathers
over all dims of an axis at once they are in rows, because it does so in rows only
(assignment_walk.py).

How it is found: assignment_search.py looks at every way on a slice, from the lowest bound on, and
says so (`is_exact`); with very many axes it looks at a fixed number of them.

Several slices: each axis has a part across slices, the outer one, and one inside; inside, all
slices are laid out alike, which is what XLA needs to make of a collective one part per slice and
one between them. DCN adds the same time to every way, so the search is that of one slice.

What is not looked at: axes that take chips of one dim at two different strides (JAX makes none
either), and orders across slices other than DCN outside.

Invariants: every device is in the mesh once; the groups of an axis lie where its span says, and
`axis_reports` of the mesh gives the same bandwidths; no other way on the list has a higher score
where `is_exact`; the score does not exceed the bound; the same question has the same answer.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import SupportsIndex

import numpy as np
from numpy.typing import NDArray

from mesh_utils.argument_types import argument_types
from mesh_utils.assignment_input import Weights, read_weights, settle_shapes
from mesh_utils.assignment_places import mesh_chips, placed_rows
from mesh_utils.assignment_reasons import describe, slow_crossings
from mesh_utils.assignment_search import SearchResult, search_spans
from mesh_utils.assignment_table import span_table
from mesh_utils.assignment_walk import Walk
from mesh_utils.errors import TopologyError
from mesh_utils.mesh import Mesh
from mesh_utils.mesh_input import Axis, read_axis_names
from mesh_utils.network import Network
from mesh_utils.network_report import AxisReport, axis_reports
from mesh_utils.span import Span
from mesh_utils.topology import Topology


@dataclass(frozen=True, eq=False)
class Assignment:
    """A mesh that fits the machine, and why. Made by `assign`.

    Attributes:
        topology: the chips.
        network: their links.
        axis_names: the name of each axis.
        ici_mesh_shape: the size of each axis inside a slice.
        dcn_mesh_shape: the size of each axis across slices.
        weights: bytes that each axis gathers, in any unit.
        spans: where each axis lies.
        walks: the order of the chips of each axis.
        device_ids: the ids in the shape of the mesh; read-only.
        is_exact: whether no other mesh of this kind has a higher score.
        choices: choices of parts that there are.
    """

    topology: Topology
    network: Network
    axis_names: tuple[Axis, ...]
    ici_mesh_shape: tuple[int, ...]
    dcn_mesh_shape: tuple[int, ...]
    weights: tuple[float, ...]
    spans: tuple[Span, ...]
    walks: tuple[Walk, ...]
    device_ids: NDArray[np.int64]
    is_exact: bool
    choices: int
    _rows: NDArray[np.int64] = field(repr=False)
    _runner_up: tuple[Span, ...] | None = field(repr=False)

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """The size of each axis."""
        sizes = zip(self.ici_mesh_shape, self.dcn_mesh_shape, strict=True)
        return tuple(inner * outer for inner, outer in sizes)

    @property
    def devices(self) -> NDArray[np.object_]:
        """The topology's Devices in the shape of the mesh."""
        listed = np.empty(self.topology.num_devices, object)
        listed[:] = self.topology.devices
        return listed[self._rows]

    @cached_property
    def mesh(self) -> Mesh:
        """The mesh, with its axis names."""
        return Mesh(self.device_ids, self.mesh_shape, self.axis_names)

    @cached_property
    def links(self) -> tuple[float, ...]:
        """Bus bandwidth of an all-gather on each axis, in links; inf for axes of one device."""
        return tuple(self.network.links(span) for span in self.spans)

    @cached_property
    def bounds(self) -> tuple[float, ...]:
        """What no axis of each size can exceed, in links."""
        sizes = zip(self.mesh_shape, self.dcn_mesh_shape, strict=True)
        return tuple(self.network.bound(size, outer) for size, outer in sizes)

    @cached_property
    def score(self) -> float:
        """The weighted mean bandwidth, in links; inf for a mesh of one device."""
        return mesh_score(self.mesh_shape, self.weights, self.links)

    @cached_property
    def bound(self) -> float:
        """What no score of this shape can exceed, in links."""
        return mesh_score(self.mesh_shape, self.weights, self.bounds)

    @cached_property
    def runner_up(self) -> "RunnerUp | None":
        """The best mesh of a lower score; None if all have the same."""
        if self._runner_up is None:
            return None
        links = tuple(self.network.links(span) for span in self._runner_up)
        return RunnerUp(self._runner_up, links, mesh_score(self.mesh_shape, self.weights, links))

    @cached_property
    def reports(self) -> tuple[AxisReport, ...]:
        """What each axis gets, read back from the mesh: all collectives, hops, GB/s."""
        return axis_reports(self.topology, self.mesh, network=self.network)

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why this mesh, a line each: the score, every axis, the runner-up, what was assumed."""
        return describe(self)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Axes that run over DCN although others, which need less, do not; with what it costs."""
        return slow_crossings(self)

    def check_valid(self) -> None:
        """States the invariants of an assignment.

        Raises:
            TopologyError: one of them does not hold, which only a bug in mesh_utils can bring
                about.
        """
        ids = np.sort(self.device_ids, axis=None)
        faults: list[str] = []
        if not np.array_equal(ids, np.sort(self.topology.device_ids)):
            faults.append("it does not hold each device once")
        for report, links in zip(self.reports, self.links, strict=True):
            if not math.isclose(report.links["all-gather"], links, rel_tol=1e-9):
                faults.append(f"axis {report.axis} has not the bandwidth of its span")
        if self.score > self.bound * (1 + 1e-9):
            faults.append(f"its score {self.score} exceeds its bound {self.bound}")
        if faults:
            raise TopologyError(
                f"An assignment of {self.mesh_shape} to {self.topology!r} was checked. It cannot "
                f"be: {'; '.join(faults)}. Make assignments with assign() only."
            )


@dataclass(frozen=True)
class RunnerUp:
    """The best mesh of a lower score.

    Attributes:
        spans: where each axis lies.
        links: what each axis gets, in links.
        score: its score.
    """

    spans: tuple[Span, ...]
    links: tuple[float, ...]
    score: float


def mesh_score(
    mesh_shape: Sequence[int], weights: Sequence[float], links: Sequence[float]
) -> float:
    """The weighted mean bandwidth of the axes of a mesh.

    Args:
        mesh_shape: the size of each axis.
        weights: bytes that each axis gathers, in any unit.
        links: bus bandwidth of each axis.

    Returns:
        sum of w (1 - 1/k) over the sum of w (1 - 1/k) / links; inf where nothing moves.

    Example:
        >>> round(mesh_score((2, 2), (1, 3), (1.0, 2.0)), 3)
        1.6
    """
    moved = [weight * (1 - 1 / size) for size, weight in zip(mesh_shape, weights, strict=True)]
    seconds = sum(part / rate for part, rate in zip(moved, links, strict=True) if part)
    return sum(moved) / seconds if seconds else math.inf


@argument_types
def assign(
    topology: Topology,
    mesh_shape: Iterable[SupportsIndex],
    dcn_mesh_shape: Iterable[SupportsIndex] | None = None,
    *,
    axis_names: Iterable[Axis] | None = None,
    weights: Weights | None = None,
    network: Network | None = None,
    contiguous_submeshes: bool = False,
    allow_split_physical_axes: bool = True,
    rings: bool | None = None,
    slice_order: Sequence[int] | None = None,
) -> Assignment:
    """Finds the mesh whose axes have the best links.

    Args:
        topology: the chips.
        mesh_shape: the size of each axis inside a slice; one may be -1, for what is left.
        dcn_mesh_shape: the size of each axis across slices; one may be -1. None for one slice.
        axis_names: a name for each axis; None numbers them.
        weights: bytes that each axis gathers, in any unit, by axis or in mesh order; axes left out
            of a mapping gather none. None doubles them from axis to axis.
        network: the links, where they are not `Network.of(topology)`.
        contiguous_submeshes: whether the devices of each host are to be a box of the mesh.
        allow_split_physical_axes: whether a physical dim may be split over axes.
        rings: whether the chips of an axis may be in the order of a snake or a ring, which have the
            shortest steps for a permute (ring attention, pipelines). None: where no all-gather
            loses by it. True: on every axis. False: on none, they are in rows, so that each axis
            can be split into axes of its own. Bandwidths of gathers in the model are the same.
        slice_order: the slices in the order in which DCN axes go through them; None for ascending.

    Returns:
        The mesh and its reasons.

    Raises:
        MeshError: a shape that does not fit, weights that are none, a topology whose wrap is not
            known, or restrictions that no mesh fulfils.

    Example:
        >>> assign(Topology.parse("v5p-1024"), (64, -1), axis_names=("fsdp", "tp")).links
        (4.0, 2.0)
    """
    ici, dcn = settle_shapes(topology, mesh_shape, dcn_mesh_shape)
    names = read_axis_names(axis_names, ici)
    shares = read_weights(weights, names)
    links = Network.of(topology) if network is None else network
    found = search_or_refuse(
        topology, links, ici, shares, contiguous_submeshes, allow_split_physical_axes
    )
    host = topology.chips_per_host if contiguous_submeshes else None
    chip = topology.chip.name if topology.chip else None
    walks, members = mesh_chips(links, found.best, host, rings, chip)
    rows = placed_rows(topology, members, dcn, slice_order)
    ids = topology.device_ids[rows]
    ids.flags.writeable = False
    runner_up = found.runner_up
    return Assignment(
        topology=topology,
        network=links,
        axis_names=names,
        ici_mesh_shape=ici,
        dcn_mesh_shape=dcn,
        weights=shares,
        spans=_across(found.best.spans, dcn),
        walks=walks,
        device_ids=ids,
        is_exact=found.is_exact,
        choices=found.choices,
        _rows=rows,
        _runner_up=_across(runner_up.spans, dcn) if runner_up else None,
    )


def _across(spans: tuple[Span, ...], dcn: tuple[int, ...]) -> tuple[Span, ...]:
    return tuple(replace(span, slices=outer) for span, outer in zip(spans, dcn, strict=True))


def search_or_refuse(
    topology: Topology,
    network: Network,
    ici: tuple[int, ...],
    weights: tuple[float, ...],
    contiguous_submeshes: bool,
    allow_split: bool,
) -> SearchResult:
    """Searches, or says why nothing fits; the arguments are those of `assign`.

    Args:
        topology: the chips.
        network: their links.
        ici: the size of each axis inside a slice.
        weights: bytes that each axis gathers.
        contiguous_submeshes: whether hosts are to be boxes of the mesh.
        allow_split: whether a physical dim may be split over axes.

    Returns:
        What was found.

    Raises:
        TopologyError: no mesh fulfils the restrictions.
    """
    host = topology.chips_per_host if contiguous_submeshes and not network.switched else None
    table = span_table(network)
    found = search_spans(table, ici, weights, host=host, whole_dims=not allow_split)
    if found is not None:
        return found
    asked = f"A mesh of {ici} on {topology!r} was asked for"
    if not allow_split:
        raise TopologyError(
            f"{asked}, with allow_split_physical_axes=False. No choice of whole dims, of "
            f"{topology.shape} chips of {topology.devices_per_chip}, multiplies to those sizes. "
            "Pass allow_split_physical_axes=True, or sizes that are products of whole dims."
        )
    raise TopologyError(
        f"{asked}, with contiguous_submeshes={contiguous_submeshes}. No mesh of that shape keeps "
        f"hosts of {topology.chips_per_host} chips together. "
        "Pass contiguous_submeshes=False, or sizes that the sizes of a host divide."
    )
