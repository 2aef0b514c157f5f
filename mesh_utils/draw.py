"""Drawings of a mesh on its chips, as text and as SVG.

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

Each chip is there once, with its place in the mesh: "3,1" is fsdp=3, tp=1. In a picture chips are
squares, x to the right and y downwards, the planes of z beside and below each other. A link is one
line for each axis that uses it, side by side in the colours of the axes, or a thin grey one if none
does:

    +---+     +---+
    |0,0|=====|0,1|     two axes use the link between the two chips
    +---+     +---+

Where a link leads out of the plane it is drawn at both ends, as a stub: straight for a dim that
wraps, with a dot at its end; slanted for z, from the upper right corner to the next plane, from the
lower left one to the plane before, with a dot where it wraps. A legend gives what each axis gets.
All of that is modelled: see network.py.

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

Of several slices the first is drawn; HybridMesh and `assign` lay all of them out alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import TypeAlias
from xml.sax.saxutils import escape, quoteattr

import numpy as np
from numpy.typing import NDArray

from mesh_utils.argument_types import argument_types
from mesh_utils.errors import MeshError
from mesh_utils.mesh import Axis, Mesh
from mesh_utils.network import AxisReport, Network, axis_reports, link_loads
from mesh_utils.span import axis_groups, find_span, mesh_places
from mesh_utils.topology import Topology, canonical

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
    links = np.argwhere(flags)
    starts, dims = links[:, :3], links[:, 3]
    ends = canonical(network.box, starts + np.eye(3, dtype=np.int64)[dims])
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
        axis: _links_of_groups(links, axis_groups(places, number))
        for number, axis in enumerate(mesh.axis_names)
    }


def _links_of_groups(network: Network, groups: IntArray) -> LinkFlags:
    """The links that the groups of one axis use, [groups, members, 5]."""
    there = slice_links(network)
    span = None if network.switched else find_span(network.shape, groups)
    if span is not None and network.strategy(span) == "whole dims":
        return there & (np.array(span.sizes) > 1)
    # A group has as many members in each slice that it touches as in every other one.
    touching = groups[(groups[..., 0] == 0).any(axis=1)]
    chips = touching[touching[..., 0] == 0][:, 1:4].reshape(len(touching), -1, 3)
    messages = np.concatenate([chips, np.roll(chips, -1, axis=1)], axis=2).reshape(-1, 6)
    # Many groups send the same messages over and over: those of the cores of a chip.
    pairs = np.unique(messages[(messages[:, :3] != messages[:, 3:]).any(axis=1)], axis=0)
    if network.switched or not pairs.size:
        return np.zeros_like(there)
    loads, _ = link_loads(network, pairs[:, :3], pairs[:, 3:], np.ones(len(pairs)))
    flags: LinkFlags = loads[..., 0] > 0
    # A message downwards is counted at the chip that sends it, which is the upper end of its link.
    downwards = np.argwhere(loads[..., 1] > 0)
    lower = canonical(network.box, downwards[:, :3] - np.eye(3, dtype=np.int64)[downwards[:, 3]])
    flags[lower[:, 0], lower[:, 1], lower[:, 2], downwards[:, 3]] = True
    return flags


# ----------------------------------------------------------------------------------------- Drawing

LabelArray: TypeAlias = NDArray[np.str_]
"""The label of each chip of a slice, [x, y, z]."""


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
        """The places in the mesh of the devices on each chip of the first slice, [x, y, z].

        "2,5" for the device at place (2, 5). Two devices of a chip that follow each other on one
        axis are "2,4-5", others "2,4 0,7".
        """
        topology, mesh = self.topology, self.mesh
        places = mesh_places(topology, mesh.device_ids).reshape(-1, 5)
        spots = np.indices(mesh.mesh_shape).reshape(mesh.ndim, -1).T
        # A device that the mesh does not have is at -1.
        at = np.full((*topology.shape, topology.devices_per_chip, mesh.ndim), -1, np.int64)
        first = places[:, 0] == 0
        at[tuple(places[first, 1:].T)] = spots[first]
        chips: list[list[list[int]]] = at.reshape(-1, *at.shape[3:]).tolist()
        return np.array([_label(devices) for devices in chips], np.str_).reshape(topology.shape)

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
        return _text_of_chips(self.labels, self.topology.torus_rank, width)

    @cached_property
    def scene(self) -> Scene:
        """The picture: its squares, lines and words."""
        return Scene(self)

    def svg(self) -> str:
        """Writes the picture as SVG.

        Returns:
            The file's text, the same for the same mesh. The links of an axis are one path in a
            group that names the axis (data-axis); of "none" are those that nobody uses.
        """
        return "\n".join(_svg_lines(self.scene)) + "\n"

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


def _label(devices: list[list[int]]) -> str:
    there = sorted(spot for spot in devices if spot[0] >= 0)
    if len(there) == 2:
        first, second = there
        steps = [b - a for a, b in zip(first, second, strict=True)]
        if sorted(map(abs, steps)) == [*(0,) * (len(steps) - 1), 1]:
            pairs = zip(first, steps, strict=True)
            return ",".join(f"{low}-{low + 1}" if step else str(low) for low, step in pairs)
    return " ".join(",".join(map(str, spot)) for spot in there)


# ------------------------------------------------ A mesh as a picture, in squares, lines and words

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


class Scene:
    """Where everything in the picture of a drawing stands, in pixels.

    Args:
        drawing: what is drawn.

    Attributes:
        title: the first line.
        width: of the picture.
        height: of the picture.
        side: of the square of a chip.
        font_size: of the label in it.
        strokes: the samples of the legend, and the links.
        words: everything written outside of chips.
    """

    def __init__(self, drawing: Drawing) -> None:
        self.drawing = drawing
        self.title = f"{drawing.topology.name}: {drawing.mesh.axes_text()}"
        longest = max(map(len, drawing.labels.reshape(-1).tolist()), default=1)
        self.side = min(max(longest * _CHARACTER + 8, 26.0), 60.0)
        self.font_size = min(10.0, (self.side - 6) / (longest * 0.62))
        x, y, z = drawing.network.shape
        # A switch joins GPUs in any order: rows of 8, which is no plane of a torus.
        self._row = min(x, 8) if drawing.network.switched else x
        down = -(-x // self._row) * y
        pitch = self.side + _GAP
        self._plane = (self._row * pitch + _GAP, down * pitch + _GAP + _HEAD)
        self._columns = min(max(int((_MAX_WIDTH - _MARGIN) // (self._plane[0] + _GAP)), 1), z)
        self.strokes: list[Stroke] = []
        self.words = [Words(_MARGIN, _MARGIN + 8, self.title, 15, bold=True)]
        self._top = _MARGIN + 8 + 1.4 * _LINE
        self._add_legend()
        if not drawing.network.switched:
            self._add_plane_words()
        self._add_links()
        # No picture is narrower than its words: a letter is 0.6 of its height.
        widest = max(len(line.text) * line.size * 0.61 + line.x for line in self.words)
        right = self._plane_corner(self._columns - 1)[0] + self._plane[0]
        self.width = round(max(right + _MARGIN, widest + _MARGIN))
        self.height = round(self._plane_corner(z - 1)[1] + self._plane[1] + _MARGIN)

    def corner(self, chip: Sequence[int]) -> tuple[float, float]:
        """The upper left corner of the square of a chip.

        Args:
            chip: its x, y and z.

        Returns:
            x and y in pixels.
        """
        x, y, z = chip
        left, top = self._plane_corner(z)
        pitch = self.side + _GAP
        y += x // self._row
        return left + _GAP + x % self._row * pitch, top + _HEAD + _GAP + y * pitch

    def _plane_corner(self, z: int) -> tuple[float, float]:
        wide, high = self._plane
        return (
            _MARGIN + (z % self._columns) * (wide + _GAP),
            self._top + (z // self._columns) * (high + _GAP / 2),
        )

    def _add_legend(self) -> None:
        """A line for each axis, then notes; what is below begins where they end."""
        drawing, network = self.drawing, self.drawing.network
        for axis, report in enumerate(drawing.reports):
            self.strokes.append(Stroke(axis, _MARGIN, self._top - 4, _MARGIN + 28, self._top - 4))
            self.words.append(Words(_MARGIN + 38, self._top, _legend_line(report)))
            self._top += _LINE
        names = ", ".join(str(axis) for axis in drawing.mesh.axis_names)
        notes = [f"In each square: {names}. Bandwidths are modelled, not measured."]
        if network.switched:
            notes.append("A switch joins these devices: no links are drawn.")
        else:
            notes.append("Grey links: no axis uses them. A stub with a dot: the link wraps.")
        if network.shape[2] > 1:
            notes.append("Slanted stubs lead to the next plane (up) and the one before (down).")
        if network.num_slices > 1:
            notes.append(f"Slice 0 of {network.num_slices}.")
        for line in notes:
            self.words.append(Words(_MARGIN, self._top, line, 11))
            self._top += 0.8 * _LINE

    def _add_plane_words(self) -> None:
        """The names of the planes, and the numbers of their rows and columns."""
        width, height, planes = self.drawing.network.shape
        middle = self.side / 2
        for z in range(planes):
            left, top = self._plane_corner(z)
            if planes > 1:
                self.words.append(Words(left, top + 12, f"z={z}", 11, bold=True))
            for x in range(width):
                at = self.corner((x, 0, z))[0] + middle
                name = str(x) if x else "x=0"
                self.words.append(Words(at, top + _HEAD + 4, name, 9, "middle"))
            for y in range(height):
                at = self.corner((0, y, z))[1] + middle + 12
                self.words.append(Words(left + 2, at, str(y) if y else "y=0", 9, "middle"))

    def _add_links(self) -> None:
        """The lines of every link, axis by axis; those that nobody uses first, below the others."""
        network, uses = self.drawing.network, list(self.drawing.uses.values())
        there = slice_links(network)
        shared = np.sum([there & flags for flags in uses], axis=0)
        lines = np.zeros(there.shape, np.int64)  # that a link has by now
        for axis, flags in [(UNUSED, shared == 0), *enumerate(uses)]:
            rows: list[list[int]] = np.column_stack(link_ends(network, there & flags)).tolist()
            for row in rows:
                start, end, dim = row[:3], row[3:6], row[6]
                link = (*start, dim)
                across = (lines[link] - (max(int(shared[link]), 1) - 1) / 2) * _STEP
                wraps = start[dim] == network.shape[dim] - 1
                self.strokes += self._link(axis, start, end, dim, wraps, float(across))
            lines += there & flags

    def _link(
        self,
        axis: int,
        start: Sequence[int],
        end: Sequence[int],
        dim: int,
        wraps: bool,
        across: float,
    ) -> list[Stroke]:
        """One line between two chips, or a stub at each of them."""
        side, half = self.side, self.side / 2
        (x, y), (to_x, to_y) = self.corner(start), self.corner(end)
        if dim == 0:
            x, y, to_y, reach = x + side, y + half + across, to_y + half + across, (0.4, 0.0)
        elif dim == 1:
            x, y, to_x, reach = x + half + across, y + side, to_x + half + across, (0.0, 0.4)
        else:
            # Parallel to each other: shifted along the other diagonal.
            shift, reach = across / 2**0.5, (0.42, -0.42)
            x, y, to_x, to_y = x + side + shift, y + shift, to_x + shift, to_y + side + shift
        if dim < 2 and not wraps:
            return [Stroke(axis, x, y, to_x, to_y)]
        right, down = reach[0] * _GAP, reach[1] * _GAP
        return [
            Stroke(axis, x, y, x + right, y + down, wraps),
            Stroke(axis, to_x, to_y, to_x - right, to_y - down, wraps),
        ]


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


# ------------------------------------------------------------------------- Writes a picture as SVG
#
# One file, with nothing outside of it, for light and for dark screens.
#
# Every colour is an attribute of its element, so that simple programs show it as well. Paper, ink
# and chips change with the screen, by a style sheet; the colours of the axes stand out from both.

_FONT = "ui-monospace, Menlo, Consolas, monospace"


def _svg_lines(scene: Scene) -> Iterator[str]:
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
        yield from _svg_axis(scene, axis)
    yield from _svg_chips(scene)
    yield f'<g class="ink" fill="{LIGHT["ink"]}" font-family="{_FONT}">'
    for words in scene.words:
        weight = ' font-weight="bold"' if words.bold else ""
        anchor = "" if words.anchor == "start" else f' text-anchor="{words.anchor}"'
        place = f'x="{_pixels(words.x)}" y="{_pixels(words.y)}" font-size="{_pixels(words.size)}"'
        yield f"<text {place}{weight}{anchor}>{escape(words.text)}</text>"
    yield "</g>"
    yield "</svg>"


def _svg_axis(scene: Scene, axis: int) -> Iterator[str]:
    names = scene.drawing.mesh.axis_names
    name, colour, width, radius = "none", UNUSED_COLOUR, 1, 1.2
    if axis != UNUSED:
        name, colour, width, radius = str(names[axis]), axis_colour(axis), 3, 1.6
    path, dots = "", list[str]()
    for stroke in scene.strokes:
        if stroke.axis == axis:
            end = _pixels(stroke.to_x), _pixels(stroke.to_y)
            path += f"M{_pixels(stroke.x)} {_pixels(stroke.y)}L{end[0]} {end[1]}"
            if stroke.dot:
                dots.append(f'<circle cx="{end[0]}" cy="{end[1]}" r="{radius}"/>')
    yield f'<g data-axis={quoteattr(name)} stroke="{colour}" fill="{colour}">'
    yield f'<path stroke-width="{width}" d="{path}"/>'
    yield from dots
    yield "</g>"


def _svg_chips(scene: Scene) -> Iterator[str]:
    labels = scene.drawing.labels
    z_first = [(x, y, z) for z, y, x in np.ndindex(labels.shape[::-1])]
    side = _pixels(scene.side)
    yield f'<g class="chip edge" fill="{LIGHT["chip"]}" stroke="{LIGHT["edge"]}">'
    for chip in z_first:
        x, y = map(_pixels, scene.corner(chip))
        place = f'x="{x}" y="{y}" width="{side}" height="{side}"'
        yield f'<rect {place} rx="3" data-chip="{",".join(map(str, chip))}"/>'
    yield "</g>"
    font = f'font-family="{_FONT}" font-size="{_pixels(scene.font_size)}" text-anchor="middle"'
    yield f'<g class="ink" fill="{LIGHT["ink"]}" {font}>'
    for chip in z_first:
        x, y = scene.corner(chip)
        middle, base = x + scene.side / 2, y + scene.side / 2 + 0.35 * scene.font_size
        label = escape(str(labels[chip]))
        yield f'<text x="{_pixels(middle)}" y="{_pixels(base)}">{label}</text>'
    yield "</g>"


def _pixels(number: float) -> str:
    return f"{number:.1f}".removesuffix(".0")


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

MAX_CHIPS = 512
"""Slices of so many chips are written out."""

_FEW = (8, 8, 4)
"""Chips of a larger slice that are written, in x, y and z."""

_DOTS = "..."


def _text_of_chips(labels: LabelArray, rank: int, width: int) -> str:
    """Planes beside each other as far as `width` allows, without a title in a torus of rank 2."""
    cell = max(len(str(labels.shape[0] - 1)), *map(len, labels.reshape(-1).tolist()))
    if rank == 0:
        return "\n".join(_rows_of_switch(labels.reshape(-1).tolist(), cell))
    few = labels.shape if labels.size <= MAX_CHIPS else _FEW
    columns, rows, levels = map(_written, labels.shape, few)
    planes = [[_DOTS] if z is None else _plane(labels, z, columns, rows, cell) for z in levels]
    if labels.shape[2] == 1 and rank == 2:
        return "\n".join(planes[0][1:])
    beside = max(width // (max(map(len, planes[0])) + 2), 1)
    groups = [planes[first : first + beside] for first in range(0, len(planes), beside)]
    return "\n\n".join("\n".join(_beside(group)) for group in groups)


def _rows_of_switch(labels: list[str], cell: int) -> Iterator[str]:
    """The chips that a switch joins, in rows of 8."""
    for first in range(0, len(labels), 8):
        row = " ".join(label.rjust(cell) for label in labels[first : first + 8])
        yield f"gpu {first}".ljust(8) + row


def _written(length: int, most: int) -> list[int | None]:
    """The places of a dim that are written: all, or so many, None for those left out."""
    if length <= most:
        return list(range(length))
    last = max((most - 1) // 4, 1)
    return [*range(most - 1 - last), None, *range(length - last, length)]


def _plane(
    labels: LabelArray, z: int, columns: list[int | None], rows: list[int | None], cell: int
) -> list[str]:
    head = len(f"y {labels.shape[1] - 1}") + 2
    numbers = [_DOTS if x is None else str(x).rjust(cell) for x in columns]
    lines = [f"z={z}", "x".rjust(head) + " " + " ".join(numbers)]
    for y in rows:
        if y is None:
            lines.append(f"  {_DOTS}")
            continue
        cells = [_DOTS if x is None else str(labels[x, y, z]).rjust(cell) for x in columns]
        lines.append(f"y {y}".ljust(head) + " " + " ".join(cells))
    return lines


def _beside(planes: list[list[str]]) -> Iterator[str]:
    """The lines of planes beside each other."""
    widths = [max(map(len, plane)) + 2 for plane in planes]
    for cells in zip_longest(*planes, fillvalue=""):
        yield "".join(map(str.ljust, cells, widths)).rstrip()
