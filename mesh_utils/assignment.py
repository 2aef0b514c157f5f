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
    >>> best = assign(Topology.parse("v5e:16x16"), (64, 4), axis_names=("fsdp", "tp"))
    >>> for line in best.reasons:  # doctest: +ELLIPSIS
    ...     print(line)
    score 1.43 links modelled, 36 % of the bound of 4: the best of 3 choices of parts
    fsdp=64 on Span(x8@2 y8@2): 1 link (50 GB/s), a ring ...; 2 chips apart, so that groups share...
    tp=4 on Span(x2 y2): 2 links (100 GB/s), a ring through a block
    runner-up: 1.25 links; there fsdp has 2 instead of 1, tp has 1 instead of 2
    >>> best.links
    (1.0, 2.0)
    >>> best.device_ids[0].tolist()
    [0, 1, 17, 16]

Inside an axis chips are in the order of shortest steps: 0, 1, 17, 16 is a ring. Where XLA gathers
over all dims of an axis at once they are in rows, because it does so in rows only
(search.py).

How it is found: search.py looks at every way on a slice, from the lowest bound on, and
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

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import SupportsIndex, TypeAlias, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from mesh_utils.argument_types import argument_types
from mesh_utils.devices import DeviceArray, device_array
from mesh_utils.errors import AxisError, MeshError, TopologyError
from mesh_utils.hardware import Shape3
from mesh_utils.mesh import Axis, Mesh, as_integer, read_axis_names
from mesh_utils.network import AxisReport, Network, axis_reports
from mesh_utils.search import (
    Candidate,
    SearchResult,
    Walk,
    best_walk,
    divisors,
    gathers_at_once,
    host_parts,
    host_walk,
    search_spans,
    span_table,
)
from mesh_utils.span import Span
from mesh_utils.topology import Topology

__all__ = []


# ----------------------------------------------------------- Reads what an assignment is asked for
#
# Shapes with one -1, weights by axis.

Weights: TypeAlias = (
    Sequence[float]
    | NDArray[np.floating]
    | Mapping[str, float]
    | Mapping[int, float]
    | Mapping[Axis, float]
)
"""Bytes that each axis gathers, in any unit: in mesh order, or by axis."""


def _settle_shapes(
    topology: Topology,
    mesh_shape: Iterable[SupportsIndex],
    dcn_mesh_shape: Iterable[SupportsIndex] | None,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The sizes of each axis inside slices and across them, each -1 filled in."""
    per_slice, slices = topology.devices_per_slice, topology.num_slices
    ici = _fill_shape("mesh_shape", mesh_shape, per_slice, f"devices in a slice of {topology!r}")
    if dcn_mesh_shape is None:
        if slices > 1:
            raise TopologyError(
                f"A mesh of {ici} was asked for on {slices} slices, {topology!r}. Nothing says "
                "which axis runs across slices, over DCN. "
                f"Pass dcn_mesh_shape={(slices, *(1,) * (len(ici) - 1))}, or create_hybrid_"
                "device_mesh."
            )
        return ici, (1,) * len(ici)
    dcn = _fill_shape("dcn_mesh_shape", dcn_mesh_shape, slices, f"slices of {topology!r}")
    if len(dcn) != len(ici):
        raise MeshError(
            f"A mesh was asked for with mesh_shape={ici} and dcn_mesh_shape={dcn}. They have "
            f"{len(ici)} and {len(dcn)} axes. Pass a size for each axis in both, 1 where there is "
            "none."
        )
    return ici, dcn


def _fill_shape(
    name: str, shape: Iterable[SupportsIndex], count: int, what: str
) -> tuple[int, ...]:
    """A shape whose product is `count`, its -1 filled in."""
    is_list = hasattr(shape, "__iter__") and not isinstance(shape, (str, bytes, Mapping))
    numbers = tuple(as_integer(size) for size in shape) if is_list else ()
    sizes = tuple(0 if size is None else size for size in numbers)
    if not sizes or any(size < 1 and size != -1 for size in sizes) or sizes.count(-1) > 1:
        raise MeshError(
            f"A mesh was asked for with {name}={shape!r}. That is no size of 1 or more for each "
            "axis, of which one may be -1, for what is left. Pass such sizes, as in (-1, 4)."
        )
    product = math.prod(size for size in sizes if size != -1)
    if -1 in sizes and count % product == 0:
        return tuple(count // product if size == -1 else size for size in sizes)
    if product != count or -1 in sizes:
        raise MeshError(
            f"A mesh was asked for with {name}={sizes}, a product of {product}. There are {count} "
            f"{what}. Pass {name}={nearest_sizes(sizes, count)}, or others with that product."
        )
    return sizes


def nearest_sizes(sizes: Sequence[int], count: int) -> tuple[int, ...]:
    """Sizes of a given product, like those given.

    Args:
        sizes: positive, or -1.
        count: the product.

    Returns:
        One axis changed if that will do: with a -1, another one, to the nearest that leaves a whole
        number; else what the others share with the product, and the rest on the first axis.

    Example:
        >>> nearest_sizes([-1, 3], 128), nearest_sizes([2, 3, 4], 64), nearest_sizes([2, 3, 5], 64)
        ((64, 2), (2, 8, 4), (64, 1, 1))
    """
    plain = [max(size, 1) for size in sizes]
    free = next((axis for axis, size in enumerate(sizes) if size == -1), None)
    for axis, size in enumerate(sizes):
        product_without = math.prod(plain) // plain[axis]
        if axis == free or count % product_without:
            continue
        if free is None:
            return (*plain[:axis], count // product_without, *plain[axis + 1 :])
        fitting = divisors(count // product_without)
        plain[axis] = min(fitting, key=lambda part: (abs(part - size), part))
        plain[free] = count // math.prod(plain)
        return tuple(plain)
    shared: list[int] = []
    for size in plain[1:]:
        shared.append(math.gcd(size, count // math.prod(shared)))
    return (count // math.prod(shared), *shared)


def _read_weights(weights: Weights | None, axis_names: tuple[Axis, ...]) -> tuple[float, ...]:
    """What each axis gathers; None doubles it from axis to axis."""
    if weights is None:
        return tuple(2.0**number for number in range(len(axis_names)))
    if isinstance(weights, Mapping):
        by_axis = dict(cast("Mapping[Axis, float]", weights))
        unknown = [axis for axis in by_axis if axis not in axis_names]
        if unknown:
            raise AxisError(
                f"A mesh was asked for with weights={by_axis!r}. It has no axis "
                f"{unknown[0]!r}. Pass weights for some of {', '.join(map(str, axis_names))}."
            )
        values: list[object] = [by_axis.get(axis, 0.0) for axis in axis_names]
    else:
        sequence: object = weights
        is_list = isinstance(sequence, (list, tuple, np.ndarray))
        values = list(cast("Sequence[object]", sequence)) if is_list else []
    numbers = [_number(number) for number in values]
    fine = all(math.isfinite(number) and number >= 0 for number in numbers)
    if len(numbers) != len(axis_names) or not fine or not any(numbers):
        raise MeshError(
            f"A mesh of {len(axis_names)} axes was asked for with weights={weights!r}. That is no "
            "number of bytes, 0 or more, for each axis, of which one is more than 0. "
            f"Pass such as {tuple(2.0**number for number in range(len(axis_names)))}."
        )
    return tuple(numbers)


def _number(weight: object) -> float:
    """A number as a float; nan for what is none."""
    if isinstance(weight, (bool, str, bytes)):
        return math.nan
    try:
        return float(weight)  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError):
        return math.nan


# --------------------------------------------------------------------------- From spans to devices
#
# Which device of a topology is at which place of a mesh.

IntArray: TypeAlias = NDArray[np.int64]
_Entry = TypeVar("_Entry", bound=np.generic)


def _mesh_chips(
    network: Network,
    choice: Candidate,
    host: Shape3 | None,
    rings: bool | None,
    chip: str | None = None,
) -> tuple[tuple[Walk, ...], tuple[IntArray, ...]]:
    """The walk of each axis, and [size, 4] x, y, z and core of its devices."""
    walks: list[Walk] = []
    if host is None or network.switched:
        walks = [
            best_walk(
                network,
                span,
                not gathers_at_once(network, span, chip) if rings is None else rings,
            )
            for span in choice.spans
        ]
    else:
        parts: list[list[int]] = []
        for dim in range(3):
            sizes = tuple(span.sizes[dim] for span in choice.spans)
            shared = host_parts(sizes, choice.nesting[dim], host[dim])
            parts.append(shared or [1] * len(sizes))
        walks = [
            host_walk(network, span, (parts[0][axis], parts[1][axis], parts[2][axis]))
            for axis, span in enumerate(choice.spans)
        ]
    members: list[IntArray] = []
    for walk, span in zip(walks, choice.spans, strict=True):
        chips = np.repeat(walk.members, span.cores, axis=0)
        cores = np.tile(np.arange(span.cores), len(walk.members))
        members.append(np.column_stack([chips, cores]).astype(np.int64))
    return tuple(walks), tuple(members)


def _placed_rows(
    topology: Topology,
    members: tuple[IntArray, ...],
    dcn: tuple[int, ...],
    slice_order: Sequence[int] | None = None,
) -> IntArray:
    """For each place of the mesh the device's place in the topology's list."""
    box = (topology.num_slices, *topology.shape, topology.devices_per_chip)
    rows = np.zeros(box, np.int64)
    rows[  # its place in the list, by slice, chip and core
        (topology.slice_index, *topology.coords.T, topology.core_on_chip)
    ] = np.arange(topology.num_devices)
    if slice_order is not None:
        rows = rows[list(slice_order)]
    ici = tuple(len(axis_members) for axis_members in members)
    place = np.zeros((*ici, 4), np.int64)
    for axis, axis_members in enumerate(members):
        shape = [1] * len(ici)
        shape[axis] = ici[axis]
        place = place + axis_members.reshape(*shape, 4)
    x, y, z, core = np.moveaxis(place, -1, 0)
    return np.ascontiguousarray(across_slices(rows[:, x, y, z, core], dcn, ici))


def across_slices(
    blocks: NDArray[_Entry], dcn: Sequence[int], ici: Sequence[int]
) -> NDArray[_Entry]:
    """Joins the meshes of slices to one: on every axis the part across slices is the outer one.

    Args:
        blocks: the mesh of each slice, one behind the other.
        dcn: the size of each axis across slices; slice i is at place i of that shape.
        ici: the size of each axis inside a slice.

    Returns:
        The mesh of all.

    Example:
        >>> across_slices(np.arange(8), (1, 2), (2, 2)).tolist()
        [[0, 1, 4, 5], [2, 3, 6, 7]]
    """
    outer_first = [place for axis in range(len(ici)) for place in (axis, axis + len(ici))]
    sizes = [outer * inner for outer, inner in zip(dcn, ici, strict=True)]
    return blocks.reshape(*dcn, *ici).transpose(outer_first).reshape(sizes)


# ------------------------------------------------------------ Says in words why a mesh is as it is

STRATEGY_WORDS = {
    "none": "",
    "line": "a line, both ways",
    "path": "a path through a block",
    "snake": "a ring through a block",
    "staggered ring": "a ring around a dim, row by row",
    "ring": "a ring around a dim",
    "whole dims": "whole dims, all at once",
    "switch": "a switch",
}
"""What `Network.strategy` says, in words."""


def _slow_crossings(assignment: Assignment) -> tuple[str, ...]:
    """A line for each axis that runs over DCN although one that gathers less does not."""
    shape, dcn_shape = assignment.mesh_shape, assignment.dcn_mesh_shape
    lines: list[str] = []
    for axis, (size, outer) in enumerate(zip(shape, dcn_shape, strict=True)):
        modest = [
            number
            for number, weight in enumerate(assignment.weights)
            if weight < assignment.weights[axis] and shape[number] > 1 and dcn_shape[number] == 1
        ]
        if outer == 1 or not modest:
            continue
        slow, cheap = assignment.axis_names[axis], assignment.axis_names[modest[0]]
        lines.append(
            f"{slow}={size} runs over DCN, while {cheap}={shape[modest[0]]} gathers less and does "
            f"not{_cost_of_crossing(assignment, axis)}. Give the DCN part to {cheap}."
        )
    return tuple(lines)


def _cost_of_crossing(assignment: Assignment, axis: int) -> str:
    if assignment.network.dcn_links is None:
        return " (no figure of DCN is known)"
    span = assignment.spans[axis]
    inside = assignment.network.links(Span(span.sizes, span.strides, span.cores))
    fast = "" if math.isinf(inside) else f", {inside:.3g} inside a slice"
    return f": modelled {assignment.links[axis]:.3g} links{fast}"


def _score_line(assignment: Assignment) -> str:
    if math.isinf(assignment.score):
        return "score: nothing moves, no axis of more than one device has a weight"
    share = 100 * assignment.score / assignment.bound
    choices = f"{assignment.choices} choice{'' if assignment.choices == 1 else 's'} of parts"
    best = "the best of" if assignment.is_exact else "the best that was found among"
    return (
        f"score {assignment.score:.3g} links modelled, {share:.0f} % of the bound of "
        f"{assignment.bound:.3g}: {best} {choices}"
    )


def _axis_line(assignment: Assignment, axis: int) -> str:
    span, links = assignment.spans[axis], assignment.links[axis]
    name = f"{assignment.axis_names[axis]}={assignment.mesh_shape[axis]}"
    if span.num_devices == 1:
        return f"{name}: one device, nothing moves"
    strategy = STRATEGY_WORDS[assignment.network.strategy(span)]
    if span.num_chips == 1:
        strategy = "DCN" if span.slices > 1 else "the cores of a chip"
    elif max(span.strides) > 1:
        strategy += f"; {max(span.strides)} chips apart, so that groups share links"
    count = "link" if links == 1 else "links"
    rate = assignment.network.link_bytes_per_second
    speed = "" if rate is None else f" ({links * rate / 1e9:.3g} GB/s)"
    return f"{name} on {span}: {links:.3g} {count}{speed}, {strategy}"


def _runner_up_line(assignment: Assignment) -> str:
    runner_up = assignment.runner_up
    if runner_up is None:
        return "runner-up: none, every mesh of this shape has the same score"
    changes = [
        f"{name} has {theirs:.3g} instead of {mine:.3g}"
        for name, mine, theirs in zip(
            assignment.axis_names, assignment.links, runner_up.links, strict=True
        )
        if not math.isclose(mine, theirs, rel_tol=1e-9)
    ]
    return f"runner-up: {runner_up.score:.3g} links; there {', '.join(changes)}"


# -------------------------------------------------------------------------------------- Assignment


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
    def devices(self) -> DeviceArray:
        """The topology's Devices in the shape of the mesh."""
        return device_array(self.topology.devices, [self.topology.num_devices])[self._rows]

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
    def runner_up(self) -> RunnerUp | None:
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
        return (
            _score_line(self),
            *(_axis_line(self, axis) for axis in range(len(self.axis_names))),
            _runner_up_line(self),
            *(f"assumed: {line}" for line in self.topology.assumptions),
            *self.warnings,
        )

    @property
    def warnings(self) -> tuple[str, ...]:
        """Axes that run over DCN although others, which need less, do not; with what it costs."""
        return _slow_crossings(self)

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
    gathered = [weight * (1 - 1 / size) for size, weight in zip(mesh_shape, weights, strict=True)]
    seconds = sum(part / rate for part, rate in zip(gathered, links, strict=True) if part)
    return sum(gathered) / seconds if seconds else math.inf


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
    ici, dcn = _settle_shapes(topology, mesh_shape, dcn_mesh_shape)
    names = read_axis_names(axis_names, ici)
    shares = _read_weights(weights, names)
    links = Network.of(topology) if network is None else network
    search = _search_or_refuse(
        topology, links, ici, shares, contiguous_submeshes, allow_split_physical_axes
    )
    host = topology.chips_per_host if contiguous_submeshes else None
    chip = topology.chip.name if topology.chip else None
    walks, members = _mesh_chips(links, search.best, host, rings, chip)
    rows = _placed_rows(topology, members, dcn, slice_order)
    ids = topology.device_ids[rows]
    ids.flags.writeable = False
    runner_up = search.runner_up
    return Assignment(
        topology=topology,
        network=links,
        axis_names=names,
        ici_mesh_shape=ici,
        dcn_mesh_shape=dcn,
        weights=shares,
        spans=_across(search.best.spans, dcn),
        walks=walks,
        device_ids=ids,
        is_exact=search.is_exact,
        choices=search.choices,
        _rows=rows,
        _runner_up=_across(runner_up.spans, dcn) if runner_up else None,
    )


def _across(spans: tuple[Span, ...], dcn: tuple[int, ...]) -> tuple[Span, ...]:
    return tuple(replace(span, slices=outer) for span, outer in zip(spans, dcn, strict=True))


def _search_or_refuse(
    topology: Topology,
    network: Network,
    ici: tuple[int, ...],
    weights: tuple[float, ...],
    contiguous_submeshes: bool,
    allow_split: bool,
) -> SearchResult:
    """The best spans; TopologyError where no mesh fulfils the restrictions."""
    host = topology.chips_per_host if contiguous_submeshes and not network.switched else None
    table = span_table(network)
    search = search_spans(table, ici, weights, host=host, whole_dims=not allow_split)
    if search is not None:
        return search
    request = f"A mesh of {ici} on {topology!r} was asked for"
    if not allow_split:
        raise TopologyError(
            f"{request}, with allow_split_physical_axes=False. No choice of whole dims, of "
            f"{topology.shape} chips of {topology.devices_per_chip}, multiplies to those sizes. "
            "Pass allow_split_physical_axes=True, or sizes that are products of whole dims."
        )
    raise TopologyError(
        f"{request}, with contiguous_submeshes={contiguous_submeshes}. No mesh of that shape keeps "
        f"hosts of {topology.chips_per_host} chips together. "
        "Pass contiguous_submeshes=False, or sizes that the sizes of a host divide."
    )
