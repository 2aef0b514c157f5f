"""Drawings of a mesh: one scene of boxes, lines and words, as text and as SVG.

Chips are squares, x to the right and y downwards, the planes of z beside and below each other. A
link is one line for each axis that uses it, side by side, or a thin grey one if none does:

    +---+     +---+
    |0,0|=====|0,1|     two axes use the link between the two chips
    +---+     +---+

Where a link leads out of the plane it is drawn at both ends, as a stub: straight for a dim that
wraps, with a dot at its end; slanted for z, from the upper right corner to the next plane, from the
lower left one to the plane before, with a dot where it wraps.

The links of a slice one by one, and which mesh axes use each of them.

An axis uses a link if its messages cross it. For an axis that is exactly whole dims ("whole dims"
in network.py) these are all links of those dims. For every other axis they are the messages from
each device to the next one along the axis, the last to the first: rings, snakes and lines. Messages
take the ways that network.py counts. XLA may order the members of a gather differently; the
chips stay the same.

    >>> from mesh_utils import Mesh, Topology
    >>> topology = Topology.parse("v5e:4x4")
    >>> uses = axis_links(topology, Mesh.arange((4, 4), ("dp", "tp")))
    >>> uses["tp"][0, 0, 0].tolist()  # chip (0, 0, 0): the links in x, y and z that begin there
    [True, False, False]

Drawing: a mesh on its chips, as text or SVG.

    >>> from mesh_utils import Topology, assign
    >>> best = assign(Topology.parse("v5e:4x4"), (4, 4), axis_names=("fsdp", "tp"))
    >>> drawing = draw_mesh(best.topology, best.mesh)
    >>> print(drawing.text())
        x   0   1   2   3
    y 0   0,0 0,1 1,0 1,1
    y 1   0,3 0,2 1,3 1,2
    y 2   3,0 3,1 2,0 2,1
    y 3   3,3 3,2 2,3 2,2
    >>> drawing.save("mesh.svg")  # doctest: +SKIP

Each chip is there once, with its place in the mesh: "3,1" is fsdp=3, tp=1. In the pictures each
link has the colours of the axes that use it (below), and a legend gives what each axis
gets. All of that is modelled: see network.py.

Of several slices the first is drawn; HybridMesh and `assign` lay all of them out alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TypeAlias
from xml.sax.saxutils import escape, quoteattr

import numpy as np
from numpy.typing import NDArray

from mesh_utils.argument_types import argument_types
from mesh_utils.errors import MeshError
from mesh_utils.mesh import Axis, Mesh
from mesh_utils.network import (
    AxisReport,
    Network,
    axis_groups,
    axis_reports,
    find_span,
    link_loads,
    mesh_places,
)
from mesh_utils.span import Shape3
from mesh_utils.topology import Box, Topology, canonical

__all__ = []


# ---------------------------------------------------------------- The colours of axes in a drawing
#
# Each stands out from white and from near black (a contrast of 3 to 1, which WCAG asks of
# graphics). The first four differ by 40 and all six by 20 in CIELAB, also for eyes without one of
# the three kinds of cones (simulated as Machado, Oliveira and Fernandes do, 2009). A test checks
# it.

AXIS_COLOURS = ("#0096c3", "#ff4b0f", "#8700ff", "#964b4b", "#c35aff", "#b41e78")
"""For the first axis, the second, ...; a seventh has the colour of the first again."""

UNUSED_COLOUR = "#9a9a9a"
"""Of links that no axis uses."""

LIGHT = {"paper": "#ffffff", "ink": "#1a1a1a", "chip": "#f1f1ee", "edge": "#8a8a8a"}
"""On a light screen, and wherever a program does not tell."""

DARK = {"paper": "#0d1117", "ink": "#e6edf3", "chip": "#21262d", "edge": "#8b949e"}
"""On a dark screen."""


def axis_colour(number: int) -> str:
    """The colour of an axis.

    Args:
        number: its place in the mesh, counted from 0.

    Returns:
        "#rrggbb".

    Example:
        >>> axis_colour(0) == axis_colour(6)
        True
    """
    return AXIS_COLOURS[number % len(AXIS_COLOURS)]


# -------------------------------------------------------------------- What is written at each chip
#
# The place in the mesh of the devices on it.

LabelArray: TypeAlias = NDArray[np.str_]
"""The label of each chip of a slice, [x, y, z]."""


def chip_labels(topology: Topology, mesh: Mesh) -> LabelArray:
    """Writes the coordinates of each chip of the first slice.

    Args:
        topology: the chips.
        mesh: a mesh of all of them.

    Returns:
        "2,5" for the device at place (2, 5) of the mesh. Two devices of a chip that follow each
        other on one axis are "2,4-5", others "2,4 0,7".

    Raises:
        MeshError: ids that are not in the topology.

    Example:
        >>> topology = Topology.parse("v5e:2x2")
        >>> chip_labels(topology, Mesh([0, 1, 3, 2], (4,)))[:, :, 0].tolist()
        [['0', '3'], ['1', '2']]
        >>> topology = Topology.parse("tpu7x:2x2x1")
        >>> chip_labels(topology, Mesh(range(8), (4, 2)))[0, 0, 0].item()
        '0,0-1'
    """
    places = mesh_places(topology, mesh.device_ids).reshape(-1, 5)
    spots = np.indices(mesh.mesh_shape).reshape(mesh.ndim, -1).T
    x, y, z = topology.shape
    # A device that the mesh does not have is at -1.
    at = np.full((x, y, z, topology.devices_per_chip, mesh.ndim), -1, np.int64)
    first = places[:, 0] == 0
    here = places[first]
    at[here[:, 1], here[:, 2], here[:, 3], here[:, 4]] = spots[first]
    chips: list[list[list[int]]] = at.reshape(x * y * z, topology.devices_per_chip, -1).tolist()
    return np.array([_label(devices) for devices in chips], np.str_).reshape(x, y, z)


def _label(devices: list[list[int]]) -> str:
    there = sorted(spot for spot in devices if spot[0] >= 0)
    if len(there) == 2:
        first, second = there
        steps = [b - a for a, b in zip(first, second, strict=True)]
        if sorted(map(abs, steps)) == [*(0,) * (len(steps) - 1), 1]:
            pairs = zip(first, steps, strict=True)
            return ",".join(f"{low}-{low + 1}" if step else str(low) for low, step in pairs)
    return " ".join(",".join(map(str, spot)) for spot in there)


# --------------------------- The links of a slice one by one, and which mesh axes use each of them

IntArray: TypeAlias = NDArray[np.int64]
LinkFlags: TypeAlias = NDArray[np.bool_]
"""A flag for the link in each dim that begins at each chip and leads upwards, [x, y, z, dim]."""


def slice_links(network: Network) -> LinkFlags:
    """Which links there are.

    Args:
        network: the links of a topology.

    Returns:
        Flags, [x, y, z, dim]: every link once, at the end from which it leads upwards; a wrap link
        begins at the last chip of its dim.

    Example:
        >>> from mesh_utils import Topology
        >>> int(slice_links(Network.of(Topology.parse("v5e:4x4"))).sum())
        24
    """
    there = np.zeros((*network.shape, 3), np.bool_)
    if network.switched:
        return there
    for dim, wraps in enumerate(network.wrap):
        part = [slice(None)] * 3
        if not wraps:
            part[dim] = slice(0, network.shape[dim] - 1)
        there[(*part, dim)] = True
    return there


def link_ends(network: Network, flags: LinkFlags) -> tuple[IntArray, IntArray, IntArray]:
    """The chips at both ends of some links.

    Args:
        network: the links of a topology.
        flags: which of them.

    Returns:
        The chip at which each begins, [links, 3]; the one to which it leads, [links, 3]; and its
        dim, [links].

    Example:
        >>> from mesh_utils import Topology
        >>> network = Network.of(Topology.parse("v5e:16x16"))
        >>> starts, ends, dims = link_ends(network, slice_links(network))
        >>> starts[-1].tolist(), ends[-1].tolist(), int(dims[-1])
        ([15, 15, 0], [15, 0, 0], 1)
    """
    found = np.argwhere(flags)
    starts, dims = found[:, :3], found[:, 3]
    box: Box = (network.shape, network.wrap, network.twist)
    ends = canonical(box, starts + np.eye(3, dtype=np.int64)[dims])
    return starts, ends, dims


def bisection_links(network: Network) -> int:
    """The links that a plane through the middle cuts: the fewest over all dims.

    Args:
        network: the links of a topology.

    Returns:
        Links between the two halves of a slice; 0 for one chip, and where a switch joins them.

    Example:
        >>> from mesh_utils import Topology
        >>> bisection_links(Network.of(Topology.parse("v5e:16x16")))
        32
    """
    starts, ends, _ = link_ends(network, slice_links(network))
    cuts = [
        int(((starts[:, dim] < size // 2) != (ends[:, dim] < size // 2)).sum())
        for dim, size in enumerate(network.shape)
        if size > 1
    ]
    return min(cuts, default=0)


def axis_links(
    topology: Topology, mesh: Mesh, network: Network | None = None
) -> dict[Axis, LinkFlags]:
    """The links of the first slice that each axis uses.

    Args:
        topology: the chips.
        mesh: a mesh of all of them.
        network: the links, where they are not `Network.of(topology)`.

    Returns:
        For each axis, in mesh order, flags of `slice_links`.

    Raises:
        MeshError: ids that are not in the topology, or a wrap that is not known.
    """
    links = Network.of(topology) if network is None else network
    places = mesh_places(topology, mesh.device_ids)
    return {
        axis: _used(links, axis_groups(places, number))
        for number, axis in enumerate(mesh.axis_names)
    }


def _used(network: Network, groups: IntArray) -> LinkFlags:
    """The links that the groups of one axis use, [groups, members, 5]."""
    there = slice_links(network)
    span = None if network.switched else find_span(network, groups)
    if span is not None and network.strategy(span) == "whole dims":
        return there & (np.array(span.sizes) > 1)
    in_first = groups[..., 0] == 0
    # A group has as many members in each slice that it touches as in every other one.
    touching = groups[in_first.any(axis=1)]
    chips = touching[touching[..., 0] == 0][:, 1:4].reshape(len(touching), -1, 3)
    starts = chips.reshape(-1, 3)
    ends = np.roll(chips, -1, axis=1).reshape(-1, 3)
    moved = (starts != ends).any(axis=1)
    if network.switched or not moved.any():
        return np.zeros_like(there)
    # Many groups send the same messages over and over: those of the cores of a chip.
    pairs = np.unique(np.concatenate([starts[moved], ends[moved]], axis=1), axis=0)
    loads, _ = link_loads(network, pairs[:, :3], pairs[:, 3:], np.ones(len(pairs)))
    used: LinkFlags = loads[..., 0] > 0
    # A message downwards is counted at the chip that sends it, which is the upper end of its link.
    sent = np.argwhere(loads[..., 1] > 0)
    box: Box = (network.shape, network.wrap, network.twist)
    lower = canonical(box, sent[:, :3] - np.eye(3, dtype=np.int64)[sent[:, 3]])
    used[lower[:, 0], lower[:, 1], lower[:, 2], sent[:, 3]] = True
    return used


# -------------------------------------------------- A mesh as a picture, in boxes, lines and words

UNUSED = -1
"""Stands for the axis of a link that no axis uses."""

_CHARACTER = 6.2
"""Width of a character of a label, in pixels."""
_GAP = 22.0
_STEP = 4.5
"""Between the lines of one link."""
_MARGIN = 24.0
_LINE = 20.0
_MAX_WIDTH = 1290.0
_HEAD = 22.0
"""Above a plane: its name and the numbers of its columns."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A chip: its place in the box, its square, and its label."""

    chip: Shape3
    x: float
    y: float
    side: float
    label: str


@dataclass(frozen=True, slots=True)
class Stroke:
    """A line from (x, y) to (to_x, to_y) in the colour of an axis; `dot` is at its end."""

    axis: int
    x: float
    y: float
    to_x: float
    to_y: float
    dot: bool = False


@dataclass(frozen=True, slots=True)
class Words:
    """Words at a place; `anchor` is "start", "middle" or "end"."""

    x: float
    y: float
    text: str
    size: float = 12.0
    anchor: str = "start"
    bold: bool = False


@dataclass(frozen=True)
class Scene:
    """All there is to draw.

    Attributes:
        width: of the picture, in pixels.
        height: of the picture, in pixels.
        title: what it shows.
        axis_names: the name of each axis.
        cells: the chips.
        strokes: the links, and the samples of the legend.
        words: everything written outside of chips.
        font_size: of the labels.
    """

    width: float
    height: float
    title: str
    axis_names: tuple[str, ...]
    cells: tuple[Cell, ...]
    strokes: tuple[Stroke, ...]
    words: tuple[Words, ...]
    font_size: float


def make_scene(
    network: Network,
    labels: LabelArray,
    uses: Sequence[LinkFlags],
    title: str,
    axis_names: Sequence[str],
    legend: Sequence[str],
    notes: Sequence[str],
) -> Scene:
    """Lays out a picture.

    Args:
        network: the links of a topology.
        labels: what to write at each chip, [x, y, z].
        uses: the links that each axis uses.
        title: the first line.
        axis_names: the name of each axis.
        legend: a line for each axis.
        notes: lines below the legend.

    Returns:
        The picture.
    """
    grid = _Grid.of(network, labels)
    strokes: list[Stroke] = []
    words = [Words(_MARGIN, _MARGIN + 8, title, 15, bold=True)]
    at = _MARGIN + 8 + 1.4 * _LINE
    for axis, line in enumerate(legend):
        strokes.append(Stroke(axis, _MARGIN, at - 4, _MARGIN + 28, at - 4))
        words.append(Words(_MARGIN + 38, at, line))
        at += _LINE
    for line in notes:
        words.append(Words(_MARGIN, at, line, 11))
        at += 0.8 * _LINE
    grid.top = at
    cells = [
        Cell((x, y, z), *grid.corner((x, y, z)), grid.side, labels[x, y, z].item())
        for z in range(labels.shape[2])
        for y in range(labels.shape[1])
        for x in range(labels.shape[0])
    ]
    words += grid.plane_words(network.switched)
    strokes += _link_strokes(network, grid, uses)
    # No picture is narrower than its words: a letter is 0.6 of its height.
    needed = max([len(line.text) * line.size * 0.61 + line.x for line in words], default=0)
    return Scene(
        width=round(max(grid.width, needed + _MARGIN)),
        height=round(grid.height),
        title=title,
        axis_names=tuple(axis_names),
        cells=tuple(cells),
        strokes=tuple(strokes),
        words=tuple(words),
        font_size=grid.font_size,
    )


@dataclass
class _Grid:
    """Where each chip is."""

    shape: Shape3
    side: float
    font_size: float
    columns: int
    rows_of: int = 0
    top: float = 0.0
    _size: tuple[float, float] = field(default=(0.0, 0.0))

    @classmethod
    def of(cls, network: Network, labels: LabelArray) -> _Grid:
        longest = max(map(len, labels.reshape(-1).tolist()), default=1)
        side = min(max(longest * _CHARACTER + 8, 26.0), 60.0)
        font_size = min(10.0, (side - 6) / (longest * 0.62))
        x, y, z = network.shape
        # A switch joins GPUs in any order: rows of 8, which is no plane of a torus.
        rows_of = 8 if network.switched else 0
        across = min(x, 8) if rows_of else x
        down = -(-x // 8) if rows_of else y
        size = (across * (side + _GAP) + _GAP, down * (side + _GAP) + _GAP + _HEAD)
        columns = min(max(int((_MAX_WIDTH - _MARGIN) // (size[0] + _GAP)), 1), z)
        return cls(network.shape, side, font_size, columns, rows_of, 0.0, size)

    def plane(self, z: int) -> tuple[float, float]:
        """The corner of a plane."""
        wide, high = self._size
        return (
            _MARGIN + (z % self.columns) * (wide + _GAP),
            self.top + (z // self.columns) * (high + _GAP / 2),
        )

    def corner(self, chip: Sequence[int]) -> tuple[float, float]:
        """The upper left corner of a chip's square."""
        x, y, z = chip
        if self.rows_of:
            x, y = x % self.rows_of, x // self.rows_of
        left, top = self.plane(z)
        pitch = self.side + _GAP
        return left + _GAP + x * pitch, top + _HEAD + _GAP + y * pitch

    @property
    def width(self) -> float:
        """Up to the right edge of the last plane."""
        return self.plane(self.columns - 1)[0] + self._size[0] + _MARGIN

    @property
    def height(self) -> float:
        """Down to the lower edge of the last plane."""
        return self.plane(self.shape[2] - 1)[1] + self._size[1] + _MARGIN

    def plane_words(self, switched: bool) -> list[Words]:
        """The names of the planes, and the numbers of their rows and columns."""
        words: list[Words] = []
        if switched:
            return words
        middle = self.side / 2
        for z in range(self.shape[2]):
            left, top = self.plane(z)
            if self.shape[2] > 1:
                words.append(Words(left, top + 12, f"z={z}", 11, bold=True))
            for x in range(self.shape[0]):
                name = f"x={x}" if x == 0 else str(x)
                at = self.corner((x, 0, z))[0] + middle
                words.append(Words(at, top + _HEAD + 4, name, 9, "middle"))
            for y in range(self.shape[1]):
                name = f"y={y}" if y == 0 else str(y)
                at = self.corner((0, y, z))[1] + middle + 12
                words.append(Words(left + 2, at, name, 9, "middle"))
        return words


def _link_strokes(network: Network, grid: _Grid, uses: Sequence[LinkFlags]) -> list[Stroke]:
    """The lines of every link, axis by axis; those that nobody uses first, below the others."""
    there = slice_links(network)
    unused = there.copy()
    for flags in uses:
        unused &= ~flags
    shared = np.sum([there & flags for flags in uses], axis=0)
    strokes: list[Stroke] = []
    placed = np.zeros(there.shape, np.int64)  # lines that a link has by now
    for axis, flags in [(UNUSED, unused), *enumerate(uses)]:
        shown = there & flags
        starts, ends, dims = link_ends(network, shown)
        rows: list[list[int]] = np.column_stack([starts, ends, dims]).tolist()
        for row in rows:
            start, end, dim = row[:3], row[3:6], row[6]
            link = (*start, dim)
            across = (placed[link] - (max(int(shared[link]), 1) - 1) / 2) * _STEP
            wraps = start[dim] == network.shape[dim] - 1
            strokes += _one_link(grid, axis, start, end, dim, wraps, float(across))
        placed += shown
    return strokes


def _one_link(
    grid: _Grid,
    axis: int,
    start: Sequence[int],
    end: Sequence[int],
    dim: int,
    wraps: bool,
    across: float,
) -> list[Stroke]:
    """One line between two chips, or a stub at each of them."""
    side, half = grid.side, grid.side / 2
    (x, y), (to_x, to_y) = grid.corner(start), grid.corner(end)
    if dim == 2:
        # Parallel to each other: shifted along the other diagonal.
        shift, reach = across / 2**0.5, 0.42 * _GAP
        a, b = x + side + shift, y + shift
        c, d = to_x + shift, to_y + side + shift
        return [
            Stroke(axis, a, b, a + reach, b - reach, wraps),
            Stroke(axis, c, d, c - reach, d + reach, wraps),
        ]
    if dim == 0:
        a, b = x + side, y + half + across
        c, d = to_x, to_y + half + across
        reach_x, reach_y = 0.4 * _GAP, 0.0
    else:
        a, b = x + half + across, y + side
        c, d = to_x + half + across, to_y
        reach_x, reach_y = 0.0, 0.4 * _GAP
    if not wraps:
        return [Stroke(axis, a, b, c, d)]
    return [
        Stroke(axis, a, b, a + reach_x, b + reach_y, True),
        Stroke(axis, c, d, c - reach_x, d - reach_y, True),
    ]


# ------------------------------------------------------------------------- Writes a picture as SVG
#
# One file, with nothing outside of it, for light and for dark screens.
#
# Every colour is an attribute of its element, so that simple programs show it as well. Paper, ink
# and chips change with the screen, by a style sheet; the colours of the axes stand out from both.

_FONT = "ui-monospace, Menlo, Consolas, monospace"


def svg_of_scene(scene: Scene) -> str:
    """Writes a picture.

    Args:
        scene: the picture.

    Returns:
        The file. The links of an axis are one path in a group that names the axis (data-axis); of
        "none" are those that nobody uses.
    """
    return "\n".join(_lines(scene)) + "\n"


def _lines(scene: Scene) -> Iterator[str]:
    size = f'width="{scene.width:g}" height="{scene.height:g}"'
    box = f'viewBox="0 0 {scene.width:g} {scene.height:g}"'
    yield f'<svg xmlns="http://www.w3.org/2000/svg" {size} {box} role="img">'
    yield f"<title>{escape(scene.title)}</title>"
    rules = "".join(
        f".{name}{{{'stroke' if name == 'edge' else 'fill'}:{DARK[name]}}}" for name in DARK
    )
    yield f"<style>@media (prefers-color-scheme: dark){{{rules}}}</style>"
    yield f'<rect class="paper" width="100%" height="100%" fill="{LIGHT["paper"]}"/>'
    for axis in dict.fromkeys(stroke.axis for stroke in scene.strokes):
        yield from _axis(scene, axis, [each for each in scene.strokes if each.axis == axis])
    yield from _chips(scene)
    yield f'<g class="ink" fill="{LIGHT["ink"]}" font-family="{_FONT}">'
    yield from map(_words, scene.words)
    yield "</g>"
    yield "</svg>"


def _axis(scene: Scene, axis: int, strokes: list[Stroke]) -> Iterator[str]:
    name = "none" if axis == UNUSED else scene.axis_names[axis]
    colour, width = (UNUSED_COLOUR, 1) if axis == UNUSED else (axis_colour(axis), 3)
    yield f'<g data-axis={quoteattr(name)} stroke="{colour}" fill="{colour}">'
    path = "".join(
        f"M{_number(each.x)} {_number(each.y)}L{_number(each.to_x)} {_number(each.to_y)}"
        for each in strokes
    )
    yield f'<path stroke-width="{width}" d="{path}"/>'
    for each in strokes:
        if each.dot:
            radius = 1.2 if axis == UNUSED else 1.6
            yield f'<circle cx="{_number(each.to_x)}" cy="{_number(each.to_y)}" r="{radius}"/>'
    yield "</g>"


def _chips(scene: Scene) -> Iterator[str]:
    yield f'<g class="chip edge" fill="{LIGHT["chip"]}" stroke="{LIGHT["edge"]}">'
    for cell in scene.cells:
        side = _number(cell.side)
        place = f'x="{_number(cell.x)}" y="{_number(cell.y)}" width="{side}" height="{side}"'
        yield f'<rect {place} rx="3" data-chip="{",".join(map(str, cell.chip))}"/>'
    yield "</g>"
    font = f'font-family="{_FONT}" font-size="{_number(scene.font_size)}" text-anchor="middle"'
    yield f'<g class="ink" fill="{LIGHT["ink"]}" {font}>'
    for cell in scene.cells:
        x, y = cell.x + cell.side / 2, cell.y + cell.side / 2 + 0.35 * scene.font_size
        yield f'<text x="{_number(x)}" y="{_number(y)}">{escape(cell.label)}</text>'
    yield "</g>"


def _words(words: Words) -> str:
    weight = ' font-weight="bold"' if words.bold else ""
    place = f'x="{_number(words.x)}" y="{_number(words.y)}" font-size="{_number(words.size)}"'
    anchor = "" if words.anchor == "start" else f' text-anchor="{words.anchor}"'
    return f"<text {place}{weight}{anchor}>{escape(words.text)}</text>"


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


# ---------------------------------------------------------------------------------- A mesh as text
#
# Planes of chips, each with its place in the mesh.
#
#     z=0            z=1
#         x   0   1      x   0   1
#     y 0   0,0 0,1  y 0   1,0 1,1
#
# Slices of more than 512 chips are abbreviated: the first chips and the last of a long dim are
# there, with dots in between.

Shown: TypeAlias = list[int | None]
"""The places of a dim that are written; None stands for those left out."""

MAX_CHIPS = 512
"""Slices of so many chips are written out."""

_FEW = (8, 8, 4)
"""Chips of a larger slice that are written, in x, y and z."""

_DOTS = "..."


def text_of_chips(labels: LabelArray, rank: int, width: int) -> str:
    """Writes the chips of a slice, plane by plane.

    Args:
        labels: what to write at each chip, [x, y, z].
        rank: 3 where planes are to be numbered, 2 where not, 0 where there is no torus.
        width: characters of a line; planes stand beside each other as far as it allows.

    Returns:
        The lines.

    Example:
        >>> import numpy as np
        >>> print(text_of_chips(np.array(["0", "1", "3", "2"]).reshape(2, 2, 1), 2, 80))
            x 0 1
        y 0   0 3
        y 1   1 2
    """
    cell = max(len(str(labels.shape[0] - 1)), *map(len, labels.reshape(-1).tolist()))
    if rank == 0:
        return "\n".join(_rows_of_switch(labels, cell))
    head = len(f"y {labels.shape[1] - 1}") + 2
    few = labels.shape if labels.size <= MAX_CHIPS else _FEW
    columns, rows, levels = (
        _shown(length, most) for length, most in zip(labels.shape, few, strict=True)
    )
    if labels.shape[2] == 1 and rank == 2:
        return "\n".join(_plane(labels, 0, columns, rows, cell, head))
    planes = [_titled(labels, z, columns, rows, cell, head) for z in levels]
    beside = max(width // (max(len(line) for line in planes[0]) + 2), 1)
    groups = [planes[first : first + beside] for first in range(0, len(planes), beside)]
    return "\n\n".join("\n".join(_beside(group)) for group in groups)


def _shown(length: int, most: int) -> Shown:
    """Which places of a dim are written: all, or so many, the dots counted."""
    if length <= most:
        return list(range(length))
    last = max((most - 1) // 4, 1)
    return [*range(most - 1 - last), None, *range(length - last, length)]


def _plane(
    labels: LabelArray, z: int, columns: Shown, rows: Shown, cell: int, head: int
) -> Iterator[str]:
    numbers = [_DOTS if x is None else str(x).rjust(cell) for x in columns]
    yield "x".rjust(head) + " " + " ".join(numbers)
    for y in rows:
        if y is None:
            yield f"  {_DOTS}"
            continue
        cells = [_DOTS if x is None else labels[x, y, z].item().rjust(cell) for x in columns]
        yield f"y {y}".ljust(head) + " " + " ".join(cells)


def _titled(
    labels: LabelArray, z: int | None, columns: Shown, rows: Shown, cell: int, head: int
) -> list[str]:
    if z is None:
        return [_DOTS]
    return [f"z={z}", *_plane(labels, z, columns, rows, cell, head)]


def _beside(planes: list[list[str]]) -> Iterator[str]:
    """The lines of planes beside each other."""
    height = max(map(len, planes))
    widths = [max(map(len, plane)) + 2 for plane in planes]
    for row in range(height):
        cells = [plane[row] if row < len(plane) else "" for plane in planes]
        line = "".join(text.ljust(wide) for text, wide in zip(cells, widths, strict=True))
        yield line.rstrip()


def _rows_of_switch(labels: LabelArray, cell: int) -> Iterator[str]:
    """The chips that a switch joins, in rows of 8."""
    chips = labels.reshape(-1)
    for first in range(0, len(chips), 8):
        row = " ".join(label.rjust(cell) for label in chips[first : first + 8].tolist())
        yield f"gpu {first}".ljust(8) + row


# ----------------------------------------------------------------------------------------- Drawing


@dataclass(frozen=True, eq=False)
class Drawing:
    """A mesh on its chips. Make one with `draw_mesh`.

    Attributes:
        topology: the chips.
        mesh: the mesh.
        network: the links.
        reports: what each axis gets.
    """

    topology: Topology
    mesh: Mesh
    network: Network
    reports: tuple[AxisReport, ...]

    @cached_property
    def labels(self) -> LabelArray:
        """What is written at each chip of the first slice, [x, y, z]."""
        return chip_labels(self.topology, self.mesh)

    @cached_property
    def uses(self) -> dict[Axis, LinkFlags]:
        """The links of the first slice that each axis uses, [x, y, z, dim]."""
        return axis_links(self.topology, self.mesh, self.network)

    def text(self, width: int = 100) -> str:
        """Writes the chips as text.

        Args:
            width: characters of a line.

        Returns:
            Lines, plane by plane; slices of more than 512 chips are abbreviated.
        """
        return text_of_chips(self.labels, self.topology.torus_rank, width)

    @cached_property
    def scene(self) -> Scene:
        """The picture: its boxes, lines and words."""
        return make_scene(
            self.network,
            self.labels,
            list(self.uses.values()),
            title=f"{self.topology.name}: {self.mesh.axes_text()}",
            axis_names=[str(axis) for axis in self.mesh.axis_names],
            legend=[_legend_line(report) for report in self.reports],
            notes=self._notes(),
        )

    def svg(self) -> str:
        """Writes the picture as SVG.

        Returns:
            The file's text, the same for the same mesh.
        """
        return svg_of_scene(self.scene)

    def save(self, path: str | Path) -> None:
        """Writes the picture to a file.

        Args:
            path: the file; it ends in .svg.

        Raises:
            MeshError: another ending.
            OSError: the file cannot be written.
        """
        file = Path(path)
        check_format(file)
        file.write_text(self.svg(), encoding="utf-8")

    def _notes(self) -> list[str]:
        names = ", ".join(str(axis) for axis in self.mesh.axis_names)
        lines = [f"In each square: {names}. Bandwidths are modelled, not measured."]
        if self.network.switched:
            lines.append("A switch joins these devices: no links are drawn.")
        else:
            lines.append("Grey links: no axis uses them. A stub with a dot: the link wraps.")
        if self.network.shape[2] > 1:
            lines.append("Slanted stubs lead to the next plane (up) and the one before (down).")
        if self.network.num_slices > 1:
            lines.append(f"Slice 0 of {self.network.num_slices}.")
        return lines


@argument_types
def draw_mesh(topology: Topology, mesh: Mesh, network: Network | None = None) -> Drawing:
    """Draws a mesh.

    Args:
        topology: its chips.
        mesh: a mesh of all of them.
        network: the links, where they are not `Network.of(topology)`.

    Returns:
        The drawing: see `Drawing.text`, `svg` and `save`.

    Raises:
        MeshError: ids that are not in the topology, or a wrap that is not known.

    Example:
        >>> drawing = draw_mesh(Topology.parse("v5e:2x2"), Mesh.arange((2, 2), ("dp", "tp")))
        >>> drawing.svg().splitlines()[1]
        '<title>v5e:2x2: dp=2, tp=2</title>'
    """
    links = Network.of(topology) if network is None else network
    return Drawing(topology, mesh, links, axis_reports(topology, mesh, network=links))


def check_format(path: Path) -> None:
    """Refuses a file that is no drawing by its name.

    Args:
        path: the file.

    Raises:
        MeshError: it does not end in .svg.
    """
    if path.suffix.lower() != ".svg":
        raise MeshError(
            f"A drawing was asked for as {str(path)!r}. Drawings are SVG, which other programs "
            "turn into PNG. Pass a name that ends in .svg."
        )


def _legend_line(report: AxisReport) -> str:
    name = f"{report.axis}={report.size}"
    if report.size == 1:
        return f"{name}: one device, nothing moves"
    where = "no rows of chips" if report.span is None else str(report.span)[5:-1]
    links = report.links["all-gather"]
    rate = report.bytes_per_second()
    speed = f"{links:.3g} links" if rate is None else f"{rate / 1e9:.3g} GB/s"
    if math.isinf(links):
        speed = "on one chip"
    crosses = ", over DCN" if report.crosses_slices else ""
    share = f"{100 * report.fraction():.0f} % of the bound"
    return f"{name} on {where}: {speed} all-gather, {share} ({report.strategy}{crosses})"
